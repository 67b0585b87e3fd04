"""Messages beside compute: the difference measured, its cost, and the changes of a profile."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness.ranks import run_ranks
from torch import nn

from offbeat.core.measuring.timing import Budget
from offbeat.core.runtime.flat_session import build_flat
from offbeat.core.transport.cluster import connect
from offbeat.core.transport.device import CPU
from offbeat.core.transport.interfaces import LinkSpec
from offbeat.lab import beside_compute
from offbeat.lab.beside_compute import (
    MESSAGES,
    ROUNDS,
    ComputeLoad,
    measure_beside,
    measure_extra,
    with_extra,
)
from offbeat.plan import Payload
from offbeat.profile import Bucket, Link, Profile

RATE, LATENCY_S, MORE_S = 2e6, 1e-3, 3e-3
LINK = Link("net", LATENCY_S, RATE)
PROFILE = Profile((Bucket("a", 0.01, 0.02, 1 << 20),), (LINK,), 2, pace=8.0)


class Arithmetic:
    """A group of two ranks with computed times of messages, longer beside compute."""

    ranks, agreement_s = 2, 0.0

    def __init__(self) -> None:
        self.clock_s, self.sizes = 0.0, list[int]()

    def read_clock(self) -> float:
        return self.clock_s

    def send(self, _: Any, size_bytes: int) -> float:
        beside = any(t.name == "offbeat-compute" for t in threading.enumerate())
        seconds = LATENCY_S + size_bytes / RATE + beside * (MORE_S + size_bytes / 1e8)
        self.clock_s += seconds
        self.sizes.append(size_bytes)
        return seconds

    def agree(self, values: Sequence[float]) -> list[list[float]]:
        return [list(values)] * 2


def measured(budget_s: float) -> tuple[list[tuple[int, float]], Arithmetic]:
    probe = Arithmetic()
    budget = Budget(budget_s, float("inf"))
    return measure_extra(probe, lambda _: None, LINK, 1 << 20, PROFILE, budget), probe


def test_the_difference_to_messages_alone() -> None:
    extra, probe = measured(5.0)
    assert [size for size, _ in extra] == [8192, 32768, 131072]
    for size, seconds in extra:
        assert seconds == pytest.approx(MORE_S + size / 1e8)
    assert len(probe.sizes) == 3 * 2 * ROUNDS * (MESSAGES + 1)
    assert probe.clock_s < 5.5


@pytest.mark.parametrize(
    ("budget_s", "sizes"), [(1.6, [4096, 16384, 65536]), (0.3, [8192]), (0.01, [])]
)
def test_smaller_messages_where_the_budget_is_small(budget_s: float, sizes: list[int]) -> None:
    extra, probe = measured(budget_s)
    assert [size for size, _ in extra] == sizes
    assert probe.clock_s <= 1.3 * budget_s


def test_one_disturbed_round_does_not_count() -> None:
    class Disturbed(Arithmetic):
        def send(self, collective: Any, size_bytes: int) -> float:
            seconds = super().send(collective, size_bytes)
            second = len(self.sizes) % (2 * ROUNDS * (MESSAGES + 1)) // (2 * (MESSAGES + 1)) == 1
            return seconds + 0.05 * second * (len(self.sizes) % 2)

    budget = Budget(5.0, float("inf"))
    extra = measure_extra(Disturbed(), lambda _: None, LINK, 1 << 20, PROFILE, budget)
    for size, seconds in extra:
        assert seconds == pytest.approx(MORE_S + size / 1e8)


def test_messages_of_all_sizes_and_halves_take_longer() -> None:
    """Small ones as interpolated, larger ones as the largest measured, a half half of it."""
    before = Link(
        "net", 1e-3, 2e6,
        small=((4096, 4e-3), (65536, 40e-3)),
        halves={"all_gather": (5e-4, 4e6)},
        small_halves={"all_gather": ((4096, 2e-3),)},
        vote_s=1e-3,
    )  # fmt: skip
    after = with_extra(before, [(4096, 1e-3), (65536, 3e-3)])
    assert [size for size, _ in after.small] == [4096, 65536]
    assert [s for _, s in after.small] == pytest.approx([5e-3, 43e-3])
    assert after.latency_s == pytest.approx(4e-3)
    assert after.halves["all_gather"] == pytest.approx((2e-3, 4e6))
    assert after.small_halves["all_gather"][0][1] == pytest.approx(2.5e-3)
    assert (after.vote_s, after.bytes_per_s) == (1e-3, 2e6)
    assert with_extra(before, []) == before

    def seconds(link: Link, size: int) -> float:
        profile = Profile((Bucket("a", 0.1, 0.1, size),), (link,), 2)
        return profile.message_s(Payload("grad", range(1)), "net")

    assert seconds(after, 34816) - seconds(before, 34816) == pytest.approx(2e-3)
    assert seconds(after, 1 << 20) - seconds(before, 1 << 20) == pytest.approx(3e-3)


def test_a_host_computes_its_share_of_a_processor() -> None:
    """Never more than one of `pace`, however busy the machine."""
    begin_s, busy_s = time.perf_counter(), time.process_time()
    with ComputeLoad(PROFILE):
        time.sleep(0.6)
    share = (time.process_time() - busy_s) / (time.perf_counter() - begin_s)
    assert 0 < share < 2 / PROFILE.pace
    idle = Profile((Bucket("a", 0.0, 0.0, 1 << 20),), (LINK,), 2, pace=8.0)
    with ComputeLoad(idle):
        pass


def test_messages_inside_nodes_are_measured_too(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = []

    def note(_probe: Any, mean: str, link: Link, *_: Any) -> list[tuple[int, float]]:
        measured.append((link.name, mean))
        return [(1 << 16, 2e-3)]

    monkeypatch.setattr(beside_compute, "measure_extra", note)
    by_verb = {name: {"all_reduce": f"on {name}"} for name in ("net", "inside")}
    links = {n: SimpleNamespace(collectives=SimpleNamespace(by_verb=v)) for n, v in by_verb.items()}
    control = SimpleNamespace(world_size=4)
    cluster: Any = SimpleNamespace(
        control=control, links=links, probe_group=lambda _: None, device=None
    )
    flat: Any = SimpleNamespace(parameter_tensors=lambda: [torch.zeros(1)], sizes_bytes=[1 << 18])
    inside = replace(LINK, name="inside")
    bucket = Bucket("all", 0.02, 0.02, 1 << 18)
    profile = Profile((bucket,), (LINK,), 2, pace=8.0, topology=(2, 2), inside=inside)
    found = measure_beside(cluster, flat, profile)
    assert measured == [("net", "on net"), ("inside", "on inside")]
    for before, after in zip(profile.all_links, found.all_links, strict=True):
        assert after.name == before.name
        assert after.latency_s == pytest.approx(before.latency_s + 2e-3)


def of_ranks(pace: float) -> tuple[Profile, dict[str, int]]:
    dist.init_process_group("gloo")
    model = nn.Linear(256, 256)
    cluster = connect([LinkSpec("net", None, "gloo")], torch.device("cpu"), CPU(), 30.0)
    profile = Profile((Bucket("all", 0.02, 0.02, 1 << 18),), (LINK,), 2, pace=pace)
    found = measure_beside(cluster, build_flat(model, None), profile)
    sent = cluster.bytes_sent()
    assert cluster.close()
    return found, sent


def test_all_ranks_know_the_same() -> None:
    (one, sent), (other, _) = run_ranks(2, of_ranks, 8.0)
    assert one == other
    assert one.links[0].latency_s >= LATENCY_S
    assert sent == {"net": 0}
