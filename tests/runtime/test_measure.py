"""Measuring: fits, halves and contention, from real processes on the loopback."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from worlds import run_world

from offbeat.profile import Link
from offbeat.runtime.cluster import connect
from offbeat.runtime.flat_session import build_flat
from offbeat.runtime.measure import _rate, fit_link, measure_cluster
from offbeat.transport.device import CPU
from offbeat.transport.interfaces import LinkSpec

HOST = torch.device("cpu")


def measured(names: list[str], dtype: torch.dtype) -> tuple[Any, Any, dict[str, int]]:
    """Links and contention of a model with three layers; bytes that count as traffic."""
    dist.init_process_group("gloo")
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3))).to(dtype)
    specs = [LinkSpec(name, None, "gloo") for name in names]
    cluster = connect(specs, HOST, CPU(), 30.0)
    links, contention = measure_cluster(cluster, build_flat(model, None))
    sent = {name: link.bytes_sent for name, link in cluster.links.items()}
    assert cluster.close()
    return links, contention, sent


@pytest.mark.parametrize(
    ("names", "pairs", "dtype"),
    [
        (["a"], [("a", "a")], torch.bfloat16),
        (["a", "b", "c"], [("a", "a"), ("a", "b"), ("a", "c"), ("b", "c")], torch.float32),
    ],
)
def test_every_link_and_every_pair(
    names: list[str], pairs: list[tuple[str, str]], dtype: torch.dtype
) -> None:
    first, second = run_world(measured, 2, names, dtype)
    assert [c.links for c in first[1]] == pairs
    assert first[1] == second[1], "every rank has the same speeds"
    for links, contention, sent in (first, second):
        assert [link.name for link in links] == names
        for link in links:
            check(link)
        for c in contention:
            assert all(0 < speed <= 1 for speed in c.speeds)
        assert sent == dict.fromkeys([*names, "a#1"], 0)


def check(link: Link) -> None:
    assert set(link.halves) == {"reduce_scatter", "all_gather"}
    for latency_s, bytes_per_s in ((link.latency_s, link.bytes_per_s), *link.halves.values()):
        assert 0 <= latency_s < 1
        assert 0 < bytes_per_s < math.inf


def test_alone_there_is_nothing_to_share() -> None:
    [(links, contention, _)] = run_world(measured, 1, ["a", "b"], torch.float32)
    assert [link.name for link in links] == ["a", "b"]
    assert all(link.bytes_per_s > 0 and not link.halves for link in links)
    assert contention == ()


@given(
    latency=st.floats(0, 1),
    rate=st.floats(1e3, 1e12),
    sizes=st.lists(st.integers(1, 10**9), min_size=2, max_size=6, unique=True),
)
def test_a_fit_finds_what_made_the_times(latency: float, rate: float, sizes: list[int]) -> None:
    points = [(size, latency + size / rate) for size in sizes]
    link = fit_link("net", points)
    for size, seconds in points:
        assert link.latency_s + size / link.bytes_per_s == pytest.approx(seconds, rel=1e-3)


def test_rate_counts_what_is_cut_off_in_proportion() -> None:
    spans = [(0.0, 2.0), (2.0, 3.0), (4.0, 8.0)]
    assert _rate(spans, 0.0, 8.0) == pytest.approx(3 / 8)
    assert _rate(spans, 1.0, 5.0) == pytest.approx((1 / 2 + 1 + 1 / 4) / 4)
    assert _rate(spans, 3.0, 4.0) == 0
