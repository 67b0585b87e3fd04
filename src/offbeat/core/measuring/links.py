"""Measurement of links: seconds of messages of the sizes that a model sends, within a budget."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from itertools import accumulate
from statistics import fmean, median
from typing import Any

import numpy as np
import torch.distributed as dist
from torch import Tensor

from offbeat.core.buckets.flat import Flat
from offbeat.core.measuring import effort
from offbeat.core.measuring.contention import measure_contention
from offbeat.core.measuring.jitter import spread_of
from offbeat.core.measuring.sending import measure_sending
from offbeat.core.measuring.timing import Budget, Probe, measure_messages
from offbeat.core.plan import INSIDE, Verb
from offbeat.core.profile import Contention, Link
from offbeat.core.transport.cluster import Cluster
from offbeat.core.transport.collectives import Collective, averaging

# Budget of all measurements before a plan beside `Effort.links_s`: payload per rank in model sizes.
# If an all-reduce of the model takes long, the budget is `BUDGET_MODELS` times its seconds, up to
# `MOST_S`, because small messages hardly determine the time of large ones.
BUDGET_SIZES = 20.0
BUDGET_MODELS, MOST_S = 4, 10.0
# Shares of the budget. The shares for links are divided by the number of links.
LAYOUT, EXPLORING, SMALL, LINE, HALVES, TOGETHER = 0.08, 0.05, 0.08, 0.27, 0.22, 0.1
SMALL_HALVES, SENDING, VOTE = 0.15, 0.04, 0.07

MIN_BUCKET_BYTES = 64 * 1024
SMALL_BYTES = 4096
NUMBER_BYTES = 4  # bytes of one rank's number in a vote
LEAST_BYTES = 64  # `line_sizes` stops shrinking the largest size below this number of bytes
SMALL_SIZES = tuple(SMALL_BYTES << i for i in range(6))  # 4 KiB to 128 KiB: slices of P3
MOST_REPEATS, LEAST_REPEATS = 9, 3  # largest and least number of messages of one size
# LARGE and TELLING are multiples of the seconds of the smallest message.
LARGE = 5  # a message of this time determines the rate alone
TELLING = 2  # messages of this time determine the rate together
COMPARABLE = 4  # halves are fitted if their largest message is at most this factor smaller
LARGER = 16  # factor in bytes from a message that does not determine the rate to the next one
HALF_VERBS: tuple[Verb, ...] = ("reduce_scatter", "all_gather")
LEAST_PART = 1e-3  # smallest part of the seconds of a message that a fit can resolve
SLOWER = 0.01  # share of the predicted seconds from which an observed message corrects the rate
PAIR_S = 0.5  # longest message between two ranks, in seconds
FREE_PARTS = 4  # a message takes at most this part of a GPU's free memory
Timer = Callable[[Sequence[int], Budget], list[float]]  # `measure_messages` of one collective
Points = list[tuple[int, float]]  # (bytes, seconds), ascending
Series = list[tuple[int, list[float]]]  # (bytes, seconds of several messages)


def fit_link(name: str, points: Sequence[tuple[int, float]]) -> Link:
    """Return the link whose latency + bytes / rate fits the points by least relative squares."""
    sizes = np.array([size for size, _ in points], dtype=float)
    seconds = np.array([time for _, time in points])
    columns = np.stack([np.ones_like(sizes), sizes], axis=1) / seconds[:, None]
    (latency, slope), *_ = np.linalg.lstsq(columns, np.ones_like(seconds), rcond=None)
    if latency < 0 or slope <= 0:  # noise: use the smallest time as the bound of the latency
        latency = max(0.0, min(float(latency), float(seconds.min())))
        slope = float(((seconds - latency) / sizes).mean())
    slope = max(slope, LEAST_PART * float((seconds / sizes).min()))
    error = float(np.mean(np.abs(latency + slope * sizes - seconds) / seconds))
    return Link(name, float(latency), float(1 / slope), error)


def at_observed_rate(link: Link, size_bytes: int, observed_s: float) -> Link:
    """Return the link with the rate of an observed message, if that is `SLOWER` than predicted.

    The messages of a measurement are smaller than the observed one where the budget does not allow
    larger ones. A large message can take longer per byte, because it overflows the queues of the
    network. Halves get the same factor.

    Args:
        link: measured link.
        size_bytes: payload of the observed message.
        observed_s: its seconds.
    """
    rest_s = observed_s - link.latency_s
    slower = rest_s * link.bytes_per_s / size_bytes
    if slower <= 1 + SLOWER:
        return link
    halves = {verb: (s, rate / slower) for verb, (s, rate) in link.halves.items()}
    return replace(link, bytes_per_s=link.bytes_per_s / slower, halves=halves)


def measure_cluster(
    cluster: Cluster, flat: Flat, *, emulated: bool = False
) -> tuple[tuple[Link, ...], tuple[Contention, ...]]:
    """Return the measured links of the cluster, and their contention.

    A link has latency and rate of all-reduces of the sizes that this model sends, and of their
    halves, seconds of small messages, and the processor time that messages take from compute. The
    processor time is not measured for emulated hosts.

    Together with `worthwhile_bytes` it takes `Effort.links_s` seconds, or `BUDGET_MODELS` times the
    seconds of an all-reduce of the model up to `MOST_S`, and sends `BUDGET_SIZES` model sizes.
    Halves and contention are left out if the budget is too small. If messages are mostly latency,
    a few more are sent to measure halves, or on a distant link the rate between two ranks, which
    determines its halves. Every rank must call it. It opens a second channel of the first link.
    """
    vote = None if cluster.topology.is_flat else averaging(cluster.everyone)
    links, budget = _measure_links(cluster, flat, [*cluster.specs], emulated, vote)
    if cluster.control.world_size == 1:
        return tuple(replace(link, halves={}) for link in links), ()
    like = flat.parameter_tensors()[0]
    return links, measure_contention(cluster, links, like, budget.share(TOGETHER))


def measure_inside(cluster: Cluster, flat: Flat, *, emulated: bool = False) -> tuple[Link, ...]:
    """Return the measured link between the ranks of a replica, if there is one, else nothing.

    It is measured as a link of `measure_cluster`, on all nodes at the same time and with a budget
    of its own. Every rank must call it.
    """
    if cluster.inside is None:
        return ()
    cluster.open([INSIDE])
    return _measure_links(cluster, flat, [INSIDE], emulated)[0]


def _measure_links(
    cluster: Cluster,
    flat: Flat,
    names: Sequence[str],
    emulated: bool,
    vote: Collective | None = None,
) -> tuple[tuple[Link, ...], Budget]:
    """Return links as measured by rank 0, and the budget of which they have used a part."""
    like, total = flat.parameter_tensors()[0], sum(flat.sizes_bytes)
    budget, total = _budget(total), min(total, _most_bytes(cluster))
    smallest = min(*flat.sizes_bytes, total)
    measured: list[Link] = []
    for name in names:
        probe = Probe(cluster.probe_group(name), like, cluster.device)
        verbs = cluster.links[name].collectives.by_verb
        pairs = _may_have_pairs(cluster, name)
        part = 1 / len(names)
        link = measure_link(name, probe, verbs, smallest, total, budget, part, vote, pairs=pairs)
        if name in cluster.specs:
            link = replace(link, connections=cluster.specs[name].connections)
        measured.append(link)
    # Fits may differ between machines in the last bit, so use those of rank 0.
    links = [Link(**link) for link in cluster.control.share_first([asdict(x) for x in measured])]
    links = [_with_pairs(cluster, link, like, total) for link in links]
    if not emulated and cluster.control.world_size > 1:
        links = measure_sending(cluster, links, like, total, budget.share(SENDING))
    return tuple(links), budget


def _with_pairs(cluster: Cluster, link: Link, like: Tensor, total: int) -> Link:
    """Return a distant link between replicas of one rank with the rate of messages between two
    ranks, any other link unchanged. Every rank must call it with the same link."""
    ranks = cluster.control.world_size
    if not _may_have_pairs(cluster, link.name) or not link.has_long_steps(ranks):
        return link
    exchange = exchange_in_pairs(cluster.links[link.name].collectives.swap, ranks)
    probe = Probe(cluster.probe_group(link.name), like, cluster.device)
    return measure_pairs(link, probe, exchange, total)


def _may_have_pairs(cluster: Cluster, name: str) -> bool:
    """Return whether a link is between replicas of one rank."""
    flat = cluster.topology.is_flat
    return name in cluster.specs and flat and cluster.control.world_size > 1


def exchange_in_pairs(swap: Callable[[Tensor, int, int], None], ranks: int) -> Collective:
    """Return an exchange of ranks 0 and 1, of 2 and 3, and so on. The last of an odd number of
    ranks does nothing."""

    def exchange(tensor: Tensor) -> None:
        one = dist.get_rank() // 2 * 2
        if one + 1 < ranks:
            swap(tensor, one, one + 1)

    return exchange


def measure_pairs(link: Link, probe: Probe, exchange: Collective, total: int) -> Link:
    """Return the link with the rate of messages between two ranks.

    The large message takes about `PAIR_S` seconds at most.

    Args:
        link: link with latency and rate of all-reduces.
        probe: sends and times messages on the link.
        exchange: exchange of pairs of ranks.
        total: bytes of all buckets.
    """
    ranks = probe.ranks
    large = min(total, int(PAIR_S * link.send_bytes_per_s(ranks)))
    if large <= SMALL_BYTES:
        return link
    timer = partial(measure_messages, probe, exchange)
    unlimited = Budget(math.inf, math.inf)
    (_, small_s), (_, large_s) = measure_two_sizes(timer, (SMALL_BYTES, large), unlimited)
    seconds = (large_s - small_s) * ranks / (ranks - ranks % 2)  # means over all ranks
    return link if seconds <= 0 else replace(link, pair_bytes_per_s=(large - SMALL_BYTES) / seconds)


def measure_two_sizes(timer: Timer, sizes: tuple[int, int], budget: Budget) -> Points:
    """Return the median seconds of a smaller and a larger message; nothing if the budget does not
    allow the bytes. The first message does not count, as TCP's window has to open."""
    small, large = sizes
    messages = [large] * (1 + LEAST_REPEATS) + [small] * LEAST_REPEATS
    if sum(messages) > budget.size_bytes:
        return []
    _, *times = timer(messages, budget)
    return [(small, median(times[LEAST_REPEATS:])), (large, median(times[:LEAST_REPEATS]))]


