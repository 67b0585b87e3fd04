"""Order of events of workers that do not wait for each other, in simulated time."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from typing import ClassVar, NamedTuple

from offbeat.core.profile import Profile
from offbeat.core.sim.separate_workers import forward_share
from offbeat.core.sim.simulation import LEAST_ITERATIONS, MAX_RANKS
from offbeat.core.sim.trace import COMPUTE, Span, Trace
from offbeat.rehearsal.turns import Turns

END, BEGIN, PUSH = range(3)  # kinds of events of a worker
WORKER_KINDS = (END, BEGIN, PUSH)
NAMES = {END: "the end of its gradient", BEGIN: "the begin of its gradient", PUSH: "its push"}


class Event(NamedTuple):
    """Event at a time. Events of equal time are in the order of their kinds.

    Attributes:
        at_s: time in seconds from the start.
        kind: one of `WORKER_KINDS`, or another kind of the strategy.
        number: worker, or number of the object of another kind.
        gradient: number of the gradient of the worker, or 0.
    """

    at_s: float
    kind: int
    number: int
    gradient: int = 0


class EventOrder(ABC):
    """Events of all workers in the order of simulated time.

    A worker waits for the begin of its gradient before a forward, and for its end before the
    update. Events of other kinds run as soon as all earlier events are over. A worker may miss an
    event, because it waits for other workers in a call of its script.

    Attributes:
        now_s: time of the last event that is over.
        begins_s: begin of each gradient of a worker, by worker.
        ends_s: end of each gradient of a worker, by worker.
        drops_gradients: whether a worker that misses the begin of a gradient computes the next one
            that begins later. Otherwise missed events are due at once when the worker returns.

    Args:
        workers: number of workers.
        turns: turns of the workers.
    """

    drops_gradients: ClassVar[bool]
    end_kind: ClassVar[int] = END  # kind of the event that ends an iteration

    def __init__(self, workers: int, turns: Turns) -> None:
        self.now_s = 0.0
        self.begins_s: list[list[float]] = [[] for _ in range(workers)]
        self.ends_s: list[list[float]] = [[] for _ in range(workers)]
        self.turns = turns
        self._awaited: dict[int, int] = {}  # kind of the event that a worker waits for
        self._late: list[deque[int]] = [deque() for _ in range(workers)]  # kinds of missed events
        self._dropped: set[tuple[int, int]] = set()  # worker and gradient
        self._gone: set[int] = set()  # workers that have ended
        turns.on_deadlock = self._pass_missed_event

    # ---- called by workers ------------------------------------------------------------------

    def wait(self, worker: int, kind: int) -> None:
        """Wait until the next event of a worker is due. The worker must act on it at once."""
        self._awaited[worker] = kind
        self.turns.wait_until(lambda: self._is_due(worker, kind), lambda: NAMES[kind])
        del self._awaited[worker]
        if self._is_late(worker, kind):
            self._late[worker].popleft()
        else:
            self.now_s = self.take().at_s
        if kind == BEGIN:
            self.begins_s[worker].append(self.now_s)
        if kind == self.end_kind:
            self.ends_s[worker].append(self.now_s)

    def leave(self, worker: int) -> None:
        """Pass all later events of a worker that has ended."""
        self._gone.add(worker)

    # ---- events -----------------------------------------------------------------------------

    @abstractmethod
    def head(self) -> Event | None:
        """Return the next event."""

    @abstractmethod
    def take(self) -> Event:
        """Remove the next event and return it."""

    @abstractmethod
    def run(self, event: Event) -> None:
        """Run an event of another kind than those of workers."""

    def has_messages(self) -> bool:
        """Return whether a later event of another kind may let a worker continue."""
        return False

    def advance(self) -> None:
        """Run the events of other kinds, up to the next event of a worker.

        The worker of the last event must have acted on it.
        """
        while (event := self.head()) is not None:
            if event.kind in WORKER_KINDS:
                key = event.number, event.gradient
                if event.number not in self._gone and key not in self._dropped:
                    return
                self.take()
                if event.kind == self.end_kind:
                    self._dropped.discard(key)
                continue
            self.take()
            self.now_s = event.at_s
            self.run(event)

    def _is_due(self, worker: int, kind: int) -> bool:
        self.advance()
        if self._late[worker]:
            return self._is_late(worker, kind)
        event = self.head()
        return event is not None and (event.kind, event.number) == (kind, worker)

    def _is_late(self, worker: int, kind: int) -> bool:
        return bool(self._late[worker]) and self._late[worker][0] == kind

    def _pass_missed_event(self) -> bool:
        """Pass the next event if its worker waits for something else. Return whether it did."""
        if not (self._awaited or self.has_messages()):  # no event lets a worker continue
            return False
        event = self.head()
        if event is None or event.kind not in WORKER_KINDS:
            return False
        if self._awaited.get(event.number) == event.kind and not self._late[event.number]:
            return False
        self.now_s = self.take().at_s
        if event.kind == BEGIN and self.drops_gradients:
            self._dropped.add((event.number, event.gradient))
        else:
            self._late[event.number].append(event.kind)
        return True

    # ---- time -------------------------------------------------------------------------------

    def trace(self, strategy: str, profile: Profile, iterations: int = 1) -> Trace:
        """Return the timeline of all gradients, with the spans of the last ones.

        Args:
            strategy: name of the trace.
            profile: profile of the job.
            iterations: iterations of equal length from a begin to an end.
        """
        ends_s, spans = [], list[Span]()
        for worker, ends in enumerate(self.ends_s):
            pairs = _split([*zip(self.begins_s[worker], ends, strict=False)], iterations)
            ends_s.append(tuple(end_s for _, end_s in pairs))
            if worker < MAX_RANKS:
                spans += _spans(worker, pairs, forward_share(profile))
        return Trace(
            source="simulated",
            strategy=strategy,
            ends_s=tuple(ends_s),
            starts_s=(0.0,) * len(ends_s),
            spans=tuple(spans),
            notes={"ranks": profile.world_size},
            uneven=True,
        )


Pairs = list[tuple[float, float]]


def _split(pairs: Pairs, parts: int) -> Pairs:
    """Cut each interval into equal parts."""
    return [
        (begin_s + (end_s - begin_s) * k / parts, begin_s + (end_s - begin_s) * (k + 1) / parts)
        for begin_s, end_s in pairs
        for k in range(parts)
    ]


def _spans(worker: int, pairs: Pairs, share: float) -> list[Span]:
    """Return the compute spans of the last gradients of a worker, with the waits between them."""
    spans = []
    for i in range(max(len(pairs) - LEAST_ITERATIONS, 0), len(pairs)):
        begin_s, end_s = pairs[i]
        before_s = pairs[i - 1][1] if i else 0.0
        if begin_s > before_s:
            spans.append(Span(worker, COMPUTE, "wait", i, before_s, begin_s))
        turn_s = begin_s + share * (end_s - begin_s)
        spans.append(Span(worker, COMPUTE, "forward", i, begin_s, turn_s))
        spans.append(Span(worker, COMPUTE, "backward", i, turn_s, end_s))
    return spans
