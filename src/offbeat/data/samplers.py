"""Samplers DefDP (each worker reads its own share) and SelDP (each worker reads all shares)."""

from __future__ import annotations

from typing import Any, Literal, get_args

from offbeat.data.sampler import ChunkSampler, Source

Length = Literal["shortest", "longest", "own"]


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
        super().__init__(source, rank, world_size, seed, shuffle)
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

    def __init__(
        self,
        source: Source,
        *,
        rank: int | None = None,
        world_size: int | None = None,
        seed: int = 0,
        shuffle: bool = True,
    ):
        super().__init__(source, rank, world_size, seed, shuffle)

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
