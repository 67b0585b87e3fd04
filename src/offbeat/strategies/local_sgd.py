"""Local SGD: local steps and one average of the whole model per period."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import ClassVar

from offbeat.core.plan import Apply, Moment, Phases, Plan, local
from offbeat.core.profile import Profile
from offbeat.core.strategy.interface import StatePolicy, Strategy, require_count
from offbeat.strategies.averaging import Averaging, kinds_of
from offbeat.strategies.bsp import all_gradients, averages
from offbeat.strategies.compressible import with_wires
from offbeat.strategies.equations import Equations, local_sgd
from offbeat.strategies.outer_optimizer import COMMON
from offbeat.strategies.suggestions import periods

STEP, END = Moment("step"), Moment("end")


@dataclass(frozen=True)
class LocalSGD(Averaging):
    """Average parameters after every `period` local steps (FLSGD)."""

    warmup: int = 0
    """Number of BSP iterations before the first period (post-local SGD)."""
    state: StatePolicy = field(default="local", kw_only=True)
    """Treatment of optimizer state at an average: keep it (`local`), average it too (`averaged`,
    more bytes), or clear it (`reset`)."""

    name: ClassVar[str] = "local-sgd"
    citation: ClassVar[str] = (
        "Stich, Local SGD, ICLR 2019; warm-up: Lin et al., Don't use large mini-batches, ICLR 2020"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        require_count("warmup", self.warmup, least=0)

    @classmethod
    def suggestions(cls, profile: Profile, max_staleness: int) -> Iterable[Strategy]:
        return with_wires(cls(period) for period in periods(max_staleness + 1))

    def averages(self, profile: Profile) -> Plan:
        everything, last = range(len(profile.buckets)), self.warmup + self.period - 1
        transfers = all_gradients(profile, range(self.warmup)) if self.warmup else []
        kinds = kinds_of(self.state)
        transfers += averages(profile, kinds, everything, after=STEP, before=END, phases=[last])
        applies = [local(len(everything), STEP, range(last + 1))]
        if self.state == "reset":
            applies.append(Apply("reset", everything, END, Phases([last])))
        return Plan(
            self.name,
            len(everything),
            tuple(transfers),
            tuple(applies),
            period=self.period,
            prologue=self.warmup,
        )

    def schedule(self, profile: Profile) -> Plan:
        """Return the plan; with an outer optimizer, an average ends the warm-up.

        Without this average, replicas whose resumed momentum differs would start the outer steps
        from different parameters.
        """
        plan = super().schedule(profile)
        if not self.warmup or self.outer is None:
            return plan
        last, everything = Phases([self.warmup - 1]), range(plan.buckets)
        average = replace(next(t for t in plan.transfers if t.target == "param"), phases=last)
        args = (("source", "param"), ("target", COMMON))
        begin = Apply("copy", everything, END, last, args=args)
        return replace(plan, transfers=(*plan.transfers, average), applies=(*plan.applies, begin))

    def equations(self, plan: Plan) -> Equations:
        return local_sgd(self.period, self.warmup, self.state, self.outer_equations)
