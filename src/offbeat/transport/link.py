"""A link: one process group and one thread that issues its messages in plan order."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import TYPE_CHECKING

from torch import Tensor

from offbeat.plan import Transfer

if TYPE_CHECKING:
    from offbeat.transport.collectives import Collectives
    from offbeat.transport.device import Device, Mark

THREAD_PREFIX = "offbeat-link-"


class Flight:
    """One transfer in one iteration, from its release to its landing.

    `order` is its place among everything that the link ever issues, equal on all ranks.
    """

    __slots__ = (
        "_landed", "culprits", "end", "error", "iteration", "order", "released", "start",
        "tensors", "transfer",
    )  # fmt: skip

    def __init__(self, transfer: Transfer, iteration: int, order: int, tensors: Sequence[Tensor]):
        self.transfer = transfer
        self.iteration = iteration
        self.order = order
        self.tensors = tensors
        self.released: Mark | None = None
        self.start: Mark | None = None
        self.end: Mark | None = None
        self.error: BaseException | None = None
        self.culprits: list[int] = []  # ranks whose values were not finite
        # A bare lock is the cheapest thing to wait on; it is held until the flight lands.
        self._landed = threading.Lock()
        self._landed.acquire()

    def land(self) -> None:
        self._landed.release()

    def wait(self, timeout_s: float) -> bool:
        """Wait until landed; False on timeout. Any number of calls."""
        if not self._landed.acquire(timeout=timeout_s):
            return False
        self._landed.release()
        return True


class Link:
    """Issues flights in the order of their numbers, however they are released.

    torch.distributed matches collectives by issue order alone, so a flight released early waits
    here until everything before it has been issued: every rank issues the same sequence.
    `bytes_sent` counts what was averaged; each half of an all-reduce counts half.
    """

    def __init__(self, name: str, collectives: Collectives, device: Device):
        self.name = name
        self.bytes_sent = 0
        self.collectives = collectives
        # Goes round a transfer's collective; returns ranks whose values were not finite.
        self.guard: Callable[[Transfer, Tensor, Collectives], list[int]] | None = None
        self._device = device
        self._released: SimpleQueue[Flight | None] = SimpleQueue()
        self._next_order = 0
        self._thread = threading.Thread(
            target=self._issue, name=f"{THREAD_PREFIX}{name}", daemon=True
        )
        self._thread.start()

    def book(self, transfer: Transfer, iteration: int, tensors: Sequence[Tensor]) -> Flight:
        """The next place in the link's order; the flight starts once it is released."""
        flight = Flight(transfer, iteration, self._next_order, tensors)
        self._next_order += 1
        return flight

    def release(self, flight: Flight) -> None:
        """Let a flight start as soon as everything before it has been issued."""
        flight.released = self._device.mark()
        self._released.put(flight)

    def close(self, timeout_s: float = 2.0) -> bool:
        """Stop the thread; False if it is stuck in a collective."""
        self._released.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _issue(self) -> None:
        waiting: dict[int, Flight] = {}
        expected = 0
        failed: BaseException | None = None
        while (flight := self._released.get()) is not None:
            waiting[flight.order] = flight
            while (flight := waiting.pop(expected, None)) is not None:
                failed = self._fly(flight, failed)
                expected += 1

    def _fly(self, flight: Flight, failed: BaseException | None) -> BaseException | None:
        """Run one flight; after a failure every later one fails with the same cause."""
        try:
            if failed is None:
                flight.start, flight.end = self._device.run(flight.released, self._run, flight)
        except BaseException as error:
            failed = error
        flight.error = failed
        flight.land()
        return failed

    def _run(self, flight: Flight) -> None:
        verb = flight.transfer.verb
        for tensor in flight.tensors:
            if self.guard is None:
                self.collectives[verb](tensor)
            else:
                flight.culprits += self.guard(flight.transfer, tensor, self.collectives)
            self.bytes_sent += tensor.nbytes if verb == "mean" else tensor.nbytes // 2
