"""Actions of a rank's cursor on tensors and links: messages, rules and votes.

`Cursor.walk` (core/plan/cursor.py) decides when a message is released.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from offbeat.core.buckets.flat import Flat
from offbeat.core.buckets.module_buffers import ModuleBuffers
from offbeat.core.buckets.optimizer_state import StateStore
from offbeat.core.derive import effects
from offbeat.core.guards.finite import FiniteGuard
from offbeat.core.plan import BUFFERS, INSIDE, Apply, Transfer, Vote, base_link
from offbeat.core.plan.program import Program
from offbeat.core.rules import RULES, VOTES
from offbeat.core.runtime.coding import Coding
from offbeat.core.runtime.context import StorageContext
from offbeat.core.runtime.iteration import Iteration, MomentTimes
from offbeat.core.runtime.votes import Votes
from offbeat.core.runtime.waiting import Waiting
from offbeat.core.transport.device import Mark
from offbeat.core.transport.link import Message, MessageLink


class TensorActions:
    """Actions of one rank for one program.

    An in-place transfer passes views of the storage to its link. Any other transfer sends a copy,
    made when the message is released. Its result is stored outside the storage until it is due.
    With `staged` all transfers send copies, so that a message that fails leaves the storage as it
    was.

    Attributes:
        context: storage on which the rules run.
        votes: votes of this rank.
        coding: codecs of the messages.
        lost: transfers whose messages the members of the job have skipped after a failure. None
            before a failure. Afterwards no message is sent, and rules that use a buffer of a lost
            transfer are left out, except updates.
        repeats: after a failure, returns whether a message is averaged over the survivors when it
            is due, and not skipped.
        drops: whether averages that are completed will not be applied. Where members may change,
            they leave errors and anchors as if they were skipped.
    """

    lost: list[Transfer] | None = None
    repeats: Callable[[Transfer], bool]
    drops = False

    def __init__(
        self,
        program: Program,
        flat: Flat,
        state: StateStore,
        links: Mapping[str, MessageLink],
        waiting: Waiting,
        module_buffers: ModuleBuffers,
        votes: Votes,
        context: StorageContext,
        suspects: FiniteGuard | None,
        *,
        note_later: bool,
        staged: bool = False,
        defers_errors: bool = False,
    ):
        self.is_staged, self.votes, self.context = staged, votes, context
        self._program, self._flat, self._state = program, flat, state
        self._links, self._waiting = links, waiting
        self._module_buffers, self._suspects = module_buffers, suspects
        self._note_later = note_later  # whether the step checks averaged gradients
        self._buckets = range(program.plan.buckets)
        self.mark, self.steps = waiting.mark, program.steps
        self.coding = Coding(program.plan, flat, context.memory, defers_errors=defers_errors)
        self._keeps_results = defers_errors  # the links keep them, to send them after a failure
        self._views: dict[tuple[int, int], tuple[Tensor, ...]] = {}
        # By transfer: its link and views, if they are the same in every iteration.
        self._fixed: dict[int, tuple[MessageLink, tuple[Tensor, ...]]] = {}
        self._sizes: dict[int, int] = {}  # by transfer
        # Encoded messages to a single rank; sending them changes errors and anchors.
        self._sent: list[Message] = []

    def enqueue(self, planned: int, number: int) -> list[Message]:
        """Enqueue the messages of one iteration on their links. Messages that this rank only
        receives are released at once.

        Args:
            planned: number of the iteration in the plan.
            number: number of the iteration in the run.
        """
        messages = []
        self.restart_coding()
        for t in self._program.transfers(planned):
            message = self._links[t.link].enqueue(t, number)
            messages.append(message)
            if t.only_receives(self._program.rank):
                payload, copy = t.payload, self._flat.copy_index(t.target)
                if t.wire is not None:
                    coded = self.coding.receiving_message(t, copy)
                    self._links[t.link].release(message, (), coded)
                    continue
                like = self._flat.message_tensors(payload, copy, into=t.target)
                received = [torch.empty_like(x) for x in like]
                self._links[t.link].release(message, received)
        return messages

    # ---- called by the cursor ---------------------------------------------------------------

    def receive(self, iteration: Iteration, index: int) -> None:
        message = iteration.messages[index]
        self.complete(message)
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
        if not self._flat.is_sharded or effects.is_update(apply):
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
            self._links[message.transfer.link].pass_over(message)
            return False
        if self.votes.allows(message.transfer, iteration.planned):
            if message.transfer.payload.buffer == "param":
                self._flat.copy_in(message.transfer.payload.buckets)
            self._send(message, iteration.planned)
            return True
        iteration.spared_bytes += self._size(message.transfer)
        self._links[message.transfer.link].pass_over(message)
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
                self._links[message.transfer.link].pass_over(message)

    def record_times(self, iteration: Iteration, position: int, begin: Mark, waited: Mark) -> None:
        if position < 2 * len(self._buckets):
            times = MomentTimes(position, begin, waited, self.mark())
            iteration.marks.acted.append(times)

    # ---- messages ---------------------------------------------------------------------------

    def _send(self, message: Message, planned: int) -> None:  # noqa: C901
        """Send the current contents of the storage.

        Args:
            message: enqueued message.
            planned: number of its iteration in the plan.
        """
        t = message.transfer
        if id(t) in self._fixed:
            self._release_views(message)
            return
        payload = t.payload
        if payload.buffer == "state" or payload.moment is not None:
            given: Sequence[Tensor] = self._state_tensors(t)
            if self.is_staged:
                given = [x.clone() for x in given]
        elif payload.buffer == BUFFERS:
            given = self._module_buffers.pack()
        else:
            copy = self._flat.copy_index(payload.buffer, payload.age)
            if t.wire is not None:
                link = self._links[t.link]
                if self._stays_in_storage(t):
                    message.is_stored = True
                    coded = self.coding.encode_in_storage(t, copy, planned)
                    link.release(message, coded.shapes, coded)
                    return
                if t.verb == "send":
                    self._follow_sends()
                    self._sent.append(message)
                else:
                    message.copy = copy
                coded = self.coding.encode_message(t, copy, planned)
                link.release(message, coded.shapes, coded)
                return
            key = (id(t), copy)
            if key not in self._views:
                self._views[key] = self._flat.message_tensors(payload, copy)
            given = self._views[key]
            in_place = t.in_place and not self.is_staged
            if in_place and self._flat.copies(payload.buffer) == 1:
                self._fixed[id(t)] = self._links[t.link], given
                self._release_views(message)
                return
            if not in_place:
                if t.verb != "send":
                    message.copy = copy
                given = [x.clone() for x in given]
        self._links[t.link].release(message, given)

    def _stays_in_storage(self, t: Transfer) -> bool:
        """Return whether an encoded message works on the storage, not on a copy."""
        in_nodes = self._links[t.link].collectives.levels is not None
        return not (in_nodes or self.is_staged) and self.coding.stays_in_storage(t)

    def _release_views(self, message: Message) -> None:
        """Send the views of a message that are the same in every iteration."""
        link, views = self._fixed[id(message.transfer)]
        link.release(message, views)

    def _follow_sends(self) -> None:
        """Let later compute follow the encoded messages to a single rank that are sent, because
        the link has changed their anchors."""
        sent = [message for message in self._sent if message.done]
        self._sent = [message for message in self._sent if not message.done]
        for message in sent:
            self._waiting.wait(message, self._flat)

    def wait_for_sends(self) -> None:
        """Wait until all encoded messages to a single rank are sent. Other ranks must have begun
        the same iterations."""
        for message in self._sent:
            self._waiting.wait(message, self._flat)
        self._sent.clear()

    def restart_coding(self) -> None:
        """If weights were replaced, restart the anchors of codecs from the current weights."""
        if self.coding.is_outdated:
            self.wait_for_sends()
            self.coding.restart_if_outdated()

    def release_views(self) -> None:
        """Drop all views of the storage."""
        self._views.clear()
        self._fixed.clear()

    def staged_age(self, message: Message) -> int | None:
        """Return the age of the buffer copy to which the result of a message belongs.

        Returns:
            Age of the copy; None if the message is in place or has another target buffer.
        """
        if message.copy is None:
            return None
        buffer = message.transfer.payload.buffer
        return next(
            age
            for age in range(self._flat.copies(buffer))
            if self._flat.copy_index(buffer, age) == message.copy
        )

    def arrived_message(
        self, t: Transfer, number: int, tensors: Sequence[Tensor], age: int | None
    ) -> Message:
        """Return an arrived message that belongs to a checkpoint and has an unstored result.

        Args:
            t: transfer of the message.
            number: number of its iteration in the run.
            tensors: arrived tensors.
            age: age of the buffer copy from which it was taken, or None.
        """
        message = Message(t, number, order=-1)
        message.tensors = tensors
        message.released = message.start = message.end = self._waiting.mark()
        if age is not None:
            message.copy = self._flat.copy_index(t.payload.buffer, age)
        message.arrive()
        return message

    def _size(self, t: Transfer) -> int:
        """Return the bytes of a message."""
        if id(t) not in self._sizes:
            run = t.payload.buckets
            if t.payload.buffer == "state" or t.payload.moment is not None:
                whole = sum(self._state.bytes_of(b, t.payload.moment) for b in run)
                part = t.payload.slice_of(whole)
                self._sizes[id(t)] = part.stop - part.start
            elif t.payload.buffer == BUFFERS:
                return self._module_buffers.size_bytes
            elif t.wire is not None:
                ranks = self._links[t.link].collectives.size
                self._sizes[id(t)] = self.coding.bytes_of(t, ranks)
            else:
                carried = self._flat.message_tensors(
                    t.payload, self._flat.copy_index(t.payload.buffer)
                )
                self._sizes[id(t)] = sum(x.nbytes for x in carried)
        return self._sizes[id(t)]

    def complete(self, message: Message) -> None:
        """Wait for a message and store its result."""
        self._waiting.wait(message, self._flat)
        if message.repeats:
            self._repeat(message)
        t = message.transfer
        if t.payload.buffer == BUFFERS:
            self._module_buffers.unpack(message.tensors)
        elif not (message.passed or message.is_stored or (t.in_place and not self.is_staged)):
            self._store(message)

    def _store(self, message: Message) -> None:
        """Store the result of a message that is not in place."""
        t = message.transfer
        if t.payload.buffer == "state" or t.payload.moment is not None:
            for target, result in zip(self._state_tensors(t), message.tensors, strict=True):
                target.copy_(result)
            return
        buffer, copy = self._target(t, message)
        if t.wire is None:
            targets = self._flat.message_tensors(t.payload, copy, into=buffer)
            for target, result in zip(targets, message.tensors, strict=True):
                target.copy_(result)
        elif not (self.drops and self._keeps_results):
            self.coding.store_result(t, copy, buffer, message.tensors)
            self.coding.store_errors(t, message.errors, is_foreign=message.is_foreign)
            message.errors = ()
            # A guard still reads tensors with culprits.
            if not (message.culprits or self._keeps_results):
                self.coding.give_back(message.tensors)
        if buffer == "param":
            self._flat.copy_out(t.payload.buckets)

    def _repeat(self, message: Message) -> None:
        """Average the payload of a message over the survivors of a failure, or over a node."""
        t = message.transfer
        copy = self._flat.copy_index(t.payload.buffer, t.payload.age)
        payload = self._flat.message_tensors(t.payload, copy)
        inside = base_link(t.link) == INSIDE
        message.settle(self._waiting.mark(), self._waiting.repeat(payload, inside=inside))
        message.copy = copy

    def _state_tensors(self, t: Transfer) -> list[Tensor]:
        """Return views of the optimizer state that a transfer sends."""
        tensors = self._state.tensors(t.payload.buckets, t.payload.moment)
        return [x[t.payload.slice_of(x.numel())] for x in tensors]

    def _target(self, t: Transfer, message: Message) -> tuple[str, int]:
        """Return the buffer and the copy for the result of a message: its target, or the copy from
        which it was taken."""
        taken, message.copy = message.copy, None
        if t.into or taken is None:
            return t.target, self._flat.copy_index(t.target)
        return t.target, taken
