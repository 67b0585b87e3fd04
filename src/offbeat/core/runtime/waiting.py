"""Bounded waits for messages, with errors that name the ranks that block the wait."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from torch import Tensor

from offbeat.core.buckets.flat import Flat
from offbeat.core.codecs.average import OriginError
from offbeat.core.observers import Observer
from offbeat.core.transport.control import Control
from offbeat.core.transport.device import Device, Mark
from offbeat.core.transport.link import Fate, Message
from offbeat.elastic.repeated_averages import RepeatedAverages

LOOK_EVERY_S = 0.5  # seconds between two checks for failures of other ranks


class Waiting:
    """Waits for messages.

    Args:
        device: device of this rank.
        control: control of the job.
        timeout_s: seconds after which a wait fails.
        observers: are told of the end of each wait.
        fail: stops this rank; called with each failure before it is raised.
    """

    def __init__(
        self,
        device: Device,
        control: Control,
        timeout_s: float,
        observers: Observer,
        fail: Callable[[BaseException], None],
    ):
        self._device, self._control, self._timeout_s = device, control, timeout_s
        self._observers, self._fail_rank = observers, fail
        self.since_s: float | None = None  # monotonic start of the wait for a message, if one runs
        self.repeated = RepeatedAverages(control)
        # Agrees with the other members of the job on the outcome of all messages after a failed
        # wait. Raises the failure, which is its argument, if this rank cannot continue.
        self.recover: Callable[[RuntimeError], None] | None = None

    def fail_with(self, error: BaseException) -> None:
        """Record an error in an arrived message as the failure of this rank, and raise it."""
        self._fail_rank(error)
        raise error

    def repeat(self, tensors: Sequence[Tensor], *, inside: bool) -> list[Tensor]:
        """Return averages over the survivors of a failure; see `RepeatedAverages.average`."""
        try:
            return self.repeated.average(tensors, inside=inside)
        except BaseException as error:
            self._fail_rank(error)
            raise

    def mark(self) -> Mark:
        """Return a mark of the device's current time."""
        return self._device.mark()

    def wait(self, message: Message, flat: Flat) -> None:
        """Wait until a message has arrived. Raise RuntimeError if the message fails or the timeout
        passes."""
        if not message.done and not message.settled:
            with self._control.waiting(lambda: f"waiting for {_describe_message(message, flat)}"):
                self._await(message, flat)
            self._observers.waited()
        if message.fate is Fate.FAILED:
            passed_s = _seconds_since_release(message)
            after = "" if passed_s is None else f", {passed_s:.1f} s after its release"
            # All ranks find that their anchors differ, which another epoch would not change.
            recovers = not isinstance(message.error, OriginError)
            self._fail(message, flat, f"failed{after}: {message.error}", recovers=recovers)
        if message.fate in (Fate.SKIPPED, Fate.REPEATS):
            return
        self._device.follow(message.end)
        if message.coded is not None:  # the thread of the link has allocated the decoded tensors
            self._device.keep([*message.tensors, *message.errors])

    def _await(self, message: Message, flat: Flat) -> None:
        self.since_s = begun_s = time.monotonic()
        while not message.settled and not message.wait(LOOK_EVERY_S):
            if (problem := self._problem(begun_s)) is not None:
                self._fail(message, flat, problem)
        self.since_s = None

    def _problem(self, begun_s: float) -> str | None:
        """Return why a message will not arrive that is awaited since then; None if it may."""
        if time.monotonic() - begun_s >= self._timeout_s:
            return f"has not arrived in {self._timeout_s:g} s"
        if self._control.needs_abort:
            return "will not arrive: another rank has failed or given up"
        if self.recover is not None and self._control.has_lost_store:
            return "may not arrive: the store of the ranks is lost"
        return None

    def _fail(self, message: Message, flat: Flat, what: str, *, recovers: bool = True) -> None:
        if self.recover is not None and recovers:
            described = f"rank {self._control.rank}: {_describe_message(message, flat)} {what}"
            try:
                self.recover(RuntimeError(described))
            except BaseException as error:
                self._fail_rank(error)
                raise
            return
        waited_s = _seconds_since_release(message) or 0.0
        error = RuntimeError(
            f"rank {self._control.rank}: {_describe_message(message, flat)} {what}. "
            f"{self._control.report_failure(waited_s=waited_s)}"
        )
        self._fail_rank(error)
        raise error from message.error


def _seconds_since_release(message: Message) -> float | None:
    """Return the seconds since the release of a message; None if it is not released.

    The host's clock is used, because the device may be waiting for a rank that has died.
    """
    return None if message.released is None else time.perf_counter() - message.released_s


def _describe_message(message: Message, flat: Flat) -> str:
    payload = message.transfer.payload
    run = payload.buckets
    names = [flat.buckets[b].name for b in (run.start, run.stop - 1)]
    between = names[0] if len(run) == 1 else f"{names[0]}..{names[1]}"
    ranks, way = message.transfer.ranks, ""
    if ranks is not None:
        words = ("from", "to") if message.transfer.way else ("between", "and")
        way = f" {words[0]} rank {ranks[0]} {words[1]} rank {ranks[1]}"
    return (
        f"{payload.buffer} of bucket {between}{way} on link {message.transfer.link!r} in "
        f"iteration {message.iteration}"
    )
