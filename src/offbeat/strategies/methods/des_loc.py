"""DES-LOC: local steps; parameters and moments of the optimizer are averaged with own periods."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, lcm
from typing import ClassVar

from offbeat.core.plan import Buffer, Moment, Phases, Plan, local, transfer
from offbeat.core.plan.types import MOMENT_PREFIX, moment_of
from offbeat.core.profile import Profile
from offbeat.core.strategy.interface import Planned, periodic_bound_s, require_count
from offbeat.strategies.averaging import EVERY_ITERATION
from offbeat.strategies.equations import Equations, World

STEP, END = Moment("step"), Moment("end")


@dataclass(frozen=True)
class DESLOC(Planned):
    """Local steps; parameters and each moment of the optimizer are averaged with own periods.

    After step t, the parameters are averaged if `period` divides t + 1, the first moment if
    `period * first` does, and the further moments if `period * second` does. So moments, which
    change more slowly, cost fewer messages than the average of all state (`LocalSGD` with
    `state="averaged"`), and workers do not keep moments of their own as with `state="local"`.

    Moments are tensors that the optimizer keeps for each parameter, in the order of their names:
    `exp_avg` and `exp_avg_sq` of Adam, `momentum_buffer` of SGD. A moment that the optimizer does
    not have costs nothing.
    """

    period: int = 50
    """Local steps between two averages of the parameters (K_x)."""
    first: int = 3
    """Averages of the parameters per average of the first moment (K_u / K_x)."""
    second: int = 6
    """Averages of the parameters per average of the second moment (K_v / K_x)."""

    name: ClassVar[str] = "des-loc"
    synchronous: ClassVar[bool] = False
    unadvised: ClassVar[str] = (
        "it is not faster than local-sgd with its period; only its losses differ"
    )
    citation: ClassVar[str] = (
        "Iacob et al., DES-LOC: Desynced low communication adaptive optimizers for training "
        "foundation models, arXiv 2505.22549, 2025, Algorithm 1"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        require_count("period", self.period, remedy=EVERY_ITERATION)
        require_count("first", self.first, remedy="1 averages it with the parameters")
        require_count("second", self.second, remedy="1 averages it with the parameters")

    def schedule(self, profile: Profile) -> Plan:
        everything = range(len(profile.buckets))
        moments = [f"{MOMENT_PREFIX}{k}" for k in range(moment_count(profile))]
        cycle = self.period * lcm(*map(self._rounds, ("param", *moments)))
        transfers = tuple(
            transfer(
                name,
                everything,
                after=STEP,
                before=END,
                phases=self._averaging(name, cycle),
                link=profile.default_link.name,
            )
            for name in ("param", *moments)
        )
        buffers = tuple(Buffer(name, "grad", kept=False) for name in moments)
        steps = local(len(everything), STEP, range(cycle))
        return Plan(self.name, len(everything), transfers, (steps,), buffers=buffers, period=cycle)

    def _rounds(self, buffer: str) -> int:
        """Return the averages of the parameters per average of a buffer."""
        moment = moment_of(buffer)
        return 1 if moment is None else self.second if moment else self.first

    def _averaging(self, buffer: str, cycle: int) -> Phases:
        """Return the phases in which a buffer is averaged."""
        each = self.period * self._rounds(buffer)
        return Phases(range(each - 1, cycle, each))

    def equations(self, plan: Plan) -> Equations:
        moments: Sequence[str] = [b.name for b in plan.buffers if moment_of(b.name) is not None]

        def advance(world: World, iteration: int) -> None:
            world.gradients(iteration)
            world.step()
            for name in ("param", *moments):
                if (iteration + 1) % (self.period * self._rounds(name)) == 0:
                    world.average(name)
            world.end()

        return advance

    def bound_s(self, profile: Profile) -> float:
        return periodic_bound_s(profile, self.period, fused=True)


def moment_count(profile: Profile) -> int:
    """Return how many moments the optimizer keeps per parameter, of those with the most.

    A moment that it does not keep for a parameter is no part of its averages.
    """
    shares = [b.state_bytes / b.size_bytes for b in profile.buckets if b.size_bytes]
    return ceil(max(shares, default=0.0) - 0.01)
