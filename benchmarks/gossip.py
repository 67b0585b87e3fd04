"""A2CiD2, AD-PSGD and their graphs in simulation, without torch.

    python benchmarks/gossip.py [constants decay mean complexity rings workers links speed]

Everything is seeded; only `speed` depends on the machine. Prints Markdown tables.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import numpy as np

from offbeat.gossip.graphs import Constants, Rates, constants, edge_rates, topology
from offbeat.gossip.measured_graph import best_graph
from offbeat.gossip.simulation import Network, Workers, simulate
from offbeat.profile import Bucket, Link, Profile
from offbeat.sim import Ranks
from offbeat.sim import simulate as simulate_plan
from offbeat.strategies import BSP, WFBP, Strategy

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from figures import spread
from oracle.consensus import (  # pyright: ignore[reportMissingImports]
    Course,
    Quadratic,
    events,
    exchanging_s,
    follow,
    poisson,
)

SEEDS = range(5)


def graph(name: str, n: int, rate: float = 1.0) -> tuple[dict[tuple[int, int], float], Constants]:
    rates = edge_rates(topology(name, n), rate)
    return rates, constants(rates, n)


def row(*cells: object) -> None:
    shown = (f"{cell:.3g}" if isinstance(cell, float) else str(cell) for cell in cells)
    print(f"| {' | '.join(shown)} |", flush=True)


def head(*names: str) -> None:
    row(*names)
    print(f"|{'---|' * len(names)}")


# --- constants, decay, mean ----------------------------------------------------------------------


def show_constants() -> None:
    head("graph", "workers", "chi1", "chi2", "eta", "alpha~", "exchanges per unit time")
    cases = [("ring", n) for n in (4, 8, 16, 64)]
    cases += [("exponential", 8), ("exponential", 64), ("star", 8), ("complete", 8)]
    for name, n in [*cases, ("torus", 16), ("torus", 64)]:
        rates, c = graph(name, n)
        values = (f"{one:.4g}" for one in (c.chi1, c.chi2, c.eta, c.alpha_tilde))
        row(name, n, *values, f"{sum(rates.values()):.4g}")


def show_decay() -> None:
    """Slopes from a tenth of the time on, for five seeds; then the mean of twenty."""
    head("ring", "A2CiD2", "exchange before mixing", "plain gossip", "lambda_2", "2 eta", "of 20")
    for n, units in ((8, 80), (16, 160), (32, 300)):
        rates, c = graph("ring", n)
        found: dict[str, list[float]] = {"after": [], "before": [], "plain": []}
        for seed in range(20):
            x = np.random.default_rng(seed).standard_normal((n, 32))
            timeline = poisson(rates, n, units, seed=seed)
            longer = poisson(rates, n, 3 * units, seed=seed)
            begin = units / 10
            found["after"].append(follow(timeline, c, x).decay(begin))
            before = follow(timeline, c, x, exchange="before_mixing")
            found["before"].append(before.decay(begin))
            found["plain"].append(follow(longer, ad_psgd(c), x).decay(3 * begin))
        five = (spread(slopes[: len(SEEDS)], 3, fmean) for slopes in found.values())
        twenty = ", ".join(f"{fmean(slopes):.3f}" for slopes in found.values())
        row(n, *five, c.lambda2, 2 * c.eta, twenty)


def show_mean() -> None:
    head("exchange", "network", "events", "drift, common unit", "drift, own units")
    n = 16
    rates, c = graph("ring", n)
    workers = Workers.uneven(n, jitter=0.1)
    x = np.random.default_rng(0).standard_normal((n, 32)) + 1
    for order in ("after_mixing", "before_mixing"):
        for name, network in (("none", None), (".2 s", Network(delay_s=0.05))):
            timeline = simulate(rates, workers, network, units=600)
            common = follow(timeline, c, x, exchange=order).drift.max()
            own = follow(timeline, c, x, exchange=order, unit_s=workers.gradient_s).drift
            row(order, name, events(timeline), f"{common:.1e}", f"{own.max():.1e}")


# --- complexity ----------------------------------------------------------------------------------

FALLEN = 1e-2  # of the first squared distance, from the slowest mode of the graph
SIZES = (8, 16, 32, 64, 128, 256)


def slowest(rates: Rates, n: int) -> np.ndarray:
    """The state of one coordinate that falls most slowly."""
    return np.linalg.eigh(laplacian(rates, n))[1][:, 1:2]


def laplacian(rates: Rates, n: int) -> np.ndarray:
    made = np.zeros((n, n))
    for (i, j), rate in rates.items():
        made[[i, j, i, j], [i, j, j, i]] += [rate, rate, -rate, -rate]
    return made


def by_events(rates: Rates, n: int, c: Constants, per_unit: float, seeds: Sequence[int]) -> float:
    """Exchanges until the distance has fallen, from the line through ln(distance)."""
    units = 1.3 * -math.log(FALLEN) / per_unit
    x, found = slowest(rates, n), []
    for seed in seeds:
        course: Course = follow(poisson(rates, n, units, seed=seed), c, x, readings=100)
        found.append(-math.log(FALLEN) / course.decay(units / 10) * sum(rates.values()))
    return fmean(found)


def a2cid2(name: str, n: int) -> float:
    rates, c = graph(name, n)
    return by_events(rates, n, c, 2 * c.eta, range(3))


def plain(name: str, n: int) -> float:
    rates, c = graph(name, n)
    return by_events(rates, n, ad_psgd(c), c.lambda2, range(3 if n < 256 else 1))


def rounds(name: str, n: int, accelerated: bool) -> float:
    """Exchanges of rounds that use every edge, with the best constant step (and momentum)."""
    rates = dict.fromkeys(edge_rates(topology(name, n)), 1.0)
    lap = laplacian(rates, n)
    values = np.linalg.eigvalsh(lap)
    least, most = values[1], values[-1]
    step, momentum = 2 / (least + most), 0.0
    if accelerated:
        root = math.sqrt(most / least)
        step = 4 / (math.sqrt(most) + math.sqrt(least)) ** 2
        momentum = ((root - 1) / (root + 1)) ** 2
    x = slowest(rates, n)
    before, first, count = x, float((x**2).sum()), 0
    while (x**2).sum() > FALLEN * first:
        x, before = x + momentum * (x - before) - step * (lap @ x), x
        count += 1
    return count * len(rates)


def exponent(sizes: Sequence[int], counts: Sequence[float]) -> float:
    return float(np.polyfit(np.log(sizes), np.log(counts), 1)[0])


def show_complexity() -> None:
    print(f"Exchanges per unit time for sqrt(chi1 * chi2) = 1, by the constants, n of {SIZES}:\n")
    head("", "star", "ring", "complete")
    names = ("star", "ring", "complete")
    of: dict[str, Callable[[Rates, Constants], float]] = {
        "A2CiD2": lambda rates, c: sum(rates.values()) * math.sqrt(c.chi1 * c.chi2),
        "plain gossip (chi1 = 1)": lambda rates, c: sum(rates.values()) * c.chi1,
    }
    for label, count in of.items():
        row(label, *(exponent(SIZES, [count(*graph(name, n)) for n in SIZES]) for name in names))
    print(f"\nExchanges until the squared distance is {FALLEN:g} of the first, counted:\n")
    head("", "star", "ring", "complete", "ring, counts")
    methods: dict[str, Callable[[str, int], float]] = {
        "synchronous": lambda name, n: rounds(name, n, False),
        "accelerated synchronous": lambda name, n: rounds(name, n, True),
        "A2CiD2": a2cid2,
        "plain gossip": plain,
    }
    for label, method in methods.items():
        counts = {name: [method(name, n) for n in SIZES] for name in names}
        shown = ", ".join(f"{count:.3g}" for count in counts["ring"])
        row(label, *(exponent(SIZES, counts[name]) for name in names), shown)


# --- training ------------------------------------------------------------------------------------


def trained(rates: Rates, c: Constants, n: int, seed: int) -> tuple[float, float]:
    """Loss above the least and squared distance, means over the second half of 200 units."""
    timeline = simulate(rates, Workers([1.0] * n, jitter=0.2), units=200, seed=seed)
    objective = Quadratic.random(n, 16, seed=seed)
    start = np.full((n, 16), 3.0)
    course = follow(timeline, c, start, objective=objective, learning_rate=0.1, seed=seed)
    late = course.times > 100
    return float(course.excess[late].mean()), float(course.distance[late].mean())


def show_rings() -> None:
    """Loss of the workers above the least possible one; the same number of gradients per worker."""
    head(
        "n", *(f"{what}, {name}" for what in ("loss", "distance") for name in ("A2CiD2", "AD-PSGD"))
    )
    for n in (4, 8, 16, 32, 64):
        rates, c = graph("ring", n)
        both = [[trained(rates, one, n, seed) for seed in SEEDS] for one in (c, ad_psgd(c))]
        row(n, *(spread([found[k] for found in rows], 3, fmean) for k in (0, 1) for rows in both))


SAMPLES, BUCKETS, BUCKET_BYTES, LINK_BYTES_S = 6400, 20, 5_000_000, 400e6


def synchronous_s(strategy: Strategy, workers: Workers) -> float:
    """Seconds for all samples, shared equally."""
    n = len(workers.gradient_s)
    bucket = Bucket("b", 0.3 / BUCKETS, 0.7 / BUCKETS, BUCKET_BYTES)
    profile = Profile(
        tuple(replace(bucket, name=f"b{i}") for i in range(BUCKETS)),
        (Link("net", 1e-4, LINK_BYTES_S),),
        world_size=n,
    )
    ranks = Ranks(scale=tuple(workers.gradient_s), jitter=workers.jitter)
    plan = strategy.plan(profile)
    trace = simulate_plan(plan, profile, iterations=SAMPLES // n, ranks=ranks, record=0)
    return max(map(max, trace.ends_s))


def show_workers() -> None:
    """Seconds for 6,400 gradients; one takes 1 s, an exchange of all parameters .25 s."""
    sizes = (4, 8, 16, 32, 64)
    network = Network(BUCKETS * BUCKET_BYTES, nic_bytes_s=LINK_BYTES_S)
    for label, slower in (("20 % jitter", 1.0), ("20 % jitter, every fourth 2x slower", 2.0)):
        print(f"\n{label}:\n")
        head("n", *map(str, sizes))
        crowds = [Workers.uneven(n, slower=slower, jitter=0.2) for n in sizes]
        for strategy in (BSP(), WFBP()):
            row(strategy.name, *(f"{synchronous_s(strategy, one):.0f}" for one in crowds))
        for name in ("ring", "exponential"):
            found = [
                simulate(graph(name, n)[0], one, network, gradients=SAMPLES)
                for n, one in zip(sizes, crowds, strict=True)
            ]
            row(f"gossip, {name}", *(f"{one.end_s:.0f}" for one in found))
            counts = [one.gradients() for one in found]
            row("- gradients of slowest, fastest", *(f"{c.min()}, {c.max()}" for c in counts))
            rates = [2 * sum(one.rates().values()) / one.n for one in found]
            row("- exchanges of a worker per unit", *(f"{rate:.2f}" for rate in rates))


# --- links ---------------------------------------------------------------------------------------


BUSY = 0.35  # of the time of the busiest worker, as planned


def show_links() -> None:
    """Eight workers, two of them (or one site of four) on slow links; messages of 40 MB."""
    message, n = 40e6, 8
    fast, slow = 12.5e6 * 8, 12.5e6
    two = [slow if worker >= 6 else fast for worker in range(n)]
    uneven = np.minimum.outer(two, two)
    sites = np.where(np.equal.outer(np.arange(n) // 4, np.arange(n) // 4), fast, slow)
    for label, rate in (("two slow hosts", uneven), ("two sites, a thin link", sites)):
        print(f"\n{label}; consensus per second, promised and simulated:\n")
        head("graph", "edges", "1 / sqrt(chi1 chi2)", "decay, simulated", "busy")
        delay = np.full((n, n), 1e-3)
        cases: list[tuple[str, dict[tuple[int, int], float]]] = []
        for name in ("measured", "ring", "exponential", "torus", "complete", "star"):
            best = name == "measured"
            made = edge_rates(best_graph(rate, delay, message) if best else topology(name, n))
            spent = [
                sum(one * (1e-3 + message / rate[e]) for e, one in made.items() if k in e)
                for k in range(n)
            ]
            cases.append((name, {e: BUSY * one / max(spent) for e, one in made.items()}))
        for name, rates in cases:
            c = constants(rates, n)
            decays, busy = [], []
            for seed in SEEDS:
                network = Network(
                    message, edge_bytes_s={e: float(rate[e]) for e in rates}, delay_s=1e-3
                )
                seconds = 40 / (2 * c.eta)
                timeline = simulate(rates, Workers([1.0] * n), network, units=seconds, seed=seed)
                x = np.random.default_rng(seed).standard_normal((n, 16))
                course = follow(timeline, c, x)
                decays.append(course.decay(course.times[-1] / 8))
                busy.append(float(exchanging_s(timeline).max() / timeline.end_s))
            row(
                name, len(rates), f"{2 * c.eta:.3f}", spread(decays, 3, fmean), f"{fmean(busy):.0%}"
            )


# --- speed ---------------------------------------------------------------------------------------


def show_speed() -> None:
    head("workers", "graph", "events", "timeline s", "numbers s (16 of each worker)")
    for n, name in ((64, "ring"), (64, "exponential"), (64, "complete"), (1024, "exponential")):
        rates = edge_rates(topology(name, n))
        c = constants(rates, n)
        network = Network(4e6, nic_bytes_s=40e6)
        units = 10_500 / (1.5 * n) / 0.9
        begin = time.perf_counter()
        timeline = simulate(rates, Workers.uneven(n, jitter=0.1), network, units=units)
        middle = time.perf_counter()
        follow(timeline, c, np.ones((n, 16)), objective=Quadratic.random(n, 16))
        end = time.perf_counter()
        row(n, name, events(timeline), f"{middle - begin:.2f}", f"{end - middle:.2f}")


SHOWN = {
    "constants": show_constants,
    "decay": show_decay,
    "mean": show_mean,
    "complexity": show_complexity,
    "rings": show_rings,
    "workers": show_workers,
    "links": show_links,
    "speed": show_speed,
}


def ad_psgd(c: Constants) -> Constants:
    """The constants of the same graph without momentum, with which x~ equals x."""
    return replace(c, eta=0.0, alpha=0.5, alpha_tilde=0.5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("what", nargs="*", choices=[*SHOWN, []], default=[])
    for name in parser.parse_args().what or SHOWN:
        print(f"\n## {name}\n")
        SHOWN[name]()


if __name__ == "__main__":
    main()
