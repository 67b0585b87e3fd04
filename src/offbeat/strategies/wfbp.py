"""WFBP: wait-free backpropagation, and fusion of buckets into messages."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal

from offbeat.core.plan import Moment, Payload, Plan, channel, local, transfer
from offbeat.core.profile import Profile
from offbeat.core.strategy.interface import Strategy, synchronous_bound_s
from offbeat.strategies.compressible import Synchronous, with_wires
from offbeat.strategies.solvers import (
    Fusion,
    MessageSeconds,
    cap_fusion,
    delaying_fusion,
    greedy_fusion,
    no_fusion,
    optimal_fusion,
)

MIB = 1024 * 1024
DDP_CAP_BYTES = 25 * MIB
DDP_FIRST_CAP_BYTES = MIB


@dataclass(frozen=True)
class WFBP(Synchronous):
    """Send gradients as soon as they exist, first in first out; the step waits for all messages."""

    fusion: Literal["none", "ddp", "mg-wfbp", "optimal"] = "optimal"
    """Fusion of neighbouring buckets into messages: `none`, by size as in DDP (`ddp`: 25 MB, the
    first message 1 MB), greedy (`mg-wfbp`) or exact (`optimal`). `optimal` includes the processor
    time that messages take from compute."""

    name: ClassVar[str] = "wfbp"
    citation: ClassVar[str] = (
        "Zhang et al., Poseidon, USENIX ATC 2017; fusion: Shi et al., MG-WFBP, INFOCOM 2019"
    )

    @classmethod
    def suggestions(cls, profile: Profile, max_staleness: int) -> Iterable[Strategy]:
        return with_wires([cls()])

    def schedule(self, profile: Profile) -> Plan:
        groups = _FUSIONS[self.fusion](profile.slowest())
        return gradients_when_ready(self.name, profile, groups)

    def bound_s(self, profile: Profile) -> float:
        return synchronous_bound_s(profile, fused=self.fusion != "none")


def gradients_when_ready(name: str, profile: Profile, groups: Fusion, channels: int = 1) -> Plan:
    """Return the plan that sends each group of gradients as soon as the gradient of its last bucket
    exists.

    Groups use `channels` channels of the default link in turn.
    """
    transfers = tuple(
        transfer(
            "grad",
            group,
            after=Moment("grad", group[-1]),
            before=Moment("step"),
            phases=[0],
            link=channel(profile.default_link.name, i % channels),
        )
        for i, group in enumerate(groups)
    )
    size = len(profile.buckets)
    return Plan(name, size, transfers, (local(size, Moment("step"), [0]),))


def channel_speeds(profile: Profile, channels: int) -> list[float]:
    """Return the speed of each channel of the default link while 1, 2, ... channels are in use."""
    link = profile.default_link.name
    return [profile.speed(link, [link] * others) for others in range(channels)]


def channels_bound_s(profile: Profile, channels: int) -> float:
    """Return a lower bound, in seconds per iteration, of plans of `gradients_when_ready`.

    The bound is `max(F + B, C / rate)`; `rate` is the highest total rate of any number of channels.
    If channels share only the time of bytes, C is the time of all bytes, at the rate of the link.
    """
    slowest, link = profile.slowest(), profile.default_link.name
    if profile.shares_rate_only(link):
        everything_s = sum(slowest.transfer_s(link))
    else:
        speeds = channel_speeds(slowest, channels)
        rate = max(count * speed for count, speed in enumerate(speeds, start=1))
        everything_s = message_seconds(slowest)(range(len(slowest.buckets))) / rate
    compute_s = slowest.forward_s + slowest.backward_s + slowest.update_s + slowest.other_s
    return max(compute_s, everything_s)


def gradients_when_ready_s(profile: Profile, plan: Plan) -> float:
    """Return the seconds per iteration of a plan of `gradients_when_ready` on one link."""
    ready_s = profile.ready_s
    end_s = 0.0
    for t in plan.transfers:
        start_s = max(end_s, ready_s[t.payload.buckets[-1]])
        end_s = start_s + profile.message_s(t.payload, t.link)
    local_s = profile.other_s + profile.forward_s + profile.update_s
    return local_s + max(profile.backward_s, end_s)


def fuse_as_ddp(profile: Profile) -> Fusion:
    """Return the groups of DDP with torch's default caps."""
    sizes = [bucket.size_bytes for bucket in profile.buckets]
    return cap_fusion(sizes, DDP_CAP_BYTES, DDP_FIRST_CAP_BYTES)


def _fuse_optimally(profile: Profile) -> Fusion:
    link = profile.default_link
    messages_ending_s = partial(profile.messages_ending_s, link.name, "grad")
    if not link.cpu_s_per_message:
        return optimal_fusion(profile.ready_s, messages_ending_s)
    sending_s = [link.cpu_s_per_byte * b.payload_bytes("grad") for b in profile.buckets]
    return delaying_fusion(profile.ready_s, messages_ending_s, link.cpu_s_per_message, sending_s)


def message_seconds(profile: Profile) -> MessageSeconds:
    """Return a function of a group of neighbouring buckets: seconds of its gradient message on the
    default link."""
    link = profile.default_link.name
    return lambda group: profile.message_s(Payload("grad", group), link)


_FUSIONS: dict[str, Callable[[Profile], Fusion]] = {
    "none": lambda profile: no_fusion(len(profile.buckets)),
    "ddp": fuse_as_ddp,
    "mg-wfbp": lambda profile: greedy_fusion(profile.ready_s, message_seconds(profile)),
    "optimal": _fuse_optimally,
}
