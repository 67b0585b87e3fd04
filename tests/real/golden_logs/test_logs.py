"""Golden logs: the order in which each rank releases, receives, applies, decides and updates.

`OFFBEAT_REWRITE_GOLDENS=1` writes tests/golden/logs/<name>.txt again.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import groupby
from operator import itemgetter
from pathlib import Path

import pytest
from cases.golden_logs.jobs import EVALUATION, Job, interpret, profile_of, train
from cases.member_jobs import membership_service
from cases.strategy_lists import STRATEGIES
from harness.ranks import one_of, run_ranks
from torch import nn

from offbeat import (
    ASCWFBP,
    P3,
    WFBP,
    ByteScheduler,
    Cyclic,
    DeAR,
    DeFT,
    DiLoCo,
    DreamDDP,
    FedAvg,
    LocalSGD,
    OuterSGD,
    PartialSync,
    SelSync,
    Strategy,
    USByte,
)
from offbeat.core.derive.lean import lean
from offbeat.strategies import find
from offbeat.testing import log_steps

GOLDEN = Path(__file__).parents[2] / "golden" / "logs"
MOST_ITERATIONS = 12

# By name of the log: strategy, and name of the stored profile. Settings make plans with several
# messages per iteration and a short period.
PLANNED: dict[str, tuple[Strategy, str]] = {
    "wfbp": (WFBP(), "one_link"),
    "asc-wfbp": (ASCWFBP(), "one_link"),
    "bsp": (find("bsp")(), "one_link"),
    "bytescheduler": (ByteScheduler(partition_elements=200), "one_link"),
    "bytescheduler-at-step": (ByteScheduler(200, update="at_step"), "one_link"),
    "dear": (DeAR(), "one_link"),
    "p3": (P3(slice_elements=200), "one_link"),
    "us-byte": (USByte(), "one_link"),
    "cyclic": (Cyclic(), "one_link"),
    "deft": (DeFT(partition_elements=200), "two_links"),
    "diloco": (DiLoCo(period=5), "one_link"),
    "diloco-delayed": (DiLoCo(period=4, fragments=2, delay=1, alpha=0.5), "one_link"),
    "dreamddp": (DreamDDP(period=4), "one_link"),
    "dreamddp-forward": (DreamDDP(period=3, due="forward"), "one_link"),
    "dreamddp-delayed": (DreamDDP(period=3, due="delayed"), "one_link"),
    "dreamddp-clipped": (DreamDDP(period=3, clip=0.5, split=True), "one_link"),
    "fedavg": (FedAvg(local_steps=3), "one_link"),
    "local-sgd": (
        LocalSGD(period=3, warmup=2, state="averaged", outer=OuterSGD(0.7, 0.5)), "one_link",
    ),
    "partial-sync": (PartialSync(period=4, average="before_update"), "one_link"),
    "selsync": (SelSync(state="reset"), "one_link"),
    "selsync-by-layer": (SelSync(scope="layer", vote_lag=1), "one_link"),
    "selsync-gradients": (SelSync(aggregate="gradients"), "one_link"),
    "demo": (find("demo")(), "one_link"),
    "des-loc": (find("des-loc")(period=2), "one_link"),
    "eager": (find("eager")(period=4), "one_link"),
    "noloco": (find("noloco")(period=4), "one_link"),
    "sparseloco": (find("sparseloco")(period=4), "one_link"),
    "wfbp-int8": (WFBP(wire="int8"), "one_link"),
    "dreamddp-int4": (DreamDDP(period=3, wire="int4"), "one_link"),
}  # fmt: skip
NODES: dict[str, tuple[Strategy, str]] = {
    "nodes-wfbp": (WFBP(), "nodes"),
    "nodes-dreamddp": (DreamDDP(period=3), "nodes"),
    "sharded-ddp": (find("ddp")(), "sharded"),
    "sharded-dreamddp": (DreamDDP(period=3), "sharded"),
}


def job_of(strategy: Strategy, profile: str, service: str = "") -> Job:
    job = Job(strategy, 0, profile, isinstance(strategy, find("des-loc")), service)
    plan = strategy.plan(profile_of(job))
    least = 6 if plan.votes else 3
    iterations = min(max(plan.prologue + 2 * plan.period, least), MOST_ITERATIONS)
    return Job(strategy, iterations, profile, job.adam, service)


@cache
def calls(nodes: bool) -> tuple[tuple[Job], ...]:
    return tuple((job_of(*given),) for given in (NODES if nodes else PLANNED).values())


def ranks_of(name: str) -> list[list[str]]:
    """Return by rank the log of a job."""
    if name in NODES:
        return one_of(4, train, calls(True), list(NODES).index(name))
    return one_of(2, train, calls(False), list(PLANNED).index(name))


def text_of(job: Job, ranks: Sequence[list[str]]) -> str:
    """Return the plan, and the log of each rank; equal logs once."""
    parts = [str(job.strategy.plan(profile_of(job)))]
    for log in dict.fromkeys(map(tuple, ranks)):
        own = ", ".join(str(rank) for rank, other in enumerate(ranks) if tuple(other) == log)
        parts.append("\n".join([f"rank {own}", *with_places(log)]))
    return "\n\n".join(parts) + "\n"


def with_places(log: Sequence[str]) -> Iterator[str]:
    """Yield the steps of a log, each with the iteration of the script and what it did last."""
    iteration, place = "", ""
    for line in log:
        word, number, rest = line.split(" ", 2)
        if word == "at":
            iteration, place = number, rest
        else:
            yield f"it {iteration:<2} {place:<12} {rest}"


def compare(name: str, job: Job, ranks: Sequence[list[str]]) -> None:
    path, text = GOLDEN / f"{name}.txt", text_of(job, ranks)
    if os.environ.get("OFFBEAT_REWRITE_GOLDENS") == "1":
        path.write_text(text)
    assert path.read_text() == text


def test_each_strategy_has_a_log() -> None:
    """torch's own DDP sends the messages of `ddp`, unless the model is sharded."""
    logged = {strategy.name for strategy, _ in (PLANNED | NODES).values()}
    assert logged == STRATEGIES.keys()


