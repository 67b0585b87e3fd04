"""What the report says of hosts and their pace: the facts that ranks recorded."""

from __future__ import annotations

from pathlib import Path

from offbeat.core.sim.trace import Trace
from offbeat.experiments.record.run_directory import Contestant, RankRecord, Repetition, Run
from offbeat.experiments.report.pace_notes import describe_pace

TRACE = Trace(source="measured", strategy="s", ends_s=((1.0,),), starts_s=(0.0,), spans=())


def record(rank: int, missed: int, worst: float, busy: float = 0.1) -> RankRecord:
    pace = {"pace": 5.0, "iterations": 100, "missed": missed, "worst": worst}
    return RankRecord(rank, "s", TRACE, pace={**pace, "busy": busy, "interrupts": 0.05})


def run(*repetitions: tuple[RankRecord, ...]) -> Run:
    reps = tuple(Repetition(i, records) for i, records in enumerate(repetitions))
    return Run(Path(), (Contestant("one", "wfbp", {}, reps),))


def test_late_hosts_are_named_with_their_share() -> None:
    first = (record(0, 2, 0.04), record(1, 30, 0.5, busy=0.2))
    second = (record(0, 3, 0.06), record(1, 10, 0.25))
    said = describe_pace(run(first, second))
    assert "1/5 of this machine's core" in said[0]
    assert "up to 35 % busy" in said[0]  # .1 + .2 and .05 for interrupts
    assert said[1:] == [
        "one: Hosts were late: of rank 1 in 20 % of the iterations, at worst by 50 %."
    ]


def test_hosts_in_time() -> None:
    said = describe_pace(run((record(0, 3, 0.5),)))
    assert said[1] == "No host missed its pace in more than 3 % of its iterations."


def test_nothing_without_a_pace() -> None:
    assert describe_pace(run((RankRecord(0, "s", TRACE),))) == []
