"""Division of a whole number of samples in given proportions."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def apportion(total: int, weights: NDArray[np.float64], least: int = 0) -> NDArray[np.int64]:
    """Return counts that add up to `total`, in proportion to `weights`, by the method of largest
    remainders.

    Of equal remainders the first is rounded up. Counts below `least` are then raised at the cost of
    the largest counts. `total` must be at least `least` times the number of weights.
    """
    exact = total * weights / weights.sum()
    counts = np.floor(exact).astype(np.int64)
    by_remainder = np.argsort(counts - exact, kind="stable")
    counts[by_remainder[: total - int(counts.sum())]] += 1
    while counts.min() < least:
        counts[counts.argmax()] -= 1
        counts[counts.argmin()] += 1
    return counts
