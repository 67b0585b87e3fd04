"""Actions of a rank's cursor on tensors and links: messages, rules and votes.

`Cursor.walk` (core/plan/cursor.py) decides when a message is released.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from offbeat.core.buckets.flat import Flat
from offbeat.core.buckets.gradients import Gradients
from offbeat.core.buckets.optimizer_state import StateStore
from offbeat.core.derive import effects
from offbeat.core.guards.finite import FiniteGuard
from offbeat.core.plan import INSIDE, Apply, Moment, Payload, Phases, Transfer, Vote, base_link
from offbeat.core.plan.program import Program
from offbeat.core.plan.semantics import is_active
from offbeat.core.plan.types import is_vote_channel, moment_of
from offbeat.core.rules import RULES, VOTES
from offbeat.core.runtime.contents import Storage, StoredContents
from offbeat.core.runtime.iteration import Iteration, MomentTimes
from offbeat.core.runtime.updates import Updates
from offbeat.core.runtime.waiting import Waiting
from offbeat.core.transport.device import Mark
from offbeat.core.transport.link import Fate, Message, MessageLink


class TensorActions:
    """Actions of one rank for one program.

    Attributes:
        context: storage on which the rules run.
        votes: votes of this rank.
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
        storage: Storage,
        links: Mapping[str, MessageLink],
        waiting: Waiting,
        votes: Votes,
        context: StorageContext,
        suspects: FiniteGuard | None,
        *,
        note_later: bool,
    ):
        self.votes, self.context, self.storage = votes, context, storage
        self._program, self._links, self._waiting = program, links, waiting
        self._flat, self._suspects = storage.flat, suspects
        self._note_later = note_later  # whether the step checks averaged gradients
        self._buckets = range(program.plan.buckets)
        self.mark, self.steps = waiting.mark, program.steps
        self._contents: dict[int, list[StoredContents]] = {}  # by segment of the program
        # Encoded messages to a single rank; sending them changes errors and anchors.
        self._sent: list[Message] = []

    # ---- iterations -------------------------------------------------------------------------

    def contents(self, planned: int) -> list[StoredContents]:
        """Return the contents of the transfers of an iteration, in issue order."""
        segment = self._program.segment(planned)
        if segment not in self._contents:
            self._contents[segment] = [
                self.storage.contents_of(
                    t, in_nodes=self._links[t.link].collectives.levels is not None
                )
                for t in self._program.transfers(planned)
            ]
        return self._contents[segment]

    def enqueue(self, planned: int, number: int) -> list[Message]:
        """Enqueue the messages of one iteration on their links. Messages that this rank only
        receives are released at once.

        Args:
            planned: number of the iteration in the plan.
            number: number of the iteration in the run.
        """
        messages, rank = [], self._program.rank
        self.restart_coding()
        for contents in self.contents(planned):
            t = contents.transfer
            link = self._links[t.link]
            message = link.enqueue(t, number, contents)
            messages.append(message)
            if t.only_receives(rank):
                link.release(message, contents.receive(message))
        return messages

    def restart_coding(self) -> None:
        """If weights were replaced, restart the anchors of codecs from the current weights."""
        if self.storage.coding.is_outdated:
            self.wait_for_sends()
            self.storage.coding.restart_if_outdated()

    def release_views(self) -> None:
        """Drop all views of the storage."""
        self._contents.clear()

    # ---- called by the cursor ---------------------------------------------------------------

    def receive(self, iteration: Iteration, index: int) -> None:
        message = iteration.messages[index]
        self.complete(message)
        payload = message.transfer.payload
        if message.culprits and self._suspects is not None:
            self._suspects.note(message, later=payload.buffer == "grad" and self._note_later)

    def decide(self, iteration: Iteration, vote: Vote) -> bool:
        iteration.voted[vote.name] = yes = self.votes.decide(vote, iteration.planned)
        return bool(yes)

    def apply(self, iteration: Iteration, apply: Apply) -> bool:
        if not self.votes.allows(apply, iteration.planned) or self._uses_lost(apply):
            return False
        self.context.iteration = iteration
        updates = effects.is_update(apply)  # which work on the user's own parameters
        if not updates:
            self._flat.copy_in(apply.buckets)
        RULES[apply.rule](self.context, apply)
        if not updates:
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
        t, contents = message.transfer, message.contents
        link = self._links[t.link]
        if self.lost is not None:
            return self._release_after_failure(message, link, self.lost)
        assert contents is not None
        if not self.votes.allows(t, iteration.planned):
            iteration.spared_bytes += contents.size_bytes(link.collectives.size)
            link.skip(message)
            return False
        if t.payload.buffer == "param":
            self._flat.copy_in(t.payload.buckets)
        if t.wire is not None and t.verb == "send":
            self._follow_sends()
            self._sent.append(message)
        link.release(message, contents.take(message, iteration.planned))
        return True

    def _release_after_failure(
        self, message: Message, link: MessageLink, lost: list[Transfer]
    ) -> bool:
        """Leave a message to the survivors of a failure. Return False if it is skipped."""
        if self.repeats(message.transfer):
            message.released = self.mark()
            message.settle(None, None, repeats=True)
            return True
        lost.append(message.transfer)
        link.skip(message)
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
            if message.fate is Fate.QUEUED:
                self._links[message.transfer.link].skip(message)

    def record_times(self, iteration: Iteration, position: int, begin: Mark, waited: Mark) -> None:
        if position < 2 * len(self._buckets):
            times = MomentTimes(position, begin, waited, self.mark())
            iteration.marks.acted.append(times)

    # ---- messages ---------------------------------------------------------------------------

    def complete(self, message: Message) -> None:
        """Wait for a message and store its result, if that has not been done."""
        self._waiting.wait(message, self._flat)
        if message.fate is Fate.REPEATS:
            self._repeat(message)
        if message.fate is not Fate.SKIPPED and message.contents is not None:
            message.contents.put(message)
            message.contents = None
            if message.transfer.target == "param":
                self._flat.copy_out(message.transfer.payload.buckets)

    def _repeat(self, message: Message) -> None:
        """Average the payload of a message over the survivors of a failure, or over a node."""
        t = message.transfer
        copy = self._flat.copy_index(t.payload.buffer, t.payload.age)
        payload = self._flat.message_tensors(t.payload, copy)
        inside = base_link(t.link) == INSIDE
        message.settle(self._waiting.mark(), self._waiting.repeat(payload, inside=inside))
        message.copy = copy

    def _follow_sends(self) -> None:
        """Let later compute follow the encoded messages to a single rank that are sent, because
        the link has changed their anchors."""
        pending = list[Message]()
        for message in self._sent:
            if message.done:
                self._waiting.wait(message, self._flat)
            else:
                pending.append(message)
        self._sent = pending

    def wait_for_sends(self) -> None:
        """Wait until all encoded messages to a single rank are sent. Other ranks must have begun
        the same iterations."""
        for message in self._sent:
            self._waiting.wait(message, self._flat)
        self._sent.clear()


