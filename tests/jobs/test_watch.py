"""`offbeat watch`: screens, readers of a record that grows, exit codes, terminals."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.made_jobs import ITERATIONS, make_job, write_alive

from offbeat import cli
from offbeat.jobs import job_view
from offbeat.jobs.interval import Interval, LinkSums
from offbeat.jobs.job_view import JobFollower, delaying_ranks, find_run, view
from offbeat.jobs.record_lines import ALIVE_FILE, RUN_FILE, LineWriter, rank_file
from offbeat.jobs.watch import line, screen, state_text
from offbeat.jobs.words import local_time

NOTICE = {
    "iteration": 1092,
    "event": "notice",
    "cause": "slow_rank",
    "text": "since iteration 1,092: .669 s each, predicted .412 (−38 %). Rank 2 (host-2) computes "
    "2.1 times as long as when measured, the others wait for it.",
}
SAVED = {"iteration": 1200, "event": "checkpoint", "text": "saved checkpoints/001200 in 1.2 s"}
RAISED = {"how": "raised", "iteration": 1440, "text": "RuntimeError: rank 1 (host-1) has left"}


def drawn(folder: Path, width: int, height: int | None = None) -> str:
    """Screen as text, after a check of its size."""
    texts = screen(view(JobFollower(folder)), width, height)
    assert max(text.cell_len for text in texts) <= width
    assert height is None or len(texts) <= height
    assert not any("\n" in text.plain for text in texts)
    return "\n".join(text.plain for text in texts)


# --- screens -------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [4, 8, 32])
@pytest.mark.parametrize("width", [60, 80, 100])
def test_screen_of_a_slow_rank(tmp_path: Path, width: int, world_size: int) -> None:
    job = make_job(
        tmp_path / "1124-0612-3f9a", world_size, slow=2, events=[NOTICE, SAVED], writers=[0]
    )
    text = drawn(job, width)
    lines = text.splitlines()
    assert lines[0].startswith(f"1124-0612-3f9a  dreamddp(period=8)  {world_size} ranks")
    assert lines[0].endswith("running")
    assert (f"on {world_size} hosts" in text) == (width > 60)
    for fact in ("iteration 1,440", "predicted 412 ms (−3", " % waiting", "loss 3.01", "seconds ▁"):
        assert fact in text, fact
    (bars,) = (row for row in lines if row.startswith("seconds "))
    assert bars.count("▁") > 2 * (bars.count("█") + bars.count("▇")) > 0  # the last quarter is slow
    (slow,) = (row for row in lines if row.startswith("   2 host-2 "))
    assert "delays others: in forward" in slow
    assert " 615 ms " in slow
    assert ("  sent/s" in text, "  script" in text) == (width > 60, width > 80)
    ranks = [row for row in lines if row[:4].strip().isdecimal() and " host-" in row]
    assert len(ranks) == (world_size if world_size <= 16 else 6)
    assert ("ranks  ww*www" in text) == ("* delays others" in text) == (world_size > 16)
    assert ("26 others: compute 37" in text) == (world_size > 16)
    assert "    1,092 since iteration 1,092: .669 s each" in text
    assert lines[-1] == "    1,200 saved checkpoints/001200 in 1.2 s"
    assert "inspect" not in text


@pytest.mark.parametrize("width", [60, 80, 100])
def test_screen_of_a_silent_rank(tmp_path: Path, width: int) -> None:
    text = drawn(make_job(tmp_path / "1124-0612-3f9a", 32, silent=21, writers=[0]), width)
    assert text.splitlines()[0].endswith("rank 21 silent")
    assert f"\nranks  {'w' * 21}!{'w' * 10}\n" in text
    table = text.partition("rank host")[2].splitlines()
    assert table[1].startswith("  21 host-21        1,440 ")
    assert table[1].endswith("SILENT 47 s, in its script")
    assert "waiting for param of bl" in table[2]  # the phase is left out before the message is
    assert "last heartbeat at most 0.4 s ago" in text
    assert text.splitlines()[-1] == "inspect it: ssh host-21 py-spy dump --pid 48122"


@pytest.mark.parametrize(("world_size", "is_silent"), [(4, True), (1024, False)])
def test_heartbeats_of_many_ranks_may_be_older(
    tmp_path: Path, world_size: int, is_silent: bool
) -> None:
    job = make_job(tmp_path / "run", world_size, intervals=1, writers=[0])
    data = json.loads((job / ALIVE_FILE).read_text())
    data["ranks"][1]["age_s"] = 10.0
    (job / ALIVE_FILE).write_text(json.dumps(data))
    ranks = view(JobFollower(job)).ranks
    assert [rank.rank for rank in ranks if rank.silent] == [1] * is_silent


def test_screen_of_a_job_that_was_stopped(tmp_path: Path) -> None:
    text = drawn(make_job(tmp_path / "run", 4, end=RAISED, writers=[0]), 60)
    assert "STOPPED by an exception" in text
    assert text.endswith("RuntimeError: rank 1 (host-1) has left")


def test_ranks_of_a_job_that_has_ended_have_left(tmp_path: Path) -> None:
    """The last heartbeats that rank 0 has read are older than the end."""
    ended = {"how": "ended", "iteration": 1440, "text": ""}
    for end, shown in ((None, "SILENT 47 s, in its script"), (ended, "has left")):
        job = make_job(tmp_path / shown, 2, intervals=2, silent=1, end=end)
        rows = [row for row in drawn(job, 80).splitlines() if " host-" in row]
        assert all(row.endswith("has left") for row in rows) == (end is not None)
        assert rows[1].endswith(shown)


@pytest.mark.parametrize("world_size", [4, 12, 16, 32, 200])
def test_screen_fits_the_height_of_a_terminal(tmp_path: Path, world_size: int) -> None:
    job = make_job(tmp_path / "run", world_size, slow=2, events=8 * [NOTICE], writers=[0])
    text = drawn(job, 80, 24)
    assert "delays others: in forward" in text
    assert "since iteration 1,092" in text  # the newest events, not as many as there are


def test_screen_before_the_first_iteration(tmp_path: Path) -> None:
    job = make_job(tmp_path / "run", 2, intervals=0)
    assert "no iteration has ended yet" in drawn(job, 80)
    assert "in forward" in drawn(job, 80)
    (job / ALIVE_FILE).unlink()
    assert "2 ranks on 2 hosts" in drawn(job, 80)


def test_failed_rank_and_losses_that_are_not_finite(tmp_path: Path) -> None:
    job = make_job(tmp_path / "run", 2, intervals=4)
    data = json.loads((job / ALIVE_FILE).read_text())
    data["ranks"][0]["interval"]["loss"] = [0, 0.0, 0.0, 3]
    data["ranks"][0]["interval"]["t"] += 1
    data["ranks"][0]["interval"] |= {"s_sum": 5.0, "script_s": 2.5}
    data["ranks"][1] |= {"state": "failed", "activity": "ValueError: no\nmore data", "age_s": 90.0}
    (job / ALIVE_FILE).write_text(json.dumps(data))
    text = drawn(job, 100)
    assert "rank 1 failed" in text
    assert "FAILED: ValueError: no more data" in text
    assert "3 losses not finite" in text
    assert "50 % between iterations" in text


def test_a_loss_of_zero_has_no_sign(tmp_path: Path) -> None:
    """The cross-entropy of a certain prediction is -0.0."""
    job = make_job(tmp_path / "run", 2, intervals=4)
    data = json.loads((job / ALIVE_FILE).read_text())
    data["ranks"][0]["interval"]["loss"] = [8, -0.0, -0.0, 0]
    data["ranks"][0]["interval"]["t"] += 1
    (job / ALIVE_FILE).write_text(json.dumps(data))
    assert "mean loss 0" in drawn(job, 80)


def test_line_without_a_terminal(tmp_path: Path) -> None:
    assert "rank 2 delays the others" in line(
        view(JobFollower(make_job(tmp_path / "a", 4, slow=2)))
    )
    silent = line(view(JobFollower(make_job(tmp_path / "b", 4, silent=3))))
    assert silent.startswith("iteration 1,443, 4")
    assert silent.endswith(", rank 3 silent")


# --- the rank that the others wait for -----------------------------------------------------------


def interval(rank: int, message_s: float, wait_s: float, s: float = 0.4) -> Interval:
    n = 10
    links = {"net": LinkSums(n, 0, n * message_s)}
    return Interval(rank, 0, n, 0.0, n * s, s, s, {}, n * (s - wait_s), n * wait_s, 0.0, links)


@pytest.mark.parametrize(
    ("sums", "late"),
    [
        ([(0.003, 0.01), (0.2, 0.2), (0.21, 0.2), (0.2, 0.19)], {0}),
        ([(0.2, 0.2), (0.2, 0.2), (0.003, 0.01), (0.004, 0.01)], {2, 3}),
        ([(0.03, 0.02), (0.031, 0.02), (0.05, 0.03)], set()),  # too little to matter
        ([(0.2, 0.2), (0.003, 0.01), (0.003, 0.01), (0.003, 0.01)], set()),  # one is early
        ([(0.003, 0.0), (0.2, 0.0), (0.21, 0.0)], set()),  # nobody waits: asynchronous
        ([(0.2, 0.2)], set()),
        ([], set()),
    ],
)
def test_rank_that_begins_messages_late(sums: list[tuple[float, float]], late: set[int]) -> None:
    assert delaying_ranks([interval(r, *both) for r, both in enumerate(sums)]) == late


# --- readers -------------------------------------------------------------------------------------


def test_record_that_grows_tears_and_is_replaced(tmp_path: Path) -> None:
    folder = make_job(tmp_path / "run", 2, intervals=3, events=[SAVED])
    path, job = rank_file(folder, 0), JobFollower(folder)
    assert len(job.series) == 3
    text = json.dumps({"kind": "interval", **replace(job.last, first=36).to_dict()})
    with path.open("a") as file:
        file.write(text[:50])
    job.read()
    assert len(job.series) == 3
    with path.open("a") as file:
        file.write(f"{text[50:]}\n")
        file.write('not JSON\n[1]\n{"kind": "interval", "n": 3}\n{"kind": "unknown"}\n')
        file.write('{"kind": "event", "iteration": 9, "text": "a", "later_field": [1]}\n')
    job.read()
    assert (len(job.series), view(job).iteration) == (4, 48)
    assert [event["text"] for event in job.events] == [SAVED["text"], "a"]

    (folder / ALIVE_FILE).write_text('{"ranks": [{"rank": 0, ')
    job.read()
    assert len(view(job).ranks) == 2  # of the last complete file
    (folder / ALIVE_FILE).write_text('{"ranks": [{"rank": 1, "new": 1, "interval": {"n": 0}}, 7]}')
    job.read()
    (rank,) = view(job).ranks
    assert (rank.rank, rank.compute_s, rank.silent) == (1, None, False)
    (folder / ALIVE_FILE).unlink()
    job.read()
    assert drawn(folder, 80)

    path.unlink()
    job.read()
    assert (len(job.series), list(job.events)) == (0, [])
    make_job(folder, 2, intervals=2)
    job.read()
    assert (len(job.series), view(job).iteration) == (2, 24)
    path.write_text("")  # shorter, in place
    job.read()
    assert len(job.series) == 0


def test_long_record_is_read_by_its_gain_and_in_bounded_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_job(tmp_path / "run", 1, intervals=2, events=[SAVED])
    last = rank_file(folder, 0).read_text().splitlines()[-2]
    with rank_file(folder, 0).open("a") as file:
        file.write(f"{last}\n" * 6000)
    job = JobFollower(folder)
    assert len(job.series) == job_view.SERIES_POINTS
    read: list[int] = []
    follow = job_view.follow
    monkeypatch.setattr(
        job_view, "follow", lambda *args: read.append(len((f := follow(*args))[0])) or f
    )
    job.read()
    with rank_file(folder, 0).open("a") as file:
        file.write(f"{last}\n")
    job.read()
    assert read == [0, 1]
    assert len(job.series) == job_view.SERIES_POINTS


def test_rank_0_is_silent_if_the_reader_sees_no_change(tmp_path: Path) -> None:
    folder, now = make_job(tmp_path / "run", 2), 100.0
    job = JobFollower(folder, lambda: now)
    assert view(job).state == "running"
    now += 9.0
    write_alive(folder, 2, {})
    job.read()
    now += 9.0
    job.read()
    assert view(job).state == "running"
    now += 2.0
    job.read()
    shown = view(job)
    assert (shown.state, shown.ranks[0].silent, shown.ranks[1].silent) == ("silent", True, False)
    assert "rank 0 silent since " in line(shown)
    write_alive(folder, 2, {})
    job.read()
    assert view(job).state == "running"
    LineWriter(folder, 0).line("end", how="ended", iteration=1, text="")
    now += 99.0
    job.read()
    assert (view(job).state, view(job).has_failed) == ("ended", False)
    assert job.end is not None
    assert state_text(view(job)) == f"ended {local_time(job.end['t'])}"


@pytest.mark.parametrize("offset_s", [-4000.0, 4000.0])
def test_clock_of_another_host_is_not_compared(tmp_path: Path, offset_s: float) -> None:
    """Files of a host whose clock differs: only changes that the reader sees count."""
    folder, now = make_job(tmp_path / "run", 2), 100.0
    for path in folder.iterdir():
        os.utime(path, 2 * (time.time() + offset_s,))
    job = JobFollower(folder, lambda: now)
    assert (job.is_certain, view(job).state) == (False, "checking")
    write_alive(folder, 2, {}, silent=None)
    os.utime(folder / ALIVE_FILE, 2 * (time.time() + offset_s,))
    job.read()
    assert (job.is_certain, view(job).state) == (True, "running")
    now += 10.0
    job.read()
    assert view(job).state == "silent"


# --- folders -------------------------------------------------------------------------------------


def test_newest_run_of_a_folder(tmp_path: Path) -> None:
    for name, started in (("1124-0612-3f9a", 300.0), ("0101-0612-aaaa", 900.0), ("1231-1", 1.0)):
        make_job(tmp_path / name, 1, intervals=1)
        run = json.loads((tmp_path / name / RUN_FILE).read_text())
        (tmp_path / name / RUN_FILE).write_text(json.dumps({**run, "started": started}))
    (tmp_path / "20260101-train").mkdir()
    (tmp_path / "20260101-train" / RUN_FILE).write_text('{"seeds": [0]}')  # of a comparison
    assert find_run(tmp_path) == tmp_path / "0101-0612-aaaa"
    assert find_run(tmp_path / "1231-1") == tmp_path / "1231-1"


def test_folder_without_a_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for folder in (tmp_path, tmp_path / "missing"):
        assert cli.main(["watch", str(folder)]) == 2
        assert f"OFFBEAT_RECORD={folder} " in capsys.readouterr().err
    make_job(tmp_path / "run", 4, intervals=1, writers=[3])
    (tmp_path / "run" / RUN_FILE).unlink()
    for folder in (tmp_path, tmp_path / "run"):
        assert cli.main(["watch", "--once", str(folder)]) == 2
        assert "on the host of rank 0" in capsys.readouterr().err


# --- the command ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "code"),
    [
        ({}, 0),
        ({"silent": 1}, 1),
        ({"end": {"how": "ended", "iteration": 1440, "text": ""}}, 0),
        ({"end": {"how": "ended", "iteration": 1440, "text": ""}, "silent": 1}, 0),
        ({"end": RAISED}, 1),
        ({"end": {"how": "signal", "iteration": 1440, "text": "SIGTERM"}}, 1),
    ],
)
def test_exit_codes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], how: dict[str, Any], code: int
) -> None:
    make_job(tmp_path / "run", 2, intervals=2, **how)
    assert cli.main(["watch", str(tmp_path), "--once"]) == code
    assert "dreamddp(period=8)" in capsys.readouterr().out
    if "end" in how:  # without a terminal, the command ends with the job
        assert cli.main(["watch", str(tmp_path)]) == code
        iteration = 27 if "silent" in how else 24  # the heartbeat is newer than the interval
        assert capsys.readouterr().out.startswith(f"iteration {iteration}, ")


def test_once_observes_a_job_whose_files_are_old(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_job(tmp_path / "run", 2, intervals=2)
    for path in folder.iterdir():
        os.utime(path, (1.0, 1.0))
    monkeypatch.setattr(job_view, "ALIVE_TIMEOUT_S", 0.5)
    assert cli.main(["watch", str(folder), "--json"]) == 1
    shown = json.loads(capsys.readouterr().out)
    assert (shown["state"], shown["ranks"][0]["silent"]) == ("silent", True)
    assert shown["rank_0_silent_s"] >= 0.5


JSON_WITHOUT_TORCH = """
import sys
from offbeat.cli import main
code = main(["watch", sys.argv[1], "--json"])
loaded = [m for m in ("torch", "offbeat.core.runtime", "offbeat.gossip") if m in sys.modules]
assert not loaded, loaded
sys.exit(code)
"""


def test_json_holds_what_a_screen_shows_and_loads_no_torch(tmp_path: Path) -> None:
    make_job(tmp_path / "run", 4, slow=2, events=[NOTICE], writers=[0])
    done = subprocess.run(
        [sys.executable, "-c", JSON_WITHOUT_TORCH, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    shown = json.loads(done.stdout)
    assert shown["strategy"] == "dreamddp(period=8)"
    assert (shown["world_size"], shown["hosts"], shown["state"]) == (4, 4, "running")
    assert (shown["iteration"], shown["predicted_s"], shown["bound_s"]) == (1440, 0.412, 0.395)
    assert shown["iteration_s"] == pytest.approx(0.67, abs=0.02)
    assert len(shown["series_s"]) == 120
    assert [rank["delays_others"] for rank in shown["ranks"]] == [False, False, True, False]
    assert shown["ranks"][2]["compute_s"] == pytest.approx(0.615)
    assert shown["events"][0]["cause"] == "slow_rank"


def test_output_without_utf_8(tmp_path: Path) -> None:
    make_job(tmp_path / "run", 2, intervals=2, writers=[0])
    done = subprocess.run(
        [sys.executable, "-m", "offbeat", "watch", str(tmp_path), "--once"],
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "\nseconds ?? 4" in done.stdout


# --- a terminal ----------------------------------------------------------------------------------


@contextlib.contextmanager
def terminal(*arguments: str) -> Iterator[tuple[subprocess.Popen[bytes], Callable[[], str]]]:
    """`offbeat watch` in a terminal of 80x24, and what it has written to it."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    environment = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES", "NO_COLOR")}
    code = (
        "import signal, sys; from offbeat.cli import main; "
        # A shell's "&" would ignore it.
        "signal.signal(signal.SIGINT, signal.default_int_handler); sys.exit(main(sys.argv[1:]))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, "watch", *arguments],
        stdin=slave,
        stdout=slave,
        stderr=slave,
        env={**environment, "TERM": "xterm-256color"},
        start_new_session=True,
    )
    os.close(slave)
    written = bytearray()

    def read() -> None:
        try:
            while data := os.read(master, 65536):
                written.extend(data)
        except OSError:  # the process has exited
            pass

    reader = threading.Thread(target=read)
    reader.start()
    try:
        yield process, lambda: written.decode(errors="replace")
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        reader.join(10)
        os.close(master)


