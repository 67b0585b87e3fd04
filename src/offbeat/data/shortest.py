"""Batches for loops in which ranks have data of unlike lengths."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sized
from itertools import islice
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist

from offbeat.core.transport.control import Control
from offbeat.data.numbers import require_positive

Batch = TypeVar("Batch")
UNSIZED = -1


class Joined(Generic[Batch]):
    """The batches of a loader, for as long as every rank has one; see `join`."""

    def __init__(self, loader: Iterable[Batch], timeout_s: float):
        require_positive("timeout_s", timeout_s)
        self.loader, self._timeout_s = loader, timeout_s
        self._control: Control | None = None

    def __iter__(self) -> Iterator[Batch]:
        if not dist.is_initialized() or dist.get_world_size() == 1:
            yield from self.loader
            return
        control = self._control = self._control or Control(self._timeout_s)
        own = _length(self.loader)
        lengths = control.gather(own)
        if UNSIZED in lengths:
            yield from self._together(control)
        else:
            yield from self._so_many(min(lengths), own)

    def _so_many(self, count: int, own: int) -> Iterator[Batch]:
        """Nothing is sent: all know how many there are."""
        given = 0
        for batch in islice(self.loader, count):
            given += 1
            yield batch
        if given < count:
            raise RuntimeError(
                f"loader ({type(self.loader).__name__}) must have as many batches as its length "
                f"says ({own}), but ended after {given}; give it a true __len__, or none"
            )

    def _together(self, control: Control) -> Iterator[Batch]:
        """One ahead: whether all have another batch is asked while this one is trained on."""
        batches = iter(self.loader)
        batch, answer = _next(batches, control)
        while True:
            work, all_have = answer
            with control.together("waiting for the others' next batch"):
                work.wait()
            if not all_have.item():
                return
            following = _next(batches, control)
            yield batch
            batch, answer = following


def _length(loader: Iterable[Any]) -> int:
    """How many batches it says it has. A DataLoader over a stream has `__len__`, which raises."""
    try:
        return len(loader) if isinstance(loader, Sized) else UNSIZED
    except TypeError:
        return UNSIZED


def _next(batches: Iterator[Any], control: Control) -> tuple[Any, tuple[Any, torch.Tensor]]:
    """Our next batch, and the question whether all have one."""
    batch, has = None, torch.ones(1, dtype=torch.uint8, device="cpu")
    try:
        batch = next(batches)
    except StopIteration:
        has.zero_()
    work = dist.all_reduce(has, op=dist.ReduceOp.MIN, group=control.group, async_op=True)
    return batch, (work, has)


def join(loader: Iterable[Batch], *, timeout_s: float = 120.0) -> Joined[Batch]:
    """The batches of `loader`, on every rank as many as the rank with the fewest has.

    For data that is not equally long everywhere: without it the longer ranks would wait in vain.
    Make it once, before the epochs, and iterate on all ranks together; what the longer ranks have
    left over is not used in this epoch. Loaders with a length agree once per epoch. Those without
    say in one byte per iteration, one iteration ahead, whether they have another batch.
    RuntimeError after `timeout_s` without a rank that was waited for, naming it.
    """
    return Joined(loader, timeout_s)
