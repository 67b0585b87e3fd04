"""Records and monitor of a job with clocks, drives and stores that only these tests have."""

from __future__ import annotations

import errno
import os
import random
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from cases.made_jobs import made_interval
from torch.distributed import HashStore

from offbeat import WFBP
from offbeat.core.runtime.iteration import Iteration, Timestamps
from offbeat.core.transport.device import CPU
from offbeat.jobs import board, monitor, observer, record_lines, tally
from offbeat.jobs.board import Board
from offbeat.jobs.interval import Interval, combine, quantile
from offbeat.jobs.monitor import JobMonitor
from offbeat.jobs.record_lines import LineWriter, load
from offbeat.jobs.replica_sample import SampledElements
from offbeat.jobs.settings import JobSettings
from offbeat.jobs.tally import Tally
from offbeat.profile import Bucket, Link, Profile

PROFILE = Profile((Bucket("a", 0.05, 0.1, 4000),), (Link("net", 1e-3, 4e5),), world_size=2)


def interval_of(rank: int, k: int) -> Interval:
    return made_interval(rank, k, 1000, 1e9, None, random.Random(k))


def test_three_weeks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At most 5.6 MB per rank, and percentiles within 9 %, at 20 s per iteration."""
    now, rng = [0.0], random.Random(3)
    monkeypatch.setattr(observer, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(tally, "resident_bytes", lambda: 10**9)  # reads a file
    job = observer.JobObserver.__new__(observer.JobObserver)
    job._tally = Tally(0, CPU(), lambda: {"eth0": int(1e6 * now[0])}, lambda: now[0])
    job._writer = LineWriter(tmp_path, 0, lambda: now[0])
    job._total, job._metrics, job._began_s, job._due_s = None, {}, 0.0, 0.0
    job._line_due_s, job._unwritten, job._microseconds = 0.0, [], []
    job._count = job._next = 0
    job._board = SimpleNamespace(post=lambda _: None)  # type: ignore[assignment]
    took = list[float]()
    sent: Any = SimpleNamespace(transfer=SimpleNamespace(link="eth0"), was_sent=True)
    done = Iteration(number=0, marks=(marks := Timestamps()), messages=[sent])
    while now[0] < 3 * 7 * 86400.0:
        s = 20 * rng.lognormvariate(0, 0.3)
        begin, now[0] = now[0], now[0] + s
        marks.begin, marks.end = begin, now[0]
        marks.first_forward = marks.forward = begin + 0.001 * s
        marks.backward_end = sent.start = begin + 0.8 * s
        marks.waited = marks.step = sent.end = begin + 0.9 * s
        marks.stepped = now[0]
        took.append(s)
        job._tally.add(done, len(took) - 1, True)
        if now[0] >= job._due_s:
            job._close_interval()
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 5.6e6
    record = load([tmp_path])
    whole, ordered = combine(record.ranks[0].intervals), sorted(took)
    assert whole.n > 0.99 * len(took)
    for share in (0.05, 0.5, 0.95, 0.99):
        exact = ordered[int(share * len(ordered))]
        assert quantile(whole.hist, share) == pytest.approx(exact, rel=0.09)
    assert len(record.ranks[0].intervals) < 7500


def test_a_full_disk_is_reported_once_and_written_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, real, full = [0.0], os.write, [True]
    write = lambda file, data: real(file, data[:10] if full[0] else data)  # noqa: E731
    monkeypatch.setattr(record_lines.os, "write", write)
    writer = LineWriter(tmp_path, 0, lambda: 1e9 - now[0], lambda: now[0])  # set back meanwhile
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for k in range(5):
            writer.line("interval", **interval_of(0, k).to_dict())
            now[0] += record_lines.RETRY_S / 2
    (warning,) = caught
    assert os.strerror(errno.ENOSPC) in str(warning.message)
    full[0] = False
    now[0] += record_lines.RETRY_S
    writer.line("end", how="ended")
    found = load([tmp_path]).ranks[0]
    assert [i.first for i in found.intervals] == [12 * k for k in range(5)]
    assert found.end is not None


def test_a_drive_that_does_not_answer_delays_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Later writes wait in memory. The oldest ones are given up and counted."""
    answers, append, asked = threading.Event(), record_lines._append, threading.Event()

    def hang(path: Path, data: bytes) -> None:
        asked.set()
        assert answers.wait(20)
        append(path, data)

    monkeypatch.setattr(record_lines, "_append", hang)
    monkeypatch.setattr(record_lines, "MOST_UNWRITTEN", 4)
    writer = record_lines.BackgroundWriter(tmp_path, 0)
    writer.line("head", id="a", rank=0)
    assert asked.wait(20)
    for k in range(7):
        writer.line("interval", **interval_of(0, k).to_dict())
    writer.replace("alive.json", {"id": "a"})
    assert not writer.flush(0.01)
    answers.set()
    assert writer.flush(20)
    record = load([tmp_path])
    assert [i.first for i in record.ranks[0].intervals] == [48, 60, 72]
    assert [e["text"][:2] for e in record.ranks[0].events] == ["4 "]
    assert record.alive is not None


