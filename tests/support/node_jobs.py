"""Strategies between nodes of several ranks, with the equations of their replicas.

The reference trains every rank by itself. Gradients are averaged over the ranks of a replica, and
parameters over all ranks, so replicas count by their ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

import torch
from reference.training import (
    Clipping,
    Outer,
    Piece,
    Replica,
    average_gradients,
    bsp,
    delayed_sync,
    federated,
    local_sgd,
    merged,
    partial_sync,
    replicas,
    selective,
)
from torch import Tensor

from offbeat import (
    BSP,
    WFBP,
    DeAR,
    DeFT,
    DiLoCo,
    DreamDDP,
    FedAvg,
    LocalSGD,
    OuterSGD,
    PartialSync,
    SelSync,
    Strategy,
)
from offbeat.core.rules.select import draw_samples
from offbeat.profile import Link, Profile
from offbeat.strategies.equations import Changes, closing
from support.comparing import sets_of
from support.models import USUAL, Case, Loop, build_model, profile_of

PAIRS, UNEVEN = ((0, 1), (2, 3)), ((0, 1), (2, 3, 4))
ADAM, NORMED = Case("mlp", "adamw", "step"), Case("conv", "nesterov")


@dataclass
class Member(Replica):
    """A rank of a node: the first one computes the gradients of all and averages them."""

    node: list[Replica] = field(default_factory=list)

    def gradients(self, iteration: int) -> None:
        if self is self.node[0]:
            for member in self.node:
                Replica.gradients(member, iteration)
            average_gradients(self.node)


def members(case: Case, nodes: Sequence[Sequence[int]], loop: Loop = USUAL) -> list[Replica]:
    plain = replicas(case, sum(map(len, nodes)), loop)
    world = [Member(case, r.rank, r.model, r.optimizer, r.scheduler, loop) for r in plain]
    for node in nodes:
        for rank in node:
            world[rank].node = [world[r] for r in node]
    return [*world]


class Shards(tuple[tuple[int, ...], ...]):
    """Nodes whose ranks hold shards of the model."""


def profile_in(case: Case, nodes: Sequence[Sequence[int]]) -> Profile:
    flat = profile_of(case, len(nodes))
    if isinstance(nodes, Shards):
        ranks, parameters = len(nodes[0]), dict(build_model(case).named_parameters())
        stored = {n: p.element_size() * padded(p, ranks) for n, p in parameters.items()}
        buckets = tuple(
            replace(bucket, size_bytes=sum(stored.get(n, 0) for n in bucket.tensors))
            for bucket in flat.buckets
            if stored.keys() & {*bucket.tensors}  # a tied weight belongs to its first module
        )
        return replace(flat, buckets=buckets, topology=tuple(map(len, nodes)), sharded=True)
    total = sum(bucket.size_bytes for bucket in flat.buckets)
    return replace(
        flat,
        topology=tuple(map(len, nodes)),
        inside=Link("inside", 0.01, total / (0.1 * len(flat.buckets))),
    )


def padded(tensor: Tensor, ranks: int) -> int:
    """Elements of the largest shard: that of rank 0, which is cut along the first dimension."""
    return -(-len(tensor) // ranks) * tensor[0].numel()


@dataclass(frozen=True)
class ShardPiece(Piece):
    """A slice of what each rank of a node holds: its shards with padding, laid end to end."""

    ranks: int = 1

    def elements(self, tensors: Sequence[Tensor]) -> Tensor:
        each = sum(padded(t, self.ranks) for t in tensors)
        run = range(each * self.part // self.parts, each * (self.part + self.width) // self.parts)
        found, begins = list[int](), accumulate((t.numel() for t in tensors), initial=0)
        starts = accumulate((padded(t, self.ranks) for t in tensors), initial=0)
        for t, begin, start in zip(tensors, begins, starts, strict=False):
            size = padded(t, self.ranks)
            found += [
                begin + rank * size + i
                for rank in range(self.ranks)
                for i in range(size)
                if start + i in run and rank * size + i < t.numel()
            ]
        return torch.tensor(found, dtype=torch.int64)


def sets_in(case: Case, nodes: Sequence[Sequence[int]], plan: Any, buffer: str = "param") -> Any:
    sets = sets_of(plan, profile_in(case, nodes), buffer)
    if not isinstance(nodes, Shards):
        return sets
    return [[ShardPiece(**vars(piece), ranks=len(nodes[0])) for piece in own] for own in sets]


# ---- the equations --------------------------------------------------------------------------

Equations = Callable[[list[Replica], Any, Sequence[Sequence[int]]], None]
T = range(7)  # two periods of all but one, and a part of the third


def gradients_everywhere(world: list[Replica], *_: Any) -> None:
    bsp(world, T, broadcast_buffers=True)


def sets_average(**settings: Any) -> Equations:
    """Sets of layers, as the plan for this profile has them."""

    def run(world: list[Replica], plan: Any, nodes: Sequence[Sequence[int]]) -> None:
        sets = sets_in(world[0].case, nodes, plan)
        partial_sync(world, T, sets=sets, average="before_update", **settings)

    return run


def stepped() -> Outer:
    """The outer step of DiLoCo."""
    usual = OuterSGD()
    return Outer(usual.lr, usual.momentum, usual.nesterov)


def late_sets(world: list[Replica], plan: Any, nodes: Sequence[Sequence[int]]) -> None:
    sets = sets_in(world[0].case, nodes, plan, "average")
    delayed_sync(world, T, sets=sets, delay=1, average="before_update")


def clipped(world: list[Replica], plan: Any, nodes: Sequence[Sequence[int]]) -> None:
    profile = profile_in(world[0].case, nodes)
    clip = Clipping(0.3, [bucket.tensors for bucket in profile.buckets], early=False)
    sets = sets_in(world[0].case, nodes, plan)
    partial_sync(world, T, sets=sets, average="before_update", clip=clip)


def drawn(world: list[Replica], _: Any, nodes: Sequence[Sequence[int]]) -> None:
    def weights(done: int) -> list[float]:
        by_replica = draw_samples((3.0, 1.0), 0.5, 0, done)
        return [by_replica[i] for i, node in enumerate(nodes) for _ in node]

    federated(world, T, local_steps=[3] * len(world), weights=weights)


def selected(lag: int) -> Equations:
    def run(world: list[Replica], plan: Any, _: Any) -> None:
        [vote] = plan.votes
        changes = Changes("norm", 25, vote.arg("weight"))
        everything = Piece(tuple(profile_names(world[0].case)))
        selective(
            world, T, pieces=[everything], forced=[()], change=changes.change, delta=0.15, lag=lag,
            aggregate="parameters",
        )  # fmt: skip

    return run


def profile_names(case: Case) -> list[str]:
    return [name for bucket in profile_of(case, 2).buckets for name in bucket.tensors]


def windows(world: list[Replica], plan: Any, _: Any) -> None:
    merged(world, T, closing(plan))


DIFFERENT: dict[str, tuple[Strategy, Equations]] = {
    "wfbp": (WFBP(), gradients_everywhere),
    "bsp": (BSP(), gradients_everywhere),
    "halves": (DeAR(), gradients_everywhere),
    "deft": (DeFT(forward=1, backward=1), windows),
    "dreamddp": (DreamDDP(period=3), sets_average()),
    "dreamddp whole layers": (
        DreamDDP(period=3, average="before_update", fill=False, split=False),
        sets_average(),
    ),
    "dreamddp clipped": (DreamDDP(period=3, clip=0.3), clipped),
    "dreamddp delayed": (DreamDDP(period=3, due="delayed", average="before_update"), late_sets),
    "partial": (
        PartialSync(period=2, average="before_update", state="averaged"),
        sets_average(state="averaged"),
    ),
    "local sgd": (LocalSGD(period=3), lambda world, *_: local_sgd(world, T, period=3)),
    "local sgd reset": (
        LocalSGD(period=3, state="reset"),
        lambda world, *_: local_sgd(world, T, period=3, state="reset"),
    ),
    "post-local sgd": (
        LocalSGD(period=3, warmup=2),
        lambda world, *_: local_sgd(world, T, period=3, warmup=2),
    ),
    "diloco": (
        DiLoCo(period=3, fragments=1),
        lambda world, *_: local_sgd(world, T, period=3, outer=stepped()),
    ),
    "fedavg": (FedAvg(local_steps=3), lambda world, *_: local_sgd(world, T, period=3)),
    "selsync": (SelSync(delta=0.15), selected(0)),
    "selsync late": (SelSync(delta=0.15, vote_lag=1), selected(1)),
}
DRAWN = {"fedavg drawn": (FedAvg(local_steps=3, samples=(3, 1), fraction=0.5), drawn)}
STRATEGIES = DIFFERENT | DRAWN
