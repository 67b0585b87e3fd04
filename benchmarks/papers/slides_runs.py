"""Real training for `slides.py`: the library's runtime, ranks as threads, links of memory."""

from __future__ import annotations

import copy
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from slides_tasks import Task
from torch import Tensor, nn

from offbeat.core.buckets.flat import Flat
from offbeat.core.buckets.layout import specs_of_profile
from offbeat.core.observers import Observer
from offbeat.core.runtime.engine import Engine
from offbeat.core.runtime.iteration import Iteration
from offbeat.core.transport.device import CPU
from offbeat.experiments.predictions import outcomes_of
from offbeat.jobs.iteration_log import VoteLog
from offbeat.plan import Plan, vote_channel
from offbeat.profile import Profile
from offbeat.strategies import Strategy

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
from harness import threads  # pyright: ignore[reportMissingImports]
from harness.ranks import run_ranks  # pyright: ignore[reportMissingImports]
from harness.threads import (  # pyright: ignore[reportMissingImports]
    MemoryControl,
    World,
    memory_links,
)

threads.TIMEOUT_S = 900.0  # its own is that of tests; a run takes longer, and may be paused

EVERY = 5  # iterations between two looks at the held-out data


def train(
    task: Task, strategy: Strategy, profile: Profile, seed: int, iterations: int
) -> dict[str, Any]:
    """Quality over iterations, bytes that a worker has averaged, votes."""
    begin = time.perf_counter()
    torch.manual_seed(seed)
    first, plan = task.model(), strategy.plan(profile)

    def life(world: World, rank: int) -> dict[str, Any]:
        return _life(task, plan, profile, first, seed, iterations, world, rank)

    found = run_ranks(profile.world_size, life, where="threads")[0]
    return found | {"took_s": time.perf_counter() - begin}


def _life(
    task: Task,
    plan: Plan,
    profile: Profile,
    first: nn.Module,
    seed: int,
    iterations: int,
    world: World,
    rank: int,
) -> dict[str, Any]:
    """One rank's loop, as it would be with `offbeat.prepare`."""
    model = copy.deepcopy(first)
    optimizer = task.optimizer(model)
    net = profile.default_link.name
    channels = [vote_channel(net)] if plan.votes else []
    names = dict.fromkeys([net, *plan.links, *channels])
    links = memory_links(world, rank, names, plan.groups)
    control = MemoryControl(world, rank)
    flat = Flat(model, specs_of_profile(model, profile))
    engine = Engine(model, flat, optimizer, links, CPU(), control, threads.TIMEOUT_S)  # type: ignore[arg-type]
    engine.adopt(plan)
    log = _Log(plan)
    engine.observers.add(log)
    engine.begin()
    batches, quality = task.batches(rank, world.size, seed), []
    for i in range(iterations):
        for group in optimizer.param_groups:
            group["lr"] = task.rate(i, iterations)
        engine.zero_grad()
        with engine.forward_begins():
            loss = task.loss(model, next(batches))
        engine.forward_ends()
        loss.backward()
        engine.step()
        if (i + 1) % EVERY == 0:
            quality.append([i + 1, *look(task, model, world, rank)])
    engine.leave()
    engine.observers.deliver(rest=True)
    engine.detach()
    for link in links.values():
        link.close()
    sent = {name: link.bytes_sent for name, link in links.items()}
    return {"quality": quality, "bytes": sent, **log.record()}


class _Log(Observer):
    """The votes of one rank, and what they have sent and spared."""

    def __init__(self, plan: Plan) -> None:
        self._plan, self._votes = plan, VoteLog()

    def ended(self, iteration: Iteration) -> None:
        if self._plan.votes:
            self._votes.add_iteration(iteration, [vote.name for vote in self._plan.votes])

    def record(self) -> dict[str, Any]:
        """Outcomes by vote, bytes."""
        told = self._votes.pop_columns()
        return {
            "outcomes": outcomes_of({"votes": told}),
            "sent_bytes": sum(told["sent_bytes"]),
            "spared_bytes": sum(told["spared_bytes"]),
        }


def look(task: Task, model: nn.Module, world: World, rank: int) -> tuple[float, float]:
    """Quality of the mean of all replicas, as `consolidate` would make it; nobody's changes."""
    mine = {name: value.detach().clone() for name, value in model.state_dict().items()}

    def judged(given: dict[int, Mapping[str, Tensor]]) -> tuple[float, float]:
        return quality_of_mean(task, list(given.values()))

    return world.meeting("look", range(world.size)).meet(rank, mine, judged)


def quality_of_mean(task: Task, states: Sequence[Mapping[str, Tensor]]) -> tuple[float, float]:
    """Of a model whose every number is the mean of those in `states`."""
    mean = {
        name: torch.stack([state[name].double() for state in states]).mean(0).to(value.dtype)
        for name, value in states[0].items()
    }
    judge = task.model()
    judge.load_state_dict(mean)
    return task.quality(judge)
