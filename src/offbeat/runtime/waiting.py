"""Waiting for messages, never without end, and saying who was waited for."""

from __future__ import annotations

from offbeat.runtime.compute import Compute
from offbeat.storage.flat import Flat
from offbeat.transport.cluster import CLOSED
from offbeat.transport.control import Control
from offbeat.transport.device import Device
from offbeat.transport.link import Message


class Waiting:
    """Waits for messages. After a failure `require_alive` raises, as nothing can go on."""

    def __init__(self, device: Device, control: Control, timeout_s: float):
        self._device, self._control, self._timeout_s = device, control, timeout_s
        self._failure: BaseException | None = None
        self.closed = False
        self.compute = Compute()

    @property
    def failed(self) -> bool:
        return self._failure is not None

    def require_alive(self) -> None:
        """RuntimeError once a wait has failed, or the session is closed."""
        if self._failure is not None:
            raise RuntimeError("this worker has failed; start it again") from self._failure
        if self.closed:
            raise RuntimeError(CLOSED)

    def refuse(self, error: BaseException) -> None:
        """What has arrived must not be used."""
        self._failure = error
        raise error

    def wait(self, message: Message, flat: Flat) -> None:
        """Return when the message is there; RuntimeError in words if it failed or is too late."""
        limit_s = self._timeout_s + 5  # the group's own timeout speaks first
        if not message.done:
            if not message.wait(limit_s):
                self._fail(message, flat, f"did not arrive within {limit_s:.0f} s")
            self.compute.waited()
        if message.error is not None:
            self._fail(message, flat, f"failed: {message.error}")
        self._device.follow(message.end)

    def _fail(self, message: Message, flat: Flat, what: str) -> None:
        payload = message.transfer.payload
        run = payload.buckets
        names = [flat.buckets[b].name for b in (run.start, run.stop - 1)]
        between = names[0] if len(run) == 1 else f"{names[0]}..{names[1]}"
        ranks = message.transfer.ranks
        way = "" if ranks is None else f" from rank {ranks[0]} to rank {ranks[1]}"
        waited = ""
        if message.released is not None:
            now, released = self._device.mark(), message.released
            seconds = self._device.seconds(now) - self._device.seconds(released)
            waited = f" {seconds:.1f} s after its release"
        error = RuntimeError(
            f"rank {self._control.rank}: {payload.buffer} of bucket {between}{way} on "
            f"link {message.transfer.link!r} in iteration {message.iteration} {what}{waited}. "
            f"{self._control.behind()} Restart the missing ranks, or raise timeout_s "
            f"({self._timeout_s:g} s) if they are only slow."
        )
        self._failure = error
        raise error from message.error
