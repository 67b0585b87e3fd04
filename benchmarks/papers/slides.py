"""The comparison of SelSync's authors in shape: BSP, FedAvg, SSP and SelSync, one worker 2x slower.

    python benchmarks/papers/slides.py lab    --out DIR [--model digits|gpt] [--steps N]
    python benchmarks/papers/slides.py runs   --out DIR [--model ..] [--hosts 4,8] [--seeds 0,1,2]
    python benchmarks/papers/slides.py tables --out DIR

In this order. `lab` (needs the lab and a quiet machine, 3 to 5 minutes per model) measures the
profile of 4 hosts at 100 Mbit/s, one of which computes half as fast, and some methods on them:
compute time is emulated (`--pace auto`), messages are real. `runs` trains every method (real
numbers, no pace; about half an hour of a core), appends each run to DIR/runs.jsonl and leaves out
what is there. `tables` puts both together: what a run would take on such hosts is simulated from
the profile with the votes of that run. SSP's numbers depend on time: it trains in simulated time.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

from offbeat.core.profile.elsewhere import extrapolate
from offbeat.experiments.compare import compare
from offbeat.experiments.comparison import Comparison, Contestant, Setup
from offbeat.lab import Cluster
from offbeat.profile import Profile
from offbeat.strategies import SSP

sys.path.insert(0, str(Path(__file__).parents[1]))  # modules that benchmarks share

from slides_runs import train
from slides_served import train_served
from slides_tables import iterations_apart, measured, table
from slides_tasks import Task, measured_methods, methods, servers_of, task_of

EXAMPLES = Path(__file__).parents[2] / "examples"
HOSTS, SLOWER, RATE_BPS = 4, 2.0, 100e6
CLUSTER = """
hosts = {hosts}
rate = "100mbit"
[[overrides]]
host = 3
speed = 0.5
"""
LAUNCH_S = 600.0  # at most


def lab(task: Task, out: Path, steps: int) -> None:
    """Measure the profile and some methods on paced hosts; the run directory is DIR/lab-MODEL."""
    script, *words = task.script
    setup = Setup(
        (str(EXAMPLES / script), *words, "--steps", str(steps)),
        Cluster.from_toml(CLUSTER.format(hosts=HOSTS + 1)),
        pace="auto",
        servers=1,
        timeout_s=LAUNCH_S,
    )
    chosen = measured_methods(task.steps_per_epoch(HOSTS))
    contestants = tuple(
        Contestant(name.replace(" ", "-").replace(",", ""), s) for name, s in chosen.items()
    )
    outcome = compare(Comparison(setup, contestants, 1), out / f"lab-{task.name}")
    if outcome.failures:
        sys.exit("; ".join(outcome.failures))


def profiles(task: Task, out: Path, hosts: int) -> dict[str, Profile]:
    """The measured one, for so many hosts of which the last is the slow one, with all-reduces as
    the rate has them; and the same hosts as fast as this machine's cores."""
    measured = Profile.load(out / f"lab-{task.name}" / "profile.json")
    fast = min(measured.rank_scale)  # relative to the mean of the hosts that were measured
    scale = (fast,) * (hosts - 1) + (SLOWER * fast,)
    profile = replace(extrapolate(measured, hosts=hosts, rate_bps=RATE_BPS), rank_scale=scale)
    return {"lab": profile, "core": profile.with_pace(1.0)}


def runs(
    task: Task, out: Path, hosts: int, seeds: Sequence[int], iterations: int, only: str
) -> None:
    """Every method and seed that is not in DIR/runs.jsonl yet; `only`: what their names match."""
    path = out / "runs.jsonl"
    known = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    paces = profiles(task, out, hosts)
    for seed in seeds:
        for name, strategy in methods(task.steps_per_epoch(hosts), seed).items():
            for pace in paces if isinstance(strategy, SSP) else ("lab",):
                key = {"model": task.name, "hosts": hosts, "method": name, "seed": seed}
                if isinstance(strategy, SSP):
                    key["pace"] = pace
                words = " ".join(map(str, key.values()))
                if any(key.items() <= run.items() for run in known) or not re.search(only, words):
                    continue
                if isinstance(strategy, SSP):
                    servers = servers_of(name, hosts)
                    found = train_served(task, strategy, paces[pace], seed, iterations, servers)
                else:
                    found = train(task, strategy, paces[pace], seed, iterations)
                with path.open("a") as file:
                    file.write(json.dumps(key | {"iterations": iterations} | found) + "\n")
                print(words, found["quality"][-1], f"{found['took_s']:.1f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("lab", "runs", "tables"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", default="digits,gpt")
    parser.add_argument("--hosts", default="4,8")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--steps", type=int, default=47, help="in the lab")
    parser.add_argument("--iterations", type=int, default=150, help="of the runs")
    parser.add_argument("--only", default="", help="runs whose name this pattern is found in")
    options = parser.parse_args()
    tasks = [task_of(name) for name in options.model.split(",")]
    sizes = [int(size) for size in options.hosts.split(",")]
    if options.what == "lab":
        for task in tasks:
            lab(task, options.out, options.steps)
    elif options.what == "runs":
        seeds = [int(seed) for seed in options.seeds.split(",")]
        for task, hosts in product(tasks, sizes):
            runs(task, options.out, hosts, seeds, options.iterations, options.only)
    else:
        every = [
            (task, profiles(task, options.out, hosts)) for task, hosts in product(tasks, sizes)
        ]
        for task, paces in every:
            print("\n".join(table(task, paces, options.out)))
        print("\n".join(iterations_apart(every)))
        print("\n".join(measured(tasks, options.out)))


if __name__ == "__main__":
    main()
