"""Rehearsals in several processes end: whatever the processes or the progress do."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from offbeat.core.strategy.parsing import parse
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

    with pytest.raises(LookupError):
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

    with pytest.raises(RuntimeError, match="processes"):
        run_all(work, STRATEGIES, 2, None)


def multiply_in_threads() -> None:
    x = torch.ones(400, 400)
    for _ in range(4):
        thread = threading.Thread(target=torch.mm, args=(x, x))
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
