"""Batch sampler of a job whose members change."""

from __future__ import annotations

from collections.abc import Iterator, Sized
from typing import Any

from torch.utils.data import Sampler

from offbeat.data.sample_stream import SampleStream


class MemberSampler(Sampler[list[int]]):
    """Batches of a job whose members change: together the members read each sample once per pass.

    The samples that a failed member has read since the last average are dealt again, because its
    training with them was lost. If members change in the last round of the job, fewer samples than
    members remain unread. Use it as `DataLoader(dataset, batch_sampler=sampler)`, with one batch
    per iteration and without worker processes, which would read ahead.

    Args:
        source: data set, or its number of samples.
        batch_size: samples of a batch of one member.
        model: prepared model, with `members`.
        passes: number of passes over the data set. One iteration over the sampler covers all.
        seed: seed of the order.
        shuffle: whether the order is random; otherwise ascending.

    Raises:
        ValueError: the members of the job do not change, or have other samplers.
    """

    def __init__(
        self,
        source: int | Sized,
        batch_size: int,
        model: Any,
        *,
        passes: int = 1,
        seed: int = 0,
        shuffle: bool = True,
    ):
        size = source if isinstance(source, int) else len(source)
        stream = SampleStream(size, batch_size, passes, seed, shuffle=shuffle)
        self._reader = model.read_samples(stream)

    def __iter__(self) -> Iterator[list[int]]:
        while (batch := self._reader.next_batch()) is not None:
            yield batch
