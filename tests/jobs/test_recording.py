"""Observer and monitor of a job of one rank, whose iterations and times are made up."""

from __future__ import annotations

import gc
import json
import math
import re
import threading
import weakref
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import offbeat
from offbeat import WFBP, LocalSGD
from offbeat.core.runtime.iteration import Iteration, Timestamps
from offbeat.core.transport.device import CPU
from offbeat.core.transport.topology import Topology
from offbeat.jobs import monitor, observer, record_folder, timelines
from offbeat.jobs.interval import Interval, LinkSums, LossSums
from offbeat.jobs.monitor import JobMonitor
from offbeat.jobs.observer import JobObserver
from offbeat.jobs.record_folder import new_run
from offbeat.jobs.record_lines import (
    ALIVE_FILE,
    WRITER_THREAD,
    BackgroundWriter,
    JobRecord,
    LineWriter,
    load,
)
from offbeat.jobs.settings import JobSettings, SinkSetting
from offbeat.profile import Bucket, Link, Profile

ITERATION_S = 0.25
PROFILE = Profile((Bucket("a", 0.05, 0.1, 4000),), (Link("net", 1e-3, 4e5),), world_size=2)


class Clock:
    """Time of a job, which only the test moves on."""

    now_s = 1000.0

    def monotonic(self) -> float:
        return self.now_s

    def __getattr__(self, name: str) -> Any:
        import time

        return getattr(time, name)


class SlowDevice(CPU):
    """A device that has reached nothing after `reached_s`."""

    reached_s, waited = math.inf, False

    def has_reached(self, mark: Any) -> bool:
        return mark <= self.reached_s

    def seconds(self, mark: Any) -> float:
        self.waited |= mark > self.reached_s
        return mark


class Job:
    """An observer, and iterations of .25 s for it."""

    def __init__(self, record: Path | None, clock: Clock, strategy: Any = None, **control: Any):
        self.clock, self.device = clock, SlowDevice()
        self.control = SimpleNamespace(
            rank=0,
            world_size=1,
            met=1,
            gather=lambda value: [value],
            statuses=lambda: [{"age_s": 0.0, "iteration": 3, "state": "running", "activity": "x"}],
            blames_peers=lambda _: False,
        )
        vars(self.control).update(control)
        cluster = SimpleNamespace(
            control=self.control,
            device=self.device,
            where=torch.device("cpu"),
            specs={},
            topology=Topology.flat(1),
        )
        settings = JobSettings(record and str(record), (), "text", "a job")
        self.observer = JobObserver(settings, strategy or WFBP(), cluster)  # type: ignore[arg-type]
        self.session = SimpleNamespace(iteration=0, traffic=dict)
        self.observer.attach(self.session)  # type: ignore[arg-type]
        self.ended = self.before = 0

    def run(self, iterations: int, planned: int | None = None, **fields: Any) -> None:
        for _ in range(iterations):
            self.observer.on_step_begin(self.ended)
            begin = self.clock.now_s
            self.clock.now_s += ITERATION_S
            marks = Timestamps(
                begin=begin,
                first_forward=begin + 0.01,
                forward=begin + 0.01,
                forward_end=begin + 0.1,
                backward_end=begin + 0.2,
                waited=begin + 0.22,
                step=begin + 0.22,
                stepped=begin + 0.25,
                end=begin + 0.25,
            )
            done = Iteration(number=self.ended, marks=marks, messages=[], **fields)
            done.planned = self.ended if planned is None else planned
            self.observer.add_iteration(done)
            self.ended += 1
            self.session.iteration = self.before + self.ended


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(observer, "time", clock)
    monkeypatch.setattr(monitor, "time", clock)
    return clock


@pytest.fixture
def opened(tmp_path: Path, clock: Clock) -> Iterator[Callable[..., Job]]:
    jobs: list[Job] = []

    def open_job(*args: Any, **control: Any) -> Job:
        jobs.append(Job(tmp_path, clock, *args, **control))
        return jobs[-1]

    yield open_job
    for job in jobs:
        job.observer.end("ended")


def read(folder: Path) -> JobRecord:
    (run,) = folder.iterdir()
    return load([run])


