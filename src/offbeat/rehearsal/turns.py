"""Turns of replicas: one thread per replica, of which exactly one runs at a time.

A replica passes its turn on when it waits for other replicas. All state of the process that a
replica could see as its own (random streams, environment, output) is exchanged with the turn.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Protocol

LOOK_EVERY_S = 0.2  # interval at which the calling thread can receive an interrupt


class ReplicaState(Protocol):
    """State of the process that belongs to one replica."""

    def enter(self) -> None:
        """Install the state at the start of a turn."""

    def leave(self) -> None:
        """Store the state at the end of a turn."""


class DeadlockError(RuntimeError):
    """Error of replicas that all wait for each other or for replicas that have ended."""


class _StoppedError(BaseException):
    """Ends a replica after the failure of another one. Not an Exception: scripts must not catch
    it."""


class _Seat:
    """One replica: its thread's baton, and the condition and description of its wait."""

    def __init__(self, state: ReplicaState) -> None:
        self.state = state
        self.baton = threading.Semaphore(0)
        self.is_ready: Callable[[], bool] | None = None
        self.waits_for: Callable[[], str] = str
        self.ended = False

    @property
    def can_run(self) -> bool:
        return not self.ended and (self.is_ready is None or self.is_ready())


class Turns:
    """Scheduler of the threads of all replicas.

    The next replica is the next one in the order of ranks that can continue. So equal inputs give
    an equal order of turns.

    Args:
        states: state of each replica.
    """

    def __init__(self, states: Sequence[ReplicaState]) -> None:
        self._seats = [_Seat(state) for state in states]
        self._current = 0
        self._over = threading.Event()
        self.failure: BaseException | None = None

    @property
    def current(self) -> int:
        """Return the replica that runs."""
        return self._current

    def run(self, life: Callable[[int], None]) -> None:
        """Run `life(replica)` of all replicas, each in a thread.

        Raises:
            BaseException: the first error of a replica. The other replicas have ended, too.
        """
        threads = [
            threading.Thread(target=self._live, args=(life, k), name=f"offbeat-replica-{k}")
            for k in range(len(self._seats))
        ]
        for thread in threads:
            thread.daemon = True
            thread.start()
        self._seats[0].baton.release()
        try:
            while not self._over.wait(LOOK_EVERY_S):
                pass
        except BaseException as error:  # an interrupt of the calling thread
            self.failure = self.failure or error
            self._over.wait()
        for thread in threads:
            thread.join()
        if self.failure is not None:
            raise self.failure

    def wait_until(self, is_ready: Callable[[], bool], waits_for: Callable[[], str]) -> None:
        """Let other replicas run until `is_ready()`. Called by the replica that runs.

        Args:
            is_ready: condition that other replicas fulfil.
            waits_for: description of the wait, for errors.

        Raises:
            DeadlockError: no replica can continue.
        """
        self._require_alive()
        if is_ready():
            return
        seat = self._seats[self._current]
        seat.is_ready, seat.waits_for = is_ready, waits_for
        self._pass_on(seat)
        seat.is_ready = None
        self._require_alive()

    def _require_alive(self) -> None:
        if self.failure is not None:
            raise _StoppedError

    def _live(self, life: Callable[[int], None], k: int) -> None:
        seat = self._seats[k]
        seat.baton.acquire()
        try:
            if self.failure is None:
                seat.state.enter()
                try:
                    life(k)
                finally:
                    seat.state.leave()
        except _StoppedError:
            pass
        except BaseException as error:
            self.failure = self.failure or error
        seat.ended = True
        with suppress(_StoppedError):
            self._pass_on(seat)

    def _pass_on(self, seat: _Seat) -> None:
        """Give the turn to the next replica, and wait for the next turn unless `seat` has ended."""
        after = self._next()
        if after is None and not all(s.ended for s in self._seats):
            self.failure = self.failure or DeadlockError(self._describe_deadlock())
            after = self._next()
        if after is None:
            self._over.set()
            return
        if self._seats[after] is seat:
            return
        if not seat.ended:
            seat.state.leave()
        self._current = after
        self._seats[after].baton.release()
        if seat.ended:
            return
        seat.baton.acquire()
        seat.state.enter()

    def _next(self) -> int | None:
        """Return the next replica that can run; after a failure, any that has not ended."""
        count = len(self._seats)
        for step in range(1, count + 1):
            k = (self._current + step) % count
            seat = self._seats[k]
            if not seat.ended and (self.failure is not None or seat.can_run):
                return k
        return None

    def _describe_deadlock(self) -> str:
        """Return what every replica waits for."""
        states: dict[str, list[str]] = {}
        for k, seat in enumerate(self._seats):
            state = "has ended" if seat.ended else f"waits for {seat.waits_for()}"
            states.setdefault(state, []).append(str(k))
        told = "; ".join(f"rank {', '.join(ranks)} {state}" for state, ranks in states.items())
        return (
            f"no rank can continue: {told}. Run the same number of iterations on every rank, and "
            "call consolidate on all ranks or on none"
        )
