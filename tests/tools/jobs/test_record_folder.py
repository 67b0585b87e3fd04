"""Folders of records while clocks are wrong, files vanish, and jobs begin or still run."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

from cases.made_jobs import make_job

from offbeat.jobs import record_folder, record_lines
from offbeat.jobs.record_folder import (
    ALIVE_TIMEOUT_S,
    find_runs,
    is_alive,
    remove_above,
    remove_older,
    start_s,
)
from offbeat.jobs.record_lines import ALIVE_FILE, RUN_FILE, LineWriter, rank_file

END = {"how": "ended", "iteration": 36, "text": ""}
DAY_S = 86400.0


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


def age(folder: Path, seconds: float) -> None:
    """Let all files be written some time ago."""
    for path in folder.iterdir():
        os.utime(path, (time.time() - seconds,) * 2)


def test_a_run_without_all_ends_may_run_until_nothing_has_changed_for_an_hour(
    tmp_path: Path,
) -> None:
    run = make_job(tmp_path / "a", 2, intervals=2)
    LineWriter(run, 0).line("end", **END)
    assert remove_above(tmp_path, 0, kept="").runs == (), "rank 1 has written no end"
    age(run, record_folder.IDLE_S + 60)
    assert remove_above(tmp_path, 0, kept="").runs == ("a",)
    run = make_job(tmp_path / "b", 2, intervals=2, end=END)
    assert remove_above(tmp_path, 0, kept="").runs == ("b",)
    assert not run.exists()


def test_only_as_many_runs_are_removed_as_necessary(tmp_path: Path) -> None:
    """The oldest ones that have ended, and not the one that begins."""
    folders = [make_job(tmp_path / name, 2, intervals=2, end=END) for name in "abcd"]
    for k, folder in enumerate(folders):
        run = json.loads((folder / RUN_FILE).read_text())
        (folder / RUN_FILE).write_text(json.dumps({**run, "started": 1e9 + k}))
    sizes = [size_of(folder) for folder in folders]
    assert remove_above(tmp_path, 10 * sizes[0], kept="").runs == ()
    removal = remove_above(tmp_path, sum(sizes) - 1, kept="a")
    assert (removal.runs, removal.freed_bytes) == (("b",), sizes[1])
    assert remove_above(tmp_path, sizes[3], kept="").runs == ("a", "c")
    assert remove_above(tmp_path, 0, kept="d").runs == ()


def test_a_run_is_as_old_as_its_newest_line(tmp_path: Path) -> None:
    """Also behind a long line, and if the clock of one host is wrong."""
    run = make_job(tmp_path / "a", 2, intervals=2)
    now = time.time()
    for rank, t in enumerate((now - 5 * DAY_S, now - 60 * DAY_S)):
        writer = LineWriter(run, rank, lambda t=t: t)  # type: ignore[misc]
        writer.line("event", iteration=1, event="notice", text="x" * record_lines.TAIL_BYTES)
        writer.line("end", **END)
    assert remove_older(tmp_path, 30).runs == ()
    with rank_file(run, 0).open("a") as file:
        file.write('{"kind":"ev')  # torn
    assert remove_older(tmp_path, 30).runs == ()
    assert remove_older(tmp_path, 4).runs == ("a",)


def test_a_job_runs_if_its_file_has_just_changed(tmp_path: Path) -> None:
    """A clock that was set back, or another host's, makes no old file new."""
    run = make_job(tmp_path / "a", 2, intervals=1)
    written = (run / ALIVE_FILE).stat().st_mtime
    for ahead_s in (0.0, -3600.0, 3600.0):
        now = written - ahead_s
        assert is_alive(run, now) == (ahead_s == 0)
        assert not is_alive(run, now + ALIVE_TIMEOUT_S + 1)
    (run / ALIVE_FILE).unlink()
    assert not is_alive(run, now)


def test_runs_without_run_json_begin_with_their_first_line(tmp_path: Path) -> None:
    for name, t in (("a", 20.0), ("b", 10.0)):
        LineWriter(tmp_path / name, 3, lambda t=t: t).line("head", id=name, rank=3)  # type: ignore[misc]
    (tmp_path / "other").mkdir()
    (tmp_path / "comparison").mkdir()
    (tmp_path / "comparison" / RUN_FILE).write_text('{"schema": 1}')
    assert [run.name for run in find_runs(tmp_path)] == ["b", "a"]
    rank_file(tmp_path / "a", 3).write_text("no JSON\n")
    assert start_s(tmp_path / "a") == 0.0
