"""Link: one process group, and one thread that issues its messages in plan order."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from queue import SimpleQueue
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from offbeat.core.plan import Transfer, Verb

if TYPE_CHECKING:
    from offbeat.core.transport.collectives import Collective, Collectives
    from offbeat.core.transport.device import Device, Mark

Guard = Callable[["Transfer", Tensor, "Mapping[Verb, Collective]"], list[int]]
THREAD_PREFIX = "offbeat-link-"


class Fate(Enum):
    """What has become of a message."""

    QUEUED = "queued"
    RELEASED = "released"
    ARRIVED = "arrived"
    SKIPPED = "skipped"
    FAILED = "failed"
    REPEATS = "repeats"  # the members of the job average it among themselves when it is due


class Contents(Protocol):
    """Where the tensors of a transfer's messages come from, and where their results go."""

    transfer: Transfer

    def take(self, message: Message, planned: int) -> Sequence[Tensor]:
        """Return the tensors of a message that is about to be released.

        Args:
            message: the message.
            planned: number of its iteration in the plan.
        """
        ...

    def put(self, message: Message) -> None:
        """Store the result of a message that has arrived."""

    def size_bytes(self, ranks: int) -> int:
        """Return the bytes of a message between `ranks` ranks."""
        ...


@dataclass(slots=True, eq=False)
class Message:
    """One transfer in one iteration.

    `order` is its number among all messages of the link, the same on all ranks.
    """

    transfer: Transfer
    iteration: int
    order: int
    contents: Contents | None = None  # None: nothing is to be stored, or no longer
    fate: Fate = Fate.QUEUED
    tensors: Sequence[Tensor] = ()
    errors: Sequence[Tensor] = ()  # encoding errors, to be stored with the result
    # Encodes, sends and decodes the tensors in place of the collective; returns the bytes sent.
    coded: Callable[[Message, Collectives], int] | None = None
    coded_bytes: int = 0  # bytes of the encoded payload
    sent_bytes: int = 0  # bytes that the link's own group has sent
    released: Mark | None = None
    released_s: float = 0.0  # `perf_counter` seconds of the host at the release
    start: Mark | None = None
    end: Mark | None = None
    error: BaseException | None = None
    culprits: Sequence[int] = ()  # ranks whose values were not finite
    settled: bool = False  # whether the members of the job have agreed on its fate
    copy: int | None = None  # copy of the buffer from which it was taken, until it is stored
    is_foreign: bool = False  # whether another member has sent its result after a failure
    # The lock is held until the message has arrived. A lock is cheaper than an event.
    _arrived: threading.Lock = field(default_factory=threading.Lock, init=False, repr=False)

    def __post_init__(self) -> None:
        self._arrived.acquire()

    def arrive(self, error: BaseException | None = None) -> None:
        """Let all calls of `wait` return, unless the members have agreed on the fate before."""
        if not self.settled and self.fate is not Fate.SKIPPED:
            self.error, self.fate = error, Fate.ARRIVED if error is None else Fate.FAILED
        self._arrived.release()

    @property
    def done(self) -> bool:
        """Whether the message has arrived, was skipped or has failed."""
        return not self._arrived.locked()

    @property
    def was_sent(self) -> bool:
        """Whether it has been released, and not been skipped since."""
        return self.released is not None and self.fate is not Fate.SKIPPED

    def forget_error(self) -> None:
        """Drop the frames of this message's error. They hold references to the process group of the
        link, which closes its connections only after the last reference."""
        error, seen = self.error, set[int]()
        while error is not None and id(error) not in seen:
            seen.add(id(error))
            error.__traceback__ = None
            error = error.__cause__ or error.__context__

    def settle(
        self,
        end: Mark,
        tensors: Sequence[Tensor] | None,
        *,
        repeats: bool = False,
        is_foreign: bool = False,
    ) -> None:
        """Set the outcome on which the members of the job have agreed after a failure.

        The thread of the link may still be blocked in the message, and may write its own tensors.

        Args:
            end: mark of the device's current time.
            tensors: result of the message; None if it has none yet.
            repeats: whether a message without a result is repeated; otherwise it is skipped.
            is_foreign: whether another member has sent the result.
        """
        self.settled, self.error, self.is_foreign = True, None, is_foreign
        if tensors is None:
            self.start = self.end = None
            self.fate = Fate.REPEATS if repeats else Fate.SKIPPED
        else:
            self.start = self.end = end
            self.tensors, self.fate = tensors, Fate.ARRIVED

    def wait(self, timeout_s: float) -> bool:
        """Wait until the message has arrived. Return False on timeout. May be called repeatedly."""
        if not self._arrived.acquire(timeout=timeout_s):
            return False
        self._arrived.release()
        return True


