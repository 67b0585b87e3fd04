"""Local SGD: local steps and one average of the whole model per period."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import ClassVar

from offbeat.core.plan import Apply, Kind, Moment, Phases, Plan, local
from offbeat.core.profile import Profile
from offbeat.core.strategy.interface import (
    StatePolicy,
    Strategy,
    periodic_bound_s,
    require_count,
)
from offbeat.core.strategy.suggestions import periods
from offbeat.strategies.bsp import all_gradients, averages
from offbeat.strategies.compressible import Wired, with_wires
from offbeat.strategies.equations import Equations, local_sgd
from offbeat.strategies.outer_optimizer import COMMON, OuterSGD, equations_of, outer_of, with_outer

EVERY_ITERATION = "use BSP() to synchronize in every iteration"


@dataclass(frozen=True)
class LocalSGD(Wired):
    """Average parameters after every `period` local steps (FLSGD)."""

    period: int = 5
    """Local steps between two averages."""
    warmup: int = 0
    """Number of BSP iterations before the first period (post-local SGD)."""
    state: StatePolicy = "local"
    """Treatment of optimizer state at an average: keep it (`local`), average it too (`averaged`,
    more bytes), or clear it (`reset`)."""
    outer: OuterSGD | None = None
    """Optimizer that applies the change of every average as a step (DiLoCo), such as OuterSGD(0.8,
    0.3) or `0.8/0.3`; it needs two more copies of the parameters. None: parameters become the
    average."""

    name: ClassVar[str] = "local-sgd"
    synchronous: ClassVar[bool] = False
    citation: ClassVar[str] = (
        "Stich, Local SGD, ICLR 2019; warm-up: Lin et al., Don't use large mini-batches, ICLR 2020"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        require_count("period", self.period, remedy=EVERY_ITERATION)
        require_count("warmup", self.warmup, least=0)
        object.__setattr__(self, "outer", outer_of(self.outer))

    @classmethod
    def suggestions(cls, profile: Profile, max_staleness: int) -> Iterable[Strategy]:
        return with_wires(cls(period) for period in periods(max_staleness + 1))

    def schedule(self, profile: Profile) -> Plan:
        everything = range(len(profile.buckets))
        transfers = all_gradients(profile, range(self.warmup)) if self.warmup else []
        kinds, averaging = kinds_of(self.state), [self.warmup + self.period - 1]
        step, end = Moment("step"), Moment("end")
        transfers += averages(profile, kinds, everything, after=step, before=end, phases=averaging)
        applies = [local(len(everything), step, range(self.warmup + self.period))]
        if self.state == "reset":
            applies.append(Apply("reset", everything, end, Phases(averaging)))
        plan = Plan(
            self.name,
            len(everything),
            tuple(transfers),
            tuple(applies),
            period=self.period,
            prologue=self.warmup,
        )
        return plan if self.outer is None else self._with_outer(plan, self.outer, profile)

    def _with_outer(self, plan: Plan, outer: OuterSGD, profile: Profile) -> Plan:
        """Add the outer optimizer, and an average of the parameters at the end of the warm-up.

        Without this average, replicas whose resumed momentum differs would start the outer steps
        from different parameters.
        """
        plan = with_outer(plan, outer, profile)
        if not self.warmup:
            return plan
        last, everything = Phases([self.warmup - 1]), range(plan.buckets)
        average = replace(next(t for t in plan.transfers if t.target == "param"), phases=last)
        args = (("source", "param"), ("target", COMMON))
        begin = Apply("copy", everything, Moment("end"), last, args=args)
        return replace(plan, transfers=(*plan.transfers, average), applies=(*plan.applies, begin))

    def equations(self, plan: Plan) -> Equations:
        return local_sgd(self.period, self.warmup, self.state, equations_of(self.outer))

    def bound_s(self, profile: Profile) -> float:
        return periodic_bound_s(profile, self.period, fused=True)


def kinds_of(state: StatePolicy) -> tuple[Kind, ...]:
    """Return the kinds of buffers that an average sends."""
    return ("param", "state") if state == "averaged" else ("param",)
