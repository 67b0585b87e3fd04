"""Measuring links: alpha and beta of the messages that a model sends, and what links lose while
they run together."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from typing import cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from offbeat.plan import Moment, Verb, base_link, channel, transfer
from offbeat.profile import Contention, Link
from offbeat.runtime.cluster import Cluster
from offbeat.storage.flat import Flat
from offbeat.transport.collectives import Collective, averaging
from offbeat.transport.device import Device

MIN_BUCKET_BYTES = 64 * 1024
SMALL_BYTES = 4096
LINK_BUDGET_S = 5.0  # no single measured message takes longer
SMALL_SIZES = tuple(SMALL_BYTES << i for i in range(6))  # to 128 KiB: slices that P3 would send
SMALL_SPEND_S = 0.2
SPEND_S = 1.0  # per size of an all-reduce, within 3 to 15 repetitions
HALF_SPEND_S = 0.5  # the same per size of its halves
HALF_S = 1.0  # the largest half that is measured belongs to an all-reduce of this time
TOGETHER_S = 0.4  # per run of messages back to back
MESSAGE_S = 0.05  # each of them
EXTRAS_BUDGET_S = 10.0  # halves and contention stop when they have taken so long
HALVES: tuple[Verb, ...] = ("reduce_scatter", "all_gather")


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
    cluster: Cluster, flat: Flat
) -> tuple[tuple[Link, ...], tuple[Contention, ...]]:
    """Every link's alpha and beta, of all-reduces over the sizes of messages that this model sends
    and of their halves; and what links lose while both carry messages.

    Halves and contention are added until `EXTRAS_BUDGET_S` is over, those of the first link
    first. Every rank must call it, and opens a second channel of the first link.
    """
    like = flat.everything()[0]
    sizes = _sizes(flat)
    links = [_measure_link(cluster, name, sizes, like) for name in cluster.specs]
    if cluster.control.world_size == 1:
        return tuple(links), ()
    left = _countdown(cluster, EXTRAS_BUDGET_S)
    links[0] = _with_halves(cluster, links[0], sizes[-1], like)
    contention = _measure_contention(cluster, links, sizes[-1], like, left)
    for i in range(1, len(links)):
        if left():
            links[i] = _with_halves(cluster, links[i], sizes[-1], like)
    return tuple(links), contention


def _sizes(flat: Flat) -> list[int]:
    """Message sizes to measure, ascending, in bytes.

    Smaller messages are left out: they take a nearly constant time, which no straight line
    through the larger ones meets.
    """
    buckets = sorted(bucket.grad.nbytes for bucket in flat.buckets)
    total, middle = sum(buckets), buckets[len(buckets) // 2]
    sizes = sorted({buckets[0], middle, buckets[-1], 2 * middle, total // 4, total})
    return [size for size in sizes if buckets[0] <= size <= total]


def _countdown(cluster: Cluster, budget_s: float) -> Callable[[], bool]:
    """Whether there is time left, by rank 0's clock so that all ranks go on together."""
    end = time.monotonic() + budget_s
    return lambda: cluster.control.gather(time.monotonic() < end)[0]


