"""Local SGD: local steps and one average of the whole model per period."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import ClassVar

from offbeat.core.plan import Apply, Moment, Phases, Plan, local
from offbeat.core.profile import Profile
from offbeat.core.strategy.interface import Strategy, require_count
from offbeat.strategies.averaging import Averaging, kinds_of, periods
from offbeat.strategies.bsp import all_gradients, averages
from offbeat.strategies.compressible import with_wires
from offbeat.strategies.equations import Equations, StatePolicy, World, average_piece, synchronous
from offbeat.strategies.outer_optimizer import COMMON, Outer

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


def local_sgd(
    period: int, warmup: int = 0, state: StatePolicy = "local", outer: Outer | None = None
) -> Equations:
    """Return the equations of local SGD: local steps, then `w = mean_k(w_k)` after every
    `period`-th.

    Args:
        period: iterations between two averages.
        warmup: number of synchronous iterations at the start. With `outer`, an average ends
            them.
        state: treatment of the optimizer's state at an average: "local", "averaged" or "reset".
        outer: optimizer that steps on each average; None for none.
    """
    first = synchronous()

    def advance(world: World, iteration: int) -> None:
        if iteration < warmup:
            first(world, iteration)
            if outer is not None and iteration + 1 == warmup:
                world.average("param")
            return
        if outer is not None:
            outer.start(world)
        world.gradients(iteration)
        world.step()
        if (iteration - warmup + 1) % period == 0:
            average_piece(world, None, state)
            if outer is not None:
                outer(world, None)
        world.end()

    return advance
