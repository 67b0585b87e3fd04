"""Messages of the transfers of an iteration: payloads and destinations of results.

`Cursor.walk` (core/plan/cursor.py) decides when a message is released.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from offbeat.core.buckets.flat import Flat
from offbeat.core.buckets.module_buffers import ModuleBuffers
from offbeat.core.buckets.optimizer_state import StateStore
from offbeat.core.plan import BUFFERS, INSIDE, Transfer, base_link
from offbeat.core.plan.program import Program
from offbeat.core.runtime.coding import Coding
from offbeat.core.runtime.waiting import Waiting
from offbeat.core.transport.link import Message, MessageLink


class Messages:
    """Messages of one rank's program.

    An in-place transfer passes views of the storage to its link. Any other transfer sends a copy,
    made when the message is released. Its result is stored outside the storage until it is due.
    With `staged` all transfers send copies, so that a message that fails leaves the storage as it
    was.
    """

    def __init__(
        self,
        program: Program,
        flat: Flat,
        state: StateStore,
        links: Mapping[str, MessageLink],
        waiting: Waiting,
        memory: dict[str, Any],
        module_buffers: ModuleBuffers,
        *,
        staged: bool = False,
        defers_errors: bool = False,
    ):
        self.is_staged = staged
        self._program, self._flat, self._state = program, flat, state
        self._links, self._waiting = links, waiting
        self._module_buffers = module_buffers
        self.coding = Coding(program.plan, flat, memory, defers_errors=defers_errors)
        self._keeps_results = defers_errors  # the links keep them, to send them after a failure
        # Whether averages that are completed will not be applied. Where members may change, they
        # leave errors and anchors as if they were skipped.
        self.drops = False
        self._views: dict[tuple[int, int], tuple[Tensor, ...]] = {}
        # By transfer: its link and views, if they are the same in every iteration.
        self._fixed: dict[int, tuple[MessageLink, tuple[Tensor, ...]]] = {}
        self._sizes: dict[int, int] = {}  # by transfer
        self._copies: dict[int, int] = {}  # by message: the buffer copy from which it was taken
        self._sent: list[
            Message
        ] = []  # encoded messages to a single rank; sending them changes errors and anchors

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

    def release(self, message: Message, planned: int) -> None:  # noqa: C901
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
                    self._copies[id(message)] = copy
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
                    self._copies[id(message)] = copy
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
        copy = self._copies.get(id(message))
        if copy is None:
            return None
        buffer = message.transfer.payload.buffer
        return next(
            age
            for age in range(self._flat.copies(buffer))
            if self._flat.copy_index(buffer, age) == copy
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
            self._copies[id(message)] = self._flat.copy_index(t.payload.buffer, age)
        message.arrive()
        return message

    def size(self, t: Transfer) -> int:
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

    def pass_over(self, message: Message) -> None:
        """Remove a message that a vote has excluded from its link."""
        self._links[message.transfer.link].pass_over(message)

    def complete(self, message: Message) -> None:
        """Wait for a message and store its result."""
        self._waiting.wait(message, self._flat)
        if message.repeats:
            self._repeat(message)
        t = message.transfer
        if t.payload.buffer == BUFFERS:
            self._module_buffers.unpack(message.tensors)
        if message.passed or message.is_stored or (t.in_place and not self.is_staged):
            return
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

    def _repeat(self, message: Message) -> None:
        """Average the payload of a message over the survivors of a failure, or over a node."""
        t = message.transfer
        copy = self._flat.copy_index(t.payload.buffer, t.payload.age)
        payload = self._flat.message_tensors(t.payload, copy)
        inside = base_link(t.link) == INSIDE
        message.settle(self._waiting.mark(), self._waiting.repeat(payload, inside=inside))
        self._copies[id(message)] = copy

    def _state_tensors(self, t: Transfer) -> list[Tensor]:
        """Return views of the optimizer state that a transfer sends."""
        tensors = self._state.tensors(t.payload.buckets, t.payload.moment)
        return [x[t.payload.slice_of(x.numel())] for x in tensors]

    def _target(self, t: Transfer, message: Message) -> tuple[str, int]:
        """Return the buffer and the copy for the result of a message: its target, or the copy from
        which it was taken."""
        taken = self._copies.pop(id(message), None)
        if t.into or taken is None:
            return t.target, self._flat.copy_index(t.target)
        return t.target, taken
