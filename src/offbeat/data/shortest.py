"""Batches for loops on ranks with data of different lengths."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sized
from itertools import islice
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist

from offbeat.core.transport.control import Control
from offbeat.data.numbers import require_positive
from offbeat.data.place import require_no_servers
from offbeat.data.samplers import ChunkSampler

Batch = TypeVar("Batch")
UNSIZED = -1


class Joined(Generic[Batch]):
    """Batches of a loader while every rank has one; see `join`."""

    def __init__(self, loader: Iterable[Batch], timeout_s: float):
        require_positive("timeout_s", timeout_s)
        self.loader: Iterable[Batch] = loader
        self._timeout_s = timeout_s
        self._control: Control | None = None

    def __iter__(self) -> Iterator[Batch]:
        if not dist.is_initialized() or dist.get_world_size() == 1:
            yield from self.loader
            return
        require_no_servers("offbeat.join")
        control = self._control = self._control or Control(self._timeout_s)
        own = _length(self.loader)
        lengths = control.gather(own)
        if UNSIZED in lengths:
            yield from self._iterate_unsized(control)
        else:
            yield from self._iterate_counted(min(lengths), own)

    def _iterate_counted(self, count: int, own: int) -> Iterator[Batch]:
        """Yield `count` batches without communication, because all ranks have exchanged their
        lengths.
        """
        given = 0
        for batch in islice(self.loader, count):
            given += 1
            yield batch
        if given < count:
            raise RuntimeError(
                f"loader ({type(self.loader).__name__}) must have as many batches as its length "
                f"says ({own}), but ended after {given}; give it a true __len__, or none"
            )

    def _iterate_unsized(self, control: Control) -> Iterator[Batch]:
        """Yield batches, while a reduction one batch ahead tests whether all ranks have another
        batch.
        """
        batches = iter(self.loader)
        batch, answer = _request_next(batches, control)
        while True:
            work, all_have = answer
            with control.collective("waiting for the others' next batch"):
                work.wait()
            if not all_have.item():
                return
            following = _request_next(batches, control)
            yield batch
            batch, answer = following


def _length(loader: Iterable[Any]) -> int:
    """Return the number of batches, or UNSIZED. A DataLoader over a stream has a `__len__` that
    raises, and that of one whose sampler resumes within an epoch counts the whole epoch.
    """
    # A DataLoader with a batch sampler has a sampler of its own, which is not used.
    batches = getattr(loader, "batch_sampler", None)
    batches = loader if batches is None else batches
    sampler, size = (getattr(batches, name, None) for name in ("sampler", "batch_size"))
    if isinstance(sampler, ChunkSampler) and sampler.resumes:
        if size is None:
            return UNSIZED
        whole, rest = divmod(sampler.samples_left, size)
        return whole + (rest > 0 and not getattr(batches, "drop_last", False))
    try:
        return len(loader) if isinstance(loader, Sized) else UNSIZED
    except TypeError:
        return UNSIZED


def _request_next(batches: Iterator[Any], control: Control) -> tuple[Any, tuple[Any, torch.Tensor]]:
    """Return the next batch, and a pending reduction that is 1 if all ranks have a batch."""
    batch, has = None, torch.ones(1, dtype=torch.uint8, device="cpu")
    try:
        batch = next(batches)
    except StopIteration:
        has.zero_()
    work = dist.all_reduce(has, op=dist.ReduceOp.MIN, group=control.group, async_op=True)
    return batch, (work, has)


def join(loader: Iterable[Batch], *, timeout_s: float = 120.0) -> Joined[Batch]:
    """Return the batches of `loader`, on every rank as many as the rank with the fewest has.

    Needed if ranks have data of different lengths: otherwise ranks with more batches wait forever.
    Create it once before the epochs and iterate on all ranks together. Remaining batches of longer
    ranks are not used in the epoch. Ranks whose loaders have a length compare them once per epoch.
    Without lengths, each rank sends one byte per iteration, one iteration ahead.

    Args:
        loader: batches of this rank.
        timeout_s: seconds to wait for another rank.

    Raises:
        RuntimeError: a rank was missing for `timeout_s` seconds; the message names it. Raised
            during iteration.
        ValueError: the job has servers. Raised during iteration.
    """
    return Joined(loader, timeout_s)
