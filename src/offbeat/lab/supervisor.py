"""Process of a lab that holds its network: its namespaces, links and switch.

It is a new single-threaded interpreter, so that it may enter a user namespace and fork. When it
ends, or its owner for any reason, the kernel removes the network.
"""

import os
import signal
import socket
from typing import Any

from offbeat.lab import syscalls
from offbeat.lab.channel import Channel
from offbeat.lab.errors import LabError
from offbeat.lab.network import Network

_OWNER_CHANGED = signal.SIGUSR1


def main(fd: int, owner: int) -> None:
    """Answer the requests of the owner (a process id) until it closes the channel or ends.

    A request is (number, name of a method of `Network`, arguments), the first one the plan of the
    network. An answer is (number, result or LabError).
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # only the owner reacts to Ctrl-C in the terminal
    signal.signal(signal.SIGCHLD, _end_after_switch)
    # the signal also arrives if only a thread of the owner has ended
    signal.signal(_OWNER_CHANGED, lambda *_: os.getppid() == owner or os._exit(0))
    syscalls.set_parent_death_signal(_OWNER_CHANGED)
    channel, network = Channel(socket.socket(fileno=fd)), None
    while os.getppid() == owner:
        try:
            number, name, arguments = channel.receive()
        except EOFError:
            return
        result: Any
        try:
            if network is None:
                network = Network(**arguments)
                result = network.describe()
                # entering a user namespace has cleared it
                syscalls.set_parent_death_signal(_OWNER_CHANGED)
            else:
                result = getattr(network, name)(**arguments)
        except LabError as error:
            result = error
        except Exception as error:  # the owner reports the error, and this process continues
            result = LabError(f"{type(error).__name__}: {error}")
        try:
            channel.send((number, result))
        except OSError:  # the owner has ended
            return


def _end_after_switch(*_: object) -> None:
    os.write(2, b"offbeat lab: the switch between the hosts has ended\n")
    os._exit(1)
