"""Observers: what is told of each iteration of a rank. They may sleep, and never change steps."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from offbeat.core.plan.types import Point
    from offbeat.core.runtime.iteration import Iteration


class Observer:
    """Receiver of the events of iterations. Subclasses override what they need.

    An observer may sleep: compute, rules and messages that follow begin later. What a rank executes
    does not depend on its observers.

    Attributes:
        every_bucket: whether the gradients of all buckets are reported, also of buckets whose
            gradients trigger no step of the plan. It costs a hook per bucket.
    """

    every_bucket: bool = False

    def iteration_begins(self, iteration: Iteration) -> None:
        """Handle the start of a training forward: the first one of an iteration, or a further
        one."""

    def reached(self, iteration: Iteration, point: Point, bucket: int = -1) -> None:
        """Handle the arrival of compute at a point of the plan; its steps follow.

        Args:
            iteration: current iteration.
            point: "forward": the forward of all buckets above `bucket` has ended, with -1 that of
                all buckets. "grad": the gradients of buckets 0..`bucket` are complete; some may be
                left out, see `every_bucket`. "step": backward and the messages that the update
                needs have ended. "end": the updates of the step have ended.
            bucket: a bucket, or -1.
        """

    def updated(self, iteration: Iteration, buckets: Sequence[int] | None) -> None:
        """Handle the end of a call of the user's optimizer for some buckets, None: for the whole
        model. Their messages follow."""

    def waited(self) -> None:
        """Handle the end of a wait for a message or for other ranks."""

    def ended(self, iteration: Iteration) -> None:
        """Handle an iteration that has ended and whose messages have arrived. Iterations come in
        order, between iterations, perhaps some iterations later."""

    def stepped(self, number: int) -> None:
        """Handle the end of `optimizer.step()` or `skip_step()`, where other code of the runtime
        may run; `number` iterations have ended, including those before a resume.

        Not called after a backward that `zero_grad()` drops: weights may be perturbed then.
        """


class Observers(Observer):
    """The observers of a rank, which are called in the order in which they were added."""

    def __init__(self) -> None:
        self._all: tuple[Observer, ...] = ()
        self._recent: deque[Iteration] = deque()  # that have ended

    def add(self, observer: Observer) -> None:
        """Call an observer from now on."""
        self._all = (*self._all, observer)

    def remove(self, observer: Observer | None) -> None:
        """Call an observer no longer, if it is called."""
        self._all = tuple(one for one in self._all if one is not observer)

    @property
    def every_bucket(self) -> bool:  # type: ignore[override]
        """Whether an observer needs all buckets."""
        return any(one.every_bucket for one in self._all)

    def iteration_begins(self, iteration: Iteration) -> None:
        begin_s = time.perf_counter()
        for one in self._all:
            one.iteration_begins(iteration)
        iteration.marks.held_s += time.perf_counter() - begin_s

    def reached(self, iteration: Iteration, point: Point, bucket: int = -1) -> None:
        for one in self._all:
            one.reached(iteration, point, bucket)

    def updated(self, iteration: Iteration, buckets: Sequence[int] | None) -> None:
        for one in self._all:
            one.updated(iteration, buckets)

    def waited(self) -> None:
        for one in self._all:
            one.waited()

    def ended(self, iteration: Iteration) -> None:
        for one in self._all:
            one.ended(iteration)

    def stepped(self, number: int) -> None:
        for one in self._all:
            one.stepped(number)

    def add_ended(self, done: Iteration) -> None:
        """Add an iteration that has ended; some of its messages may be outstanding."""
        self._recent.append(done)

    def deliver(self, *, rest: bool = False) -> None:
        """Call `ended` for all complete iterations, or with `rest` for all iterations."""
        while self._recent and (rest or self._recent[0].complete):
            self.ended(self._recent.popleft())
