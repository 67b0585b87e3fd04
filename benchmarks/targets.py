"""Time to a target loss: real losses per iteration, predicted seconds per iteration.

    python benchmarks/targets.py [--out FILE] [--seeds 3]

DreamDDP, local SGD, equal-number partition (period 5), WFBP and DDP on 4 ranks: the digits network
(width 128, SGD with momentum) and a small GPT (AdamW). Losses come from real training in threads.
Seconds come from the simulator: compute is measured here, alone, with the library's own observer,
and slowed down until the GPT has the ratio of compute to communication of the result `paced`; links
are those of the lab as the result `emulated` has measured them. DreamDDP also with bubbles filled
and not: how far replicas are apart, and the loss.

Runs are kept in a file; a second start goes on. About 10 minutes of one core.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from figures import spread
from tasks import GPT, Task, digits_task
from threads import LEAST_BYTES, LINK, Job, Trained, consolidated, remembered, train

import offbeat
from offbeat.core.sim.prediction import predict
from offbeat.core.sim.trace import Trace
from offbeat.experiments.record.run_directory import RankRecord, Repetition
from offbeat.experiments.report.divergence import gamma, relative_distances
from offbeat.experiments.report.losses import FINAL_LEAST, FINAL_SHARE, KEPT_UP, Curve
from offbeat.profile import Link, Profile
from offbeat.strategies import BSP, DDP, WFBP, DreamDDP, LocalSGD, PartialSync, Strategy

RANKS, WIDTH, PERIOD = 4, 128, 5
STEPS = {"GPT": 200, "digits": 150}
OBSERVE = 20  # iterations in which compute is measured
# Of an all-reduce over 4 hosts, per Mbit/s (result `emulated`).
LATENCY_S, BYTES_PER_S = 0.5e-3, 7.84e4
RATIO = 2.7  # compute over the communication of the whole GPT at 100 Mbit/s (result `paced`)
RATES = (25, 50, 100, 200)  # Mbit/s
FILLED_AT = (25, 50, 200)

CONTESTANTS: dict[str, Strategy] = {
    "DDP": DDP(),
    "WFBP": WFBP(),
    "local SGD": LocalSGD(PERIOD),
    "equal-number": PartialSync(PERIOD),
    "DreamDDP": DreamDDP(PERIOD),
}
FILL: dict[str, Strategy] = {
    "filled": DreamDDP(PERIOD, split=False, fill=True),
    "not filled": DreamDDP(PERIOD, split=False, fill=False),
}
SYNCHRONOUS = ("DDP", "WFBP")  # they compute the same


TASKS = {"GPT": GPT, "digits": digits_task(WIDTH)}


# ---- seconds --------------------------------------------------------------------------------


def measured(task: Task) -> dict[str, Any]:
    """The profile of this model on one core, without a network, as JSON has it."""
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        path, plain = Path(folder, "profile.json"), task.model()
        model, optimizer = offbeat.prepare(
            plain,
            task.optimizer(plain),
            BSP(),
            profile=path,
            observe=OBSERVE,
            min_bucket_bytes=LEAST_BYTES,
        )
        batches = task.batches(0, 1, 0)
        for _ in range(OBSERVE):
            optimizer.zero_grad()
            task.loss(model, next(batches)).backward()
            optimizer.step()
        model.close()
        return Profile.load(path).to_dict()


def compute_s(profile: Profile) -> float:
    return profile.forward_s + profile.backward_s + profile.update_s + profile.other_s


def communication_s(profile: Profile) -> float:
    """Of all parameters in one message."""
    link = profile.default_link
    sizes = [b.payload_bytes("param") for b in profile.buckets]
    return link.latency_s + sum(sizes) / link.bytes_per_s


def hosts(profile: Profile, pace: float, rate: int) -> Profile:
    """Four hosts, each so many times slower than this core, on a network of `rate` Mbit/s."""
    slower = profile.with_pace(pace)
    return replace(
        slower,
        buckets=tuple(replace(b, communication_s={}) for b in slower.buckets),
        links=(Link(LINK, LATENCY_S, rate * BYTES_PER_S),),
        world_size=RANKS,
        jitter=0.0,
        contention=(),
        noise=None,
        model="",
    )


def pace_for(profile: Profile) -> float:
    """How many times slower hosts must be for `RATIO` at 100 Mbit/s."""
    at_100 = hosts(profile, 1.0, 100)
    return max(1.0, RATIO * communication_s(at_100) / compute_s(profile))


# ---- losses ---------------------------------------------------------------------------------


def trained(
    task: Task, strategy: Strategy, profile: Profile, steps: int, seed: int
) -> dict[str, Any]:
    """Losses by iteration (mean over ranks), divergence of the replicas, held-out loss."""
    torch.manual_seed(seed)
    job = Job(
        task.model(),
        task.optimizer,
        lambda world, rank: task.batches(seed, world.size, rank),
        task.loss,
        warmup=task.warmup,
    )
    ranks = train(job, strategy.plan(profile), profile, steps)
    repetition = recorded(ranks)
    return {
        "losses": [fmean(losses) for losses in zip(*(r.losses for r in ranks), strict=True)],
        "held out": task.held_out_loss(consolidated(ranks)),
        "gamma": list(gamma(repetition).values()),
        "relative": list(relative_distances(repetition).values()),
    }


def recorded(ranks: Sequence[Trained]) -> Repetition:
    """What the report reads divergences from; its times are made up."""
    records = []
    for rank, one in enumerate(ranks):
        ends_s = tuple(map(float, range(1, len(one.losses) + 1)))
        records.append(
            RankRecord(rank, "", Trace("measured", "", (ends_s,), (0.0,)), sample=one.sample)
        )
    return Repetition(0, tuple(records))


def curve(losses: Sequence[float]) -> Curve:
    """Smoothed as in reports; of iterations, counted from 1."""
    numbers = tuple(range(1, len(losses) + 1))
    return Curve(numbers, tuple(map(float, numbers)), tuple(losses)).smooth()


def ends(losses: Sequence[float]) -> tuple[float, float]:
    """Mean loss of the first and of the last iterations, as in reports."""
    count = max(FINAL_LEAST, round(FINAL_SHARE * len(losses)))
    return fmean(losses[:count]), fmean(losses[-count:])


def target(runs: Sequence[Sequence[float]]) -> float:
    """The worst final loss of those whose loss fell at least 80 % as far as the best one's."""
    falls = [first - final for first, final in map(ends, runs)]
    kept_up = [r for r, fall in zip(runs, falls, strict=True) if fall >= KEPT_UP * max(falls)]
    return max(max(ends(run)[1], min(curve(run).losses)) for run in kept_up)


