"""`offbeat watch`: facts as JSON, screens, readers of a record that grows, terminals."""

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
from cases.made_jobs import ITERATIONS, make_job, write_alive

from offbeat import cli
from offbeat.jobs.interval import Interval, LinkSums
from offbeat.jobs.job_view import JobFollower, delaying_ranks, find_run, view
from offbeat.jobs.record_lines import ALIVE_FILE, RUN_FILE, LineWriter, rank_file
from offbeat.jobs.watch import screen

NOTICE = {"iteration": 1092, "event": "notice", "cause": "slow_rank", "text": "slow since 1,092"}
SAVED = {"iteration": 1200, "event": "checkpoint", "text": "saved checkpoints/001200 in 1.2 s"}
RAISED = {"how": "raised", "iteration": 1440, "text": "RuntimeError: rank 1 (host-1) has left"}
ENDED = {"how": "ended", "iteration": 1440, "text": ""}


def json_of(capsys: pytest.CaptureFixture[str], folder: Path) -> tuple[int, dict[str, Any]]:
    """Exit code and facts of `offbeat watch --json`."""
    code = cli.main(["watch", str(folder), "--json"])
    return code, json.loads(capsys.readouterr().out)


def drawn(folder: Path, width: int = 80, height: int | None = None) -> str:
    """Screen as text, after a check of its size."""
    texts = screen(view(JobFollower(folder)), width, height)
    assert max(text.cell_len for text in texts) <= width
    assert height is None or len(texts) <= height
    return "\n".join(text.plain for text in texts)


def change_alive(job: Path, rank: int, **fields: Any) -> None:
    data = json.loads((job / ALIVE_FILE).read_text())
    data["ranks"][rank] |= fields
    (job / ALIVE_FILE).write_text(json.dumps(data))


# --- facts and screens ---------------------------------------------------------------------------


def test_a_slow_rank(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_job(tmp_path / "run", 4, slow=2, events=[NOTICE], writers=[0])
    code, shown = json_of(capsys, tmp_path)
    assert (code, shown["strategy"], shown["state"]) == (0, "dreamddp(period=8)", "running")
    assert (shown["world_size"], shown["hosts"], shown["iteration"]) == (4, 4, 1440)
    assert (shown["predicted_s"], shown["bound_s"]) == (0.412, 0.395)
    assert shown["iteration_s"] == pytest.approx(0.67, abs=0.02)
    assert shown["loss"] == pytest.approx(4.2 - 0.01 * 119)
    assert len(shown["series_s"]) == 120
    assert [rank["delays_others"] for rank in shown["ranks"]] == [False, False, True, False]
    assert shown["ranks"][2]["compute_s"] == pytest.approx(0.615)
    assert shown["events"][0]["cause"] == "slow_rank"


@pytest.mark.parametrize("width", [60, 80, 100])
def test_the_screen_has_a_row_per_rank_or_those_that_matter(tmp_path: Path, width: int) -> None:
    for world_size in (4, 32):
        job = make_job(
            tmp_path / f"run{world_size}", world_size, slow=2, events=[NOTICE, SAVED], writers=[0]
        )
        lines = drawn(job, width).splitlines()
        assert f"{world_size} ranks" in lines[0]
        assert any(NOTICE["text"] in line for line in lines)
        rows = [row for row in lines if row[:4].strip().isdecimal() and " host-" in row]
        assert len(rows) == (4 if world_size == 4 else 6)
        (slow,) = (row for row in rows if row.startswith("   2 host-2 "))
        assert " 615 ms " in slow
        (bars,) = (row for row in lines if row.startswith("seconds "))
        assert bars.count("▁") > 2 * (bars.count("█") + bars.count("▇")) > 0  # the last quarter


@pytest.mark.parametrize("world_size", [4, 200])
def test_the_screen_fits_the_height_of_a_terminal(tmp_path: Path, world_size: int) -> None:
    job = make_job(tmp_path / "run", world_size, slow=2, events=8 * [NOTICE], writers=[0])
    text = drawn(job, 80, 24)
    assert " host-2 " in text
    assert NOTICE["text"] in text  # the newest events, not as many as there are


def test_a_silent_rank(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Heartbeats of many ranks may be older."""
    job = make_job(tmp_path / "run", 32, silent=21, writers=[0])
    code, shown = json_of(capsys, job)
    assert (code, shown["state"]) == (1, "silent")
    assert [rank["rank"] for rank in shown["ranks"] if rank["silent"]] == [21]
    first = drawn(job).partition("rank host")[2].splitlines()[1]
    assert first.startswith("  21 host-21 ")
    for world_size, silent in ((4, [1]), (1024, [])):
        job = make_job(tmp_path / f"{world_size}", world_size, intervals=1, writers=[0])
        change_alive(job, 1, age_s=10.0)
        _, shown = json_of(capsys, job)
        assert [rank["rank"] for rank in shown["ranks"] if rank["silent"]] == silent


def test_before_the_first_iteration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = make_job(tmp_path / "run", 2, intervals=0)
    for _ in range(2):
        code, shown = json_of(capsys, job)
        assert (code, shown["iteration_s"], shown["world_size"]) == (0, None, 2)
        assert drawn(job)
        (job / ALIVE_FILE).unlink(missing_ok=True)


def test_a_failed_rank_and_losses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Losses that are not finite are counted. The cross-entropy of a certain prediction is -0."""
    job = make_job(tmp_path / "run", 2, intervals=4)
    last = json.loads((job / ALIVE_FILE).read_text())["ranks"][0]["interval"]
    newer = {**last, "t": last["t"] + 1, "s_sum": 5.0, "script_s": 2.5, "loss": [8, -0.0, -0.0, 3]}
    change_alive(job, 0, interval=newer)
    change_alive(job, 1, state="failed", activity="ValueError: no\nmore data", age_s=90.0)
    code, shown = json_of(capsys, job)
    assert (code, shown["nonfinite_losses"], shown["loss"]) == (1, 3, 0)
    assert shown["ranks"][1]["state"] == "failed"
    assert shown["script_share"] == pytest.approx(0.5)
    text = drawn(job, 100)
    assert "no more data" in text
    assert "-0" not in text.partition("rank host")[0]


@pytest.mark.parametrize(
    ("how", "code", "state"),
    [
        ({}, 0, "running"),
        ({"silent": 1}, 1, "silent"),
        ({"end": ENDED}, 0, "ended"),
        ({"end": ENDED, "silent": 1}, 0, "ended"),
        ({"end": RAISED}, 1, "raised"),
        ({"end": {"how": "signal", "iteration": 1440, "text": "SIGTERM"}}, 1, "signal"),
    ],
)
def test_exit_codes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], how: dict[str, Any], code: int, state: str
) -> None:
    make_job(tmp_path / "run", 2, intervals=2, **how)
    assert cli.main(["watch", str(tmp_path), "--once"]) == code
    text = capsys.readouterr().out
    assert "dreamddp(period=8)" in text
    assert how.get("end", {}).get("text", "") in text
    assert json_of(capsys, tmp_path)[1]["state"] == state
    if "end" in how:  # without a terminal, the command ends with the job
        assert cli.main(["watch", str(tmp_path)]) == code
        assert f" {27 if 'silent' in how else 24}, " in capsys.readouterr().out