def wait_for(text: Callable[[], str], expected: str) -> None:
    deadline = time.monotonic() + 60
    while expected not in text():
        assert time.monotonic() < deadline, f"{expected!r} is not in {text()[-3000:]!r}"
        time.sleep(0.05)


def test_terminal_over_a_record_that_grows_tears_and_is_replaced(tmp_path: Path) -> None:
    folder = make_job(tmp_path / "run", 8, intervals=2, writers=[0])
    with terminal(str(tmp_path)) as (process, text):
        wait_for(text, "iteration 24")
        last = JobFollower(folder).last
        assert last is not None
        grown = replace(last, first=2 * ITERATIONS, t=last.t + 5)
        encoded = json.dumps({"kind": "interval", "schema": 3, **grown.to_dict()})
        with rank_file(folder, 0).open("a") as file:
            file.write(encoded[:99])
            file.flush()
            time.sleep(1.5)
            file.write(f"{encoded[99:]}\n")
        wait_for(text, "iteration 36")
        (folder / ALIVE_FILE).unlink()
        rank_file(folder, 0).unlink()
        time.sleep(1.5)
        make_job(folder, 8, intervals=5, silent=5, writers=[0])
        wait_for(text, "SILENT 47 s, in its script")
        LineWriter(folder, 0).line("end", how="raised", iteration=60, text="RuntimeError: no more")
        assert process.wait(60) == 1
    final = text().rpartition("\x1b[?1049l")[2]  # after the alternate screen
    assert "iteration 63" in final
    assert "RuntimeError: no more" in final
    assert "Traceback" not in text()


def test_interrupt_in_a_terminal(tmp_path: Path) -> None:
    make_job(tmp_path / "run", 2, intervals=2, writers=[0])
    with terminal(str(tmp_path)) as (process, text):
        wait_for(text, "iteration 24")
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(60) == 130
    assert "iteration 24" in text().rpartition("\x1b[?1049l")[2]
    assert "Traceback" not in text()
