"""Messages between the devices of a timetable, by time step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from offbeat.cyclic.exchange import Arrival, Exchange
from offbeat.cyclic.timetable import Message, Timetable, What

Key = tuple[What, int, int]  # kind, and the stage and micro-batch that need the message
Room = Callable[[Message], "list[Tensor] | None"]
Load = Callable[[Message], "tuple[list[Tensor], Callable[[], None] | None]"]
OnSent = Callable[[Message, int], None]

PATIENCE = 2  # time steps after which the device waits for the end of a send
MOST_DIMS = 8
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


class Traffic:
    """Messages between this device and others, in the order of the timetable.

    A device starts to receive a message in the time step in which the message is sent. A message
    that is due in a time step after the iterations begun so far is sent when the next iteration
    begins.
    """

    def __init__(self, table: Timetable, rank: int, exchange: Exchange | None):
        self._table, self._rank, self._exchange = table, rank, exchange
        self._planned: dict[int, list[Message]] = defaultdict(list)  # by step of the send
        self._in: dict[Key, tuple[Message, Arrival]] = {}
        self._out: dict[Key, list[Tensor]] = {}
        self._activation_shapes: dict[
            tuple[int, int], Tensor
        ] = {}  # activation shape by (peer, stage)
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

    def receive(self, time: int, room: Room) -> None:
        """Start receiving the messages that are sent in a time step.

        `room` returns the tensors to receive into, or None for a message of unknown shape. The
        first message of that kind from a peer is preceded by its shape.
        """
        if self._exchange is None:
            return
        # With "zero" a device holds at most two stages: one must be sent before the next arrives.
        self._exchange.settle(time if self._table.placement == "zero" else time - PATIENCE + 1)
        for message in self._planned.get(time, ()):
            if message.target == self._rank:
                tensors = room(message)
                if tensors is None:
                    tensors = [self._receive_tensor(message)]
                self._in[_key(message)] = message, self._arrival(message, tensors)

    def is_expected(self, what: What, stage: int, batch: int) -> bool:
        """Whether a message is expected from another device and was not taken yet."""
        return (what, stage, batch) in self._in

    def wait_for(self, what: What, stage: int, batch: int, device: torch.device) -> list[Tensor]:
        """Wait for a message and return its tensors on the device."""
        message, arrival = self._in.pop((what, stage, batch))
        tensors = arrival.wait()
        known = (message.source, stage)
        if what == "activation" and known not in self._activation_shapes:
            self._activation_shapes[known] = tensors[0]
            tensors = self._arrival(message, [_empty_tensor(tensors[0])]).wait()
        return [tensor.to(device) for tensor in tensors]

    def provide(self, what: What, stage: int, batch: int, tensors: Sequence[Tensor]) -> None:
        """Provide the tensors of a message. They must not be written any more."""
        self._out[what, stage, batch] = [*tensors]

    def send(self, time: int, load: Load, on_sent: OnSent | None = None) -> None:
        """Start sending the messages of a time step.

        `load` returns the tensors of a stage, and a callback for the end of the send. `on_sent` is
        called with each message and its bytes.
        """
        for message in self._planned.pop(time, ()):
            if message.source == self._rank:
                assert self._exchange is not None
                gone = None
                if message.what == "states":
                    tensors, gone = load(message)
                else:
                    tensors = self._out.pop(_key(message))
                if message.what == "activation":
                    tensors = self._with_shape(message, tensors[0])
                self._exchange.send(time, tensors, message.target, _describe(message), gone)
                if on_sent is not None:
                    on_sent(message, sum(tensor.nbytes for tensor in tensors))

    def _arrival(self, message: Message, tensors: Sequence[Tensor]) -> Arrival:
        assert self._exchange is not None
        return self._exchange.receive(tensors, message.source, _describe(message))

    def _receive_tensor(self, message: Message) -> Tensor:
        """Return a tensor for an activation, or for its shape if that is unknown."""
        shape = self._activation_shapes.get((message.source, message.stage))
        if shape is None:
            return torch.zeros(MOST_DIMS + 2, dtype=torch.int64, device="cpu")
        return _empty_tensor(shape)

    def _with_shape(self, message: Message, tensor: Tensor) -> list[Tensor]:
        """Return the tensors to send for an activation: its shape first, if it is the first one."""
        shape, known = _shape(tensor), (message.target, message.stage)
        if known not in self._activation_shapes:
            self._activation_shapes[known] = shape
            return [shape, tensor]
        if not torch.equal(self._activation_shapes[known], shape):
            raise ValueError(
                f"micro-batch {message.batch} leaves stage {message.stage} with the shape "
                f"{tuple(tensor.shape)}; all must have the shape of the first one: leave out what "
                "does not fill a batch (drop_last=True)"
            )
        return [tensor]


def _key(message: Message) -> Key:
    return message.what, message.stage, message.batch


def _describe(message: Message) -> str:
    what = {"states": "the stage itself", "total": "the gradient"}.get(message.what, message.what)
    return f"{what} of stage {message.stage + 1} for micro-batch {message.batch}"


def _shape(tensor: Tensor) -> Tensor:
    """Return dtype, number of dimensions and sizes as int64 numbers [MOST_DIMS + 2]."""
    if tensor.dtype not in DTYPES or tensor.dim() > MOST_DIMS:
        raise ValueError(
            f"a stage's output ({tensor.dtype}, {tensor.dim()} dimensions) must have one of the "
            f"dtypes {', '.join(map(str, DTYPES))} and at most {MOST_DIMS} dimensions"
        )
    numbers = [DTYPES.index(tensor.dtype), tensor.dim(), *tensor.shape]
    return torch.tensor(
        numbers + [0] * (MOST_DIMS + 2 - len(numbers)), dtype=torch.int64, device="cpu"
    )


def _empty_tensor(shape: Tensor) -> Tensor:
    """Return an uninitialized host tensor of an encoded shape."""
    dtype, dims, *sizes = map(int, shape)
    return torch.empty(sizes[:dims], dtype=DTYPES[dtype], device="cpu")
