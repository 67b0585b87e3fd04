"""ASC-WFBP: gradients sent as soon as they exist, in simultaneous messages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from offbeat.core.plan import Plan
from offbeat.core.profile import Profile
from offbeat.core.strategy.interface import require_count
from offbeat.strategies.compressible import Synchronous
from offbeat.strategies.solvers import simultaneous_fusion
from offbeat.strategies.wfbp import (
    channel_speeds,
    channels_bound_s,
    gradients_when_ready,
    message_seconds,
)


@dataclass(frozen=True)
class ASCWFBP(Synchronous):
    """Send gradients as WFBP does, with several messages at the same time.

    Messages use the channels of the default link in turn. A bucket is fused with the previous
    message only if that message still waits for its channel. Otherwise both messages are in flight
    together. The profile's `contention` describes how much simultaneous channels slow each other
    down.
    """

    groups: int = 2
    """Number of channels of the default link. Messages use them in turn."""

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

    def bound_s(self, profile: Profile) -> float:
        return channels_bound_s(profile, self.groups)
