"""Sums over all members of a graph, up a tree and down again, without sockets.

A worker forwards a chunk to its parent as soon as the sums of all its children have arrived, while
other chunks are still in transit. The result of the root is sent to all workers, so it is the same
bit for bit on all of them. If the tree changes, the reduction restarts from the original numbers of
each member.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from offbeat.gossip.chunks import Wire
from offbeat.gossip.view import Place


@dataclass(frozen=True)
class Output:
    """Chunk to send.

    Attributes:
        to: id of the receiver.
        up: whether the receiver is the parent; otherwise it is a child or another worker.
        chunk: number of the chunk.
        body: bytes of the chunk.
        largest: largest of the numbers `largest` known so far.
    """

    to: int
    up: bool
    chunk: int
    body: memoryview
    largest: float


class TreeReduction:
    """One tree reduction of one worker.

    Args:
        numbers: flat tensors on the host to be summed.
        largest: number whose maximum over all workers is computed.

    Attributes:
        result: sums over all workers, once `done`.
        largest: maximum over all workers, once `done`.
        done: whether all chunks of the result are known.
        place: place of this worker in the tree; None before `start`.
    """

    def __init__(self, numbers: Sequence[Tensor], largest: float):
        self._numbers, self._mine = numbers, largest
        self.wire = Wire(numbers)
        self.done = False
        self.place: Place | None = None

    def start(self, place: Place) -> Iterator[Output]:
        """Start or restart the reduction in a tree. Yield the chunks to send."""
        self.place = place
        self.result = [flat.clone() for flat in self._numbers]
        self.largest = self._mine
        self._got = dict.fromkeys(place.children, 0)
        self._sent = self._down = 0
        yield from self._send_ready_chunks()

    def add_child(self, child: int, chunk: int, body: Tensor, largest: float) -> Iterator[Output]:
        """Add the sum of a child to a chunk. Yield the chunks to send.

        Raises:
            ValueError: the chunk is out of order.
        """
        if self.place is None or self._got.get(child) != chunk:
            raise ValueError(f"chunk {chunk} of {child} is not expected now")
        self._got[child] += 1
        self._chunk_view(chunk).add_(body)
        self.largest = max(self.largest, largest)
        yield from self._send_ready_chunks()

    def take_result(self, chunk: int, body: Tensor, largest: float) -> Iterator[Output]:
        """Store the result of a chunk received from the parent. Yield the chunks to send.

        Raises:
            ValueError: the chunk is out of order.
        """
        if self.place is None or chunk != self._down:
            raise ValueError(f"result {chunk} is not expected now")
        self._chunk_view(chunk).copy_(body)
        self.largest = largest
        yield from self._send_down(chunk)

    @property
    def results(self) -> int:
        """Return the number of chunks with a known result."""
        return self._down

    def copy_result(self) -> None:
        """Copy the result buffers, so that a result from outside the tree does not overwrite queued
        chunks.
        """
        self.result = [flat.clone() for flat in self.result]

    def outputs(self, to: Sequence[int]) -> Iterator[Output]:
        """Yield all chunks of the result for the given workers."""
        for chunk in range(len(self.wire.chunks)):
            for peer in to:
                yield self._output(peer, False, chunk)

    def as_numbers(self, chunk: int, body: Tensor) -> Tensor:
        """Return the bytes of a chunk as numbers.

        Raises:
            ValueError: the number or the size of the chunk does not match.
        """
        if not 0 <= chunk < len(self.wire.chunks):
            raise ValueError(f"chunk {chunk} is none of {len(self.wire.chunks)}")
        expected = self._chunk_view(chunk)
        if len(body) != expected.nbytes:
            raise ValueError(f"chunk {chunk} ({len(body)} bytes) must have {expected.nbytes}")
        return body.view(expected.dtype)

    def incomplete_children(self) -> list[int]:
        """Return the children that have not sent all chunks."""
        return [child for child, got in self._got.items() if got < len(self.wire.chunks)]

    def _send_ready_chunks(self) -> Iterator[Output]:
        assert self.place is not None
        while self._sent < len(self.wire.chunks) and all(
            got > self._sent for got in self._got.values()
        ):
            chunk, self._sent = self._sent, self._sent + 1
            if self.place.parent is None:
                yield from self._send_down(chunk)
            else:
                yield self._output(self.place.parent, True, chunk)

    def _send_down(self, chunk: int) -> Iterator[Output]:
        assert self.place is not None
        self._down = chunk + 1
        for child in self.place.children:
            yield self._output(child, False, chunk)
        self.done = self._down == len(self.wire.chunks)

    def _output(self, to: int, up: bool, chunk: int) -> Output:
        return Output(to, up, chunk, self.wire.memory(self.result, chunk), self.largest)

    def _chunk_view(self, chunk: int) -> Tensor:
        where = self.wire.chunks[chunk]
        return self.result[where.flat][where.span]
