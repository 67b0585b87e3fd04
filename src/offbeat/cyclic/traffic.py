"""Traffic: what the devices of a timetable send each other, step by step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from offbeat.cyclic.exchange import Arrival, Exchange
from offbeat.cyclic.timetable import Message, Timetable, What

Key = tuple[What, int, int]  # what, and the stage and micro-batch that need it
Room = Callable[[Message], "list[Tensor] | None"]
Load = Callable[[Message], "tuple[list[Tensor], Callable[[], None] | None]"]
Told = Callable[[Message, int], None]

PATIENCE = 2  # time steps, after which what was sent must have gone
MOST_DIMS = 8
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


class Traffic:
    """Messages between this device and others, in the order of the timetable.

    We are ready to receive in the time step in which a message is sent. A message that is due
    beyond the iterations that have begun is sent when the next one begins.
    """

    def __init__(self, table: Timetable, rank: int, exchange: Exchange | None):
        self._table, self._rank, self._exchange = table, rank, exchange
        self._planned: dict[int, list[Message]] = defaultdict(list)  # by the step they are sent in
        self._in: dict[Key, tuple[Message, Arrival]] = {}
        self._out: dict[Key, list[Tensor]] = {}
        self._handed: dict[tuple[int, int], Tensor] = {}  # by peer and stage: shape of activations
        self._horizon = 0

    def expect(self, now: int, until: int, iterations: range) -> None:
        """These iterations are computed, as far as time steps before `until`."""
        for time in range(self._horizon, until):
            for message in self._table.due(time, iterations):
                if self._rank in (message.source, message.target):
                    self._planned[max(message.sent, now - 1)].append(message)
        self._horizon = until

    def restart(self, now: int) -> None:
        """Everything has gone; time steps count from here."""
        if self._exchange is not None:
            self._exchange.settle(self._horizon)
        self._horizon = now

    def receive(self, time: int, room: Room) -> None:
        """Be ready for what is sent in a time step, each where there is `room`; what has none
        (None) says first how large it is."""
        if self._exchange is None:
            return
        # While a stage travels to us none may be on its way from us: two are here at most.
        self._exchange.settle(time if self._table.placement == "zero" else time - PATIENCE + 1)
        for message in self._planned.get(time, ()):
            if message.target == self._rank:
                landing = room(message)
                if landing is None:
                    landing = [self._landing(message)]
                self._in[_key(message)] = message, self._arrival(message, landing)

    def awaits(self, what: What, stage: int, batch: int) -> bool:
        """Whether it comes from another device."""
        return (what, stage, batch) in self._in

    def take(self, what: What, stage: int, batch: int, device: torch.device) -> list[Tensor]:
        """What has come for a work, on the device; waits for it."""
        message, arrival = self._in.pop((what, stage, batch))
        tensors = arrival.wait()
        known = (message.source, stage)
        if what == "activation" and known not in self._handed:
            self._handed[known] = tensors[0]
            tensors = self._arrival(message, [_empty(tensors[0])]).wait()
        return [tensor.to(device) for tensor in tensors]

    def give(self, what: What, stage: int, batch: int, tensors: Sequence[Tensor]) -> None:
        """What another device needs; it must not be written any more."""
        self._out[what, stage, batch] = [*tensors]

    def send(self, time: int, load: Load, told: Told | None = None) -> None:
        """Send what is sent in a time step; stages as they are when they are `load`ed, with what is
        to be done when they have gone. Each message and its bytes are `told`."""
        for message in self._planned.pop(time, ()):
            if message.source == self._rank:
                assert self._exchange is not None
                gone = None
                if message.what == "states":
                    tensors, gone = load(message)
                else:
                    tensors = self._out.pop(_key(message))
                if message.what == "activation":
                    tensors = self._introduced(message, tensors[0])
                self._exchange.send(time, tensors, message.target, _words(message), gone)
                if told is not None:
                    told(message, sum(tensor.nbytes for tensor in tensors))

    def _arrival(self, message: Message, landing: Sequence[Tensor]) -> Arrival:
        assert self._exchange is not None
        return self._exchange.receive(landing, message.source, _words(message))

    def _landing(self, message: Message) -> Tensor:
        """Room for an activation, or for its shape before the first one."""
        shape = self._handed.get((message.source, message.stage))
        if shape is None:
            return torch.zeros(MOST_DIMS + 2, dtype=torch.int64, device="cpu")
        return _empty(shape)

    def _introduced(self, message: Message, tensor: Tensor) -> list[Tensor]:
        """An activation; the first one to a peer says before what shape all have."""
        shape, known = _shape(tensor), (message.target, message.stage)
        if known not in self._handed:
            self._handed[known] = shape
            return [shape, tensor]
        if not torch.equal(self._handed[known], shape):
            raise ValueError(
                f"micro-batch {message.batch} leaves stage {message.stage} with the shape "
                f"{tuple(tensor.shape)}; all must have the shape of the first one: leave out what "
                "does not fill a batch (drop_last=True)"
            )
        return [tensor]


def _key(message: Message) -> Key:
    return message.what, message.stage, message.batch


def _words(message: Message) -> str:
    what = {"states": "the stage itself", "total": "the gradient"}.get(message.what, message.what)
    return f"{what} of stage {message.stage + 1} for micro-batch {message.batch}"


def _shape(tensor: Tensor) -> Tensor:
    """dtype and shape as numbers."""
    if tensor.dtype not in DTYPES or tensor.dim() > MOST_DIMS:
        raise ValueError(
            f"a stage's output ({tensor.dtype}, {tensor.dim()} dimensions) must have one of the "
            f"dtypes {', '.join(map(str, DTYPES))} and at most {MOST_DIMS} dimensions"
        )
    numbers = [DTYPES.index(tensor.dtype), tensor.dim(), *tensor.shape]
    return torch.tensor(
        numbers + [0] * (MOST_DIMS + 2 - len(numbers)), dtype=torch.int64, device="cpu"
    )


def _empty(shape: Tensor) -> Tensor:
    """Room on the host for what has this shape."""
    dtype, dims, *sizes = map(int, shape)
    return torch.empty(sizes[:dims], dtype=DTYPES[dtype], device="cpu")
