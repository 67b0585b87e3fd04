"""Departures from the prediction and their causes, from made-up intervals of four ranks."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest

from offbeat import WFBP, Profile
from offbeat.core.console import Console
from offbeat.core.profile import Bucket, Link
from offbeat.core.transport.topology import Topology
from offbeat.jobs import outlook
from offbeat.jobs.interval import CAUSES, Interval, LinkSums
from offbeat.jobs.outlook import Notice, Outlook

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


@pytest.fixture
def expected() -> Outlook:
    strategy = WFBP()
    return Outlook.of(strategy, strategy.plan(PROFILE), PROFILE, HOSTS, 0)


class Job:
    """Makes the intervals of all ranks as a profile and factors predict them."""

    def __init__(self, expected: Outlook):
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
                suspected = self.expected._suspected
                notice = self.expected.compare(newest, 0, self.now_s)
                if notice is not None:
                    assert suspected or notice.event == "recovered", "one comparison is not enough"
                    notices.append(notice)
        return notices


def test_ten_steady_minutes_bring_no_notice(expected: Outlook) -> None:
    assert Job(expected).run(600) == []


SLOW: dict[str, tuple[dict[str, Any], int | None, str]] = {
    "slow_rank": ({"compute": {2: 2.1}}, 2, "Rank 2 (host-c) computes 2.1 times as long"),
    "slow_compute": (
        {"compute": dict.fromkeys(range(RANKS), 1.5)}, None, "All ranks compute 1.5 times",
    ),
    "slow_link": ({"link": 4.0}, None, "Messages on link 'eth0' take 4 times as long"),
    "slow_script": ({"script_s": {1: 0.3}}, 1, "The script of rank 1 (host-b) takes 300 ms"),
    "unknown": ({"unexplained_s": 0.2}, None, "Nothing that is measured explains it"),
}  # fmt: skip


@pytest.mark.parametrize("cause", CAUSES)
def test_each_cause_is_named_once(cause: str, expected: Outlook) -> None:
    job = Job(expected)
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
    assert back[0].text.startswith("as predicted again since iteration")


@pytest.mark.parametrize("cause", ["slow_rank", "slow_script"])
def test_a_rank_is_named_by_the_number_of_its_process(cause: str) -> None:
    """Processes have left, and others have joined: ranks are counted anew."""
    strategy, numbers = WFBP(), [0, 2, 5, 6]
    found = Outlook.of(strategy, strategy.plan(PROFILE), PROFILE, HOSTS, 0, numbers)
    job = Job(found)
    assert job.run(120) == []
    factors, rank, text = SLOW[cause]
    (notice,) = job.run(900, **factors)
    assert rank is not None
    assert notice.cause is not None
    assert (notice.cause.name, notice.cause.rank) == (cause, numbers[rank])
    assert text.replace(f"ank {rank}", f"ank {numbers[rank]}") in notice.text


def test_another_cause_is_reported_after_ten_minutes(expected: Outlook) -> None:
    job = Job(expected)
    assert [n.cause.name for n in job.run(300, compute={2: 2.1}) if n.cause] == ["slow_rank"]
    assert job.run(200, script_s={1: 0.4}) == []
    later = job.run(300, script_s={1: 0.4})
    assert [n.cause.name for n in later if n.cause] == ["slow_script"]


def test_the_cause_explains_the_intervals_that_it_is_derived_from(
    expected: Outlook, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A link recovers while the window still has the slow iterations."""
    monkeypatch.setattr(outlook, "QUIET_S", 1.0)
    job = Job(expected)
    notices = [*job.run(300, link=20.0), *job.run(120, link=1.8), *job.run(120)]
    assert {n.cause.name for n in notices if n.cause} == {"slow_link"}
    assert notices[-1].event == "recovered"


def test_accumulated_batches_are_no_slow_compute() -> None:
    """A profile counts all but the last batch as the rest of the loop, intervals as compute."""
    earlier_s = 7 * (PROFILE.forward_s + PROFILE.backward_s)
    profile, strategy = replace(PROFILE, other_s=PROFILE.other_s + earlier_s), WFBP()
    job = Job(Outlook.of(strategy, strategy.plan(profile), profile, HOSTS, 0))
    job.own_s += earlier_s
    assert job.run(120) == []
    (notice,) = job.run(900, link=30.0)
    assert notice.cause is not None
    assert notice.cause.name == "slow_link"


def test_a_departure_that_grows_by_half_is_reported_again(expected: Outlook) -> None:
    job = Job(expected)
    assert [n.event for n in job.run(300, compute={2: 2.1})] == ["notice"]
    assert job.run(900, compute={2: 2.3}) == []
    again = job.run(900, compute={2: 4.5})
    assert [(n.event, n.cause.name) for n in again if n.cause] == [("notice", "slow_rank")]


def test_a_cause_that_explains_less_than_a_quarter_is_not_named(expected: Outlook) -> None:
    own_s = PROFILE.forward_s + PROFILE.backward_s + PROFILE.update_s
    for share, name in ((0.2, "unknown"), (0.3, "slow_rank")):
        slower = {2: 1 + share * 0.2 / own_s}
        outlook_ = replace(expected, _intervals=[])
        (notice,) = Job(outlook_).run(300, compute=slower, unexplained_s=(1 - share) * 0.2)
        assert notice.cause is not None
        assert notice.cause.name == name


