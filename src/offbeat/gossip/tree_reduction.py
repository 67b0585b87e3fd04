"""Meeting: sums over all members, up a tree and down again, without sockets.

Chunk by chunk: what all children have brought is sent on while the rest still travels. The root's
bytes are everybody's result, so it is the same bit for bit. When the tree changes everything begins
anew, from the numbers that each member brought.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from offbeat.gossip.chunks import Wire
from offbeat.gossip.view import Place


@dataclass(frozen=True)
class Out:
    """Send this chunk `up` to the parent, or down to a child."""

    to: int
    up: bool
    chunk: int
    body: memoryview
    largest: float
    note: Any = None


class Meeting:
    """One worker's part. `numbers` are flat tensors on the host; `largest` a number of which the
    greatest is found; `note` says what the root has to say, when it has all numbers (JSON).
    `result`, `largest` and `note` are everybody's once `done`."""

    def __init__(
        self, numbers: Sequence[Tensor], largest: float, note: Callable[[], Any] | None = None
    ):
        self._numbers, self._mine, self._own_note = numbers, largest, note
        self.wire = Wire(numbers)
        self.note: Any = None
        self.done = False
        self.place: Place | None = None

    def start(self, place: Place) -> Iterator[Out]:
        """Begin, or begin anew, in this tree."""
        self.place = place
        self.result = [flat.clone() for flat in self._numbers]
        self.largest = self._mine
        self._got = dict.fromkeys(place.children, 0)
        self._sent = self._down = 0
        self.note = None
        yield from self._go_on()

    def up(self, child: int, chunk: int, body: Tensor, largest: float) -> Iterator[Out]:
        """A child's sum of a chunk has arrived. ValueError out of order."""
        if self.place is None or self._got.get(child) != chunk:
            raise ValueError(f"chunk {chunk} of {child} is not expected now")
        self._got[child] += 1
        self._view(chunk).add_(body)
        self.largest = max(self.largest, largest)
        yield from self._go_on()

    def down(self, chunk: int, body: Tensor, largest: float, note: Any = None) -> Iterator[Out]:
        """The result of a chunk has arrived from the parent. ValueError out of order."""
        if self.place is None or chunk != self._down:
            raise ValueError(f"result {chunk} is not expected now")
        self._view(chunk).copy_(body)
        self.largest, self.note = largest, note
        yield from self._hand_down(chunk)

    @property
    def results(self) -> int:
        """Chunks of which the result is known."""
        return self._down

    def detach(self) -> None:
        """The result comes from elsewhere: what is still to be sent stays as it is."""
        self.result = [flat.clone() for flat in self.result]

    def outcome(self, to: Sequence[int]) -> Iterator[Out]:
        """The whole result for these workers."""
        for chunk in range(len(self.wire.chunks)):
            for peer in to:
                yield self._out(peer, False, chunk)

    def numbers(self, chunk: int, body: Tensor) -> Tensor:
        """The numbers of a chunk in these bytes; ValueError if it has another size."""
        if not 0 <= chunk < len(self.wire.chunks):
            raise ValueError(f"chunk {chunk} is none of {len(self.wire.chunks)}")
        expected = self._view(chunk)
        if len(body) != expected.nbytes:
            raise ValueError(f"chunk {chunk} ({len(body)} bytes) must have {expected.nbytes}")
        return body.view(expected.dtype)

    def waiting(self) -> list[int]:
        """Children that have not brought everything."""
        return [child for child, got in self._got.items() if got < len(self.wire.chunks)]

    def _go_on(self) -> Iterator[Out]:
        assert self.place is not None
        while self._sent < len(self.wire.chunks) and all(
            got > self._sent for got in self._got.values()
        ):
            chunk, self._sent = self._sent, self._sent + 1
            if self.place.parent is None:
                if self._own_note and self._sent == len(self.wire.chunks):
                    self.note = self._own_note()
                yield from self._hand_down(chunk)
            else:
                yield self._out(self.place.parent, True, chunk)

    def _hand_down(self, chunk: int) -> Iterator[Out]:
        assert self.place is not None
        self._down = chunk + 1
        for child in self.place.children:
            yield self._out(child, False, chunk)
        self.done = self._down == len(self.wire.chunks)

    def _out(self, to: int, up: bool, chunk: int) -> Out:
        return Out(to, up, chunk, self.wire.memory(self.result, chunk), self.largest, self.note)

    def _view(self, chunk: int) -> Tensor:
        where = self.wire.chunks[chunk]
        return self.result[where.flat][where.span]
