"""The samplers: each worker reads its own chunk, or all chunks beginning with its own."""

from __future__ import annotations

from typing import Any, Literal, get_args

from offbeat.data.sampler import ChunkSampler, Source

Length = Literal["shortest", "longest", "own"]


class DefDP(ChunkSampler):
    """Default data partitioning: worker n reads chunk n and nothing else.

    `source` is a data set, its length, or a `Partition`, as `LabelSkew` and `Dirichlet` make them.
    `length` says how long an epoch is where shares are unequal: "shortest" (default) as the
    smallest share on every worker, so larger ones use another part of theirs in each epoch;
    "longest" as the largest, so smaller ones are read again; "own" of another length on each
    worker (only for methods that allow for that).

    Rank and world size come from `torch.distributed`, else from RANK and WORLD_SIZE.
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
        return (self.rank,)

    @property
    def counts(self) -> tuple[int, ...]:
        return self.partition.sizes

    def __len__(self) -> int:
        sizes = self.partition.sizes
        return {"shortest": min(sizes), "longest": max(sizes), "own": sizes[self.rank]}[self.length]

    def _identity(self) -> dict[str, Any]:
        return {**super()._identity(), "length": self.length}


class SelDP(ChunkSampler):
    """SelSync's data partitioning: worker n reads all chunks in circular order, from chunk n on.

    In every iteration the workers read different samples, as all follow one circle at different
    places (chunks must hold a batch at least). An epoch is N times as long as with `DefDP`, and
    each worker needs all data. A chunk is shuffled when its turn comes: each worker shuffles all
    data once per epoch.

    `source` and the other parameters are those of `DefDP`. Source: SelSync (Tyagi, Swamy).
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
        return tuple((self.rank + i) % self.world_size for i in range(self.world_size))

    @property
    def counts(self) -> tuple[int, ...]:
        return (len(self),) * self.world_size

    def __len__(self) -> int:
        return self.partition.samples
