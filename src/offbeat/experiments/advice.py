"""Selection of strategies for a model, from the model's profile.

Candidates are ordered by gentleness: a strategy is gentler if it changes the mathematics of
training less. Each candidate is simulated, except where its lower bound shows that it cannot be
faster than a gentler one. The advised strategy is the gentlest one that is nearly as fast as the
fastest, both on the measured links and with messages that take `SLOWER` times as long.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Literal, get_args

from offbeat.core.derive.windows import Windows
from offbeat.core.plan import Plan
from offbeat.core.profile import Profile
from offbeat.core.profile.elsewhere import with_slower_links
from offbeat.core.sim import Prediction, predict
from offbeat.strategies import (
    ASCWFBP,
    BSP,
    DDP,
    P3,
    WFBP,
    ByteScheduler,
    DeAR,
    DeFT,
    DreamDDP,
    LocalSGD,
    Strategy,
    USByte,
)

Change = Literal["same numbers", "averaged", "late", "lossy"]
CHANGES: tuple[Change, ...] = get_args(Change)

MAX_STALENESS = 9  # largest accepted staleness: that of an average every ten iterations
DELAYS = (1, 2, 4)
WIRES = ("int8", "int4")
LEAST_GAIN = 0.004  # least gain over gentler candidates, by the bound, that merits a simulation
AS_GOOD = 0.025  # extra time of a gentler strategy that is acceptable, over the fastest
SLOWER = 1.5  # slowdown of messages in the robustness check; 1.8 was measured in training
AS_GOOD_THEN = 0.05  # acceptable extra time with slower messages, over the fastest
WORTH_A_TRY = 0.25  # extra time up to which a gentler strategy is compared, over the fastest
MOST_COMPARED = 3
UNEVEN = 1.25  # ratio of slowest rank to median above which a note suggests gossip


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
    """

    strategy: Strategy
    change: Change
    staleness: int
    iteration_s: float
    update_s: float
    bytes: float

    @property
    def gentleness(self) -> tuple[int, int, float]:
        """Sort key; smaller is gentler."""
        return CHANGES.index(self.change), self.staleness, self.bytes


@dataclass(frozen=True)
class Advice:
    """Result of `advise`.

    Attributes:
        options: all simulated options, the fastest first.
        chosen: the advised option.
        compared: options to compare on the model, the gentlest first.
        notes: remarks about the profile.
    """

    options: tuple[Option, ...]
    chosen: Option
    compared: tuple[Option, ...]
    notes: tuple[str, ...] = ()


def advise(profile: Profile, *, max_staleness: int = MAX_STALENESS) -> Advice:
    """Return the strategies to try on a profile.

    Args:
        profile: profile of the model and its network.
        max_staleness: largest staleness of an option, in iterations. 0 allows only strategies that
            compute the same numbers as DDP.

    Raises:
        ValueError: `max_staleness` is negative.
    """
    if max_staleness < 0:
        raise ValueError(f"max_staleness ({max_staleness}) must be at least 0, which is DDP's")
    options = _simulate_candidates(profile, max_staleness)
    chosen = _gentlest_option(_near_fastest(options, AS_GOOD))
    chosen = _robustest(chosen, options, profile, max_staleness)
    if chosen not in options:
        options.append(chosen)
    ranked = sorted(options, key=lambda option: (option.update_s, option.gentleness))
    return Advice(
        tuple(ranked), chosen, _select_compared(options, chosen), tuple(_notes(profile, options))
    )


def _simulate_candidates(profile: Profile, max_staleness: int) -> list[Option]:
    """Simulate the candidates whose bound is below the time of all gentler options."""
    options: list[Option] = []
    least_s = math.inf
    for candidate in candidates(max_staleness):
        if candidate.bound_s(candidate.costed(profile)) >= least_s * (1 - LEAST_GAIN):
            continue
        option = predict_option(candidate, profile)
        if option is None or not _is_allowed(option, max_staleness):
            continue
        options.append(option)
        least_s = min(least_s, option.update_s)
    return options


def _is_allowed(option: Option, max_staleness: int) -> bool:
    """Whether the staleness is allowed. With `max_staleness` 0, only DDP's numbers are allowed."""
    if not max_staleness:
        return option.change == CHANGES[0]
    return option.staleness <= max_staleness


def _robustest(chosen: Option, found: list[Option], profile: Profile, max_staleness: int) -> Option:
    """Return an option that stays nearly fastest if messages take `SLOWER` times as long.

    This is `chosen` if its time grows by at most `AS_GOOD_THEN`. Otherwise it is the gentlest
    option that is nearly fastest on the measured and on the slower links, or `chosen` if there is
    no such option.
    """
    slower = with_slower_links(profile, SLOWER)
    late = predict_option(chosen.strategy, slower)
    if late is not None and late.update_s <= chosen.update_s * (1 + AS_GOOD_THEN):
        return chosen
    least_s = min(option.update_s for option in found)
    then = _near_fastest(_simulate_candidates(slower, max_staleness), AS_GOOD_THEN)
    now = [predict_option(option.strategy, profile) for option in then]
    good = [o for o in now if o is not None and o.update_s <= least_s * (1 + AS_GOOD)]
    return _gentlest_option(good) if good else chosen