@pytest.mark.parametrize("name", [*PLANNED, *NODES])
def test_steps(name: str) -> None:
    compare(name, job_of(*(PLANNED | NODES)[name]), ranks_of(name))


def test_steps_of_members() -> None:
    with membership_service() as service:
        job = job_of(DreamDDP(period=3), "one_link", service)
        compare("members-dreamddp", job, run_ranks(2, train, job))


def test_a_model_without_a_plan_has_no_steps() -> None:
    with pytest.raises(ValueError, match="source"):
        log_steps(nn.Linear(1, 1))


# ---- the interpreter ------------------------------------------------------------------------

# The runtime begins these plans with another one. In the first iteration, in which it observes the
# script, all updates run in the step, and what they wait for, too (`defer_updates`).
DEFERRED = {
    *("bytescheduler", "dear", "p3", "us-byte"),
    *("dreamddp", "dreamddp-forward", "dreamddp-int4"),
}


@pytest.mark.parametrize("name", PLANNED)
def test_the_interpreter_takes_the_same_steps(name: str) -> None:
    job = job_of(*PLANNED[name])
    interpreted = interpret(job, lean(job.strategy.plan(profile_of(job))))
    for log, expected in zip(ranks_of(name), interpreted, strict=True):
        last = log.index(f"at {job.iterations} {EVALUATION}")
        steps = [line for line in log[:last] if not line.startswith("at ")]
        if name in DEFERRED:
            steps, expected = from_second(steps), from_second(expected)
        assert joined(steps) == joined(expected)


def from_second(steps: Sequence[str]) -> Sequence[str]:
    """Return the steps from the first release of the second iteration on."""
    return steps[next(i for i, step in enumerate(steps) if step.startswith("it 1 release")) :]


def joined(steps: Sequence[str]) -> list[tuple[str, set[int]]]:
    """Return the steps with adjacent updates, and adjacent applies of one rule, as one: the
    interpreter executes a rule for several buckets at once where no code runs between them."""
    found = [_parts(step) for step in steps]
    return [
        (what, set().union(*(buckets for _, buckets in run)))
        for what, run in groupby(found, key=itemgetter(0))
    ]


def _parts(step: str) -> tuple[str, set[int]]:
    """Return a step without its buckets, and the buckets that it updates or applies a rule to."""
    if found := re.fullmatch(r"(it \d+ apply \w+)\[(\d+):(\d+)\](.*)", step):
        what, start, stop, of = found.groups()
        return what + of, {*range(int(start), int(stop))}
    what, update, buckets = step.partition(" update ")
    return what + update, {*map(int, buckets.split())}
