"""Landing: waiting for flights, never without end, and saying who was waited for."""

from __future__ import annotations

from offbeat.runtime.flat import Flat
from offbeat.transport.control import Control
from offbeat.transport.device import Device
from offbeat.transport.link import Flight


class Landing:
    """Waits for flights. After a failure `require_alive` raises, as nothing can go on."""

    def __init__(self, device: Device, control: Control, timeout_s: float):
        self._device, self._control, self._timeout_s = device, control, timeout_s
        self._failure: BaseException | None = None

    @property
    def failed(self) -> bool:
        return self._failure is not None

    def require_alive(self) -> None:
        """RuntimeError once a wait has failed."""
        if self._failure is not None:
            raise RuntimeError("this worker has failed; start it again") from self._failure

    def refuse(self, error: BaseException) -> None:
        """What has landed must not be used."""
        self._failure = error
        raise error

    def wait(self, flight: Flight, flat: Flat) -> None:
        """Return when the flight has landed; RuntimeError in words if it failed or is too late."""
        limit_s = self._timeout_s + 5  # the group's own timeout speaks first
        if not flight.wait(limit_s):
            self._fail(flight, flat, f"did not land within {limit_s:.0f} s")
        if flight.error is not None:
            self._fail(flight, flat, f"failed: {flight.error}")
        self._device.follow(flight.end)

    def _fail(self, flight: Flight, flat: Flat, what: str) -> None:
        run = flight.transfer.payload.buckets
        names = [flat.buckets[b].name for b in (run.start, run.stop - 1)]
        between = names[0] if len(run) == 1 else f"{names[0]}..{names[1]}"
        waited = ""
        if flight.released is not None:
            now, released = self._device.mark(), flight.released
            seconds = self._device.seconds(now) - self._device.seconds(released)
            waited = f" {seconds:.1f} s after its release"
        error = RuntimeError(
            f"rank {self._control.rank}: {flight.transfer.payload.kind} of bucket {between} on "
            f"link {flight.transfer.link!r} in iteration {flight.iteration} {what}{waited}. "
            f"{self._control.behind()} Restart the missing ranks, or raise timeout_s "
            f"({self._timeout_s:g} s) if they are only slow."
        )
        self._failure = error
        raise error from flight.error
