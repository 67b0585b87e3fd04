"""Messages between the devices of a timetable, by time step."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from offbeat.cyclic.exchange import Exchange, TensorTransfer
from offbeat.cyclic.timetable import Key, Message, Timetable, What

Room = Callable[[Message], "list[Tensor] | None"]
Load = Callable[[Message], "tuple[list[Tensor], Callable[[], None] | None]"]
OnSent = Callable[[Message, int], None]

PATIENCE = 2  # time steps after which the device waits for the end of a send
HEADER_BYTES = 256  # JSON of dtype and sizes


class Traffic:
    """Messages between this device and others, in the order of the timetable.

    `room` returns the tensors to receive a message into, or None for a message of unknown shape.
    The first such message from a peer is preceded by its header. `load` returns the tensors of a
    stage that moves, and a callback for the end of the send.

    A device starts to receive a message in the time step in which the message is sent. A message
    that is due in a time step after the iterations begun so far is sent when the next iteration
    begins.
    """

    def __init__(
        self, table: Timetable, rank: int, exchange: Exchange | None, room: Room, load: Load
    ):
        self._table, self._rank, self._exchange = table, rank, exchange
        self._room, self._load = room, load
        self._planned: dict[int, list[Message]] = defaultdict(list)  # by step of the send
        self._in: dict[Key, tuple[Message, TensorTransfer]] = {}
        self._out: dict[Key, Sequence[Tensor]] = {}
        self._headers: dict[tuple[int, int], Tensor] = {}  # of activations, by (peer, stage)
        self._horizon = 0

    def expect(self, now: int, until: int, iterations: range) -> None:
        """Plan the messages of these iterations that are due before time step `until`.

        Messages whose step is over are sent in step `now - 1`.
        """
        for time in range(self._horizon, until):
            for message in self._table.due_messages(time, iterations):
                if self._rank in (message.source, message.target):
                    self._planned[max(message.sent, now - 1)].append(message)
        self._horizon = until

    def restart(self, now: int) -> None:
        """Wait for all sends. Plan further messages from time step `now` on."""
        if self._exchange is not None:
            self._exchange.settle(self._horizon)
        self._horizon = now

    def receive(self, time: int) -> None:
        """Start receiving the messages that are sent in a time step."""
        if self._exchange is None:
            return
        # With "zero" a device holds at most two stages: one must be sent before the next arrives.
        self._exchange.settle(time if self._table.placement == "zero" else time - PATIENCE + 1)
        for message in self._planned.get(time, ()):
            if message.target == self._rank:
                tensors = self._room(message)
                if tensors is None:
                    header = self._headers.get((message.source, message.stage))
                    empty = torch.zeros(HEADER_BYTES, dtype=torch.uint8, device="cpu")
                    tensors = [empty if header is None else _empty_tensor(header)]
                arrival = self._exchange.receive(tensors, message.source, _describe(message))
                self._in[message.key] = message, arrival

    def take(self, what: What, stage: int, batch: int) -> Sequence[Tensor] | None:
        """Wait for a message and return its tensors; None if no device sends it."""
        if self._exchange is None or (what, stage, batch) not in self._in:
            return None
        message, arrival = self._in.pop((what, stage, batch))
        tensors = self._exchange.complete(arrival)
        route = message.source, stage
        if what == "activation" and route not in self._headers:
            self._headers[route] = tensors[0]
            room = [_empty_tensor(tensors[0])]
            arrival = self._exchange.receive(room, message.source, _describe(message))
            tensors = self._exchange.complete(arrival)
        return tensors

    def provide(self, what: What, stage: int, batch: int, tensors: Sequence[Tensor]) -> None:
        """Provide the tensors of a message. They must not be written any more."""
        self._out[what, stage, batch] = tensors

    def send(self, time: int, on_sent: OnSent | None = None) -> None:
        """Start sending the messages of a time step.

        `on_sent` is called with each message and its bytes.
        """
        for message in self._planned.pop(time, ()):
            if message.source == self._rank:
                assert self._exchange is not None
                gone = None
                if message.what == "states":
                    tensors, gone = self._load(message)
                else:
                    tensors = self._out.pop(message.key)
                if message.what == "activation":
                    tensors = self._with_header(message, tensors[0])
                self._exchange.send(time, tensors, message.target, _describe(message), gone)
                if on_sent is not None:
                    on_sent(message, sum(tensor.nbytes for tensor in tensors))

    def _with_header(self, message: Message, tensor: Tensor) -> list[Tensor]:
        """Return the tensors to send for an activation: its header first, if it is the first."""
        header, route = _header(tensor), (message.target, message.stage)
        if route not in self._headers:
            self._headers[route] = header
            return [header, tensor]
        if not torch.equal(self._headers[route], header):
            raise ValueError(
                f"micro-batch {message.batch} leaves stage {message.stage} with the shape "
                f"{tuple(tensor.shape)}; all must have the shape of the first one: leave out what "
                "does not fill a batch (drop_last=True)"
            )
        return [tensor]


def _describe(message: Message) -> str:
    return f"the {message.what} of stage {message.stage + 1} for micro-batch {message.batch}"


def _header(tensor: Tensor) -> Tensor:
    """Return dtype and sizes of a tensor as bytes [HEADER_BYTES]."""
    text = json.dumps([str(tensor.dtype).removeprefix("torch."), *tensor.shape])
    data = [*text.encode().ljust(HEADER_BYTES)]
    return torch.tensor(data, dtype=torch.uint8, device="cpu")


def _empty_tensor(header: Tensor) -> Tensor:
    """Return an uninitialized host tensor of a header."""
    dtype, *sizes = json.loads(bytes(header.tolist()))
    return torch.empty(sizes, dtype=getattr(torch, dtype), device="cpu")
