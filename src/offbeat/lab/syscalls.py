"""System calls missing in Python 3.11: namespaces and death signals (Linux only)."""

import ctypes
import os
from collections.abc import Callable

CLONE_NEWUSER = 0x10000000
CLONE_NEWNET = 0x40000000

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36

_libc = ctypes.CDLL(None, use_errno=True)


def unshare(flags: int) -> None:
    """Move this thread into new namespaces; raise OSError if the kernel refuses."""
    _call(_libc.unshare, flags)


def setns(fd: int, kind: int) -> None:
    """Move this thread into the namespace of descriptor `fd`; raise OSError if the kernel
    refuses."""
    _call(_libc.setns, fd, kind)


def enter_namespace(holder: int, fd: int) -> None:
    """Move this process into the network namespace of a descriptor of another process, and into
    that process's user namespace."""
    net = os.open(f"/proc/{holder}/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
    user = f"/proc/{holder}/ns/user"
    if not os.path.samefile(user, "/proc/self/ns/user"):  # noqa: PTH121 (pathlib costs its import)
        setns(os.open(user, os.O_RDONLY | os.O_CLOEXEC), CLONE_NEWUSER)
    setns(net, CLONE_NEWNET)


def set_parent_death_signal(number: int) -> None:
    """Request a signal at the end of the *thread* that started this process."""
    _call(_libc.prctl, _PR_SET_PDEATHSIG, number, 0, 0, 0)


def adopt_orphans() -> None:
    """Make this process the parent of all descendants whose own parent ends."""
    _call(_libc.prctl, _PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _call(function: Callable[..., int], *arguments: int) -> None:
    if function(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
