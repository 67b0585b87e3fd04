"""Apportioning: whole numbers of samples in given proportions."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def apportion(total: int, weights: NDArray[np.float64], least: int = 0) -> NDArray[np.int64]:
    """Counts that add up to `total`, each the weight's share rounded down or up (largest
    remainders; the first of equal ones). Those below `least` then take from the largest.

    `total` must be at least `least` for each.
    """
    exact = total * weights / weights.sum()
    counts = np.floor(exact).astype(np.int64)
    by_remainder = np.argsort(counts - exact, kind="stable")
    counts[by_remainder[: total - int(counts.sum())]] += 1
    while counts.min() < least:
        counts[counts.argmax()] -= 1
        counts[counts.argmin()] += 1
    return counts
