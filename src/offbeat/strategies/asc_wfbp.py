"""ASC-WFBP: gradients leave at once, beside messages that are still under way."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from offbeat.core.plan import Plan
from offbeat.core.profile import Profile
from offbeat.core.strategy.interface import require_count
from offbeat.core.verify.equations import Equations, synchronous
from offbeat.strategies.compressible import Wired
from offbeat.strategies.solvers import simultaneous_fusion
from offbeat.strategies.wfbp import gradients_when_ready, message_seconds


@dataclass(frozen=True)
class ASCWFBP(Wired):
    """WFBP that sends a second message beside the first instead of after it.

    Messages take the channels of the default link in turn. A bucket joins the message before it
    only if that one still waits for its channel; otherwise both are sent at the same time. What
    channels lose to each other is the profile's `contention`.
    """

    groups: int = 2
    """Channels of the default link that messages take in turn."""

    name: ClassVar[str] = "asc-wfbp"
    citation: ClassVar[str] = (
        "Shi et al., Exploiting Simultaneous Communications to Accelerate Data Parallel "
        "Distributed Deep Learning, INFOCOM 2021"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        require_count("groups", self.groups, remedy="use WFBP() for one message at a time")

    def schedule(self, profile: Profile) -> Plan:
        slowest = profile.slowest()
        groups, _ = simultaneous_fusion(
            slowest.ready_s, message_seconds(slowest), channel_speeds(slowest, self.groups)
        )
        return gradients_when_ready(self.name, profile, groups, self.groups)

    def equations(self, plan: Plan) -> Equations:
        return synchronous()

    def bound_s(self, profile: Profile) -> float:
        """`max(F + B, C / rate)`, rate: the most that any number of the channels carry."""
        slowest = profile.slowest()
        speeds = channel_speeds(slowest, self.groups)
        rate = max(count * speed for count, speed in enumerate(speeds, start=1))
        everything_s = message_seconds(slowest)(range(len(slowest.buckets)))
        compute_s = slowest.forward_s + slowest.backward_s + slowest.update_s + slowest.other_s
        return max(compute_s, everything_s / rate)


def channel_speeds(profile: Profile, channels: int) -> list[float]:
    """Speed of each of 1, 2, ... channels of the default link while all of them carry messages."""
    link = profile.default_link.name
    return [profile.speed(link, [link] * others) for others in range(channels)]
