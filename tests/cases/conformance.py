"""What the ranks of the conformance tests do beside training as their strategies say."""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from cases.models import Case, build_model, profile_of
from cases.untouched import states
from cases.workers import Trained, prepared, train, train_and_unite, world_size
from offbeat import LocalSGD
from offbeat.core.rules import EFFECTS, RULES, SETTINGS, VOTES
from offbeat.core.sim.prediction import predict_plan
from offbeat.plan import Plan
from offbeat.profile import Profile
from offbeat.strategies import Strategy

PREFIX = "my_"


# ---- rules under other names ----------------------------------------------------------------


def renamed(plan: Plan) -> Plan:
    return replace(
        plan,
        applies=tuple(replace(a, rule=PREFIX + a.rule) for a in plan.applies),
        votes=tuple(replace(v, rule=PREFIX + v.rule) for v in plan.votes),
    )


def aliased(strategy: Strategy) -> Strategy:
    """The strategy with a plan of renamed rules."""

    class Aliased(type(strategy)):  # type: ignore[misc]
        def plan(self, profile: Profile) -> Plan:
            return renamed(super().plan(profile))

    return Aliased(**{name: getattr(strategy, name) for name in strategy.settings()})


def train_aliased(
    calls: Sequence[tuple[Strategy, Case, bool]], iterations: int
) -> list[tuple[Trained, Trained | None]]:
    """Trained under renamed rules, and under their own names where a call wants that."""
    for table in (RULES, SETTINGS, EFFECTS, VOTES):
        table.update({PREFIX + name: value for name, value in table.items()})
    found = []
    for strategy, case, wants_own in calls:
        profile = profile_of(case, world_size())
        plan = strategy.plan(profile)
        seconds = [predict_plan(p, profile).iteration_s for p in (plan, renamed(plan))]
        assert seconds[0] == seconds[1]
        other = train_and_unite(aliased(strategy), case, iterations)
        own = train_and_unite(strategy, case, iterations) if wants_own else None
        found.append((other, own))
    return found


# ---- random streams -------------------------------------------------------------------------


def train_without_plans(strategies: Sequence[Strategy], setting: str) -> None:
    """Gossip, and servers on the last rank; `train` compares the global states."""
    for strategy in strategies:
        os.environ["OFFBEAT_SERVERS"] = str(int(strategy.needs.servers))
        with contextlib.suppress(SystemExit):  # a server, when its workers have left
            train(Case(), strategy, range(4), observe=1, setting=setting)


class Drawing(torch.optim.SGD):
    """Draws from every stream in its step."""

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        draw()
        super().step()


def draw() -> None:
    torch.rand(1)
    random.random()
    np.random.rand()


def seed() -> None:
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)


def states_after_steps(iterations: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """After a training whose optimizer is tried, timed and then steps; and after its draws."""
    module = build_model(Case())
    trained = [p for p in module.parameters() if p.requires_grad]
    optimizer: Any = Drawing(trained, lr=0.1, momentum=0.9)
    seed()
    strategy = LocalSGD(period=2, state="averaged")
    with prepared(module, optimizer, strategy, observe=2) as (model, optimizer):
        x = torch.ones(6, 5, dtype=torch.float64)
        for _ in range(iterations):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
    found = states()
    seed()
    for _ in range(iterations):
        draw()
    return found, states()
