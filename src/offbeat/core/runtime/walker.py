"""Walker: executes the steps of a program in their order, as compute reaches their moments."""

from __future__ import annotations

from collections.abc import Sequence

from offbeat.core.plan import Apply, Vote
from offbeat.core.plan.program import Step
from offbeat.core.rules import RULES, VOTES
from offbeat.core.runtime.active_plan import ActivePlan
from offbeat.core.runtime.iteration import Iteration, MomentTimes
from offbeat.core.transport.device import Device


class Walker:
    """Executor of the steps of an iteration.

    At each moment the walker waits for messages, decides votes, applies rules, casts votes and
    releases messages, in this order. Steps that the forward does for earlier iterations can run
    before it: `flush` runs them when the model is read between two iterations.
    """

    def __init__(self, run: ActivePlan, device: Device):
        self._run, self._device = run, device
        self._buckets = run.plan.buckets
        self._next = 0  # index of the next step of the iteration
        self.flushed: int | None = (
            None  # iteration whose forward steps for earlier iterations are done
        )

    def begin(self, now: Iteration) -> None:
        """Set the current iteration."""
        self._now, self._next = now, 0

    def walk(self, position: int) -> None:
        """Execute all remaining steps up to a position."""
        now, mark = self._now, self._device.mark
        steps = now.steps
        while self._next < len(steps) and (step := steps[self._next]).position <= position:
            self._next += 1
            if not (step.wait or step.apply or step.decide or step.ask):
                for index in step.release:
                    self._run.release(now, index)
                continue
            waited = begin = mark()
            if step.wait or step.decide:
                self.wait(step)
                waited = mark()
            self.act(step)
            now.marks.acted.append(MomentTimes(step.position, begin, waited, mark()))

    def wait(self, step: Step) -> None:
        """Wait for the messages and votes that are due at a step."""
        planned, early = self._now.planned, self._is_flushed(step)
        for lag, index in step.wait:
            if not (lag and early):
                self._run.wait_for_message(planned - lag, index)
        for lag, vote in step.decide:
            if not (lag and early):
                self._run.wait_for_vote(vote, planned - lag)

    def act(self, step: Step) -> None:
        """Apply rules, cast votes and release messages of a step."""
        now, early = self._now, self._is_flushed(step)
        for lag, apply in step.apply:
            if not (lag and early):
                self._apply(apply, now.planned - lag)
        if step.ask:
            self._cast_votes(step.ask)
        for index in step.release:
            self._run.release(now, index)

    def flush(self, planned: int, *, begun: bool = False) -> None:
        """Execute the forward steps of the next iteration as far as they concern earlier
        iterations.

        Args:
            planned: number of the next iteration in the plan.
            begun: whether its forward has begun; then execute only the remaining steps.
        """
        if self.flushed == planned:
            return
        for step in self._run.program.steps(planned)[self._next if begun else 0 :]:
            if step.position >= self._buckets:
                break
            for lag, index in step.wait:
                if lag:
                    self._run.wait_for_message(planned - lag, index)
            for lag, vote in step.decide:
                if lag:
                    self._run.wait_for_vote(vote, planned - lag)
            for lag, apply in step.apply:
                if lag:
                    self._apply(apply, planned - lag)
        self.flushed = planned

    def _apply(self, apply: Apply, planned: int) -> None:
        run = self._run
        if run.votes.allows(apply, planned):
            run.context.iteration = run.iterations[planned]
            RULES[apply.rule](run.context, apply)

    def _cast_votes(self, votes: Sequence[Vote]) -> None:
        now, context, everything = self._now, self._run.context, range(self._buckets)
        context.iteration = now
        says = [VOTES[vote.rule](context, vote, vote.buckets or everything) for vote in votes]
        now.undecided.update(vote.name for vote in votes)
        self._run.votes.send_ballots(votes, now.planned, says)

    def _is_flushed(self, step: Step) -> bool:
        """Return whether `flush` has executed the parts of this step that concern earlier
        iterations."""
        return self.flushed == self._now.planned and step.position < self._buckets
