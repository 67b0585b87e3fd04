"""`offbeat report` of jobs: how a job ended, where its time went, and damaged records."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from cases.made_jobs import ITERATIONS, PREDICTED_S, make_job

from offbeat import cli
from offbeat.core.words import NO_BREAK
from offbeat.jobs.record_lines import ALIVE_FILE, RUN_FILE, LineWriter, rank_file

NOTICE = {"iteration": 18, "event": "notice", "cause": "slow_rank", "text": "660 ms since 18"}
ENDED = {"how": "ended", "iteration": 36, "text": ""}


@pytest.fixture
def report(capsys: pytest.CaptureFixture[str]) -> Any:
    """Function that returns the facts of `offbeat report --json`."""

    def report_of(*folders: Path) -> dict[str, Any]:
        assert cli.main(["report", "--json", *map(str, folders)]) == 0
        return json.loads(capsys.readouterr().out)

    return report_of


def add_end(folder: Path, rank: int, t: float, **fields: Any) -> None:
    LineWriter(folder, rank, lambda: t).line("end", **{"iteration": 36, "text": "", **fields})


def alive_t(folder: Path) -> float:
    return json.loads((folder / ALIVE_FILE).read_text())["t"]


def test_a_prediction_of_a_disturbed_profile_is_marked(
    tmp_path: Path, report: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    for mark in ("", "~"):
        job = make_job(tmp_path / f"a{mark}", 4, intervals=3, end=ENDED)
        alive = json.loads((job / ALIVE_FILE).read_text())
        (job / ALIVE_FILE).write_text(json.dumps({**alive, "mark": mark}))
        assert report(job)["mark"] == mark
        assert cli.main(["report", str(job)]) == 0
        printed = " ".join(capsys.readouterr().out.split())
        page = (job / "report.html").read_text().replace(NO_BREAK, " ")
        for text in (printed, page):
            assert ("~412 ms" in text) is bool(mark)


def test_a_whole_job(
    tmp_path: Path, report: Any, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    """In the facts, and each of them in the text of 80 columns."""
    job = make_job(tmp_path / "a", 4, intervals=3, end=ENDED, events=[NOTICE])
    found = report(job)
    assert (found["state"], found["iterations"], found["world_size"]) == ("ended", 36, 4)
    assert found["iteration_s"] == pytest.approx(0.418, rel=0.03)
    assert found["range_s"] == pytest.approx([0.418, 0.418], rel=0.1)
    assert (found["predicted_s"], found["sent_bytes"]) == (PREDICTED_S, 36 * 2_100_000)
    assert found["losses"] == pytest.approx([4.2, 4.18])
    parts = [found[name] or 0.0 for name in ("compute_s", "messages_s", "late_s", "script_s")]
    assert sum(parts) == pytest.approx(0.418, rel=0.03)
    assert found["problems"] == []
    monkeypatch.setenv("COLUMNS", "80")
    assert cli.main(["report", str(job)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines[:-1])) <= 80
    text = " ".join(" ".join(lines).split())
    for fact in ("dreamddp(period=8), 4 ranks", " 412 ms", NOTICE["text"], "75.6 MB"):
        assert str(fact) in text, fact
    assert Path(lines[-1].removeprefix("Report: ")).exists()


def test_a_late_rank(tmp_path: Path, report: Any) -> None:
    found = report(make_job(tmp_path / "a", 4, intervals=40, slow=2))
    assert found["late_ranks"] == [2]
    assert found["late_s"] == pytest.approx(0.25 * 0.75 * 0.24, rel=0.3)


def test_the_first_rank_that_falls_silent_or_raises_is_named(tmp_path: Path, report: Any) -> None:
    """Others wait for it. Clocks differ: their errors may seem to be earlier than the cause."""
    job = make_job(tmp_path / "a", 4, intervals=3, silent=1)
    for rank in (0, 2, 3):
        text = f"RuntimeError: rank {rank}: grad failed. Rank 1 (host-1) has died"
        add_end(job, rank, alive_t(job) - 45 + rank, how="raised", text=text, waited=True)
    found = report(job)
    assert found["state"] == "silent"
    assert found["ending"].startswith("rank 1 (host-1) ")
    job = make_job(tmp_path / "b", 4, intervals=3)
    for rank in (0, 1):
        text = f"RuntimeError: rank {rank}: grad failed. Rank 2 (host-2) failed"
        add_end(job, rank, alive_t(job) - 5, how="raised", text=text, waited=True)
    add_end(job, 2, alive_t(job), how="raised", text="KeyError: 'x'")
    found = report(job)  # rank 3 was killed by the launcher after the error
    assert found["state"] == "raised"
    assert found["ending"].startswith("rank 2 (host-2) ")
    assert "KeyError: 'x'" in found["ending"]


@pytest.mark.parametrize(("world_size", "is_silent"), [(4, True), (1024, False)])
def test_an_old_heartbeat_of_many_ranks_is_no_silence(
    tmp_path: Path, report: Any, world_size: int, is_silent: bool
) -> None:
    """While the job runs, and before the first error of another rank."""
    job = make_job(tmp_path / "a", world_size, intervals=1, writers=[0])
    data = json.loads((job / ALIVE_FILE).read_text())
    data["ranks"][1]["age_s"] = 10.0
    (job / ALIVE_FILE).write_text(json.dumps(data))
    running = report(job)
    assert running["state"] == "running"
    assert ("rank 1 (host-1)" in running["ending"]) is is_silent
    add_end(job, 0, data["t"], how="raised", text="KeyError: 'x'")
    assert report(job)["state"] == ("silent" if is_silent else "raised")


def test_signals(tmp_path: Path, report: Any) -> None:
    """The text is that of rank 0, or of the only rank that received one."""
    job = make_job(tmp_path / "a", 2, intervals=3)
    for rank in (0, 1):
        add_end(job, rank, 1e9 - rank, how="signal", text=f"of rank {rank}")
    found = report(job)
    assert (found["state"], found["ending"]) == ("signal", "of rank 0")
    job = make_job(tmp_path / "b", 2, intervals=3)
    add_end(job, 0, 1e9, how="raised", text="RuntimeError: Rank 1 has failed", waited=True)
    add_end(job, 1, 2e9, how="signal", text="of rank 1")
    assert report(job)["ending"] == "of rank 1"


def test_measured_iterations_do_not_count(tmp_path: Path, report: Any) -> None:
    job = make_job(tmp_path / "a", 2, intervals=3)
    for rank in (0, 1):
        LineWriter(job, rank).line("start", iteration=ITERATIONS)
    found = report(job)
    assert (found["counted"], found["iterations"]) == (24, 36)
    assert found["sent_bytes"] == 24 * 2_100_000


def test_folders_of_two_hosts(
    tmp_path: Path, report: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    made = make_job(tmp_path / "made", 4, intervals=3)
    hosts = [tmp_path / "h0", tmp_path / "h1"]
    for host, ranks in zip(hosts, [(0, 1), (3,)], strict=True):
        host.mkdir()
        for rank in ranks:
            shutil.copy(rank_file(made, rank), host)
    shutil.copy(made / RUN_FILE, hosts[0])
    found = report(*hosts)
    assert found["world_size"] == 4
    (problem,) = found["problems"]
    assert "rank 2" in problem
    other = make_job(tmp_path / "other", 4, intervals=3)
    assert cli.main(["report", str(hosts[0]), str(other)]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_damaged_records(tmp_path: Path, report: Any) -> None:
    job = make_job(tmp_path / "a", 2, intervals=3)
    (job / RUN_FILE).write_text("{")
    with rank_file(job, 1).open("a") as file:
        file.write('{"kind":"interval","schema":3}\nno JSON\n{"kind":"inter')
    os.utime(job / ALIVE_FILE, (1.0, 1.0))  # it does not run any more
    found = report(job)
    assert found["iterations"] == 36
    problems = " ".join(found["problems"])
    for words in (str(job / RUN_FILE), "last line of rank 1", "2 lines of rank 1"):
        assert words in problems
    (job / "profile.json").write_text('{"schema": 1}')
    assert report(job)["baseline_share"] is None


def test_a_chain_of_restarts(tmp_path: Path, report: Any) -> None:
    for name, before in (("a", None), ("b", "a"), ("c", "b")):
        events = [] if before is None else [
            {"iteration": 30, "event": "checkpoint", "continues": before, "text": "continued"}
        ]  # fmt: skip
        make_job(tmp_path / name, 2, intervals=3, events=events)
    (tmp_path / "a" / ALIVE_FILE).unlink()
    restarts = report(tmp_path / "c")["restarts"]
    assert [(r["run"], r["iteration"]) for r in restarts] == [("b", 30), ("a", 30)]
    assert restarts[1]["repeated"] == 6
    shutil.rmtree(tmp_path / "a")
    restarts = report(tmp_path / "c")["restarts"]
    assert (restarts[1]["run"], restarts[1]["folder"]) == ("a", None)


def test_old_runs_are_removed_and_nothing_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Runs that ended are removed; runs that may still run, and files of others, stay."""
    runs = tmp_path / "runs"
    old, foreign, running = (runs / name for name in ("a", "b", "c"))
    for folder in (old, foreign):
        make_job(folder, 2, intervals=2, end=ENDED)
        for rank in range(2):
            add_end(folder, rank, 1e9, how="ended")
    make_job(running, 2, intervals=2)
    (foreign / "notes.txt").write_text("mine")
    (runs / "other").mkdir()
    for _ in range(2):  # the second time there is none
        assert cli.main(["report", str(runs), "--prune", "30"]) == 0
        assert not old.exists()
        assert [path.name for path in foreign.iterdir()] == ["notes.txt"]
        assert sorted(path.name for path in runs.iterdir()) == ["b", "c", "other"]
    assert (running / RUN_FILE).exists()
    assert cli.main(["report", str(tmp_path / "none"), "--prune", "30"]) == 2
    assert capsys.readouterr().out
