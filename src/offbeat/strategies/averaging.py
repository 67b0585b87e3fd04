"""Base classes of strategies that average parameters once per period.

`Averaging` is for averages of the whole model, `Layerwise` for layers that are averaged at
different moments. A strategy states its averages; the outer optimizer and the codec are added to
any plan of averages.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

from offbeat.core.plan import Kind, Plan
from offbeat.core.profile import Profile
from offbeat.core.strategy.interface import Planned, periodic_bound_s, require_count
from offbeat.strategies.compressible import Wired
from offbeat.strategies.equations import StatePolicy
from offbeat.strategies.outer_optimizer import Outer, OuterSGD, equations_of, outer_of, with_outer

EVERY_ITERATION = "use BSP() to synchronize in every iteration"

Average = Literal["after_update", "before_update"]
"""Time of a layer's average relative to its update."""


@dataclass(frozen=True)
class Averaging(Wired):
    """Base class of strategies that average every parameter at least once per period."""

    period: int = 5
    """Every parameter is averaged at least once in `period` iterations."""
    outer: OuterSGD | None = field(default=None, kw_only=True)
    """Optimizer that applies the change of every average as a step, such as OuterSGD(0.8, 0.3) or
    `0.8/0.3`; it needs two more copies of the parameters. None: parameters become the average."""

    synchronous: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        require_count("period", self.period, remedy=EVERY_ITERATION)
        object.__setattr__(self, "outer", outer_of(self.outer))

    @abstractmethod
    def averages(self, profile: Profile) -> Plan:
        """Return the plan of local steps and averages, without outer optimizer.

        Args:
            profile: measured facts of model and network.
        """

    def schedule(self, profile: Profile) -> Plan:
        plan = self.averages(profile)
        return plan if self.outer is None else with_outer(plan, self.outer, profile)

    @property
    def outer_equations(self) -> Outer | None:
        """Equations of the outer optimizer; None without one."""
        return equations_of(self.outer)

    def bound_s(self, profile: Profile) -> float:
        return periodic_bound_s(profile, self.period, fused=True)


@dataclass(frozen=True)
class Layerwise(Averaging):
    """Base class of strategies that average layers in different iterations, under backward."""

    average: Literal["auto", "after_update", "before_update"] = field(default="auto", kw_only=True)
    """Time of a layer's average: after its own update in backward, or before the update, which then
    takes place in `optimizer.step()`; `auto`: `after_update`, but `before_update` if the model is
    sharded."""

    @property
    def when(self) -> Average:
        """Time of a layer's average relative to its update."""
        return "after_update" if self.average == "auto" else self.average

    def at_step(self) -> Planned | None:
        return replace(self, average="before_update") if self.when == "after_update" else None

    @property
    def requires_early_updates(self) -> bool:
        return self.average == "after_update"


def kinds_of(state: StatePolicy) -> tuple[Kind, ...]:
    """Return the kinds of buffers that an average sends."""
    return ("param", "state") if state == "averaged" else ("param",)


def periods(longest: int) -> list[int]:
    """Return the periods 2, 3, 5, 8, 12, ... below `longest`, and `longest`; none if it is 1."""
    found, period = [], 2
    while period < longest:
        found.append(period)
        period += (period + 1) // 2
    return [*found, longest] if longest > 1 else []
