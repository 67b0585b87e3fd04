"""Rehearsals in several processes end: whatever the processes or the progress do."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cases import rehearsed

from offbeat.core.strategy.parsing import parse
from offbeat.experiments.comparison import Contestant
from offbeat.experiments.progress import Progress
from offbeat.rehearsal import rehearse
from offbeat.rehearsal.child import CURVE
from offbeat.rehearsal.command import RehearsalOutcome, ScriptRehearsal, _Children
from offbeat.rehearsal.rehearse import RehearsedCurve, run_all

STRATEGIES = [parse("bsp"), parse("wfbp")]
REPORTS = 10_000  # more than a pipe holds


def curve_after(reports: int) -> Callable[..., RehearsedCurve]:
    """Work that reports its iterations."""

    def work(strategy: Any, report: Callable[[int], None]) -> RehearsedCurve:
        for done in range(1, reports + 1):
            report(done)
        return RehearsedCurve(str(strategy), 1, 1, (1.0,), (1.0,))

    return work


def test_an_error_of_the_progress_neither_stops_the_processes_nor_is_lost():
    counted = []

    def fail(name: str, done: int) -> None:
        counted.append((name, done))
        raise LookupError("of the progress")

    with pytest.raises(LookupError, match="of the progress"):
        run_all(curve_after(REPORTS), STRATEGIES, 2, fail)
    assert len(counted) == 1


def test_reports_of_all_processes_arrive_in_order():
    counted: dict[str, list[int]] = {}

    def count(name: str, done: int) -> None:
        counted.setdefault(name, []).append(done)

    curves = run_all(curve_after(REPORTS), STRATEGIES, 2, count)
    assert [curve.strategy for curve in curves] == ["bsp", "wfbp"]
    assert counted == {name: [*range(1, REPORTS + 1)] for name in ("bsp", "wfbp")}


def test_a_process_that_is_killed():
    def work(_: Any, report: Callable[[int], None]) -> RehearsedCurve:
        report(1)
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError

    with pytest.raises(RuntimeError, match=r"processes \(2\): one of them has ended without a res"):
        run_all(work, STRATEGIES, 2, None)


def multiply() -> None:
    x = torch.ones(400, 400)
    torch.mm(x, x)


def multiply_in_threads() -> None:
    for _ in range(4):
        thread = threading.Thread(target=multiply)
        thread.start()
        thread.join()


def test_processes_compute_although_threads_of_this_process_have_just_ended():
    """A fork while threads free their memory copied locks of MKL: one of two or three hung."""

    def work(strategy: Any, _: Any) -> RehearsedCurve:
        signal.setitimer(signal.ITIMER_REAL, 40.0)  # kills a process that hangs
        multiply_in_threads()
        signal.setitimer(signal.ITIMER_REAL, 0)
        return RehearsedCurve(str(strategy), 1, 1, (1.0,), (1.0,))

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        for _ in range(3):
            multiply_in_threads()
            assert len(run_all(work, STRATEGIES, 2, None)) == 2
    finally:
        torch.set_num_threads(before)


def test_threads_that_run_are_known():
    ended = threading.Event()
    thread = threading.Thread(target=ended.wait)
    thread.start()
    tasks = Path("/proc/self/task")
    sleeping = tasks / str(thread.native_id)
    until_s = time.monotonic() + 30
    while rehearse._is_running(sleeping) and time.monotonic() < until_s:
        time.sleep(0.001)  # it has only just been started
    assert not rehearse._is_running(sleeping)
    assert rehearse._is_running(tasks / str(threading.get_native_id()))
    ended.set()
    thread.join()
    assert not rehearse._is_running(tasks / "0")


def test_a_process_that_never_starts_to_compute(monkeypatch):
    """As when a lock was held during the fork, by a thread that the process does not have."""
    monkeypatch.setattr(rehearse, "START_S", 0.2)
    monkeypatch.setattr(rehearse, "_compute", threading.Event().wait)
    with pytest.raises(RuntimeError, match=r"one of them has not computed within 0\.2 s in 3 att"):
        run_all(curve_after(1), STRATEGIES, 2, None)


def test_processes_that_do_not_compute_are_forked_again(tmp_path, monkeypatch):
    """In the first attempt one of both waits for ever, as for a lock that no thread releases."""
    compute, place = rehearse._compute, tmp_path / "first"

    def wait_once() -> None:
        try:
            place.mkdir()
        except FileExistsError:
            compute()
        else:
            threading.Event().wait()

    monkeypatch.setattr(rehearse, "START_S", 3.0)
    monkeypatch.setattr(rehearse, "_compute", wait_once)
    curves = run_all(curve_after(1), STRATEGIES, 2, None)
    assert [curve.strategy for curve in curves] == ["bsp", "wfbp"]


def test_curves_are_in_the_order_of_the_seeds(tmp_path):
    """Also if a later one has ended first, or one has failed."""
    contestants = tuple(Contestant(name, parse(name)) for name in ("bsp", "wfbp"))
    script = tmp_path / "train.py"
    script.write_text("")
    rehearsal = ScriptRehearsal(
        (str(script),), contestants, rehearsed.profile_of(2), seeds=(5, 6, 7)
    )
    children = _Children(rehearsal, RehearsalOutcome(tmp_path), Progress())
    for label, repetition in (("wfbp", 2), ("bsp", 1), ("wfbp", 0), ("bsp", 0)):
        curve = RehearsedCurve(label, 2, 2, (float(repetition),), (1.0,))
        (folder := tmp_path / label / f"rep{repetition}").mkdir(parents=True)
        (folder / CURVE).write_text(json.dumps(curve.to_dict()))
        assert children._keep(contestants[label == "wfbp"], folder)
    found = {label: [c.losses[0] for c in curves] for label, curves in children.curves.items()}
    assert found == {"bsp": [0.0, 1.0], "wfbp": [0.0, 2.0]}
    assert [*found] == ["bsp", "wfbp"]


def test_a_script_that_begins_during_an_interrupt_is_terminated(tmp_path, monkeypatch):
    """Ctrl-C finds no process yet, where one is just being started."""
    (tmp_path / "train.py").write_text("")
    contestant = Contestant("bsp", parse("bsp"))
    script = (str(tmp_path / "train.py"),)
    rehearsal = ScriptRehearsal(script, (contestant,), rehearsed.profile_of(2))
    children = _Children(rehearsal, RehearsalOutcome(tmp_path), Progress())
    ended = []

    def start(*_: Any, **__: Any) -> Any:
        children._is_stopped = True
        return SimpleNamespace(terminate=lambda: ended.append(True), wait=lambda: -signal.SIGTERM)

    monkeypatch.setattr("offbeat.rehearsal.command.subprocess", SimpleNamespace(Popen=start))
    children._rehearse(contestant, Path(tmp_path, "bsp", "rep0"), 0)
    assert ended == [True]
