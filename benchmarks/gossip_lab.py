"""Gossip beside synchronous training, on eight paced hosts of which two are half as fast.

    python benchmarks/gossip_lab.py --out DIR [--tasks digits,gpt] [--seeds 0,1,2] [--steps 80]
                                    [--only PATTERN]
    python benchmarks/gossip_lab.py --out DIR --table

50 Mbit/s per host; the models and data of `papers/slides.py`; the same number of samples in all.
Numerics and messages are real, compute time is emulated. Needs the lab and a quiet machine; a
minute or two per method and seed. What is in DIR/runs.jsonl is not run again.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
from pathlib import Path
from statistics import fmean
from typing import Any

from figures import spread

from offbeat.experiments.compare import compare
from offbeat.experiments.comparison import Comparison, Contestant, Setup
from offbeat.experiments.record.run_directory import load_repetition
from offbeat.lab import Cluster
from offbeat.profile import Profile
from offbeat.strategies import ADPSGD, DDP, WFBP, A2CiD2, Strategy

HERE = Path(__file__).parent
HOSTS, SLOW, RATE = 8, (3, 7), "50mbit"
GRAPHS = ("ring", "exponential", "complete", "measured")
RATES = (0.5, 1.0, 2.0)
TIMEOUT_S = 300.0


def methods() -> dict[str, Strategy]:
    """All, by name."""
    found: dict[str, Strategy] = {"DDP": DDP(), "WFBP": WFBP()}
    for graph in GRAPHS:
        found[f"AD-PSGD, {graph}"] = ADPSGD(graph)
        for rate in RATES:
            found[f"A2CiD2, {graph}, rate {rate:g}"] = A2CiD2(graph, rate)
        found[f"A2CiD2, {graph}, live"] = A2CiD2(graph, weights="live")
    return found


def run(task: str, name: str, strategy: Strategy, seed: int, options: Any) -> dict[str, Any]:
    """One run."""
    lines = [f"hosts = {HOSTS}", f'rate = "{RATE}"']
    lines += [f"[[overrides]]\nhost = {host}\nspeed = 0.5" for host in SLOW]
    words = ["--task", task, "--steps", str(options.steps), "--seed", str(seed)]
    words += ["--slow", ",".join(map(str, SLOW))]
    known = options.out / f"profile-{task}.json"
    setup = Setup(
        (str(HERE / "gossip_lab_worker.py"), *words),
        Cluster.from_toml("\n".join(lines)),
        pace=None if known.exists() else "auto",
        timeout_s=TIMEOUT_S,
    )
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder, "run")
        outcome = compare(
            Comparison(
                setup,
                (Contestant("one", strategy),),
                1,
                profile=known if known.exists() else None,
            ),
            directory,
        )
        if outcome.failures:
            sys.exit("; ".join(outcome.failures))
        if not known.exists():
            Profile.load(directory / "profile.json").save(known)
        ranks = [json.loads(path.read_text()) for path in sorted(directory.rglob("lab*.json"))]
        records = load_repetition(directory / "one" / "rep0", 0).ranks
    assert len(ranks) == HOSTS, name
    gossip = [record.trace.notes.get("gossip") for record in records]
    done = [sum(one["exchanges"].values()) for one in gossip if one]
    steps = [rank["steps"] for rank in ranks]
    return {
        "wall_s": max(r["end_s"] for r in ranks) - min(r["begin_s"] for r in ranks),
        "steps": [min(steps), max(steps)],
        "samples": sum(steps),
        "off": fmean(rank["off"] for rank in ranks),
        "quality": ranks[0]["quality"],
        "exchanges": sum(done) / sum(steps) if done else None,
    }


def table(out: Path) -> None:
    """Means over seeds, smallest and largest."""
    runs = [json.loads(line) for line in (out / "runs.jsonl").read_text().splitlines()]
    for task in sorted({run["task"] for run in runs}):
        print(f"\n### {task}\n")
        print("| method | seeds | s | steps | exchanges per gradient | off the mean | held-out |")
        print("|---|---|---|---|---|---|---|")
        for name in methods():
            some = [run for run in runs if (run["task"], run["method"]) == (task, name)]
            if not some:
                continue
            first, done = some[0], [one["exchanges"] for one in some]
            columns = [
                name,
                len(some),
                spread([one["wall_s"] for one in some], 1, fmean),
                f"{first['steps'][0]}-{first['steps'][1]}",
                "" if done[0] is None else f"{fmean(done):.2f}",
                f"{fmean(one['off'] for one in some):.4f}",
                f"{spread([one['quality'][0] for one in some], 3, fmean)}, "
                f"{spread([100 * one['quality'][1] for one in some], 1, fmean)} %",
            ]
            print("| " + " | ".join(map(str, columns)) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tasks", default="digits,gpt")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--only", default="", help="methods in whose name this is found")
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    if options.table:
        table(options.out)
        return
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "runs.jsonl"
    known = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    for seed in map(int, options.seeds.split(",")):
        for task in options.tasks.split(","):
            for name, strategy in methods().items():
                key = {"task": task, "method": name, "seed": seed}
                if any(key.items() <= run.items() for run in known):
                    continue
                if not re.search(options.only, name):
                    continue
                found = run(task, name, strategy, seed, options)
                with path.open("a") as file:
                    file.write(json.dumps(key | found) + "\n")
                print(task, name, seed, found, flush=True)


if __name__ == "__main__":
    main()
