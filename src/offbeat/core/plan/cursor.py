"""Cursor: the position of a rank in its program, and the progress of its recent iterations.

The runtime and the interpreter of plans execute programs by the same cursor. The runtime gives it
actions on tensors and links, the interpreter actions on NumPy arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from offbeat.core.plan.program import Program, Step
from offbeat.core.plan.types import Apply, Transfer, Vote


@dataclass(slots=True, kw_only=True)
class Progress:
    """Progress of one iteration of one rank.

    Attributes:
        planned: number of the iteration in the plan.
        steps: steps of the program.
        outstanding: indices of the messages that are still to be awaited.
        undecided: votes whose outcome is unknown.
        over: whether the iteration has ended.
    """

    planned: int = 0
    steps: tuple[Step, ...] = ()
    outstanding: set[int] = field(default_factory=set)
    undecided: set[str] = field(default_factory=set)
    over: bool = False

    @property
    def complete(self) -> bool:
        """Whether the iteration has ended and all its messages and votes have arrived."""
        return self.over and not self.outstanding and not self.undecided


StepObserver = Callable[[str, int, int, Transfer | Apply | Vote], None]
"""Function that receives each step of a rank once it is done: "release", "skip" (a message that a
vote excludes), "receive", "apply", "vote", "decide yes" or "decide no"; the number in the plan of
the current or next iteration; that of the iteration of the rule; and the rule."""

P = TypeVar("P", bound=Progress)
Q = TypeVar("Q", bound=Progress, contravariant=True)


class Actions(Protocol[Q]):
    """Actions of a rank on its storage and its messages.

    `receive` and `decide` wait. If they raise, the cursor stays at its step, and the same call of
    the cursor can be repeated.
    """

    def steps(self, planned: int, /) -> tuple[Step, ...]:
        """Return the steps of an iteration, up to its backward as in `Progress.steps`."""
        ...

    def receive(self, iteration: Q, index: int) -> None:
        """Wait for a message and store its result."""

    def decide(self, iteration: Q, vote: Vote) -> bool:
        """Wait for the outcome of a vote. Return it."""
        ...

    def apply(self, iteration: Q, apply: Apply) -> bool:
        """Apply a rule. Return False if the outcome of its vote excludes it."""
        ...

    def cast_votes(self, iteration: Q, votes: Sequence[Vote]) -> None:
        """Send this rank's ballots."""

    def release(self, iteration: Q, index: int) -> bool:
        """Send a message. Return False if the outcome of its vote excludes it."""
        ...

    def is_released(self, iteration: Q, index: int) -> bool:
        """Return whether a message was sent."""
        ...

    def pass_unsent_messages(self, iteration: Q) -> None:
        """Remove the unsent messages of a dropped iteration from their links."""

    def mark(self) -> Any:
        """Return a mark of the current time."""

    def record_times(self, iteration: Q, position: int, begin: Any, waited: Any) -> None:
        """Record that the step at a position, which began and waited until then, has ended now."""


