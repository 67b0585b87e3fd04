"""SIGTERM: a last common iteration and a checkpoint, or the end alone."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cases import stopping_jobs as jobs
from harness.commands import ForkedPython
from harness.parts import Folder, load
from harness.ranks import TESTS, in_turn, run_ranks, watch_ranks

from offbeat import A2CiD2, LocalSGD

TERMINATED = -signal.SIGTERM
SCRIPT = """
import sys
from cases import stopping_jobs
stopping_jobs.train(sys.argv[1], 1_000_000, pauses_s=(0.01, 0.01))
"""


def ends(folder: Path) -> list[str]:
    return [path.read_text() for path in sorted(folder.glob("end*"))]


def require_resumable(folder: Path) -> None:
    """One checkpoint, from which a job continues bit for bit."""
    [name] = Folder(folder / "kept").names()
    iterations = int(name.rpartition("-")[2]) + 4
    calls = [(None, iterations), (str(folder), iterations)]
    for whole, resumed in run_ranks(2, in_turn, jobs.train, calls):
        assert resumed == whole


@pytest.mark.parametrize(("signalled", "sender"), [((0, 1), "[01]"), ((1,), "1")])
def test_all_ranks_stop_after_the_same_iteration(
    signalled: tuple[int, ...], sender: str, tmp_path: Path
) -> None:
    """Rank 0 is faster, and leads by up to a period."""
    job = (str(tmp_path), 1_000_000, signalled, (0.0, 0.05), LocalSGD(period=7))
    outcomes = watch_ranks(2, jobs.train, *job)
    assert [one.exitcode for one in outcomes] == [TERMINATED] * 2
    [name] = Folder(tmp_path / "kept").names()
    count = name.rpartition("-")[2]
    text = f"Stopped after {count} iterations; the checkpoint is {tmp_path}/kept/{name}"
    found = ends(tmp_path)
    assert len(found) == 2
    assert len(set(found)) == 1, "all ranks name the same rank"
    for end in found:
        assert re.fullmatch(f"signal: Rank {sender} received SIGTERM. {re.escape(text)}", end)


def test_ranks_that_do_not_wait_for_each_other_stop_separately(tmp_path: Path) -> None:
    job = (str(tmp_path), 1_000_000, (0, 1), (0.0, 0.05), A2CiD2())
    outcomes = watch_ranks(2, jobs.train, *job)
    assert [one.exitcode for one in outcomes] == [TERMINATED] * 2
    for rank, end in enumerate(ends(tmp_path)):
        [name] = Folder(tmp_path / "kept" / f"worker-{rank}").names()
        assert end.startswith(f"signal: Rank {rank} received SIGTERM. Stopped after ")
        assert end.endswith(f"/worker-{rank}/{name}")


def test_a_server_ends_after_its_workers(tmp_path: Path) -> None:
    """Otherwise the workers would end by an error, as the launcher stops all ranks at once."""
    outcomes = watch_ranks(3, jobs.serve_and_train, str(tmp_path))
    assert [one.exitcode for one in outcomes] == [TERMINATED] * 3, outcomes[0].error
    (folder,) = (tmp_path / "runs").iterdir()
    texts = [lines.end and lines.end["text"] for _, lines in sorted(load([folder]).ranks.items())]
    assert re.fullmatch(r"Rank 0 received SIGTERM\. Stopped after \d+ iterations", str(texts[0]))
    assert re.fullmatch(r"Rank 1 received SIGTERM\. Stopped after \d+ iterations", str(texts[1]))
    assert texts[2] == "Rank 2 received SIGTERM. Ended after 0 iterations: no worker is connected"


def test_workers_of_a_loader_end_after_their_rank(tmp_path: Path) -> None:
    """Otherwise torch would raise in the rank, which could not save the checkpoint."""
    outcomes = watch_ranks(2, jobs.train_with_loader, str(tmp_path))
    assert [one.exitcode for one in outcomes] == [TERMINATED] * 2, outcomes[0].error
    assert len(Folder(tmp_path / "kept").names()) == 1
    worker, until = (tmp_path / "worker").read_text(), time.monotonic() + 20
    while is_running(worker) and time.monotonic() < until:
        time.sleep(0.1)
    assert not is_running(worker)


def is_running(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_torchrun_and_resume(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    process = ForkedPython(
        [*torchrun, "--nproc-per-node", "2", str(script), str(tmp_path)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(TESTS)},
        stderr=subprocess.PIPE,
        workers=True,
    )
    try:
        until = time.monotonic() + 60
        while len([*tmp_path.glob("at*")]) < 2 and time.monotonic() < until:
            time.sleep(0.1)
        process.terminate()
        _, errors = process.communicate(timeout=40)
    finally:
        process.kill()
    assert "Stopped after" in " ".join(ends(tmp_path)), errors
    require_resumable(tmp_path)


@pytest.mark.parametrize(
    ("act", "text", "codes"),
    [
        (jobs.lose_a_rank, "rank 1 has died or stands still", [TERMINATED, -signal.SIGKILL]),
        (jobs.receive_two, "a second SIGTERM has arrived", [TERMINATED] * 2),
        (jobs.block, "the job did not stop within 1.5 s", [TERMINATED] * 2),
    ],
)
def test_end_without_a_checkpoint(
    act: Callable[[str], Any], text: str, codes: list[int], tmp_path: Path
) -> None:
    outcomes = watch_ranks(2, act, str(tmp_path), timeout_s=25)
    assert [one.exitcode for one in outcomes] == codes
    assert f"received SIGTERM. Ended after {jobs.AT} iterations: {text}" in ends(tmp_path)[0]
    assert Folder(tmp_path / "kept").names() == []


def test_handler_of_a_script_is_called_after_the_checkpoint(tmp_path: Path) -> None:
    outcomes = watch_ranks(2, jobs.leave_by_handler, str(tmp_path))
    assert [one.exitcode for one in outcomes] == [TERMINATED, 3]
    assert len(Folder(tmp_path / "kept").names()) == 1


def test_handlers_of_scripts_and_forks(tmp_path: Path) -> None:
    expected = (["before", "after"], TERMINATED)
    assert run_ranks(2, jobs.keep_handlers, str(tmp_path)) == [expected] * 2
