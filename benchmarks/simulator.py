"""How fast the simulator is, against its targets.

    python benchmarks/simulator.py [--repetitions N] [--json FILE]

Needs no torch. Each workload runs once unmeasured, then N times; takes about 30 s. Traces are made
for a single iteration at most.
"""

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from offbeat.plan import Moment, Plan, local, transfer
from offbeat.profile import Bucket, Link, Profile
from offbeat.sim import Ranks, predict, predict_plan, simulate
from offbeat.strategies import WFBP, DreamDDP, LocalSGD, PartialSync

REPETITIONS = 7


@dataclass(frozen=True)
class Result:
    """Seconds of one workload over its repetitions; `target_s` is the most it should take."""

    what: str
    target_s: float | None
    median_s: float
    least_s: float
    most_s: float


def model(buckets: int, world_size: int = 16) -> Profile:
    """Equal buckets whose communication takes 1.5 times as long as their backward."""
    rank_scale = tuple(1 + rank / world_size for rank in range(world_size))
    return Profile(
        tuple(Bucket(f"h.{i}", 1e-3, 2e-3, 1_000_000) for i in range(buckets)),
        (Link("net", 1e-4, 1e6 / 2.9e-3),),
        world_size,
        update_s=1e-2,
        rank_scale=rank_scale if world_size > 16 else (),
    )


def nodes() -> Profile:
    """64 nodes of 8 ranks that are alike."""
    inside = Link("inside", 2e-5, 1e9)
    return replace(model(25, world_size=64), rank_scale=(), topology=(8,) * 64, inside=inside)


def input_first(profile: Profile) -> Plan:
    """Every gradient is due when its bucket's next forward begins: as many waits as messages."""
    transfers = tuple(
        transfer(
            "grad",
            range(b, b + 1),
            after=Moment("grad", b),
            before=Moment("forward", b, lag=1),
            phases=[0],
            link="net",
        )
        for b in range(len(profile.buckets))
    )
    size = len(profile.buckets)
    return Plan("input-first", size, transfers, (local(size, Moment("forward", lag=1), [0]),))


def ring(profile: Profile) -> Plan:
    """Every rank sends every bucket to the next one, which waits for it in its next forward."""
    size, ranks = len(profile.buckets), profile.world_size
    transfers = tuple(
        transfer(
            "param",
            range(b, b + 1),
            after=Moment("grad", b),
            before=Moment("forward", b, lag=1),
            phases=[0],
            link="net",
            verb="send",
            ranks=(rank, (rank + 1) % ranks),
        )
        for b in range(size)
        for rank in range(ranks)
    )
    return Plan("ring", size, transfers, (local(size, Moment("grad"), [0]),))


def workloads() -> dict[str, tuple[float | None, Callable[[], object]]]:
    """What is measured: target and action by name. Planning is part of it only where it says so."""
    alike, uneven = model(200), model(50, world_size=1024)
    unfused, few = WFBP(fusion="none").plan(alike), WFBP(fusion="none").plan(uneven)
    waiting, sparse = input_first(alike), model(50, world_size=64)
    sends, rarely = ring(sparse), LocalSGD(period=10**6).plan(alike)
    deep = model(5000)
    partial, filled = PartialSync(20).plan(deep), DreamDDP(20).plan(deep)
    jitter = Ranks(jitter=0.1)
    shared = nodes()
    in_nodes = LocalSGD(50).plan(shared)
    return {
        "200 buckets unfused, 1,000 iterations, ranks alike": (
            1.0,
            lambda: simulate(unfused, alike, iterations=1000, record=1),
        ),
        "50 buckets, 100 iterations, 1,024 unlike ranks with jitter": (
            0.1,
            lambda: simulate(few, uneven, iterations=100, ranks=jitter, record=1),
        ),
        "200 buckets due by the next forward, 1,000 iterations, ranks alike": (
            None,
            lambda: simulate(waiting, alike, iterations=1000, record=1),
        ),
        "50 sends per rank, 100 iterations, 64 ranks": (
            None,
            lambda: simulate(sends, sparse, iterations=100, record=0),
        ),
        "64 nodes of 8 ranks, 25 buckets, 50 iterations": (
            0.1,
            lambda: simulate(in_nodes, shared, iterations=50, record=1),
        ),
        "prediction of PartialSync(20), 5,000 buckets": (
            0.3,
            lambda: predict_plan(partial, deep),
        ),
        "prediction of DreamDDP(20) with 3,300 messages per iteration, 5,000 buckets": (
            0.3,
            lambda: predict_plan(filled, deep),
        ),
        "prediction of LocalSGD(10**6), 200 buckets": (
            None,
            lambda: predict_plan(rarely, alike),
        ),
        "prediction of DreamDDP, 200 buckets, ranks alike, planning included": (
            None,
            lambda: predict(DreamDDP(), alike),
        ),
    }


def measure(
    what: str, target_s: float | None, action: Callable[[], object], repetitions: int
) -> Result:
    """Wall-clock seconds of an action, after one unmeasured run."""
    action()
    seconds = []
    for _ in range(repetitions):
        begin = time.perf_counter()
        action()
        seconds.append(time.perf_counter() - begin)
    return Result(what, target_s, statistics.median(seconds), min(seconds), max(seconds))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repetitions", type=int, default=REPETITIONS)
    parser.add_argument("--json", type=Path, help="write the results to this file")
    arguments = parser.parse_args()
    print(f"{platform.machine()}, Python {platform.python_version()}, {arguments.repetitions} runs")
    print(f"{'median':>8} {'min':>8} {'max':>8} {'target':>8}")
    results = []
    for what, (target_s, action) in workloads().items():
        result = measure(what, target_s, action, arguments.repetitions)
        results.append(result)
        target = "-" if target_s is None else f"{target_s:.1f} s"
        times = (result.median_s, result.least_s, result.most_s)
        print(" ".join(f"{s:>6.3f} s" for s in times), f"{target:>8}  {what}", flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(result) for result in results], indent=1))


if __name__ == "__main__":
    main()
