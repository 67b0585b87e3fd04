"""Creation of process groups of gloo: shared devices, and waits that can be given up.

A device is the thread and the listening socket of process groups on one interface.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from threading import get_ident
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from offbeat.core.transport.rendezvous import run_checked

THREADS = 2  # threads per device that run collectives of a group, as in torch's own groups


@contextmanager
def share_devices(
    group: dist.ProcessGroup | None, check: Callable[[], None] | None = None
) -> Iterator[None]:
    """Create groups of gloo in the block on the devices of `group`, a group of gloo. With None, and
    if torch does not provide the devices, each new group has its own.

    A device has a thread that reads and writes all connections of its groups, a listening socket
    and a poll object. Every group keeps its own connections. `torch.distributed.new_group` passes
    no options to gloo, so the class that it creates is replaced while the block runs.

    Args:
        group: group with the devices.
        check: called again and again while a group connects to its ranks; raises to give it up.
            gloo itself waits for a rank that has failed until the timeout. None: nothing is
            checked.
    """
    devices = [] if group is None else _devices_of(group)
    if not devices and check is None:
        yield
        return

    patched: Any = distributed_c10d
    own_class, thread = patched.ProcessGroupGloo, get_ident()

    class SharingGroup(own_class):
        """Group on the given devices; `new_group` creates it."""

        def __init__(self, store: Any, rank: int, size: int, timeout: timedelta, **more: Any):
            # `more` is `enable_reconfigure` since torch 2.14, False for groups of this block.
            if get_ident() != thread:  # a group that another thread creates meanwhile
                super().__init__(store, rank, size, timeout=timeout, **more)
                return
            if devices:
                options = own_class._Options()
                options._devices, options._threads = devices, THREADS * len(devices)
                options._timeout = timeout
                create = partial(super().__init__, store, rank, size, options)
            else:
                create = partial(super().__init__, store, rank, size, timeout=timeout, **more)
            run_checked(create, timeout.total_seconds(), check)

    patched.ProcessGroupGloo = SharingGroup
    try:
        yield
    finally:
        patched.ProcessGroupGloo = own_class


def _devices_of(group: dist.ProcessGroup) -> list[Any]:
    """Return the devices of a group; an empty list if torch does not provide them."""
    with suppress(AttributeError, RuntimeError, TypeError):
        backend: Any = group._get_backend(torch.device("cpu"))
        return list(backend.options._devices)
    return []
