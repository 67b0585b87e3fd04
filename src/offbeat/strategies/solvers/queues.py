"""DeFT's two queues: choice of the gradients to send during each forward and backward.

Every iteration adds its gradients to the future queue. The current queue holds the pieces of an
earlier generation that are not sent yet. A generation is the gradients of one iteration or of
several merged ones. If backward has time for all its pieces, the generation closes: its update is
applied at the end of the iteration, and the remaining future queue becomes the current queue. The
queues are simulated until they repeat.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from offbeat.strategies.solvers import inputs as _check
from offbeat.strategies.solvers import knapsack
from offbeat.strategies.solvers.inputs import Numbers

MOST_GENERATIONS = 8  # largest number simulated; without a repetition the best stretch is repeated

_Queue = frozenset[int]


class Send(NamedTuple):
    """Index of a piece that is sent, and index of its link."""

    piece: int
    link: int


@dataclass(frozen=True)
class Iteration:
    """Messages of one iteration, each tuple in issue order.

    Attributes:
        forward: pieces of the current queue that are sent during forward.
        current: pieces of the current queue that are sent during backward.
        future: pieces of the closing generation that are sent during their own backward.
        closes: whether a generation closes at the end of the iteration.
    """

    forward: tuple[Send, ...]
    current: tuple[Send, ...]
    future: tuple[Send, ...]
    closes: bool


@dataclass(frozen=True)
class Schedule:
    """Iterations of the prologue, and iterations of the cycle that is repeated after it.

    In both, a generation closes in the last iteration.
    """

    prologue: tuple[Iteration, ...]
    cycle: tuple[Iteration, ...]

    @property
    def merges(self) -> tuple[int, ...]:
        """Return the number of iterations that each generation of the cycle merges.

        The start of a cycle is arbitrary, so return the lexicographically greatest rotation.
        """
        merges = _merges(self.cycle)
        return tuple(max(merges[i:] + merges[:i] for i in range(len(merges))))

    @property
    def longest(self) -> int:
        """Return the largest number of iterations that an update of prologue or cycle merges."""
        return max(_merges(self.prologue + self.cycle))

    @property
    def updates_per_iteration(self) -> float:
        return len(self.merges) / len(self.cycle)


def _merges(iterations: Sequence[Iteration]) -> list[int]:
    """Return the number of iterations up to and including each close."""
    closes = [-1, *(t for t, iteration in enumerate(iterations) if iteration.closes)]
    return [b - a for a, b in pairwise(closes)]


def simulate(
    forward_s: float,
    backward_s: float,
    ready_s: Sequence[float],
    weights_s: Sequence[Sequence[float]],
    *,
    solver: knapsack.Solver = knapsack.exact,
    names: Sequence[str] = (),
) -> Schedule:
    """Return the schedule in which a knapsack chooses the pieces of every window.

    The schedule must repeat. The queues are simulated until they reach an earlier state, but for at
    most 8 generations, because with measured times they rarely repeat. Every stretch from one close
    to another is a candidate if its last close can leave the same pieces unsent as its first one.
    The stretch with most updates per iteration becomes the cycle.

    Args:
        forward_s: seconds of the forward window.
        backward_s: seconds of the backward window.
        ready_s: seconds from the start of backward to each piece's gradient, non-decreasing.
        weights_s: seconds of each piece on each link, `[link][piece]`.
        solver: solver of the knapsacks.
        names: names of the pieces for error messages.

    Raises:
        ValueError: an argument is invalid, or a piece fits into neither window.

    Source: DeFT, Algorithm 2.
    """
    for name, window_s in (("forward_s", forward_s), ("backward_s", backward_s)):
        _check.number(name, window_s)
    ready = _check.ready(ready_s)
    rows = [_check.numbers(f"weights_s[{k}]", row) for k, row in enumerate(weights_s)]
    for k, row in enumerate(rows):
        _check.same_length(f"weights_s[{k}]", row, "ready_s", ready)
    windows = _Windows(forward_s, backward_s, ready, np.stack(rows), solver)
    enough = most_updates(forward_s, backward_s, weights_s)
    search = _Search(windows, [], [(0, frozenset())])
    search.run(enough, names)
    if search.best is None:
        # From any queue, the queues can return to the state after a close that sends nothing early.
        first = Iteration((), (), (), closes=True)
        search = _Search(windows, [first], [(1, frozenset(range(windows.count)))])
        search.run(enough, names)
    assert search.best is not None
    return search.best


def most_updates(
    forward_s: float, backward_s: float, weights_s: Sequence[Sequence[float]]
) -> float:
    """Return an upper bound on the updates per iteration of a stretch of at most 8 generations."""
    worth_s, rates = _worth(np.asarray(weights_s, dtype=float))
    if not worth_s.any():
        return 1.0
    most = (forward_s + backward_s) * float(rates.sum() / worth_s.sum()) * knapsack.FILLED
    if most == 0 or most >= 1:
        return min(most, 1.0)
    return max(n / math.ceil(n / most) for n in range(1, MOST_GENERATIONS + 1))


def _worth(weights_s: Numbers) -> tuple[Numbers, Numbers]:
    """Return the value of each piece, and the largest value that each link sends per second.

    The value of a piece is its seconds on the first link, or 0 if it takes 0 s on some link.
    """
    worth_s = np.where((weights_s > 0).all(axis=0), weights_s[0], 0.0)
    return worth_s, (worth_s / np.where(weights_s > 0, weights_s, 1.0)).max(axis=1, initial=0.0)


@dataclass(frozen=True)
class _Windows:
    """Windows of an iteration, for each of which a knapsack chooses the pieces."""

    forward_s: float
    backward_s: float
    ready_s: Numbers
    weights_s: Numbers  # [link, piece]
    solver: knapsack.Solver

    @property
    def count(self) -> int:
        return len(self.ready_s)

    @cached_property
    def worth(self) -> tuple[Numbers, Numbers]:
        return _worth(self.weights_s)

    @cached_property
    def twins(self) -> list[int]:
        """Return for each piece the first piece with equal times."""
        times = list(zip(self.ready_s.tolist(), *self.weights_s.tolist(), strict=True))
        first = {time: piece for piece, time in reversed(list(enumerate(times)))}
        return [first[time] for time in times]

    def iteration(self, queue: _Queue) -> Iteration:
        """Return the messages of an iteration: cases 1 to 4 of the paper."""
        forward = self._choose(sorted(queue), self.forward_s)
        left = sorted(queue - {send.piece for send in forward})
        current = self._choose(left, self.backward_s)
        if len(current) < len(left):
            return Iteration(forward, current, (), closes=False)
        future = self._future_sends(self._current_s(current), range(self.count))
        return Iteration(forward, current, future, closes=True)

    def early_sends(self, last: Iteration, pieces: _Queue) -> tuple[Send, ...] | None:
        """Return `future` of the closing iteration `last` with just these pieces, or None if they
        cannot be sent in their own backward."""
        if pieces <= _pieces(last.future):
            return tuple(send for send in last.future if send.piece in pieces)
        busy_s, early = self._current_s(last.current), sorted(pieces)
        worth_s, rates = self.worth
        if worth_s[early].sum() > (self.backward_s * knapsack.FILLED - busy_s) @ rates:
            return None  # the links' total capacity does not suffice
        future = self._future_sends(busy_s, early)
        return future if len(future) == len(pieces) else None

    def _current_s(self, current: tuple[Send, ...]) -> Numbers:
        """Return for each link the seconds of the current queue's pieces sent in backward."""
        busy_s = np.zeros(len(self.weights_s))
        for piece, link in current:
            busy_s[link] += self.weights_s[link, piece]
        return busy_s

    def _future_sends(self, busy_s: Numbers, pieces: Sequence[int]) -> tuple[Send, ...]:
        """Return the pieces sent in their own backward, after those of the current queue."""
        return self._choose(pieces, self.backward_s, self.ready_s[list(pieces)], busy_s)

    def _choose(
        self,
        pieces: Sequence[int],
        window_s: float,
        ready_s: Numbers | None = None,
        busy_s: Numbers | None = None,
    ) -> tuple[Send, ...]:
        """Return the pieces that the solver chooses, in order of ready times."""
        if not pieces:
            return ()
        weights_s = self.weights_s[:, list(pieces)]
        ready_s = np.zeros(len(pieces)) if ready_s is None else ready_s
        busy_s = np.zeros(len(weights_s)) if busy_s is None else busy_s
        limit_s = window_s * knapsack.FILLED
        placement = self.solver.place(knapsack.Window(weights_s, limit_s, ready_s, busy_s))
        twins: dict[int, deque[int]] = {}  # of equal slices, send the first ones
        for piece in pieces:
            twins.setdefault(self.twins[piece], deque()).append(piece)
        chosen = sorted((pieces[i], link) for link, items in enumerate(placement) for i in items)
        return tuple(Send(twins[self.twins[piece]].popleft(), link) for piece, link in chosen)


