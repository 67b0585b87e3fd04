"""The page and the exported intervals of a job."""

from __future__ import annotations

import csv
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from cases.made_jobs import ITERATIONS, PREDICTED_S, make_job
from cases.synthetic_runs import profile
from report.test_page import Elements, lanes_of, text_of

from offbeat import cli, sim
from offbeat.core.files import replace_text
from offbeat.core.sim.trace import COMPUTE, Span, spans_to_dict
from offbeat.experiments.report.job import job_report
from offbeat.experiments.report.job_charts import TimeAxis, time_plot
from offbeat.jobs.record_folder import remove_older
from offbeat.jobs.record_lines import LineWriter, load
from offbeat.strategies import WFBP

NOTICE = {"iteration": 18, "event": "notice", "text": "since iteration 18: 660 ms each"}
ENDED = {"how": "ended", "iteration": 36, "text": ""}
FIRST, WINDOW = 24, 4  # iterations of the timeline


def add_timeline(job: Path, ranks: int) -> None:
    """Add a profile, a plan, its prediction, and a timeline of each rank on a clock of its own."""
    facts = profile(4, ranks)
    found = sim.predict(WFBP(), facts)
    replace_text(job / "profile.json", json.dumps(facts.to_dict()))
    replace_text(job / "plan.json", json.dumps(WFBP().plan(facts).to_dict()))
    replace_text(job / "predicted.json", json.dumps(found.trace.to_dict()))
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
        writer = LineWriter(job, rank)
        writer.detail("spans", first=FIRST, origin_s=0.0, spans=spans_to_dict(spans))


def report(*arguments: object) -> int:
    return cli.main(["report", *map(str, arguments)])


def test_page_of_an_ended_job(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = make_job(tmp_path / "a", 2, intervals=3, end=ENDED, events=[NOTICE])
    add_timeline(job, 2)
    for k in range(2):
        LineWriter(job, 0).line("metric", iteration=11 + 12 * k, name="accuracy", value=0.5, n=1)
    assert report(job) == 0
    page = job / "report.html"
    assert capsys.readouterr().out.splitlines()[-1] == str(page)
    text = text_of(page)
    predicted = f"{1000 * PREDICTED_S:.0f} ms predicted."
    assert "dreamddp(period=8) took 4" in text
    # Names in narrow columns break before their settings.
    html = page.read_text()
    assert "<h3>dreamddp<wbr>(period=8)<strong>" in html
    assert len(re.findall(r'scope="row">dreamddp<wbr>\(period=8\)', html)) == 2
    assert predicted in text.replace("\u00a0", " ")
    for name in ("Milliseconds per iteration", "Loss", "accuracy"):
        assert f"{name} against time" in text
    assert "since iteration 18: 660 ms each" in text.replace("\u00a0", " ")
    assert f"iterations {FIRST} to {FIRST + WINDOW - 1}" in text
    lanes = lanes_of(page)
    assert [name for name, _ in lanes] == ["computes", "network", "predicted", ""]
    boxes = [box[0] for box in lanes[0][1]]
    assert {"f", "b", "w"} <= set(boxes)
    (number,) = re.findall(r"iteration (\d+)", lanes[0][1][0][3])
    assert int(number) in range(FIRST, FIRST + WINDOW)
    charts = [a for _, a in Elements(page.read_text()).tags if a.get("class") == "chart"]
    assert len(charts) == 5  # time; loss and accuracy against time and iterations
    assert 'class="mark"' in page.read_text()
    assert not text_of(page).count("Cut short")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"silent": 1}, "Running: at iteration 39; rank 1 (host-1) silent for 47.0 s"),
        ({"end": {"how": "raised", "iteration": 36, "text": "KeyError: 'x'"}}, "raised KeyError"),
        (
            {"end": {"how": "signal", "iteration": 36, "text": "Rank 0 received SIGTERM."}},
            "Stopped by a signal: Rank 0 received SIGTERM.",
        ),
    ],
)
def test_the_page_states_how_a_job_runs_or_ended(
    options: dict[str, Any], text: str, tmp_path: Path
) -> None:
    job = make_job(tmp_path / "a", 2, intervals=3, **options)
    assert report(job) == 0
    assert text in text_of(job / "report.html").replace("\u00a0", " ")


