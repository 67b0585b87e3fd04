"""The device whose compute a prediction is for: that of the profile, or the user's."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from offbeat.core.profile.elsewhere import with_device_speed
from offbeat.core.profile.facts import Profile


@dataclass(frozen=True)
class DeviceSpeed:
    """The compute of the user's device: `times` as fast as the measured machine without a pace, or
    `iteration_s` seconds of compute per iteration; one of the two."""

    times: float | None = None
    iteration_s: float | None = None

    def of(self, profile: Profile) -> float:
        """How many times as fast as the profile the device computes."""
        if self.times is not None:
            return self.times * (profile.pace or 1.0)
        assert self.iteration_s is not None
        return compute_s(profile) / self.iteration_s

    def apply(self, profile: Profile) -> Profile:
        """The profile on the device."""
        return with_device_speed(profile, self.of(profile))


@dataclass(frozen=True)
class Compute:
    """Whose compute the times of a profile hold.

    `pace`: that of hosts at 1/pace of a core of the measured machine; 0: not slowed down.
    `device_speed`: how many times as fast as that machine, None with a pace. `iteration_s`: seconds
    of compute per iteration.
    """

    pace: float
    device_speed: float | None
    iteration_s: float

    @classmethod
    def of(cls, profile: Profile, speed: DeviceSpeed | None = None) -> Compute:
        """The compute of a profile, or of the user's device."""
        if speed is None:
            return cls(profile.pace, None if profile.pace else 1.0, compute_s(profile))
        times = speed.of(profile)
        return cls(0.0, times / (profile.pace or 1.0), compute_s(profile) / times)

    @property
    def text(self) -> str | None:
        """One sentence if the compute is not that of the measured machine."""
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
        """Plain data for JSON."""
        return {**asdict(self), "text": self.text}


def compute_s(profile: Profile) -> float:
    """Seconds of compute per iteration of a rank, without any message."""
    return profile.forward_s + profile.backward_s + profile.update_s + profile.other_s
