"""DeFT's Preserver: what merging gradients is expected to cost in loss, and what it really does.

The loss is modelled as a random walk towards a target where it rebounds: a step lowers it by
`eta * d` with d normal, of mean mu (the squared norm of the gradient) and variance sigma^2 / batch.
The model knows nothing of late updates, so the loss itself is watched as well.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from offbeat.plan import Merge

CONSECUTIVE = 2  # windows of too high a loss, before it is said


def expected_next(
    loss: float, eta: float, mu: float, sigma: float, batch: float = 1.0, target: float = 0.0
) -> float:
    """Expected loss after one step. Source: DeFT, Section IV-C, with eta * mu for eta * Delta s."""
    left = loss - target - eta * mu
    spread = eta * sigma / math.sqrt(batch)
    if spread == 0:
        return target + abs(left)
    a = left / spread
    rebound = spread * math.sqrt(2 / math.pi) * math.exp(-a * a / 2)
    return target + left * math.erf(a / math.sqrt(2)) + rebound


def expected_loss(
    merges: Sequence[int],
    loss: float,
    eta: float,
    mu: Sequence[float],
    sigma: float,
    *,
    batch: float = 1.0,
    target: float = 0.0,
    scale: Merge = "sum",
) -> float:
    """Expected loss after one step per generation, each merging so many iterations.

    `mu` per iteration; a step uses that of the first iteration it merges. A generation of k has k
    times the batch, and under "sum" k times the learning rate. Raises ValueError.
    """
    if sum(merges) != len(mu) or any(k < 1 for k in merges):
        raise ValueError(
            f"merges ({list(merges)}) must be at least 1 each and add up to the number of mu "
            f"({len(mu)}); give one mu per iteration"
        )
    if not (sigma >= 0 and eta >= 0 and batch > 0):
        raise ValueError(
            f"sigma ({sigma:g}) and eta ({eta:g}) must be at least 0 and batch ({batch:g}) above 0"
        )
    first = 0
    for k in merges:
        step = k * eta if scale == "sum" else eta
        loss = expected_next(loss, step, mu[first], sigma, k * batch, target)
        first += k
    return loss


def ratio(
    merges: Sequence[int],
    loss: float,
    eta: float,
    mu: Sequence[float],
    sigma: float,
    *,
    batch: float = 1.0,
    target: float = 0.0,
    scale: Merge = "sum",
) -> float:
    """Expected loss after as many single steps, over that after the merged ones; near 1 is good.

    Arguments as of `expected_loss`. Source: DeFT, Section IV-C and Table V.
    """
    after = [
        expected_loss(k, loss, eta, mu, sigma, batch=batch, target=target, scale=scale)
        for k in ([1] * len(mu), merges)
    ]
    if after[0] == after[1]:
        return 1.0
    return after[0] / after[1] if after[1] else math.inf


@dataclass
class LossWatch:
    """Says when the real loss departs from going down, from the losses of equal windows.

    A window departs if its mean is not finite, or above the lowest mean of the windows before by
    more than `tolerance` of it plus three standard errors of the window, twice in a row.
    """

    tolerance: float = 0.1
    _lowest: float = field(default=math.inf, init=False)
    _high: int = field(default=0, init=False)

    def see(self, losses: Sequence[float]) -> str | None:
        """Take one window's losses, one per iteration; what is wrong in words, or None."""
        if not losses:
            raise ValueError("losses ([]) must hold at least one; give those of a whole window")
        mean = sum(losses) / len(losses)
        if not math.isfinite(mean):
            return f"the loss is not finite (mean {mean:g} of {len(losses)} iterations)"
        error = statistics.stdev(losses) / math.sqrt(len(losses)) if len(losses) > 1 else 0.0
        lowest, self._lowest = self._lowest, min(self._lowest, mean)
        limit = lowest + self.tolerance * abs(lowest) + 3 * error if lowest < math.inf else lowest
        self._high = self._high + 1 if mean > limit else 0
        if self._high < CONSECUTIVE:
            return None
        return (
            f"the loss rose to {mean:.4g} (mean of {len(losses)} iterations), above {limit:.4g} in "
            f"{self._high} windows in a row; the lowest mean so far was {lowest:.4g}"
        )
