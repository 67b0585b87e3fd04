"""The page of a job."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from cases.made_jobs import make_job
from cases.pages import lanes_of, numbers_in, read
from cases.synthetic_runs import profile

from offbeat import cli, sim
from offbeat.core.sim.trace import COMPUTE, Span, spans_to_dict
from offbeat.jobs.record_lines import LineWriter, load
from offbeat.strategies import WFBP

ENDED = {"how": "ended", "iteration": 36, "text": ""}
FIRST, WINDOW = 24, 4  # iterations of the timeline


def add_timeline(job: Path, ranks: int) -> None:
    """Add a profile, a plan, its prediction, and a timeline of each rank on a clock of its own."""
    facts = profile(4, ranks)
    facts.save(job / "profile.json")
    (job / "plan.json").write_text(json.dumps(WFBP().plan(facts).to_dict()))
    sim.predict(WFBP(), facts).trace.save(job / "predicted.json")
    for rank in range(ranks):
        spans = []
        for k in range(WINDOW):  # numbers of the process, which loaded a checkpoint before
            at = 100.0 * rank + 0.4 * k
            spans += [
                Span(rank, COMPUTE, "forward", k, at, at + 0.1),
                Span(rank, COMPUTE, "backward", k, at + 0.1, at + 0.3),
                Span(rank, COMPUTE, "wait", k, at + 0.3, at + 0.4),
                Span(rank, "net", "grad", k, at + 0.2, at + 0.4, (0, 4), 1000),
            ]
        LineWriter(job, rank).line("spans", first=FIRST, spans=spans_to_dict(spans))


def report(*arguments: object) -> int:
    return cli.main(["report", *map(str, arguments)])


def test_page_of_an_ended_job(tmp_path, capsys):
    job = make_job(tmp_path / "a", 2, intervals=3, end=ENDED)
    add_timeline(job, 2)
    LineWriter(job, 0).line("metric", iteration=11, name="accuracy", value=0.5, n=1)
    assert report(job) == 0
    assert capsys.readouterr().out.splitlines()[-1] == str(job / "report.html")
    root = read(job / "report.html")
    intervals = [one for rank in load([job]).ranks.values() for one in rank.intervals]
    mean_s = sum(one.mean_s for one in intervals) / len(intervals)
    shown = numbers_in(root.all("h1")[0].text)
    assert any(value == pytest.approx(mean_s, rel=0.03) for value in shown)
    lanes = lanes_of(root)
    assert [lane.name for lane in lanes] == ["computes", "network", "predicted", ""]
    assert [look for look, *_ in lanes[0].boxes] == ["f", "b", "w"]  # of a typical iteration
    widths = [right - left for _, left, right, _ in lanes[0].boxes]
    assert widths == pytest.approx([25, 50, 25], abs=0.1)
    [number] = re.findall(r"iteration (\d+)", lanes[0].boxes[0][3])
    assert int(number) in range(FIRST, FIRST + WINDOW)
    assert len(root.all("div", "chart")) == 4  # loss and accuracy, each against two axes


@pytest.mark.parametrize(
    ("options", "fact"),
    [
        ({"silent": 1}, "rank 1"),
        ({"end": {"how": "raised", "iteration": 36, "text": "KeyError: 'x'"}}, "KeyError"),
        ({"intervals": 0}, ""),
        ({"end": {"how": "signal", "iteration": 36, "text": "SIGTERM"}}, "SIGTERM"),
    ],
)
def test_the_page_states_how_a_job_runs_or_ended(options, fact, tmp_path):
    job = make_job(tmp_path / "a", 2, **{"intervals": 3, **options})
    assert report(job) == 0
    assert fact in read(job / "report.html").text


def test_events_of_a_job_that_continued(tmp_path):
    make_job(tmp_path / "a", 2, intervals=3, end=ENDED)
    loaded = {"iteration": 30, "event": "checkpoint", "continues": "a", "text": "continued"}
    warned = {"iteration": 0, "event": "warning", "text": "another network"}
    make_job(tmp_path / "b", 2, intervals=3, end=ENDED, events=[warned, loaded])
    assert report(tmp_path / "b") == 0
    root = read(tmp_path / "b" / "report.html")
    events = [[cell.text for cell in row.all("td")] for row in root.all("tr")]
    assert ["0", "warning", "another network"] in events
    assert ["30", "checkpoint", "continued"] in events
    assert report(tmp_path / "b", "--export", "csv") == 2


def test_a_page_in_another_place_and_one_that_cannot_be_written(tmp_path, capsys):
    job, page = make_job(tmp_path / "runs" / "a", 2, intervals=1), tmp_path / "page.html"
    assert report(job, "-o", page) == 0
    assert page.exists()
    assert not (job / "report.html").exists()
    (job / "report.html.part").mkdir()
    capsys.readouterr()
    assert report("--json", job) == 0
    assert json.loads(capsys.readouterr().out)["report"] is None


def test_page_of_a_job_of_nodes(tmp_path):
    job = make_job(tmp_path / "a", 4, intervals=3, end=ENDED)
    run = json.loads((job / "run.json").read_text())
    (job / "run.json").write_text(json.dumps({**run, "nodes": [[0, 1], [2, 3]], "sharded": False}))
    assert report(job) == 0
    assert "4 ranks in 2 nodes" in read(job / "report.html").text
