"""Training in threads: a real model under a strategy's plan, one thread per rank, links of memory.

What the benchmarks of numerics have in common. Runtime, hooks and optimizers are the real ones; no
time that is taken here means anything.
"""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from offbeat.core.buckets.flat import Flat
from offbeat.core.buckets.layout import BucketSpec, group_parameters, specs_of_profile
from offbeat.core.observers import Observer
from offbeat.core.runtime.engine import Engine
from offbeat.core.runtime.iteration import Iteration
from offbeat.core.transport.device import CPU
from offbeat.jobs.replica_sample import Sample
from offbeat.plan import Plan, vote_channel
from offbeat.profile import Bucket, Link, Profile

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from harness import threads as memory  # pyright: ignore[reportMissingImports]
from harness.threads import (  # pyright: ignore[reportMissingImports]
    MemoryControl,
    World,
    memory_links,
    run_threads,
)

LINK = "net"
LEAST_BYTES = 16_384  # of a bucket: these models are small
TIMEOUT_S = memory.TIMEOUT_S = 900.0  # a benchmark that is stopped for a while can go on
VOTE = "sync"


@dataclass(frozen=True)
class Job:
    """What every rank trains: a copy of `model` on its own `batches` (of the world and the rank).

    `look(rank, step, model)` is called before every forward; it must not change anything.
    """

    model: nn.Module
    optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    batches: Callable[[World, int], Iterator[Any]]
    loss: Callable[[nn.Module, Any], Tensor]
    warmup: int = 1  # iterations in which the learning rate rises
    look: Callable[[int, int, nn.Module], None] | None = None


@dataclass
class Trained:
    """One rank after training; `changes` and `voted` are those of the vote, one per iteration."""

    model: nn.Module
    sample: dict[str, Any]
    losses: list[float] = field(default_factory=list)
    changes: list[float] = field(default_factory=list)
    voted: list[bool] = field(default_factory=list)

    @property
    def local_share(self) -> float:
        """LSSR: local steps over all steps."""
        return 1 - sum(self.voted) / len(self.voted)


def layout(model: nn.Module) -> list[BucketSpec]:
    """Buckets of neighbouring modules, the output side first, as `prepare` makes them."""
    names = [name for name, _ in model.named_parameters()]
    buffers = [name for name, b in model.named_buffers() if b.is_floating_point()]
    return group_parameters(model, names[::-1], LEAST_BYTES, buffers)


def untimed(model: nn.Module, ranks: int) -> Profile:
    """For strategies whose plan does not depend on times: every bucket takes as long."""
    parameters = dict(model.named_parameters())
    buckets = [
        Bucket(
            spec.name,
            1e-3,
            2e-3,
            sum(parameters[name].nbytes for name in spec.parameters),
            tensors=spec.parameters + spec.buffers,
        )
        for spec in layout(model)
    ]
    return Profile(tuple(buckets), (Link(LINK, 1e-3, 1e7),), ranks)


def train(job: Job, plan: Plan, profile: Profile, steps: int) -> list[Trained]:
    """Every rank after so many iterations of a plan for this profile."""
    votes = [vote_channel(LINK)] if plan.votes else []
    names = list(dict.fromkeys([LINK, *plan.links, *votes]))

    def life(world: World, rank: int) -> Trained:
        links = memory_links(world, rank, names, plan.groups)
        model = copy.deepcopy(job.model)
        flat = Flat(model, specs_of_profile(model, profile))
        optimizer = job.optimizer(model)
        control: Any = MemoryControl(world, rank)
        engine = Engine(model, flat, optimizer, links, CPU(), control, TIMEOUT_S)
        try:
            return _loop(job, plan, engine, job.batches(world, rank), steps)
        finally:
            for link in links.values():
                link.close()

    return run_threads(profile.world_size, life)


def _loop(job: Job, plan: Plan, engine: Engine, batches: Iterator[Any], steps: int) -> Trained:
    model, rank = engine.model, engine.control.rank
    sample = Sample.of(engine.flat)
    trained = Trained(model, {})

    class Votes(Observer):
        def ended(self, iteration: Iteration) -> None:
            if plan.votes:
                trained.changes.append(iteration.shown[VOTE]["change"])
                trained.voted.append(bool(iteration.voted[VOTE]))

    engine.adopt(plan)
    engine.begin()
    engine.observers.add(Votes())
    rate = torch.optim.lr_scheduler.LambdaLR(
        engine.optimizer, lambda step: min(1.0, (step + 1) / job.warmup)
    )
    model.train()
    for step in range(steps):
        if job.look is not None:
            job.look(rank, step, model)
        batch = next(batches)
        engine.zero_grad()
        with engine.forward_begins():
            loss = job.loss(model, batch)
        engine.forward_ends()
        if step:  # by now everything has landed
            sample.take(step - 1)
        loss.backward()
        engine.step()
        rate.step()
        trained.losses.append(loss.item())
    engine.leave()
    engine.detach()
    trained.sample = sample.record()
    return trained


def consolidated(trained: Sequence[Trained]) -> nn.Module:
    """The mean of all replicas, running statistics too, as `model.consolidate()` makes it."""
    states = [one.model.state_dict() for one in trained]
    mean = copy.deepcopy(trained[0].model)
    mean.load_state_dict(
        {
            name: torch.stack([state[name] for state in states]).mean(0)
            if first.is_floating_point()
            else first
            for name, first in states[0].items()
        }
    )
    return mean.eval()


def remembered(path: Path, key: str, run: Callable[[], Any]) -> Any:
    """What `run` finds, JSON-ready; kept in a file, so that a later start goes on from there."""
    known = json.loads(path.read_text()) if path.exists() else {}
    if key not in known:
        known[key] = run()
        draft = path.with_suffix(".part")
        draft.write_text(json.dumps(known))
        draft.replace(path)
        print(f"done: {key}", file=sys.stderr, flush=True)
    return known[key]
