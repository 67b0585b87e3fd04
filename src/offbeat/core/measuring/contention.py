"""Measurement of contention: rates of links that carry messages at the same time."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import cast

import numpy as np
from torch import Tensor

from offbeat.core.measuring import effort
from offbeat.core.measuring.timing import Budget
from offbeat.core.measuring.volley import send_volley
from offbeat.core.plan import base_link, channel
from offbeat.core.profile import Contention, Link
from offbeat.core.transport.cluster import Cluster

RUNS = 3  # loads of `Effort.load` messages for each pair: one on one link, one on each of both

Spans = list[tuple[float, float]]  # (start, end) of messages, perf_counter seconds


def measure_contention(
    cluster: Cluster, links: Sequence[Link], like: Tensor, budget: Budget
) -> tuple[Contention, ...]:
    """Return the contention of two channels of the first link, then of every pair of links.

    Pairs are measured until the budget is spent. Nothing is sent if the latency of the messages
    alone exceeds the budget. Every rank must call it with equal links.
    """
    pairs, count = 1 + len(links) * (len(links) - 1) // 2, effort.current().load
    sizes = {link.name: load_bytes(link, pairs, budget) for link in links}
    if not all(sizes.values()):
        return ()
    width = like.element_size()
    loads = {name: like.new_ones(max(1, size // width)) for name, size in sizes.items()}
    first, second = links[0].name, channel(links[0].name, 1)
    alone: dict[str, float] = {}  # messages per second
    measured: list[Contention] = []
    for a, b in [(first, second), *combinations(sizes, 2)]:
        if budget.seconds <= 0:
            break
        start, sent = time.perf_counter(), 0
        cluster.open([b])
        loads.setdefault(b, loads[a].clone())  # both links write to their load
        one, other = base_link(a), base_link(b)
        for name in (one, other):
            if name not in alone:
                spans = _measure_spans(cluster, {name: loads[name]})[name]
                sent += loads[name].nbytes * count
                # With a mean, one delayed message would make the link look faster with others.
                alone[name] = 1 / float(np.median([end - start for start, end in spans]))
        together = _measure_spans(cluster, {name: loads[name] for name in (a, b)})
        sent += (loads[a].nbytes + loads[b].nbytes) * count
        speeds = _speeds(cluster, together[a], together[b], alone[one], alone[other])
        measured.append(Contention((one, other), speeds))
        spent_s = cluster.control.gather(time.perf_counter() - start)
        budget.pay(max(spent_s), sent)
    return tuple(measured)


def load_bytes(link: Link, pairs: int, budget: Budget) -> int:
    """Return the message size in bytes with which all pairs fit into the budget; 0 if none does."""
    messages = pairs * RUNS * effort.current().load
    seconds = budget.seconds / messages - link.latency_s
    return max(0, int(min(seconds * link.bytes_per_s, budget.size_bytes / messages)))


def _measure_spans(cluster: Cluster, loads: Mapping[str, Tensor]) -> dict[str, Spans]:
    """Send messages back to back on several links at once. Return their (start, end) seconds."""
    cluster.control.gather(None)  # all ranks begin at the same time
    sent, seconds = send_volley(cluster, loads, effort.current().load), cluster.device.seconds
    return {name: [(seconds(m.start), seconds(m.end)) for m in sent[name]] for name in loads}


def _rate(spans: Spans, begin: float, end: float) -> float:
    """Return messages per second in [begin, end]. A message counts by its share in the interval."""
    done = sum(
        max(0.0, min(stop, end) - max(start, begin)) / (stop - start) for start, stop in spans
    )
    return done / (end - begin)


def _speeds(
    cluster: Cluster, a: Spans, b: Spans, alone_a: float, alone_b: float
) -> tuple[float, float]:
    """Return the rates of both links while both are busy, relative to their rates alone.

    The result is the mean over ranks, limited to [0.01, 1].
    """
    begin, end = max(a[0][0], b[0][0]), min(a[-1][1], b[-1][1])
    speeds = (1.0, 1.0)  # if the links are never busy at the same time
    if end > begin:
        speeds = (_rate(a, begin, end) / alone_a, _rate(b, begin, end) / alone_b)
    means = np.mean(cluster.control.gather(speeds), axis=0)
    return cast("tuple[float, float]", tuple(float(min(1.0, max(m, 0.01))) for m in means))
