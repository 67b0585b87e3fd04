"""What links lose while they run together."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import cast

import numpy as np
from torch import Tensor

from offbeat.core.measuring.timing import Budget
from offbeat.core.measuring.volley import land, release
from offbeat.core.plan import base_link, channel
from offbeat.core.profile import Contention, Link
from offbeat.core.transport.cluster import Cluster

COUNT = 6  # messages back to back
RUNS = 3  # of so many messages for each pair: one link alone, then both

Spans = list[tuple[float, float]]  # (start, end) of messages, perf_counter seconds


def measure_contention(
    cluster: Cluster, links: Sequence[Link], like: Tensor, budget: Budget
) -> tuple[Contention, ...]:
    """Two channels of the first link, then every pair of links, while the budget lasts.

    Every rank must call it with equal links. Nothing is sent where a message's latency alone is
    beyond the budget.
    """
    pairs = 1 + len(links) * (len(links) - 1) // 2
    sizes = {link.name: load_bytes(link, pairs, budget) for link in links}
    if not all(sizes.values()):
        return ()
    width = like.element_size()
    loads = {name: like.new_ones(max(1, size // width)) for name, size in sizes.items()}
    first, second = links[0].name, channel(links[0].name, 1)
    alone: dict[str, float] = {}  # messages per second
    found: list[Contention] = []
    for a, b in [(first, second), *combinations(sizes, 2)]:
        if budget.seconds <= 0:
            break
        start, sent = time.perf_counter(), 0
        cluster.open([b])
        loads.setdefault(b, loads[a])
        for name in (base_link(a), base_link(b)):
            if name not in alone:
                spans = _sent(cluster, {name: loads[name]})[name]
                sent += loads[name].nbytes * COUNT
                # The median: one hiccup alone would let the link look faster in company.
                alone[name] = 1 / float(np.median([end - start for start, end in spans]))
        together = _sent(cluster, {name: loads[name] for name in (a, b)})
        sent += (loads[a].nbytes + loads[b].nbytes) * COUNT
        found.append(_contention(cluster, a, b, together, alone))
        spent_s = cluster.control.gather(time.perf_counter() - start)
        budget.pay(max(spent_s), sent)
    return tuple(found)


def load_bytes(link: Link, pairs: int, budget: Budget) -> int:
    """Size of this link's messages so that all pairs can be paid; 0 if none is small enough."""
    messages = pairs * RUNS * COUNT
    seconds = budget.seconds / messages - link.latency_s
    return max(0, int(min(seconds * link.bytes_per_s, budget.size_bytes / messages)))


def _contention(
    cluster: Cluster, a: str, b: str, together: Mapping[str, Spans], alone: Mapping[str, float]
) -> Contention:
    one, other = base_link(a), base_link(b)
    speeds = _speeds(cluster, together[a], together[b], alone[one], alone[other])
    return Contention((one, other), speeds)


def _sent(cluster: Cluster, loads: Mapping[str, Tensor]) -> dict[str, Spans]:
    """Send messages back to back on several links at once."""
    cluster.control.gather(None)  # begin together
    messages = release(cluster, loads, COUNT)
    land(cluster, messages)
    seconds = cluster.device.seconds
    return {
        name: [(seconds(m.start), seconds(m.end)) for m in mine] for name, mine in messages.items()
    }


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
