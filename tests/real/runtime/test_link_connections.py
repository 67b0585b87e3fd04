"""Several connections per link: syntax, agreement, connections that are open, equal results."""

from __future__ import annotations

import os
import socket
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.distributed as dist
from harness.ranks import run_ranks, watch_ranks

from offbeat.core.measuring.network_check import compare_network
from offbeat.core.start.connecting import link_specs
from offbeat.core.start.launch_request import current_links
from offbeat.core.transport.cluster import connect
from offbeat.core.transport.collectives import PIECE_BYTES, pieces
from offbeat.core.transport.device import CPU
from offbeat.core.transport.interfaces import LinkSpec, parse_link
from offbeat.profile import Bucket, Link, Profile

HOST = torch.device("cpu")
ONE, THREE = LinkSpec("one", "lo", "gloo"), LinkSpec("three", "lo", "gloo", 3)
ESTABLISHED = 1  # tcp_states.h of Linux
SIZES = (1, PIECE_BYTES // 4, 50_001)  # float32 elements; the last message is split in all ways


# ---- in worlds ------------------------------------------------------------------------------


def established() -> int:
    """Established TCP connections of this process, without the table of all processes' connections,
    of which a read can miss rows while others change it."""
    count = 0
    for path in Path("/proc/self/fd").iterdir():
        try:
            with socket.socket(fileno=os.dup(int(path.name))) as s:
                if s.family == socket.AF_INET and s.type == socket.SOCK_STREAM:
                    state = s.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]
                    count += state == ESTABLISHED
        except OSError:  # no socket, or closed since
            continue
    return count


def send_on_both(verbs: list[str]) -> tuple[list[int], dict[str, list[bytes]]]:
    """Connections that each link has opened, and by link the bytes after every message."""
    dist.init_process_group("gloo")
    cluster = connect([ONE], HOST, CPU(), 30.0)
    rank, opened, results = dist.get_rank(), [], {}
    cluster.specs["three"] = THREE
    for name in ("one#1", "three"):
        before = established()
        cluster.open([name])
        act = cluster.links[name].collectives
        results[name] = []
        for size in SIZES:
            for verb in verbs:
                x = torch.randn(size, generator=torch.Generator().manual_seed(rank))
                if verb == "send" and rank < 2:
                    act.send(x, 0, 1)
                elif verb == "exchange":
                    act.exchange(x[: size // act.size * act.size])
                elif verb != "send":
                    act.by_verb[cast("Any", verb)](x)
                if verb == "reduce_scatter":  # all other elements are undefined
                    each = -(-size // act.size)
                    x = x[each * rank : each * (rank + 1)]
                results[name].append(x.numpy().tobytes())
        opened.append(established() - before)
    assert cluster.close()
    return opened, results


def connect_with(specs: list[LinkSpec]) -> None:
    dist.init_process_group("gloo")
    connect([specs[int(os.environ["RANK"])]], HOST, CPU(), 30.0).close()


# ---- syntax ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("eth0*1", LinkSpec("eth0", "eth0")),
        ("eth0*2", LinkSpec("eth0", "eth0", None, 2)),
        ("gloo:eth1*16", LinkSpec("gloo:eth1", "eth1", "gloo", 16)),
    ],
)
def test_number_of_connections_in_a_link(text: str, spec: LinkSpec) -> None:
    assert parse_link(text) == spec


@pytest.mark.parametrize("text", ["eth0*", "eth0*0", "eth0*-1", "eth0*x", "eth0*2*2", "gloo*2"])
def test_wrong_number_of_connections(text: str) -> None:
    with pytest.raises(ValueError, match=r"must read INTERFACE\*N with at least 1 connection"):
        parse_link(text)


def test_number_of_connections_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OFFBEAT_LINKS", "eth0*4,eth1")
    assert current_links() == [LinkSpec("eth0", "eth0", None, 4), LinkSpec("eth1", "eth1")]


def test_several_connections_need_gloo() -> None:
    with pytest.raises(ValueError) as caught:
        link_specs(["nccl:eth0*2"], torch.device("cuda"))
    assert "link 'nccl:eth0' (eth0) with 2 connections must use gloo; give gloo:eth0*2" in str(
        caught.value
    )
    assert link_specs(["eth0*2"], torch.device("cuda"))[0].connections == 2


@pytest.mark.parametrize(
    ("size_bytes", "count"),
    [(0, 1), (2 * PIECE_BYTES - 4, 1), (2 * PIECE_BYTES, 2), (9 * PIECE_BYTES, 3)],
)
def test_pieces_have_a_least_size(size_bytes: int, count: int) -> None:
    tensor = torch.arange(size_bytes // 4, dtype=torch.float32)
    parts = pieces(tensor, 3)
    assert len(parts) == count
    assert torch.equal(torch.cat(list(parts)), tensor)


# ---- links ----------------------------------------------------------------------------------


def test_every_rank_needs_the_same_number() -> None:
    specs = [LinkSpec("lo", "lo", "gloo", 2), LinkSpec("lo", "lo", "gloo")]
    for outcome in watch_ranks(2, connect_with, specs):
        assert outcome.kind == "ValueError", outcome.error
        assert "the connections of the links must be the same on all ranks: rank 0" in outcome.error


VERBS = ["all_reduce", "reduce_scatter", "all_gather", "broadcast", "exchange", "send"]


def test_connections_are_open_and_two_ranks_keep_all_bits() -> None:
    for opened, results in run_ranks(2, send_on_both, VERBS):
        assert opened == [1, 3]
        assert results["one#1"] == results["three"]


def test_three_ranks_have_equal_averages() -> None:
    """gloo adds the ranks' values in an order that depends on the place in the message."""
    ranks = run_ranks(3, send_on_both, VERBS)
    for opened, results in ranks:
        assert opened == [2, 6]
        for i, (one, three) in enumerate(zip(results["one#1"], results["three"], strict=True)):
            if VERBS[i % len(VERBS)] == "all_reduce":
                assert three == ranks[0][1]["three"][i], "replicas must stay identical"
                values = [np.frombuffer(x, dtype=np.float32) for x in (one, three)]
                np.testing.assert_allclose(*values, atol=1e-6)
            else:
                assert one == three


# ---- profile --------------------------------------------------------------------------------


def test_profile_of_another_number_is_of_another_network() -> None:
    link = Link("eth0", 1e-3, 1e8, connections=2)
    profile = Profile((Bucket("all", 1e-3, 1e-3, 1 << 16),), (link,), 2)
    assert Profile.from_dict(profile.to_dict()) == profile
    one = Profile(profile.buckets, (replace(link, connections=1),), 2)
    assert "connections" not in one.to_dict()["links"][0]
    with pytest.raises(ValueError, match=r"connections of link 'eth0' \(0\) must be at least 1"):
        replace(profile, links=(replace(link, connections=0),))
    cluster = SimpleNamespace(specs={"eth0": LinkSpec("eth0", "eth0")}, where=HOST)
    assert compare_network(cast("Any", cluster), profile) == (
        "the profile is of another network: connections of link 'eth0' are 1 between two "
        "ranks, 2 by the profile"
    )


def test_scalars_and_small_messages_are_not_divided() -> None:
    for tensor in (torch.tensor(1.0), torch.zeros(0), torch.zeros(3)):
        assert [piece.data_ptr() for piece in pieces(tensor, 4)] == [tensor.data_ptr()]
    large = torch.arange(4 * PIECE_BYTES, dtype=torch.uint8)
    assert torch.equal(torch.cat([*pieces(large, 4)]), large)
    assert len(pieces(large, 4)) == 4
