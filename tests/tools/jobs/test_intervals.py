"""Tally, interval and lines of a record, against plain sums over the same iterations."""

from __future__ import annotations

import json
import math
import random
import shutil
import statistics
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from offbeat.core.runtime.iteration import BackwardSplit, Iteration, MomentTimes, Timestamps
from offbeat.core.transport.device import CPU
from offbeat.jobs import record_lines
from offbeat.jobs.interval import Interval, LossSums, combine, quantile, recent
from offbeat.jobs.record_lines import LineWriter, Place, follow, load, rank_file
from offbeat.jobs.tally import Tally


def made_iteration(rng: random.Random, number: int, begin_s: float, links: int = 2) -> Any:
    """An iteration, and its seconds: all, waiting, script, and by link in messages."""
    script, forward, backward, wait, update = (rng.uniform(1e-3, 9e-3) for _ in range(5))
    forward_s = begin_s + script
    end = forward_s + forward + backward
    marks = Timestamps(
        begin=begin_s,
        first_forward=forward_s,
        forward=forward_s,
        forward_end=forward_s + forward,
        ready=[end],
        backward_end=end,
        waited=end + wait,
        step=end + wait,
        stepped=end + wait + update,
        end=end + wait + update,
    )
    took = {f"eth{k}": rng.uniform(1e-3, 5e-3) for k in range(links)}
    messages = [
        SimpleNamespace(transfer=SimpleNamespace(link=link), start=end, end=end + s, was_sent=True)
        for link, s in took.items()
    ]
    messages.append(SimpleNamespace(transfer=None, start=None, end=None, was_sent=False))
    done = Iteration(number=number, marks=marks, messages=messages)  # type: ignore[arg-type]
    return done, (marks.end - begin_s, wait, script, took)


def test_sums_equal_those_of_single_iterations() -> None:
    rng, sent = random.Random(1), {"eth0": 0, "eth1": 0}
    tally = Tally(3, CPU(), lambda: sent, clock=lambda: 77.0)
    intervals, facts, losses, at = [], [], [], 0.0
    for number in range(200):
        done, (s, wait, script, took) = made_iteration(rng, number, at)
        at += s
        facts.append((s, wait, script, took))
        loss = math.nan if number == 50 else rng.uniform(0, 4)
        losses.append(loss)
        sent = {"eth0": 10 * (number + 1), "eth1": number + 1}
        tally.add_loss(torch.tensor(loss))
        tally.add(done, number, applied=number % 4 == 3)
        if number % 37 == 36:
            intervals.append(tally.close_interval())
    intervals.append(tally.close_interval())
    assert tally.close_interval() is None
    whole = combine(intervals)  # type: ignore[arg-type]
    assert [whole.rank, whole.first, whole.n, whole.t, whole.updates] == [3, 0, 200, 77.0, 50]
    assert whole.s_sum == pytest.approx(sum(s for s, *_ in facts))
    assert whole.s_min == pytest.approx(min(s for s, *_ in facts))
    assert whole.s_max == pytest.approx(max(s for s, *_ in facts))
    assert whole.wait_s == pytest.approx(sum(wait for _, wait, *_ in facts))
    assert whole.script_s == pytest.approx(sum(script for *_, script, _ in facts))
    assert whole.own_s == pytest.approx(whole.s_sum - whole.wait_s - whole.script_s)
    for link, size in (("eth0", 2000), ("eth1", 200)):
        seconds = sum(took[link] for *_, took in facts)
        assert whole.links[link] == pytest.approx((200, size, seconds))
    assert whole.loss is not None
    finite = [float(torch.tensor(x)) for x in losses if not math.isnan(x)]
    assert whole.loss.mean == pytest.approx(statistics.fmean(finite), rel=1e-6)
    assert [whole.loss.n, whole.loss.nonfinite] == [199, 1]
    assert whole.loss.last == pytest.approx(finite[-1])
    assert sum(whole.hist.values()) == 200
    for share in (0.05, 0.5, 0.95):
        exact = sorted(s for s, *_ in facts)[math.ceil(share * 200) - 1]
        assert quantile(whole.hist, share) == pytest.approx(exact, rel=0.09)


