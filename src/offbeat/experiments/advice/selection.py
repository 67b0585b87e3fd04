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
from dataclasses import MISSING, dataclass, field, fields
from typing import Literal, get_args

from offbeat.core.derive.windows import Windows
from offbeat.core.guards.script_usage import conflict_with
from offbeat.core.guards.suitable_strategy import strategy_that_runs
from offbeat.core.plan import Plan
from offbeat.core.profile import Profile
from offbeat.core.sim import predict
from offbeat.core.strategy.interface import Strategy, planned
from offbeat.core.strategy.registry import find, strategy_names
from offbeat.experiments.elsewhere import with_slower_links

Change = Literal["same numbers", "larger batch", "averaged", "late", "lossy"]
CHANGES: tuple[Change, ...] = get_args(Change)
SAME_NUMBERS = "same numbers as DDP"
MAX_STALENESS = 9  # largest accepted staleness: that of an average every ten iterations
LEAST_GAIN = 0.0095  # least gain over gentler candidates, by the bound, that merits a simulation
AS_GOOD = 0.02  # extra time of a gentler strategy that is acceptable, over the fastest
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
    def changes(self) -> str:
        """Return a phrase for the change of the mathematics."""
        if self.change == CHANGES[0]:
            return SAME_NUMBERS
        later = f"gradients reach all machines up to {self.staleness} iterations later"
        return self.strategy.describe_change(self.plan) or (
            f"{self.change}: {later}" if self.staleness else self.change
        )

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
    change, stale = _change_of(strategy, plan)
    sent, iteration_s = sum(prediction.bytes_per_iteration.values()), prediction.iteration_s
    update_s = iteration_s * plan.period / len(_gradient_ages(plan))
    return Option(strategy, change, stale, iteration_s, update_s, sent, plan)


def _change_of(strategy: Strategy, plan: Plan) -> tuple[Change, int]:
    """Return the change of the mathematics, and the staleness in iterations."""
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
    return change, stale


def _gradient_ages(plan: Plan) -> list[int]:
    """Return, for each update of one period, the age in iterations of its oldest gradient."""
    windows, first = Windows(plan), plan.prologue + plan.period
    applied = {t: windows.applied_window(t) for t in range(first, first + plan.period)}
    return [t - window.start for t, window in applied.items() if window]


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
    require_staleness(max_staleness)
    search = _Search(max_staleness)
    options = search.simulate(profile)
    chosen = search.robustest(_gentlest_option(_near_fastest(options, AS_GOOD)), options, profile)
    if chosen not in options:
        options.append(chosen)
    ranked = sorted(options, key=lambda option: (option.update_s, option.gentleness))
    return Advice(
        tuple(ranked),
        chosen,
        _select_compared(options, chosen),
        (*_notes(profile, options), *search.notes),
    )


def require_staleness(max_staleness: int) -> None:
    """Raise ValueError for a largest staleness below 0."""
    if max_staleness < 0:
        raise ValueError(f"max_staleness ({max_staleness}) must be at least 0, which is DDP's")


