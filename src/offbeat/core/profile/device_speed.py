"""Device whose compute a prediction assumes: that of the profile, or one that the user
describes."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from offbeat.core.profile.elsewhere import with_device_speed
from offbeat.core.profile.facts import Profile


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

    def relative_to(self, profile: Profile) -> float:
        """Return how many times as fast the device is as the compute times of a profile."""
        if self.factor is not None:
            return self.factor * (profile.pace or 1.0)
        assert self.iteration_s is not None
        return compute_s(profile) / self.iteration_s

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
                iteration_s=compute_s(profile),
            )
        factor = speed.relative_to(profile)
        return cls(
            pace=0.0,
            device_speed=factor / (profile.pace or 1.0),
            iteration_s=compute_s(profile) / factor,
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


def compute_s(profile: Profile) -> float:
    """Return the seconds of compute per iteration of a rank, without any message."""
    return profile.forward_s + profile.backward_s + profile.update_s + profile.other_s
