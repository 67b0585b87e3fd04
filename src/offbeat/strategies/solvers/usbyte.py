"""Solvers of US-Byte: unequal-sized fusion of unit blocks, and local search for message orders."""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TypeVar

from offbeat.strategies.solvers import inputs as _check

Message = TypeVar("Message")


def unit_runs(
    ready_s: Sequence[float], units: Sequence[int], blocks_s: Callable[[int, int], float]
) -> list[tuple[int, range]]:
    """Return the messages in sending order, each as a bucket and the range of its unit blocks.

    Whenever the link is free, the ready bucket nearest the input sends as many blocks as end near
    the ready time of the next gradient.

    Args:
        ready_s: seconds from the start of backward to each bucket's gradient, non-decreasing.
        units: number of unit blocks of each bucket.
        blocks_s: function from (bucket, n) to the seconds of a message with n blocks of the bucket,
            non-decreasing in n.

    Raises:
        ValueError: an argument is invalid.

    Source: US-Byte, unequal-sized fusion.
    """
    ready = _check.ready(ready_s)
    _check.same_length("units", _check.numbers("units", units), "ready_s", ready)
    runs: list[tuple[int, range]] = []
    sent = [0] * len(ready)
    unfinished: list[int] = []  # ready buckets with unsent blocks; the last is nearest the input
    arrived, now_s = 0, 0.0
    while arrived < len(ready) or unfinished:
        now_s = now_s if unfinished else max(now_s, float(ready[arrived]))
        known, arrived = arrived, bisect_right(ready, now_s)
        unfinished += [b for b in range(known, arrived) if units[b]]
        if not unfinished:
            continue
        b = unfinished[-1]
        slack_s = float(ready[arrived]) - now_s if arrived < len(ready) else math.inf
        width = _block_count(slack_s, units[b] - sent[b], partial(blocks_s, b))
        runs.append((b, range(sent[b], sent[b] + width)))
        sent[b] += width
        now_s += blocks_s(b, width)
        if sent[b] == units[b]:
            unfinished.pop()
    return runs


def improved(
    order: Sequence[Message],
    cost_s: Callable[[list[Message]], float],
    joined: Callable[[Message, Message], Message | None],
    evaluations: int,
) -> list[Message]:
    """Improve an order of messages by local search until no change lowers the cost.

    A change moves a message to another place, or replaces two messages by one in the place of the
    second.

    Args:
        order: initial order.
        cost_s: function from an order to its cost.
        joined: function from (first, second) to the message that replaces both, or None if they
            cannot be joined.
        evaluations: limit of the evaluations of `cost_s`, checked after the variants of a message.

    Source: US-Byte, greedy priority; joining is ours.
    """
    best = list(order)
    best_s, i, fruitless = cost_s(best), 0, 0
    while fruitless < len(best) and evaluations > 0:
        i %= len(best)
        for variant in _variants(best, i, joined):
            evaluations -= 1
            variant_s = cost_s(variant)
            if variant_s < best_s * (1 - 1e-12):  # a smaller gain is a rounding error
                best, best_s, fruitless = variant, variant_s, 0
                break
        else:
            i, fruitless = i + 1, fruitless + 1
    return best


def _block_count(slack_s: float, left: int, seconds: Callable[[int], float]) -> int:
    """Return the number of the remaining unit blocks to send in one message.

    It is the smallest number that takes at least `slack_s`, plus further blocks that take no more
    time, or all remaining blocks if these take less.
    """
    widths = range(1, left + 1)
    reaching = min(bisect_left(widths, slack_s, key=seconds) + 1, left)
    return bisect_right(widths, seconds(reaching), key=seconds)


def _variants(
    order: list[Message], i: int, joined: Callable[[Message, Message], Message | None]
) -> Iterator[list[Message]]:
    """Yield the orders that differ from `order` by a change of its i-th message."""
    second = order[i]
    for j, first in enumerate(order):
        both = joined(first, second) if i != j else None
        if both is not None:
            yield [both if k == i else other for k, other in enumerate(order) if k != j]
    others = order[:i] + order[i + 1 :]
    step = 1
    while step < len(order):
        for place in (i - step, i + step):
            if 0 <= place <= len(others):
                yield [*others[:place], second, *others[place:]]
        step *= 2
