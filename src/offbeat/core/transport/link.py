"""A link: one process group and one thread that issues its messages in plan order."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from queue import SimpleQueue
from typing import TYPE_CHECKING

from torch import Tensor

from offbeat.core.plan import Transfer, Verb

if TYPE_CHECKING:
    from offbeat.core.transport.collectives import Collective, Collectives
    from offbeat.core.transport.device import Device, Mark

Guard = Callable[["Transfer", Tensor, "Mapping[Verb, Collective]"], list[int]]
Coded = Callable[..., "tuple[Sequence[Tensor], Sequence[int], int]"]
"""Encodes, sends and decodes a message: what arrives, ranks whose values were not finite, bytes."""
THREAD_PREFIX = "offbeat-link-"


class Message:
    """One transfer in one iteration, from its place in the link's order to its arrival.

    `order` is its place among everything that the link ever issues, equal on all its ranks.
    """

    __slots__ = (
        "_arrived", "coded", "culprits", "end", "error", "iteration", "order", "passed", "released",
        "sent_bytes", "start", "tensors", "transfer",
    )  # fmt: skip

    def __init__(self, transfer: Transfer, iteration: int, order: int):
        self.transfer = transfer
        self.iteration = iteration
        self.order = order
        self.tensors: Sequence[Tensor] = ()
        self.coded: Coded | None = None  # what goes round in place of the tensors
        self.sent_bytes = 0  # that the link's own group has sent
        self.passed = False
        self.released: Mark | None = None
        self.start: Mark | None = None
        self.end: Mark | None = None
        self.error: BaseException | None = None
        self.culprits: Sequence[int] = ()  # ranks whose values were not finite
        # A bare lock is the cheapest thing to wait on; it is held until the message has arrived.
        self._arrived = threading.Lock()
        self._arrived.acquire()

    def arrive(self) -> None:
        """Let waits return."""
        self._arrived.release()

    @property
    def done(self) -> bool:
        """Whether it has arrived."""
        return not self._arrived.locked()

    def wait(self, timeout_s: float) -> bool:
        """Wait until arrived; False on timeout. Any number of calls."""
        if not self._arrived.acquire(timeout=timeout_s):
            return False
        self._arrived.release()
        return True


class Link:
    """Issues messages in the order of their numbers, however they are released.

    torch.distributed matches collectives by issue order alone, so a message released early waits
    here until everything before it has been issued: every rank issues the same sequence. What a
    vote passes over keeps its number, and nothing is sent.
    `bytes_sent` counts the bytes of messages that the link's own group has sent; each half of an
    all-reduce counts half.
    """

    def __init__(self, name: str, collectives: Collectives, device: Device):
        self.name = name
        self.bytes_sent = 0
        self.collectives = collectives
        # Goes round a transfer's collective; returns ranks whose values were not finite.
        self.guard: Guard | None = None
        self.leaves_out = False  # of codes: whether ranks with values not finite count not
        self._device = device
        self._released: SimpleQueue[Message | None] = SimpleQueue()
        self._next_order = 0
        self._thread = threading.Thread(
            target=self._issue, name=f"{THREAD_PREFIX}{name}", daemon=True
        )
        self._thread.start()

    def enqueue(self, transfer: Transfer, iteration: int) -> Message:
        """The next place in the link's order; the message starts once it is released."""
        message = Message(transfer, iteration, self._next_order)
        self._next_order += 1
        return message

    def release(
        self, message: Message, tensors: Sequence[Tensor], coded: Coded | None = None
    ) -> None:
        """Let a message of these tensors start as soon as everything before it was issued."""
        message.tensors, message.coded = tensors, coded
        message.released = self._device.mark()
        self._released.put(message)

    def pass_over(self, message: Message) -> None:
        """Let the messages behind this one go; it is not sent."""
        message.passed = True
        self._released.put(message)

    def close(self, timeout_s: float = 2.0) -> bool:
        """Stop the thread; False if it is stuck in a collective."""
        self._released.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _issue(self) -> None:
        waiting: dict[int, Message] = {}
        expected = 0
        failed: BaseException | None = None
        while (message := self._released.get()) is not None:
            waiting[message.order] = message
            while (message := waiting.pop(expected, None)) is not None:
                failed = self._run(message, failed)
                expected += 1

    def _run(self, message: Message, failed: BaseException | None) -> BaseException | None:
        """Run one message; after a failure every later one fails with the same cause."""
        try:
            if failed is None and not message.passed:
                message.start, message.end = self._device.run(message.released, self._send, message)
        except BaseException as error:
            failed = error
        message.error = failed
        message.arrive()
        return failed

    def _send(self, message: Message) -> None:
        t, act = message.transfer, self.collectives
        if message.coded is not None:
            message.tensors, culprits, sent = message.coded(act, leaves_out=self.leaves_out)
            if self.guard is not None:
                message.culprits = culprits
            self._count(message, act.sent_bytes("all_reduce", sent))
            return
        for tensor in message.tensors:
            by_verb: Mapping[Verb, Collective] = act.by_verb
            if t.ranks is not None:
                source, target = t.ranks
                by_verb = {t.verb: lambda x, a=source, b=target: act.send(x, a, b)}
            if self.guard is None:
                by_verb[t.verb](tensor)
            elif culprits := self.guard(t, tensor, by_verb):
                message.culprits = [*message.culprits, *culprits]
            self._count(message, act.sent_bytes(t.verb, tensor.nbytes))

    def _count(self, message: Message, sent: int) -> None:
        message.sent_bytes += sent
        self.bytes_sent += sent
