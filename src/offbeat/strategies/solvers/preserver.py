"""DeFT's Preserver: what merging gradients is expected to cost in loss, and what it really does.

The loss is modelled as a random walk towards a target where it rebounds: a step lowers it by
`eta * d` with d normal, of mean mu (the squared norm of the gradient) and variance sigma^2 / batch.
Late updates cost it the samples that they have not used yet; what else being late does to
training it does not know. So the loss itself is watched as well.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from offbeat.core.plan import Merge


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
