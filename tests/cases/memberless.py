"""Costs of a job whose members do not change."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

from cases.models import Case, batch, build_model, build_optimizer, loss_of, profile_of
from cases.workers import prepared, rank, world_size
from offbeat import Strategy
from offbeat.core.plan.program import Program
from offbeat.core.transport.control import Control

CASE, ITERATIONS = Case("mlp", "nesterov"), 24


class Costs(NamedTuple):
    """Costs of a job of one rank.

    Attributes:
        is_staged: whether messages are sent as copies.
        keeps_last: whether a link keeps the last received message.
        handles_signals: whether SIGTERM has another action than its default.
        modules: imported modules that jobs with members need.
        control_messages: exchanges of control messages after the first iteration.
        further_messages: messages on links beside those of the plan.
    """

    is_staged: bool
    keeps_last: bool
    handles_signals: bool
    modules: list[str]
    control_messages: int
    further_messages: int


def train_without_members(strategies: Sequence[Strategy]) -> list[Costs]:
    return [_costs_of(strategy) for strategy in strategies]


def _costs_of(strategy: Strategy) -> Costs:
    plain = build_model(CASE)
    options = {"profile": profile_of(CASE, world_size()), "compare_every": 0}
    both = prepared(plain, build_optimizer(CASE, plain), strategy, **options)
    with both as (model, optimizer):
        session, exchanges = model._session, list[str]()
        for t in range(ITERATIONS):
            if t == 1:  # the first iteration observes the script
                count_calls(session._cluster.control, exchanges)
            optimizer.zero_grad()
            loss_of(model, *batch(CASE, rank(), t)).backward()
            optimizer.step()
        links, program = session._cluster.links.values(), Program(session.plan)
        return Costs(
            session.engine.run.actions.storage.staged,
            any(link.keeps_last for link in links),
            signal.getsignal(signal.SIGTERM) != signal.SIG_DFL,
            sorted(name for name in sys.modules if name.startswith("offbeat.membership")),
            len(exchanges),
            sum(link._next_order for link in links)
            - sum(len(program.transfers(t)) for t in range(ITERATIONS)),
        )


def count_calls(control: Control, calls: list[str]) -> None:
    """Add a name to `calls` at each exchange between all ranks."""

    def counting_call(name: str) -> Any:
        act = getattr(control, name)

        def call(*args: Any) -> Any:
            calls.append(name)
            return act(*args)

        return call

    for name in ("collective", "meet"):
        setattr(control, name, counting_call(name))
