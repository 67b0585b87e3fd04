"""`offbeat report` of jobs: how a job ended, where its time went, and damaged records."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from support.made_jobs import ITERATIONS, PREDICTED_S, make_job

from offbeat import cli
from offbeat.experiments.report.job import JobReport, find_record, job_report
from offbeat.experiments.report.job_text import as_text
from offbeat.jobs.record_folder import remove_above
from offbeat.jobs.record_lines import ALIVE_FILE, RUN_FILE, LineWriter, load, rank_file
from offbeat.jobs.settings import parse_limit
from offbeat.jobs.words import prediction_error

WAITED = "RuntimeError: rank {}: grad failed. Rank 2 (host-2) failed with KeyError: 'x'. "
WAITED += "Last heard of: rank 0 (host-0): iteration 36"
NOTICE = {
    "iteration": 18,
    "event": "notice",
    "cause": "slow_rank",
    "text": "since iteration 18: 660 ms each, predicted 412 ms (−38 %)",
}


def report_of(*folders: Path, later_s: float = 1000.0) -> JobReport:
    """Report some time after the last line."""
    record = load(find_record(folders) or [])
    return job_report(record, (record.alive or {}).get("t", 0.0) + later_s)


def add_end(folder: Path, rank: int, t: float, **fields: Any) -> None:
    LineWriter(folder, rank, lambda: t).line("end", **{"iteration": 36, "text": "", **fields})


def alive_t(folder: Path) -> float:
    return json.loads((folder / ALIVE_FILE).read_text())["t"]


def test_a_whole_job(tmp_path: Path) -> None:
    end = {"how": "ended", "iteration": 36, "text": ""}
    job = make_job(tmp_path / "a", 4, intervals=3, end=end, events=[NOTICE])
    found = report_of(job)
    assert (found.state, found.iterations, found.world_size) == ("ended", 36, 4)
    assert found.iteration_s == pytest.approx(0.418, rel=0.03)
    assert found.range_s is not None
    assert found.range_s[0] <= found.range_s[1]
    assert found.range_s == pytest.approx((0.418, 0.418), rel=0.1)
    assert found.predicted_s == PREDICTED_S
    assert found.sent_bytes == 36 * 2_100_000
    assert found.losses == pytest.approx((4.2, 4.18))
    parts = [found.compute_s, found.messages_s, found.late_s, found.script_s]
    assert sum(part or 0.0 for part in parts) == pytest.approx(0.418, rel=0.03)
    assert found.problems == ()
    text = as_text(found, 80)
    assert max(map(len, text.splitlines())) <= 80
    error = prediction_error(PREDICTED_S, found.iteration_s)
    assert error.startswith("−")
    assert f"predicted 412 ms ({error})" in " ".join(text.split())
    assert "since iteration 18: 660 ms" in " ".join(text.split())


def test_late_rank(tmp_path: Path) -> None:
    found = report_of(make_job(tmp_path / "a", 4, intervals=40, slow=2))
    assert found.late_ranks == (2,)
    assert found.late_s == pytest.approx(0.25 * 0.75 * 0.24, rel=0.3)
    assert "for late ranks (rank 2)" in " ".join(as_text(found, 80).split())


def test_first_rank_to_fall_silent(tmp_path: Path) -> None:
    job = make_job(tmp_path / "a", 4, intervals=3, silent=1)
    for rank in (0, 2, 3):
        text = WAITED.format(rank).replace("Rank 2 (host-2) failed", "Rank 1 (host-1) has died")
        add_end(job, rank, alive_t(job) - 45 + rank, how="raised", text=text, waited=True)
    found = report_of(job)
    assert found.state == "silent"
    assert found.ending.startswith("rank 1 (host-1) fell silent at iteration 36, in its script")
    assert "9.66 GB at first and 9.66 GB at last" in found.ending
    assert "Rank 0 raised RuntimeError 2.00 s later" in found.ending
    assert "CUT SHORT" in as_text(found, 80)


def test_first_rank_to_raise(tmp_path: Path) -> None:
    job = make_job(tmp_path / "a", 4, intervals=3)
    t = alive_t(job)
    for rank in (0, 1):  # clocks differ: these errors seem to be earlier than their cause
        add_end(job, rank, t - 5, how="raised", text=WAITED.format(rank), waited=True)
    add_end(job, 2, t, how="raised", text="KeyError: 'x'")
    found = report_of(job)  # rank 3 was killed by the launcher after the error
    assert (found.state, found.ending) == (
        "raised",
        "rank 2 (host-2) raised KeyError: 'x' at iteration 36",
    )


@pytest.mark.parametrize(("world_size", "is_silent"), [(4, True), (1024, False)])
def test_an_old_heartbeat_of_many_ranks_is_no_silence(
    tmp_path: Path, world_size: int, is_silent: bool
) -> None:
    """While the job runs, and before the first error of another rank."""
    job = make_job(tmp_path / "a", world_size, intervals=1, writers=[0])
    data = json.loads((job / ALIVE_FILE).read_text())
    data["ranks"][1]["age_s"] = 10.0
    (job / ALIVE_FILE).write_text(json.dumps(data))
    running = report_of(job, later_s=0.0)
    assert running.state == "running"
    assert ("rank 1 (host-1) silent for 10.0 s" in running.ending) is is_silent
    add_end(job, 0, data["t"], how="raised", text="KeyError: 'x'")
    assert report_of(job).state == ("silent" if is_silent else "raised")


def test_signal(tmp_path: Path) -> None:
    job = make_job(tmp_path / "a", 2, intervals=3)
    for rank in (0, 1):
        text = f"Rank {rank} received SIGTERM. Stopped after 36 iterations"
        add_end(job, rank, 1e9 - rank, how="signal", text=text)
    found = report_of(job)
    assert (found.state, found.ending) == (  # as rank 0 has printed it
        "signal",
        "Rank 0 received SIGTERM. Stopped after 36 iterations",
    )


def test_signal_of_one_rank_and_errors_of_waiting_ranks(tmp_path: Path) -> None:
    job = make_job(tmp_path / "a", 2, intervals=3)
    add_end(job, 0, 1e9, how="raised", text="RuntimeError: Rank 1 has failed", waited=True)
    add_end(job, 1, 2e9, how="signal", text="Rank 1 received SIGINT (Ctrl-C)")
    assert report_of(job).ending == "Rank 1 received SIGINT (Ctrl-C)"


def test_a_job_that_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_job(tmp_path / "runs" / "a", 4, intervals=3, silent=1)
    assert cli.main(["report", str(tmp_path / "runs")]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert re.search(r"/a: dreamddp\(period=8\), 4 ranks, started .{15}, 15.0 s, running", text)
    assert "running at iteration 39; rank 1 (host-1) silent for 47.0 s" in text
    assert cli.main(["report", "--json", str(tmp_path / "runs" / "a")]) == 0
    assert json.loads(capsys.readouterr().out)["state"] == "running"


def test_measured_iterations_do_not_count(tmp_path: Path) -> None:
    job = make_job(tmp_path / "a", 2, intervals=3)
    for rank in (0, 1):
        LineWriter(job, rank).line("start", iteration=ITERATIONS)
    found = report_of(job)
    assert (found.counted, found.iterations) == (24, 36)
    text = " ".join(as_text(found, 80).split())
    assert "per iteration of the last 24 (95 % within" in text
    assert "50.4 MB per rank in these iterations" in text


def test_folders_of_two_hosts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = make_job(tmp_path / "made", 4, intervals=3)
    hosts = [tmp_path / "h0", tmp_path / "h1"]
    for host, ranks in zip(hosts, [(0, 1), (3,)], strict=True):
        host.mkdir()
        for rank in ranks:
            shutil.copy(rank_file(made, rank), host)
    shutil.copy(made / RUN_FILE, hosts[0])
    found = report_of(*hosts)
    assert found.world_size == 4
    assert found.problems == ("no lines of rank 2: give the folders of their hosts, too",)
    other = make_job(tmp_path / "other", 4, intervals=3)
    assert cli.main(["report", str(hosts[0]), str(other)]) == 2
    assert "must be of one run" in capsys.readouterr().err


def test_damaged_records(tmp_path: Path) -> None:
    job = make_job(tmp_path / "a", 2, intervals=3)
    (job / RUN_FILE).write_text("{")
    with rank_file(job, 1).open("a") as file:
        file.write('{"kind":"interval","schema":3}\nno JSON\n{"kind":"inter')
    found = report_of(job)
    assert found.iterations == 36
    problems = " ".join(found.problems)
    assert f"{job / RUN_FILE} cannot be read" in problems
    assert "the last line of rank 1 is incomplete" in problems
    assert "2 lines of rank 1 cannot be read" in problems
    (job / "profile.json").write_text('{"schema": 1}')
    assert report_of(job).baseline_share is None


def test_chain_of_restarts(tmp_path: Path) -> None:
    for name, before in (("a", None), ("b", "a"), ("c", "b")):
        events = [] if before is None else [
            {"iteration": 30, "event": "checkpoint", "continues": before, "text": "continued"}
        ]  # fmt: skip
        make_job(tmp_path / name, 2, intervals=3, events=events)
    (tmp_path / "a" / ALIVE_FILE).unlink()
    found = report_of(tmp_path / "c")
    assert [(r.run, r.iteration) for r in found.restarts] == [("b", 30), ("a", 30)]
    assert found.restarts[1].repeated == 6
    assert "6 iterations done twice" in " ".join(as_text(found, 80).split())
    shutil.rmtree(tmp_path / "a")
    found = report_of(tmp_path / "c")
    assert (found.restarts[1].run, found.restarts[1].folder) == ("a", None)


def test_old_runs_are_removed_and_nothing_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Runs that ended are removed; runs that may still run, and files of others, stay."""
    end = {"how": "ended", "iteration": 36, "text": ""}
    runs = tmp_path / "runs"
    old, foreign, running = (runs / name for name in ("a", "b", "c"))
    for folder in (old, foreign):
        make_job(folder, 2, intervals=2, end=end)
        for rank in range(2):
            add_end(folder, rank, 1e9, how="ended")
    make_job(running, 2, intervals=2)
    (foreign / "notes.txt").write_text("mine")
    (runs / "other").mkdir()
    assert cli.main(["report", str(runs), "--prune", "30"]) == 0
    assert "removed 2 runs (a, b)" in capsys.readouterr().out
    assert not old.exists()
    assert [path.name for path in foreign.iterdir()] == ["notes.txt"]
    assert sorted(path.name for path in runs.iterdir()) == ["b", "c", "other"]
    assert cli.main(["report", str(runs), "--prune", "30"]) == 0
    assert "no run is older" in capsys.readouterr().out
    assert cli.main(["report", str(tmp_path / "none"), "--prune", "30"]) == 2
    assert (running / RUN_FILE).exists()


def test_a_folder_of_records_stays_within_its_limit(tmp_path: Path) -> None:
    end = {"how": "ended", "iteration": 36, "text": ""}
    folders = [make_job(tmp_path / name, 2, intervals=2, end=end) for name in "abc"]
    for k, folder in enumerate(folders):
        for rank in range(2):
            add_end(folder, rank, 1e9, how="ended")
        run = json.loads((folder / RUN_FILE).read_text())
        (folder / RUN_FILE).write_text(json.dumps({**run, "started": 1e9 + k}))
    sizes = [sum(p.stat().st_size for p in folder.iterdir()) for folder in folders]
    removal = remove_above(tmp_path, sum(sizes) - 1, kept="a")
    assert removal.runs == ("b",), "the oldest that does not begin"
    assert removal.freed_bytes == sizes[1]
    assert remove_above(tmp_path, 0, kept="a").runs == ("c",)
    assert parse_limit("5GB") == 5 * 10**9
    assert parse_limit(".5 GB") == 5 * 10**8
    assert parse_limit("") is None
    with pytest.raises(ValueError, match=r"OFFBEAT_RECORD_LIMIT \('5 apples'\) must be a size"):
        parse_limit("5 apples")
