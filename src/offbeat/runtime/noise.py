"""The scale of gradient noise, from norms of gradients before and after averaging."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from statistics import fmean

import torch
from torch import Tensor

from offbeat.profile import GradientNoise
from offbeat.transport.control import Control


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

    def own(self, grads: Sequence[Tensor]) -> None:
        """Some of this rank's gradients, complete and not yet averaged."""
        self._own = self._own + _squared_norm(grads)

    def complete(self) -> None:
        """All of this rank's gradients were shown."""
        self._waiting.append(self._own)
        self._own = 0.0

    def averaged(self, grads: Sequence[Tensor], merged: int) -> None:
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


def agreed_noise(
    control: Control, loss: float | None, meter: NoiseMeter, learning_rate: float
) -> GradientNoise | None:
    """What all ranks have seen since they were last asked, averaged, and rank 0's learning rate.

    Every rank must call it.
    None if some rank has no loss or no gradients to tell, or there is only one."""
    everyone = control.gather((loss, meter.take(), learning_rate))
    known = [(own, found) for own, found, _ in everyone if own is not None and found is not None]
    if control.world_size < 2 or len(known) < control.world_size:
        return None
    mean = fmean(own for own, _ in known)
    signal, noise = (fmean(values) for values in zip(*(found for _, found in known), strict=True))
    values = (mean, max(0.0, signal), max(0.0, noise), everyone[0][2])
    return GradientNoise(*values) if all(map(math.isfinite, values)) else None


def _squared_norm(grads: Sequence[Tensor]) -> Tensor | float:
    return sum((torch.linalg.vector_norm(g).double().square() for g in grads), 0.0)
