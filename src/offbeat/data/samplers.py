"""Samplers DefDP (each worker reads its own share) and SelDP (each worker reads all shares)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sized
from itertools import cycle
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Sampler

from offbeat.data.numbers import require_count
from offbeat.data.partition import Partition
from offbeat.data.place import place
from offbeat.data.splits import Chunks

Source = int | Sized | Partition
Length = Literal["shortest", "longest", "own"]


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

    rank: int
    world_size: int
    partition: Partition
    seed: int
    shuffle: bool
    epoch: int

    def __init__(
        self,
        source: Source,
        *,
        rank: int | None = None,
        world_size: int | None = None,
        seed: int = 0,
        shuffle: bool = True,
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

    @property
    def resumes(self) -> bool:
        """Return whether the next iteration begins within an epoch, so that it is shorter."""
        return self._start > 0

    @property
    def samples_left(self) -> int:
        """Return the number of samples of the next iteration."""
        return len(self) - self._start

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


class DefDP(ChunkSampler):
    """Default data partitioning: worker n reads chunk n and nothing else.

    Rank and world size are those of `torch.distributed`, or else of the variables RANK and
    WORLD_SIZE.

    Args:
        source: data set, its length, or a `Partition`, as `LabelSkew` and `Dirichlet` return it.
        rank: rank of this worker.
        world_size: number of workers.
        seed: seed of the order.
        shuffle: whether the order is random in each epoch.
        length: length of an epoch if shares have different sizes. "shortest": size of the smallest
            share on every worker; larger shares contribute other samples in each epoch. "longest":
            size of the largest share; smaller shares are repeated. "own": a different length on
            each worker, for methods that support it.
    """

    def __init__(
        self,
        source: Source,
        *,
        rank: int | None = None,
        world_size: int | None = None,
        seed: int = 0,
        shuffle: bool = True,
        length: Length = "shortest",
    ):
        super().__init__(source, rank=rank, world_size=world_size, seed=seed, shuffle=shuffle)
        if length not in get_args(Length):
            raise ValueError(f"length ({length!r}) must be one of {', '.join(get_args(Length))}")
        self.length = length

    @property
    def reads(self) -> tuple[int, ...]:
        """Return the workers whose chunks this worker reads, in order."""
        return (self.rank,)

    @property
    def counts(self) -> tuple[int, ...]:
        """Return the number of samples per epoch of each worker."""
        return self.partition.sizes

    def __len__(self) -> int:
        sizes = self.partition.sizes
        return {"shortest": min(sizes), "longest": max(sizes), "own": sizes[self.rank]}[self.length]

    def _identity(self) -> dict[str, Any]:
        return {**super()._identity(), "length": self.length}


class SelDP(ChunkSampler):
    """Data partitioning of SelSync: worker n reads all chunks in circular order, starting with
    chunk n.

    Workers read different samples in each iteration, because they follow the same circle at
    different positions; chunks must contain at least one batch. An epoch is N times as long as with
    `DefDP`, and each worker needs all data. A chunk is shuffled when it is read.

    Args:
        source: data set, its length, or a `Partition`, as `LabelSkew` and `Dirichlet` return it.
        rank: rank of this worker.
        world_size: number of workers.
        seed: seed of the order.
        shuffle: whether each chunk is shuffled when it is read.

    Source: SelSync (Tyagi, Swamy).
    """

    @property
    def reads(self) -> tuple[int, ...]:
        """Return the workers whose chunks this worker reads, in order."""
        return tuple((self.rank + i) % self.world_size for i in range(self.world_size))

    @property
    def counts(self) -> tuple[int, ...]:
        """Return the number of samples per epoch of each worker."""
        return (len(self),) * self.world_size

    def __len__(self) -> int:
        return self.partition.samples


def _require_share_each(partition: Partition, world_size: int) -> None:
    if partition.workers != world_size:
        raise ValueError(
            f"partition ({partition.workers} shares) must have one share per worker (world_size "
            f"{world_size}); make it with workers={world_size}"
        )
