"""DeFT's two queues: which gradients are sent under forward and backward of which iteration.

Every iteration adds its gradients to the future queue. The current queue holds what is still to be
sent of an earlier generation; when backward has room for all of it, the generation is complete,
its update is applied at the end of the iteration, and what is left of the future queue becomes the
current one. The queues are played until they repeat.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple, Protocol

import numpy as np

from offbeat.strategies.solvers import inputs as _check
from offbeat.strategies.solvers import knapsack
from offbeat.strategies.solvers.inputs import Numbers

MOST_GENERATIONS = 8  # until the queues must have repeated; then a repetition is made

_Queue = frozenset[int]


class Send(NamedTuple):
    """A piece on its way, and the index of its link."""

    piece: int
    link: int


@dataclass(frozen=True)
class Iteration:
    """What one iteration sends, each in issue order, and whether a generation closes at its end.

    `forward` and `current` are of the generation closed before, `future` of the one that closes.
    """

    forward: tuple[Send, ...]
    current: tuple[Send, ...]
    future: tuple[Send, ...]
    closes: bool


@dataclass(frozen=True)
class Schedule:
    """Iterations that come once, then those that repeat; both end with a close."""

    prologue: tuple[Iteration, ...]
    cycle: tuple[Iteration, ...]

    @property
    def merges(self) -> tuple[int, ...]:
        """How many iterations each generation of the cycle merges.

        The rotation that is greatest; where a cycle starts is arbitrary.
        """
        closes = [-1, *(t for t, iteration in enumerate(self.cycle) if iteration.closes)]
        merges = [b - a for a, b in pairwise(closes)]
        return tuple(max(merges[i:] + merges[:i] for i in range(len(merges))))

    @property
    def longest(self) -> int:
        """Most iterations that any update merges, those of the prologue too."""
        iterations = [*self.prologue, *self.cycle]
        closes = [-1, *(t for t, iteration in enumerate(iterations) if iteration.closes)]
        return max(b - a for a, b in pairwise(closes))

    @property
    def updates_per_iteration(self) -> float:
        return len(self.merges) / len(self.cycle)


class _Policy(Protocol):
    """What an iteration does with a current queue."""

    @property
    def count(self) -> int:
        """How many pieces there are."""
        ...

    def iteration(self, queue: _Queue) -> Iteration: ...

    def only(self, last: Iteration, pieces: _Queue) -> tuple[Send, ...] | None:
        """How a closing iteration sends just these pieces early; None if it cannot."""
        ...


def simulate(
    forward_s: float,
    backward_s: float,
    ready_s: Sequence[float],
    weights_s: Sequence[Sequence[float]],
    *,
    solver: knapsack.Solver = knapsack.exact,
    names: Sequence[str] = (),
) -> Schedule:
    """Schedule in which every window sends what its knapsack chooses.

    `forward_s` and `backward_s` are the windows; `ready_s` per piece counts from the start of
    backward, `weights_s[link][piece]` is its time on a link.

    The schedule must repeat. The queues are played until they are as they were before, but for at
    most 8 windows, since with measured times they hardly ever are. Every stretch from one close
    to another is then a candidate if its last close can leave the same pieces behind as its first
    one. The stretch with most updates per iteration is repeated.

    Raises ValueError, also for a piece that fits into neither window (by `names`, if given).
    Source: DeFT, Algorithm 2.
    """
    for name, window_s in (("forward_s", forward_s), ("backward_s", backward_s)):
        _check.number(name, window_s)
    ready = _check.ready(ready_s)
    rows = [_check.numbers(f"weights_s[{k}]", row) for k, row in enumerate(weights_s)]
    for k, row in enumerate(rows):
        _check.same_length(f"weights_s[{k}]", row, "ready_s", ready)
    windows = _Windows(forward_s, backward_s, ready, np.stack(rows), solver)
    return _repeated(windows, most_updates(forward_s, backward_s, weights_s), names)


def most_updates(
    forward_s: float, backward_s: float, weights_s: Sequence[Sequence[float]]
) -> float:
    """Updates per iteration that no stretch of 8 generations can exceed."""
    worth_s, rates = _worth(np.asarray(weights_s, dtype=float))
    if not worth_s.any():
        return 1.0
    most = (forward_s + backward_s) * float(rates.sum() / worth_s.sum()) * knapsack.FILLED
    if most == 0 or most >= 1:
        return min(most, 1.0)
    return max(n / math.ceil(n / most) for n in range(1, MOST_GENERATIONS + 1))


def _worth(weights_s: Numbers) -> tuple[Numbers, Numbers]:
    """Each piece's seconds on the first link, 0 if some link carries it in no time; and how much
    of that each link carries in a second at most."""
    worth_s = np.where((weights_s > 0).all(axis=0), weights_s[0], 0.0)
    return worth_s, (worth_s / np.where(weights_s > 0, weights_s, 1.0)).max(axis=1, initial=0.0)


def fixed(forward: int, backward: int, ready_s: Sequence[float], backward_s: float) -> Schedule:
    """Schedule that sends so many pieces per forward and per backward, first in, first out.

    In backward first those of the current queue, then of the future one as they become ready, all
    but those ready only when backward ends (`backward_s`). One link. Raises ValueError.
    Source: DeFT, Section III-B (f and b), as a baseline for the knapsacks.
    """
    ready = _check.ready(ready_s).tolist()
    for name, count in (("forward", forward), ("backward", backward)):
        if count < 0:
            raise ValueError(f"{name} ({count}) must be at least 0; give a number of pieces")
    early = tuple(Send(piece, 0) for piece, at_s in enumerate(ready) if at_s < backward_s)
    return _repeated(_Counts(forward, backward, early, len(ready)), 1.0, (), len(ready) + 2)


@dataclass(frozen=True)
class _Counts:
    """So many pieces per window."""

    forward: int
    backward: int
    early: tuple[Send, ...]
    count: int

    def iteration(self, queue: _Queue) -> Iteration:
        waiting = tuple(Send(piece, 0) for piece in sorted(queue))
        left = waiting[self.forward :]
        current = left[: self.backward]
        closes = len(current) == len(left)
        future = self.early[: self.backward - len(current)] if closes else ()
        return Iteration(waiting[: self.forward], current, future, closes)

    def only(self, last: Iteration, pieces: _Queue) -> tuple[Send, ...] | None:
        # As many leftovers as there are pieces, so the queues do repeat exactly.
        return last.future if _pieces(last.future) == pieces else None


@dataclass(frozen=True)
class _Windows:
    """The knapsacks of one iteration."""

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
    def alike(self) -> list[int]:
        """Per piece the first one with the same times."""
        times = list(zip(self.ready_s.tolist(), *self.weights_s.tolist(), strict=True))
        first = {time: piece for piece, time in reversed(list(enumerate(times)))}
        return [first[time] for time in times]

    def iteration(self, queue: _Queue) -> Iteration:
        """Cases 1 to 4 of the paper."""
        forward = self._chosen(sorted(queue), self.forward_s)
        left = sorted(queue - {send.piece for send in forward})
        current = self._chosen(left, self.backward_s)
        if len(current) < len(left):
            return Iteration(forward, current, (), closes=False)
        future = self._early(self._busy_s(current), range(self.count))
        return Iteration(forward, current, future, closes=True)

    def only(self, last: Iteration, pieces: _Queue) -> tuple[Send, ...] | None:
        if pieces <= _pieces(last.future):
            return tuple(send for send in last.future if send.piece in pieces)
        busy_s, early = self._busy_s(last.current), sorted(pieces)
        worth_s, rates = self.worth
        if worth_s[early].sum() > (self.backward_s * knapsack.FILLED - busy_s) @ rates:
            return None  # at a glance
        future = self._early(busy_s, early)
        return future if len(future) == len(pieces) else None

    def _busy_s(self, current: tuple[Send, ...]) -> Numbers:
        """Per link, how long what is left of the current queue takes in backward."""
        busy_s = np.zeros(len(self.weights_s))
        for piece, link in current:
            busy_s[link] += self.weights_s[link, piece]
        return busy_s

    def _early(self, busy_s: Numbers, pieces: Sequence[int]) -> tuple[Send, ...]:
        """Pieces sent in their own backward, after what is left of the current queue."""
        return self._chosen(pieces, self.backward_s, self.ready_s[list(pieces)], busy_s)

    def _chosen(
        self,
        pieces: Sequence[int],
        window_s: float,
        ready_s: Numbers | None = None,
        busy_s: Numbers | None = None,
    ) -> tuple[Send, ...]:
        """What the solver sends of these pieces, in order of readiness."""
        if not pieces:
            return ()
        weights_s = self.weights_s[:, list(pieces)]
        ready_s = np.zeros(len(pieces)) if ready_s is None else ready_s
        busy_s = np.zeros(len(weights_s)) if busy_s is None else busy_s
        limit_s = window_s * knapsack.FILLED
        placement = self.solver.place(knapsack.Window(weights_s, limit_s, ready_s, busy_s))
        alike: dict[int, deque[int]] = {}  # slices of one bucket: always the first ones go first
        for piece in pieces:
            alike.setdefault(self.alike[piece], deque()).append(piece)
        chosen = sorted((pieces[i], link) for link, items in enumerate(placement) for i in items)
        return tuple(Send(alike[self.alike[piece]].popleft(), link) for piece, link in chosen)


def _repeated(
    policy: _Policy, enough: float, names: Sequence[str], most_generations: int = MOST_GENERATIONS
) -> Schedule:
    """Play the queues from the empty one, and repeat the best stretch of what they did."""
    played = _Played(policy, most_generations, [], [(0, frozenset())])
    played.play(enough, names)
    if played.best is None:  # a close that sends nothing early can be returned to from any other
        first = Iteration((), (), (), closes=True)
        played = _Played(policy, most_generations, [first], [(1, frozenset(range(policy.count)))])
        played.play(enough, names)
    assert played.best is not None
    return played.best


@dataclass
class _Played:
    """Iterations from the first on, and after which of them a generation closed and left what."""

    policy: _Policy
    most_generations: int
    iterations: list[Iteration]
    closes: list[tuple[int, _Queue]]
    best: Schedule | None = None

    def play(self, enough: float, names: Sequence[str]) -> None:
        """Go on until a close leaves what one has left before, or the best rate is `enough`."""
        queue = self.closes[-1][1]
        while len(self.closes) <= self.most_generations:
            iteration = self.policy.iteration(queue)
            self.iterations.append(iteration)
            if iteration.closes:
                queue = frozenset(range(self.policy.count)) - _pieces(iteration.future)
                self._repeat(iteration)
                again = any(queue == left for _, left in self.closes)
                self.closes.append((len(self.iterations), queue))
                if again or (self.best and self.best.updates_per_iteration >= enough):
                    return
            else:
                sent = _pieces(iteration.forward + iteration.current)
                if not sent:
                    raise _stuck(min(queue), names)
                queue -= sent

    def _repeat(self, last: Iteration) -> None:
        """The stretch from an earlier close to this one, if it can leave the same and is better."""
        for generations, (first, left) in enumerate(reversed(self.closes), start=1):
            rate = generations / (len(self.iterations) - first)
            if self.best and rate <= self.best.updates_per_iteration:
                continue
            future = self.policy.only(last, frozenset(range(self.policy.count)) - left)
            if future is not None:
                cycle = (*self.iterations[first:-1], replace(last, future=future))
                self.best = Schedule(tuple(self.iterations[:first]), cycle)


def _pieces(sends: Iterable[Send]) -> _Queue:
    return frozenset(send.piece for send in sends)


def _stuck(piece: int, names: Sequence[str]) -> ValueError:
    return ValueError(
        f"piece {names[piece] if names else piece} fits into neither window, so no update would "
        "ever be complete; cut it into smaller slices"
    )