def test_departures_of_the_plan_are_noticed_and_iterations_before_it_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sums count each interval once; ranks that have left have no metrics."""
    now, states = [1000.0], list[Any]()
    sink = SimpleNamespace(update=states.append, close=lambda: None)
    monkeypatch.setattr(monitor, "time", SimpleNamespace(monotonic=lambda: now[0], time=time.time))
    monkeypatch.setattr(monitor, "open_sinks", lambda *_: [sink])
    statuses = [{"age_s": 0.5, "iteration": 3, "state": "running", "activity": "x"} for _ in "ab"]
    facts = {"id": "a", "job_name": "a job", "strategy": "wfbp", "hosts": ["a", "b"],
             "pids": [1, 2], "versions": {"offbeat": "0.2.0"}}  # fmt: skip
    watched = JobMonitor(
        JobSettings(str(tmp_path), (), "off", "a job"),
        facts,
        WFBP(),
        0,
        SimpleNamespace(statuses=lambda: statuses),  # type: ignore[arg-type]
        LineWriter(tmp_path, 0),
    )
    plan = WFBP().plan(PROFILE)
    watched.on_plan(plan, PROFILE, 100)

    def round_of(first: int, s: float) -> None:
        now[0] += 2.0
        newest = {r: Interval(r, first, 20, float(first), 20 * s, s, s, {0: 20}, 16 * s, 4 * s, 0.0)
                  for r in range(2)}  # fmt: skip
        watched.on_round(newest, None)

    for k in (0, 0, *range(20)):
        round_of(k, s=2.0)
    assert not watched.notices
    assert states[-1].ranks[1].totals.n == 20 * 20
    for k in range(100, 140):
        round_of(20 * k, s=2.0)
    assert dict(watched.notices) == {"slow_compute": 1}
    (event,) = load([tmp_path]).ranks[0].events
    assert (event["event"], event["cause"]) == ("notice", "slow_compute")
    statuses[1]["state"] = "left"
    round_of(9000, s=2.0)
    assert [*states[-1].ranks] == [0]
    first = (tmp_path / "plan.json").read_bytes()
    watched.on_plan(plan, PROFILE, 12_000)
    round_of(12_000, s=2.0)
    assert (tmp_path / "plan.json").read_bytes() == first
    assert (tmp_path / "plan-12000.json").exists()


def test_divergence_is_that_of_all_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mean squared distance of a sample, times the parameters per sampled one; rank 0 has the
    newest interval of every rank in the last round."""
    store = HashStore()
    monkeypatch.setattr(board.distributed_c10d, "_get_default_store", lambda: store)
    monkeypatch.setattr(board, "ROUND_S", 0.01)
    found, rounds = list[float | None](), list[dict[int, Interval]]()
    note: Callable[..., None] = lambda newest, x: (rounds.append({**newest}), found.append(x))  # noqa: E731
    controls: Any = [SimpleNamespace(rank=rank, world_size=2, met=1) for rank in range(2)]
    first, other = Board(controls[0], note), Board(controls[1], None)
    samples = [SampledElements([torch.randn(4096, dtype=torch.float64)]) for _ in range(2)]
    for each, sampled in zip((first, other), samples, strict=True):
        each.post_sample(3, sampled)
    end_s = time.monotonic() + 30
    while not found or found[-1] is None:
        assert time.monotonic() < end_s
        time.sleep(0.005)
    rows = np.stack([sampled.numbers().numpy() for sampled in samples])
    expected = 4096 / 256 * ((rows - rows.mean(0)) ** 2).sum(1).mean()
    assert found[-1] == pytest.approx(expected)
    other.post(interval_of(1, 5))
    other.close()
    first.post(interval_of(0, 7))
    first.close()
    assert {rank: one.first for rank, one in rounds[-1].items()} == {0: 84, 1: 60}