def sums_of(done: Any) -> Interval:
    """Interval of one iteration."""
    tally = Tally(0, CPU(), dict)
    tally.add(done, 0, True)
    interval = tally.close_interval()
    assert interval is not None
    return interval


def test_waits_are_no_script() -> None:
    """A worker of a server waits for parameters before it computes. Accumulation has several
    forwards per step; only the time before the first one counts."""
    done, (_, wait, script, _) = made_iteration(random.Random(0), 0, 1.0)
    done.marks.acted.append(MomentTimes(0, 1.0, 1.0 + script / 2, 1.0 + script / 2))
    interval = sums_of(done)
    assert interval.script_s == pytest.approx(script / 2)
    assert interval.wait_s == pytest.approx(wait + script / 2)
    done, (_, wait, script, _) = made_iteration(random.Random(0), 0, 1.0)
    begin = done.marks.forward_end
    done.marks.acted.append(MomentTimes(3, begin, begin + 1e-3, begin + 1e-3))
    done.marks.forward += 0.5 * (done.marks.forward_end - done.marks.forward)
    done.messages[0].was_sent = False  # a message that was left out has no time
    interval = sums_of(done)
    assert interval.script_s == pytest.approx(script)
    assert interval.wait_s == pytest.approx(wait + 1e-3)
    assert [*interval.links] == ["eth1"]


def test_compute_is_never_negative_and_iterations_without_marks_do_not_count() -> None:
    """The clocks of torch's own times and of the iteration differ."""
    done, (s, _, script, _) = made_iteration(random.Random(0), 7, 1.0, links=0)
    done.split = BackwardSplit("net", 100, 9.0, 9.0, measured=True)
    unmarked, _ = made_iteration(random.Random(0), 6, 0.0)
    unmarked.marks.begin = None
    tally = Tally(0, CPU(), dict)
    tally.add(unmarked, 6, True)
    assert tally.close_interval() is None
    interval = sums_of(done)
    assert (interval.n, interval.own_s) == (1, 0.0)
    assert interval.wait_s == pytest.approx(s - script)


def test_sums_of_intervals() -> None:
    """Bounds of quantiles, the newest memory and time, and the last loss that is finite."""
    assert quantile({0: 5, 8: 5}, 0.5) == pytest.approx(2 ** (0.5 / 8))
    assert quantile({0: 5, 8: 5}, 0.51) == pytest.approx(2 ** (8.5 / 8))
    first = an_interval(0, loss=LossSums(4, 2.0, 1.5, 0), rss_bytes=1)
    second = an_interval(10, loss=LossSums(0, 0.0, 0.0, 10), rss_bytes=2)
    whole = combine([replace(first, t=5.0), replace(second, t=6.0)])
    assert (whole.first, whole.n, whole.t, whole.rss_bytes) == (0, 20, 6.0, 2)
    assert whole.loss == LossSums(4, 2.0, 1.5, 10)
    assert [i.first for i in recent([first, second], second.s_sum)] == [10]
    for name in ("rank", "own_s", "s_min"):
        data = first.to_dict()
        del data[name]
        with pytest.raises(KeyError, match=name):
            Interval.from_dict(data)


def test_measured_splits_of_ddp_stand_for_all_iterations() -> None:
    """Torch's own times are read in some iterations."""
    tally, rng = Tally(0, CPU(), lambda: {"net": 800}), random.Random(0)
    for number in range(8):
        done, _ = made_iteration(rng, number, float(number), links=0)
        done.marks.waited = done.marks.step = done.marks.backward_end
        measured = number % 4 == 0
        done.split = BackwardSplit("net", 100, 4e-3 * measured, 1e-3 * measured, measured)
        tally.add(done, number, True)
    interval = tally.close_interval()
    assert interval is not None
    assert interval.wait_s == pytest.approx(8e-3)
    assert interval.links["net"] == pytest.approx((8, 800, 32e-3))


class SlowDevice(CPU):
    """A device that has reached no mark after `reached_s`."""

    reached_s = 0.0

    def has_reached(self, mark: Any) -> bool:
        return mark <= self.reached_s

    def seconds(self, mark: Any) -> float:
        assert mark <= self.reached_s, "the host would wait"
        return mark


