"""Strategies of gossip: what they are called, what they refuse, what is predicted."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import networkx as nx
import pytest
from cases.strategy_lists import ALL

from offbeat import A2CiD2, Profile, sim
from offbeat.cli import main
from offbeat.core.sim.ranks import Ranks
from offbeat.profile import Bucket, CodecSpeed, Link
from offbeat.strategies import create


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"rate": 0}, r"rate \(0\) must be a finite number above 0"),
        ({"rate": -1.0}, r"rate \(-1.0\)"),
        ({"silent_s": float("inf")}, "silent_s"),
        ({"weights": "lively"}, "did you mean 'live'"),
        ({"wire": "int3"}, r"wire \('int3'\) must be one of none, bf16"),
        ({"wire": "powersgd:4"}, "must be none, bf16, fp16, int8, int4: gossip may amplify"),
        ({"wire": "topk:0.01"}, "go apart; use wire='int4'"),
        ({"topology": ""}, "topology"),
        ({"topology": 3}, r"topology \(3\) must be the name of one, edges as in"),
        ({"topology": [(0, "b")]}, "must be the name of one"),
    ],
)
def test_settings_that_cannot_be(settings: dict, words: str) -> None:
    for name in ("a2cid2", "ad-psgd"):
        with pytest.raises(ValueError, match=words):
            create(name, settings)


def test_a_topology_is_text() -> None:
    """Settings are compared between ranks, written and read again."""
    for given in ([(1, 0), (2, 1)], nx.path_graph(3), "0-1,1-2"):
        assert A2CiD2(given).topology == "0-1,1-2"  # type: ignore[arg-type]


def test_only_momentum_can_be_exchanged_before_mixing() -> None:
    assert create("a2cid2", {"exchange": "before_mixing"}) == A2CiD2(exchange="before_mixing")
    with pytest.raises(ValueError, match="exchange"):
        create("ad-psgd", {"exchange": "before_mixing"})
    assert {"a2cid2", "ad-psgd"} <= set(ALL)


PROFILE = Profile(
    (Bucket("a", 0.1, 0.2, 4000),), (Link("net", 0.0, 1e5),), 4, rank_scale=(1.0, 1.0, 2.0, 1.0)
)


def test_a_measured_topology_is_predicted_from_the_links_of_ranks() -> None:
    """Equal ones make all pairs. A rank with a thin link gets fewer partners."""

    def partners(ranks: Ranks) -> list[int]:
        profile = replace(PROFILE, world_size=6, rank_scale=())
        found = sim.predict(A2CiD2("measured"), profile, ranks=ranks)
        pairs = found.trace.notes["gossip"]["pairs"]
        return [sum(n in pair[:2] for pair in pairs) for n in range(6)]

    assert partners(Ranks()) == [5] * 6
    thin = partners(Ranks(link_rates={"net": (1.0,) * 5 + (0.02,)}))
    assert thin[5] == 1


def test_nobody_waits_for_the_slowest() -> None:
    found = sim.predict(A2CiD2(), PROFILE)
    assert found.iteration_s == found.bound_s == pytest.approx(0.6)
    ends = [row[-1] / len(row) for row in found.trace.ends_s]
    assert ends == pytest.approx([0.3, 0.3, 0.6, 0.3])
    (sent,) = found.bytes_per_iteration.values()
    assert sent == pytest.approx(4000)


def test_simulate_and_plan_on_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "profile.json"
    PROFILE.save(path)
    common = ["--profile", str(path), "--strategy", "ad-psgd", "--set", "topology=0-1,1-2,2-3"]
    assert main(["simulate", *common, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["iteration_s"] == pytest.approx(0.6)
    assert main(["plan", *common]) == 2
    assert "no plan" in capsys.readouterr().err


def test_exchanges_are_predicted_with_their_wire() -> None:
    """Bytes of each, and what encoding takes of its time."""

    def exchanged(wire: str, codecs: tuple[CodecSpeed, ...] = ()) -> tuple[int, float, float]:
        found = sim.predict(A2CiD2(wire=wire), replace(PROFILE, codecs=codecs))
        each = found.trace.notes["gossip"]["exchanges"]
        sent = found.bytes_per_iteration["net"]
        return each[0][4], min(end - start for _, _, start, end, _ in each), sent

    byte_s = exchanged("none")[1] / 4000
    for wire, size in (("none", 4000), ("bf16", 2000), ("int8", 1032), ("int4", 520)):
        found, seconds, sent = exchanged(wire)
        assert found == size
        assert sent == pytest.approx(size)
        assert seconds == pytest.approx(size * byte_s)
    slow = (CodecSpeed("int4", 1e-6, 2e-6),)
    assert exchanged("int4", slow)[1] == pytest.approx(520 * byte_s + 4000 * 5e-6)


@pytest.mark.parametrize(
    ("wire", "size"), [("none", 2000), ("bf16", 2000), ("int8", 1032), ("int4", 520)]
)
def test_exchanges_of_bfloat16_have_the_bytes_of_their_elements(wire: str, size: int) -> None:
    """A thousand of them, as in float32."""
    buckets = (replace(PROFILE.buckets[0], size_bytes=2000),)
    found = sim.predict(A2CiD2(wire=wire), replace(PROFILE, buckets=buckets, element_bytes=2.0))
    assert found.trace.notes["gossip"]["exchanges"][0][4] == size


def test_coding_of_bfloat16_takes_as_long_as_of_float32() -> None:
    single = replace(PROFILE, codecs=(CodecSpeed("int4", 1e-6, 2e-6),))
    buckets = (replace(PROFILE.buckets[0], size_bytes=2000),)
    half = replace(single, buckets=buckets, element_bytes=2.0)

    def shortest_s(profile: Profile) -> float:
        found = sim.predict(A2CiD2(wire="int4"), profile).trace.notes["gossip"]["exchanges"]
        return min(end - start for _, _, start, end, _ in found)

    assert shortest_s(half) == pytest.approx(shortest_s(single))


def test_a_world_of_one_sends_nothing() -> None:
    found = sim.predict(A2CiD2(), replace(PROFILE, world_size=1, rank_scale=()))
    assert found.bytes_per_iteration == {"net": 0.0}
    assert found.busy_s == {"net": 0.0}
