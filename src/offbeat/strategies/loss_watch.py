"""Detection of a loss that is not finite, rises, or falls less than predicted."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from offbeat.core.profile import GradientNoise

CONSECUTIVE = 2  # high windows, or small falls, in a row before a problem is reported
FEWEST = 10  # least number of losses for a linear fit


@dataclass(frozen=True)
class _Window:
    """Mean of a window's losses and its standard error."""

    mean: float
    error: float

    @classmethod
    def of(cls, losses: Sequence[float]) -> _Window:
        count = len(losses)
        error = statistics.stdev(losses) / math.sqrt(count) if count > 1 else 0.0
        return cls(sum(losses) / count, error)


@dataclass
class LossWatch:
    """Reports a problem of the training loss: it is not finite, rises or stalls.

    Not finite: reported immediately, for any loss of a window.

    Rising: the mean of a window is high `CONSECUTIVE` times in a row. It is high if it exceeds the
    lowest mean of earlier windows by more than a margin. The margin is three standard errors (of
    both means together) plus `tolerance * max(|lowest mean|, first mean - lowest mean)`.

    Stalling: the loss has fallen by less than `share` of the predicted fall, `CONSECUTIVE` times in
    a row. The fall is that of a line through the losses since the last estimate of the gradient,
    plus three standard errors. The predicted fall per iteration is the step size times the squared
    gradient minus its squared noise. In total it is at most the loss itself. The squared noise is
    subtracted because on a plateau it is in balance with the squared gradient: with a step size
    that still converges, noise raises the loss by at most that amount per iteration.
    """

    tolerance: float = 0.1
    share: float = 0.1
    _first: _Window | None = field(default=None, init=False)
    _lowest: _Window | None = field(default=None, init=False)
    _high: int = field(default=0, init=False)
    _stretch: list[float] = field(default_factory=list, init=False)  # since the last estimate
    _flat: int = field(default=0, init=False)

    def add_window(self, losses: Sequence[float]) -> str | None:
        """Add the losses of a window, one per iteration.

        Return a description of the problem if the loss is not finite or rises, otherwise None.
        """
        if not losses:
            raise ValueError("losses ([]) must hold at least one; give those of a whole window")
        if not all(map(math.isfinite, losses)):
            return f"the loss is not finite (in a window of {len(losses)} iterations)"
        self._stretch.extend(losses)
        now = _Window.of(losses)
        if self._first is None or self._lowest is None:
            self._first = self._lowest = now
            return None
        lowest, fall = self._lowest, self._first.mean - self._lowest.mean
        allowed = self.tolerance * max(abs(lowest.mean), fall)
        limit = lowest.mean + allowed + 3 * math.hypot(now.error, lowest.error)
        self._high = self._high + 1 if now.mean > limit else 0
        self._lowest = min(lowest, now, key=lambda window: window.mean)
        if self._high < CONSECUTIVE:
            return None
        return (
            f"the loss rose to {now.mean:.4g} (mean of {len(losses)} iterations), above "
            f"{limit:.4g} in {self._high} windows in a row; the lowest mean so far was "
            f"{lowest.mean:.4g}"
        )

    def add_estimate(self, noise: GradientNoise) -> str | None:
        """Add an estimate of the gradient over the windows since the last estimate.

        Return a description of the problem if the loss stalls, otherwise None.
        """
        losses, self._stretch = self._stretch, []
        if len(losses) < FEWEST:
            return None
        fall, error = _fall(losses)
        signal = max(0.0, noise.gradient_sq - noise.noise_sq)
        predicted = min(len(losses) * noise.step_size * signal, abs(statistics.fmean(losses)))
        self._flat = self._flat + 1 if fall + 3 * error < self.share * predicted else 0
        if self._flat < CONSECUTIVE:
            return None
        return (
            f"the loss stalls: it fell by {fall:.4g} in {len(losses)} iterations, and its "
            f"gradients predict {predicted:.4g}"
        )


def _fall(losses: Sequence[float]) -> tuple[float, float]:
    """Return the fall of a line through the losses, and the standard error of the fall."""
    times = range(len(losses))
    slope, start = statistics.linear_regression(times, losses)
    left = sum((loss - start - slope * t) ** 2 for t, loss in zip(times, losses, strict=True))
    spread = statistics.pvariance(times)
    error = math.sqrt(left / (len(losses) - 2) / len(losses) / spread)
    return -slope * len(losses), error * len(losses)