def test_the_host_does_not_wait_for_a_device() -> None:
    device = SlowDevice()
    tally, rng, at = Tally(0, device, dict), random.Random(0), 0.0
    for number in range(10):
        done, (s, *_) = made_iteration(rng, number, at)
        at += s
        device.reached_s = at - 2 * s  # some iterations behind
        tally.add(done, number, True)
    first = tally.close_interval()
    assert first is not None
    assert first.n < 10
    device.reached_s = math.inf
    tally.end()
    rest = tally.close_interval()
    assert rest is not None
    assert [rest.first, first.n + rest.n] == [first.n, 10]


def an_interval(first: int = 0, n: int = 10, s: float = 0.1, **fields: Any) -> Interval:
    given = {"own_s": 0.8 * n * s, "wait_s": 0.2 * n * s, "script_s": 0.0, **fields}
    return Interval(0, first, n, 1e9, n * s, s, s, {-27: n}, **given)


def test_lines_are_read_as_they_were_written(tmp_path: Path) -> None:
    writer = LineWriter(tmp_path, 0, clock=lambda: 5.0)
    written = [an_interval(10 * k) for k in range(3)]
    writer.line("head", id="a", rank=0)
    for interval in written:
        writer.line("interval", **interval.to_dict())
    lines, place = follow(rank_file(tmp_path, 0))
    assert [line["kind"] for line in lines] == ["head", "interval", "interval", "interval"]
    assert follow(rank_file(tmp_path, 0), place) == ([], place)
    with rank_file(tmp_path, 0).open("a") as file:
        file.write('{"kind":"end","how"')
    assert follow(rank_file(tmp_path, 0), place) == ([], place)
    record = load([tmp_path])
    assert record.ranks[0].intervals == written
    assert record.ranks[0].torn
    assert record.ranks[0].end is None
    with rank_file(tmp_path, 0).open("a") as file:
        file.write(':"ended"}\n')
    assert [line["how"] for line in follow(rank_file(tmp_path, 0), place)[0]] == ["ended"]
    rank_file(tmp_path, 0).write_text('{"kind":"head"}\n')
    assert follow(rank_file(tmp_path, 0), place)[0] == [{"kind": "head"}]
    assert follow(tmp_path / "missing.jsonl", place) == ([], Place())
    assert [i.first for i in recent(written, 1.5)] == [20, 10]


def test_folders_of_several_hosts_are_one_record(tmp_path: Path) -> None:
    for rank, name in enumerate("ab"):
        LineWriter(tmp_path / name, rank).line("head", id="1", rank=rank, world_size=3)
    (tmp_path / "a" / "run.json").write_text(json.dumps({"id": "1", "world_size": 3}))
    record = load([tmp_path / "a", tmp_path / "b"])
    assert sorted(record.ranks) == [0, 1]
    assert record.missing == [2]
    LineWriter(tmp_path / "c", 2).line("head", id="2", rank=2)
    with pytest.raises(ValueError, match="1 and 2"):
        load([tmp_path / "a", tmp_path / "c"])
    with pytest.raises(ValueError, match=str(tmp_path)):
        load([tmp_path])
    newer = tmp_path / "d" / "rank0.jsonl"
    newer.parent.mkdir()
    newer.write_text('{"kind":"head","schema":4}\n')
    with pytest.raises(ValueError, match=r"schema \(4\) of .*rank0.jsonl"):
        load([newer.parent])


def test_a_folder_that_is_removed_is_created_again(tmp_path: Path) -> None:
    now = [0.0]
    writer = LineWriter(tmp_path / "run", 0, lambda: 1e9, lambda: now[0])
    writer.line("head", id="a", rank=0)
    shutil.rmtree(tmp_path / "run")
    with pytest.warns(RuntimeWarning, match=str(tmp_path)):
        writer.line("interval", **an_interval(0).to_dict())
    writer.replace("run.json", {})
    assert not (tmp_path / "run").exists()
    now[0] += record_lines.RETRY_S
    writer.line("interval", **an_interval(10).to_dict())
    assert [i.first for i in load([tmp_path / "run"]).ranks[0].intervals] == [0, 10]
