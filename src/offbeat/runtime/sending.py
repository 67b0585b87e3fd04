"""Sending: the processor time that messages take from the compute of the rank that sends them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import fmean, median

import torch
from torch import Tensor

from offbeat.profile import Link
from offbeat.runtime.cluster import Cluster
from offbeat.runtime.probe import Budget
from offbeat.runtime.volley import land, release

COUNT = 3  # messages back to back, so that they outlast a piece of work
ROUNDS, LEAST_ROUNDS = 7, 3  # of each size
SMALL_BYTES = 4096
LARGE = 1 / 20  # of the model: a bucket
WIDTH = 96  # of the matrices of a piece of work: a tenth of a millisecond


def measure_sending(
    cluster: Cluster, links: Sequence[Link], like: Tensor, total: int, budget: Budget
) -> tuple[Link, ...]:
    """The links with what their messages take from compute; as they are on a device that computes
    beside the processor, and where the budget is too small to see it.

    Every rank must call it with equal links. `total` is the model's size in bytes.
    """
    if like.device.type != "cpu":
        return tuple(links)
    found = []
    for link in links:
        part = budget.share(1 / len(links))
        small, large = min(SMALL_BYTES, total), max(1, int(LARGE * total))
        while (rounds := _rounds(link, small, large, part)) < LEAST_ROUNDS and large > 4 * small:
            large //= 2
        if rounds < LEAST_ROUNDS or large < 2 * small:
            found.append(link)
            continue
        start_s = time.perf_counter()
        taken_s = [_taken_s(cluster, link, like, size, rounds) for size in (small, large)]
        everyone = cluster.control.gather((*taken_s, time.perf_counter() - start_s))
        *means, _ = map(fmean, zip(*everyone, strict=True))
        part.pay(max(spent_s for *_, spent_s in everyone), rounds * COUNT * (small + large))
        per_message_s, per_byte_s = split((small, means[0]), (large, means[1]))
        found.append(
            replace(link, cpu_s_per_message=per_message_s, cpu_s_per_byte=per_byte_s)
        )
    return tuple(found)


def split(small: tuple[int, float], large: tuple[int, float]) -> tuple[float, float]:
    """Seconds per message and per byte, from those of messages of two sizes; never below 0."""
    (few, few_s), (many, many_s) = small, large
    per_byte_s = max(0.0, many_s - max(few_s, 0.0)) / (many - few)
    return max(0.0, few_s - few * per_byte_s), per_byte_s


def _rounds(link: Link, small: int, large: int, budget: Budget) -> int:
    """How often messages of both sizes can be paid, as much work without them, and beginning
    together, which is two small messages."""
    begin_s = 2 * _message_s(link, small)
    seconds = sum(begin_s + 2 * COUNT * _message_s(link, size) for size in (small, large))
    return min(ROUNDS, budget.times(seconds, COUNT * (small + large)))


def _message_s(link: Link, size: int) -> float:
    return link.seconds(link.latency_s, size / link.bytes_per_s, size)


def _taken_s(cluster: Cluster, link: Link, like: Tensor, size: int, rounds: int) -> float:
    """What one message takes from a loop of small matrix products: the time that the loop lasts
    while messages are under way, less what as many pieces of work take without them."""
    load = like.new_ones(max(1, size // like.element_size()))
    work = torch.ones(WIDTH, WIDTH)
    window_s = COUNT * _message_s(link, size)
    taken_s = []
    for _ in range(rounds):
        begin_s = time.perf_counter()
        alone = pieces(work, lambda: time.perf_counter() - begin_s >= window_s)
        alone_s = time.perf_counter() - begin_s
        cluster.control.gather(None)  # begin together
        begin_s = time.perf_counter()
        messages = release(cluster, {link.name: load}, COUNT)
        last = messages[link.name][-1]
        done = pieces(work, lambda: last.done)
        land(cluster, messages)
        taken_s.append(time.perf_counter() - begin_s - done * alone_s / alone)
    return median(taken_s) / COUNT


def pieces(work: Tensor, over: Callable[[], bool]) -> int:
    """Multiply matrices until it is over, at least once; how often."""
    count = 1
    torch.mm(work, work)
    while not over():
        torch.mm(work, work)
        count += 1
    return count