class MessageLink:
    """Numbers of messages, and execution of a single message.

    `bytes_sent` counts the bytes that the link's own group has sent. Each half of an all-reduce
    counts half.
    """

    def __init__(self, name: str, collectives: Collectives, device: Device):
        self.name = name
        self.bytes_sent = 0
        self.collectives = collectives
        # Runs the collective of a transfer; returns ranks with values that were not finite.
        self.guard: Guard | None = None
        # Whether the link keeps the last received message until it has received the next one. Then
        # all ranks have received the earlier message.
        self.keeps_last = False
        self._device = device
        self._next_order = 0

    def enqueue(
        self, transfer: Transfer, iteration: int, contents: Contents | None = None
    ) -> Message:
        """Return a message with the next number. It starts after `release`."""
        message = Message(transfer, iteration, self._next_order, contents)
        self._next_order += 1
        return message

    def release(self, message: Message, tensors: Sequence[Tensor]) -> None:
        """Let a message of these tensors start when all earlier messages have been issued."""
        message.tensors, message.fate = tensors, Fate.RELEASED
        message.released, message.released_s = self._device.mark(), time.perf_counter()
        self._submit(message)

    def skip(self, message: Message) -> None:
        """Skip a message without sending it, so that later messages can start."""
        message.fate = Fate.SKIPPED
        self._submit(message)

    def close(self, timeout_s: float = 2.0) -> bool:
        """Stop the link. Return False if it is blocked in a collective after `timeout_s`."""
        raise NotImplementedError

    def detach(self) -> Message | None:
        """Skip all messages that are released from now on.

        Returns:
            The last message whose result this rank has received, if `keeps_last`; otherwise None.
        """
        raise NotImplementedError

    def drop_group(self) -> None:
        """Drop the reference to the process group, which is then destroyed. The link must be
        closed."""
        self.collectives = replace(
            self.collectives,
            by_verb={},
            send=_refuse,
            swap=_refuse,
            exchange=_refuse,
            levels=None,
            is_any=bool,
            sent_bytes=lambda *_: 0,  # that of two levels refers to the collectives of both
        )

    def _submit(self, message: Message) -> None:
        """Accept a message that may start."""
        raise NotImplementedError

    def _send(self, message: Message) -> None:
        """Run the collective of a message, with its codec or the check for finite values."""
        t, act = message.transfer, self.collectives
        if message.coded is not None:
            sent = message.coded(message, act)
            # In nodes of several ranks each one sends a shard of the message.
            message.coded_bytes = sent if act.levels is None else sent * act.levels.owners
            if self.guard is None:
                message.culprits = ()
            between = act if act.levels is None else act.levels.column
            self._count(message, between.sent_bytes("all_reduce", sent))
            return
        for tensor in message.tensors:
            by_verb: Mapping[Verb, Collective] = act.by_verb
            if t.ranks is not None:
                one, other = t.ranks
                between = act.send if t.way is not None else act.swap
                by_verb = {t.verb: lambda x, a=one, b=other, run=between: run(x, a, b)}
                self._device.keep([tensor])  # a copy, for which the sender does not wait
            if self.guard is None:
                by_verb[t.verb](tensor)
            elif culprits := self.guard(t, tensor, by_verb):
                message.culprits = sorted({*message.culprits, *culprits})
            self._count(message, act.sent_bytes(t.verb, tensor.nbytes))

    def _count(self, message: Message, sent: int) -> None:
        message.sent_bytes += sent
        self.bytes_sent += sent


def _refuse(*_: object) -> None:
    raise RuntimeError("the process group of this link is destroyed")


class LinkThread(MessageLink):
    """Issues messages in the order of their numbers, in whatever order they are released.

    torch.distributed matches collectives by issue order alone. So a message waits until all earlier
    messages have been issued, and every rank issues the same sequence. A message that a vote skips
    keeps its number, and is not sent.
    """

    def __init__(self, name: str, collectives: Collectives, device: Device):
        super().__init__(name, collectives, device)
        self._last: Message | None = None
        self._expected = 0  # number of the next message to issue
        self._failed: BaseException | None = None
        self._held: Sequence[Tensor] = ()  # of the message that has failed
        self._changing = threading.Lock()  # of `_last` and `_detached`
        self._detached = False
        self._released: SimpleQueue[Message | None] = SimpleQueue()
        self._thread = threading.Thread(
            target=self._issue, name=f"{THREAD_PREFIX}{name}", daemon=True
        )
        self._thread.start()

    def close(self, timeout_s: float = 2.0) -> bool:
        self._released.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def detach(self) -> Message | None:
        with self._changing:
            self._detached = True
        self._released.put(None)
        return self._last

    def _submit(self, message: Message) -> None:
        if self._detached:
            message.fate = Fate.SKIPPED
            message.arrive()
        else:
            self._released.put(message)

    def _keep(self, message: Message) -> None:
        """Keep a received message, unless the link has been detached meanwhile."""
        with self._changing:
            if not self._detached:
                self._last = message

    def _issue(self) -> None:
        waiting: dict[int, Message] = {}
        while (message := self._released.get()) is not None:
            waiting[message.order] = message
            while (message := waiting.pop(self._expected, None)) is not None:
                self._failed = self._run(message, self._failed)
                self._expected += 1
        if self._failed is not None:
            # Copies of the failed message may still use its tensors and the group's pinned memory.
            self._device.finish()

    def _run(self, message: Message, failed: BaseException | None) -> BaseException | None:
        """Run one message. After a failure all later messages fail with the same error."""
        try:
            if failed is None and message.fate is not Fate.SKIPPED:
                message.start, message.end = self._device.run(message.released, self._send, message)
                # NCCL returns while its kernel still waits for other ranks. Waits for the message
                # have a timeout, so the message must not arrive before.
                self._device.await_mark(message.end)
                if self.keeps_last:
                    self._keep(message)
        except BaseException as error:
            failed, self._held = error, message.tensors
        message.arrive(failed)
        return failed
