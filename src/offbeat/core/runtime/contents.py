"""Contents of messages: where a rank takes their tensors from, and where it puts their results.

Each transfer of a plan has one such object, which all its messages share.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from offbeat.core.buckets.flat import Flat
from offbeat.core.buckets.module_buffers import ModuleBuffers
from offbeat.core.buckets.optimizer_state import StateStore
from offbeat.core.plan import BUFFERS, Transfer
from offbeat.core.runtime.coding import Coding
from offbeat.core.transport.link import Contents, Message


@dataclass(frozen=True)
class Storage:
    """All that messages of one rank are taken from and stored in.

    Attributes:
        flat: parameters, gradients and the buffers of the plan.
        state: state of the optimizer.
        module_buffers: buffers of the model.
        coding: codecs of the plan.
        staged: whether every message is a copy, so that one that fails leaves the storage as it
            was.
    """

    flat: Flat
    state: StateStore
    module_buffers: ModuleBuffers
    coding: Coding
    staged: bool

    def contents_of(self, t: Transfer, *, in_nodes: bool) -> StoredContents:
        """Return the contents of a transfer.

        Args:
            t: the transfer.
            in_nodes: whether several ranks send each message together.
        """
        if t.payload.buffer == "state" or t.payload.moment is not None:
            return _State(t, self)
        if t.payload.buffer == BUFFERS:
            return _ModuleBuffers(t, self)
        if t.wire is None:
            return _Values(t, self)
        stays = not (in_nodes or self.staged) and self.coding.stays_in_storage(t)
        return _CodedInStorage(t, self) if stays else _Coded(t, self)


class StoredContents(Contents):
    """Contents of a transfer in the storage.

    Attributes:
        transfer: the transfer.
        in_place: whether a result is in the storage as soon as its message has arrived.
    """

    def __init__(self, transfer: Transfer, storage: Storage) -> None:
        self.transfer, self.in_place = transfer, transfer.in_place and not storage.staged
        self._storage, self._flat = storage, storage.flat

    def receive(self, message: Message) -> Sequence[Tensor]:
        """Return the tensors of a message that this rank only receives."""
        raise NotImplementedError

    def _copy(self, message: Message) -> int:
        """Return the index of the copy of the target for a result: the newest one, or the copy
        from which it was taken."""
        taken, message.copy = message.copy, None
        if self.transfer.into or taken is None:
            return self._flat.copy_index(self.transfer.target)
        return taken


class _State(StoredContents):
    """State of the optimizer."""

    def take(self, message: Message, planned: int) -> Sequence[Tensor]:
        staged = self._storage.staged
        return [x.clone() for x in self._views()] if staged else self._views()

    def put(self, message: Message) -> None:
        if not self.in_place:
            for target, result in zip(self._views(), message.tensors, strict=True):
                target.copy_(result)

    def size_bytes(self, ranks: int) -> int:
        payload, state = self.transfer.payload, self._storage.state
        part = payload.slice_of(sum(state.bytes_of(b, payload.moment) for b in payload.buckets))
        return part.stop - part.start

    def _views(self) -> list[Tensor]:
        payload = self.transfer.payload
        tensors = self._storage.state.tensors(payload.buckets, payload.moment)
        return [x[payload.slice_of(x.numel())] for x in tensors]


class _ModuleBuffers(StoredContents):
    """Buffers of the model, such as running statistics."""

    def __init__(self, transfer: Transfer, storage: Storage) -> None:
        super().__init__(transfer, storage)
        self.in_place = False

    def take(self, message: Message, planned: int) -> Sequence[Tensor]:
        return self._storage.module_buffers.pack()

    def put(self, message: Message) -> None:
        self._storage.module_buffers.unpack(message.tensors)

    def size_bytes(self, ranks: int) -> int:
        return self._storage.module_buffers.size_bytes


class _Values(StoredContents):
    """Values of a buffer, without a codec. In place they are views of the storage, otherwise a
    copy, made when the message is released."""

    def __init__(self, transfer: Transfer, storage: Storage) -> None:
        super().__init__(transfer, storage)
        self._views: dict[int, tuple[Tensor, ...]] = {}  # by copy of the buffer

    def take(self, message: Message, planned: int) -> Sequence[Tensor]:
        payload = self.transfer.payload
        copy = self._flat.copy_index(payload.buffer, payload.age)
        if copy not in self._views:
            self._views[copy] = self._flat.message_tensors(payload, copy)
        if self.in_place:
            return self._views[copy]
        if self.transfer.verb != "send":
            message.copy = copy
        return [x.clone() for x in self._views[copy]]

    def receive(self, message: Message) -> Sequence[Tensor]:
        t = self.transfer
        like = self._flat.message_tensors(t.payload, self._flat.copy_index(t.target), into=t.target)
        return [torch.empty_like(x) for x in like]

    def put(self, message: Message) -> None:
        if not self.in_place:
            t, copy = self.transfer, self._copy(message)
            targets = self._flat.message_tensors(t.payload, copy, into=t.target)
            for target, result in zip(targets, message.tensors, strict=True):
                target.copy_(result)

    def size_bytes(self, ranks: int) -> int:
        payload = self.transfer.payload
        views = self._flat.message_tensors(payload, self._flat.copy_index(payload.buffer))
        return sum(x.nbytes for x in views)


class _Coded(StoredContents):
    """Values of a buffer that a codec encodes from a copy."""

    def take(self, message: Message, planned: int) -> Sequence[Tensor]:
        payload = self.transfer.payload
        copy = self._flat.copy_index(payload.buffer, payload.age)
        if self.transfer.verb != "send":
            message.copy = copy
        coded = message.coded = self._storage.coding.encode_message(self.transfer, copy, planned)
        return coded.shapes

    def receive(self, message: Message) -> Sequence[Tensor]:
        copy = self._flat.copy_index(self.transfer.target)
        message.coded = self._storage.coding.receiving_message(self.transfer, copy)
        return ()

    def put(self, message: Message) -> None:
        coding = self._storage.coding
        if not coding.drops:
            coding.store_result(message, self._copy(message))

    def size_bytes(self, ranks: int) -> int:
        return self._storage.coding.bytes_of(self.transfer, ranks)


class _CodedInStorage(_Coded):
    """Values of a buffer that a codec encodes from the storage. It stores the result itself."""

    def __init__(self, transfer: Transfer, storage: Storage) -> None:
        super().__init__(transfer, storage)
        self.in_place = True

    def take(self, message: Message, planned: int) -> Sequence[Tensor]:
        copy = self._flat.copy_index(self.transfer.payload.buffer, self.transfer.payload.age)
        coded = message.coded = self._storage.coding.encode_in_storage(self.transfer, copy, planned)
        return coded.shapes

    def put(self, message: Message) -> None:
        if message.copy is not None:  # of a checkpoint of a job whose messages were copies
            super().put(message)
