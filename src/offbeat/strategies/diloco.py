"""DiLoCo and Streaming DiLoCo: local steps, and an outer optimizer that steps on averaged
changes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from offbeat.core.plan import Plan
from offbeat.core.profile import Profile
from offbeat.core.strategy.interface import Strategy, periodic_bound_s, require_count
from offbeat.strategies import dreamddp_due as later
from offbeat.strategies import solvers as solve
from offbeat.strategies.compressible import Wired
from offbeat.strategies.dreamddp import DreamDDP
from offbeat.strategies.equations import Equations, delayed, layer_sets, partial
from offbeat.strategies.local_sgd import EVERY_ITERATION, LocalSGD
from offbeat.strategies.outer_optimizer import OuterSGD, equations_of, is_real, outer_of, with_outer
from offbeat.strategies.partial_sync import Average, layer_times, partial_plan, whole_buckets

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
    average: Average = "after_update"
    """Time of a layer's average: after its own update in backward, or before the update, which then
    takes place in `optimizer.step()`. With a delay or one fragment, updates and averages take place
    at the step."""

    name: ClassVar[str] = "diloco"
    synchronous: ClassVar[bool] = False
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
        if self.fragments is None:
            late = {"due": "delayed", "delay": self.delay} if self.delay else {}
            sets = DreamDDP(self.period, average=self.average, fill=False, split=False, **late)
            return sets.schedule(profile)
        if self.fragments == 1 and not self.delay:
            return LocalSGD(self.period).schedule(profile)
        if self.delay:
            setting = later.Setting(self.name, profile, self.period, self.average, "local")
            return later.delayed_plan(setting, self.delay, self._fragments(profile))
        none: solve.Sets = ((),) * self.period
        chosen = self._fragments(profile)
        average, pieces = self.average, chosen.pieces
        return partial_plan(self.name, profile, chosen.sets, none, average, "local", pieces)

    def _fragments(self, profile: Profile) -> later.Candidate:
        """Return the fragments, spread over the period.

        Without delay they are DreamDDP's sets for `fragments` iterations; with a delay, runs of
        neighbouring buckets.
        """
        assert self.fragments is not None
        times = layer_times(profile, self.average, "local")
        if self.delay:
            return later.neighbours(times[1], self.fragments, self.period)
        sets = solve.best(*times, self.fragments)
        if not all(sets):  # DreamDDP fills fewer sets if they suffice to hide all messages
            sets = later.even_loads(times[1], self.fragments)
        return later.Candidate(whole_buckets(len(profile.buckets)), later.spread(sets, self.period))

    def at_step(self) -> Strategy | None:
        early = self.average == "after_update" and not self.delay and self.fragments != 1
        return replace(self, average="before_update") if early else None

    def equations(self, plan: Plan) -> Equations:
        outer = equations_of(self.outer)
        assert outer is not None
        outer.alpha = self.alpha
        if self.delay:
            return delayed(layer_sets(plan, "average"), self.delay, self.average, None, outer)
        average = "after_update" if self.fragments == 1 else self.average
        return partial(layer_sets(plan), average, outer=outer)

    def bound_s(self, profile: Profile) -> float:
        if self.delay:
            setting = later.Setting(self.name, profile, self.period, self.average, "local")
            return later.delayed_plan_bound_s(setting)
        return periodic_bound_s(profile, self.period, fused=True)
