"""What the ranks do in the tests of measured times: they feed times in place of the clock's."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest

from cases.models import Case, build_model, build_optimizer
from cases.schedules import go_on
from cases.workers import Trained, bits, prepared, rank, snapshot, world_size
from offbeat import Plan, Profile, Strategy
from offbeat.core.runtime import replanning
from offbeat.core.runtime.iteration import Iteration
from offbeat.core.transport.control import Control
from offbeat.core.transport.link import Message

LATE = 0.7  # share of a message's time for which a rank that comes early waits


@dataclass(frozen=True)
class Times:
    """Measured times relative to the profile: (first iteration, factor) of messages, and the
    factor of each rank's compute."""

    messages: Sequence[tuple[int, float]] = ((0, 1.0),)
    compute: Mapping[int, float] = field(default_factory=dict)

    def factor(self, iteration: int) -> float:
        return [factor for first, factor in self.messages if first <= iteration][-1]


@dataclass
class Drifted:
    """What one rank has, and what ran: (first iteration, plan) of each plan."""

    trained: Trained
    plans: list[tuple[int, Plan]]
    exchanges: int  # control messages with measured times
    bits: str
    printed: str
    profile: Profile

    def stretches(self, iterations: int) -> list[tuple[range, Plan]]:
        ends = [*(first for first, _ in self.plans), iterations]
        return [
            (range(first, stop), plan)
            for (first, stop), (_, plan) in zip(pairwise(ends), self.plans, strict=True)
        ]


def train(
    case: Case,
    strategy: Strategy,
    profile: Profile,
    iterations: int,
    times: Times,
    boundary: int,
    folder: str | None = None,
    **options: Any,
) -> Drifted:
    """Train while messages and compute take these times; ranks are late in turn."""
    if folder is not None:
        os.environ["OFFBEAT_RECORD"] = folder

    def message_s(message: Message, _: Any) -> float:
        t, waits = message.transfer, (message.iteration + rank()) % world_size()
        seconds = profile.message_s(t.payload, t.link, t.verb) * times.factor(message.iteration)
        return seconds * (1 + LATE * waits)

    def compute_s(done: Iteration, _: Any) -> float:
        own_s = profile.forward_s + profile.backward_s + profile.update_s
        return own_s * times.compute.get(rank(), 1.0) * (1 + 0.1 * (done.number % 3 - 1))

    exchanges, minimum = [0], Control.minimum

    def counted(self: Control, values: Sequence[float]) -> list[float]:
        exchanges[0] += 1
        return minimum(self, values)

    replanning.message_s, replanning.compute_s = message_s, compute_s
    replanning.BOUNDARY_ITERATIONS = boundary
    patch = pytest.MonkeyPatch()
    patch.setattr(Control, "minimum", counted)
    model = build_model(case)
    plans: list[tuple[int, Plan]] = []
    printed = io.StringIO()
    with (
        contextlib.redirect_stderr(printed),
        prepared(model, build_optimizer(case, model), strategy, profile=profile, **options) as (
            model,
            optimizer,
        ),
    ):
        for t in range(iterations):
            plan = model._session.plan
            if not plans or plan.digest != plans[-1][1].digest:
                plans.append((t, plan))
            go_on(model, optimizer, case, range(t, t + 1))
        trained = Trained(snapshot(model.state_dict()), snapshot(optimizer.state_dict()))
        digest, profile = bits(model), model._session.profile
    patch.undo()
    return Drifted(
        trained, plans, exchanges[0], digest, " ".join(printed.getvalue().split()), profile
    )
