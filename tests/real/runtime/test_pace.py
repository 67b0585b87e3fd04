"""Pace: the schedule of an emulated host, turns while it is measured, and how slow it must be."""

from __future__ import annotations

import json
import os
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cases.models import Case, batch, build_model, loss_of, profile_of
from harness.ranks import run_ranks

import offbeat
from offbeat import Profile
from offbeat.core.observers import Observers
from offbeat.core.runtime.iteration import Iteration, Timestamps
from offbeat.lab import pace as pacing
from offbeat.lab import turns as turning
from offbeat.lab.pace import BUSY, MessageCost, Pace, least_pace
from offbeat.lab.turns import Turns

BUCKETS = [  # in backward order
    {"name": "out", "forward_s": 0.5, "backward_s": 1.0, "size_bytes": 30},
    {"name": "mid", "forward_s": 0.25, "backward_s": 2.0, "size_bytes": 10},
    {"name": "in", "forward_s": 0.125, "backward_s": 4.0, "size_bytes": 60},
]
PROFILE = Profile.from_dict(
    {
        "schema": 1,
        "world_size": 2,
        "links": [
            {"name": "net", "latency_s": 0.1, "bytes_per_s": 100, "cpu_s_per_message": 0.001}
        ],
        "buckets": BUCKETS,
        "update_s": 1.0,
        "other_s": 0.25,
        "step_s": 0.0625,
    }
)
PACED = PROFILE.with_pace(2.0)


def iteration(number: int, begin_s: float = 0.0) -> Iteration:
    return Iteration(number, Timestamps(begin_s=begin_s, ready=[None] * len(BUCKETS)), [])


NOW = iteration(0)  # a pace looks at the iteration only where it begins


