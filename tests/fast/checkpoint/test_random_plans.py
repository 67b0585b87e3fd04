"""Any plan can be left at any iteration and gone on with elsewhere, to the same bits."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from harness.ranks import run_ranks
from harness.threads import MemoryControl, World, memory_links
from oracle.quadratic import DECAY, MOMENTUM, RATE, TIMEOUT_S, Net, Quadratic, ran
from oracle.random_plans import random_plan, ranks_of

from offbeat import DreamDDP
from offbeat.core.buckets.flat import Flat
from offbeat.core.buckets.layout import BucketSpec
from offbeat.core.checkpoint.frozen import Frozen, freeze
from offbeat.core.plan.program import Program
from offbeat.core.runtime.engine import Engine
from offbeat.core.runtime.position import capture, restore
from offbeat.core.transport.device import CPU
from offbeat.core.verify.check import check
from offbeat.plan import Plan, vote_channel
from offbeat.profile import Bucket, Link, Profile

PLANS = 30  # accepted ones


class Worker:
    """One rank's engine on a model of which everything is known."""

    has_members = False

    def __init__(self, plan: Plan, task: Quadratic, rank: int, links: Any, control: Any):
        start, self.a, self.c = task.numbers
        self.task, self.rank = task, rank
        self.net = Net(start, task.sizes)
        specs = [BucketSpec(f"b{b}", (f"layers.{b}.w",)) for b in range(len(task.sizes))]
        self.optimizer = torch.optim.SGD(
            self.net.parameters(), lr=RATE, momentum=MOMENTUM, weight_decay=DECAY
        )
        self.engine = Engine(
            self.net, Flat(self.net, specs), self.optimizer, links, CPU(), control, TIMEOUT_S
        )
        self.engine.has_members = self.has_members
        self.engine.adopt(plan)
        self.engine.begin()

    def iterate(self, i: int) -> np.ndarray:
        """The weights that its forward has seen."""
        self.engine.zero_grad()
        self.forward(i).backward()
        self.engine.step()
        return torch.cat([layer.seen for layer in self.net.steps]).numpy()

    def forward(self, i: int) -> torch.Tensor:
        """The loss of an iteration."""
        engine, sizes = self.engine, list(self.task.sizes)
        a, c = torch.from_numpy(self.a[self.rank]), torch.from_numpy(self.c[self.rank, i])
        with engine.forward_begins():
            loss = self.net(a.split(sizes), c.split(sizes))
        engine.forward_ends()
        return loss

    def save(self) -> Frozen:
        position = capture(self.engine)
        state = [self.net.state_dict(), self.optimizer.state_dict(), position]
        return freeze(state, {})

    def load(self, saved: Frozen) -> None:
        weights, state, position = saved.thaw()
        self.net.load_state_dict(weights)
        self.optimizer.load_state_dict(state)
        self.engine.refresh_groups()
        restore(self.engine, position)

    def leave(self) -> None:
        self.engine.leave()
        self.engine.detach()


def lives(plan: Plan, task: Quadratic, live: Any) -> list[Any]:
    """What `live(worker)` returns on every rank."""
    names = [*plan.links, *([vote_channel("net")] if plan.votes else [])]

    def life(world: World, rank: int) -> Any:
        links = memory_links(world, rank, dict.fromkeys(["net", *names]), plan.groups)
        worker = Worker(plan, task, rank, links, MemoryControl(world, rank))
        try:
            found = live(worker)
            worker.leave()
            return found
        finally:
            for link in links.values():
                link.close()

    return run_ranks(task.ranks, life, where="threads")


def accepted() -> Iterator[tuple[int, Plan]]:
    seed = found = 0
    while found < PLANS:
        plan = random_plan(Random(seed), broken=0.1)
        if not check(plan):
            found += 1
            yield seed, plan
        seed += 1


def in_two(plan: Plan, task: Quadratic, at: int) -> tuple[np.ndarray, np.ndarray, list[Any]]:
    """What the forwards of all ranks have seen, of a run that is saved at an iteration, and of one
    that begins with what was saved; and where they stood."""

    def whole(worker: Worker) -> tuple[list[np.ndarray], Frozen]:
        seen = [worker.iterate(i) for i in range(at)]
        saved = worker.save()
        return seen + [worker.iterate(i) for i in range(at, worker.task.iterations)], saved

    seen, saved = zip(*lives(plan, task, whole), strict=True)

    def rest(worker: Worker) -> list[np.ndarray]:
        worker.load(saved[worker.rank])
        return [worker.iterate(i) for i in range(at, worker.task.iterations)]

    resumed = lives(plan, task, rest)
    return np.array(seen), np.array(resumed), [frozen.thaw()[2] for frozen in saved]


