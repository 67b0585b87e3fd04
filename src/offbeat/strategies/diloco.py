"""DiLoCo and Streaming DiLoCo: local steps, and an outer optimizer that steps on averaged
changes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import repeat
from typing import ClassVar, Literal

from offbeat.core.plan import Plan
from offbeat.core.profile import Profile
from offbeat.core.sim import predict_plan
from offbeat.core.strategy.interface import Strategy, periodic_bound_s, require_count
from offbeat.strategies import dreamddp_due as later
from offbeat.strategies import solvers as solve
from offbeat.strategies.compressible import Wired
from offbeat.strategies.dreamddp import DreamDDP, full_sets
from offbeat.strategies.equations import Equations, delayed, layer_sets, partial
from offbeat.strategies.local_sgd import EVERY_ITERATION, LocalSGD
from offbeat.strategies.outer_optimizer import OuterSGD, equations_of, is_real, outer_of, with_outer
from offbeat.strategies.partial_sync import (
    Average,
    AverageSetting,
    average_of,
    layer_times,
    partial_plan,
    whole_buckets,
)

STEADY = OuterSGD()


@dataclass(frozen=True)
class DiLoCo(Wired):
    """Train locally for `period` steps, average, and apply the average with an outer optimizer.

    All workers continue from the result of the outer step. `fragments` and `delay` select Streaming
    DiLoCo: fragments of the model are averaged in different iterations, while training continues.
    The planner of DreamDDP assigns buckets to fragments.
    """

    period: int = 50
    """Local steps between two averages of a parameter."""
    outer: OuterSGD = STEADY
    """Outer optimizer: OuterSGD(lr, momentum, nesterov), or text. `0.7/0.9` is the published
    setting; its results are worse if periods or training are short."""
    fragments: int | None = None
    """Number of parts of the model that are averaged at different times, evenly spread over the
    period. 1: all at once, after the step (DiLoCo); None: chosen by DreamDDP's planner."""
    delay: int = 0
    """Number of iterations that train while a fragment is in flight (tau)."""
    alpha: float | None = None
    """Share of a worker's own parameters that is kept when the average of a fragment arrives: 0:
    nothing; 0.5: the published setting; None: all changes since the fragment was sent (`w += new -
    sent`)."""
    average: AverageSetting = "auto"
    """Time of a layer's average: after its own update in backward, or before the update, which then
    takes place in `optimizer.step()`; `auto`: `after_update`, but `before_update` if the model is
    sharded. With a delay or one fragment, updates and averages take place at the step."""
    due: Literal["end", "forward"] = "end"
    """Deadline of an average: the end of its iteration (`end`), or the next forward of each bucket
    (`forward`), with the same equations. If that is predicted to be faster, `forward` also sends in
    backward what `end` sends at the step, and has other fragments. With a delay both deadlines are
    at a forward."""

    name: ClassVar[str] = "diloco"
    synchronous: ClassVar[bool] = False
    unadvised: ClassVar[str] = "it is as fast as dreamddp with its period; only its losses differ"
    citation: ClassVar[str] = (
        "Douillard et al., DiLoCo, 2023, Algorithm 1; Douillard et al., Streaming DiLoCo with "
        "overlapping communication, 2025, Algorithm 2"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        require_count("period", self.period, remedy=EVERY_ITERATION)
        require_count("delay", self.delay, least=0)
        object.__setattr__(self, "outer", outer_of(self.outer))
        if self.outer is None:
            raise ValueError("outer (None) must be an OuterSGD; without one use DreamDDP()")
        if self.delay >= self.period:
            raise ValueError(
                f"delay ({self.delay}) must be below the period ({self.period}): a fragment "
                "travels once at a time; use a smaller delay or a longer period"
            )
        if self.fragments is not None:
            require_count("fragments", self.fragments, remedy="None lets the planner choose")
            if self.fragments > self.period:
                raise ValueError(
                    f"fragments ({self.fragments}) must be at most the period ({self.period}), as "
                    "each has an iteration of its own; use fewer, or None"
                )
        if self.alpha is not None and not (is_real(self.alpha) and 0 <= self.alpha < 1):
            raise ValueError(
                f"alpha ({self.alpha!r}) must be at least 0 and below 1: with 1 nothing would land"
            )
        if self.alpha is not None and self.delay == 0:
            raise ValueError(
                f"alpha ({self.alpha}) counts only with a delay; leave it out, or use delay=1"
            )

    @property
    def applies_late(self) -> bool:
        return self.delay > 0

    def schedule(self, profile: Profile) -> Plan:
        buckets = len(profile.buckets)
        if self.fragments is not None and self.fragments > buckets:
            raise ValueError(
                f"fragments ({self.fragments}) must be at most the model's buckets ({buckets}): a "
                "bucket is averaged whole; use fewer, or None"
            )
        plan = with_outer(self._average_plan(profile), self.outer, profile, share=self.alpha)
        return replace(plan, strategy=self.name)

    def _average_plan(self, profile: Profile) -> Plan:
        """Return the plan of the averages, without outer optimizer."""
        if self.due == "forward":
            return self._fastest_plan(profile)
        if self.fragments is None:
            late = {"due": "delayed", "delay": self.delay} if self.delay else {}
            return replace(self._planner(), **late).schedule(profile)
        if self.fragments == 1 and not self.delay:
            return LocalSGD(self.period).schedule(profile)
        if self.delay:
            runs = self._runs(profile, self.fragments)
            return later.delayed_plan(self._setting(profile), self.delay, runs)
        none: solve.Sets = ((),) * self.period
        chosen = self._best_sets(profile)
        average, pieces = self._average, chosen.pieces
        return partial_plan(self.name, profile, chosen.sets, none, average, "local", pieces)

    def _fastest_plan(self, profile: Profile) -> Plan:
        """Return the plan of `due="end"`, or the fastest one with later deadlines if that is
        predicted to be faster."""
        best = replace(self, due="end")._average_plan(profile)
        best_s, least_s = predict_plan(best, profile).iteration_s, profile.slowest().compute_s
        for plan in self._late_plans(profile):
            if best_s <= least_s * (1 + later.ROUNDING):
                break
            seconds = predict_plan(plan, profile).iteration_s
            if seconds < best_s * (1 - later.ROUNDING):
                best, best_s = plan, seconds
        return best

    def _planner(self) -> DreamDDP:
        return DreamDDP(self.period, average=self.average, fill=False, split=False)

    def _setting(self, profile: Profile) -> later.Setting:
        return later.Setting(self.name, profile, self.period, self._average, "local")

    def _late_plans(self, profile: Profile) -> Iterator[Plan]:  # noqa: C901
        """Yield the plans that `due="forward"` compares with the plan of `due="end"`."""
        setting = self._setting(profile)
        if self.delay:
            for count in self._counts(setting.buckets):
                for fragments in (self._runs(profile, count), self._even_sets(profile, count)):
                    for early in (False, True):
                        plan = later.delayed_plan(setting, self.delay, fragments, early=early)
                        yield later.with_idle_steps(plan)
        elif self.fragments is None:
            yield replace(self._planner(), due="forward").schedule(profile)
        elif self.fragments == 1:
            yield later.bucketwise_plan(setting)
            if self._average == "after_update":
                starts = [*full_sets(self._planner(), profile), self._even_sets(profile, 1)]
                for start in starts:
                    choices = later.forward_choices(setting, start, (), search=False)
                    yield from map(self._forward_plan, repeat(setting), choices)
        else:
            # Iterations without messages do not affect the others, so sets are searched without
            # them.
            dense = replace(setting, period=self.fragments)
            for sets in (self._best_sets(profile), self._even_sets(profile, self.fragments)):
                start = sets._replace(sets=tuple(filter(None, sets.sets)))
                if len(start.sets) < self.fragments:  # messages without cost share a fragment
                    continue
                start = start._replace(fill=((),) * self.fragments)
                for choice in later.forward_choices(dense, start, (), search=True):
                    if all(choice.orders):
                        yield self._forward_plan(setting, choice)

    def _forward_plan(self, setting: later.Setting, choice: later.Choice) -> Plan:
        """Return the plan of a choice whose iterations are spread over the period."""
        orders, none = later.spread(choice.orders, self.period), ((),) * self.period
        plan = later.forward_plan(setting, choice._replace(orders=orders, fill=none))
        return later.with_idle_steps(plan)

    def _counts(self, buckets: int) -> list[int]:
        """Return the numbers of fragments to compare."""
        if self.fragments is not None:
            return [self.fragments]
        most = min(self.period, buckets)
        return sorted({2**n for n in range(most.bit_length())} | {most})

    def _runs(self, profile: Profile, count: int) -> later.Candidate:
        """Return fragments of neighbouring buckets, spread over the period."""
        message_s = layer_times(profile, self._average, "local")[1]
        return later.neighbours(message_s, count, self.period)

    def _even_sets(self, profile: Profile, count: int) -> later.Candidate:
        """Return fragments of even load, spread over the period; of equal buckets, every
        `count`-th one."""
        message_s = layer_times(profile, self._average, "local")[1]
        grain_s = later.ROUNDING * max(message_s) or 1.0  # equal buckets differ by rounding errors
        sets = later.even_loads([round(seconds / grain_s) for seconds in message_s], count)
        return self._spread(profile, sets)

    def _best_sets(self, profile: Profile) -> later.Candidate:
        """Return DreamDDP's sets for `fragments` iterations, spread over the period."""
        assert self.fragments is not None
        times = layer_times(profile, self._average, "local")
        sets = solve.best(*times, self.fragments)
        if not all(sets):  # DreamDDP fills fewer sets if they suffice to hide all messages
            sets = later.even_loads(times[1], self.fragments)
        return self._spread(profile, sets)

    def _spread(self, profile: Profile, sets: solve.Sets) -> later.Candidate:
        pieces, none = whole_buckets(len(profile.buckets)), ((),) * self.period
        return later.Candidate(pieces, later.spread(sets, self.period), none)

    def at_step(self) -> Strategy | None:
        after, together = self._average == "after_update", self.fragments == 1 and not self.delay
        if self.due == "end":
            early = after and not together and not self.delay
            return replace(self, average="before_update") if early else None
        if together:  # one fragment has the same equations with both settings of `average`
            return replace(self, average="before_update") if after else None
        if self.delay:
            return replace(self, due="end") if after else None
        return replace(self, average="before_update", due="end")

    @property
    def requires_early_updates(self) -> bool:
        return self.average == "after_update" and self.fragments != 1 and not self.delay

    @property
    def _average(self) -> Average:
        return average_of(self.average)

    def equations(self, plan: Plan) -> Equations:
        outer = equations_of(self.outer)
        assert outer is not None
        outer.alpha = self.alpha
        if self.delay:
            return delayed(layer_sets(plan, "average"), self.delay, self._average, None, outer)
        average = "after_update" if self.fragments == 1 else self._average
        return partial(layer_sets(plan), average, outer=outer)

    def bound_s(self, profile: Profile) -> float:
        if self.delay:
            return later.delayed_plan_bound_s(self._setting(profile))
        if self.due == "forward":
            return later.forward_plan_bound_s(self._setting(profile))
        return periodic_bound_s(profile, self.period, fused=True)