def test_page_of_a_job_without_iterations(tmp_path: Path) -> None:
    job = make_job(tmp_path / "a", 2, intervals=0)
    assert report(job) == 0
    text = text_of(job / "report.html")
    assert "no iteration has ended" in text
    assert "No iteration was recorded." in text


def test_page_and_export_of_a_chain(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, before in (("a", None), ("b", "a")):
        loaded = {"iteration": 30, "event": "checkpoint", "continues": before, "text": "continued"}
        make_job(tmp_path / name, 2, intervals=3, end=ENDED, events=[loaded] if before else [])
    assert report(tmp_path / "b") == 0
    text = text_of(tmp_path / "b" / "report.html")
    assert "restarted as b" in text
    assert "iteration 30" in text
    paths = (tmp_path / "b" / "report.html").read_text()
    assert paths.count('data-name="measured"') == 1
    assert paths.count('data-name="a"') == 3, "of the time and, against both axes, of the loss"
    capsys.readouterr()
    assert report(tmp_path / "b", "--export", "csv") == 0
    rows = list(csv.DictReader(capsys.readouterr().out.splitlines()))
    assert [row["run"] for row in rows] == ["a"] * 6 + ["b"] * 6
    assert [row["rank"] for row in rows[:6]] == ["0"] * 3 + ["1"] * 3
    file = tmp_path / "b.json"
    assert report(tmp_path / "b", "--export", "json", "-o", file) == 0
    data = json.loads(file.read_text())
    interval = load([tmp_path / "a"]).ranks[1].intervals[2]
    found = data[5]
    assert found["iterations"] == ITERATIONS
    for name, value in {
        "iteration_s": interval.mean_s,
        "computes_s": interval.own_s / ITERATIONS,
        "waits_s": interval.wait_s / ITERATIONS,
        "sent_bytes": 2_100_000,
        "loss": 4.18,
    }.items():
        assert found[name] == pytest.approx(value), name
        assert float(rows[5][name]) == pytest.approx(value), name
    assert report(tmp_path / "b", "--export", "svg") == 2
    assert "--export (svg) must be csv or json for a job" in capsys.readouterr().err


def test_a_restart_has_its_iteration_though_a_warning_is_earlier(tmp_path: Path) -> None:
    warned = {"iteration": 0, "event": "warning", "text": "another network"}
    loaded = {"iteration": 30, "event": "checkpoint", "continues": "a", "text": "continued"}
    make_job(tmp_path / "a", 2, intervals=3, end=ENDED)
    make_job(tmp_path / "b", 2, intervals=3, end=ENDED, events=[warned, loaded])
    chain = [load([tmp_path / name]) for name in ("a", "b")]
    found = job_report(chain[-1], 0.0)
    events = time_plot(chain, found, TimeAxis(found.started_t, "s", 1.0)).events
    assert [(event["text"], event["place"]) for event in events] == [
        ("restarted as b", "iteration 30"),
        ("another network", "iteration 0"),
    ]


def test_a_page_in_another_place(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The page beside the record does not make an old run look like one that runs."""
    runs = tmp_path / "runs"
    job = make_job(runs / "a", 2, intervals=1)
    page = tmp_path / "page.html"
    assert report(job, "-o", page) == 0
    assert page.exists()
    assert not (job / "report.html").exists()
    (job / "report.html.part").mkdir()  # the page cannot be written
    capsys.readouterr()
    assert report("--json", job) == 0
    assert json.loads(capsys.readouterr().out)["report"] is None
    shutil.rmtree(job / "report.html.part")
    assert report(job) == 0
    for path in job.iterdir():
        if path.name != "report.html":
            os.utime(path, (1e9, 1e9))
    assert remove_older(runs, 0).runs == ("a",)
