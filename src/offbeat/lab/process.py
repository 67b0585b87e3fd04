"""Interpreters of the lab: how they start, and requests to the one that holds the network."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from offbeat.lab.channel import Channel
from offbeat.lab.errors import LabError

_CLOSE_LIMIT_S = 15.0

# Create the packages without their __init__, which may import numpy (threads) or pydantic.
_BOOT = """
import sys, types
sys.path[:] = {path!r}
for name, folder in {packages!r}:
    package = sys.modules[name] = types.ModuleType(name)
    package.__path__ = [folder]
from {package}.{module} import main
main(*{arguments!r})
"""


def isolated(module: str, *arguments: Any, argv: Sequence[str] = ()) -> list[str]:
    """Return the command that calls `main` of a module of this package in a small interpreter.

    Args:
        module: name of the module.
        arguments: arguments of `main`, as Python literals.
        argv: further words, which become `sys.argv[1:]`.
    """
    here = Path(__file__).resolve().parent
    code = _BOOT.format(
        path=[entry or os.getcwd() for entry in sys.path],  # noqa: PTH109 (text wanted)
        packages=[("offbeat", str(here.parent)), (__package__, str(here))],
        package=__package__,
        module=module,
        arguments=arguments,
    )
    return [sys.executable, "-I", "-S", "-c", code, *argv]


def require_linux() -> None:
    """Raise LabError on other systems, which lack namespaces and the end of orphans."""
    if sys.platform != "linux":
        raise LabError(f"the lab needs Linux (this is {sys.platform})")


class LabProcess:
    """Running process that holds a network. It ends with this object's process."""

    def __init__(self) -> None:
        require_linux()
        self._lock = threading.Lock()
        self._requests = 0
        self._channel, there = Channel.pair()
        try:
            self._process = subprocess.Popen(
                isolated("supervisor", there.fileno(), os.getpid()),
                stdin=subprocess.DEVNULL,
                pass_fds=[there.fileno()],
                start_new_session=True,
            )
        except OSError as error:
            self._channel.close()
            raise LabError(f"cannot start {sys.executable}: {error.strerror}") from error
        finally:
            there.close()

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def request(self, name: str, **arguments: Any) -> Any:
        """Call a method of the network and return its result; raise LabError if it fails."""
        with self._lock, suppress(OSError, EOFError):  # the process has ended
            self._requests += 1
            self._channel.send((self._requests, name, arguments))
            answer = self._channel.receive()
            while answer[0] != self._requests:  # of a request that Ctrl-C interrupted
                answer = self._channel.receive()
            if isinstance(answer[1], LabError):
                raise answer[1]
            return answer[1]
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)
        self.require_running()
        raise LabError("the lab's own process closed its socket")

    def require_running(self) -> None:
        """Raise LabError if the process has ended."""
        if (code := self._process.poll()) is not None:
            raise LabError(f"the lab's own process ended unexpectedly ({describe_exit(code)})")

    def close(self) -> None:
        """End the process, and with it the network. Further calls have no effect."""
        with suppress(OSError):  # it has ended, and an interrupted request is left
            self._channel.close()
        try:
            self._process.wait(_CLOSE_LIMIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def describe_exit(code: int) -> str:
    """Return "exited with code 3" or "was killed by SIGKILL" for an exit code of `subprocess`."""
    if code >= 0:
        return f"exited with code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"
