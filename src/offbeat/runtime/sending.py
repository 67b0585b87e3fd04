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
        taken_s = [
            _taken_s(cluster, link, like, size, rounds, part.share(size_part))
            for size, size_part in ((small, 1 / 3), (large, 1))
        ]
        costs = split((small, taken_s[0]), (large, taken_s[1]))
        found.append(replace(link, cpu_s_per_message=costs[0], cpu_s_per_byte=costs[1]))
    return tuple(found)


def split(small: tuple[int, float], large: tuple[int, float]) -> tuple[float, float]:
    """Seconds per message and per byte, from those of messages of two sizes; never below 0."""
    (few, few_s), (many, many_s) = small, large
    per_byte_s = max(0.0, many_s - max(few_s, 0.0)) / (many - few)
    return max(0.0, few_s - few * per_byte_s), per_byte_s


def _rounds(link: Link, small: int, large: int, budget: Budget) -> int:
    """How often messages of both sizes can be paid, as much work without them, and beginning
    together, which is two small messages each time."""
    begin_s = 4 * _message_s(link, small)
    seconds = sum(begin_s + 2 * COUNT * _message_s(link, size) for size in (small, large))
    return min(ROUNDS, budget.times(seconds, COUNT * (small + large)))


def _message_s(link: Link, size: int) -> float:
    return link.seconds(link.latency_s, size / link.bytes_per_s, size)


def _taken_s(
    cluster: Cluster, link: Link, like: Tensor, size: int, rounds: int, budget: Budget
) -> float:
    """What one message takes from a loop of small matrix products, mean over ranks: the time that
    the loop lasts while messages are under way, less what as many pieces of work take without
    them. At most what a message lasts; 0 if the budget ends too soon."""
    load = like.new_ones(max(1, size // like.element_size()))
    gather, work = cluster.control.gather, torch.ones(WIDTH, WIDTH)
    taken_s: list[float] = []
    last_s = time.perf_counter()
    for _ in range(rounds):
        spent_s = max(gather(time.perf_counter() - last_s))  # and begin together
        last_s = time.perf_counter()
        budget.pay(spent_s, COUNT * load.nbytes)
        if budget.seconds <= 0:
            break
        messages = release(cluster, {link.name: load}, COUNT)
        last = messages[link.name][-1]
        done = pieces(work, lambda: last.done)
        land(cluster, messages)
        together_s = time.perf_counter() - last_s
        gather(None)
        # As long, and begun in the same way: so what else the machine does counts alike.
        begin_s = time.perf_counter()
        alone = pieces(work, lambda: time.perf_counter() - begin_s >= together_s)
        alone_s = time.perf_counter() - begin_s
        taken_s.append((together_s - done * alone_s / alone) / COUNT)
    typical_s = fmean(gather(median(taken_s) if len(taken_s) >= LEAST_ROUNDS else 0.0))
    budget.pay(max(gather(time.perf_counter() - last_s)), 0)
    return min(max(0.0, typical_s), _message_s(link, size))


def pieces(work: Tensor, over: Callable[[], bool]) -> int:
    """Multiply matrices until it is over, at least once; how often."""
    count = 1
    torch.mm(work, work)
    while not over():
        torch.mm(work, work)
        count += 1
    return count
