"""Guard of one rank: starts its command on a host, and ends all that the command has started.

It is a small interpreter of its own, because a process with threads (torch, a notebook) may neither
enter a user namespace nor fork. It ends with its owner for any reason, and the rank's processes end
first:

* The guard adopts orphans, so no descendant can escape by a fork or a new session.
* The rank receives SIGKILL when the guard dies, even if SIGKILL ends the guard.

The guard's exit code is that of the rank, also a signal.
"""

import os
import resource
import signal
import sys
import time
from contextlib import suppress

from offbeat.lab import syscalls

_KILL = signal.SIGUSR2  # from the owner: SIGKILL for the rank and all its descendants
_OWNER_CHANGED = signal.SIGUSR1
_KILL_LIMIT_S = 10.0


def main(owner: int, namespace: tuple[int, int] | None) -> None:
    """Run the command in `sys.argv` until it ends or the owner (a process id) does."""
    if namespace is not None:
        syscalls.enter_namespace(*namespace)
    syscalls.adopt_orphans()
    syscalls.set_parent_death_signal(_OWNER_CHANGED)
    if os.getppid() != owner:
        os._exit(1)
    guard = os.getpid()
    rank = os.fork()
    if rank == 0:
        _execute(sys.argv[1:], guard)

    def on_signal(number: int, _: object) -> None:
        # the signal also arrives if only a thread of the owner has ended
        if number == _OWNER_CHANGED and os.getppid() == owner:
            return
        is_request = number == signal.SIGTERM
        with suppress(ProcessLookupError):
            # a rank that has just been forked has no process group yet
            send = os.killpg if is_request and os.getpgid(rank) == rank else os.kill
            send(rank, number if is_request else signal.SIGKILL)  # descendants follow its end

    numbers = (_OWNER_CHANGED, _KILL, signal.SIGTERM)
    for number in numbers:
        signal.signal(number, on_signal)
    ended, status = 0, 0
    while ended != rank:  # otherwise an adopted orphan
        ended, status = os.wait()
    for number in numbers:
        signal.signal(number, signal.SIG_IGN)  # another process can get the number of the rank
    _kill_descendants()
    _end_as(os.waitstatus_to_exitcode(status))


def _execute(argv: list[str], guard: int) -> None:
    """Execute the rank's command in the forked child. Never returns."""
    try:
        os.setsid()
        for number in (signal.SIGINT, signal.SIGPIPE, signal.SIGXFSZ):
            # the executed program would inherit ignored signals
            signal.signal(number, signal.SIG_DFL)
        syscalls.set_parent_death_signal(signal.SIGKILL)
        if os.getppid() != guard:
            os._exit(1)
        os.execvp(argv[0], argv)
    except BaseException as error:
        os.write(2, f"offbeat lab: cannot start {argv[0]!r}: {error}\n".encode())
    finally:
        os._exit(127)


def _kill_descendants() -> None:
    """Kill every descendant by SIGKILL, in any process group or session."""
    limit_s = time.monotonic() + _KILL_LIMIT_S
    with suppress(ChildProcessError):  # no child is left
        while time.monotonic() < limit_s:
            if os.waitpid(-1, os.WNOHANG)[0]:
                continue
            for child in _children():
                # a set-user-id program cannot be killed, but may end by itself
                with suppress(PermissionError, ProcessLookupError):
                    os.kill(child, signal.SIGKILL)
            time.sleep(0.002)


def _children() -> list[int]:
    """Return the process ids of the direct children, including adopted ones."""
    found, own = [], str(os.getpid())
    for entry in os.scandir("/proc"):  # pathlib would double the time of the imports
        if entry.name.isdigit():
            with suppress(OSError), open(f"{entry.path}/stat") as stat:  # noqa: PTH123
                if stat.read().rpartition(")")[2].split()[1] == own:
                    found.append(int(entry.name))
    return found


def _end_as(exit_code: int) -> None:
    """End this process with an exit code of `subprocess`."""
    if exit_code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the rank has written its core dump
        with suppress(OSError):  # SIGKILL has no handler
            signal.signal(-exit_code, signal.SIG_DFL)
        os.kill(os.getpid(), -exit_code)
    os._exit(exit_code if exit_code >= 0 else 128 - exit_code)