@dataclass
class _Search:
    """Simulation of the queues that searches the best stretch to repeat.

    Attributes:
        windows: windows of an iteration.
        iterations: simulated iterations.
        closes: for each close, the number of iterations so far and the pieces left unsent.
        best: schedule with most updates per iteration so far.
    """

    windows: _Windows
    iterations: list[Iteration]
    closes: list[tuple[int, _Queue]]
    best: Schedule | None = None

    def run(self, enough: float, names: Sequence[str]) -> None:
        """Simulate until a close leaves a queue that an earlier close left.

        Stop earlier if the best schedule has at least `enough` updates per iteration.
        """
        queue = self.closes[-1][1]
        while len(self.closes) <= MOST_GENERATIONS:
            iteration = self.windows.iteration(queue)
            self.iterations.append(iteration)
            if iteration.closes:
                queue = frozenset(range(self.windows.count)) - _pieces(iteration.future)
                self._repeat(iteration)
                again = any(queue == left for _, left in self.closes)
                self.closes.append((len(self.iterations), queue))
                if again or (self.best and self.best.updates_per_iteration >= enough):
                    return
            else:
                sent = _pieces(iteration.forward + iteration.current)
                if not sent:
                    raise _stuck_error(min(queue), names)
                queue -= sent

    def _repeat(self, last: Iteration) -> None:
        """Update `best` with a stretch from an earlier close to this one.

        The stretch qualifies if this close can leave the same pieces unsent and if it has more
        updates per iteration.
        """
        for generations, (first, left) in enumerate(reversed(self.closes), start=1):
            rate = generations / (len(self.iterations) - first)
            if self.best and rate <= self.best.updates_per_iteration:
                continue
            future = self.windows.early_sends(last, frozenset(range(self.windows.count)) - left)
            if future is not None:
                cycle = (*self.iterations[first:-1], replace(last, future=future))
                self.best = Schedule(tuple(self.iterations[:first]), cycle)


def _pieces(sends: Iterable[Send]) -> _Queue:
    return frozenset(send.piece for send in sends)


def _stuck_error(piece: int, names: Sequence[str]) -> ValueError:
    return ValueError(
        f"piece {names[piece] if names else piece} fits into neither window, so no update would "
        "ever be complete; cut it into smaller slices"
    )