def candidates(max_staleness: int) -> Iterator[Strategy]:
    """Generate all candidates, the gentlest first.

    Strategies that depend on the data (`selsync`, `fedavg`), on servers or on a graph of
    neighbours are excluded.
    """
    exact = (DDP(), DDP(bucket_cap_mb="tuned"), WFBP(), BSP(), ASCWFBP(), DeAR(), P3())
    yield from (*exact, ByteScheduler(), USByte())
    if not max_staleness:
        return
    lossless = list(_averaging_strategies(max_staleness))
    yield from lossless
    yield DeFT()
    for strategy in (WFBP(), *lossless):
        for wire in WIRES:
            if "wire" in (field.name for field in fields(strategy)):
                yield replace(strategy, wire=wire)


def _averaging_strategies(max_staleness: int) -> Iterator[Strategy]:
    for period in periods(max_staleness + 1):
        yield LocalSGD(period)
        yield DreamDDP(period)
        yield DreamDDP(period, due="forward")
    for delay in DELAYS:
        for period in periods(max_staleness + 1 - delay):
            if delay < period:
                yield DreamDDP(period, due="delayed", delay=delay)


def periods(longest: int) -> list[int]:
    """Return the periods 2, 3, 5, 8, 12, ... below `longest`, and `longest`."""
    found, period = [], 2
    while period < longest:
        found.append(period)
        period += (period + 1) // 2
    return [*found, longest] if longest > 1 else []


def predict_option(strategy: Strategy, profile: Profile) -> Option | None:
    """Simulate a strategy.

    Returns:
        The option. None if the strategy has no plan for this profile, or if it falls back to the
        plan of another strategy, which is a candidate of its own.
    """
    with warnings.catch_warnings():  # warnings of strategies that fall back to others
        warnings.simplefilter("ignore")
        try:
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
        change = "late" if stale else "averaged"
        if any(t.payload.buffer != "grad" for t in plan.transfers):
            stale = plan.period - 1 + late
    if any(t.wire is not None for t in plan.transfers):
        change = "lossy"
    sent = sum(prediction.bytes_per_iteration.values())
    iteration_s = prediction.iteration_s
    update_s = iteration_s * plan.period / len(_gradient_ages(plan))
    return Option(strategy, change, stale, iteration_s, update_s, sent)


def _gradient_ages(plan: Plan) -> list[int]:
    """Return, for each update of one period, the age in iterations of its oldest gradient."""
    windows, first = Windows(plan), plan.prologue + plan.period
    applied = {t: windows.applied_window(t) for t in range(first, first + plan.period)}
    return [t - window.start for t, window in applied.items() if window]


def _near_fastest(found: Iterable[Option], more: float) -> list[Option]:
    """Return the options that take at most `1 + more` times the least seconds per update."""
    found = list(found)
    least_s = min(option.update_s for option in found)
    return [option for option in found if option.update_s <= least_s * (1 + more)]


def _gentlest_option(found: Iterable[Option]) -> Option:
    """Return the gentlest option; the first one of several equals."""
    return min(found, key=lambda option: option.gentleness)


def _select_compared(found: list[Option], chosen: Option) -> tuple[Option, ...]:
    """Return the options to compare on the model, the gentlest first, at most `MOST_COMPARED`.

    Candidates in order: the gentlest of the nearly fastest options with DDP's numbers, `chosen`,
    the gentlest option that is at most `WORTH_A_TRY` slower than the fastest one as gentle as
    `chosen`, and the fastest option with the change of `chosen` and less staleness.
    """
    exact = _gentlest_option(_near_fastest([o for o in found if o.change == CHANGES[0]], AS_GOOD))
    as_gentle = [o for o in found if o.gentleness <= chosen.gentleness]
    gentler = _gentlest_option(_near_fastest(as_gentle, WORTH_A_TRY))
    fresher = [o for o in found if o.change == chosen.change and o.staleness < chosen.staleness]
    nearly = min(fresher, key=lambda option: option.update_s, default=gentler)
    picked = dict.fromkeys((exact, chosen, gentler, nearly))
    return tuple(sorted(list(picked)[:MOST_COMPARED], key=lambda option: option.gentleness))


def _notes(profile: Profile, found: Iterable[Option]) -> Iterator[str]:
    if not profile.codecs and any(option.change == "lossy" for option in found):
        yield (
            "the profile has no speeds of codecs, so encoding counts as free; measure the model "
            "again with `offbeat profile`"
        )
    scales = sorted(profile.rank_scale)
    if scales and scales[-1] > UNEVEN * scales[len(scales) // 2]:
        yield (
            "ranks differ in speed: gossip (a2cid2) waits for nobody, and is not considered here"
        )


def describe_change(option: Option) -> str:
    """Return a phrase for the change that an option makes to the mathematics."""
    stale = option.staleness
    if option.change == "same numbers":
        return "same numbers as DDP"
    if option.change == "late" and not hasattr(option.strategy, "delay"):
        return f"late: gradients are applied up to {stale} iteration{'s'[: stale > 1]} later"
    period = getattr(option.strategy, "period", None)
    parts = [] if period is None else [f"averaged: parameters, every {period} iterations"]
    delay = stale - period + 1 if period is not None else 0
    if delay > 0:
        parts.append(f"which land {delay} later")
    if option.change == "lossy":
        parts.append(f"lossy: sent as {getattr(option.strategy, 'wire', 'codes')}")
    return ", ".join(parts)
