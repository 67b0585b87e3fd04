"""How data is split: SelDP against DefDP, injection, SelSync against FedAvg.

    python benchmarks/papers/splits.py [--out FILE] [--seeds 5] [--steps 100]

The digits network (width 64) on 8 ranks, threads of one process. Printed: accuracy of the
averaged model on 360 images that nobody has trained on, mean and range over seeds, and LSSR, the
share of local steps. Runs are kept in a file; a second start goes on. About 15 minutes of one core.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from offbeat.data import Chunks, DefDP, Dirichlet, Injection, LabelSkew, Partition, SelDP
from offbeat.strategies import BSP, FedAvg, SelSync, Strategy

sys.path.insert(0, str(Path(__file__).parents[1]))  # modules that benchmarks share

from figures import spread
from tasks import Batch, network, picture_loss, pictures, sgd
from threads import Job, Trained, World, consolidated, remembered, train, untimed

WORKERS, BATCH, WIDTH = 8, 32, 64

SPLITS = {
    "IID": Chunks(),
    "2 classes": LabelSkew(classes=2),
    "Dirichlet .1": Dirichlet(alpha=0.1, least=BATCH),
}
SAMPLERS = {"DefDP": DefDP, "SelDP": SelDP}


@dataclass(frozen=True)
class Cell:
    """One row of a table."""

    split: str
    sampler: str
    strategy: Callable[[Partition], Strategy]
    name: str
    injection: tuple[float, float] | None = None

    @property
    def key(self) -> str:
        shared = "" if self.injection is None else " inject {:g},{:g}".format(*self.injection)
        return f"{self.name}, {self.split}, {self.sampler}{shared}"


def always(strategy: Strategy) -> Callable[[Partition], Strategy]:
    return lambda _: strategy


def selsync(delta: float) -> tuple[Callable[[Partition], Strategy], str]:
    return always(SelSync(delta=delta)), f"SelSync {delta:g}"


def fedavg(fraction: float, steps: int) -> tuple[Callable[[Partition], Strategy], str]:
    """Weighted by what every worker owns."""

    def chosen(partition: Partition) -> Strategy:
        return FedAvg(fraction=fraction, local_steps=steps, samples=partition.sizes)

    return chosen, f"FedAvg C={fraction:g}, {steps} steps"


SYNCHRONOUS = (always(BSP()), "BSP")
SAMPLED = [
    Cell(split, sampler, *how)
    for split in ("IID", "2 classes")
    for how in (SYNCHRONOUS, selsync(0.3))
    for sampler in SAMPLERS
]
INJECTED = [
    Cell("2 classes", "DefDP", *selsync(delta), injection)
    for delta in (0.05, 0.3)
    for injection in (None, (0.5, 0.5), (0.75, 0.75))
]
FEDERATED = [
    Cell(split, "DefDP", *how)
    for split in ("2 classes", "Dirichlet .1")
    for how in (SYNCHRONOUS, selsync(0.3), fedavg(1, 5), fedavg(0.5, 5), fedavg(1, 20))
]
TABLES = {
    "SelDP against DefDP": SAMPLED,
    "Injection, two classes per worker": INJECTED,
    "SelSync against FedAvg": FEDERATED,
}


def own_batches(sampler: DefDP | SelDP, size: int) -> Iterator[list[int]]:
    """Full batches of sample numbers, epoch after epoch."""
    while True:
        order = list(sampler)
        for start in range(0, len(order) - size + 1, size):
            yield order[start : start + size]
        sampler.set_epoch(sampler.epoch + 1)


def injected(
    own: Iterator[list[int]], injection: Injection, world: World, rank: int
) -> Iterator[list[int]]:
    """As `Injected` makes batches, but samples travel as their numbers."""
    meeting = world.meeting("injection", range(WORKERS))
    for iteration, mine in enumerate(own):
        everyone = meeting.meet(rank, mine, dict)
        sharers, given = injection.sharers(iteration, WORKERS), injection.given(BATCH, WORKERS)
        yield mine + [
            everyone[sharer][i]
            for sharer, count in zip(sharers, given, strict=True)
            for i in injection.chosen(iteration, sharer, len(everyone[sharer]), count)
        ]


def batches(
    cell: Cell, partition: Partition, seed: int, world: World, rank: int
) -> Iterator[Batch]:
    images, labels, *_ = pictures()
    sampler = SAMPLERS[cell.sampler](partition, rank=rank, world_size=WORKERS, seed=seed)
    if cell.injection is None:
        numbers = own_batches(sampler, BATCH)
    else:
        injection = Injection(*cell.injection, seed=seed)
        size = injection.batch_size(BATCH, WORKERS)
        numbers = injected(own_batches(sampler, size), injection, world, rank)
    for chosen in numbers:
        yield images[chosen], labels[chosen]


def run(cell: Cell, seed: int, steps: int) -> dict[str, Any]:
    """Held-out accuracy and loss of the averaged model, and the share of local steps."""
    torch.manual_seed(seed)
    model = network(WIDTH)
    partition = SPLITS[cell.split].partition(pictures()[1], WORKERS, seed=seed)
    profile = untimed(model, WORKERS)
    job = Job(model, sgd, partial(batches, cell, partition, seed), picture_loss)
    trained = train(job, cell.strategy(partition).plan(profile), profile, steps)
    _, _, images, labels = pictures()
    model = consolidated(trained)
    with torch.no_grad():
        hits = model(images).argmax(1) == labels
        loss = picture_loss(model, (images, labels))
    return {
        "accuracy": hits.float().mean().item(),
        "loss": loss.item(),
        "training": fmean(fmean(one.losses[-10:]) for one in trained),
        "lssr": local_share(cell.strategy(partition), trained),
    }


def local_share(strategy: Strategy, trained: list[Trained]) -> float:
    if isinstance(strategy, FedAvg):
        return 1 - 1 / strategy.round_steps
    return trained[0].local_share if trained[0].voted else 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("splits.json"))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args()
    torch.set_num_threads(1)
    cells = {cell.key: cell for table in TABLES.values() for cell in table}
    found: dict[str, list[dict[str, Any]]] = {key: [] for key in cells}
    for seed in range(options.seeds):
        for key, cell in cells.items():
            where = f"{options.steps} {key}, seed {seed}"
            act = partial(run, cell, seed, options.steps)
            found[key].append(remembered(options.out, where, act))
    for title, table in TABLES.items():
        print(f"\n**{title}**\n")
        print("| split | sampler | method | injection | accuracy, % | held-out loss | LSSR |")
        print("|---|---|---|---|---|---|---|")
        for cell in table:
            runs = found[cell.key]
            shared = "–" if cell.injection is None else "({:g}, {:g})".format(*cell.injection)
            accuracy = spread([100 * one["accuracy"] for one in runs], 1, fmean)
            loss = spread([one["loss"] for one in runs], 2, fmean)
            share = spread([one["lssr"] for one in runs], 2, fmean)
            where = [cell.split, cell.sampler, cell.name, shared]
            print("|", " | ".join([*where, accuracy, loss, share]), "|")


if __name__ == "__main__":
    main()