class _Search:
    """Simulated candidates. Each one is planned and simulated once on a profile."""

    def __init__(self, max_staleness: int) -> None:
        self._max_staleness = max_staleness
        self._known: dict[tuple[str, int], tuple[Option | None, Profile]] = {}
        self.notes = list[str]()  # why the script needs a variant: of the first one

    def simulate(
        self, profile: Profile, *, now: Profile | None = None, most_s: float = math.inf
    ) -> list[Option]:
        """Simulate the candidates that may be advised or compared, by their bounds.

        Strategies with DDP's numbers come first. All others follow in the order of their bounds,
        and of gentleness if bounds are nearly equal, so that few are simulated on any network. A
        candidate is left out if a candidate that is as gentle is known to be as fast, or if its
        bound is more than `WORTH_A_TRY` above the fastest option, or above `most_s` on `now`.
        """
        found = list(candidates(profile, self._max_staleness))
        if now is not None:
            found = [one for one in found if one.bound_s(one.costed(now)) <= most_s]
        bounds_s = [candidate.bound_s(candidate.costed(profile)) for candidate in found]
        same = [i for i, one in enumerate(found) if one.synchronous and not one.is_lossy]
        rest = sorted(set(range(len(found))) - set(same), key=lambda i: (_step(bounds_s[i]), i))
        options: dict[int, Option] = {}
        for i in (*same, *rest):
            known_s = [(option.update_s, j) for j, option in options.items()]
            as_gentle_s = min((s for s, j in known_s if j <= i), default=math.inf)
            least_s = min((s for s, _ in known_s), default=math.inf)
            if bounds_s[i] >= as_gentle_s * (1 - LEAST_GAIN):
                continue
            if bounds_s[i] > least_s * (1 + WORTH_A_TRY):
                continue
            option = self._option(found[i], profile)
            if option is None or not _is_allowed(option, self._max_staleness):
                continue
            if option not in options.values():  # several strategies can have one variant
                options[i] = option
        return [options[i] for i in sorted(options)]

    def robustest(self, chosen: Option, found: list[Option], profile: Profile) -> Option:
        """Return an option that stays nearly fastest if messages take `SLOWER` times as long.

        This is `chosen` if its time grows by at most `AS_GOOD_THEN`. Otherwise it is the gentlest
        option that is nearly fastest on the measured links, and on the slower links nearly as fast
        as the fastest of these. If there is no such option, it is `chosen`.
        """
        slower = with_slower_links(profile, SLOWER)
        late = self._option(chosen.strategy, slower)
        if late is not None and late.update_s <= chosen.update_s * (1 + AS_GOOD_THEN):
            return chosen
        least_s = min(option.update_s for option in found) * (1 + AS_GOOD)
        then = self.simulate(slower, now=profile, most_s=least_s)
        for option in sorted(_near_fastest(then, AS_GOOD_THEN), key=lambda one: one.gentleness):
            now = self._option(option.strategy, profile)
            if now is not None and now.update_s <= least_s:
                return now
        return chosen

    def _option(self, strategy: Strategy, profile: Profile) -> Option | None:
        """Return the option of a strategy on a profile; see `predict_option`."""
        key = str(strategy), id(profile)  # the profile is kept, so that its id stays its own
        if key not in self._known:
            option = predict_option(strategy, profile)
            self._known[key] = option, profile
            if option is not None and option.strategy != strategy and not self.notes:
                why = conflict_with(profile.usage, planned(strategy).plan(profile))
                self.notes.append(
                    f"the script {why}, so strategies that would apply gradients earlier are "
                    "predicted in the variants that update in optimizer.step()"
                )
        return self._known[key][0]


def _step(bound_s: float) -> int:
    """Return a number that is equal for bounds that differ by less than about `LEAST_GAIN`."""
    return round(math.log(bound_s) / LEAST_GAIN) if bound_s > 0 else -(1 << 30)


def _is_allowed(option: Option, max_staleness: int) -> bool:
    """Whether the staleness is allowed. With `max_staleness` 0, only DDP's numbers are allowed."""
    if not max_staleness:
        return option.change == CHANGES[0]
    return option.staleness <= max_staleness


def candidates(profile: Profile, max_staleness: int) -> list[Strategy]:
    """Return the candidates of all registered strategies, the gentlest first.

    Without staleness only strategies with DDP's numbers are candidates. Some strategies suggest no
    settings, for the reason in `Strategy.unadvised`.
    """
    found = [
        strategy
        for name in strategy_names()
        if has_defaults(find(name))
        for strategy in find(name).suggestions(profile, max_staleness)
    ]
    if not max_staleness:
        found = [s for s in found if s.synchronous and not s.is_lossy]
    return sorted(found, key=_order)


def has_defaults(cls: type[Strategy]) -> bool:
    """Return whether every setting of a strategy has a default."""
    return all(f.default is not MISSING or f.default_factory is not MISSING for f in fields(cls))


def _order(strategy: Strategy) -> tuple[bool, bool, bool, float]:
    """Return the sort key of candidates: synchronous ones, averages by period, late ones, and at
    the end all with a codec."""
    period = getattr(strategy, "period", 0 if strategy.synchronous else math.inf)
    return strategy.is_lossy, not strategy.synchronous, strategy.applies_late, period


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
            "ranks differ in speed: gossip waits for nobody and is not considered here; predict it "
            "with `offbeat simulate --strategy a2cid2`"
        )
