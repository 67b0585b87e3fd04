"""Measuring links: what messages of the sizes that a model sends take, within a budget."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from itertools import accumulate
from statistics import fmean, median
from typing import Any

import numpy as np
import torch.distributed as dist

from offbeat.core.buckets.flat import Flat
from offbeat.core.measuring.contention import measure_contention
from offbeat.core.measuring.jitter import spread_of
from offbeat.core.measuring.sending import measure_sending
from offbeat.core.measuring.timing import Budget, Probe, Prober, timed
from offbeat.core.plan import Verb
from offbeat.core.profile import Contention, Link
from offbeat.core.transport.cluster import Cluster
from offbeat.core.transport.collectives import Collective, averaging
from offbeat.core.transport.device import Device

# What all measuring before a plan may take: seconds, and model sizes of payload per rank. Where the
# model itself takes long, so many times as long as it does, up to a limit: small messages hardly
# tell what large ones take.
BUDGET_S, BUDGET_SIZES = 4.0, 20.0
BUDGET_MODELS, MOST_S = 4, 10.0
# At most these parts of it; those of links are shared by all of them.
LAYOUT, EXPLORING, SMALL, LINE, HALVES, TOGETHER = 0.08, 0.05, 0.08, 0.27, 0.22, 0.1
SMALL_HALVES, SENDING, VOTE = 0.15, 0.04, 0.07

MIN_BUCKET_BYTES = 64 * 1024
SMALL_BYTES = 4096
NUMBER_BYTES = 4  # of one rank's say in a vote
LEAST_BYTES = 64  # of the largest size of a line
SMALL_SIZES = tuple(SMALL_BYTES << i for i in range(6))  # to 128 KiB: slices that P3 would send
MOST_REPEATS, LEAST_REPEATS = 9, 3  # of one size
SERIES = 3  # messages of each size of a line
LARGE = 5  # so many times the least message's time tell the rate alone
TELLING = 2  # so many times it tell the rate with others
COMPARABLE = 4  # so many times smaller, messages of halves tell no rate: all-reduces tell it better
LARGER = 16  # so many times the bytes of what does not tell it
HALF_VERBS: tuple[Verb, ...] = ("reduce_scatter", "all_gather")
Points = list[tuple[int, float]]  # (bytes, seconds), ascending
Series = list[tuple[int, list[float]]]  # (bytes, seconds of several messages)


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


def measure_cluster(
    cluster: Cluster, flat: Flat, *, emulated: bool = False
) -> tuple[tuple[Link, ...], tuple[Contention, ...]]:
    """Every link's alpha and beta, of all-reduces over the sizes of messages that this model sends
    and of their halves; what small messages take, and what all take from compute, unless that is
    emulated; and what links lose while both carry messages.

    With `worthwhile_bytes` it takes `BUDGET_S` seconds, or `BUDGET_MODELS` times what an all-reduce
    of the model takes up to `MOST_S`, and `BUDGET_SIZES` model sizes; halves and contention are
    left out where that is too little. Every rank must call it, and opens a second channel of the
    first link.
    """
    like = flat.parameter_tensors()[0]
    smallest, total = min(_sizes(flat)), sum(_sizes(flat))
    budget = _budget(total)
    found: list[Link] = []
    for name in cluster.specs:
        probe = Probe(cluster.groups[name], like, cluster.device)
        verbs = cluster.links[name].collectives.by_verb
        part = 1 / len(cluster.specs)
        found.append(measure_link(name, probe, verbs, smallest, total, budget, part))
    if cluster.control.world_size == 1:
        return tuple(replace(link, halves={}) for link in found), ()
    # Fits may differ between machines in the last bit: rank 0's count.
    links = [Link(**link) for link in cluster.control.gather([asdict(x) for x in found])[0]]
    if not emulated:
        links = measure_sending(cluster, links, like, total, budget.share(SENDING))
    return tuple(links), measure_contention(cluster, links, like, budget.share(TOGETHER))


def worthwhile_bytes(group: dist.ProcessGroup, flat: Flat, device: Device) -> int:
    """Bytes that a bucket should hold at least.

    A bucket's message should take ten times as long as the smallest message, so that at most a
    tenth of its time is latency. But at least twenty buckets should be left to schedule. Never
    below 64 KiB.
    """
    total = sum(_sizes(flat))
    probe = Probe(group, flat.parameter_tensors()[0], device)
    points = explore(
        probe, averaging(group), max(total // 4, SMALL_BYTES), _budget(total).share(LAYOUT)
    )
    (_, least_s), (size, seconds) = points[0], points[-1]
    return max(MIN_BUCKET_BYTES, int(min(10 * least_s * size / seconds, total / 20)))


def _sizes(flat: Flat) -> list[int]:
    return [bucket.grad.nbytes for bucket in flat.buckets]


def _budget(total: int) -> Budget:
    return Budget(BUDGET_S, BUDGET_SIZES * total)


# ---- one link alone -------------------------------------------------------------------------


def measure_link(
    name: str,
    probe: Prober,
    verbs: Mapping[Verb, Collective],
    smallest: int,
    total: int,
    budget: Budget,
    part: float = 1.0,
) -> Link:
    """Alpha and beta of an all-reduce and of its halves, and what small messages take.

    `smallest` bucket and `total` in bytes; `part` of the budget is this link's.
    """
    mean = verbs["all_reduce"]
    curve = explore(probe, mean, total, budget.share(EXPLORING * part))
    budget.allow(min(MOST_S, BUDGET_MODELS * expected_s(curve, total)))
    small = measure_small(probe, mean, total, curve, budget.share(SMALL * part))
    vote_s = measure_vote(probe, mean, curve, budget.share(VOTE * part))
    small_halves = {
        verb: measure_small(
            probe,
            verbs[verb],
            total,
            halved(curve),
            budget.share(SMALL_HALVES / len(HALF_VERBS) * part),
        )
        for verb in HALF_VERBS
    }
    lines = budget.share((LINE + HALVES) * part)
    share = lines.share(LINE / (LINE + HALVES))
    series = measure_series(probe, mean, smallest, total, curve, share)
    line = typical(series) or curve
    if larger := measure_larger(probe, mean, curve[0][1], line, total, lines):
        # The others hardly tell the rate: they are what a message takes at least.
        small = least_times(sorted((dict(line) | dict(small)).items()))
        line = least_times([line[-1], *larger])
    halves: dict[str, tuple[float, float]] = {}
    for verb in HALF_VERBS:
        share = lines.share(HALVES / (LINE + HALVES) / len(HALF_VERBS))
        points = typical(measure_series(probe, verbs[verb], smallest, total, halved(line), share))
        if points and points[-1][0] * COMPARABLE >= line[-1][0]:
            fit = fit_link(name, telling(points, small_halves[verb]))
            halves[verb] = (fit.latency_s, fit.bytes_per_s)
    jitter = spread_of([seconds for _, seconds in series])
    return replace(
        fit_link(name, telling(line, small)),
        small=tuple(small),
        halves=halves,
        small_halves={verb: tuple(points) for verb, points in small_halves.items() if points},
        jitter=jitter,
        vote_s=vote_s,
    )


def explore(probe: Prober, collective: Collective, most: int, budget: Budget) -> Points:
    """Roughly, seconds of messages from 4 KiB up to `most` bytes, each four times as large.

    Two are sent whatever they cost, as nothing is known of the link. Afterwards a message may take
    a quarter of the budget, or twice what the smallest one takes: on a link of long latency
    nothing smaller tells the rate.
    """
    probe.agree([0.0])  # nobody pays for waiting until all are here
    points: Points = []
    size = min(SMALL_BYTES, most)
    limit_s = budget.seconds / 4
    while size <= most:
        if len(points) >= 2 and expected_s(points, size) > max(limit_s, 2 * points[0][1]):
            break
        times = timed(probe, collective, [size], budget)
        if LEAST_REPEATS * times[0] < limit_s:
            times += timed(probe, collective, [size] * (LEAST_REPEATS - 1), budget)
        points.append((size, median(times)))
        size *= 4
    return least_times(points)


def expected_s(points: Points, size: int) -> float:
    """Seconds of a message of any size: interpolated, below the first the same, beyond the last
    two on the line through them."""
    (low, low_s), (high, high_s) = ([(0, 0.0), *points])[-2:]
    if size > high:
        return high_s + (high_s - low_s) / (high - low) * (size - high)
    sizes, seconds = zip(*points, strict=True)
    return float(np.interp(size, sizes, seconds))


def least_times(points: Points) -> Points:
    """The same, except that no message takes longer than a larger one: disturbances only delay."""
    seconds = [*accumulate((seconds for _, seconds in reversed(points)), min)]
    return [(size, least_s) for (size, _), least_s in zip(points, reversed(seconds), strict=True)]


def measure_small(
    probe: Prober, collective: Collective, total: int, curve: Points, budget: Budget
) -> Points:
    """Mean seconds of `SMALL_SIZES`, never falling, as far as the budget goes.

    Each gets an equal part of the seconds and bytes, within 3 to 9 repetitions. The longest of them
    does not count. The others do: of small messages some take several times as long as most, as
    processes have to be woken, and in training as many will.
    """
    sizes = [size for size in SMALL_SIZES if size <= total]
    points: Points = []
    for size in sizes:
        seconds = expected_s(curve, size)
        repeats = min(MOST_REPEATS, budget.share(1 / len(sizes)).times(seconds, size) - 1)
        repeats = max(LEAST_REPEATS, repeats)
        if budget.times(seconds, size) < repeats + 1:
            break
        _, *times = timed(probe, collective, [size] * (repeats + 1), budget)
        points.append((size, fmean(sorted(times)[:-1])))
    return never_falling(points)


def never_falling(points: Points) -> Points:
    """The same, except that neighbours that fall have their mean (isotonic regression)."""
    runs: list[list[Any]] = []  # sizes, and their seconds
    for size, seconds in points:
        runs.append([[size], seconds])
        while len(runs) > 1 and runs[-2][1] > runs[-1][1]:
            (low, low_s), (high, high_s) = runs[-2:]
            together = (len(low) * low_s + len(high) * high_s) / (len(low) + len(high))
            runs[-2:] = [[low + high, together]]
    return [(size, seconds) for sizes, seconds in runs for size in sizes]


def measure_vote(
    probe: Prober, collective: Collective, curve: Points, budget: Budget
) -> float | None:
    """Seconds of one number per rank, the median of up to `LEAST_REPEATS`; None if one is too dear.

    It may take less than what is called the latency: gloo cuts larger messages into more pieces.
    """
    size = NUMBER_BYTES * probe.ranks
    repeats = min(LEAST_REPEATS, budget.times(curve[0][1], size))
    if repeats < 1:
        return None
    return median(timed(probe, collective, [size] * repeats, budget))


def measure_series(
    probe: Prober,
    collective: Collective,
    smallest: int,
    total: int,
    curve: Points,
    budget: Budget,
) -> Series:
    """Seconds of the sizes of `line_sizes`, of `SERIES` messages each or as many as can be paid;
    nothing if that is not one of each.

    All messages follow each other at once, after one that does not count: a link that has rested
    is faster for its first bytes (the token bucket of a shaper).
    """
    sizes = line_sizes(smallest, total, curve, budget)
    each = SERIES
    while each and not payable(curve, in_series(sizes, each), budget):
        each -= 1
    if each < SERIES and expected_s(curve, sizes[-1]) < 2 * curve[0][1]:
        return []  # all latency; `measure_larger` needs the time
    if each == 0:
        return []
    _, *times = timed(probe, collective, in_series(sizes, each), budget)
    return [(size, times[i * each :][:each]) for i, size in enumerate(sizes)]


def measure_larger(
    probe: Prober,
    collective: Collective,
    least_s: float,
    line: Points,
    total: int,
    budget: Budget,
) -> Points:
    """Seconds of larger messages, one each, while even the largest one so far takes less than
    `LARGE` times the least: on a link of long latency only these tell the rate."""
    found: Points = []
    agreements = [line[0][0]] * 2  # before and after
    while (last := [*line, *found][-1])[1] < LARGE * least_s and last[0] < total:
        size = min(LARGER * last[0], total)
        while size > last[0] and not payable([*line, *found], [size, *agreements], budget):
            size = size * 9 // 10
        if size < 2 * last[0]:
            break
        (seconds,) = timed(probe, collective, [size], budget)
        found.append((size, seconds))
    return found


def halved(points: Points) -> Points:
    """What half an all-reduce takes, roughly."""
    return [(size, seconds / 2) for size, seconds in points]


def telling(line: Points, small: Points) -> Points:
    """Of both the points that tell the rate, as they take longer than the smallest by far; or the
    two largest of the line, if these are too few. In a fit by relative errors the many small ones
    would tip it."""
    both = sorted((dict(small) | dict(line)).items())
    least_s = max((s for size, s in both if size <= SMALL_BYTES), default=both[0][1])
    found = [point for point in both if point[1] >= TELLING * least_s]
    return found if len(found) > 1 else line[-2:]


def typical(series: Series) -> Points:
    """The median seconds of every size."""
    return [(size, median(seconds)) for size, seconds in series]


def in_series(sizes: Sequence[int], each: int) -> list[int]:
    """So many messages of each size, and one ahead of all."""
    return [sizes[0], *(size for size in sizes for _ in range(each))]


def payable(curve: Points, messages: Sequence[int], budget: Budget) -> bool:
    """Whether the budget allows all these messages."""
    return budget.times(sum(expected_s(curve, size) for size in messages), sum(messages)) > 0


def line_sizes(smallest: int, total: int, curve: Points, budget: Budget) -> list[int]:
    """Three sizes by equal factors: down to the smallest bucket, or to a quarter of the largest.

    The largest is the whole model, or what allows `SERIES` of each, or sixteen times what was
    explored. It may take twice the time of the smallest message however few of it can be paid
    then, as nothing smaller tells the rate. Messages smaller than a bucket take a nearly constant
    time, which no line through larger ones meets.
    """
    largest = min(total, 16 * curve[-1][0])
    while True:
        lowest = max(1, min(smallest, largest // 4))
        sizes = [lowest, round((lowest * largest) ** 0.5), largest]
        series = in_series(sizes, SERIES)
        needed = sum(series) <= budget.size_bytes and expected_s(curve, largest) < 2 * curve[0][1]
        if needed or payable(curve, series, budget) or largest < LEAST_BYTES:
            return sizes
        largest = largest * 9 // 10
