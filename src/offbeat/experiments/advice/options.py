"""Options of advice: a strategy, its predicted times, and its change of the mathematics."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from typing import Literal, get_args

from offbeat.core.derive.windows import Windows
from offbeat.core.guards.suitable_strategy import strategy_that_runs
from offbeat.core.plan import Plan
from offbeat.core.profile import Profile
from offbeat.core.sim import Prediction, predict
from offbeat.core.strategy.interface import Strategy

Change = Literal["same numbers", "larger batch", "averaged", "late", "lossy"]
CHANGES: tuple[Change, ...] = get_args(Change)


@dataclass(frozen=True)
class Option:
    """A strategy with its predicted times and its change of the mathematics.

    Attributes:
        strategy: the strategy.
        change: kind of change against DDP.
        staleness: largest number of iterations until a worker's gradient reaches all workers.
        iteration_s: predicted seconds per iteration.
        update_s: predicted seconds per update; more than `iteration_s` if gradients are merged.
        bytes: payload bytes that one rank sends per iteration.
        plan: the simulated plan.
    """

    strategy: Strategy
    change: Change
    staleness: int
    iteration_s: float
    update_s: float
    bytes: float
    plan: Plan = field(repr=False, compare=False)

    @property
    def gentleness(self) -> tuple[int, int, float]:
        """Sort key; smaller is gentler."""
        return CHANGES.index(self.change), self.staleness, self.bytes


def predict_option(strategy: Strategy, profile: Profile) -> Option | None:
    """Simulate a strategy, or the variant of it that suits the script of the profile.

    Returns:
        The option. None if the strategy has no plan for this profile, or if it falls back to the
        plan of another strategy, which is a candidate of its own.
    """
    with warnings.catch_warnings():  # warnings of strategies that fall back to others
        warnings.simplefilter("ignore")
        try:
            strategy = strategy_that_runs(strategy, profile)
            prediction = predict(strategy, profile)
        except ValueError:
            return None
    plan = prediction.plan
    assert plan is not None, strategy
    if plan.strategy != strategy.name:
        return None
    return option_of(strategy, plan, prediction)


def option_of(strategy: Strategy, plan: Plan, prediction: Prediction) -> Option:
    """Return the option of a simulated strategy."""
    late = plan.fact("staleness", 0)
    stale = max(_gradient_ages(plan)) if Windows(plan).late else late
    change: Change = "same numbers"
    if not strategy.synchronous:
        change = "late" if stale or strategy.applies_late else "averaged"
        if any(t.payload.buffer != "grad" for t in plan.transfers):
            # Several averages can make a period of the plan, as moments have other periods.
            period = getattr(strategy, "period", plan.period)
            stale = period * plan.fact("rounds", 1) - 1 + late
    if any(t.wire is not None for t in plan.transfers):
        change = "lossy"
    sent = sum(prediction.bytes_per_iteration.values())
    iteration_s = prediction.iteration_s
    update_s = iteration_s * plan.period / len(_gradient_ages(plan))
    return Option(strategy, change, stale, iteration_s, update_s, sent, plan)


def _gradient_ages(plan: Plan) -> list[int]:
    """Return, for each update of one period, the age in iterations of its oldest gradient."""
    windows, first = Windows(plan), plan.prologue + plan.period
    applied = {t: windows.applied_window(t) for t in range(first, first + plan.period)}
    return [t - window.start for t, window in applied.items() if window]


def describe_change(option: Option) -> str:
    """Return a phrase for the change that an option makes to the mathematics."""
    stale, plan = option.staleness, option.plan
    if option.change == "same numbers":
        return "same numbers as DDP"
    if plan.votes:
        return "averaged where a vote accepts; the time is that of accepted votes"
    if (text := option.strategy.describe_change(plan)) is not None:
        return text
    period = getattr(option.strategy, "period", None)
    if option.change == "late" and period is None:
        return f"late: gradients are applied up to {stale} iteration{'s'[: stale > 1]} later"
    if period is None and any(t.payload.buffer == "param" for t in plan.transfers):
        period = plan.period
    parts = [] if period is None else [f"averaged: parameters, every {period} iterations"]
    delay = plan.fact("staleness", 0) if period is not None else 0
    if delay > 0:
        parts.append(f"which land {delay} later")
    if (outer := getattr(option.strategy, "outer", None)) is not None:
        parts.append(f"applied by an outer optimizer ({outer})")
    if option.change == "lossy":
        codec = next(t.wire.name for t in plan.transfers if t.wire is not None)
        parts.append(f"lossy: sent as {getattr(option.strategy, 'wire', codec)}")
    return ", ".join(parts)
