"""The scale of gradient noise, from norms of gradients before and after averaging."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

import torch
from torch import Tensor

from offbeat.core.profile import GradientNoise

SECOND_MOMENT = "exp_avg_sq"  # what Adam, AdamW, NAdam, RAdam keep per parameter


class NoiseMeter:
    """Squared norms of this rank's gradients before and after they are averaged over K ranks.

    Of a sum over k iterations `own = k^2 |G|^2 + k S` and `avg = k^2 |G|^2 + k S / K` in
    expectation, with the true gradient G and S the noise of one rank's gradient: so
    `|G|^2 = (K avg - own) / (K - 1) / k^2`, and `S / K = (own - avg) / (K - 1) / k`
    (McCandlish et al., An empirical model of large-batch training, 2018, appendix A.1).
    """

    def __init__(self, world_size: int) -> None:
        self._others = max(world_size - 1, 1)
        self._own: Tensor | float = 0.0
        self._waiting: deque[Tensor | float] = deque()
        self._found: list[tuple[Tensor | float, Tensor | float]] = []

    def add_own(self, grads: Sequence[Tensor]) -> None:
        """Some of this rank's gradients, complete and not yet averaged."""
        self._own = self._own + _squared_norm(grads)

    def complete(self) -> None:
        """All of this rank's gradients were shown."""
        self._waiting.append(self._own)
        self._own = 0.0

    def add_average(self, grads: Sequence[Tensor], merged: int) -> None:
        """The average over ranks of the gradients completed first: a sum of so many iterations."""
        own, average = self._waiting.popleft(), _squared_norm(grads)
        noise = (own - average) / self._others
        self._found.append(((average - noise) / merged**2, noise / merged))

    def reset(self) -> None:
        """Forget gradients whose average will not be shown."""
        self._own = 0.0
        self._waiting.clear()

    def take(self) -> tuple[float, float] | None:
        """(|G|^2, S / K), means since last taken, None without any. Unbiased once averaged over
        ranks, so single values may be negative."""
        found, self._found = self._found, []
        if not found:
            return None
        signal, noise = (
            sum(float(value) for value in values) for values in zip(*found, strict=True)
        )
        return signal / len(found), noise / len(found)


@dataclass(frozen=True)
class Seen:
    """What one rank has seen of its training; `gradients` as of `NoiseMeter.take`."""

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
    ) -> Seen:
        return cls(losses, gradients, step_size(optimizer), scale_free(optimizer))


def scale_free(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it divides gradients by their size, as Adam's kind does."""
    return any(SECOND_MOMENT in state for state in optimizer.state.values())


def step_size(optimizer: torch.optim.Optimizer) -> float:
    """How far a constant gradient of 1 moves a parameter per iteration in the end: the learning
    rate of the first group, and what momentum makes of it. Adam's kind moves parameters by the
    rate times gradients over their size, which its second moments say."""
    group = optimizer.param_groups[0]
    rate, momentum = float(group.get("lr", 0.0)), float(group.get("momentum", 0.0))
    if scale_free(optimizer):
        return rate * _over_size(optimizer)
    if not 0 < momentum < 1:
        return rate
    return rate * (1 - float(group.get("dampening", 0.0))) / (1 - momentum)


def _over_size(optimizer: torch.optim.Optimizer) -> float:
    """1 over the size of an entry of the gradient, mean over entries weighted by their squares."""
    sizes = squares = 0.0
    for group in optimizer.param_groups:
        decay = float(group.get("betas", (0.0, 0.0))[1])
        for p in group["params"]:
            state = optimizer.state.get(p, {})
            if SECOND_MOMENT not in state or not float(state.get("step", 0)):
                continue
            grown = 1 - decay ** float(state["step"])  # moments start at 0
            moment = state[SECOND_MOMENT].double()
            sizes += float(moment.sqrt().sum()) / math.sqrt(grown)
            squares += float(moment.sum()) / grown
    return sizes / squares if squares else 0.0


def noise_of(everyone: Sequence[Seen]) -> GradientNoise | None:
    """The average over ranks, with rank 0's optimizer; None if some rank has no losses or no
    gradients to tell, or there is only one."""
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
