"""DeFT's Preserver: what merging gradients is expected to cost in loss, and what it really does.

The loss is modelled as a random walk towards a target where it rebounds: a step lowers it by
`eta * d` with d normal, of mean mu (the squared norm of the gradient) and variance sigma^2 / batch.
Late updates cost it the samples that they have not used yet; what else being late does to
training it does not know. So the loss itself is watched as well.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from offbeat.plan import Merge
from offbeat.profile import GradientNoise

CONSECUTIVE = 2  # windows of too high a loss, or estimates of too small a fall, before it is said
FEWEST = 10  # losses that a line is put through


@dataclass(frozen=True)
class LossWalk:
    """The loss as a random walk: where it is, and its steps while single iterations make them.

    `sigma` is the deviation for one batch, of `batch` samples. Under `scale="sum"` a step that
    merges k iterations is k times as long, under "mean" as long as one; its batch is k times one.
    """

    loss: float
    eta: float
    sigma: float
    batch: float = 1.0
    target: float = 0.0
    scale: Merge = "sum"

    def __post_init__(self) -> None:
        if not (self.sigma >= 0 and self.eta >= 0 and self.batch > 0):
            raise ValueError(
                f"sigma ({self.sigma:g}) and eta ({self.eta:g}) must be at least 0 and batch "
                f"({self.batch:g}) above 0"
            )

    def after(self, merges: Sequence[int], mu: Sequence[float]) -> float:
        """Expected loss after steps that merge so many iterations each, with `mu` per iteration.

        A step uses the mu of the first iteration that it merges. Raises ValueError.
        Source: DeFT, Section IV-C.
        """
        if sum(merges) != len(mu) or any(k < 1 for k in merges):
            raise ValueError(
                f"merges ({list(merges)}) must be at least 1 each and add up to the number of mu "
                f"({len(mu)}); give one mu per iteration"
            )
        loss, first = self.loss, 0
        for k in merges:
            loss = self._step(loss, k, mu[first])
            first += k
        return loss

    def ratio(self, merges: Sequence[int], mu: Sequence[float], late: int = 0) -> float:
        """Expected loss after single steps, over that after the merged ones; near 1 is good.

        Both have seen equally many samples: `late` further iterations, with a mu each, are merged
        in no step yet. Single steps have used them. Raises ValueError.
        Source: DeFT, Section IV-C and Table V (which count no lateness: 0).
        """
        single = self.after([1] * len(mu), mu)
        merged = self.after(merges, mu[: max(0, len(mu) - late)])
        if single == merged:
            return 1.0
        return single / merged if merged else math.inf

    def worst_ratio(self, merges: Sequence[int], mu: float) -> float:
        """The ratio that is farthest from 1 after any update of a cycle, with a constant mu.

        When an update is applied, the iterations that the next one merges have been computed.
        The end of a cycle alone says too little: there two walks that have both rebounded from
        the target may happen to meet.
        """
        ratios = []
        for done in range(1, len(merges) + 1):
            late = merges[done % len(merges)]
            ratios.append(self.ratio(merges[:done], [mu] * (sum(merges[:done]) + late), late))
        return max(ratios, key=lambda ratio: abs(ratio - 1))

    def _step(self, loss: float, merged: int, mu: float) -> float:
        eta = merged * self.eta if self.scale == "sum" else self.eta
        left = loss - self.target - eta * mu
        spread = eta * self.sigma / math.sqrt(merged * self.batch)
        if spread == 0:
            return self.target + abs(left)
        a = left / spread
        rebound = spread * math.sqrt(2 / math.pi) * math.exp(-a * a / 2)
        return self.target + left * math.erf(a / math.sqrt(2)) + rebound


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
    """Says when the real loss departs from going down: not finite, rising, or stalling.

    Not finite: at once, for any loss of a window.

    Rising: the mean of a window lies above the lowest mean of the windows before, twice in a row.
    Above means by more than three standard errors (of both) and `tolerance` of the larger of: that
    lowest mean, and how far it is below the first one.

    Stalling: since the last estimate of the gradient the loss fell by less than `share` of what
    the estimate predicts, twice in a row. The fall is that of a line through the losses, and three
    standard errors of it are granted. Predicted is one step size times the squared gradient per
    iteration, less the square of its noise, and no more than the loss itself. The noise is left out
    since a plateau that training has reached is where the two are in balance: steps that still
    converge raise the loss by at most so much per iteration.
    """

    tolerance: float = 0.1
    share: float = 0.1
    _first: _Window | None = field(default=None, init=False)
    _lowest: _Window | None = field(default=None, init=False)
    _high: int = field(default=0, init=False)
    _stretch: list[float] = field(default_factory=list, init=False)  # since the last estimate
    _flat: int = field(default=0, init=False)

    def see(self, losses: Sequence[float]) -> str | None:
        """Take one window's losses, one per iteration; what is wrong in words, or None."""
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

    def estimated(self, noise: GradientNoise) -> str | None:
        """Take an estimate of the gradient over the windows since the last one; as `see`."""
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
    """How far a line through losses goes down, and the standard error of that."""
    times = range(len(losses))
    slope, start = statistics.linear_regression(times, losses)
    left = sum((loss - start - slope * t) ** 2 for t, loss in zip(times, losses, strict=True))
    spread = statistics.pvariance(times)
    error = math.sqrt(left / (len(losses) - 2) / len(losses) / spread)
    return -slope * len(losses), error * len(losses)
