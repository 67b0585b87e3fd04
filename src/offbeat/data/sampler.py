"""Base class of the samplers: order of the samples in each epoch, and resumable position."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sized
from itertools import cycle
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Sampler

from offbeat.data.chunks import Chunks
from offbeat.data.numbers import require_count
from offbeat.data.partition import Partition
from offbeat.data.place import place

Source = int | Sized | Partition


class ChunkSampler(Sampler[int], ABC):
    """Sampler that reads the shares of a partition one after the other.

    The order within a chunk is random in each epoch. The order depends on seed, epoch and chunk,
    not on the rank.

    Attributes:
        rank: rank of this worker.
        world_size: number of workers.
        partition: shares of the workers.
        seed: seed of the order.
        shuffle: whether the order is random; otherwise ascending.
        epoch: number of the current epoch.
    """

    def __init__(
        self,
        source: Source,
        rank: int | None,
        world_size: int | None,
        seed: int,
        shuffle: bool,
    ):
        require_count("seed", seed, least=0)
        if isinstance(source, Partition):
            if rank is not None and world_size is None:
                world_size = source.workers
            self.rank, self.world_size = place(rank, world_size)
            _require_share_each(source, self.world_size)
            self.partition = source
        else:
            self.rank, self.world_size = place(rank, world_size)
            self.partition = Chunks(shuffle=shuffle).partition(source, self.world_size, seed=seed)
        self.seed, self.shuffle = seed, shuffle
        self.epoch = 0
        self._position = 0  # samples of this epoch that have been yielded
        self._start = 0  # position at which the next iteration begins

    @property
    @abstractmethod
    def reads(self) -> tuple[int, ...]:
        """Return the chunks in the order in which this worker reads them."""

    @property
    @abstractmethod
    def counts(self) -> tuple[int, ...]:
        """Return the number of different samples that each worker reads, the weights of a federated
        average.
        """

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of samples of this worker in an epoch."""

    def __iter__(self) -> Iterator[int]:
        """Yield the sample numbers of the epoch, from its start or from a loaded position."""
        self._position, self._start = self._start, 0
        for sample in self._samples(self._position):
            self._position += 1
            yield sample

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, which determines the order. A new epoch starts at its first sample."""
        require_count("epoch", epoch, least=0)
        if epoch != self.epoch:
            self.epoch, self._position, self._start = epoch, 0, 0

    def state_dict(self, used: int | None = None) -> dict[str, Any]:
        """Return the position in the epoch.

        Args:
            used: samples of this epoch that the loop has used; by default all that were yielded.
                Required for a DataLoader with worker processes, which reads ahead of the loop.
        """
        position = self._position if used is None else used
        require_count("used", position, least=0)
        self._require_within(position)
        return {"epoch": self.epoch, "position": position, **self._identity()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at the position of `state_dict`. If epochs are equally long on all workers, the
        state of any worker is valid.

        Raises:
            ValueError: the state belongs to other data, another partition, seed or number of
                workers.
        """
        for name, mine in self._identity().items():
            if state.get(name) != mine:
                raise ValueError(
                    f"{name} of the sampler's state ({state.get(name)!r}) must be this sampler's "
                    f"({mine!r}); make it with the settings and data that it had"
                )
        self._require_within(state["position"])
        self.epoch = state["epoch"]
        self._position = self._start = state["position"]

    def _identity(self) -> dict[str, Any]:
        """Return the properties that must be equal in a loaded state."""
        return {
            "sampler": type(self).__name__,
            "world_size": self.world_size,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "partition": self.partition.digest,
        }

    def _require_within(self, position: int) -> None:
        if position > len(self):
            raise ValueError(
                f"position ({position}) must be at most the epoch's {len(self)} samples; "
                "count from the beginning of the epoch"
            )

    def _samples(self, start: int) -> Iterator[int]:
        """Yield the samples of the epoch from position `start`, without reading earlier chunks."""
        begin = 0
        for chunk in cycle(self.reads):
            end = min(begin + self.partition.sizes[chunk], len(self))
            if end > start:
                yield from self._order(chunk)[max(start - begin, 0) : end - begin].tolist()
            begin = end
            if begin == len(self):
                return

    def _order(self, chunk: int) -> NDArray[np.int64]:
        share = self.partition.shares[chunk]
        if not self.shuffle:
            return share
        return np.random.default_rng([self.seed, self.epoch, chunk]).permutation(share)


def _require_share_each(partition: Partition, world_size: int) -> None:
    if partition.workers != world_size:
        raise ValueError(
            f"partition ({partition.workers} shares) must have one share per worker (world_size "
            f"{world_size}); make it with workers={world_size}"
        )
