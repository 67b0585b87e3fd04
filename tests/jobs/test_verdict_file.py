"""A verdict that is kept with a run, and shown beside the measurement."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support import observed_jobs
from support.made_jobs import make_job
from support.synthetic_runs import NEAR_AND_FAR, late, profile, write_run
from support.worlds import run_world

from offbeat.cli import entry as cli
from offbeat.experiments.advice.place import place_of
from offbeat.experiments.advice.verdict import decide
from offbeat.experiments.advice.work import Work
from offbeat.experiments.report.job import find_record, job_report
from offbeat.experiments.report.job_text import as_text
from offbeat.experiments.report.verdicts import verdict_texts
from offbeat.jobs.job_view import JobFollower, view
from offbeat.jobs.record_lines import load
from offbeat.jobs.settings import read_settings
from offbeat.jobs.verdict_file import KeptVerdict, read_verdict, verdict_of_run
from offbeat.jobs.watch import screen
from offbeat.profile import Bucket, Link, Profile
from offbeat.sim import predict
from offbeat.strategies import find

METHODS = [
    {
        "method": label,
        "strategy": strategy,
        "machines": machines,
        "iteration_s": seconds,
        "iteration_range_s": [0.95 * seconds, 1.05 * seconds],
    }
    for label, strategy, machines, seconds in (
        ("one machine", None, 1, 0.35),
        ("dreamddp:period=8", "dreamddp(period=8)", 4, 0.42),
        ("ddp", "ddp", 4, 1.2),
    )
]
VERDICT: dict[str, Any] = {
    "schema": 1,
    "best": "dreamddp:period=8",
    "machines": 4,
    "methods": METHODS,
}


def write_verdict(folder: Path, **changes: Any) -> Path:
    path = folder / "verdict.json"
    path.write_text(json.dumps(VERDICT | changes))
    return path


def test_sentences_about_a_run() -> None:
    kept = KeptVerdict.from_dict(VERDICT)
    advised = "advised dreamddp:period=8: 420 ms (399 ms to 441 ms) per iteration"
    assert kept.compare("dreamddp(period=8)", 4, None) == advised
    same = kept.compare("dreamddp(period=8)", 4, 0.43)
    assert same == f"{advised}; measured 430 ms, prediction error −2.3 %, within the range"
    other = kept.compare("ddp", 4, 1.5)
    assert other == (
        f"{advised}; ddp: 1.20 s (1.14 s to 1.26 s); measured 1.50 s, prediction error −20 %, "
        "outside the range"
    )
    assert kept.compare("bsp", 4, 1.5) == f"{advised}; bsp is not in the verdict"
    assert "is for 4 machines and the run has 2" in kept.compare("ddp", 2, 1.5)
    assert kept.compare("ddp", 0, 1.2).endswith("within the range")  # hosts are not known


def test_machines_of_servers_count_in_a_comparison() -> None:
    served = METHODS[2] | {"method": "ssp", "strategy": "ssp", "machines": 5}
    kept = KeptVerdict.from_dict(VERDICT | {"methods": [*METHODS, served]})
    assert kept.compare("ssp", 5, 1.2).endswith("within the range")
    assert "is for 5 machines and the run has 4" in kept.compare("ssp", 4, 1.2)
    assert kept.compare("ddp", 4, 1.2).endswith("within the range")


def test_a_verdict_of_the_command_is_read(tmp_path: Path) -> None:
    facts = Profile((Bucket("b", 0.1, 0.2, 10**6),), (Link("net", 1e-3, 1e6),), 4)
    verdict = decide(place_of(facts, None, None), Work.of(), max_staleness=1, shares=())
    (tmp_path / "v.json").write_text(json.dumps(verdict.to_dict()))
    kept = KeptVerdict.from_dict(read_verdict(tmp_path / "v.json"))
    assert kept.best.label == verdict.best.method.label
    (ddp,) = [one for one in kept.methods if one.label == "ddp"]
    assert ddp.iteration_s == predict(find("ddp")(), facts).iteration_s
    assert ddp.strategy == str(find("ddp")())


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "write it again"),
        ("[]", "no JSON object"),
        (json.dumps(VERDICT | {"schema": 2}), "schema (2) must be from 1 to 1"),
        (json.dumps(VERDICT | {"best": "bsp"}), "the methods cannot be read"),
        (json.dumps(VERDICT | {"methods": [{}]}), "the methods cannot be read"),
        (json.dumps(VERDICT | {"methods": [METHODS[1] | {"iteration_s": 0}]}), "above 0"),
    ],
)
def test_files_that_are_no_verdict(text: str, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "verdict.json"
    path.write_text(text)
    with pytest.raises(ValueError, match="OFFBEAT_VERDICT") as raised:
        read_verdict(path)
    assert reason in str(raised.value)
    assert verdict_of_run(tmp_path) is None


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="No such file"):
        read_verdict(tmp_path / "none.json")
    settings = read_settings({"OFFBEAT_VERDICT": "v.json"}, ["train.py"])
    assert settings.verdict is None
    assert "set OFFBEAT_RECORD=runs" in settings.notices[-1]
    recorded = {"OFFBEAT_VERDICT": "v.json", "OFFBEAT_RECORD": "runs"}
    assert read_settings(recorded, ["train.py"]).verdict == "v.json"


def test_report_and_watch_show_it(tmp_path: Path) -> None:
    job = make_job(tmp_path / "a", 4, intervals=3)
    assert job_report(load(find_record([job]) or []), 0.0).verdict is None
    write_verdict(job)
    report = job_report(load(find_record([job]) or []), 0.0)
    assert report.verdict is not None
    assert report.verdict.endswith("within the range")
    assert "verdict advised dreamddp:period=8: 420 ms" in " ".join(as_text(report, 80).split())
    shown = view(JobFollower(job))
    assert shown.verdict is not None
    assert shown.verdict.startswith("advised dreamddp:period=8")
    named = replace(shown, verdict=shown.verdict.replace("dreamddp", "post-local-sgd"))
    for width in range(60, 100):  # names with hyphens stay whole
        assert any("post-local-sgd:period=8" in line.plain for line in screen(named, width))


def test_report_of_a_comparison_shows_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = profile(6, 4, NEAR_AND_FAR)
    run = write_run(tmp_path / "run", facts, late(facts), iterations=24)
    write_verdict(run)
    record = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps(record | {"notes": ["a note " * 30]}))
    monkeypatch.setenv("COLUMNS", "70")
    assert cli.main(["report", str(run)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(len(line) for line in lines if not line.startswith("Report: ")) <= 70
    printed = " ".join(" ".join(lines).split())
    assert "note: a note a note" in printed
    assert "verdict: advised dreamddp:period=8" in printed
    page = " ".join((run / "report.html").read_text().split())
    assert "Verdict: advised dreamddp:period=8: 420" in page
    summary = json.loads((run / "summary.json").read_text())
    assert summary["verdicts"][0].startswith("advised dreamddp:period=8")
    assert f"verdict: {summary['verdicts'][1]}" in printed


def test_rows_of_a_comparison_are_named_once(tmp_path: Path) -> None:
    write_verdict(tmp_path)
    run: Any = SimpleNamespace(path=tmp_path, cluster={"hosts": 4})
    rows: Any = [
        SimpleNamespace(
            strategy=strategy, label=label, iteration_s=seconds, target_s=None, target_loss=None
        )
        for strategy, label, seconds in (
            ("ddp", "ddp", 1.2),
            ("dreamddp(period=8)", "dreamddp-period=8", 0.42),
        )
    ]
    _, of_ddp, of_best = verdict_texts(run, rows)
    assert of_ddp.startswith("ddp: 1.20 s (")
    assert of_best.startswith("dreamddp-period=8: measured 420 ms")


def test_a_job_keeps_the_verdict(tmp_path: Path) -> None:
    given = write_verdict(tmp_path)
    run_world(observed_jobs.train_with_verdict, 2, str(tmp_path / "runs"), str(given))
    (folder,) = (tmp_path / "runs").iterdir()
    assert json.loads((folder / "verdict.json").read_text())["best"] == VERDICT["best"]
    assert verdict_of_run(folder) == KeptVerdict.from_dict(VERDICT)
    given.write_text("{")
    errors = run_world(observed_jobs.train_with_verdict, 2, str(tmp_path / "more"), str(given))
    for error in errors:  # every rank stops
        assert "must be a file that `offbeat advise --out` has written" in error


def test_time_to_a_loss_is_shown_beside_the_measurement() -> None:
    methods = [{**one, "seconds": 7200.0, "range_s": [3600.0, 9000.0]} for one in METHODS]
    kept = KeptVerdict.from_dict({**VERDICT, "methods": methods, "work": {"target_loss": 2.3456}})
    assert kept.advice.endswith(
        "420 ms (399 ms to 441 ms) per iteration, loss 2.346 after 2 h (1 h to 2 h 30 min)"
    )
    parts = kept.parts("dreamddp(period=8)", 4, 0.43, 8000.0)
    assert parts[-1] == "measured loss 2.346 after 2 h 13 min"
    without = KeptVerdict.from_dict({**VERDICT, "methods": methods})
    assert "loss" not in "; ".join([without.advice, *without.parts("ddp", 4, 0.43, 8000.0)])
    assert kept.has_target(2.346)
    assert not kept.has_target(2.36)
    assert not kept.has_target(None)