class Cursor(Generic[P]):
    """Executor of the steps of a program in their order.

    At each moment the cursor waits for messages, decides votes, applies rules, casts votes and
    releases messages, in this order. The forward completes waits and rules of earlier iterations.
    `flush` does so before the forward, when the parameters are read between two iterations.

    Attributes:
        program: program of this rank.
        planned: number in the plan of the current iteration, or of the next one between iterations.
        now: current iteration; None between iterations.
        iterations: recent iterations by their number in the plan, including the current one.
    """

    def __init__(
        self,
        program: Program,
        actions: Actions[P],
        planned: int = 0,
        observers: Sequence[StepObserver] = (),
    ) -> None:
        self.program, self._actions, self._observers = program, actions, observers
        self.planned = planned
        self.now: P | None = None
        self.iterations: dict[int, P] = {}
        self._next = 0  # index of the next step of the current iteration
        # Steps of the current or next iteration before this index have executed what concerns
        # earlier iterations.
        self._flushed = 0
        self._flushing = False

    # ---- one iteration ----------------------------------------------------------------------

    def begin(self, create: Callable[[int], P]) -> P:
        """Begin an iteration.

        Args:
            create: returns the iteration with a number in the plan, with its messages enqueued.
        """
        planned, program = self.planned, self.program
        now = create(planned)
        now.outstanding.update(program.awaited_transfers(planned))
        self.iterations[planned] = now
        self.iterations.pop(planned - program.lag - 1, None)
        self.now, self._next = now, 0
        return now

    def walk(self, position: int) -> None:
        """Execute all remaining steps up to a position."""
        now = self.now
        assert now is not None
        steps = now.steps
        while self._next < len(steps) and (step := steps[self._next]).position <= position:
            if step.wait or step.apply or step.decide or step.ask:
                self._execute(step, now)
            else:
                self._next += 1
                self._release(step, now)

    def _release(self, step: Step, now: P) -> None:
        for index in step.release:
            is_sent = self._actions.release(now, index)
            if not is_sent:
                now.outstanding.discard(index)
            if self._observers:
                self._report("release" if is_sent else "skip", now, index)

    def _execute(self, step: Step, now: P) -> None:
        """Execute the next step of the iteration."""
        actions, earlier = self._actions, self._next >= self._flushed
        begin = waited = actions.mark()
        if step.wait or step.decide:
            self._wait(step, now.planned, own=True, earlier=earlier)
            waited = actions.mark()
        self._next += 1  # before the rules, because a rule may run code that walks again
        self._apply(step, now.planned, own=True, earlier=earlier)
        if step.ask:
            now.undecided.update(vote.name for vote in step.ask)
            actions.cast_votes(now, step.ask)
            for vote in step.ask if self._observers else ():
                self._report("vote", now, vote)
        self._release(step, now)
        actions.record_times(now, step.position, begin, waited)

    def wait(self, position: int) -> Step:
        """Execute the steps before a position after the forward, and only the waits of the step
        there. Return it."""
        self.walk(position - 1)
        now = self.now
        assert now is not None
        if self._next == len(now.steps) or now.steps[self._next].position != position:
            return Step(position)
        step = now.steps[self._next]
        self._wait(step, now.planned, own=True, earlier=True)
        return step

    def end(self) -> P:
        """End the iteration after its last step and return it."""
        now = self.now
        assert now is not None
        now.over, self.now = True, None
        self.planned += 1
        self._flushed = 0
        return now

    def drop(self) -> None:
        """Drop the current iteration. The next one has the same number in the plan.

        Waits and rules of earlier iterations that the forward has completed are not repeated.
        """
        now = self.now
        assert now is not None
        self.flush()
        self._actions.pass_unsent_messages(now)
        del self.iterations[now.planned]  # a checkpoint would contain its messages
        self.now = None

    def _wait(self, step: Step, planned: int, *, own: bool, earlier: bool) -> None:
        """Wait for the messages and votes of a step: of the iteration itself (`own`) and of
        earlier iterations (`earlier`)."""
        for lag, index in step.wait:
            if earlier if lag else own:
                self.receive(self.iterations[planned - lag], index)
        for lag, vote in step.decide:
            if earlier if lag else own:
                self.decide(self.iterations[planned - lag], vote)

    def _apply(self, step: Step, planned: int, *, own: bool, earlier: bool) -> None:
        for lag, apply in step.apply:
            if earlier if lag else own:
                iteration = self.iterations[planned - lag]
                if self._actions.apply(iteration, apply) and self._observers:
                    self._report("apply", iteration, apply)

    # ---- messages and votes of recent iterations --------------------------------------------

    def receive(self, iteration: P, index: int) -> None:
        """Wait for a message of an iteration and store its result, if that has not been done."""
        if index in iteration.outstanding:
            self._actions.receive(iteration, index)
            iteration.outstanding.discard(index)
            if self._observers:
                self._report("receive", iteration, index)

    def decide(self, iteration: P, vote: Vote) -> None:
        """Wait for the outcome of a vote of an iteration, if that has not been done."""
        if vote.name in iteration.undecided:
            outcome = self._actions.decide(iteration, vote)
            iteration.undecided.discard(vote.name)
            if self._observers:
                self._report("decide yes" if outcome else "decide no", iteration, vote)

    def _report(self, what: str, iteration: P, rule: int | Apply | Vote) -> None:
        """Report a step to the observers; a number is that of a transfer of the iteration."""
        number = iteration.planned
        done = self.program.transfers(number)[rule] if isinstance(rule, int) else rule
        for observe in self._observers:
            observe(what, self.planned, number, done)

    def receive_released(self, iteration: P) -> None:
        """Wait for all messages of an iteration that were sent."""
        for index in sorted(iteration.outstanding):
            if self._actions.is_released(iteration, index):
                self.receive(iteration, index)

    # ---- between iterations -----------------------------------------------------------------

    def flush(self) -> None:
        """Execute what the forward of the current or next iteration does for earlier iterations.

        A rule may run code that calls `flush` again; that call does nothing.
        """
        if self._flushing:
            return
        planned, buckets = self.planned, self.program.plan.buckets
        steps = self._actions.steps(planned) if self.now is None else self.now.steps
        if self.now is not None:
            self._flushed = max(self._flushed, self._next)
        self._flushing = True
        try:
            while self._flushed < len(steps) and steps[self._flushed].position < buckets:
                step = steps[self._flushed]
                self._wait(step, planned, own=False, earlier=True)
                self._flushed += 1
                try:
                    self._apply(step, planned, own=False, earlier=True)
                except BaseException:  # the next flush must not pass over the rule
                    self._flushed -= 1
                    raise
        finally:
            self._flushing = False

    def receive_all(self) -> None:
        """Wait for all messages of iterations that have ended."""
        for iteration in list(self.iterations.values()):
            if iteration.over:
                self.receive_released(iteration)

    def restart(self) -> None:
        """Begin the plan again with its first iteration."""
        self.planned = self._flushed = 0
        self.iterations.clear()

    def recent(self) -> list[P]:
        """Return the iterations that later steps may refer to, with all their votes decided."""
        self.flush()
        first = self.planned - self.program.lag
        recent = [one for one in self.iterations.values() if one.planned >= first]
        for iteration in recent:
            for vote in self.program.plan.votes:
                self.decide(iteration, vote)
        return recent

    def resume(self, planned: int, recent: Sequence[P]) -> None:
        """Continue at an iteration of the plan after `flush`, with the result of `recent`."""
        self.planned = planned
        self.iterations = {iteration.planned: iteration for iteration in recent}
        steps, buckets = self._actions.steps(planned), self.program.plan.buckets
        self._flushed = sum(step.position < buckets for step in steps) if planned else 0
