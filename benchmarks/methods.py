"""Published methods beside DDP and DreamDDP: seconds to DDP's loss, and loss at equal bytes.

    python benchmarks/methods.py losses [--minutes 60] [--seeds 3]
    python benchmarks/methods.py times [--minutes 60] [--rates 25,100] [--repetitions 3]
    python benchmarks/methods.py tables

The GPT with two layers and the digits network with a convolution, 4 and 8 hosts. `losses` trains
the real models, without a lab: held-out loss of the mean of all replicas every 10 iterations.
`times` takes seconds and bytes per iteration in the lab, where a host only takes the time of
compute. `tables` joins both in results/methods.json and makes the tables of the pages: iterations
until DDP's loss times seconds per iteration, and the loss when a rank has sent as many bytes as
local SGD in half of its run (`--megabytes` for others).

Parts are kept in methods-losses.json and methods-times.json, and a second start goes on from there.
The names of parts contain a digest of all settings, so that parts with other settings are not used.
With `--minutes` no part begins after that time. `times` needs the lab and a quiet machine. DeMo
steps with SGD, whose rate is that of a step by signs.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from hashlib import sha256
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import front
import tables
from front_row import spread
from front_worker import EVERY, PERIOD, TORCH
from threads import remembered

from offbeat.core.strategy.parsing import parse

HOSTS, RATES, SEEDS = (4, 8), (25, 100), 3
NAMES = {"gpt": "The small GPT", "digits": "Digits"}
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
SIGN_RATES = {"gpt": 1e-3, "digits": 3e-4}  # learning rates of steps by signs


def prefix_of(what: str, task: str, hosts: int) -> str:
    """Return the begin of the names of all parts of a task, with a digest of all settings.

    The digest changes with a default of a strategy, so that a part of other settings is not used.
    """
    used: list[Any] = [front.LENGTHS[task], SIGN_RATES[task]] if what == "losses" else []
    used += [one if one in TORCH else repr(parse(one)) for one in CONTESTANTS]
    return f"{task}, {hosts} hosts, settings {sha256(repr(used).encode()).hexdigest()[:8]}, "


def cases(options: argparse.Namespace) -> list[tuple[str, int]]:
    hosts = [*map(int, options.hosts.split(","))]
    return [(task, count) for task in options.tasks.split(",") for count in hosts]


def parts(options: argparse.Namespace) -> Iterator[tuple[str, Any]]:
    """Yield the name of each part and the function that measures it, whole rounds first."""
    chosen = [(task, hosts, prefix_of(options.what, task, hosts)) for task, hosts in cases(options)]
    if options.what == "losses":
        for seed in range(options.seeds):
            for task, hosts, prefix in chosen:
                sgd = {label: SIGN_RATES[task] for label in CONTESTANTS if label.startswith("demo")}
                yield f"{prefix}seed {seed}", partial(losses, task, hosts, seed, sgd)
        return
    for n in range(options.repetitions):
        turns = [*CONTESTANTS][:: -1 if n % 2 else 1]
        for task, hosts, prefix in chosen:
            for rate in rates_of(options):
                more: dict[str, Any] = {"advised": False, "adam": task == "gpt"}
                run = partial(front.times, task, hosts, rate, turns, profiles(options), **more)
                yield f"{prefix}{rate} Mbit/s, {n}", run


def profiles(options: argparse.Namespace) -> Path:
    """Return the folder of the profiles that the launches of `times` have measured."""
    return options.times.with_suffix(".profiles")


def losses(task: str, hosts: int, seed: int, sgd: Mapping[str, float]) -> dict[str, Any]:
    """Return for each contestant (iteration, held-out loss) every few iterations."""
    return front.losses(task, hosts, seed, [*CONTESTANTS], sgd)


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


class Cost(NamedTuple):
    """Seconds per iteration of each launch, and bytes that a rank sends per iteration."""

    seconds: list[float]
    sent_bytes: float


def measured_costs(runs: Mapping[int, list[Any]], label: str) -> dict[int, Cost]:
    """Return the costs in the lab by rate, of all launches of a contestant."""
    return {
        rate: Cost(
            [run[label]["iteration_s"] for run in found],
            median(run[label]["sent_bytes"] for run in found),
        )
        for rate, found in runs.items()
        if found
    }


def rows(options: argparse.Namespace, task: str, hosts: int) -> Iterator[list[Any]]:
    """Yield the cells of each contestant whose losses are known."""
    curves, launches = (
        {key.removeprefix(prefix): part for key, part in known.items() if key.startswith(prefix)}
        for known, prefix in (
            (read(getattr(options, what)), prefix_of(what, task, hosts))
            for what in ("losses", "times")
        )
    )
    if not curves:
        return
    runs = {
        rate: [part for key, part in launches.items() if key.startswith(f"{rate} Mbit/s, ")]
        for rate in rates_of(options)
    }
    costs = {label: measured_costs(runs, label) for label in CONTESTANTS}
    sent = {
        label: median(c.sent_bytes for c in own.values()) for label, own in costs.items() if own
    }
    length = front.LENGTHS[task]
    budget = options.megabytes * 1e6 if options.megabytes else sent.get(BUDGET, 0) * length / 2
    for label in CONTESTANTS:
        own = [part[label] for part in curves.values()]
        aims = [front.aim_of(part["ddp"], task) for part in curves.values()]
        needed = [front.reached(curve, aim) for curve, aim in zip(own, aims, strict=True)]
        reached = [n for n in needed if n is not None]
        never = len(needed) - len(reached)
        cells = [label, spread(reached, 0) if reached else None, never]
        cells.append(spread([curve[-1][1] for curve in own], 3))
        cells += at_equal_bytes(own, sent.get(label), budget, length)
        for rate in runs:
            cost = costs[label].get(rate)
            cells.append(cost and spread([1e3 * s for s in cost.seconds], 1))
            total_s = cost and not never and round(median(cost.seconds) * median(reached), 1)
            cells.append("never" if cost and never else total_s)
        yield cells


def at_equal_bytes(
    curves: Sequence[Any], sent_bytes: float | None, budget: float, length: int
) -> list[Any]:
    """Return the loss when a rank has sent `budget` bytes, and KB per iteration.

    If the whole training sends fewer bytes, the loss is the last one, with the share of the bytes.
    """
    if sent_bytes is None:
        return [None, None]
    kilobytes = round(sent_bytes / 1e3, 1)
    if not budget:
        return [None, kilobytes]
    loss = spread([loss_at(curve, budget / max(sent_bytes, 1)) for curve in curves], 3)
    share = sent_bytes * length / budget
    text = f"{tables.cell_text(loss)}, with {share:.0%} of them"
    return [text if share < 1 else loss, kilobytes]


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.exists() else {}


def rates_of(options: argparse.Namespace) -> list[int]:
    return list(map(int, options.rates.split(",")))


def result(options: argparse.Namespace) -> dict[str, Any]:
    """Return the result; exit if no part of `losses` has the settings of this version."""
    every = ["strategy", "iterations to DDP's loss", "seeds that never reach it", "last loss"]
    every += ["loss at equal bytes", "KB per iteration"]
    for rate in rates_of(options):
        every += [f"ms at {rate} Mbit/s", f"s to DDP's loss at {rate} Mbit/s"]
    found = [
        {
            "name": f"{task}-{hosts}",
            "title": f"{NAMES[task]}, {hosts} hosts: published methods",
            "spread": "median [least, greatest]",
            "columns": every,
            "page": {"columns": [c for c in every if not c.startswith(("ms", "KB"))]},
            "rows": made,
        }
        for task, hosts in cases(options)
        if (made := [*rows(options, task, hosts)])
    ]
    if not found:
        sys.exit(f"{options.losses} has no part with the settings of this version; run `losses`")
    sent = f"{options.megabytes:g} MB" if options.megabytes else f"half of the bytes of {BUDGET}"
    return {
        "title": "Published methods beside DDP and DreamDDP",
        "what": "Losses are real, of the real model on all ranks, up to "
        f"{options.seeds} seeds. Iterations are those until DDP's held-out loss after "
        f"{max(front.AIMS.values())} iterations. Seconds and bytes per iteration are of the lab "
        f"(launches: {options.repetitions}), with emulated compute (30 ms). Losses are compared "
        f"when a rank has sent {sent}.",
        "how": ["measured", "emulated"],
        "date": datetime.now(UTC).date().isoformat(),
        "machine": tables.machine(),
        "command": "python benchmarks/methods.py losses; python benchmarks/methods.py times; "
        "python benchmarks/methods.py tables",
        "tables": found,
        "misses": [],
        "notes": [],
    }


def options_of(arguments: Sequence[str] | None = None) -> argparse.Namespace:
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
    return parser.parse_args(arguments)


def main() -> None:
    options = options_of()
    if options.what == "tables":
        tables.save("methods", result(options))
        tables.main([])
        return
    until_s = time.monotonic() + 60 * options.minutes
    for key, run in parts(options):
        if time.monotonic() >= until_s:
            print(f"not begun: {key}; start again to go on")
            break
        remembered(getattr(options, options.what), key, run)


if __name__ == "__main__":
    main()
