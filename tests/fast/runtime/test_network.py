"""A given profile against the network of the job: sizes of messages, and what counts."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from offbeat.core.measuring.network_check import FIRST_BYTES, LONG_S, TRIES, compare_link
from offbeat.profile import Bucket, Link, Profile

MB = 10**6
PROFILE = Profile(
    tuple(Bucket(f"h.{i}", 0.01, 0.02, 5 * MB) for i in range(4)),  # .12 s of compute, 20 MB
    (Link("net", 0.001, 25 * MB),),
    world_size=2,
)


@dataclass
class Network:
    """Messages of one link in virtual time."""

    latency_s: float
    bytes_per_s: float
    agreement_s: float = 0.0
    ranks: int = 2
    sent: list[int] = field(default_factory=list)
    clock_s: float = 0.0

    def read_clock(self) -> float:
        return self.clock_s

    def send(self, _: object, size_bytes: int) -> float:
        self.sent.append(size_bytes)
        # Some messages are disturbed; the first one opens connections.
        disturbed_s = {1: 1.0, 2: 0.3}.get(len(self.sent) % (TRIES + 1), 0.0)
        seconds = self.latency_s + size_bytes / self.bytes_per_s + disturbed_s
        self.clock_s += seconds
        return seconds

    def agree(self, values: list[float]) -> list[list[float]]:
        return [list(values)] * self.ranks


def compared(network: Network, profile: Profile = PROFILE) -> str | None:
    return compare_link(network, None, profile.links[0], profile)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("latency_s", "rate", "differs"),
    [
        (0.001, 25 * MB, False),
        (0.001, 15 * MB, False),  # less than twice as slow
        (0.001, 10 * MB, True),
        (0.001, 1.25 * MB, True),
        (0.001, 250 * MB, True),
        (0.2, 25 * MB, True),
    ],
)
def test_another_network_is_noticed(latency_s, rate, differs):
    assert (compared(Network(latency_s, rate)) is not None) == differs


def test_messages_grow_until_they_tell_the_rate():
    like = Network(0.001, 25 * MB)
    compared(like)
    assert like.sent[0] == FIRST_BYTES
    assert like.sent[-1] / like.bytes_per_s >= LONG_S > like.sent[-1] / 4 / like.bytes_per_s
    slow = Network(0.001, 0.1 * MB)
    compared(slow)
    assert set(slow.sent) == {FIRST_BYTES}  # nothing larger over a link that is so slow
    fast = Network(1e-5, 10_000 * MB)
    quick = Profile(PROFILE.buckets, (Link("net", 1e-5, 5_500 * MB),), world_size=2)
    assert compared(fast, quick) is None
    assert fast.sent[-1] == 20 * MB  # all gradients, at most


def test_what_training_cannot_feel_is_no_difference():
    """Four times as slow, but a hundredth of the compute."""
    quick = Profile(PROFILE.buckets, (Link("net", 1e-5, 20_000 * MB),), world_size=2)
    assert compared(Network(1e-5, 5_000 * MB), quick) is None
