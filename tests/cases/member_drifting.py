"""Jobs whose members change while they are planned again for measured times, which tests feed."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

import offbeat
from cases import member_jobs
from cases.member_jobs import (
    Average,
    Outcome,
    Replica,
    Scenario,
    average,
    train_member,
)
from offbeat import Plan, Profile
from offbeat.core.profile.elsewhere import for_members
from offbeat.core.runtime import replanning
from offbeat.core.runtime.iteration import Iteration
from offbeat.core.runtime.member_changes import MemberChanges
from offbeat.core.runtime.member_session import MemberSession
from offbeat.core.runtime.replanning import BoundaryMeter
from offbeat.core.transport.control import Control
from offbeat.core.transport.link import Message

BOUNDARY = 3  # least number of iterations between two boundaries
CHANGE_AT = 9  # first iteration after the third boundary


@dataclass(frozen=True)
class DriftingScenario(Scenario):
    """What happens to a job, and the times that its processes measure.

    Attributes:
        scales: compute time of each process relative to the profile. That of the first ones is in
            the profile.
        message_times: time of each message relative to the profile.
        ends_in: process that ends when the plan changes, and the place: third "exchange" of
            measured times, or first "change" of the plan.
        folder: folder of this job, if processes join: they request to join after the first process
            has trained up to the iteration before which it waits for them.
        loses_change: process to which the last message of the agreement about another plan seems
            lost, although all other processes adopt this plan; -1: none.
        writes_gradients: whether the script writes gradients before the step, so that another plan
            follows the first iteration.
    """

    scales: Sequence[float] = ()
    message_times: float = 1.0
    ends_in: Mapping[int, str] = field(default_factory=dict)
    loses_change: int = -1
    writes_gradients: bool = False

    @property
    def profile(self) -> Profile:
        scales = tuple(self.scales[: self.first])
        return replace(super().profile, rank_scale=scales)


@dataclass
class DriftingOutcome:
    """What a process has after training: its outcome, and plan and profile of each iteration."""

    outcome: Outcome
    plans: dict[int, Plan]
    profiles: dict[int, Profile]


def train(address: str, scenario: DriftingScenario) -> DriftingOutcome:
    """Train as one process of a scenario."""
    who = int(os.environ["RANK"])
    offbeat.prepare = partial(offbeat.prepare, replan="always", compare_every=0)
    _feed_times(scenario, who)
    _fail(scenario, who)
    plans, profiles = dict[int, Plan](), dict[int, Profile]()
    step, gate = MemberSession.step, Path(scenario.folder) / "joins"
    if who in scenario.joins:
        member_jobs._await(gate.exists)

    def record_and_step(self: MemberSession, *args: Any, **kwargs: Any) -> None:
        plans[self.iteration] = self.plan
        profiles[self.iteration] = self.profile
        for p in self._model.parameters() if scenario.writes_gradients else ():
            if p.grad is not None:
                p.grad.mul_(1.0)
        step(self, *args, **kwargs)
        if self.iteration == scenario.joins.get(scenario.first):
            gate.touch()

    MemberSession.step = record_and_step  # type: ignore[method-assign]
    return DriftingOutcome(train_member(address, scenario), plans, profiles)


def _feed_times(scenario: DriftingScenario, who: int) -> None:
    """Replace the measured times by those of the scenario."""
    profile = scenario.profile
    own_s = profile.forward_s + profile.backward_s + profile.update_s

    def message_s(message: Message, _: Any) -> float:
        transfer, now = message.transfer, for_members(profile, dist.get_world_size())
        seconds = now.message_s(transfer.payload, transfer.link, transfer.verb)
        return scenario.message_times * seconds

    def compute_s(done: Iteration, _: Any) -> float:
        return own_s * scenario.scales[who] * (1 + 0.1 * (done.number % 3 - 1))

    replanning.message_s, replanning.compute_s = message_s, compute_s
    replanning.BOUNDARY_ITERATIONS = BOUNDARY


def _fail(scenario: DriftingScenario, who: int) -> None:
    """Let this process fail at the change of the plan."""
    place, before = scenario.ends_in.get(who), MemberChanges.before_iteration

    def begin_unaware(self: MemberChanges) -> None:
        if self.are_agreed or self._session.iteration != CHANGE_AT:
            before(self)

    if who != scenario.loses_change >= 0:  # notices the failure only in a wait
        MemberChanges.before_iteration = begin_unaware  # type: ignore[method-assign]
    if place == "exchange":
        _replace_call(BoundaryMeter, "exchange", 3, lambda _: os._exit(9))
    if place == "change" or scenario.loses_change == who:
        # Each call of the first agreement about a plan is followed by that about another plan.
        act = Control.agree

        def agree(self: Control, what: str, *args: Any) -> None:
            calls.append(what)
            is_change = what == "the plan" and calls.count(what) == 2
            if is_change and place == "change":
                os._exit(9)
            act(self, what, *args)
            if is_change:
                raise dist.DistNetworkError("the connection of this test has failed")

        calls: list[str] = []
        Control.agree = agree  # type: ignore[method-assign]


def _replace_call(owner: type, name: str, number: int, other: Callable[..., Any]) -> None:
    """Replace one call of a method by a call of another function."""
    act, calls = getattr(owner, name), list[int]()

    def call(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return (other if len(calls) == number else act)(*args, **kwargs)

    setattr(owner, name, call)


def by_plans(
    scenario: DriftingScenario, plans: Mapping[int, Plan], begins: Sequence[int]
) -> Average:
    """Averages of a sequence of plans by bucket.

    Args:
        scenario: what happens.
        plans: plan of each iteration.
        begins: iterations in which a plan begins anew, although it may be the same.
    """
    tensors = [list(bucket.tensors) for bucket in scenario.profile.buckets]
    starts = {0, *begins} | {
        t for t, plan in plans.items() if t and plan.digest != plans[t - 1].digest
    }

    def average_at(_: int, replicas: Sequence[Replica]) -> None:
        t = max(replica.steps for replica in replicas) - 1
        plan, since = plans[t], max(start for start in starts if start <= t)
        for transfer in plan.transfers:
            if plan.phase(t - since) in transfer.phases:
                average(replicas, [n for b in transfer.payload.buckets for n in tensors[b]])

    return average_at
