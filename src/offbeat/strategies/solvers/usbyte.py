"""Unequal-sized fusion of unit blocks, and greedy changes of an order of messages."""

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
    """Messages in order: a bucket and the run of its unit blocks that they hold.

    Per bucket in backward order: `ready_s` (non-decreasing) and the number of its `units`;
    `blocks_s(bucket, n)` are the seconds of a message with n of them, never less for more. Whenever
    the link is free, the bucket nearest the input sends as many blocks as end near the next ready
    gradient. Raises ValueError. Source: US-Byte, unequal-sized fusion.
    """
    ready = _check.ready(ready_s)
    _check.same_length("units", _check.numbers("units", units), "ready_s", ready)
    runs: list[tuple[int, range]] = []
    sent = [0] * len(ready)
    unfinished: list[int] = []  # ready buckets; the last one is nearest the input
    arrived, now_s = 0, 0.0
    while arrived < len(ready) or unfinished:
        now_s = now_s if unfinished else max(now_s, float(ready[arrived]))
        known, arrived = arrived, bisect_right(ready, now_s)
        unfinished += [b for b in range(known, arrived) if units[b]]
        if not unfinished:
            continue
        b = unfinished[-1]
        slack_s = float(ready[arrived]) - now_s if arrived < len(ready) else math.inf
        width = _blocks(slack_s, units[b] - sent[b], partial(blocks_s, b))
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
    """The order after greedy changes, each kept if `cost_s` of the whole order drops by it.

    A change moves a message to another place, or replaces two by `joined(first, second)` (None if
    they do not fit) in the second's place. Stops after so many evaluations of `cost_s`, or when
    no change helps. Source: US-Byte, greedy priority; joining is ours.
    """
    best = list(order)
    best_s, i, fruitless = cost_s(best), 0, 0
    while fruitless < len(best) and evaluations > 0:
        i %= len(best)
        for variant in _variants(best, i, joined):
            evaluations -= 1
            variant_s = cost_s(variant)
            if variant_s < best_s * (1 - 1e-12):  # not by rounding
                best, best_s, fruitless = variant, variant_s, 0
                break
        else:
            i, fruitless = i + 1, fruitless + 1
    return best


def _blocks(slack_s: float, left: int, seconds: Callable[[int], float]) -> int:
    """How many of the unit blocks that are left end near the next event: the fewest that reach it,
    with those that cost nothing more, or all of them."""
    widths = range(1, left + 1)
    reaching = min(bisect_left(widths, slack_s, key=seconds) + 1, left)
    return bisect_right(widths, seconds(reaching), key=seconds)


def _variants(
    order: list[Message], i: int, joined: Callable[[Message, Message], Message | None]
) -> Iterator[list[Message]]:
    """Orders that differ from this one by a change of its i-th message."""
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
