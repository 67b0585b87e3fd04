"""How much better DeFT's exact knapsacks are than the greedy ones, and how long planning takes.

    python benchmarks/knapsack.py [--instances N] [--json FILE]

Random instances are seeded. Needs no torch; takes about a minute.
"""

import argparse
import json
import math
import random
import statistics
import time
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

from offbeat.profile import Bucket, GradientNoise, Link, Profile
from offbeat.strategies.deft import DeFT
from offbeat.strategies.solvers import knapsack
from offbeat.strategies.solvers import queues as deft

MU = 1.65  # how much slower the second link is (DeFT, Section III-C)
FORWARD_S = 0.5  # backward takes 1 s
MESSAGES = (5, 10, 20, 40)
COVERAGES = (0.7, 1.5, 3.0, 10.0, 90.0)
BUCKETS = (20, 200)
LIMIT_S = 1.0  # of planning
NOISE = GradientNoise(loss=0.2, gradient_sq=1.0, noise_sq=9.0, step_size=0.05)  # all is rejected
REPETITIONS = 5
GAP = 1e-9  # smaller relative differences are rounding


def times(count: int, rng: random.Random) -> tuple[list[float], list[float]]:
    """Backward and communication times of `count` messages, each summing to 1 s."""
    backward_s = [rng.uniform(0.5, 1.5) for _ in range(count)]
    comm_s = [rng.lognormvariate(0.0, 0.7) for _ in range(count)]
    totals_s = sum(backward_s), sum(comm_s)
    return [b / totals_s[0] for b in backward_s], [c / totals_s[1] for c in comm_s]


def weights(comm_s: Sequence[float], links: int) -> list[list[float]]:
    return [[MU**k * seconds for seconds in comm_s] for k in range(links)]


def windows(instances: int, count: int, links: int, rng: random.Random) -> list[float]:
    """Relative gain of exact over greedy in single windows, with and without ready times."""
    gains = []
    for n in range(instances):
        backward_s, comm_s = times(count, rng)
        rows = weights(comm_s, links)
        window_s = rng.uniform(0.3, 0.9) / sum(1 / MU**k for k in range(links))
        ready_s = [window_s * at for at in accumulate(backward_s)] if n % 2 else None
        exact_s, greedy_s = (
            sum(comm_s[i] for on_link in solve(rows, window_s, ready_s, None) for i in on_link)
            for solve in (knapsack.exact, knapsack.greedy)
        )
        gains.append(exact_s / greedy_s - 1 if greedy_s else float(exact_s > 0))
    return gains


def updates(instances: int, count: int, links: int, rng: random.Random) -> list[float]:
    """Relative gain in updates per iteration of whole schedules, at coverage rates above 1."""
    gains = []
    for _ in range(instances):
        backward_s, comm_s = times(count, rng)
        coverage = rng.uniform(1.0, 3.0)
        ready_s: list[float] = []
        pieces_s: list[float] = []
        for at_s, seconds in zip(accumulate(backward_s), comm_s, strict=True):
            parts = math.ceil(1.5 * coverage * seconds * MU ** (links - 1) / FORWARD_S)
            ready_s += [at_s] * parts
            pieces_s += [1.5 * coverage * seconds / parts] * parts
        exact, greedy = (
            deft.simulate(FORWARD_S, 1.0, ready_s, weights(pieces_s, links), solver=solve)
            for solve in (knapsack.exact, knapsack.greedy)
        )
        gains.append(exact.updates_per_iteration / greedy.updates_per_iteration - 1)
    return gains


def row(label: str, gains: Sequence[float]) -> dict[str, float]:
    """Print one line of the table; its figures."""
    figures = {
        "improved": sum(gain > GAP for gain in gains) / len(gains),
        "worse": sum(gain < -GAP for gain in gains) / len(gains),
        "mean": statistics.fmean(gains),
        "max": max(gains),
    }
    print(f"| {label} | " + " | ".join(f"{value:.1%}" for value in figures.values()) + " |")
    return figures


def profile(count: int, links: int, coverage: float, rng: random.Random) -> Profile:
    """A model of `count` buckets whose latency is half a percent of forward, with gradients so
    noisy that the Preserver tries all that it may."""
    backward_s, comm_s = times(count, rng)
    rate = 1e8 / (1.5 * coverage)
    return Profile(
        tuple(
            Bucket(f"b{i}", b / 2, b, round(1e8 * c))
            for i, (b, c) in enumerate(zip(backward_s, comm_s, strict=True))
        ),
        tuple(Link(f"link{k}", 0.0025, rate / MU**k) for k in range(links)),
        world_size=8,
        noise=NOISE,
    )


def planning_s(measured: Profile) -> tuple[float, float]:
    """Least and median processor time of planning, which other programs do not change."""
    taken_s = []
    for _ in range(REPETITIONS):
        start_s = time.process_time()
        DeFT().plan(measured)
        taken_s.append(time.process_time() - start_s)
    return min(taken_s), statistics.median(taken_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--instances", type=int, default=300, help="random instances per line")
    parser.add_argument("--json", type=Path, help="write all results to this file")
    options = parser.parse_args()
    rng = random.Random(0)
    report: dict[str, object] = {"instances": options.instances}

    print("| exact against greedy | improved | worse | mean | max |\n|---|---|---|---|---|")
    for links in (1, 2):
        for count in MESSAGES:
            label = f"one window, {count} messages, {links} link{'s' * (links > 1)}"
            report[label] = row(label, windows(options.instances, count, links, rng))
    for links in (1, 2):
        label = f"updates per iteration, 12 messages, {links} link{'s' * (links > 1)}"
        report[label] = row(label, updates(options.instances // 3, 12, links, rng))

    print("\n| planning | least ms | median ms | limit ms |\n|---|---|---|---|")
    for count in BUCKETS:
        for links in (1, 2):
            for coverage in COVERAGES:
                least_s, median_s = planning_s(profile(count, links, coverage, rng))
                label = f"{count} buckets, {links} link{'s' * (links > 1)}, coverage {coverage:g}"
                report[label] = {"least_s": least_s, "median_s": median_s}
                cells = (least_s, median_s, LIMIT_S)
                print(f"| {label} | " + " | ".join(f"{1e3 * s:.0f}" for s in cells) + " |")
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
