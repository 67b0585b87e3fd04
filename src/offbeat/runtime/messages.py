"""Messages: what the transfers of an iteration carry, and where their results go."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from offbeat.numerics import WIRES
from offbeat.plan import Transfer
from offbeat.plan.program import Program
from offbeat.runtime.waiting import Waiting
from offbeat.storage.flat import Flat
from offbeat.storage.optimizer_state import StateStore
from offbeat.transport.link import Link, Message


class Messages:
    """The messages of one rank's program.

    An in-place transfer puts views of the storage on its link. Any other sends a copy, made when
    it is released, and its result waits beside the storage until it is due.
    """

    def __init__(
        self,
        program: Program,
        flat: Flat,
        state: StateStore,
        links: Mapping[str, Link],
        waiting: Waiting,
    ):
        self._program, self._flat, self._state = program, flat, state
        self._links, self._waiting = links, waiting
        self._views: dict[tuple[int, int], tuple[Tensor, ...]] = {}
        self._copies: dict[int, int] = {}  # by message: the copy of the buffer that it took

    def enqueue(self, planned: int, number: int) -> list[Message]:
        """The messages of one iteration at their places on the links; receivers are ready."""
        messages = []
        for t in self._program.transfers(planned):
            message = self._links[t.link].enqueue(t, number)
            messages.append(message)
            if t.ranks is not None and t.ranks[1] == self._program.rank:
                landing = [torch.empty_like(x) for x in self._target(t, message)]
                self._links[t.link].release(message, landing)
        return messages

    def release(self, message: Message) -> None:
        """Send what the storage holds now."""
        t = message.transfer
        payload = t.payload
        if payload.buffer == "state":
            tensors = self._state.tensors(payload.buckets)
            given: Sequence[Tensor] = [x[payload.slice_of(x.numel())] for x in tensors]
        else:
            copy = self._flat.physical(payload.buffer, payload.age)
            key = (id(t), copy)
            if key not in self._views:
                self._views[key] = self._flat.carried(payload, copy)
            given = self._views[key]
            if not t.in_place:
                self._copies[id(message)] = copy
                given = self._encoded(t, given)
        self._links[t.link].release(message, given)

    def pass_over(self, message: Message) -> None:
        """A vote has said no."""
        self._links[message.transfer.link].pass_over(message)

    def arrive(self, message: Message) -> None:
        """Wait for a message; afterwards its result is in its place."""
        self._waiting.wait(message, self._flat)
        t = message.transfer
        if t.in_place or message.passed:
            return
        for target, result in zip(self._target(t, message), message.tensors, strict=True):
            target.copy_(result)

    def _target(self, t: Transfer, message: Message) -> tuple[Tensor, ...]:
        """Where a staged message goes: into its buffer, or back where it was taken from."""
        buffer = t.target
        taken = None if t.into else self._copies.pop(id(message), None)
        copy = self._flat.physical(buffer) if taken is None else taken
        return self._flat.carried(t.payload, copy, into=buffer)

    def _encoded(self, t: Transfer, given: Sequence[Tensor]) -> list[Tensor]:
        """A copy of what is given, as its wire lets it through."""
        if t.wire is None:
            return [x.clone() for x in given]
        settings, wire = dict(t.wire.args), WIRES[t.wire.name]
        if t.wire.error is None:
            return [wire(x, settings) for x in given]
        sent = []
        copy = self._flat.physical(t.wire.error)
        for x, lost in zip(given, self._flat.carried(t.payload, copy, t.wire.error), strict=True):
            whole = x + lost
            sent.append(wire(whole, settings))
            lost.copy_(whole - sent[-1])
        return sent
