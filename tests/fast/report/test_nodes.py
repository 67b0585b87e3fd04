"""Runs whose replicas have several ranks: bytes of a host, messages of a node, the page."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from cases.made_jobs import make_job
from cases.tiny_runs import dump, record, steady, write_tiny

from offbeat.cli import main
from offbeat.core.sim.trace import COMPUTE, Span, Trace
from offbeat.core.transport.topology import Topology
from offbeat.experiments.report import load, summarize, write
from offbeat.experiments.report.breakdown import parts_of
from offbeat.experiments.report.table import render
from offbeat.experiments.report.timeline import window_of
from offbeat.experiments.report.traffic import group_by_message, link_loads
from offbeat.profile import Bucket, Link, Profile

NODES = {"nodes": [[0, 1], [2, 3]], "sharded": False}
PROFILE = Profile(
    (Bucket("b", 0.3, 0.4, 100),),
    (Link("net", 0.0, 1000.0),),
    2,
    topology=(2, 2),
    inside=Link("inside", 0.0, 1000.0),
)
CLUSTER = {
    "hosts": 2,
    "ranks": 2,
    "inside": "10gbit",
    "links": [{"name": "net", "rate": "100mbit", "latency": None}],
}


def spans_of(rank: int, iterations: int = 4) -> list[Span]:
    """Compute for .5 s, a message inside that begins later in the second node, one between."""
    late_s = 0.1 * (rank // 2)
    return [
        span
        for i in range(iterations)
        for span in (
            Span(rank, COMPUTE, "forward", i, i, i + 0.5),
            Span(rank, "inside", "grad", i, i + 0.5 + late_s, i + 0.7 + late_s, (0, 1), 100),
            Span(rank, "net", "param", i, i + 0.8, i + 1.0, (0, 1), 50),
        )
    ]


def nodes_run(path: Path, *, messages: bool = True) -> Path:
    losses, sent = [2.0, 1.5, 1.2, 1.0], {"net": 200, "inside": 400}
    ranks = [
        record(r, steady(1.0, 4), losses, spans=spans_of(r) if messages else (), bytes=sent)
        for r in range(4)
    ]
    for data in ranks:
        data["trace"]["notes"] = NODES
    PROFILE.save(path / "profile.json")
    write_tiny(path, {"a": [ranks]}, cluster=CLUSTER)
    predicted = Trace("simulated", "x", ((1.0, 2.0),), (0.0,), tuple(spans_of(0, 2)))
    dump(path / "a/predicted.json", predicted.to_dict())
    return path


def test_a_host_sends_what_its_ranks_send_to_other_hosts(tmp_path: Path) -> None:
    [row] = summarize(load(nodes_run(tmp_path)))
    assert row.sent_bytes == pytest.approx(100)


def test_bytes_without_recorded_messages(tmp_path: Path) -> None:
    [row] = summarize(load(nodes_run(tmp_path, messages=False)))
    assert row.sent_bytes == pytest.approx(200 * 2 / 4)


def measured() -> Trace:
    spans = tuple(span for rank in range(4) for span in spans_of(rank))
    ends = tuple(steady(1.0, 4))
    return Trace("measured", "x", (ends,) * 4, (0.0,) * 4, spans, notes=NODES)


def test_a_message_inside_has_the_ranks_of_a_node() -> None:
    trace = measured()
    groups = group_by_message(trace.spans, Topology.from_record(trace.notes))
    ranks = {(one[0].lane, tuple(span.rank for span in one)) for one in groups}
    assert ranks == {("inside", (0, 1)), ("inside", (2, 3)), ("net", (0, 1, 2, 3))}
    sharded = group_by_message(trace.spans, Topology.from_record(NODES | {"sharded": True}))
    ranks = {tuple(span.rank for span in one) for one in sharded if one[0].lane == "net"}
    assert ranks == {(0, 2), (1, 3)}


def test_a_rank_waits_for_messages_of_its_own_node() -> None:
    parts = parts_of(window_of(measured(), range(1, 3)))
    assert (parts.compute_s, parts.links_s) == pytest.approx((0.5, 0.4))
    assert parts.messages_s == pytest.approx(0.4)
    alone = replace(measured(), notes={})
    assert parts_of(window_of(alone, range(1, 3))).links_s == pytest.approx(0.35)


def test_loads_of_a_ring_inside_and_between() -> None:
    loads = {(load.rank, load.link): load for load in link_loads(measured(), 1)}
    assert sum(loads[0, "inside"].step_bytes) == pytest.approx(100)  # 2 (2 - 1) / 2 of it
    assert sum(loads[0, "net"].step_bytes) == pytest.approx(50)


def test_page_and_table_name_both_levels(tmp_path: Path) -> None:
    path = nodes_run(tmp_path)
    page = " ".join(write(path).read_text().replace("\u00a0", " ").split())
    assert "2 hosts of 2 ranks, 100 Mbit/s, 10 Gbit/s inside" in page
    assert 'data-n="between"' in page
    assert 'data-n="inside"' in page
    assert "One rank as measured" in page
    assert "waits for other ranks" in page
    assert "A message between nodes contains its legs inside them." in page
    run = load(path)
    text = " ".join(render(run, summarize(run), 100).replace("\u00a0", " ").split())
    assert "2 hosts of 2 ranks on this machine, 100 Mbit/s, 10 Gbit/s inside" in text


def test_report_of_a_job(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = make_job(
        tmp_path / "a", 4, intervals=3, end={"how": "ended", "iteration": 36, "text": ""}
    )
    run = json.loads((job / "run.json").read_text())
    (job / "run.json").write_text(json.dumps({**run, **NODES}))
    assert main(["report", str(job)]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "4 ranks in 2 nodes" in text
    assert "per rank between nodes" in text
    assert "4 ranks in 2 nodes" in next(job.glob("*.html")).read_text()


def test_without_nodes_nothing_is_said_of_them(tmp_path: Path) -> None:
    write_tiny(tmp_path, {"a": [[record(0, steady(1.0, 4), spans=spans_of(0))]]})
    assert "inside them" not in write(tmp_path).read_text()