class Votes:
    """Votes of one rank; all votes of a moment share one message, which gives every rank all
    ballots."""

    def __init__(
        self,
        links: Mapping[str, MessageLink],
        waiting: Waiting,
        flat: Flat,
        rank: int,
        world_size: int,
    ):
        self._link = next((one for name, one in links.items() if is_vote_channel(name)), None)
        self._waiting, self._flat = waiting, flat
        self._rank, self._world_size = rank, world_size
        self._pending: dict[tuple[str, int], tuple[Message, int]] = {}
        self.outcomes: dict[tuple[str, int], list[int]] = {}
        """By name of the vote and number of the iteration in the plan: the ranks that voted yes."""

    def send_ballots(self, votes: Sequence[Vote], planned: int, ballots: Sequence[bool]) -> None:
        """Send this rank's ballots in the votes of a moment.

        Args:
            votes: votes of the moment.
            planned: number of the iteration in the plan.
            ballots: by vote, this rank's ballot.
        """
        assert self._link is not None
        rule = Transfer(
            Payload("vote", range(1)), votes[0].at, Moment("end"), Phases(), self._link.name
        )
        # On the host, so that the decision does not wait for the device.
        table = torch.zeros(len(votes), self._world_size, dtype=torch.float32, device="cpu")
        table[:, self._rank] = torch.tensor(ballots, dtype=table.dtype, device="cpu")
        message = self._link.enqueue(rule, planned)
        self._link.release(message, (table,))
        for row, vote in enumerate(votes):
            self._pending[vote.name, planned] = message, row

    def decide(self, vote: Vote, planned: int) -> list[int]:
        """Wait for the ballots of all ranks. Return the ranks that voted yes."""
        message, row = self._pending[vote.name, planned]
        self._waiting.wait(message, self._flat)  # after a failure it settles all pending messages
        del self._pending[vote.name, planned]
        skipped = message.fate is Fate.SKIPPED
        table = [] if skipped else message.tensors[0][row].tolist()
        yes = [rank for rank, ballot in enumerate(table) if ballot]
        self.outcomes[vote.name, planned] = yes
        return yes

    @property
    def pending(self) -> list[Message]:
        """Messages of the votes whose outcome is not known yet."""
        return [message for message, _ in self._pending.values()]

    def allows(self, rule: Transfer | Apply, planned: int) -> bool:
        """Return whether the outcome of a rule's vote allows the rule in iteration `planned`."""
        return is_active(rule, planned, lambda vote, ago: self.outcomes[vote, planned - ago])

    def forget(self, before: int) -> None:
        """Delete the outcomes of iterations before `before`, which no rule needs any more."""
        for key in [key for key in self.outcomes if key[1] < before]:
            del self.outcomes[key]


