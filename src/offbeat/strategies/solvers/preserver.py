"""DeFT's Preserver: expected effect of merged gradients on the loss.

The loss is modelled as a random walk towards a target at which it rebounds. A step lowers the loss
by `eta * d`, where d is normal with mean mu (the squared norm of the gradient) and variance
sigma^2 / batch. The model's only cost of late updates is that their samples are not used yet. Other
effects of late updates are not modelled; therefore training also monitors the loss itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from offbeat.core.plan import Merge


@dataclass(frozen=True)
class LossWalk:
    """Random walk of the loss.

    Attributes:
        loss: current loss.
        eta: step size of one iteration.
        sigma: standard deviation parameter; a step of one iteration has variance sigma^2 / batch.
        batch: samples of one iteration.
        target: loss at which the walk rebounds.
        scale: "sum" multiplies the step size of k merged iterations by k, "mean" does not. The
            batch of the step is k times `batch` in both cases.

    Raises:
        ValueError: `sigma` or `eta` is negative, or `batch` is not above 0.
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

    def expected_loss(self, merges: Sequence[int], mu: Sequence[float]) -> float:
        """Return the expected loss after a sequence of steps.

        Args:
            merges: number of iterations that each step merges.
            mu: squared gradient norm of each iteration. A step uses that of its first iteration.

        Raises:
            ValueError: `merges` does not add up to the number of mu, or is below 1.

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
        """Return the expected loss after single steps divided by that after merged steps.

        A ratio near 1 is good.

        Args:
            merges: number of iterations that each merged step merges.
            mu: squared gradient norm of each iteration, including the late ones.
            late: number of last iterations that no merged step uses yet. Single steps use them.

        Raises:
            ValueError: the arguments do not fit together.

        Source: DeFT, Section IV-C and Table V, where `late` is 0.
        """
        single = self.expected_loss([1] * len(mu), mu)
        merged = self.expected_loss(merges, mu[: max(0, len(mu) - late)])
        if single == merged:
            return 1.0
        return single / merged if merged else math.inf

    def worst_ratio(self, merges: Sequence[int], mu: float) -> float:
        """Return the ratio that is farthest from 1 after any update of a cycle.

        When an update is applied, the iterations of the next update have been computed and are
        late. The ratio at the end of the cycle does not suffice, because two walks that have
        rebounded from the target may meet there by chance.

        Args:
            merges: number of iterations that each update of the cycle merges.
            mu: squared gradient norm of all iterations.
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