class Clock:
    """Time that passes only while somebody computes, waits or sleeps."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now

    process_time = perf_counter

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    fake = Clock()
    monkeypatch.setattr(pacing, "time", fake)
    return fake


def test_every_piece_ends_when_the_profile_says(clock: Clock) -> None:
    pace, ends = Pace(PACED, 0), []
    begin = clock.now
    pace.iteration_begins(iteration(0, begin))
    ends.append(clock.now - begin)
    for bucket in (2, 1, 0, -1):  # before the forward of a bucket, and after the last
        clock.now += 0.01  # what it really takes
        pace.reached(NOW, "forward", bucket)
        ends.append(clock.now - begin)
    for bucket in range(3):
        clock.now += 0.02
        pace.reached(NOW, "grad", bucket)
        ends.append(clock.now - begin)
    pace.updated(NOW, None)
    ends.append(clock.now - begin)
    # Twice the profile's seconds; the forward goes from the last bucket to the first.
    wanted = [0.5, 0.51, 0.75, 1.25, 2.25, 4.25, 8.25, 16.25, 18.25]
    assert ends == pytest.approx(wanted)


def test_a_bucket_that_steps_alone_takes_its_share_and_a_call(clock: Clock) -> None:
    pace = Pace(PACED, 0)
    pace.iteration_begins(iteration(0, clock.now))
    before = clock.now
    pace.updated(NOW, [1])
    assert clock.now - before == pytest.approx(2 * (1.0 * 10 / 100 + 0.0625))


def test_a_late_host_catches_up_and_is_counted(clock: Clock) -> None:
    pace = Pace(PACED, 0)
    pace.iteration_begins(iteration(0, clock.now))
    pace.reached(NOW, "forward", -1)
    clock.now += 5.0  # torch loads modules in the first iteration, which does not count
    pace.reached(NOW, "grad", 2)
    begin = clock.now
    pace.iteration_begins(iteration(1, begin))
    pace.reached(NOW, "forward", -1)
    clock.now += 5.0  # the first bucket should have taken 2
    pace.reached(NOW, "grad", 0)
    pace.reached(NOW, "grad", 1)
    assert clock.now - begin == pytest.approx(0.5 + 1.75 + 2 + 4)  # no drift
    pace.reached(NOW, "grad", 2)
    pace.iteration_begins(iteration(2, clock.now))
    pace.reached(NOW, "forward", -1)
    record = pace.record()
    assert (record["iterations"], record["missed"]) == (2, 1)
    assert record["worst"] == pytest.approx(3 / (0.5 + 1.75 + 14))


def test_compute_goes_on_after_a_message_that_it_waited_for(clock: Clock) -> None:
    pace = Pace(PACED, 0)
    pace.iteration_begins(iteration(0, clock.now))
    clock.now += 10.0
    pace.waited()
    before = clock.now
    pace.reached(NOW, "forward", -1)
    assert clock.now - before == pytest.approx(1.75)
    assert pace.record()["missed"] == 0


def test_a_wait_between_iterations_is_not_late(clock: Clock) -> None:
    """Ranks can wait for each other after the last step, before the forward of the next one."""
    pace = Pace(PACED, 0)
    pace.iteration_begins(iteration(0, clock.now))
    pace.reached(NOW, "forward", -1)
    begin = clock.now
    clock.now += 10.0
    pace.waited()
    clock.now += 0.01
    pace.iteration_begins(iteration(1, begin))
    assert clock.now == pytest.approx(begin + 10.0 + 0.5)
    pace.reached(NOW, "forward", -1)
    record = pace.record()
    assert (record["iterations"], record["worst"]) == (1, 0.0)


def events_of_an_iteration(text: str, folder: Path) -> list[str]:
    """Return what the pace of this rank is told in the last of three iterations."""
    told: list[str] = []

    def tell(method: str, event: str) -> None:
        original = getattr(Pace, method)

        def told_first(*args: Any) -> Any:
            told.append(event)
            return original(*args)

        setattr(Pace, method, told_first)

    tell("iteration_begins", "begin")
    tell("waited", "wait")
    tell("updated", "update")
    Pace._advance = lambda *_: None  # type: ignore[method-assign]
    case = Case()
    os.environ["OFFBEAT_JOB"] = str(folder / "job.json")
    model = build_model(case)
    model, optimizer = offbeat.prepare(
        model, torch.optim.SGD(model.parameters(), 0.1), text, compare_every=1
    )
    for iteration in range(3):
        loss_of(model, *batch(case, 0, iteration)).backward()
        optimizer.step()
        optimizer.zero_grad()
    last = len(told) - told[::-1].index("begin")
    return told[last:]


@pytest.mark.parametrize("text", ["local-sgd:period=1", "ddp"])
def test_compute_goes_on_after_waits_outside_of_messages(text: str, tmp_path: Path) -> None:
    profile_of(Case(), 2).with_pace(1.0).save(tmp_path / "profile.json")
    job = {"schema": 1, "pace": 1.0, "profile": str(tmp_path / "profile.json")}
    (tmp_path / "job.json").write_text(json.dumps(job))
    for told in run_ranks(2, events_of_an_iteration, text, tmp_path):
        before_update = told[: told.index("update")]
        # torch's DDP waits in forward for buffers and in backward for gradients
        assert before_update.count("wait") >= (2 if text == "ddp" else 1)


def test_hosts_differ_as_they_are_told(clock: Clock) -> None:
    profile = PROFILE.with_pace(2.0, speeds=[1.0, 0.5])
    seconds = []
    for rank in (0, 1):
        begin = clock.now
        pace = Pace(profile, rank)
        pace.iteration_begins(iteration(0, begin))
        pace.reached(NOW, "forward", -1)
        pace.reached(NOW, "grad", 2)
        seconds.append(clock.now - begin - 2 * PROFILE.other_s)
    assert seconds == pytest.approx([2 * 7.875, 4 * 7.875])
    assert profile.rank_scale == pytest.approx((2 / 3, 4 / 3))
    again = profile.with_pace(4.0)
    assert again.rank_scale == profile.rank_scale
    assert again.forward_s == pytest.approx(2 * profile.forward_s)
    with pytest.raises(ValueError, match=r"pace \(2\) over the greatest speed \(4\) must be"):
        PROFILE.with_pace(2.0, speeds=[1.0, 4.0])


def test_every_host_has_its_own_jitter(clock: Clock) -> None:
    profile = PROFILE.with_pace(2.0, jitters=[0.0, 0.3])
    assert profile.jitters == (0.0, 0.3)
    seconds: list[set[float]] = []
    for rank in (0, 1):
        pace, found = Pace(profile, rank), set()
        for number in range(5):
            pace.iteration_begins(iteration(number, clock.now))
            begin = clock.now
            pace.reached(NOW, "forward", -1)
            found.add(round(clock.now - begin, 9))
        seconds.append(found)
    assert [len(found) for found in seconds] == [1, 5]


def test_jitter_has_mean_1_and_the_profiles_deviation(clock: Clock) -> None:
    pace = Pace(replace(PACED, jitter=0.2), 0)
    seconds = []
    for number in range(4000):
        pace.iteration_begins(iteration(number, clock.now))
        begin = clock.now
        pace.reached(NOW, "forward", -1)
        seconds.append((clock.now - begin) / 1.75)
    mean = sum(seconds) / len(seconds)
    deviation = (sum((s - mean) ** 2 for s in seconds) / len(seconds)) ** 0.5
    assert mean == pytest.approx(1.0, abs=0.02)
    assert deviation == pytest.approx(0.2, rel=0.06)


def test_a_paced_profile_has_the_emulated_hosts_times() -> None:
    assert PACED.forward_s == 2 * PROFILE.forward_s
    assert PACED.backward_s == 2 * PROFILE.backward_s
    assert (PACED.update_s, PACED.step_s, PACED.other_s) == (2.0, 0.125, 0.5)
    assert PACED.links[0].cpu_s_per_message == 0.0  # there is time to spare
    assert PACED.links[0].bytes_per_s == PROFILE.links[0].bytes_per_s
    assert Profile.from_dict(PACED.to_dict()) == PACED
    assert PACED.with_pace(3.0) == PROFILE.with_pace(3.0)
    with pytest.raises(ValueError, match=r"pace \(0\.5\) over the greatest speed \(1\) must be"):
        PROFILE.with_pace(0.5)


def busy(
    pace: float, compute_s: float, messages: MessageCost, hosts: int, processors: int
) -> float:
    """The busiest of many schedules, by brute force over the share of the model that is sent."""
    shares = [i / 1000 for i in range(1001)]
    return max(
        (hosts * compute_s + share * messages.busy_s)
        / (processors * max(pace * compute_s, share * messages.seconds))
        for share in shares
    )


@pytest.mark.parametrize("seed", range(40))
def test_the_least_pace_keeps_processors_as_busy_as_they_may_be(seed: int) -> None:
    rng = random.Random(seed)
    hosts, processors = rng.randint(1, 16), rng.randint(1, 8)
    compute_s, seconds = rng.uniform(0.01, 1.0), rng.uniform(0.01, 2.0)
    messages = MessageCost(seconds, rng.uniform(0, 0.4) * seconds * processors)
    pace = least_pace(compute_s, messages, hosts, processors)
    assert pace >= 1
    there = busy(pace, compute_s, messages, hosts, processors)
    assert there <= BUSY * 1.001
    if pace > 1:
        assert there >= BUSY * 0.995


def test_one_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turning, "LONGEST_S", 0.02)
    one, other = Turns(tmp_path / "turns"), Turns(tmp_path / "turns")
    observers, late, later = Observers(), iteration(0), iteration(1)
    observers.add(other)
    one.iteration_begins(NOW)
    with pytest.warns(UserWarning, match="waited 0.02 s for its turn"):
        observers.iteration_begins(late)
    assert late.marks.held_s >= 0.02
    observers.iteration_begins(later)  # it goes on without turns
    assert later.marks.held_s < 0.02
    assert [one.holds, other.holds] == [True, False]
    one.reached(NOW, "grad", 1)
    assert one.holds
    one.reached(NOW, "grad", 2)
    another = Turns(tmp_path / "turns")
    another.reached(NOW, "step")
    assert [one.holds, other.holds, another.holds] == [False, False, True]
    for turns in (one, other, another):
        turns.close()
    third = Turns(tmp_path / "turns")
    third.iteration_begins(NOW)  # what dies or leaves gives its turn away
    assert third.holds
    third.close()
    third.iteration_begins(NOW)  # without turns after the end
    assert not third.holds
    third.reached(NOW, "end")