class StorageContext:
    """Storage of one rank, as rules read and write it; `iteration` is the iteration of the rule."""

    def __init__(
        self,
        rank: int,
        flat: Flat,
        gradients: Gradients,
        state: StateStore,
        updates: Updates,
    ):
        self.rank = rank
        self.iteration: Iteration | None = None
        self._flat, self._gradients, self._state, self._updates = flat, gradients, state, updates
        self._memory: dict[str, Any] = {}

    def read(self, buffer: str, buckets: range, age: int = 0) -> tuple[Tensor, ...]:
        moment = moment_of(buffer)
        if buffer == "state" or moment is not None:
            return self._state.tensors(buckets, moment)
        return self._flat.tensors(buffer, buckets, self._flat.copy_index(buffer, age))

    write = read

    def parameters(self, buffer: str, buckets: range) -> tuple[Tensor, ...]:
        return tuple(self._flat.parameters_of(buffer, buckets))

    def squared_norm(self, buffer: str, buckets: range) -> Tensor | float:
        return self._flat.squared_norm(self._values(buffer, buckets))

    def scale(self, buffer: str, buckets: range, factor: float) -> None:
        for tensor in self._values(buffer, buckets):
            tensor *= factor

    def _values(self, buffer: str, buckets: range) -> tuple[Tensor, ...]:
        """Return the tensors of a buffer without the values that are appended to gradients."""
        if buffer != "grad":
            return self.read(buffer, buckets)
        return tuple(self._gradients.gradient_tensors(buckets, self._flat.copy_index(buffer)))

    def swap(self, a: str, b: str, buckets: range) -> None:
        for one, other in zip(
            self._flat.parameters_of(a, buckets), self._flat.parameters_of(b, buckets), strict=True
        ):
            kept = one.clone()
            one.copy_(other)
            other.copy_(kept)

    def rotate(self, buffer: str) -> None:
        self._flat.rotate(buffer)

    def local(self, apply: Apply) -> None:
        assert self.iteration is not None
        self._updates.local(apply, self.iteration)

    def reset(self, buckets: range) -> None:
        self._state.reset(buckets)

    def recall(self, name: str) -> Any:
        return self._memory.get(name)

    def keep(self, name: str, value: Any) -> None:
        self._memory[name] = value

    @property
    def memory(self) -> dict[str, Any]:
        """All values that rules have kept, by name."""
        return self._memory

    def show(self, name: str, numbers: Mapping[str, float]) -> None:
        assert self.iteration is not None
        self.iteration.shown[name] = numbers
