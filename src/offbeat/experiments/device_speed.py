"""Device whose compute a prediction assumes: that of the profile, or one that the user
describes."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Any

from offbeat.core.profile import Profile
from offbeat.core.profile.facts import scaled_compute


@dataclass(frozen=True)
class DeviceSpeed:
    """Speed of the compute device that the user describes by one of two values.

    Attributes:
        factor: speed relative to the measured machine without a pace, such as 20 for 20 times as
            fast; None if `iteration_s` is given.
        iteration_s: seconds of compute per iteration; None if `factor` is given.
    """

    factor: float | None = None
    iteration_s: float | None = None

    def __str__(self) -> str:
        """Return the value of `--device-speed`."""
        return f"{self.iteration_s:g}s" if self.factor is None else f"{self.factor:g}x"

    def relative_to(self, profile: Profile) -> float:
        """Return how many times as fast the device is as the compute times of a profile."""
        if self.factor is not None:
            return self.factor * (profile.pace or 1.0)
        assert self.iteration_s is not None
        return profile.compute_s / self.iteration_s

    def apply(self, profile: Profile) -> Profile:
        """Return the profile with the compute times of the device."""
        return with_device_speed(profile, self.relative_to(profile))


@dataclass(frozen=True)
class Compute:
    """Device that the compute times of a profile belong to.

    Attributes:
        pace: slowdown of emulated hosts relative to a core of the measured machine; 0 for none.
        device_speed: speed relative to the measured machine; None with a pace.
        iteration_s: seconds of compute per iteration.
    """

    pace: float
    device_speed: float | None
    iteration_s: float

    @classmethod
    def of(cls, profile: Profile, speed: DeviceSpeed | None = None) -> Compute:
        """Return the compute device of a profile, or the device that `speed` describes."""
        if speed is None:
            return cls(
                pace=profile.pace,
                device_speed=None if profile.pace else 1.0,
                iteration_s=profile.compute_s,
            )
        factor = speed.relative_to(profile)
        return cls(
            pace=0.0,
            device_speed=factor / (profile.pace or 1.0),
            iteration_s=profile.compute_s / factor,
        )

    @property
    def text(self) -> str | None:
        """Return one sentence about the device; None if the device is the measured machine."""
        seconds = f"{1e3 * self.iteration_s:.4g} ms of compute per iteration"
        if self.pace:
            return (
                f"these times are of hosts at 1/{self.pace:g} of a core ({seconds}), not of your "
                "device; --device-speed 20x or --device-speed 35ms predicts for it"
            )
        if self.device_speed != 1:
            return (
                f"these times are of a device {self.device_speed:.4g} times as fast as the "
                f"measured machine ({seconds}); encoding and messages are as measured"
            )
        return None

    def record(self) -> dict[str, Any]:
        """Return the fields and the text as JSON types."""
        return {**asdict(self), "text": self.text}


def with_device_speed(profile: Profile, speed: float) -> Profile:
    """Return the profile of devices that compute `speed` times as fast.

    Forward, backward, updates and the rest of the loop are scaled. Messages and codecs keep their
    measured times. The result has no pace: its times are those of the device, not of an emulated
    host.

    Raises:
        ValueError: `speed` is not finite or not above 0.
    """
    if not 0 < speed < math.inf:
        raise ValueError(f"speed ({speed:g}) of the device must be finite and above 0")
    times = scaled_compute(profile, 1 / speed)
    return replace(profile, other_s=profile.other_s / speed, pace=0.0, **times)