def worthwhile_bytes(cluster: Cluster, flat: Flat) -> int:
    """Return the smallest size in bytes that a bucket should have.

    A bucket's message should take ten times as long as the smallest message, so that at most a
    tenth of its time is latency. The size is at most a twentieth of the model, so that at least
    twenty buckets remain to schedule, and at least 64 KiB.
    """
    total = sum(flat.sizes_bytes)
    probe = Probe(cluster.everyone, flat.parameter_tensors()[0], cluster.device)
    average = next(iter(cluster.links.values())).collectives.by_verb["all_reduce"]
    most = max(min(total // 4, _most_bytes(cluster)), SMALL_BYTES)
    points = explore(probe, average, most, _budget(total).share(LAYOUT))
    (_, least_s), (size, seconds) = points[0], points[-1]
    return max(MIN_BUCKET_BYTES, int(min(10 * least_s * size / seconds, total / 20)))


def _most_bytes(cluster: Cluster) -> int:
    """Return the largest message to measure: a fraction of the free memory of the GPU that has
    least. Every rank must call it."""
    free = [free for free in cluster.control.gather(cluster.device.free_bytes()) if free]
    return min(free) // FREE_PARTS if free else sys.maxsize


def _budget(total: int) -> Budget:
    return Budget(effort.current().links_s, BUDGET_SIZES * total)


# ---- one link alone -------------------------------------------------------------------------


def measure_link(
    name: str,
    probe: Probe,
    verbs: Mapping[Verb, Collective],
    smallest: int,
    total: int,
    budget: Budget,
    part: float = 1.0,
    vote: Collective | None = None,
    *,
    pairs: bool = False,
) -> Link:
    """Return latency and rate of all-reduces and their halves on a link, and small messages' times.

    Args:
        name: name of the link.
        probe: sends and times messages on the link.
        verbs: collectives by verb.
        smallest: bytes of the smallest bucket.
        total: bytes of all buckets.
        budget: budget of the whole measurement.
        part: share of the budget for this link.
        vote: collective of votes; None for the all-reduce of the link.
        pairs: whether the rate between two ranks will be measured if the link is distant. Then it
            determines halves better than a few messages do, for which TCP's windows are still
            small.
    """
    timers = {verb: partial(measure_messages, probe, verbs[verb]) for verb in verbs}
    mean = timers["all_reduce"]
    curve = explore(probe, verbs["all_reduce"], total, budget.share(EXPLORING * part))
    budget.allow(min(MOST_S, BUDGET_MODELS * message_s(curve, total)))
    small = measure_small(mean, total, curve, budget.share(SMALL * part))
    votes = partial(measure_messages, probe, vote) if vote else mean
    vote_s = measure_vote(votes, NUMBER_BYTES * probe.ranks, curve, budget.share(VOTE * part))
    small_halves = {}
    for verb in HALF_VERBS:
        share = budget.share(SMALL_HALVES / len(HALF_VERBS) * part)
        small_halves[verb] = measure_small(timers[verb], total, half_times(curve), share)
    lines = budget.share((LINE + HALVES) * part)
    share = lines.share(LINE / (LINE + HALVES))
    series = measure_series(mean, smallest, total, curve, share)
    line = median_points(series) or curve
    if larger := measure_larger(mean, curve[0][1], line, total, lines):
        # All other points hardly determine the rate. They count as times of small messages.
        small = least_times(sorted((dict(line) | dict(small)).items()))
        line = least_times([line[-1], *larger])
    fitted = fit_link(name, rate_points(line, small))
    by_pairs = pairs and fitted.has_long_steps(probe.ranks)
    halves: dict[str, tuple[float, float]] = {}
    for verb in HALF_VERBS:
        share = lines.share(HALVES / (LINE + HALVES) / len(HALF_VERBS))
        timer = timers[verb]
        points = median_points(measure_series(timer, smallest, total, half_times(line), share))
        is_short = message_s(line, total) < min(TELLING * curve[0][1], 2 * PAIR_S)
        if not points and is_short and not by_pairs:
            # Latency exceeds the time of the bytes; a half has half of the steps of an all-reduce.
            # Small halves have fewer steps, as their shards are sent at once.
            points = measure_two_sizes(timer, (total // 4, total), budget)
        if points and points[-1][0] * COMPARABLE >= line[-1][0]:
            fit = fit_link(name, rate_points(points, small_halves[verb]))
            halves[verb] = (fit.latency_s, fit.bytes_per_s)
    return replace(
        fitted,
        small=tuple(small),
        halves=halves,
        small_halves={verb: tuple(points) for verb, points in small_halves.items() if points},
        jitter=spread_of([seconds for _, seconds in series]),
        vote_s=vote_s,
    )


def explore(probe: Probe, collective: Collective, most: int, budget: Budget) -> Points:
    """Return approximate seconds of messages of 4 KiB, 16 KiB, and so on, up to `most` bytes.

    Two sizes are sent regardless of the budget, because nothing is known of the link. A further
    size is sent if it is expected to take at most a quarter of the budget, or at most twice the
    seconds of the smallest size: on a link of long latency smaller messages do not determine the
    rate.
    """
    probe.agree([0.0])  # wait for all ranks before the time of the budget begins
    points: Points = []
    size = min(SMALL_BYTES, most)
    limit_s = budget.seconds / 4
    while size <= most:
        if len(points) >= 2 and message_s(points, size) > max(limit_s, 2 * points[0][1]):
            break
        times = measure_messages(probe, collective, [size], budget)
        if LEAST_REPEATS * times[0] < limit_s:
            times += measure_messages(probe, collective, [size] * (LEAST_REPEATS - 1), budget)
        points.append((size, median(times)))
        size *= 4
    return least_times(points)


def message_s(points: Points, size: int) -> float:
    """Return the seconds of a message of any size, interpolated between the points.

    Below the first point they are constant. Beyond the last point they continue the line through
    the last two.
    """
    (low, low_s), (high, high_s) = ([(0, 0.0), *points])[-2:]
    if size > high:
        return high_s + (high_s - low_s) / (high - low) * (size - high)
    sizes, seconds = zip(*points, strict=True)
    return float(np.interp(size, sizes, seconds))


def least_times(points: Points) -> Points:
    """Return the points with each time reduced to the least time of the same or a larger size.

    A disturbance can only delay a message.
    """
    seconds = [*accumulate((seconds for _, seconds in reversed(points)), min)]
    return [(size, least_s) for (size, _), least_s in zip(points, reversed(seconds), strict=True)]


def measure_small(timer: Timer, total: int, curve: Points, budget: Budget) -> Points:
    """Return the mean seconds of `SMALL_SIZES` in non-decreasing order, within the budget.

    Each size gets an equal share of the budget and 3 to 9 repetitions. The mean leaves out the
    longest one only. Some small messages take several times as long as most, because processes are
    woken, and the same share of messages will do so in training.
    """
    sizes = [size for size in SMALL_SIZES if size <= total]
    points: Points = []
    for size in sizes:
        seconds = message_s(curve, size)
        repeats = min(MOST_REPEATS, budget.share(1 / len(sizes)).times(seconds, size) - 1)
        repeats = max(LEAST_REPEATS, repeats)
        if budget.times(seconds, size) < repeats + 1:
            break
        _, *times = timer([size] * (repeats + 1), budget)
        points.append((size, fmean(sorted(times)[:-1])))
    return never_falling(points)


def never_falling(points: Points) -> Points:
    """Return the points with non-decreasing seconds, by isotonic regression."""
    runs: list[list[Any]] = []  # [sizes, mean seconds]
    for size, seconds in points:
        runs.append([[size], seconds])
        while len(runs) > 1 and runs[-2][1] > runs[-1][1]:
            (low, low_s), (high, high_s) = runs[-2:]
            together = (len(low) * low_s + len(high) * high_s) / (len(low) + len(high))
            runs[-2:] = [[low + high, together]]
    return [(size, seconds) for sizes, seconds in runs for size in sizes]


def measure_vote(timer: Timer, size: int, curve: Points, budget: Budget) -> float:
    """Return the median seconds of a message of one number per rank, `size` bytes, as in a vote.

    The budget does not limit the first message: on a distant link it takes much less than the
    latency of the fit, because gloo splits larger messages into more pieces.
    """
    repeats = max(1, min(LEAST_REPEATS, budget.times(curve[0][1], size)))
    return median(timer([size] * repeats, budget))


def measure_series(
    timer: Timer, smallest: int, total: int, curve: Points, budget: Budget
) -> Series:
    """Return the seconds of messages of the sizes of `line_sizes`.

    Each size has `Effort.series` messages, or fewer if the budget does not allow them. The result
    is empty if the budget does not allow one message of each size. Messages are sent back to back,
    after one message that does not count, because an idle link is faster for its first bytes (the
    token bucket of a shaper).
    """
    sizes = line_sizes(smallest, total, curve, budget)
    each = most = effort.current().series
    while each and not is_payable(curve, series_sizes(sizes, each), budget):
        each -= 1
    if each < most and message_s(curve, sizes[-1]) < 2 * curve[0][1]:
        return []  # times are mostly latency; leave the budget to `measure_larger`
    if each == 0:
        return []
    _, *times = timer(series_sizes(sizes, each), budget)
    return [(size, times[i * each :][:each]) for i, size in enumerate(sizes)]


def measure_larger(
    timer: Timer, least_s: float, line: Points, total: int, budget: Budget
) -> Points:
    """Return the seconds of larger messages, one of each size.

    Sizes grow until a message takes `LARGE` times `least_s`, the seconds of the smallest message:
    on a link of long latency smaller messages do not determine the rate.
    """
    larger: Points = []
    agreements = [line[0][0]] * 2  # cost of the agreements before and after a message
    while (last := [*line, *larger][-1])[1] < LARGE * least_s and last[0] < total:
        size = min(LARGER * last[0], total)
        while size > last[0] and not is_payable([*line, *larger], [size, *agreements], budget):
            size = size * 9 // 10
        if size < 2 * last[0]:
            break
        (seconds,) = timer([size], budget)
        larger.append((size, seconds))
    return larger


def half_times(points: Points) -> Points:
    """Return half of each time, as an estimate for one half of an all-reduce."""
    return [(size, seconds / 2) for size, seconds in points]


def rate_points(line: Points, small: Points) -> Points:
    """Return the points of both lists that determine the rate.

    Their messages take at least `TELLING` times the seconds of the smallest message. If there are
    fewer than two points, return the two largest points of the line. The many small messages would
    dominate a fit by relative errors.
    """
    both = sorted((dict(small) | dict(line)).items())
    least_s = max((s for size, s in both if size <= SMALL_BYTES), default=both[0][1])
    points = [point for point in both if point[1] >= TELLING * least_s]
    return points if len(points) > 1 else line[-2:]


def median_points(series: Series) -> Points:
    """Return the median seconds of every size."""
    return [(size, median(seconds)) for size, seconds in series]


def series_sizes(sizes: Sequence[int], each: int) -> list[int]:
    """Return the sizes of a series: one message that does not count, then `each` of every size."""
    return [sizes[0], *(size for size in sizes for _ in range(each))]


def is_payable(curve: Points, messages: Sequence[int], budget: Budget) -> bool:
    """Whether the budget allows all these messages."""
    return budget.times(sum(message_s(curve, size) for size in messages), sum(messages)) > 0


def line_sizes(smallest: int, total: int, curve: Points, budget: Budget) -> list[int]:
    """Return three sizes in geometric progression, for the fit of a line of seconds over bytes.

    The first is the smallest bucket, but at most a quarter of the last. The last is the whole
    model, at most sixteen times the largest explored size, and small enough for a series within the
    budget. It is not reduced to fit into the seconds of the budget if it takes less than twice the
    seconds of the smallest message: smaller messages do not determine the rate. Messages smaller
    than a bucket are left out, because their time is nearly constant.
    """
    largest = min(total, 16 * curve[-1][0])
    while True:
        lowest = max(1, min(smallest, largest // 4))
        sizes = [lowest, round((lowest * largest) ** 0.5), largest]
        series = series_sizes(sizes, effort.current().series)
        needed = sum(series) <= budget.size_bytes and message_s(curve, largest) < 2 * curve[0][1]
        if needed or is_payable(curve, series, budget) or largest < LEAST_BYTES:
            return sizes
        largest = largest * 9 // 10