# ---- tables ---------------------------------------------------------------------------------


Runs = Callable[[Strategy, Profile], list[dict[str, Any]]]


def show_times(name: str, profiles: dict[int, Profile], runs: Runs) -> None:
    found = {
        (label, rate): runs(BSP() if label in SYNCHRONOUS else strategy, profiles[rate])
        for rate in RATES
        for label, strategy in CONTESTANTS.items()
    }
    seeds = range(len(next(iter(found.values()))))
    targets = [target([rows[s]["losses"] for rows in found.values()]) for s in seeds]
    print(f"\n**{name}**, targets {', '.join(f'{x:.3f}' for x in targets)}\n")
    print("| Mbit/s | contestant | ms per iteration | iterations | seconds | of DDP's |", end="")
    print(" final loss | held-out loss |\n|---|---|---|---|---|---|---|---|")
    for rate in RATES:
        yardstick: list[float] = []
        for label, strategy in CONTESTANTS.items():
            iteration_s = predict(strategy, profiles[rate]).iteration_s
            rows = found[label, rate]
            reached = [curve(rows[s]["losses"]).reach(targets[s]) for s in seeds]
            cells = [f"{1e3 * iteration_s:.0f}"]
            if all(reached):
                iterations = [at[0] for at in reached if at is not None]
                seconds = [n * iteration_s for n in iterations]
                yardstick = yardstick or seconds
                share = [a / b for a, b in zip(seconds, yardstick, strict=True)]
                cells += [spread(iterations, 0), spread(seconds, 1), spread(share, 2)]
            else:
                cells += [f"{sum(at is None for at in reached)} never", "–", "–"]
            cells.append(spread([ends(row["losses"])[1] for row in rows], 3))
            cells.append(spread([row["held out"] for row in rows], 3))
            print("|", rate, "|", label, "|", " | ".join(cells), "|")


def show_filling(name: str, profiles: dict[int, Profile], runs: Runs) -> None:
    print(f"\n**{name}, bubbles**\n")
    print(
        "| Mbit/s | | averaged per period | ms per iteration | Gamma | replicas apart, % |", end=""
    )
    print(" final loss | held-out loss |\n|---|---|---|---|---|---|---|---|")
    for rate in FILLED_AT:
        for label, strategy in FILL.items():
            prediction, rows = predict(strategy, profiles[rate]), runs(strategy, profiles[rate])
            assert prediction.plan is not None
            more = sum(map(len, prediction.plan.fact("fill")))
            cells = [
                f"{len(profiles[rate].buckets)} + {more}",
                f"{1e3 * prediction.iteration_s:.0f}",
                spread([fmean(row["gamma"]) for row in rows], 4),
                spread([100 * fmean(row["relative"]) for row in rows], 2),
                spread([ends(row["losses"])[1] for row in rows], 3),
                spread([row["held out"] for row in rows], 3),
            ]
            print("|", rate, "|", label, "|", " | ".join(cells), "|")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("targets.json"))
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    alone = {
        name: Profile.from_dict(
            remembered(options.out, f"profile of {name}", partial(measured, task))
        )
        for name, task in TASKS.items()
    }
    pace = pace_for(alone["GPT"])
    for name, task in TASKS.items():
        profiles = {rate: hosts(alone[name], pace, rate) for rate in RATES}
        first = profiles[100]
        print(
            f"\n### {name}: {len(first.buckets)} buckets, pace {pace:.1f}, compute "
            f"{1e3 * compute_s(first):.0f} ms, communication at 100 Mbit/s "
            f"{1e3 * communication_s(first):.0f} ms"
        )

        def runs(
            strategy: Strategy, profile: Profile, name: str = name, task: Task = task
        ) -> list[dict[str, Any]]:
            """Of every seed; plans that are alike share their runs."""
            digest = strategy.plan(profile).digest
            return [
                remembered(
                    options.out,
                    f"{name}, {strategy.name} {digest}, seed {seed}",
                    partial(trained, task, strategy, profile, STEPS[name], seed),
                )
                for seed in range(options.seeds)
            ]

        show_times(name, profiles, runs)
        show_filling(name, profiles, runs)


if __name__ == "__main__":
    main()
