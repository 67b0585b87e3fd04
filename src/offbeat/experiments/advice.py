"""Advice: which strategies to try on a model, from its profile. Numbers in, numbers out.

Candidates are simulated, those first that change the least about the mathematics. Whatever cannot
be faster than a gentler one by its bound is left out. Of those that are as good as the fastest, and
would be with slower messages, too, the gentlest is chosen.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

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

MAX_STALENESS = 9  # iterations: averages every ten
DELAYS = (1, 2, 4)
WIRES = ("int8", "int4")
LEAST_GAIN = 0.004  # by its bound, of what is simulated although something gentler was
AS_GOOD = 0.025  # of the fastest: what a gentler one may take more
SLOWER = 1.5  # so many times what was measured may messages take: 1.8 were seen beside training
AS_GOOD_THEN = 0.05  # of the fastest then: what the chosen one may take more
WORTH_A_TRY = 0.25  # of the fastest: what a gentler kind may take more to be compared, too
MOST_COMPARED = 3
UNEVEN = 1.25  # slowest rank over the median, from which on waiting is worth avoiding


@dataclass(frozen=True)
class Option:
    """A strategy, and what it is predicted to take per iteration and per update, of which there
    are fewer where gradients are merged.

    `change`: what it does to the mathematics. `staleness`: iterations until what a worker has
    learnt has reached all others, at most. `bytes`: payload of a rank and iteration.
    """

    strategy: Strategy
    change: Change
    staleness: int
    iteration_s: float
    update_s: float
    bytes: float

    @property
    def gentleness(self) -> tuple[int, int, float]:
        """Less is gentler."""
        return CHANGES.index(self.change), self.staleness, self.bytes


@dataclass(frozen=True)
class Advice:
    """Options, the fastest first; the one that is advised; those to compare on the model, the
    gentlest first; and what else is to be known."""

    options: tuple[Option, ...]
    chosen: Option
    compared: tuple[Option, ...]
    notes: tuple[str, ...] = ()


def advise(profile: Profile, *, max_staleness: int = MAX_STALENESS) -> Advice:
    """What to try on this profile. ValueError for a negative `max_staleness`; 0 allows only what
    computes the same numbers as DDP."""
    if max_staleness < 0:
        raise ValueError(f"max_staleness ({max_staleness}) must be at least 0, which is DDP's")
    found = _simulate_candidates(profile, max_staleness)
    chosen = _gentlest_option(_near_fastest(found, AS_GOOD))
    chosen = _robustest(chosen, found, profile, max_staleness)
    if chosen not in found:
        found.append(chosen)
    ranked = sorted(found, key=lambda option: (option.update_s, option.gentleness))
    return Advice(
        tuple(ranked), chosen, _select_compared(found, chosen), tuple(_notes(profile, found))
    )


def _simulate_candidates(profile: Profile, max_staleness: int) -> list[Option]:
    """What may be the fastest, as its bound is lower than what gentler ones take."""
    found: list[Option] = []
    least_s = math.inf
    for candidate in candidates(max_staleness):
        if candidate.bound_s(candidate.costed(profile)) >= least_s * (1 - LEAST_GAIN):
            continue
        option = predict_option(candidate, profile)
        if option is None or not _is_allowed(option, max_staleness):
            continue
        found.append(option)
        least_s = min(least_s, option.update_s)
    return found


def _is_allowed(option: Option, max_staleness: int) -> bool:
    """Without staleness only DDP's numbers are allowed, which no codec computes."""
    if not max_staleness:
        return option.change == CHANGES[0]
    return option.staleness <= max_staleness


def _robustest(chosen: Option, found: list[Option], profile: Profile, max_staleness: int) -> Option:
    """In place of a choice that only just hides its messages: the gentlest that is good where they
    take longer, too; the choice itself if that is, or nothing else is good here."""
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
    """Everything that is considered, the gentlest first. Not what depends on the data (`selsync`,
    `fedavg`), on servers or on a graph of neighbours."""
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
                yield with_settings(strategy, wire=wire)


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
    """2, 3, 5, 7, 10, ...: by half as much again, and the longest."""
    found, period = [], 2
    while period < longest:
        found.append(period)
        period += (period + 1) // 2
    return [*found, longest] if longest > 1 else []


def with_settings(strategy: Strategy, **settings: Any) -> Strategy:
    """The strategy with some of its settings changed."""
    return type(strategy)(**{**strategy.settings(), **settings})


def predict_option(strategy: Strategy, profile: Profile) -> Option | None:
    """What a strategy is predicted to take; None if its plan is another strategy's, which is
    considered by itself, or if there is none for this profile."""
    with warnings.catch_warnings():  # of strategies that fall back to others
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
    """What was predicted, with what it does to the mathematics."""
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
    """Of every update of a period: iterations from its oldest gradient to it."""
    windows, first = Windows(plan), plan.prologue + plan.period
    applied = {t: windows.applied(t) for t in range(first, first + plan.period)}
    return [t - window.start for t, window in applied.items() if window]


def _near_fastest(found: Iterable[Option], more: float) -> list[Option]:
    """Those that take at most a share more than the fastest."""
    found = list(found)
    least_s = min(option.update_s for option in found)
    return [option for option in found if option.update_s <= least_s * (1 + more)]


def _gentlest_option(found: Iterable[Option]) -> Option:
    """The first of equals."""
    return min(found, key=lambda option: option.gentleness)


def _select_compared(found: list[Option], chosen: Option) -> tuple[Option, ...]:
    """The chosen one, one of the fastest that compute the same as DDP, and a gentler one than the
    chosen that is nearly as fast."""
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
    """What a strategy changes about the mathematics."""
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