def test_ranks_that_are_slower_by_the_profile_are_not_late(expected: Outlook) -> None:
    """Compute of each rank is compared with its own."""
    scaled = replace(PROFILE, rank_scale=(1.0, 1.0, 2.0, 1.0))
    strategy = WFBP()
    found = Outlook.of(strategy, strategy.plan(scaled), scaled, HOSTS, 0)
    job = Job(expected)
    job.expected = found
    assert job.run(300, compute={2: 2.0}) == []
    (notice,) = job.run(300, compute={1: 2.2, 2: 2.6})
    assert notice.cause is not None
    assert (notice.cause.name, notice.cause.rank) == ("slow_rank", 1)
    job = Job(expected)
    job.expected = replace(found, _intervals=[], _reported=None)
    (notice,) = job.run(300, compute={1: 1.6, 2: 3.0})
    assert notice.cause is not None, "1 s longer counts more than 1.6 times as long"
    assert (notice.cause.name, notice.cause.rank) == ("slow_rank", 2)


def test_scales_of_interleaved_nodes_belong_to_their_ranks(expected: Outlook) -> None:
    """The second node, of ranks 1 and 3, computes twice as long by the profile."""
    inside = Link("inside", latency_s=1e-4, bytes_per_s=4e7)
    nodes: dict[str, Any] = {"world_size": 2, "topology": (2, 2), "inside": inside}
    profile = replace(PROFILE, **nodes, rank_scale=(1.0, 2.0), jitter=0.0)
    topology = Topology(((0, 2), (1, 3)))
    found = Outlook.of(WFBP(), None, profile, HOSTS, 0, topology=topology)
    newest = Job(expected).interval(compute={1: 2.0, 2: 1.5, 3: 2.0})
    cause = found._slow_compute(newest)
    assert (cause.name, cause.rank) == ("slow_rank", 2)


def test_the_only_member_is_predicted_without_messages() -> None:
    alone, strategy = replace(PROFILE, world_size=1, jitter=0.0), WFBP()
    found = Outlook.of(strategy, strategy.plan(alone), alone, HOSTS[:1], 0)
    assert found.iteration_s == pytest.approx(alone.compute_s)
    assert found.bound_s is None


def test_long_iterations_are_compared(expected: Outlook) -> None:
    """Two intervals of one iteration each may be longer than the time to compare."""
    job = Job(expected)
    notices = job.run(300, compute={2: 80.0})
    assert [(n.event, n.iteration) for n in notices] == [("notice", 0)]
    assert notices[0].measured_s > 15


def test_three_periods_are_compared(expected: Outlook) -> None:
    """A job whose period is long is not compared in the middle of it."""
    assert expected.prediction is not None
    period = round(200 / expected.prediction.iteration_s)
    job = Job(replace(expected, period=period))
    assert job.run(300, compute={2: 1.5}) == []
    assert [n.event for n in job.run(600, compute={2: 1.5})] == ["notice"]


def test_jitter_of_the_profile_is_no_departure(expected: Outlook) -> None:
    job = Job(replace(expected, profile=replace(PROFILE, jitter=0.9)))
    assert job.run(300, compute={2: 1.25}) == []
    # The mean of many iterations departs less than one of them.
    assert [n.event for n in job.run(300, compute={2: 3.0})] == ["notice"]
    assert [n.event for n in Job(expected).run(300, compute={2: 1.25})] == ["notice"]


def test_a_single_disturbed_interval_is_no_departure(expected: Outlook) -> None:
    job = Job(expected)
    for _ in range(10):
        assert job.run(40) == []
        assert job.run(4, compute={0: 3.0}) == []


def test_a_strategy_without_a_profile_is_not_predicted() -> None:
    found = Outlook.of(WFBP(), None, None, HOSTS, 0)
    assert found.iteration_s is None
    interval: Callable[..., Interval] = lambda: Interval(0, 0, 1, 0, 9, 9, 9, {}, 9, 0, 0)  # noqa: E731
    assert found.compare({0: interval()}, 0, 0.0) is None


def test_description_of_the_plan_and_the_prediction(expected: Outlook) -> None:
    text = outlook.describe_plan(expected, "Send gradients.")
    facts = "eth0 carries 4.80 Mbit/s, latency 2.00 ms; 16.0 kB of parameters in 4 buckets"
    assert text == f"Send gradients; {facts}"
    line, numbers = outlook.describe_prediction(expected)
    assert expected.prediction is not None
    assert numbers["predicted_s"] == expected.prediction.iteration_s
    assert line.startswith("predicted ")
    assert "; " not in line


def test_lines_are_wrapped_between_words_and_never_before_a_unit(
    capsys: pytest.CaptureFixture[str],
) -> None:
    console = Console()
    text = " ".join(f"took {k} ms" for k in range(100, 140))
    console.print("x", text)
    lines = capsys.readouterr().err.splitlines()
    assert all(len(line) < 80 for line in lines)
    assert lines[0].startswith("offbeat: took 100 ms")
    assert not any(line.strip().startswith("ms") for line in lines)
    assert " ".join(line.strip() for line in lines).removeprefix("offbeat: ") == text
    console.format = "json"
    console.print("plan", "two\nlines.\nthree", predicted_s=1.5, bound_s=math.inf)
    found = json.loads(capsys.readouterr().err)
    assert [found[name] for name in ("text", "predicted_s", "bound_s")] == [
        "two; lines. three",
        1.5,
        None,
    ]
    console.format = "off"
    console.print("plan", "nothing")
    assert capsys.readouterr().err == ""
    console.print("checkpoint", "not saved", "error")
    assert capsys.readouterr().err == "offbeat: not saved\n"


def test_a_command_to_copy_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    command = f"offbeat join 10.0.0.1:4000 train.py {'--option value ' * 20}".strip()
    console = Console()
    console.print("join", "others can join", command=command)
    assert capsys.readouterr().err.splitlines()[-1].strip() == command
    console.format = "json"
    console.print("join", "others can join", command=command)
    assert json.loads(capsys.readouterr().err)["command"] == command