def worthwhile_bytes(group: dist.ProcessGroup, flat: Flat, device: Device) -> int:
    """Smallest bucket of which at most a tenth of its message's time is what the smallest message
    takes, while at least twenty buckets are left to schedule; never below 64 KiB."""
    total = sum(bucket.grad.nbytes for bucket in flat.buckets)
    like = flat.everything()[0]
    sizes = [SMALL_BYTES, max(total // 4, SMALL_BYTES)]
    points = measure(averaging(group), group, sizes, like, device, budget_s=1.0)
    (_, least_s), (size, seconds) = points[0], points[-1]
    return max(MIN_BUCKET_BYTES, int(min(10 * least_s * size / seconds, total / 20)))


# ---- one link alone -------------------------------------------------------------------------


def measure(
    collective: Collective,
    group: dist.ProcessGroup,
    sizes: Sequence[int],
    like: Tensor,
    device: Device,
    *,
    budget_s: float = LINK_BUDGET_S,
    spend_s: float = SPEND_S,
) -> list[tuple[int, float]]:
    """Seconds of a collective for each size in bytes: (size, median over repetitions).

    Every rank must call it with the same sizes, ascending; once a size would take more than
    `budget_s` the rest is left out, by a time that all ranks share.
    """
    width = like.element_size()
    points: list[tuple[int, float]] = []
    for size in sizes:
        expected_s = points[-1][1] * size / points[-1][0] if points else 0.01
        if expected_s > budget_s:
            break
        buffer = like.new_ones(max(1, size // width))
        collective(buffer)  # the first one opens connections and fills the token bucket
        repeats = int(min(15, max(3, spend_s / expected_s)))
        times = sorted(_timed(collective, buffer, device) for _ in range(repeats))
        median = torch.full((1,), times[len(times) // 2], dtype=torch.float64, device=like.device)
        dist.all_reduce(median, op=dist.ReduceOp.AVG, group=group)
        points.append((buffer.nbytes, float(median)))
    return points


def _timed(collective: Collective, buffer: Tensor, device: Device) -> float:
    device.finish()
    start = time.perf_counter()
    collective(buffer)
    device.finish()
    return time.perf_counter() - start


def _measure(
    cluster: Cluster, name: str, verb: Verb, sizes: Sequence[int], like: Tensor, spend_s: float
) -> list[tuple[int, float]]:
    collective = cluster.links[name].collectives.by_verb[verb]
    return measure(collective, cluster.groups[name], sizes, like, cluster.device, spend_s=spend_s)


def _measure_link(cluster: Cluster, name: str, sizes: Sequence[int], like: Tensor) -> Link:
    """Alpha, beta, and what small messages take."""
    small = _measure(cluster, name, "all_reduce", SMALL_SIZES, like, SMALL_SPEND_S)
    points = _measure(cluster, name, "all_reduce", sizes, like, SPEND_S)
    return replace(fit_link(name, points), small=tuple(small))


def _with_halves(cluster: Cluster, link: Link, total: int, like: Tensor) -> Link:
    """The link with alpha and beta of reduce_scatter and all_gather, from two sizes."""
    large = _bytes_in(link, HALF_S, total)
    [sizes] = _rank_0s(cluster, [[large // 8, large]])
    halves: dict[str, tuple[float, float]] = {}
    for verb in HALVES:
        fit = fit_link(link.name, _measure(cluster, link.name, verb, sizes, like, HALF_SPEND_S))
        halves[verb] = (fit.latency_s, fit.bytes_per_s)
    return replace(link, halves=halves)


def _bytes_in(link: Link, seconds: float, most: int) -> int:
    """Size of an all-reduce of about so many seconds, at most `most`."""
    return int(min(max((seconds - link.latency_s) * link.bytes_per_s, SMALL_BYTES), most))


def _rank_0s(cluster: Cluster, value: list) -> list:
    """Rank 0's word: fits of the same times may differ between machines in the last bit."""
    return cluster.control.gather(value)[0]


# ---- links together -------------------------------------------------------------------------

Load = tuple[Tensor, int]  # a message and how many of it
Spans = list[tuple[float, float]]  # (start, end) of messages, perf_counter seconds


def _measure_contention(
    cluster: Cluster, links: Sequence[Link], total: int, like: Tensor, left: Callable[[], bool]
) -> tuple[Contention, ...]:
    """Two channels of the first link, then every pair of links, while there is time left."""
    plans = _rank_0s(cluster, [_load_of(link, total) for link in links])
    loads: dict[str, Load] = {
        link.name: (like.new_ones(max(1, size // like.element_size())), count)
        for link, (size, count) in zip(links, plans, strict=True)
    }
    first, second = links[0].name, channel(links[0].name, 1)
    pairs = [(first, second), *combinations(loads, 2)]
    loads[second] = loads[first]
    cluster.open([second])
    alone: dict[str, float] = {}
    found: list[Contention] = []
    for a, b in pairs:
        if found and not left():
            break
        for name in (a, b):
            if name not in alone:
                spans = _run(cluster, {name: loads[name]})[name]
                # The median: one hiccup alone would let the link look faster in company.
                alone[name] = 1 / float(np.median([end - start for start, end in spans]))
        together = _run(cluster, {name: loads[name] for name in (a, b)})
        speeds = _speeds(cluster, together[a], together[b], alone[a], alone[b])
        found.append(Contention((base_link(a), base_link(b)), speeds))
    return tuple(found)


def _load_of(link: Link, total: int) -> tuple[int, int]:
    """(bytes, count) of messages back to back that fill `TOGETHER_S` on this link."""
    size = _bytes_in(link, MESSAGE_S, total)
    seconds = link.latency_s + size / link.bytes_per_s
    return size, int(min(64, max(3, TOGETHER_S / seconds)))


def _run(cluster: Cluster, loads: Mapping[str, Load]) -> dict[str, Spans]:
    """Send messages back to back on several links at once, through the links' own threads.

    What is sent for measuring does not count as the link's traffic.
    """
    rules = {
        name: transfer(
            "grad", range(1), after=Moment("step"), before=Moment("end"), phases=[0], link=name
        )
        for name in loads
    }
    sent = {name: cluster.links[name].bytes_sent for name in loads}
    cluster.control.gather(None)  # begin together
    flights = {
        name: [cluster.links[name].enqueue(rules[name], 0) for _ in range(count)]
        for name, (_, count) in loads.items()
    }
    for name, mine in flights.items():
        for flight in mine:
            cluster.links[name].release(flight, (loads[name][0],))
    spans: dict[str, Spans] = {}
    for name, mine in flights.items():
        for flight in mine:
            if not flight.wait(cluster.timeout_s + 5) or flight.error is not None:
                raise RuntimeError(
                    f"link {name!r} failed while it was measured: {flight.error}. "
                    f"{cluster.control.behind()}"
                )
        seconds = cluster.device.seconds
        spans[name] = [(seconds(flight.start), seconds(flight.end)) for flight in mine]
        cluster.links[name].bytes_sent = sent[name]
    return spans


def _rate(spans: Spans, begin: float, end: float) -> float:
    """Messages per second between two moments, those cut off in proportion."""
    done = sum(
        max(0.0, min(stop, end) - max(start, begin)) / (stop - start) for start, stop in spans
    )
    return done / (end - begin)


def _speeds(
    cluster: Cluster, a: Spans, b: Spans, alone_a: float, alone_b: float
) -> tuple[float, float]:
    """Rates while both were busy over the rates alone, mean over ranks; noise above 1 is cut."""
    begin, end = max(a[0][0], b[0][0]), min(a[-1][1], b[-1][1])
    mine = (1.0, 1.0)  # never busy at once: nothing lost
    if end > begin:
        mine = (_rate(a, begin, end) / alone_a, _rate(b, begin, end) / alone_b)
    means = np.mean(cluster.control.gather(mine), axis=0)
    return cast("tuple[float, float]", tuple(float(min(1.0, max(m, 0.01))) for m in means))
