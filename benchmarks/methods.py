"""Published methods beside DDP and DreamDDP: seconds to DDP's loss, and loss at equal bytes.

    python benchmarks/methods.py losses [--minutes 60] [--seeds 3]
    python benchmarks/methods.py times [--minutes 60] [--rates 25,100] [--repetitions 3]
    python benchmarks/methods.py tables

The GPT with two layers and the digits network with a convolution, 4 and 8 hosts. `losses` trains
the real models, without a lab: held-out loss of the mean of all replicas every 10 iterations.
Methods with servers train in a rehearsal, and have no times.
`times` takes seconds and bytes per iteration in the lab, where a host only takes the time of
compute. `tables` joins both: iterations until DDP's loss times seconds per iteration, and the loss
when a rank has sent as many bytes as local SGD in half of its run (`--megabytes` for others).

Parts are kept in methods-losses.json and methods-times.json, and a second start goes on from there.
With `--minutes` no part begins after that time. `times` needs the lab and a quiet machine. DeMo
steps with SGD, whose rate is that of a step by signs.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import front
import torch
from front_worker import EVERY, PERIOD, TASKS
from threads import remembered
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from offbeat.profile import Link, Profile
from offbeat.rehearsal.rehearse import rehearse

HOSTS, RATES, SEEDS = (4, 8), (25, 100), 3
BUDGET = f"local-sgd:period={PERIOD}"  # sends the bytes at which losses are compared
CONTESTANTS = (
    "ddp",
    BUDGET,
    f"dreamddp:period={PERIOD}",
    f"dreamddp:period={PERIOD}:wire=int4",
    f"diloco:period={PERIOD}",
    f"eager:period={PERIOD}",
    f"sparseloco:period={PERIOD}",
    f"sparseloco:period={PERIOD}:fraction=0.0625",
    f"noloco:period={PERIOD}",
    f"des-loc:period={PERIOD}",
    "demo",
    "demo:fraction=0.03",
)
# Methods with servers train in a rehearsal, for numbers of hosts. Their quorum is three quarters of
# the workers. With heloco each worker's change is a step of its own.
SERVED = {
    f"ps-diloco:period={PERIOD}": {},
    f"ps-diloco:period={PERIOD}, a quorum": {4: "quorum=3", 8: "quorum=6"},
    f"ps-diloco:period={PERIOD}, heloco": {
        4: "rule=heloco:outer=0.2/0.3",
        8: "rule=heloco:outer=0.1/0.3",
    },
}
JITTER = 0.1  # of compute in these rehearsals, so that not always the same workers are late
SIGN_RATES = {"gpt": 1e-3, "digits": 3e-4}  # learning rates of steps by signs


def parts(options: argparse.Namespace) -> Iterator[tuple[str, Any]]:
    """Yield the name of each part and the function that measures it, whole rounds first."""
    tasks: list[str] = options.tasks.split(",")
    cases = [(task, hosts) for task in tasks for hosts in map(int, options.hosts.split(","))]
    if options.what == "losses":
        for seed in range(options.seeds):
            for task, hosts in cases:
                sgd = {label: SIGN_RATES[task] for label in CONTESTANTS if label.startswith("demo")}
                run = partial(losses, task, hosts, seed, sgd)
                yield f"{task}, {hosts} hosts, seed {seed}", run
        return
    keep = options.times.with_suffix(".profiles")
    for n in range(options.repetitions):
        turns = [*CONTESTANTS][:: -1 if n % 2 else 1]
        for task, hosts in cases:
            for rate in rates_of(options):
                more: dict[str, Any] = {"advised": False, "adam": task == "gpt"}
                run = partial(front.times, task, hosts, rate, turns, keep, **more)
                yield f"{task}, {hosts} hosts, {rate} Mbit/s, {n}", run


def losses(task: str, hosts: int, seed: int, sgd: Mapping[str, float]) -> dict[str, Any]:
    """Return for each contestant (iteration, held-out loss) every few iterations."""
    planned = front.losses(task, hosts, seed, [*CONTESTANTS], sgd)
    return planned | {label: served(label, task, hosts, seed) for label in SERVED}


def served(label: str, name: str, hosts: int, seed: int) -> list[tuple[int, float]]:
    """Return (iteration, held-out loss) of a method with servers, in a rehearsal."""
    task = TASKS[name]
    settings = SERVED[label].get(hosts, "")
    text = ":".join(filter(None, (label.partition(",")[0], settings)))

    def make_model() -> nn.Module:
        torch.manual_seed(seed)
        return task.model()

    def make_optimizer(model: nn.Module) -> Any:
        optimizer = task.optimizer(model)
        return optimizer, LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / task.warmup))

    torch.set_num_threads(1)
    profile = Profile(front.buckets_of(name), (Link("net", 1e-3, 2e6),), hosts)
    [curve] = rehearse(
        make_model,
        make_optimizer,
        partial(task.batches, seed, hosts),
        text,
        profile,
        iterations=front.LENGTHS[name],
        loss=task.loss,
        evaluate=task.held_out_loss,
        evaluate_every=EVERY,
        jitter=JITTER,
        seed=seed,
    ).values()
    return [(iteration + 1, loss) for iteration, loss in curve.held_out]


def loss_at(curve: Sequence[Sequence[float]], iteration: float) -> float:
    """Return the loss at an iteration, between two looks; at the end of the curve, its last one."""
    before = (0.0, curve[0][1])
    for at, loss in curve:
        if at >= iteration:
            earlier, other = before
            share = (iteration - earlier) / max(at - earlier, EVERY / 1e3)
            return other + share * (loss - other)
        before = (at, loss)
    return before[1]


def start(known: Mapping[str, Any], prefix: str) -> list[Any]:
    return [value for key, value in known.items() if key.startswith(prefix)]


def rows(options: argparse.Namespace, task: str, hosts: int) -> Iterator[list[str]]:
    """Yield the cells of each contestant."""
    losses, times = (
        json.loads(path.read_text()) if path.exists() else {}
        for path in (options.losses, options.times)
    )
    curves = start(losses, f"{task}, {hosts} hosts, ")
    runs = {r: start(times, f"{task}, {hosts} hosts, {r} Mbit/s, ") for r in rates_of(options)}
    sent = {
        label: median(each[label]["sent_bytes"] for found in runs.values() for each in found)
        for label in CONTESTANTS
        if any(runs.values())
    }
    length = front.LENGTHS[task]
    budget = options.megabytes * 1e6 if options.megabytes else sent.get(BUDGET, 0) * length / 2
    for label in (*CONTESTANTS, *SERVED):
        needed = [front.reached(c[label], front.aim_of(c["ddp"], task)) for c in curves]
        reached = [n for n in needed if n is not None]
        cells = [label, front.spread(reached, 0) if reached else ""]
        cells[1] += f" (never: {len(needed) - len(reached)})" if len(reached) < len(needed) else ""
        cells.append(front.spread([c[label][-1][1] for c in curves], 3) if curves else "")
        of_label = sent.get(label)
        at = [loss_at(c[label], budget / max(of_label, 1)) for c in curves] if of_label else []
        less = bool(of_label) and of_label * length < budget
        cells.append((f"{'<' * less}" + front.spread(at, 3)) if at else "")
        cells.append(f"{of_label / 1e3:.1f}" if of_label else "")
        for found in runs.values():
            taken = [each[label]["iteration_s"] for each in found if label in each]
            cell = front.spread([1e3 * s for s in taken], 1) if taken else ""
            if taken and len(reached) == len(needed) > 0:
                cell += f", **{median(taken) * median(reached):.1f} s**"
            cells.append(cell)
        yield cells


def rates_of(options: argparse.Namespace) -> list[int]:
    return list(map(int, options.rates.split(",")))


def tables(options: argparse.Namespace) -> None:
    heads = ["", "iterations to DDP's loss", "last loss", "loss at equal bytes", "KB per iteration"]
    heads += [f"{rate} Mbit/s: ms, s to DDP's loss" for rate in rates_of(options)]
    for task in options.tasks.split(","):
        for hosts in map(int, options.hosts.split(",")):
            print(f"\n**{task}, {hosts} hosts**\n")
            print("|", " | ".join(heads), "|\n" + "|---" * len(heads) + "|")
            for cells in rows(options, task, hosts):
                print("|", " | ".join(cells), "|")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("losses", "times", "tables"))
    parser.add_argument("--tasks", default="gpt,digits")
    parser.add_argument("--hosts", default=",".join(map(str, HOSTS)))
    parser.add_argument("--rates", default=",".join(map(str, RATES)), help="Mbit/s")
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--minutes", type=float, default=float("inf"))
    parser.add_argument("--megabytes", type=float, help="bytes of a rank at which losses compare")
    parser.add_argument("--losses", type=Path, default=Path("methods-losses.json"))
    parser.add_argument("--times", type=Path, default=Path("methods-times.json"))
    options = parser.parse_args()
    if options.what == "tables":
        tables(options)
        return
    until_s = time.monotonic() + 60 * options.minutes
    for key, run in parts(options):
        if time.monotonic() >= until_s:
            print(f"not begun: {key}; start again to go on")
            break
        remembered(getattr(options, options.what), key, run)


if __name__ == "__main__":
    main()