WITHOUT_TORCH = """
import sys
from offbeat.cli import main
code = main(["watch", sys.argv[1], "--once"])
loaded = [m for m in ("torch", "offbeat.core.runtime", "offbeat.gossip") if m in sys.modules]
assert not loaded, loaded
sys.exit(code)
"""


def test_watching_loads_no_torch_and_needs_no_utf_8(tmp_path: Path) -> None:
    make_job(tmp_path / "run", 2, intervals=2, writers=[0])
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, str(tmp_path)],
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "\nseconds ??" in done.stdout


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


def test_a_long_record_is_read_in_bounded_memory(tmp_path: Path) -> None:
    folder = make_job(tmp_path / "run", 1, intervals=2, events=[SAVED])
    last = rank_file(folder, 0).read_text().splitlines()[-2]
    with rank_file(folder, 0).open("a") as file:
        file.write(f"{last}\n" * 6000)
    job = JobFollower(folder)
    assert 100 < len(job.series) < 5000


def test_rank_0_is_silent_if_the_reader_sees_no_change(tmp_path: Path) -> None:
    """Whatever the clock of its host: only changes that the reader sees count."""
    for offset_s, certain in ((0.0, True), (-4000.0, False), (4000.0, False)):
        folder, now = make_job(tmp_path / f"run{offset_s}", 2), 100.0
        for path in folder.iterdir():
            os.utime(path, 2 * (time.time() + offset_s,))
        job = JobFollower(folder, lambda: now)  # noqa: B023
        assert (job.is_certain, view(job).state) == (certain, "running" if certain else "checking")
        now += 9.0
        write_alive(folder, 2, {})
        os.utime(folder / ALIVE_FILE, 2 * (time.time() + offset_s,))
        job.read()
        now += 9.0
        job.read()
        assert view(job).state == "running"
        now += 2.0
        job.read()
        shown = view(job)
        silent = [rank.silent for rank in shown.ranks]
        assert (shown.state, silent) == ("silent", [True, False])
    LineWriter(folder, 0).line("end", how="ended", iteration=1, text="")
    now += 99.0
    job.read()
    assert (view(job).state, view(job).has_failed) == ("ended", False)


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
        assert "OFFBEAT_RECORD" in capsys.readouterr().err
    make_job(tmp_path / "run", 4, intervals=1, writers=[3])
    (tmp_path / "run" / RUN_FILE).unlink()
    for folder in (tmp_path, tmp_path / "run"):
        assert cli.main(["watch", "--once", str(folder)]) == 2
        assert "rank 0" in capsys.readouterr().err


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
            time.sleep(1.2)  # a second passes between two looks
            file.write(f"{encoded[99:]}\n")
        wait_for(text, "iteration 36")
        (folder / ALIVE_FILE).unlink()
        rank_file(folder, 0).unlink()
        time.sleep(1.2)
        make_job(folder, 8, intervals=5, silent=5, writers=[0])
        wait_for(text, "rank 5 silent")
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
