"""Knapsacks of DeFT: choice of the messages to send in one window, and of their links.

A link sends its messages in the order of their ready times, each as soon as it is ready and the
link is free. The messages fit if the last one ends within the window. This is DeFT's condition: for
each chosen message i, the chosen messages that are not ready before i take at most the time from
i's ready time to the end of the window, and all chosen messages take at most the time for which the
link is free.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from offbeat.strategies.solvers import inputs as _check
from offbeat.strategies.solvers.inputs import Numbers

Placement = tuple[tuple[int, ...], ...]  # messages of each link in sending order

MOST_ENUMERATED = 14  # largest number of messages; with two links 14 take 1.5 ms, 16 take 7 ms
CELLS = 1 << 16  # cells of the window for subset sums, if there are too many subsets
_TINY = float(np.finfo(float).tiny)
_ROUNDING = 1e-9  # tolerance, as share of the window
FILLED = 1 + _ROUNDING  # factor of the window within which messages fit

_Ends = NDArray[np.float64]  # end on a link for each subset of messages (bit i: message i)


@dataclass(frozen=True)
class Window:
    """Knapsack problem with messages in order of ready times.

    Attributes:
        weights_s: seconds of each message on each link, `[link, message]`.
        limit_s: latest end of the last message, in seconds from the start of the window.
        ready_s: ready time of each message, in seconds from the start of the window.
        busy_s: time at which each link becomes free, in seconds from the start of the window.
    """

    weights_s: Numbers
    limit_s: float
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
        """Return weights, ready and busy times as lists, because loops read lists faster."""
        return self.weights_s.tolist(), self.ready_s.tolist(), self.busy_s.tolist()

    def fits_alone(self) -> NDArray[np.bool_]:
        """Return `[link, message]`: whether the message fits on the link as the only message."""
        return np.maximum(self.busy_s[:, None], self.ready_s) + self.weights_s <= self.limit_s

    def end_s(self, link: int, messages: Iterable[int]) -> float:
        """Return the end of the last message on a link. `messages` must ascend."""
        weights_s, ready_s, busy_s = self._lists_s
        own_s, end_s = weights_s[link], busy_s[link]
        for i in messages:
            end_s = max(end_s, ready_s[i]) + own_s[i]
        return end_s

    def pick(self, messages: NDArray[np.intp]) -> Window:
        """Return this window with some of its messages."""
        return Window(
            self.weights_s[:, messages], self.limit_s, self.ready_s[messages], self.busy_s
        )

    def value_s(self, sets: list[list[int]]) -> float:
        return float(sum(self.weights_s[0, messages].sum() for messages in sets))

    def slowest_first(self) -> list[int]:
        """Return the links by ascending free time, converted to seconds of the first link."""
        seconds = self.weights_s.sum(axis=1)
        left_s = (self.limit_s - self.busy_s) * seconds[0] / np.where(seconds > 0, seconds, 1.0)
        return np.argsort(left_s, kind="stable").tolist()


@dataclass(frozen=True)
class Solver:
    """Solver of knapsack problems: `exact` or `greedy`.

    Attributes:
        solve: function from a window, in which each message fits on some link and takes time on
            all links where it fits, to the messages of each link.
    """

    solve: Callable[[Window], list[list[int]]]

    def __call__(
        self,
        weights_s: Sequence[Sequence[float]],
        window_s: float,
        ready_s: Sequence[float] | None = None,
        busy_s: Sequence[float] | None = None,
    ) -> Placement:
        """Return the messages to send on each link. Each message is sent on at most one link.

        Args:
            weights_s: seconds of each message on each link, `[link][message]`. The value of a
                message is its seconds on the first link.
            window_s: seconds of the window.
            ready_s: ready time of each message, in seconds from the start of the window; default 0.
            busy_s: time at which each link becomes free, in seconds from the start of the window;
                default 0.

        Raises:
            ValueError: an argument is invalid.
        """
        window, order = _window(weights_s, window_s, ready_s, busy_s)
        return tuple(tuple(order[i] for i in messages) for messages in self.place(window))

    def place(self, window: Window) -> Placement:
        """Return the messages to send on each link in a valid window.

        Messages that take 0 s on a link are placed there. Messages that fit on no link are left
        out. `solve` places all other messages.
        """
        fits = window.fits_alone()
        free = fits & (window.weights_s == 0)
        anywhere, gratis = fits.any(axis=0), free.any(axis=0)
        open_ = np.flatnonzero(anywhere & ~gratis)
        if open_.size == window.count:
            return tuple(map(tuple, self.solve(window)))
        sets = self.solve(window.pick(open_)) if open_.size else [[] for _ in range(window.links)]
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
    """Check the arguments; return the problem and the original index of each of its messages."""
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


def _solve_exactly(window: Window) -> list[list[int]]:
    return (_enumerate_subsets if window.count <= MOST_ENUMERATED else _solve_by_sums)(window)


def _solve_by_sums(window: Window) -> list[list[int]]:
    if not window.count:
        return [[] for _ in range(window.links)]
    balanced = _earliest_end(window)
    if balanced is not None:
        return balanced
    return max(_fill_links(window), _first_fit(window), key=window.value_s)


def _enumerate_subsets(window: Window) -> list[list[int]]:
    """Return the best of all subsets, by dynamic programming over links and subsets."""
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
    """Return for every subset its end if the link sends all of it."""
    ends = window.busy_s[link : link + 1]
    for ready_s, weight_s in zip(window.ready_s, window.weights_s[link], strict=True):
        ends = np.concatenate([ends, np.maximum(ends, ready_s) + weight_s])
    return ends


def _ends_with(window: Window, link: int, before: _Ends) -> _Ends:
    """Return for every subset the earliest end on this link if earlier links send a part of it.

    The end is infinite if the subset does not fit. `before` holds the ends on the previous link.
    """
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
    """Place all messages, longest first, each on the link that then ends first.

    Return None if they do not fit.
    """
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


def _fill_links(window: Window) -> list[list[int]]:
    """Fill one link after the other, the slowest first, each as full as possible."""
    left = np.arange(window.count)
    sets: list[list[int]] = [[] for _ in range(window.links)]
    for link in window.slowest_first():
        chosen = _fill_link(window.pick(left), link)
        sets[link] = left[chosen].tolist()
        left = np.delete(left, chosen)
    return sets


def _fill_link(window: Window, link: int) -> list[int]:
    """Return the messages that fill one link most, by dynamic programming over subset sums.

    The reachable sums are the bits of an int. The messages are added by decreasing ready time, so
    that the sum of all messages that are not ready earlier is known when a message's limit applies.
    Weights are rounded up, so that the result fits.
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
            if weight_s > room_s:  # does not fit at any ready times
                continue
            longer = sorted([*sets[link], i])
            if window.end_s(link, longer) <= window.limit_s:
                sets[link], room_s = longer, room_s - weight_s
                left.remove(i)
    return sets


by_sums = Solver(_solve_by_sums)
"""Method of `exact` for many messages, for any number of them."""

exact = Solver(_solve_exactly)
"""Solver that maximizes the total value of the sent messages.

Up to 14 messages that fit on some link: optimal on any number of links, by enumeration of all
subsets. On two links, the placement of the chosen messages is the one that ends first.

More messages: weights are rounded up to multiples of 2^-16 of the window. On one link the result is
at least the optimum of a window that is shorter by this amount per message. Several links are
filled in this way one after the other, the slowest first, which need not be optimal in total. The
result is never worse than `greedy`.

Source: DeFT, Problems 1 and 2.
"""

greedy = Solver(_first_fit)
"""Solver that takes links by increasing capacity and messages by decreasing value, if they fit.

Source: DeFT, Section III-C.
"""
