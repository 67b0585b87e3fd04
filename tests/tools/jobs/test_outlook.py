"""Departures from the prediction and their causes, from made-up intervals of four ranks."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from offbeat import WFBP, DreamDDP, LocalSGD, Profile
from offbeat.core.console import Console
from offbeat.core.profile import Bucket, Link
from offbeat.core.strategy.plan_memory import held_memory
from offbeat.core.words import size
from offbeat.jobs.interval import CAUSES, Interval, LinkSums
from offbeat.jobs.outlook import (
    Notice,
    Outlook,
    describe_memory,
    describe_plan,
    describe_prediction,
)

RANKS = 4
HOSTS = ["host-a", "host-b", "host-c", "host-d"]
PROFILE = Profile(
    buckets=tuple(Bucket(f"b{k}", 0.02, 0.04, 4000) for k in range(4)),
    links=(Link("eth0", latency_s=2e-3, bytes_per_s=4e5),),
    world_size=RANKS,
    update_s=0.01,
    other_s=0.01,
    jitter=0.02,
)
INTERVAL_S = 5.0


def outlook_of(profile: Profile = PROFILE, numbers: list[int] | None = None) -> Outlook:
    strategy = WFBP()
    return Outlook.of(strategy, strategy.plan(profile), profile, HOSTS, 0, numbers)


class Job:
    """Makes the intervals of all ranks as a profile and factors predict them."""

    def __init__(self, expected: Outlook | None = None):
        expected = expected or outlook_of()
        assert expected.prediction is not None
        self.expected, self.rng = expected, random.Random(0)
        self.iteration, self.now_s = 0, 0.0
        self.own_s = PROFILE.forward_s + PROFILE.backward_s + PROFILE.update_s
        self.busy_s = expected.prediction.busy_s["eth0"]
        self.exposed_s = expected.prediction.exposed_s

    def interval(
        self,
        compute: Mapping[int, float] | None = None,
        link: float = 1.0,
        script_s: Mapping[int, float] | None = None,
        unexplained_s: float = 0.0,
    ) -> dict[int, Interval]:
        """All ranks end an iteration together: who is early waits in its messages."""
        own = {r: self.own_s * (compute or {}).get(r, 1.0) for r in range(RANKS)}
        script = {r: (script_s or {}).get(r, PROFILE.other_s) for r in range(RANKS)}
        busy = {r: own[r] + script[r] for r in range(RANKS)}
        latest = max(busy.values())
        extra = self.busy_s * (link - 1)
        noise = self.rng.uniform(0.99, 1.01)
        s = noise * (latest + self.exposed_s + extra + unexplained_s)
        n = max(1, round(INTERVAL_S / s))
        found = {}
        for r in range(RANKS):
            wait = s - own[r] - script[r]
            sent = LinkSums(4 * n, 4000 * n, n * (self.busy_s * link + latest - busy[r]))
            found[r] = Interval(
                r, self.iteration, n, 0.0, n * s, s, s, {-20: n}, n * own[r], n * wait,
                n * script[r], {"eth0": sent},
            )  # fmt: skip
        self.iteration += n
        self.now_s += n * s
        return found

    def run(self, seconds: float, **factors: Any) -> list[Notice]:
        notices, end_s = [], self.now_s + seconds
        while self.now_s < end_s:
            newest = self.interval(**factors)
            for _ in range(3):  # rounds are shorter than intervals
                notice = self.expected.compare(newest, 0, self.now_s)
                notices += [] if notice is None else [notice]
        return notices


def test_ten_steady_minutes_bring_no_notice() -> None:
    assert Job().run(600) == []


SLOW: dict[str, tuple[dict[str, Any], int | None, str]] = {
    "slow_rank": ({"compute": {2: 2.1}}, 2, "2 (host-c)"),
    "slow_compute": ({"compute": dict.fromkeys(range(RANKS), 1.5)}, None, ""),
    "slow_link": ({"link": 4.0}, None, "eth0"),
    "slow_script": ({"script_s": {1: 0.3}}, 1, "1 (host-b)"),
    "unknown": ({"unexplained_s": 0.2}, None, ""),
}


@pytest.mark.parametrize("cause", CAUSES)
def test_each_cause_is_named_once(cause: str) -> None:
    job = Job()
    factors, rank, text = SLOW[cause]
    assert job.run(120) == []
    begun = job.iteration
    notices = job.run(900, **factors)
    assert [notice.event for notice in notices] == ["notice"]
    (notice,) = notices
    assert notice.cause is not None
    assert (notice.cause.name, notice.cause.rank) == (cause, rank)
    assert text in notice.text
    assert abs(notice.iteration - begun) <= 40
    back = job.run(120)
    assert [notice.event for notice in back] == ["recovered"]


def test_a_rank_is_named_by_the_number_of_its_process() -> None:
    """Processes have left, and others have joined: ranks are counted anew."""
    numbers = [0, 2, 5, 6]
    job = Job(outlook_of(numbers=numbers))
    factors, rank, _ = SLOW["slow_rank"]
    (notice,) = job.run(900, **factors)
    assert notice.cause is not None
    assert (notice.cause.name, notice.cause.rank) == ("slow_rank", numbers[rank or 0])
    assert "5 (host-c)" in notice.text


def test_another_cause_is_reported_after_ten_minutes() -> None:
    job = Job()
    assert [n.cause.name for n in job.run(300, compute={2: 2.1}) if n.cause] == ["slow_rank"]
    assert job.run(200, script_s={1: 0.4}) == []
    later = job.run(300, script_s={1: 0.4})
    assert [n.cause.name for n in later if n.cause] == ["slow_script"]


def test_accumulated_batches_are_no_slow_compute() -> None:
    """A profile counts all but the last batch as the rest of the loop, intervals as compute."""
    earlier_s = 7 * (PROFILE.forward_s + PROFILE.backward_s)
    job = Job(outlook_of(replace(PROFILE, other_s=PROFILE.other_s + earlier_s)))
    job.own_s += earlier_s
    assert job.run(120) == []
    (notice,) = job.run(900, link=30.0)
    assert notice.cause is not None
    assert notice.cause.name == "slow_link"


def test_a_departure_that_grows_by_half_is_reported_again() -> None:
    job = Job()
    assert [n.event for n in job.run(300, compute={2: 2.1})] == ["notice"]
    assert job.run(900, compute={2: 2.3}) == []
    again = job.run(900, compute={2: 4.5})
    assert [(n.event, n.cause.name) for n in again if n.cause] == [("notice", "slow_rank")]


def test_a_cause_that_explains_less_than_a_quarter_is_not_named() -> None:
    own_s = PROFILE.forward_s + PROFILE.backward_s + PROFILE.update_s
    for share, name in ((0.2, "unknown"), (0.3, "slow_rank")):
        slower = {2: 1 + share * 0.2 / own_s}
        (notice,) = Job().run(300, compute=slower, unexplained_s=(1 - share) * 0.2)
        assert notice.cause is not None
        assert notice.cause.name == name


def test_ranks_that_are_slower_by_the_profile_are_not_late() -> None:
    """Compute of each rank is compared with its own."""
    scaled = replace(PROFILE, rank_scale=(1.0, 1.0, 2.0, 1.0))
    for factors, rank in (
        ({2: 2.0}, None),
        ({1: 2.2, 2: 2.6}, 1),
        ({1: 1.6, 2: 3.0}, 2),  # 1 s longer counts more than 1.6 times as long
    ):
        job = Job()
        job.expected = outlook_of(scaled)
        found = [n.cause and (n.cause.name, n.cause.rank) for n in job.run(300, compute=factors)]
        assert found == ([] if rank is None else [("slow_rank", rank)])


def test_the_only_member_is_predicted_without_messages() -> None:
    alone = replace(PROFILE, world_size=1, jitter=0.0)
    found = outlook_of(alone)
    assert found.iteration_s == pytest.approx(alone.compute_s)
    assert found.bound_s is None


def test_long_iterations_are_compared() -> None:
    """Two intervals of one iteration each may be longer than the time to compare."""
    job = Job()
    notices = job.run(300, compute={2: 80.0})
    assert [(n.event, n.iteration) for n in notices] == [("notice", 0)]
    assert notices[0].measured_s > 15


def test_three_periods_are_compared() -> None:
    """A job whose period is long is not compared in the middle of it."""
    expected = outlook_of()
    assert expected.prediction is not None
    period = round(200 / expected.prediction.iteration_s)
    job = Job(replace(expected, period=period))
    assert job.run(300, compute={2: 1.5}) == []
    assert [n.event for n in job.run(600, compute={2: 1.5})] == ["notice"]


def test_jitter_of_the_profile_is_no_departure() -> None:
    job = Job(replace(outlook_of(), profile=replace(PROFILE, jitter=0.9)))
    assert job.run(300, compute={2: 1.25}) == []
    # The mean of many iterations departs less than one of them.
    assert [n.event for n in job.run(300, compute={2: 3.0})] == ["notice"]
    assert [n.event for n in Job().run(300, compute={2: 1.25})] == ["notice"]


@pytest.mark.parametrize(("disturbed", "events"), [(1, []), (4, []), (5, ["notice", "recovered"])])
def test_the_second_comparison_that_finds_a_departure_reports_it(
    disturbed: int, events: list[str]
) -> None:
    """Half of the compared 30 s depart with the fourth interval of 5 s."""
    job = Job()
    assert job.run(120) == []
    found = [n for _ in range(disturbed) for n in job.run(0.1, compute={0: 3.0})]
    assert [n.event for n in [*found, *job.run(60)]] == events


def test_a_strategy_without_a_profile_is_not_predicted() -> None:
    found = Outlook.of(WFBP(), None, None, HOSTS, 0)
    assert found.iteration_s is None
    interval = Interval(0, 0, 1, 0, 9, 9, 9, {}, 9, 0, 0)
    assert found.compare({0: interval}, 0, 0.0) is None


@pytest.mark.parametrize("share", [0.0, 0.42])
def test_predictions_from_a_disturbed_profile_are_marked(share: float) -> None:
    found = outlook_of(replace(PROFILE, foreign_share=share))
    plan, (prediction, numbers) = describe_plan(found, "A plan."), describe_prediction(found)
    marks = [plan.count(" ~"), prediction.count(" ~")]
    assert marks == ([2, 3] if share else [0, 0])  # rate and legend; prediction, bound and DDP
    assert ("42 %" in plan) is bool(share)
    assert numbers["predicted_s"] == found.iteration_s
    (notice,) = Job(found).run(120, compute={2: 2.0})
    assert ("predicted ~" in notice.text) is bool(share)


def test_the_plan_that_was_chosen_is_named() -> None:
    """Sets of layers differ between networks for one strategy."""
    found = set()
    for rate in (1e3, 1e9):
        profile = replace(PROFILE, links=(Link("eth0", latency_s=2e-3, bytes_per_s=rate),))
        plan = DreamDDP(period=4, fill=False).plan(profile)
        outlook = Outlook.of(DreamDDP(period=4, fill=False), plan, profile, HOSTS, 0)
        counts = [len(buckets) for buckets in plan.fact("sets") if buckets]
        text = describe_plan(outlook, "A plan.")
        assert f"{max(counts)} of 4 buckets in {len(counts)} of 4 iterations" in text
        found.add(text.split(";")[1])
    assert len(found) == 2


def test_memory_that_the_method_adds_is_named() -> None:
    method = LocalSGD(period=4, wire="int4")
    memory = method.memory(PROFILE, method.plan(PROFILE))
    text = describe_memory(memory)
    assert size(memory.total_bytes) in text
    assert size(memory.buffers_bytes + memory.staged_bytes) in text
    assert "copies" not in describe_memory(held_memory(PROFILE))


def test_messages_are_text_json_or_off(capsys: pytest.CaptureFixture[str]) -> None:
    console = Console()
    text = " ".join(f"took {k} ms" for k in range(100, 140))
    console.print("x", text, command="a " * 60)
    lines = capsys.readouterr().err.splitlines()
    assert lines[-1].strip() == ("a " * 60).strip(), "a command to copy is one line"
    assert all(len(line) < 80 for line in lines[:-1])
    assert not any(line.strip().startswith("ms") for line in lines)
    console.format = "json"
    console.print("plan", "two\nlines.\nthree", predicted_s=1.5, bound_s=math.inf)
    found = json.loads(capsys.readouterr().err)
    assert [found[name] for name in ("event", "predicted_s", "bound_s")] == ["plan", 1.5, None]
    console.format = "off"
    console.print("plan", "nothing")
    assert capsys.readouterr().err == ""
    console.print("checkpoint", "not saved", "error")
    assert capsys.readouterr().err != ""
