"""Knapsacks of one window: which messages are sent in it, on which link (DeFT).

A link's messages go in the order in which they are ready, each as soon as it is ready and the link
free; they fit if the last one ends within the window. That is DeFT's condition: for each chosen i
the chosen messages ready no earlier take together at most the time left once i is ready, and at
most the time that the link has left at all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from offbeat.strategies.solvers import inputs as _check
from offbeat.strategies.solvers.inputs import Numbers

Placement = tuple[tuple[int, ...], ...]  # per link its messages, in the order of sending

MOST_ENUMERATED = 14  # messages; two links take 1.5 ms at 14, 7 ms at 16
CELLS = 1 << 16  # of the window, where subset sums are counted instead of enumerated
_TINY = float(np.finfo(float).tiny)
_ROUNDING = 1e-9  # of the window
FILLED = 1 + _ROUNDING  # times the window: what fills it up to rounding fits

_Ends = NDArray[np.float64]  # per subset of the messages (bit i: message i) the end on a link


@dataclass(frozen=True)
class Window:
    """A problem whose messages are in order of readiness; times in seconds from its start."""

    weights_s: Numbers  # [link, message]
    limit_s: float  # when the last message must have ended
    ready_s: Numbers
    busy_s: Numbers

    @property
    def links(self) -> int:
        return self.weights_s.shape[0]

    @property
    def count(self) -> int:
        return self.weights_s.shape[1]

    @cached_property
    def _lists_s(self) -> tuple[list[list[float]], list[float], list[float]]:
        """Weights, ready and busy times as lists, which loops read faster."""
        return self.weights_s.tolist(), self.ready_s.tolist(), self.busy_s.tolist()

    def fits_alone(self) -> NDArray[np.bool_]:
        """[link, message]: whether the message could be sent there if it were the only one."""
        return np.maximum(self.busy_s[:, None], self.ready_s) + self.weights_s <= self.limit_s

    def end_s(self, link: int, messages: Iterable[int]) -> float:
        """When the last of ascending messages ends on a link."""
        weights_s, ready_s, busy_s = self._lists_s
        own_s, end_s = weights_s[link], busy_s[link]
        for i in messages:
            end_s = max(end_s, ready_s[i]) + own_s[i]
        return end_s

    def only(self, messages: NDArray[np.intp]) -> Window:
        """The same window for some messages."""
        return Window(
            self.weights_s[:, messages], self.limit_s, self.ready_s[messages], self.busy_s
        )

    def value_s(self, sets: list[list[int]]) -> float:
        return float(sum(self.weights_s[0, messages].sum() for messages in sets))

    def slowest_first(self) -> list[int]:
        """Links by the time that they have left, in seconds of the first link."""
        seconds = self.weights_s.sum(axis=1)
        left_s = (self.limit_s - self.busy_s) * seconds[0] / np.where(seconds > 0, seconds, 1.0)
        return np.argsort(left_s, kind="stable").tolist()


@dataclass(frozen=True)
class Solver:
    """A way to fill a window: `exact` or `greedy`."""

    solve: Callable[[Window], list[list[int]]]  # of messages that could all be sent and cost time

    def __call__(
        self,
        weights_s: Sequence[Sequence[float]],
        window_s: float,
        ready_s: Sequence[float] | None = None,
        busy_s: Sequence[float] | None = None,
    ) -> Placement:
        """The messages to send, each on at most one link.

        `weights_s[link][message]` in seconds; a message is worth its seconds on the first link.
        `ready_s` per message and `busy_s` per link (when it becomes free) count from the start of
        the window, 0 by default. Raises ValueError.
        """
        window, order = _window(weights_s, window_s, ready_s, busy_s)
        return tuple(tuple(order[i] for i in messages) for messages in self.place(window))

    def place(self, window: Window) -> Placement:
        """The same of a window that is known to make sense.

        What costs nothing is placed, what fits nowhere is left out; `solve` places the rest.
        """
        fits = window.fits_alone()
        free = fits & (window.weights_s == 0)
        anywhere, gratis = fits.any(axis=0), free.any(axis=0)
        open_ = np.flatnonzero(anywhere & ~gratis)
        if open_.size == window.count:
            return tuple(map(tuple, self.solve(window)))
        sets = self.solve(window.only(open_)) if open_.size else [[] for _ in range(window.links)]
        result = [open_[messages].tolist() for messages in sets]
        for message in np.flatnonzero(gratis).tolist():
            result[int(free[:, message].argmax())].append(message)
        return tuple(tuple(sorted(messages)) for messages in result)


def _window(
    weights_s: Sequence[Sequence[float]],
    window_s: float,
    ready_s: Sequence[float] | None,
    busy_s: Sequence[float] | None,
) -> tuple[Window, list[int]]:
    """The checked problem, and which message each of its messages was."""
    if not len(weights_s):
        raise ValueError("weights_s ([]) must hold at least one link")
    _check.number("window_s", window_s)
    rows = [_check.numbers(f"weights_s[{k}]", row) for k, row in enumerate(weights_s)]
    ready = np.zeros(len(rows[0])) if ready_s is None else _check.numbers("ready_s", ready_s)
    busy = np.zeros(len(rows)) if busy_s is None else _check.numbers("busy_s", busy_s)
    for k, row in enumerate(rows):
        _check.same_length(f"weights_s[{k}]", row, "ready_s", ready)
    if len(busy) != len(rows):
        raise ValueError(
            f"busy_s ({len(busy)} values) must have one value per link ({len(rows)}); "
            "give 0 for a link that is free"
        )
    limit_s = window_s * FILLED
    if busy.max() > limit_s:
        raise ValueError(
            f"busy_s ({busy.max():g}) must be at most window_s ({window_s:g}); "
            "leave out a link that has no time left"
        )
    order = np.argsort(ready, kind="stable")
    return Window(np.stack(rows)[:, order], limit_s, ready[order], busy), order.tolist()


def _best(window: Window) -> list[list[int]]:
    if window.count <= MOST_ENUMERATED:
        return _enumerated(window)
    balanced = _earliest_end(window)
    if balanced is not None:
        return balanced
    return max(_filled(window), _first_fit(window), key=window.value_s)


def _enumerated(window: Window) -> list[list[int]]:
    """The best subset of all, by the least end that each link can have after placing it."""
    alone = [_ends_alone(window, link) for link in range(window.links)]
    ends = [np.where(alone[0] <= window.limit_s, alone[0], np.inf)]
    for link in range(1, window.links):
        ends.append(_ends_with(window, link, ends[-1]))
    value_s = np.zeros(1)
    for weight_s in window.weights_s[0]:
        value_s = np.concatenate([value_s, value_s + weight_s])
    chosen = int(np.where(np.isfinite(ends[-1]), value_s, -1.0).argmax())
    everything = np.arange(len(value_s))
    sets: list[list[int]] = []
    for link in range(window.links - 1, 0, -1):
        here = everything[everything & ~chosen == 0]
        rest = np.maximum(alone[link][here], ends[link - 1][chosen ^ here])
        part = int(here[rest.argmin()])
        sets.append(_members(part))
        chosen ^= part
    return [_members(chosen), *reversed(sets)]


def _ends_alone(window: Window, link: int) -> _Ends:
    """For every subset: its end if all of it goes on this link."""
    ends = window.busy_s[link : link + 1]
    for ready_s, weight_s in zip(window.ready_s, window.weights_s[link], strict=True):
        ends = np.concatenate([ends, np.maximum(ends, ready_s) + weight_s])
    return ends


def _ends_with(window: Window, link: int, before: _Ends) -> _Ends:
    """For every subset: the least end on this link if the others before it help, or infinity."""
    ends = np.where(np.isfinite(before), window.busy_s[link], np.inf)
    for i in range(window.count):
        without, joined = ends.reshape(-1, 2, 1 << i).swapaxes(0, 1)
        here = np.maximum(without, window.ready_s[i])
        here += window.weights_s[link, i]
        np.minimum(joined, here, out=joined)
    ends[ends > window.limit_s] = np.inf
    return ends


def _members(subset: int) -> list[int]:
    return [i for i in range(subset.bit_length()) if subset >> i & 1]


def _earliest_end(window: Window) -> list[list[int]] | None:
    """Everything, longest first, each on the link that then ends first; None if it does not fit."""
    worth = window.weights_s[0] / np.maximum(window.weights_s, _TINY)
    if window.weights_s[0].sum() > (window.limit_s - window.busy_s) @ worth.max(axis=1):
        return None
    sets: list[list[int]] = [[] for _ in range(window.links)]
    load_s, columns_s = window.busy_s.tolist(), window.weights_s.T.tolist()
    for i in np.argsort(-window.weights_s[0], kind="stable").tolist():
        ends_s = [load + weight for load, weight in zip(load_s, columns_s[i], strict=True)]
        link = ends_s.index(min(ends_s))
        load_s[link] = ends_s[link]
        sets[link].append(i)
    sets = [sorted(messages) for messages in sets]
    fits = all(window.end_s(k, messages) <= window.limit_s for k, messages in enumerate(sets))
    return sets if fits else None


def _filled(window: Window) -> list[list[int]]:
    """Each link, the slowest first, as full as it gets."""
    left = np.arange(window.count)
    sets: list[list[int]] = [[] for _ in range(window.links)]
    for link in window.slowest_first():
        chosen = _fullest(window.only(left), link)
        sets[link] = left[chosen].tolist()
        left = np.delete(left, chosen)
    return sets


def _fullest(window: Window, link: int) -> list[int]:
    """The messages that fill one link most, from the sums that can be reached (bits of an int).

    Latest ready first: the sum of what is ready no earlier is then known when its limit applies.
    Weights are rounded up, so that what is found does fit.
    """
    cell_s = window.limit_s / CELLS or 1.0
    weights = np.ceil(window.weights_s[link] / cell_s - _ROUNDING).astype(int).tolist()
    left_s = window.limit_s - np.maximum(window.ready_s, window.busy_s[link])
    limits = np.floor(np.maximum(left_s / cell_s, -1)).astype(int).tolist()
    full = int((window.limit_s - window.busy_s[link]) / cell_s)
    history = [1]
    for i in range(window.count - 1, -1, -1):
        sums = history[-1]
        added = sums << weights[i]
        if added.bit_length() > limits[i] + 1:
            added &= (1 << (limits[i] + 1)) - 1
        history.append(sums | added)
        if history[-1].bit_length() > full:
            break
    reached, chosen = history[-1].bit_length() - 1, []
    for step in range(len(history) - 1, 0, -1):
        if not history[step - 1] >> reached & 1:
            chosen.append(window.count - step)
            reached -= weights[chosen[-1]]
    return chosen


def _first_fit(window: Window) -> list[list[int]]:
    sets: list[list[int]] = [[] for _ in range(window.links)]
    left = np.argsort(-window.weights_s[0], kind="stable").tolist()
    for link in window.slowest_first():
        room_s = window.limit_s - window.busy_s[link]
        for i in list(left):
            weight_s = float(window.weights_s[link, i])
            if weight_s > room_s:  # no need to look at when they are ready
                continue
            longer = sorted([*sets[link], i])
            if window.end_s(link, longer) <= window.limit_s:
                sets[link], room_s = longer, room_s - weight_s
                left.remove(i)
    return sets


exact = Solver(_best)
"""The messages that fill the window best. Source: DeFT, Problems 1 and 2.

Optimal for up to 14 messages that could be sent at all, on any number of links, by looking at
every subset; of the ways to place the same messages, on two links the one that ends first.
With more messages, weights are rounded up to 2^-16 of the window: on one link it is as good as
the optimum of a window shorter by that per message. On several links each is then filled that
way, the slowest first, which need not be optimal together; the sums of so many messages lie
close together. It is never worse than `greedy`.
"""

greedy = Solver(_first_fit)
"""Links by increasing capacity, messages by decreasing value: whatever still fits.

Source: DeFT, Section III-C.
"""
