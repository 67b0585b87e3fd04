"""Messages after a pause: the additional time, and the links for which it is measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness.ranks import run_ranks
from torch import nn

from offbeat.core.measuring import idle_links
from offbeat.core.measuring.idle_links import (
    MESSAGES,
    MOST_MESSAGE_S,
    measure_additional,
    measure_pauses,
    sizes_of,
    with_additional,
)
from offbeat.core.measuring.timing import Probe
from offbeat.core.runtime.flat_session import build_flat
from offbeat.core.transport.cluster import connect
from offbeat.core.transport.device import CPU
from offbeat.core.transport.interfaces import LinkSpec
from offbeat.profile import Bucket, Link, Profile

LATENCY_S, RATE, TRIP_S = 0.04, 2e6, 0.02
LINK = Link("net", LATENCY_S, RATE)
EXTRA = ((1000, 0.03), (100_000, 0.12))


class Pausing:
    """Two ranks whose messages take longer after a rest, and on rank 1 by a millisecond."""

    def __init__(self, disturbed: int = -1) -> None:
        self.rested, self.sizes, self.disturbed = False, list[int](), disturbed

    def rest(self) -> None:
        self.rested = True

    def send(self, _: Any, size_bytes: int) -> float:
        more_s = dict(EXTRA)[size_bytes] if self.rested else 0.0
        self.rested = False
        self.sizes.append(size_bytes)
        return LINK.all_reduce_s(size_bytes) + more_s

    def agree(self, values: Sequence[float]) -> list[list[float]]:
        return [list(values), [value + 1e-3 for value in values]]


def test_the_difference_to_messages_without_a_pause() -> None:
    probe = Pausing()
    sizes = [size for size, _ in EXTRA]
    extra = measure_additional(probe, lambda _: None, LINK, sizes, probe.rest)  # type: ignore[arg-type]
    assert [size for size, _ in extra] == sizes
    assert [s for _, s in extra] == pytest.approx([s + 5e-4 for _, s in EXTRA])
    assert probe.sizes == [size for size in sizes for _ in range(MESSAGES)]


def test_less_than_half_a_round_trip_is_noise() -> None:
    assert with_additional(LINK, [(1000, 0.009), (5000, -0.1)], 0.5, TRIP_S) == LINK
    changed = with_additional(LINK, [(1000, 0.009), (5000, 0.01)], 0.5, TRIP_S)
    assert changed == replace(LINK, pause_s=0.5, after_pause=((1000, 0.0), (5000, 0.01)))


def test_sizes_are_those_of_the_smallest_bucket_and_of_the_model() -> None:
    flat = build_flat(nn.Linear(256, 256), None)
    assert sizes_of(Link("net", 0.0, 1e9), flat) == [4 * 256, 4 * 257 * 256]
    assert sizes_of(Link("net", 0.0, 1e3), flat) == [4 * 256, int(MOST_MESSAGE_S * 1e3)]
    assert sizes_of(Link("net", 0.0, 1e2), flat) == [int(MOST_MESSAGE_S * 1e2)]


class Slow(Probe):
    """Messages that take a second longer than they do."""

    def send(self, collective: Any, size_bytes: int) -> float:
        return 1.0 + super().send(collective, size_bytes)


def of_ranks(cases: Sequence[tuple[float, float]]) -> tuple[list[Profile], dict[str, int]]:
    """Measure on the loopback, for seconds of the forward and latencies of a link of 1 MB/s."""
    idle_links.Probe, idle_links.MOST_PAUSE_S = Slow, 0.25  # type: ignore[misc]
    dist.init_process_group("gloo")
    cluster = connect([LinkSpec("net", None, "gloo")], torch.device("cpu"), CPU(), 30.0)
    flat, found = build_flat(nn.Linear(256, 256), None), []
    for forward_s, latency_s in cases:
        buckets = (Bucket("all", forward_s, 0.02, 1 << 18),)
        profile = Profile(buckets, (Link("net", latency_s, 1e6),), 2)
        found.append(measure_pauses(cluster, flat, profile))
    sent = cluster.bytes_sent()
    assert cluster.close()
    return found, sent


def test_all_ranks_know_the_same() -> None:
    """Only of distant links, if forwards are long: pauses of the forward, of at most .25 s here."""
    cases = [(0.22, 0.05), (3.0, 0.05), (3.0, 2.0), (0.19, 0.05), (3.0, 0.003)]
    (found, sent), (other, _) = run_ranks(2, of_ranks, cases)
    assert found == other
    assert sent == {"net": 0}
    links = [profile.links[0] for profile in found]
    assert [(link.pause_s, bool(link.after_pause)) for link in links] == [
        (0.22, True),
        (0.25, True),
        (0.0, False),  # a message takes 1 s, and 2.3 s without a pause
        (0.0, False),
        (0.0, False),
    ]
    assert [size for size, _ in links[0].after_pause] == [4 * 256, 4 * 257 * 256]
    assert all(seconds > 0 for _, seconds in links[0].after_pause)
    assert replace(links[0], pause_s=0.0, after_pause=()) == Link("net", 0.05, 1e6)
