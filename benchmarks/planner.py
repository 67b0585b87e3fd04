"""How good and how fast the planner's solvers are, and the seconds of a whole plan, on seeded
random profiles.

    python benchmarks/planner.py [--profiles N] [--json FILE]

Needs no torch. Takes about a minute with the default number of profiles.
"""

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from offbeat.profile import Bucket, Link, Profile
from offbeat.strategies import DreamDDP
from offbeat.strategies.dreamddp.sets import Cycle, algorithm_2, balanced, cheaper_sets
from offbeat.strategies.pieces import Sets
from offbeat.strategies.solvers import fusion

RATIOS = (0.3, 1.0, 3.0, 10.0)  # communication of all buckets / backward
LATENCIES = (0.1, 0.5, 2.0)  # latency of all buckets, each sent alone / backward
SIZES = (100, 400, 1000, 5000)
PERIODS = (5, 10, 20)
PLANS = ((200, 8), (1000, 20), (5000, 5), (5000, 20))  # buckets and period
VARIANTS: dict[str, dict[str, Any]] = {
    "default": {},
    "split": {"split": True},
    "forward, split": {"due": "forward", "split": True},
    "delayed": {"due": "delayed"},
}
REPETITIONS = 5
GAP = 1e-9  # smaller relative differences are rounding


