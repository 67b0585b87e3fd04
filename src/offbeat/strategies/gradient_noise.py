"""Gradient noise scale, from norms of gradients before and after averaging."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from offbeat.core.buckets.flat import Flat
from offbeat.core.buckets.gradients import Gradients
from offbeat.core.derive.windows import Windows
from offbeat.core.observers import Observer
from offbeat.core.plan import Plan
from offbeat.core.plan.types import Point
from offbeat.core.profile import GradientNoise
from offbeat.core.transport.control import Control

if TYPE_CHECKING:
    from offbeat.core.runtime.iteration import Iteration

SECOND_MOMENT = "exp_avg_sq"  # name of the state in Adam, AdamW, NAdam and RAdam


class NoiseMeter:
    """Squared norms of this rank's gradients before and after they are averaged over K ranks.

    Let G be the true gradient and S the noise of one rank's gradient. The sum of gradients over k
    iterations has the expected squared norms `own = k^2 |G|^2 + k S` before averaging and
    `avg = k^2 |G|^2 + k S / K` after it. Therefore `|G|^2 = (K avg - own) / (K - 1) / k^2`, and
    `S / K = (own - avg) / (K - 1) / k`.

    Source: McCandlish et al., An empirical model of large-batch training, 2018, appendix A.1.
    """

    def __init__(self, world_size: int) -> None:
        self._others = max(world_size - 1, 1)
        self._own: Tensor | float = 0.0
        self._waiting: deque[Tensor | float] = deque()
        self._found: list[tuple[Tensor | float, Tensor | float]] = []

    def add_own(self, grads: Sequence[Tensor]) -> None:
        """Add gradients of this rank that are complete and not averaged yet."""
        self._own = self._own + _squared_norm(grads)

    def complete(self) -> None:
        """Record that all gradients of this rank were added for one average."""
        self._waiting.append(self._own)
        self._own = 0.0

    def add_average(self, grads: Sequence[Tensor], merged: int) -> None:
        """Add the average over ranks of the gradients that were completed first.

        `merged` is the number of iterations in their sum.
        """
        own, average = self._waiting.popleft(), _squared_norm(grads)
        noise = (own - average) / self._others
        self._found.append(((average - noise) / merged**2, noise / merged))

    def reset(self) -> None:
        """Forget gradients whose average will not be added."""
        self._own = 0.0
        self._waiting.clear()

    def take(self) -> tuple[float, float] | None:
        """Return the means of (|G|^2, S / K) since the last call; None without any average.

        Averages over ranks are unbiased. Values of a single rank may be negative.
        """
        estimates, self._found = self._found, []
        if not estimates:
            return None
        signal, noise = (
            sum(float(value) for value in values) for values in zip(*estimates, strict=True)
        )
        return signal / len(estimates), noise / len(estimates)


class Training(Protocol):
    """Engine whose gradients are measured."""

    plan: Plan
    flat: Flat
    gradients: Gradients
    control: Control
    optimizer: torch.optim.Optimizer


class Metering(Observer):
    """Observer that passes each rank's own gradients, complete and not yet sent, and their averages
    to a noise meter."""

    every_bucket = True

    def __init__(self, engine: Training) -> None:
        self.meter, self._engine = NoiseMeter(engine.control.world_size), engine
        self._first: int | None = None  # number of the first iteration of the plan

    def reached(self, iteration: Iteration, point: Point, bucket: int = -1) -> None:
        plan, planned = self._engine.plan, iteration.planned
        first, windows = iteration.number - planned, Windows(plan)
        if self._first not in (None, first):  # the plan has begun anew, without averages in flight
            self.meter.reset()
        self._first = first
        if point == "grad" and windows.closes_window(planned):
            self.meter.add_own(self._gradients(range(bucket, bucket + 1), 0))
            if bucket + 1 == plan.buckets:
                self.meter.complete()
        elif point == "step" and (applied := windows.applied_window(planned)):
            age = max((a.arg("age", 0) for a in plan.applies), default=0)
            self.meter.add_average(self._gradients(range(plan.buckets), age), len(applied))

    def noise(self, losses: Sequence[Tensor]) -> GradientNoise | None:
        """Return the gradient noise since the last call, from all ranks; see `noise_of`.

        Args:
            losses: losses of this rank.
        """
        numbers = [float(loss) for loss in losses]
        seen = RankStatistics.of(numbers, self.meter.take(), self._engine.optimizer)
        everyone = self._engine.control.gather(asdict(seen))
        return noise_of([RankStatistics(**fields) for fields in everyone])

    def _gradients(self, buckets: range, age: int) -> list[Tensor]:
        copy = self._engine.flat.copy_index("grad", age)
        return list(self._engine.gradients.gradient_tensors(buckets, copy))


@dataclass(frozen=True)
class RankStatistics:
    """Losses, gradient norms and step size of one rank.

    `gradients` is the result of `NoiseMeter.take`.
    """

    losses: list[float]
    gradients: tuple[float, float] | None
    step_size: float
    scale_free: bool = False

    @classmethod
    def of(
        cls,
        losses: list[float],
        gradients: tuple[float, float] | None,
        optimizer: torch.optim.Optimizer,
    ) -> RankStatistics:
        return cls(losses, gradients, step_size(optimizer), is_scale_free(optimizer))


def is_scale_free(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer divides gradients by their size, as Adam does."""
    return any(SECOND_MOMENT in state for state in optimizer.state.values())