def test_iterations_of_the_measurement_are_not_those_of_the_strategy(
    tmp_path: Path, opened: Callable[..., Job], capsys: pytest.CaptureFixture[str]
) -> None:
    strategy, job = WFBP(), opened()
    job.run(3)
    job.observer.start("wfbp", strategy.plan(PROFILE), 3, PROFILE)
    job.run(5)
    job.observer.end("ended")
    lines = read(tmp_path).ranks[0]
    assert lines.first == 3
    assert [(i.first, i.n) for i in lines.intervals] == [(0, 3), (3, 5)]
    text = " ".join(capsys.readouterr().err.split())
    assert "8 iterations; the last 5 in 1.25 s, 250 ms each" in text


def test_iterations_that_only_measure_are_counted(
    opened: Callable[..., Job], capsys: pytest.CaptureFixture[str]
) -> None:
    job = opened()
    job.run(3)
    job.observer.start("wfbp", WFBP().plan(PROFILE), 3, PROFILE)
    capsys.readouterr()
    job.observer.end("ended")
    text = " ".join(capsys.readouterr().err.split())
    assert "3 iterations, all before the plan" in text
    assert "no iteration has ended" not in text


def test_an_end_is_written_once_and_nothing_keeps_the_observer(
    tmp_path: Path, clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    job = Job(tmp_path, clock)
    job.run(2)
    job.observer.end("ended")
    job.observer.end("signal", "late")
    job.observer.write({})
    (run,) = tmp_path.iterdir()
    ends = [line for line in (run / "rank0.jsonl").read_text().splitlines() if '"end"' in line]
    assert [json.loads(line)["how"] for line in ends] == ["ended"]
    assert capsys.readouterr().err.count("2 iterations in") == 1
    reference = weakref.ref(job.observer)
    del job
    gc.collect()
    assert reference() is None


@pytest.mark.parametrize(
    ("error", "blamed", "expected"),
    [
        (SystemExit(0), False, {"how": "ended", "text": ""}),
        (SystemExit(3), False, {"how": "raised", "text": "SystemExit: 3"}),
        (KeyError("x"), False, {"how": "raised", "text": "KeyError: 'x'"}),
        (RuntimeError("rank 1"), True, {"how": "raised", "text": "RuntimeError: rank 1"}),
    ],
)
def test_how_a_job_ended(
    error: BaseException,
    blamed: bool,
    expected: dict[str, str],
    tmp_path: Path,
    opened: Callable[..., Job],
) -> None:
    """An error that ended a wait for another rank is marked as such."""
    job = opened(blames_peers=lambda one: blamed and one is error)
    try:
        raise error
    except BaseException:
        job.observer.write({})
    end = read(tmp_path).ranks[0].end
    assert end is not None
    assert {name: end[name] for name in expected} == expected
    assert end.get("waited", False) == blamed


def test_an_error_does_not_wait_for_the_device(tmp_path: Path, opened: Callable[..., Job]) -> None:
    """Only a job that has ended counts iterations that the device has not reached."""
    for how, n in (("raised", 4), ("ended", 6)):
        job = opened()
        job.device.reached_s = job.clock.now_s + 4 * ITERATION_S
        job.run(6)
        assert not job.device.waited
        job.observer.end(how)
        assert job.device.waited == (how == "ended")
        lines = load([tmp_path / str(job.observer.id)]).ranks[0]
        assert sum(i.n for i in lines.intervals) == n


def test_metrics_of_the_script(tmp_path: Path, opened: Callable[..., Job]) -> None:
    """One line per interval with the mean of the finite values."""
    job = opened()
    for value in (1.0, math.nan, 4.0, math.inf):
        offbeat.report_metric("accuracy", value)
    job.run(2)
    job.observer.end("ended")
    (line,) = read(tmp_path).ranks[0].metrics
    assert (line["name"], line["value"], line["n"], line["iteration"]) == ("accuracy", 2.5, 2, 1)


def test_numbers_continue_after_a_checkpoint(tmp_path: Path, opened: Callable[..., Job]) -> None:
    job = opened()
    job.run(2)
    job.before = 100
    job.session.iteration = 100 + job.ended
    job.observer.on_load("another", 102)
    job.run(3)
    job.observer.decide(4, "planned again", None)
    job.observer.decide(4, "a warning", "a warning")
    job.observer.end("ended")
    lines = read(tmp_path).ranks[0]
    assert [(i.first, i.n) for i in lines.intervals] == [(0, 2), (102, 3)]
    assert [(e["event"], e["iteration"]) for e in lines.events] == [
        ("checkpoint", 102),
        ("decision", 104),
        ("warning", 104),
    ]
    assert lines.end is not None
    assert lines.end["iteration"] == 105
    assert lines.details[-1]["first"] == 102
    assert lines.details[-1]["us"] == [250_000] * 3, "each iteration has its time"


def test_only_iterations_that_update_count_as_updates(
    tmp_path: Path, opened: Callable[..., Job]
) -> None:
    job = opened()
    job.run(2)
    job.run(1, skipped=True)
    job.run(1, abandoned=True)
    job.observer.end("ended")
    assert [(i.n, i.updates) for i in read(tmp_path).ranks[0].intervals] == [(4, 2)]


def test_intervals_grow_with_the_age_of_the_job(
    tmp_path: Path, opened: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After 10,000 s an interval lasts at least 10 s: three times 5 s."""
    job = opened()
    job.run(20)
    job.clock.now_s += 10_000
    job.run(400)
    job.observer.end("ended")
    lines = read(tmp_path).ranks[0]
    assert [i.n for i in lines.intervals[:3]] == [20, 1, 60]
    assert {i.n for i in lines.intervals[2:-1]} == {60}
    assert sum(i.n for i in lines.intervals) == 420
    # A line has a bounded number of single iterations.
    monkeypatch.setattr(observer, "MOST_ITERATIONS", 16)
    job = opened()
    job.run(20)
    job.observer.end("ended")
    lines = load([tmp_path / str(job.observer.id)]).ranks[0]
    assert [len(line["us"]) for line in lines.details if "us" in line] == [16]


def test_timelines_of_a_few_periods(
    tmp_path: Path, opened: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every ten minutes, unless they are too large."""
    strategy = LocalSGD(period=2)
    for most, count in ((1 << 16, 2), (100, 0)):
        monkeypatch.setattr(timelines, "MOST_SPANS_BYTES", most)
        job = opened(strategy)
        job.observer.start("local-sgd", strategy.plan(PROFILE), 0, PROFILE)
        job.run(60)
        job.clock.now_s += timelines.SPANS_EVERY_S
        job.run(60)
        job.observer.end("ended")
        lines = load([tmp_path / str(job.observer.id)]).ranks[0]
        spans = [line for line in lines.details if line["kind"] == "spans"]
        assert [line["first"] for line in spans] == [2, 60][:count]


def test_a_name_that_another_job_has_drawn_is_drawn_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = iter(["aaaa", "aaaa", "bbbb", "aaaa"])
    monkeypatch.setattr(record_folder.secrets, "token_hex", lambda _: next(drawn))
    assert new_run(str(tmp_path), 0.0) == "0101-0000-aaaa"
    assert new_run(str(tmp_path), 0.0) == "0101-0000-bbbb"
    assert new_run(None, 0.0) == "0101-0000-aaaa"


def test_the_thread_of_a_record_ends_with_it(tmp_path: Path, opened: Callable[..., Job]) -> None:
    before = set(threading.enumerate())
    job = opened()
    (thread,) = (t for t in set(threading.enumerate()) - before if t.name == WRITER_THREAD)
    job.observer.end("ended")
    thread.join(10)
    assert not thread.is_alive()
    job.observer.decide(3, "a decision after the end", None)  # as in a job that a signal has ended
    events = read(tmp_path).ranks[0].events
    assert events[-1]["text"] == "a decision after the end"


def test_a_drive_that_does_not_answer_is_stated_at_the_end(
    opened: Callable[..., Job],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    job = opened()
    monkeypatch.setattr(BackgroundWriter, "flush", lambda *_: False)
    job.observer.end("ended")
    assert "did not answer within 3 s" in " ".join(capsys.readouterr().err.split())


# ---- monitor --------------------------------------------------------------------------------

FACTS = {
    "id": "a",
    "job_name": "a job",
    "strategy": "wfbp",
    "hosts": ["host-a", "host-b"],
    "pids": [1, 2],
    "versions": {"offbeat": "0.2.0"},
}


class Monitored:
    """A monitor of two ranks, and intervals for it."""

    def __init__(self, folder: Path, clock: Clock, sinks: tuple[SinkSetting, ...] = ()):
        self.clock = clock
        self.statuses = [
            {"age_s": 0.5, "iteration": 3, "state": "running", "activity": "x"} for _ in range(2)
        ]
        self.writer = LineWriter(folder, 0)
        self.monitor = JobMonitor(
            JobSettings(str(folder), sinks, "text", "a job"),
            FACTS,
            WFBP(),
            0,
            SimpleNamespace(statuses=lambda: self.statuses),  # type: ignore[arg-type]
            self.writer,
        )

    def round(self, first: int, n: int = 20, s: float = ITERATION_S, seconds: float = 2.0) -> None:
        """Move the time on, and call the monitor with an interval that both ranks have ended."""
        newest = {
            rank: Interval(
                rank, first, n, float(first), n * s, s, s, {0: n}, 0.8 * n * s, 0.2 * n * s, 0.0,
                {"net": LinkSums(n, 1000 * n, 0.01 * n)}, LossSums(n, 2.0, 1.5, 0),
            )
            for rank in range(2)
        }  # fmt: skip
        self.clock.now_s += seconds
        self.monitor.on_round(newest, None)


@pytest.fixture
def monitored(tmp_path: Path, clock: Clock) -> Monitored:
    return Monitored(tmp_path, clock)


def plan_of(monitored: Monitored, iteration: int) -> float:
    """Begin a plan; return its predicted seconds."""
    strategy = WFBP()
    monitored.monitor.on_plan(strategy.plan(PROFILE), PROFILE, iteration)
    monitored.round(0)
    outlook = monitored.monitor._outlook
    assert outlook is not None
    assert outlook.iteration_s is not None
    return outlook.iteration_s


def test_sums_of_a_rank_count_each_interval_once(monitored: Monitored) -> None:
    for first in (0, 0, 20, 20, 20, 40):
        monitored.round(first)
    assert [total.n for total in monitored.monitor._totals.values()] == [60, 60]


def test_lines_become_rarer(monitored: Monitored, capsys: pytest.CaptureFixture[str]) -> None:
    plan_of(monitored, 0)
    begun = monitored.clock.now_s
    at = []
    while monitored.clock.now_s < begun + 3 * 3600:
        capsys.readouterr()
        monitored.round(len(at), seconds=10.0)
        printed = " ".join(capsys.readouterr().err.split())
        if re.search(r"\d+ iterations(,|; the last \d+:) 250 ms each", printed):
            at.append(monitored.clock.now_s - begun)
    gaps = [b - a for a, b in pairwise(at)]
    assert at[0] <= monitor.FIRST_LINE_S
    assert gaps[:6] == [20.0, 40.0, 80.0, 160.0, 320.0, 600.0]
    assert set(gaps[6:]) == {monitor.RAREST_LINE_S}


def test_departures_count_and_iterations_before_the_plan_do_not(
    monitored: Monitored, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    predicted_s = plan_of(monitored, 100)
    for k in range(20):
        monitored.round(k, s=9 * predicted_s)
    assert not monitored.monitor.notices
    for k in range(100, 140):
        monitored.round(20 * k, s=9 * predicted_s)
    assert dict(monitored.monitor.notices) == {"slow_compute": 1}
    (event,) = load([tmp_path]).ranks[0].events
    assert (event["event"], event["cause"], event["predicted_s"]) == (
        "notice",
        "slow_compute",
        predicted_s,
    )
    capsys.readouterr()
    monitored.monitor.decisions = 2
    total = monitored.monitor._totals[0]
    monitored.monitor.on_end("ended", "", total, total.n)
    text = " ".join(capsys.readouterr().err.split())
    assert "1 notice; 2 decisions" in text
    assert "; the last" not in text


def test_a_member_that_leaves_states_it_once(
    monitored: Monitored, capsys: pytest.CaptureFixture[str]
) -> None:
    """The change of the members states it on all members that leave."""
    plan_of(monitored, 0)
    total = monitored.monitor._totals[0]
    for how, stated in (("left", False), ("signal", True)):
        capsys.readouterr()
        monitored.monitor.on_end(how, "after iteration 4", total, total.n)
        assert ("after iteration 4" in " ".join(capsys.readouterr().err.split())) is stated


@pytest.mark.parametrize(
    ("how", "is_written"), [("ended", True), ("raised", True), ("left", False)]
)
def test_the_end_names_the_process_that_writes(
    monitored: Monitored, how: str, is_written: bool, tmp_path: Path
) -> None:
    """Also if the members were changing in the last round. One that leaves is not the last."""
    monitored.statuses.append(dict(monitored.statuses[0]))
    monitored.round(0)
    assert not (tmp_path / "alive.json").exists()
    monitored.monitor.on_end(how, "text", None, 0)
    assert (tmp_path / "alive.json").exists() is is_written


def test_the_end_compares_as_many_iterations_of_ddp(
    monitored: Monitored, capsys: pytest.CaptureFixture[str]
) -> None:
    plan_of(monitored, 0)
    outlook = monitored.monitor._outlook
    assert outlook is not None
    assert outlook.baseline is not None
    capsys.readouterr()
    total = monitored.monitor._totals[0]
    monitored.monitor.on_end("raised", "KeyError: 'x'", total, total.n + 6)
    text = " ".join(capsys.readouterr().err.split())
    ddp_s = outlook.baseline.iteration_s * total.n
    assert text.startswith(
        f"offbeat: stopped by KeyError after {total.n + 6} iterations; the last {total.n} in 5.00 s"
    )
    assert f"ddp: {ddp_s:.2f} s (predicted)" in text
    assert "loss 1.5 at the end" in text


def test_later_plans_have_files_of_their_own(monitored: Monitored, tmp_path: Path) -> None:
    plan_of(monitored, 0)
    first = (tmp_path / "plan.json").read_bytes()
    plan_of(monitored, 12_000)
    assert (tmp_path / "plan.json").read_bytes() == first
    assert (tmp_path / "plan-12000.json").exists()


def test_what_is_watched_is_stated_once(
    monitored: Monitored, capsys: pytest.CaptureFixture[str]
) -> None:
    plan_of(monitored, 0)
    plan_of(monitored, 50)
    text = " ".join(capsys.readouterr().err.split())
    assert text.count("watch it with:") == 1
    assert text.count("predicted ") >= 2


def test_files_of_all_ranks(monitored: Monitored, tmp_path: Path) -> None:
    """alive.json in every round; sums of all ranks in the lines of rank 0 ever more rarely."""
    monitored.round(0)
    alive = json.loads((tmp_path / ALIVE_FILE).read_text())
    assert [(one["rank"], one["host"], one["pid"]) for one in alive["ranks"]] == [
        (0, "host-a", 1),
        (1, "host-b", 2),
    ]
    assert [one["interval"]["n"] for one in alive["ranks"]] == [20, 20]
    assert alive["predicted_s"] is None
    for k in range(1, 360):
        monitored.round(20 * k, seconds=20.0)
    (*_, last) = lines = load([tmp_path]).ranks[0].all_ranks
    assert [line["sums"]["1"][0] for line in lines[:3]] == [80, 140, 200]
    assert 60 < len(lines) < 120, "rarer than once in a minute after 100 minutes"
    names = ("n", "s_sum", "own_s", "wait_s", "script_s")
    total = monitored.monitor._totals[0]
    assert last["sums"]["0"][0] <= total.n
    assert len(last["sums"]["0"]) == len(names)


def test_ranks_that_have_left_have_no_metrics(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    states: list[Any] = []
    sink = SimpleNamespace(update=states.append, close=lambda: states.append("closed"))
    monkeypatch.setattr(monitor, "open_sinks", lambda *_: [sink])
    monitored = Monitored(tmp_path, clock)
    monitored.round(0)
    monitored.statuses[1]["state"] = "left"
    monitored.round(20)
    assert [sorted(state.ranks) for state in states] == [[0, 1], [0]]
    assert states[0].ranks[1].totals.n == 20
    monitored.monitor.on_end("ended", "", None, 0)
    assert states[-1] == "closed"


def test_a_strategy_without_a_profile_is_stated(
    monitored: Monitored, capsys: pytest.CaptureFixture[str]
) -> None:
    monitored.monitor.on_plan(None, None, 0)
    monitored.round(0)
    text = " ".join(capsys.readouterr().err.split())
    assert "wfbp measures no profile, so nothing is predicted" in text
