"""Predicted periods of DreamDDP's plans, and seconds of planning, on seeded random profiles.

    python benchmarks/plan_periods.py [--profiles N] [--json FILE] [--against FILE]

Without jitter a period is exact. With jitter, which a third of the profiles have, it is the mean
over simulated iterations with other seeds than the planner's. `--against` compares with the file of
another version. Needs no torch. Takes some minutes.
"""

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from offbeat.profile import Bucket, Link, Profile
from offbeat.sim import predict_plan
from offbeat.strategies import DreamDDP

PROFILES = 186
DUES = ("end", "forward", "delayed")
SEEDS, ITERATIONS = (11, 12, 13), 400  # of simulations with jitter


def draw(rng: random.Random, *, noisy: bool) -> tuple[Profile, int]:
    """Return a profile of 5 to 200 buckets and a period of 2 to 20.

    Buckets are random, the equal blocks of a transformer between two embeddings, or those of a
    convolutional network, whose parameters grow and whose compute shrinks with depth.
    """
    size, period = round(5 * 40 ** rng.random()), rng.randint(2, 20)
    sizes, computes = rng.choice((scattered, transformer, convolutional))(size, rng)
    ratio = rng.choice((0.3, 0.7, 1.0, 1.5, 3.0))  # messages of a period / compute of a period
    compute_s, total = rng.choice((0.02, 0.2, 1.0)), sum(computes)
    seconds = [compute_s * value / total for value in computes]
    buckets = [
        Bucket(f"b{i}", s / 3, 2 * s / 3, max(4, 4 * round(n)))
        for i, (s, n) in enumerate(zip(seconds, sizes, strict=True))
    ]
    payload = sum(bucket.size_bytes for bucket in buckets)
    latency_s = rng.choice((0.0, 1e-5, 1e-4, 1e-3))
    link = Link("net", latency_s, payload / (ratio * period * compute_s))
    profile = Profile(
        tuple(buckets),
        (link,),
        world_size=4,
        update_s=compute_s * rng.choice((0.0, 0.02, 0.1)),
        step_s=rng.choice((0.0, 0.0, 1e-5, 1e-4)),
        other_s=compute_s * rng.choice((0.0, 0.02, 0.1)),
        jitter=rng.choice((0.02, 0.1, 0.3)) if noisy else 0.0,
    )
    return profile, period


def scattered(size: int, rng: random.Random) -> tuple[list[float], list[float]]:
    shapes: list[Callable[[], float]] = [
        lambda: rng.uniform(0.1, 1.0),
        lambda: rng.expovariate(1.0),
        lambda: rng.lognormvariate(0.0, 1.5),
    ]
    shape = rng.choice(shapes)
    return [1e5 * shape() for _ in range(size)], [shape() for _ in range(size)]


def transformer(size: int, rng: random.Random) -> tuple[list[float], list[float]]:
    embedding = rng.uniform(1.0, 8.0)
    sizes = [embedding, *(rng.choice((1.0, 0.5, 2.0)) for _ in range(size - 2)), embedding]
    computes = [rng.uniform(0.5, 2.0), *sizes[1:-1], 0.01]
    return [1e5 * n for n in sizes], computes


def convolutional(size: int, rng: random.Random) -> tuple[list[float], list[float]]:
    depths = [4 * (size - 1 - i) / size for i in range(size)]
    sizes = [4**depth * rng.uniform(0.5, 1.5) for depth in depths]
    return [2e3 * n for n in sizes], [rng.uniform(0.5, 1.5) for _ in depths]


def period_s(strategy: DreamDDP, profile: Profile) -> tuple[float, float]:
    """Return the predicted seconds of a period, and the processor seconds of planning."""
    begin_s = time.process_time()
    plan = strategy.plan(profile)
    planning_s = time.process_time() - begin_s
    if not profile.jitter:
        return strategy.period * predict_plan(plan, profile).iteration_s, planning_s
    found = [
        predict_plan(plan, profile, iterations=ITERATIONS, seed=seed).iteration_s for seed in SEEDS
    ]
    return strategy.period * statistics.fmean(found), planning_s


def measured(number: int) -> dict[str, list[list[float]]]:
    """Return for each deadline the period and the planning seconds of each profile."""
    rng = random.Random(0)
    found: dict[str, list[list[float]]] = {due: [] for due in DUES}
    for n in range(number):
        profile, period = draw(rng, noisy=n % 3 == 2)
        for due in DUES:
            strategy = DreamDDP(period, due=due)  # pyright: ignore[reportArgumentType]
            found[due].append([*period_s(strategy, profile)])
    return found


def shares(values: Sequence[float], scale: float) -> str:
    """Return the least value, the 5th, 50th and 95th percentiles, and the largest."""
    ordered = sorted(values)
    at = [ordered[round(q * (len(ordered) - 1))] for q in (0.0, 0.05, 0.5, 0.95, 1.0)]
    return "".join(f"{scale * value:9.2f}" for value in at)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--profiles", type=int, default=PROFILES)
    parser.add_argument("--json", type=Path, help="write the result to this file")
    parser.add_argument("--against", type=Path, help="compare with this result")
    options = parser.parse_args()
    found = measured(options.profiles)
    if options.json:
        options.json.write_text(json.dumps(found) + "\n")
    before = json.loads(options.against.read_text()) if options.against else {}
    print(f"{'':32}{'least':>9}{'5 %':>9}{'median':>9}{'95 %':>9}{'largest':>9}")
    for due, rows in found.items():
        print(f"{due + ', planning, ms':32}{shares([row[1] for row in rows], 1e3)}")
        for noisy in (False, True) if before else ():
            pairs = [
                (now[0], old[0])
                for n, (now, old) in enumerate(zip(rows, before[due], strict=False))
                if (n % 3 == 2) == noisy
            ]
            label = f"{due}, {'jitter, ' if noisy else ''}longer by %"
            print(f"{label:32}{shares([now / old - 1 for now, old in pairs], 100)}")


if __name__ == "__main__":
    main()