@pytest.mark.long
def test_resumed_at_any_iteration() -> None:
    under_way = kept = 0
    for seed, plan in accepted():
        rng = Random(seed)
        iterations = plan.prologue + 2 * plan.period + Program(plan).lag + 1
        sizes = tuple(rng.choice((1, 3, 5)) for _ in range(plan.buckets))
        task = Quadratic(sizes, max(ranks_of(plan), 2), iterations, seed)
        at = rng.randrange(1, iterations)

        expected = np.array(ran(plan, task))
        saved, resumed, positions = in_two(plan, task, at)
        assert np.array_equal(saved, expected), f"seed {seed}: saving disturbs\n{plan}"
        assert np.array_equal(resumed, expected[:, at:]), f"seed {seed}, at {at}\n{plan}"
        under_way += any(i["messages"] for p in positions for i in p["iterations"])
        kept += any(name != "grad" for p in positions for name in p["buffers"])
    assert under_way > 2, "too few plans had messages under way"
    assert kept > 2, "too few plans had buffers of their own"


@pytest.mark.parametrize("at", range(4, 10))
def test_errors_of_averages_under_way_are_saved(at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where members change, errors are stored with the results of their messages."""
    monkeypatch.setattr(Worker, "has_members", True)
    buckets = tuple(Bucket(f"b{b}", 0.01, 0.02, 8 * n) for b, n in enumerate((40, 70)))
    profile = Profile(buckets, (Link("net", 1e-3, 1e5),), 2)
    plan = DreamDDP(period=4, due="delayed", delay=3, wire="int4", solver="optimal").plan(profile)
    task = Quadratic((40, 70), 2, 12)
    expected = np.array(ran(plan, task))
    saved, resumed, positions = in_two(plan, task, at)
    assert np.array_equal(saved, expected)
    assert np.array_equal(resumed, expected[:, at:])
    assert any(i["messages"] for p in positions for i in p["iterations"])


def test_a_dropped_iteration_is_not_saved() -> None:
    """A forward without backward, dropped as `consolidate` and loads do, leaves no message."""

    def save_after_drop(worker: Worker) -> Frozen:
        worker.iterate(0)
        worker.forward(1)
        worker.engine.pause()
        return worker.save()

    tried = 0
    for seed, plan in accepted():
        if not any(not t.in_place and t.ranks is None for t in plan.transfers):
            continue
        task = Quadratic((3,) * plan.buckets, max(ranks_of(plan), 2), 3, seed)
        saved = lives(plan, task, save_after_drop)

        def rest(worker: Worker, saved: Any = saved) -> np.ndarray:
            worker.load(saved[worker.rank])
            worker.engine.pause()
            return worker.iterate(1)

        resumed = lives(plan, task, rest)
        assert np.isfinite(resumed).all(), f"seed {seed}\n{plan}"
        for frozen in saved:
            position = frozen.thaw()[2]
            assert all(one["planned"] < position["planned"] for one in position["iterations"])
        tried += 1
        if tried == 6:
            return


@pytest.mark.long
def test_ranks_whose_values_are_not_finite_are_saved_with_their_messages() -> None:
    """A message that is due later names them when it is stored, in the resumed job."""

    def messages_of(worker: Worker) -> list[Any]:
        recent = worker.engine.cursor.iterations.values()
        return [one.messages[index] for one in recent for index in sorted(one.outstanding)]

    def spoil(worker: Worker) -> Frozen:
        for i in range(worker.task.iterations):
            worker.iterate(i)
        worker.engine.flush()
        for message in messages_of(worker):
            message.culprits = [1]
        return worker.save()

    tried = 0
    for seed, plan in accepted():
        task = Quadratic((3,) * plan.buckets, max(ranks_of(plan), 2), plan.prologue + 2, seed)
        saved = lives(plan, task, spoil)

        def rest(worker: Worker, saved: Any = saved) -> list[list[int]]:
            worker.load(saved[worker.rank])
            return [message.culprits for message in messages_of(worker)]

        found = [culprits for rank in lives(plan, task, rest) for culprits in rank]
        assert found == [[1]] * len(found)
        tried += len(found) > 0
        if tried == 3:
            return


def test_outcomes_of_votes_do_not_add_up_in_checkpoints() -> None:
    """A checkpoint has the outcomes that later iterations use, however long the job has run."""
    plan, seed = next((plan, seed) for seed, plan in accepted() if plan.votes)

    def outcomes(worker: Worker) -> int:
        for i in range(worker.task.iterations):
            worker.iterate(i)
        return len(worker.save().thaw()[2]["votes"])

    counts = set()
    for periods in (4, 8):
        iterations = plan.prologue + periods * plan.period
        task = Quadratic((3,) * plan.buckets, max(ranks_of(plan), 2), iterations, seed)
        counts |= {*lives(plan, task, outcomes)}
    assert len(counts) == 1
