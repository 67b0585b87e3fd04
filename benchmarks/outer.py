"""Outer optimizers: what they do to the loss, by their settings and the period.

    python benchmarks/outer.py [--out FILE] [--seeds 3] [--steps 200]

Local SGD with an outer step on its average, and streaming variants, beside plain averages and BSP:
a small GPT (AdamW) and digits (SGD with momentum), 4 ranks as threads, equal steps. Losses are
real. Runs are kept in a file; a second start goes on. About 20 minutes of one core.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from figures import spread
from tasks import GPT, Task, digits_task
from threads import Job, consolidated, remembered, train, untimed

from offbeat.strategies import BSP, DiLoCo, LocalSGD, OuterSGD, Strategy

RANKS, WIDTH = 4, 64
PERIODS = (10, 50)
LAST = 20  # iterations whose mean loss counts
OUTERS = (None, OuterSGD(0.7, 0.5), OuterSGD(0.7, 0.9), OuterSGD(0.8, 0.3))
TASKS = {"GPT": GPT, "digits": digits_task(WIDTH)}
FRAGMENTS = {"GPT": 5, "digits": 3}  # digits has three buckets


def contestants(task: str) -> Iterator[tuple[str, Strategy]]:
    yield "BSP", BSP()
    for period in PERIODS:
        for outer in OUTERS:
            yield f"{period}, {outer or 'average'}", LocalSGD(period, outer=outer)
    for period in PERIODS:
        for alpha in (None, 0.5):
            name = f"{period}, streaming, delay 2, alpha {alpha}"
            parts = FRAGMENTS[task]
            yield name, DiLoCo(period, OuterSGD(0.7, 0.5), fragments=parts, delay=2, alpha=alpha)


def trained(task: Task, strategy: Strategy, seed: int, steps: int) -> dict[str, Any]:
    """Loss of the last iterations, and of the held-out batches; nan if it diverged."""
    torch.manual_seed(seed)
    model = task.model()
    job = Job(
        model,
        task.optimizer,
        lambda world, rank: task.batches(seed, world.size, rank),
        task.loss,
        warmup=task.warmup,
    )
    profile = untimed(model, RANKS)
    ranks = train(job, strategy.plan(profile), profile, steps)
    losses = [fmean(one.losses[-LAST:]) for one in ranks]
    return {"loss": fmean(losses), "held out": task.held_out_loss(consolidated(ranks))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("outer.json"))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--tasks", nargs="+", default=[*TASKS], choices=TASKS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    for seed in range(options.seeds):  # whole rounds, so that a part of them says something
        for name in options.tasks:
            task = TASKS[name]
            for label, strategy in contestants(name):
                run = partial(trained, task, strategy, seed, options.steps)
                remembered(options.out, f"{name}, {label}, {options.steps} steps, seed {seed}", run)
    for name in options.tasks:
        task = TASKS[name]
        print(f"\n**{name}**\n\n| | loss | held-out loss |\n|---|---|---|")
        for label, strategy in contestants(name):
            rows = []
            for seed in range(options.seeds):
                run = partial(trained, task, strategy, seed, options.steps)
                key = f"{name}, {label}, {options.steps} steps, seed {seed}"
                rows.append(remembered(options.out, key, run))
            cells = (spread([row[what] for row in rows], 3) for what in ("loss", "held out"))
            print("|", label, "|", " | ".join(cells), "|")


if __name__ == "__main__":
    main()
