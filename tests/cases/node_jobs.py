"""Strategies between nodes of several ranks, with the equations of their replicas.

The reference trains every rank by itself. Gradients are averaged over the ranks of a replica, and
parameters over all ranks, so replicas count by their ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from random import Random
from typing import Any

import torch
from oracle.quantized import quantized
from oracle.training import (
    Clipping,
    Outer,
    Piece,
    Replica,
    average_gradients,
    delayed_sync,
    federated,
    local_sgd,
    merged,
    on_time,
    partial_sync,
    replicas,
    selective,
)
from torch import Tensor

from cases.comparing import sets_of
from cases.models import USUAL, Case, Loop, build_model, profile_of
from offbeat import (
    WFBP,
    DeAR,
    DeFT,
    DiLoCo,
    DreamDDP,
    FedAvg,
    OuterSGD,
    PartialSync,
    SelSync,
    Strategy,
)
from offbeat.profile import Link, Profile
from offbeat.testing.equations import Changes, closing

PAIRS, UNEVEN = ((0, 1), (2, 3)), ((0, 1), (2, 3, 4))
ADAM, NORMED = Case("mlp", "adamw", "step"), Case("conv", "nesterov")
TIED, CODED = Case("tied", "nesterov"), Case("mlp", "sgd")


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
    flat, parameters = profile_of(case, len(nodes)), dict(build_model(case).named_parameters())
    # A tied weight belongs to its first module.
    own = tuple(bucket for bucket in flat.buckets if parameters.keys() & {*bucket.tensors})
    sizes = tuple(map(len, nodes))
    if isinstance(nodes, Shards):
        ranks = len(nodes[0])
        stored = {n: p.element_size() * padded(p, ranks) for n, p in parameters.items()}
        buckets = tuple(
            replace(bucket, size_bytes=sum(stored.get(n, 0) for n in bucket.tensors))
            for bucket in own
        )
        # Messages are smaller, and planners slice only what takes as long as compute.
        links = [replace(link, bytes_per_s=link.bytes_per_s / ranks) for link in flat.links]
        return replace(flat, buckets=buckets, links=tuple(links), topology=sizes, sharded=True)
    inside = Link("inside", 0.01, sum(b.size_bytes for b in own) / (0.1 * len(own)))
    return replace(flat, buckets=own, topology=sizes, inside=inside)


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
    on_time(world, T)


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
    """Each round averages the weights of a single replica."""

    def weights(done: int) -> list[float]:
        [chosen] = Random(f"0 {done}").sample(range(len(nodes)), 1)
        return [float(i == chosen) for i, node in enumerate(nodes) for _ in node]

    federated(world, T, local_steps=[3] * len(world), weights=weights)


def selected(world: list[Replica], plan: Any, _: Any) -> None:
    [vote] = plan.votes
    changes = Changes("norm", 25, vote.arg("weight"))
    everything = Piece(tuple(profile_names(world[0].case)))
    selective(
        world, T, pieces=[everything], forced=[()], change=changes.change, delta=0.15, lag=0,
        aggregate="parameters",
    )  # fmt: skip


def profile_names(case: Case) -> list[str]:
    return [name for bucket in profile_of(case, 2).buckets for name in bucket.tensors]


def windows(world: list[Replica], plan: Any, _: Any) -> None:
    merged(world, T, closing(plan))


# One of each kind of average, and of each setting that changes what nodes send or compute.
STRATEGIES: dict[str, tuple[Strategy, Equations]] = {
    "wfbp": (WFBP(), gradients_everywhere),  # gradients
    "halves": (DeAR(), gradients_everywhere),  # reduce-scatter and all-gather
    "deft": (DeFT(), windows),  # gradients of several iterations
    "dreamddp": (DreamDDP(period=3), sets_average()),  # slices of parameters, before the step
    "dreamddp clipped": (DreamDDP(period=3, clip=0.3), clipped),  # norms of gradients
    "dreamddp delayed": (DreamDDP(period=3, due="delayed", average="before_update"), late_sets),
    "partial": (  # parameters and state of the optimizer
        PartialSync(period=2, average="before_update", state="averaged"),
        sets_average(state="averaged"),
    ),
    "diloco": (  # an outer step, after the step
        DiLoCo(period=3, fragments=1),
        lambda world, *_: local_sgd(world, T, period=3, outer=stepped()),
    ),
    "fragments": (
        DiLoCo(period=4, fragments=2, average="before_update"),
        sets_average(outer=stepped()),
    ),
    "fedavg": (FedAvg(local_steps=3), lambda world, *_: local_sgd(world, T, period=3)),
    "fedavg drawn": (FedAvg(local_steps=3, samples=(3, 1), fraction=0.5), drawn),  # weights
    "selsync": (SelSync(delta=0.15), selected),  # a vote
}


def coded(world: list[Replica], plan: Any, nodes: Sequence[Sequence[int]]) -> None:
    """Gradients before the step, or parameters before or after it, in messages of codes."""
    messages = Messages(world, nodes)
    for r, t in enumerate(T):
        for replica in world:
            replica.gradients(t)
        active = [one for one in plan.transfers if one.wire and plan.phase(r) in one.phases]
        late = any(one.after.point == "step" for one in active)
        for act in (step_all, messages.send) if late else (messages.send, step_all):
            act(world, active)
        for replica in world:
            replica.end()


def step_all(world: list[Replica], _: Any) -> None:
    for replica in world:
        replica.step()


class Messages:
    """Each rank that owns a part of a message encodes it with its error: of its node's gradients,
    or of the change of parameters since their last average."""

    def __init__(self, world: list[Replica], nodes: Sequence[Sequence[int]]) -> None:
        self._nodes, self._profile = nodes, profile_in(world[0].case, nodes)
        self._anchor = {n: t.detach().clone() for n, t in world[0].tensors.items()}
        self._errors: dict[Any, Tensor] = {}

    def send(self, world: list[Replica], transfers: Sequence[Any]) -> None:
        for one in transfers:
            names = [n for b in one.payload.buckets for n in self._profile.buckets[b].tensors]
            moved = [n for n in names if world[0].tensors[n].requires_grad]
            self._average(world, one, moved)

    def _average(self, world: list[Replica], one: Any, names: Sequence[str]) -> None:
        is_gradient, like = one.payload.buffer == "grad", [self._anchor[n] for n in names]

        def value(replica: Replica, name: str) -> Tensor:
            p: Any = replica.tensors[name]
            return (p.grad if is_gradient else p.detach() - self._anchor[name]).reshape(-1)

        mean = torch.zeros(sum(t.numel() for t in like), dtype=like[0].dtype)
        for m, node in enumerate(self._nodes):
            flat = torch.cat([value(world[node[0]], n) for n in names])
            for k, places in enumerate(owned(like, self._nodes)):
                key, is_own = (one.payload.buckets, k, m), places >= 0
                share = len(node) * len(self._nodes) / len(world)
                given = torch.where(is_own, share * flat[places], 0.0) + self._errors.get(key, 0.0)
                sent = quantized(given, one.wire.name)
                self._errors[key] = given - sent
                mean[places[is_own]] += sent[is_own] / len(self._nodes)
        for n, anchor, part in zip(names, like, mean.split([t.numel() for t in like]), strict=True):
            if not is_gradient:
                anchor += part.view_as(anchor)
            for replica in world:
                p = replica.tensors[n]
                if is_gradient:
                    p.grad = part.view_as(p).clone()
                else:
                    p.detach().copy_(anchor)


def owned(tensors: Sequence[Tensor], nodes: Sequence[Sequence[int]]) -> list[Tensor]:
    """By owner, which elements of tensors laid end to end it encodes; -1 for padding."""
    owners = min(map(len, nodes))
    if not isinstance(nodes, Shards):
        places = torch.arange(sum(t.numel() for t in tensors))
        return [*places.split(-(-len(places) // owners))]
    found, begin = [list[Tensor]() for _ in range(owners)], 0
    for t in tensors:
        each = padded(t, owners)
        for k, runs in enumerate(found):
            run = torch.arange(k * each, (k + 1) * each)
            runs.append(torch.where(run < t.numel(), begin + run, -1))
        begin += t.numel()
    return [torch.cat(runs) for runs in found]


# Gradients; parameters, of which the change since their last average is sent. Two nodes gather.
CODES: dict[str, tuple[Strategy, Equations]] = {
    "int8 of gradients": (WFBP(fusion="none", wire="int8"), coded),
    "int4 of layers": (
        DreamDDP(period=2, wire="int4", average="before_update", fill=False, split=False),
        coded,
    ),
}