def equal_number(cycle: Cycle, period: int) -> Sets:
    """The sets of partial synchronization: as many layers in each."""
    layers, size = tuple(range(len(cycle))), -(-len(cycle) // period)
    return tuple(layers[h * size : (h + 1) * size] for h in range(period))


PARTITIONS = {
    "best": cheaper_sets,
    "balanced": balanced,
    "dfs": algorithm_2,
    "equal_number": equal_number,
}


class Messages:
    """Messages of `latency_s` and their buckets' times, at least `least_s`."""

    def __init__(self, transfer_s: list[float], latency_s: float, least_s: float = 0.0) -> None:
        self.before_s = np.concatenate([[0.0], np.cumsum(transfer_s)])
        self.latency_s, self.least_s = latency_s, least_s

    def __call__(self, group: range) -> float:
        return float(self.ending(group.start, group.stop)[0])

    def ending(self, first: int, stop: int) -> np.ndarray:
        transfer_s = self.before_s[stop] - self.before_s[first:stop]
        return np.maximum(self.latency_s + transfer_s, self.least_s)


FUSIONS = {
    "optimal": lambda ready_s, messages: fusion.optimal_fusion(ready_s, messages.ending),
    "no floor": lambda ready_s, messages: fusion.optimal_fusion(
        ready_s, Messages(np.diff(messages.before_s), messages.latency_s).ending
    ),
    "greedy": fusion.greedy_fusion,
    "none": lambda ready_s, _: fusion.no_fusion(len(ready_s)),
    "one message": lambda ready_s, _: (range(len(ready_s)),),
}


def draw(count: int, ratio: float, rng: random.Random) -> tuple[list[float], list[float]]:
    """Backward (sum: 1 s) and communication times (sum: `ratio`), of one of three shapes."""
    shape: Callable[[], float] = rng.choice(
        [
            lambda: rng.uniform(0.1, 1.0),
            lambda: rng.expovariate(1.0),
            lambda: rng.lognormvariate(0.0, 1.5),
        ]
    )
    durations_s = [shape() for _ in range(count)]
    comm_s = [shape() for _ in range(count)]
    backward_s, total_s = sum(durations_s), sum(comm_s)
    return [b / backward_s for b in durations_s], [ratio * c / total_s for c in comm_s]


def backward_of(durations_s: list[float], comm_s: list[float]) -> Cycle:
    """Backward alone: messages are due when it ends."""
    ready_s = list(accumulate(durations_s))
    return Cycle(ready_s, comm_s, [0.0] * len(comm_s), ready_s[-1])


def partition_costs(profiles: int, ratio: float, rng: random.Random) -> dict[str, list[float]]:
    """Period cost of each method on each profile, L 8..60, H 2..8."""
    costs_s: dict[str, list[float]] = {name: [] for name in PARTITIONS}
    for _ in range(profiles):
        cycle = backward_of(*draw(rng.randint(8, 60), ratio, rng))
        period = rng.randint(2, 8)
        for name, solve in PARTITIONS.items():
            costs_s[name].append(sum(map(cycle.cost, solve(cycle, period))))
    return costs_s


def fusion_ends(
    profiles: int, ratio: float, latency: float, least: float, rng: random.Random
) -> dict[str, list[float]]:
    """End of the last message of each method on each profile, L 8..60."""
    ends_s: dict[str, list[float]] = {name: [] for name in FUSIONS}
    for _ in range(profiles):
        durations_s, transfer_s = draw(rng.randint(8, 60), ratio, rng)
        size = len(transfer_s)
        problem = list(accumulate(durations_s)), Messages(transfer_s, latency / size, least / size)
        for name, solve in FUSIONS.items():
            ends_s[name].append(fusion.fusion_finish(solve(*problem), *problem))
    return ends_s


def gaps(values_s: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    """Per method: how often and by how much it is worse than the best of them."""
    least_s = [min(row) for row in zip(*values_s.values(), strict=True)]
    result = {}
    for name, own_s in values_s.items():
        gap = [own / least - 1 for own, least in zip(own_s, least_s, strict=True)]
        result[name] = {
            "worse": sum(g > GAP for g in gap) / len(gap),
            "mean": statistics.fmean(gap),
            "max": max(gap),
        }
    return result


def print_gaps(title: str, result: dict[str, dict[str, float]]) -> None:
    print(f"\n{title}\n{'':14}{'worse than best':>16}{'mean gap':>12}{'max gap':>12}")
    for name, row in result.items():
        print(f"{name:14}{row['worse']:>16.1%}{row['mean']:>12.3%}{row['max']:>12.2%}")


def seconds(call: Callable[..., object], *arguments: object) -> list[float]:
    """Wall time of each repetition, after one that is not counted."""
    call(*arguments)
    result = []
    for _ in range(REPETITIONS):
        start_s = time.perf_counter()
        call(*arguments)
        result.append(time.perf_counter() - start_s)
    return result


def print_times(label: str, times_s: list[float]) -> None:
    median, low, high = (1e3 * t for t in (statistics.median(times_s), min(times_s), max(times_s)))
    print(f"{label}{median:>12.2f}{low:>12.2f}{high:>12.2f}")


def partition_times(rng: random.Random) -> list[dict[str, object]]:
    rows = []
    print(f"\nrun time, ms{'L':>15}{'H':>5}{'median':>12}{'min':>12}{'max':>12}")
    for count in SIZES:
        for period in PERIODS:
            cycle = backward_of(*draw(count, period / 2, rng))
            for name, solve in PARTITIONS.items():
                times_s = seconds(solve, cycle, period)
                print_times(f"{name:16}{count:>11}{period:>5}", times_s)
                rows.append({"method": name, "L": count, "H": period, "seconds": times_s})
    return rows


def fusion_times(rng: random.Random) -> list[dict[str, object]]:
    rows = []
    print(f"\nrun time, ms{'L':>15}{'':5}{'median':>12}{'min':>12}{'max':>12}")
    for count in SIZES:
        durations_s, transfer_s = draw(count, 1.0, rng)
        problem = list(accumulate(durations_s)), Messages(transfer_s, 0.5 / count, 1 / count)
        for name in ("optimal", "greedy"):
            times_s = seconds(FUSIONS[name], *problem)
            print_times(f"{name + ' fusion':16}{count:>11}{'':5}", times_s)
            rows.append({"method": f"{name} fusion", "L": count, "seconds": times_s})
    return rows


def plan_times(rng: random.Random) -> list[dict[str, object]]:
    """Seconds that DreamDDP's variants take to plan; the messages of all buckets take about twice
    as long as the compute."""
    rows = []
    print(f"\nplanning, ms{'L':>15}{'H':>5}{'median':>12}{'min':>12}{'max':>12}")
    for count, period in PLANS:
        buckets = [
            Bucket(f"b{i}", rng.random() / count, rng.random() / count, rng.randint(1, 10**6))
            for i in range(count)
        ]
        link = Link("net", 0.1 / count, 2e5 * count)
        profile = Profile(tuple(buckets), (link,), world_size=4)
        for name, more in VARIANTS.items():
            times_s = seconds(DreamDDP(period, **more).plan, profile)
            print_times(f"{name:16}{count:>11}{period:>5}", times_s)
            rows.append({"method": f"dreamddp {name}", "L": count, "H": period, "seconds": times_s})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--profiles", type=int, default=250, help="random profiles per ratio")
    parser.add_argument("--json", type=Path, help="write all results to this file")
    options = parser.parse_args()
    rng = random.Random(0)
    report: dict[str, object] = {"profiles": options.profiles}

    everything: dict[str, list[float]] = {name: [] for name in PARTITIONS}
    for ratio in RATIOS:
        costs_s = partition_costs(options.profiles, ratio, rng)
        for name, own_s in costs_s.items():
            everything[name] += own_s
        report[f"sets, ratio {ratio:g}"] = result = gaps(costs_s)
        print_gaps(f"layer sets, communication/backward {ratio:g}", result)
    report["sets"] = result = gaps(everything)
    print_gaps("layer sets, all ratios", result)

    for ratio in RATIOS[:3]:
        for latency in LATENCIES:
            result = gaps(fusion_ends(options.profiles, ratio, latency, 0.0, rng))
            report[f"fusion, ratio {ratio:g}, latency {latency:g}"] = result
            title = f"fusion, transfer/backward {ratio:g}, latency of all/backward {latency:g}"
            print_gaps(title, result)
        result = gaps(fusion_ends(options.profiles, ratio, 0.1, 2.0, rng))
        report[f"fusion, ratio {ratio:g}, least time 2"] = result
        title = f"fusion, transfer/backward {ratio:g}, least times of all/backward 2"
        print_gaps(title, result)

    report["times"] = [*partition_times(rng), *fusion_times(rng), *plan_times(rng)]
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
