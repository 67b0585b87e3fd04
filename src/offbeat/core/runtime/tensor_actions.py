"""Actions of a rank's cursor on tensors and links."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from offbeat.core.buckets.flat import Flat
from offbeat.core.derive import effects
from offbeat.core.guards.finite import NonfiniteMessages
from offbeat.core.plan import Apply, Transfer, Vote
from offbeat.core.plan.program import Program
from offbeat.core.rules import RULES, VOTES
from offbeat.core.runtime.context import StorageContext
from offbeat.core.runtime.iteration import Iteration, MomentTimes
from offbeat.core.runtime.messages import Messages
from offbeat.core.runtime.votes import Votes
from offbeat.core.transport.device import Device, Mark


class TensorActions:
    """Actions of one rank for one program.

    Attributes:
        context: storage on which the rules run.
        messages: messages of the program.
        votes: votes of this rank.
        suspects: receives messages with non-finite values; None without a check.
        lost: transfers whose messages the members of the job have skipped after a failure. None
            before a failure. Afterwards no message is sent, and rules that use a buffer of a lost
            transfer are left out, except updates.
        repeats: after a failure, returns whether a message is averaged over the survivors when it
            is due, and not skipped.
    """

    lost: list[Transfer] | None = None
    repeats: Callable[[Transfer], bool]

    def __init__(
        self,
        program: Program,
        messages: Messages,
        votes: Votes,
        context: StorageContext,
        flat: Flat,
        device: Device,
        suspects: NonfiniteMessages | None,
        *,
        note_later: bool,
    ):
        self.messages, self.votes, self.context, self._flat = messages, votes, context, flat
        self._buckets, self._suspects = range(program.plan.buckets), suspects
        self._note_later = note_later  # whether the step checks averaged gradients
        self.mark, self.steps = device.mark, program.steps

    def receive(self, iteration: Iteration, index: int) -> None:
        message = iteration.messages[index]
        self.messages.complete(message)
        if message.transfer.target == "param":
            self._flat.copy_out(message.transfer.payload.buckets)
        if message.culprits and self._suspects is not None:
            gradients = message.transfer.payload.buffer == "grad"
            self._suspects.note(message, later=gradients and self._note_later)

    def decide(self, iteration: Iteration, vote: Vote) -> bool:
        iteration.voted[vote.name] = yes = self.votes.decide(vote, iteration.planned)
        return bool(yes)

    def apply(self, iteration: Iteration, apply: Apply) -> bool:
        if not self.votes.allows(apply, iteration.planned) or self._uses_lost(apply):
            return False
        self.context.iteration = iteration
        if not self._flat.shards.are_staged or effects.is_update(apply):
            RULES[apply.rule](self.context, apply)
            return True
        self._flat.copy_in(apply.buckets)
        RULES[apply.rule](self.context, apply)
        self._flat.copy_out(apply.buckets)
        return True

    def cast_votes(self, iteration: Iteration, votes: Sequence[Vote]) -> None:
        context = self.context
        context.iteration = iteration
        self._flat.copy_in()
        ballots = [VOTES[vote.rule](context, vote, vote.buckets or self._buckets) for vote in votes]
        self.votes.send_ballots(votes, iteration.planned, ballots)

    def release(self, iteration: Iteration, index: int) -> bool:
        message = iteration.messages[index]
        if self.lost is not None and self.repeats(message.transfer):
            message.released = self.mark()
            message.settle(None, None, repeats=True)
            return True
        if self.lost is not None:
            self.lost.append(message.transfer)
            self.messages.pass_over(message)
            return False
        if self.votes.allows(message.transfer, iteration.planned):
            if message.transfer.payload.buffer == "param":
                self._flat.copy_in(message.transfer.payload.buckets)
            self.messages.release(message, iteration.planned)
            return True
        iteration.spared_bytes += self.messages.size(message.transfer)
        self.messages.pass_over(message)
        return False

    def _uses_lost(self, apply: Apply) -> bool:
        """Return whether a rule would use the result of a message that was skipped."""
        if not self.lost or effects.is_update(apply) or effects.is_window_end(apply):
            return False
        return any(
            effects.uses_any(apply, {t.payload.buffer, t.target})
            and not set(t.payload.buckets).isdisjoint(apply.buckets)
            for t in self.lost
        )

    def is_released(self, iteration: Iteration, index: int) -> bool:
        return iteration.messages[index].released is not None

    def pass_unsent_messages(self, iteration: Iteration) -> None:
        for message in iteration.messages:
            if message.released is None and not message.passed:
                self.messages.pass_over(message)

    def record_times(self, iteration: Iteration, position: int, begin: Mark, waited: Mark) -> None:
        if position < 2 * len(self._buckets):
            times = MomentTimes(position, begin, waited, self.mark())
            iteration.marks.acted.append(times)
