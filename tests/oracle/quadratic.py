"""A model of which everything is known: the same plan on it in the interpreter and the runtime.

Bucket b of a rank costs `a (w - c)^2 / 2` summed up, with numbers `a` of the rank and `c` of the
rank and iteration, so its gradient is `a (w - c)`. The optimizer is SGD with momentum and decay.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from harness.ranks import run_ranks
from harness.threads import MemoryControl, World, memory_links
from numpy.typing import NDArray
from torch import Tensor, nn

from offbeat.core.buckets.flat import Flat
from offbeat.core.buckets.layout import BucketSpec
from offbeat.core.runtime.engine import Engine
from offbeat.core.transport.control import Control
from offbeat.core.transport.device import CPU
from offbeat.core.transport.link import LinkThread
from offbeat.core.verify.interpreter import Interpreter
from offbeat.core.verify.worker import InterpretedModel, Worker
from offbeat.plan import Plan, vote_channel

RATE, MOMENTUM, DECAY = 0.1, 0.9, 0.01
TIMEOUT_S = 20.0

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Quadratic:
    """The numbers of one training run: elements per bucket, ranks, iterations."""

    sizes: tuple[int, ...]
    ranks: int
    iterations: int
    seed: int = 0
    decay: float = DECAY

    @cached_property
    def numbers(self) -> tuple[Array, Array, Array]:
        """The weights at first, a [rank, element], c [rank, iteration, element]."""
        rng, n = np.random.default_rng(self.seed), sum(self.sizes)
        return (
            rng.normal(size=n),
            rng.uniform(0.5, 1.5, size=(self.ranks, n)),
            rng.normal(size=(self.ranks, self.iterations, n)),
        )


@dataclass(frozen=True)
class Nodes(Quadratic):
    """Each of the ranks is a node: its cost is the mean of those of its members."""

    members: int = 2

    @cached_property
    def by_member(self) -> Quadratic:
        """The same task with a rank for each member."""
        ranks = self.ranks * self.members
        return Quadratic(self.sizes, ranks, self.iterations, self.seed, self.decay)

    @cached_property
    def numbers(self) -> tuple[Array, Array, Array]:
        start, a, c = self.by_member.numbers
        a = a.reshape(self.ranks, self.members, 1, -1)
        c = c.reshape(self.ranks, self.members, self.iterations, -1)
        mean = a.mean(1)
        return start, mean[:, 0], (a * c).mean(1) / mean


class Net(nn.Module):
    """Buckets one after the other: the last one is nearest the input."""

    def __init__(self, start: Array, sizes: Sequence[int]):
        super().__init__()
        parts = torch.from_numpy(start.copy()).split(list(sizes))
        self.steps = [_Layer(part) for part in parts]
        self.layers = nn.ModuleList(self.steps)

    def forward(self, a: Sequence[Tensor], c: Sequence[Tensor]) -> Tensor:
        y = torch.zeros((), dtype=torch.float64)
        for b in reversed(range(len(self.steps))):
            y = self.steps[b](y, a[b], c[b])
        return y


class _Layer(nn.Module):
    def __init__(self, start: Tensor):
        super().__init__()
        self.w = nn.Parameter(start.clone())

    def forward(self, y: Tensor, a: Tensor, c: Tensor) -> Tensor:
        self.seen = self.w.detach().clone()
        return y + (0.5 * a * (self.w - c) ** 2).sum()


def model_of(task: Quadratic) -> InterpretedModel:
    """The task as the interpreter trains it."""
    start, a, c = task.numbers
    offsets = np.concatenate([[0], np.cumsum(task.sizes)])

    def gradient(rank: int, iteration: int, run: range, weights: Array) -> Array:
        here = slice(offsets[run.start], offsets[run.stop])
        return a[rank, here] * (weights - c[rank, iteration, here])

    def optimizer(worker: Worker, buckets: range, weights: Array, gradients: Array) -> None:
        [state] = worker.moments or ["state"]  # the plan may move the momentum by its number
        momentum = worker.view(state, worker.span(buckets))
        momentum[...] = MOMENTUM * momentum + (gradients + task.decay * weights)
        weights -= RATE * momentum

    return InterpretedModel(task.sizes, start, gradient, optimizer)


def interpreted(plan: Plan, task: Quadratic, seed: int | None = None) -> list[list[Array]]:
    """The weights that every forward has seen, by rank, in the interpreter."""
    found: list[list[Array]] = [[] for _ in range(task.ranks)]
    Interpreter(plan, model_of(task), task.ranks).run(
        task.iterations,
        seed=seed,
        after=lambda worker, _: found[worker.rank].append(worker.seen.copy()),
    )
    return found


def ran(plan: Plan, task: Quadratic, *, has_members: bool = False) -> list[list[Array]]:
    """The same in the runtime, with threads and links of memory; as in a job whose members may
    change, if it `has_members`."""
    names = [*plan.links, *([vote_channel("net")] if plan.votes else [])]

    def life(world: World, rank: int) -> list[Array]:
        links = memory_links(world, rank, dict.fromkeys(["net", *names]), plan.groups)
        try:
            for link in links.values():
                link.keeps_last = has_members
            control = MemoryControl(world, rank)
            return train(plan, task, rank, links, control, has_members=has_members)  # type: ignore[arg-type]
        finally:
            for link in links.values():
                link.close()

    return run_ranks(task.ranks, life, where="threads")


def train(
    plan: Plan,
    task: Quadratic,
    rank: int,
    links: dict[str, LinkThread],
    control: Control,
    replica: int | None = None,
    *,
    has_members: bool = False,
) -> list[Array]:
    """The weights that one rank's forwards have seen."""
    start, a, c = task.numbers
    net = Net(start, task.sizes)
    flat = Flat(net, [BucketSpec(f"b{b}", (f"layers.{b}.w",)) for b in range(len(task.sizes))])
    optimizer = torch.optim.SGD(
        net.parameters(), lr=RATE, momentum=MOMENTUM, weight_decay=task.decay
    )
    engine = Engine(net, flat, optimizer, links, CPU(), control, TIMEOUT_S, replica)  # type: ignore[arg-type]
    engine.has_members = has_members
    engine.adopt(plan)
    engine.begin()
    sizes, found = list(task.sizes), []
    for i in range(task.iterations):
        engine.zero_grad()
        with engine.forward_begins():
            loss = net(
                torch.from_numpy(a[rank]).split(sizes), torch.from_numpy(c[rank, i]).split(sizes)
            )
        engine.forward_ends()
        loss.backward()
        engine.step()
        found.append(torch.cat([layer.seen for layer in net.steps]).numpy())
    engine.leave()
    engine.detach()
    return found
