"""System calls that Python 3.11 lacks: namespaces, death signals (Linux only)."""

import ctypes
import os
from collections.abc import Callable

CLONE_NEWUSER = 0x10000000
CLONE_NEWNET = 0x40000000

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36

_libc = ctypes.CDLL(None, use_errno=True)


def unshare(flags: int) -> None:
    """Move this thread into new namespaces; OSError if the kernel refuses."""
    _call(_libc.unshare, flags)


def setns(fd: int, kind: int) -> None:
    """Move this thread into the namespace behind `fd`; OSError if the kernel refuses."""
    _call(_libc.setns, fd, kind)


def set_parent_death_signal(number: int) -> None:
    """Ask for a signal when the *thread* that started this process ends."""
    _call(_libc.prctl, _PR_SET_PDEATHSIG, number, 0, 0, 0)


def adopt_orphans() -> None:
    """Become the parent of all descendants whose own parent ends."""
    _call(_libc.prctl, _PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _call(function: Callable[..., int], *arguments: int) -> None:
    if function(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