def step_size(optimizer: torch.optim.Optimizer) -> float:
    """Return how far a constant gradient of 1 moves a parameter per iteration in the limit.

    For SGD it is the learning rate of the first group, multiplied by the effect of momentum. For
    Adam and its variants it is the learning rate divided by the size of gradients, which is
    estimated from second moments.
    """
    group = optimizer.param_groups[0]
    rate, momentum = _number(group.get("lr")), _number(group.get("momentum"))
    if is_scale_free(optimizer):
        return rate * _over_size(optimizer)
    if not 0 < momentum < 1:
        return rate
    return rate * (1 - _number(group.get("dampening"))) / (1 - momentum)


def _number(setting: Any) -> float:
    """Return a setting as a number; 0 if it is none, as the rate of optimizers that find their own
    (Adafactor)."""
    return float(setting) if isinstance(setting, (int, float, Tensor)) else 0.0


def _over_size(optimizer: torch.optim.Optimizer) -> float:
    """Return the mean of 1 / |gradient entry| over entries, weighted by their squares."""
    sizes = squares = 0.0
    for group in optimizer.param_groups:
        decay = float((group.get("betas") or (0.0, 0.0))[1])
        for p in group["params"]:
            state = optimizer.state.get(p, {})
            if SECOND_MOMENT not in state or not float(state.get("step", 0)):
                continue
            grown = 1 - decay ** float(state["step"])  # bias correction: moments start at 0
            moment = state[SECOND_MOMENT].double()
            sizes += float(moment.sqrt().sum()) / math.sqrt(grown)
            squares += float(moment.sum()) / grown
    return sizes / squares if squares else 0.0


def noise_of(everyone: Sequence[RankStatistics]) -> GradientNoise | None:
    """Return the gradient noise averaged over ranks, with the step size of rank 0.

    Return None if a rank has no losses or no gradient norms, or if there is one rank only.
    """
    gradients = [seen.gradients for seen in everyone if seen.losses and seen.gradients is not None]
    if len(everyone) < 2 or len(gradients) < len(everyone):
        return None
    loss = fmean(fmean(seen.losses) for seen in everyone)
    signal, noise = (fmean(values) for values in zip(*gradients, strict=True))
    values = (loss, max(0.0, signal), max(0.0, noise), everyone[0].step_size)
    if not all(map(math.isfinite, values)):
        return None
    return GradientNoise(*values, scale_free=everyone[0].scale_free)


def _squared_norm(grads: Sequence[Tensor]) -> Tensor | float:
    return sum((torch.linalg.vector_norm(g).double().square() for g in grads), 0.0)
