"""Measuring links: alpha and beta of the messages that a model sends."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch.distributed import ProcessGroup

from offbeat.profile import Link
from offbeat.runtime.flat import Flat
from offbeat.transport.control import measure_link
from offbeat.transport.device import Device

MIN_BUCKET_BYTES = 64 * 1024
SMALL_BYTES = 4096
LINK_BUDGET_S = 5.0  # no single measured message takes longer


def fit_link(name: str, points: Sequence[tuple[int, float]]) -> Link:
    """Least squares of latency + bytes / rate, weighted so that relative errors count alike."""
    sizes = np.array([size for size, _ in points], dtype=float)
    seconds = np.array([time for _, time in points])
    columns = np.stack([np.ones_like(sizes), sizes], axis=1) / seconds[:, None]
    (latency, slope), *_ = np.linalg.lstsq(columns, np.ones_like(seconds), rcond=None)
    if latency < 0 or slope <= 0:  # noise: fall back to what the extremes alone say
        latency = max(0.0, min(float(latency), float(seconds.min())))
        slope = max(float(((seconds - latency) / sizes).mean()), 1e-15)
    error = float(np.mean(np.abs(latency + slope * sizes - seconds) / seconds))
    return Link(name, float(latency), float(1 / slope), error)


def measure_links(groups: dict[str, ProcessGroup], flat: Flat, device: Device) -> tuple[Link, ...]:
    """Alpha and beta of every link, over the sizes of messages that this model sends.

    Smaller messages are left out: they take a nearly constant time, which no straight line
    through the larger ones meets.
    """
    buckets = sorted(bucket.grad.nbytes for bucket in flat.buckets)
    total, middle = sum(buckets), buckets[len(buckets) // 2]
    sizes = sorted({buckets[0], middle, buckets[-1], 2 * middle, total // 4, total})
    sizes = [size for size in sizes if buckets[0] <= size <= total]
    like = flat.everything()[0]
    return tuple(
        fit_link(name, measure_link(group, sizes, like, device, LINK_BUDGET_S))
        for name, group in groups.items()
    )


def worthwhile_bytes(group: ProcessGroup, flat: Flat, device: Device) -> int:
    """Smallest bucket of which at most a tenth of its message's time is what the smallest message
    takes, while at least twenty buckets are left to schedule; never below 64 KiB."""
    total = sum(bucket.grad.nbytes for bucket in flat.buckets)
    like = flat.everything()[0]
    points = measure_link(group, [SMALL_BYTES, max(total // 4, SMALL_BYTES)], like, device, 1.0)
    (_, least_s), (size, seconds) = points[0], points[-1]
    return max(MIN_BUCKET_BYTES, int(min(10 * least_s * size / seconds, total / 20)))
