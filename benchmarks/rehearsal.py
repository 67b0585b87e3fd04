"""Rehearsals: time of 32 replicas under ten strategies, and ranking beside measured runs.

    python benchmarks/rehearsal.py speed [--replicas 32] [--iterations 500] [--processes 2]
                                         [--rate 100] [--json FILE]
    python benchmarks/rehearsal.py ranking [--models gpt,digits] [--rate 25] [--steps 200]
                                           [--seeds 0,1,2] [--keep FOLDER] [--json FILE]

`speed`: the small GPT of `tasks.py` in this process and its forks: seconds of each rehearsal,
simulated seconds per iteration, and the loss at the end. The profile is measured here, on one core;
messages are estimated from the rate.

`ranking`: seconds to a loss of seven strategies on 4 emulated hosts, measured by `offbeat compare`
and rehearsed from the profile of that run, with the same seeds. A pair of strategies agrees if the
same one is sooner. Needs the lab and a quiet machine.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from functools import partial
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import Any

from targets import measured
from tasks import GPT, Batch

import offbeat
from offbeat.core.profile.elsewhere import Network, on_networks
from offbeat.experiments.compare import compare
from offbeat.experiments.comparison import Comparison, Contestant, Setup
from offbeat.experiments.record.run_directory import load
from offbeat.experiments.report.losses import target_loss
from offbeat.experiments.report.summary import summarize
from offbeat.lab import Cluster
from offbeat.profile import Profile
from offbeat.rehearsal.command import ScriptRehearsal, rehearse_script
from offbeat.strategies import (
    DDP,
    SSP,
    A2CiD2,
    DeAR,
    DiLoCo,
    DreamDDP,
    FedAvg,
    LocalSGD,
    SelSync,
    Strategy,
)

PERIOD = 10
STRATEGIES: dict[str, Strategy] = {
    "ddp": DDP(),
    "dear": DeAR(),
    "local-sgd": LocalSGD(PERIOD),
    "dreamddp": DreamDDP(PERIOD),
    "dreamddp-delayed-int4": DreamDDP(PERIOD, due="delayed", wire="int4"),
    "diloco": DiLoCo(PERIOD),
    "selsync": SelSync(0.3),
    "fedavg": FedAvg(local_steps=PERIOD),
    "ssp": SSP(),
    "a2cid2": A2CiD2(),
}
RANKED = ("ddp", "dear", "local-sgd", "dreamddp", "dreamddp-delayed-int4", "diloco", "selsync")
EXAMPLES = Path(__file__).parent.parent / "examples"
SCRIPTS = {
    "gpt": (str(EXAMPLES / "gpt.py"), "--layers", "2", "--width", "64"),
    "digits": (str(EXAMPLES / "digits.py"),),
}
HOSTS = 4
LEAST_AGREEMENT = 0.9  # of the pairs of a model


# ---- speed ----------------------------------------------------------------------------------


def batches(rank: int, *, ranks: int) -> Any:
    """Batches of one rank, for ever."""
    return GPT.batches(0, ranks, rank)


def gpt_loss(model: Any, batch: Batch) -> Any:
    return GPT.loss(model, batch)


def rehearsed_speed(options: argparse.Namespace) -> dict[str, Any]:
    """Seconds of a rehearsal of all strategies, and their curves."""
    here = Profile.from_dict(measured(GPT))
    profile = on_networks(here, options.replicas, [Network("net", 1e6 * options.rate)])
    began_s = time.perf_counter()
    curves = offbeat.rehearse(
        GPT.model,
        GPT.optimizer,
        partial(batches, ranks=options.replicas),
        list(STRATEGIES.values()),
        profile,
        iterations=options.iterations,
        loss=gpt_loss,
        jitter=0.1,
        processes=options.processes,
        progress=_print_progress,
    )
    minutes = (time.perf_counter() - began_s) / 60
    print(f"\n{len(curves)} strategies, {options.replicas} replicas: {minutes:.1f} minutes")
    rows = {}
    for name, curve in curves.items():
        rows[name] = {"iteration_s": curve.iteration_s, "loss": curve.losses[-1]}
        print(curve)
    return {"minutes": minutes, "strategies": rows}


def _print_progress(strategy: str, iterations: int) -> None:
    if iterations % 100 == 0:
        print(f"{strategy}: {iterations} iterations", flush=True)


# ---- ranking --------------------------------------------------------------------------------


def ranking(model: str, options: argparse.Namespace) -> dict[str, Any]:
    """Seconds to a loss of each strategy, measured and rehearsed, and the share of pairs that
    agree."""
    script = (*SCRIPTS[model], "--steps", str(options.steps))
    seeds = tuple(int(seed) for seed in options.seeds.split(","))
    contestants = tuple(Contestant(name, STRATEGIES[name]) for name in RANKED)
    cluster = Cluster.from_toml(f'hosts = {HOSTS}\nrate = "{options.rate}mbit"\n')
    with tempfile.TemporaryDirectory() as folder:
        keep = options.keep or Path(folder)
        run_dir = keep / f"{model}-measured"
        outcome = compare(
            Comparison(
                Setup(script, cluster, pace="auto"), contestants, len(seeds), given_seeds=seeds
            ),
            run_dir,
        )
        if outcome.failures:
            sys.exit("; ".join(outcome.failures))
        run = load(run_dir)
        target = target_loss(run)
        if target is None:
            sys.exit(f"{model}: no loss is a target; train longer with --steps")
        rehearsal = ScriptRehearsal(
            script,
            contestants,
            Profile.load(run_dir / "profile.json"),
            seeds=seeds,
            target_loss=target,
        )
        rehearsed_dir = keep / f"{model}-rehearsed"
        found = rehearse_script(rehearsal, rehearsed_dir)
        if found.failures:
            sys.exit("; ".join(found.failures))
        real = {row.label: row.target_s for row in summarize(run)}
        again = {row.label: row.target_s for row in summarize(load(rehearsed_dir))}
    agreed = compared = 0
    for one, other in combinations(RANKED, 2):
        pairs = [(times[one], times[other]) for times in (real, again)]
        if all(None not in pair for pair in pairs):
            compared += 1
            agreed += len({a < b for a, b in pairs}) == 1  # type: ignore[operator]
    print(f"\n### {model}: seconds to loss {target:.4g}, measured and rehearsed")
    for name in RANKED:
        print(f"{name:24s} {_text(real[name])} {_text(again[name])}")
    print(f"{agreed} of {compared} pairs agree (goal: {LEAST_AGREEMENT:.0%})")
    errors = [abs(again[n] / real[n] - 1) for n in RANKED if real[n] and again[n]]  # type: ignore[operator]
    return {
        "target": target,
        "measured_s": real,
        "rehearsed_s": again,
        "agreed": agreed,
        "compared": compared,
        "median_error": median(errors) if errors else None,
    }


def _text(seconds: float | None) -> str:
    return "   never" if seconds is None else f"{seconds:8.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=("speed", "ranking"))
    parser.add_argument("--replicas", type=int, default=32)
    parser.add_argument("--iterations", type=int, default=500)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--models", default="gpt,digits")
    parser.add_argument("--rate", type=float, default=None, help="Mbit/s")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--keep", type=Path, default=None)
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    if options.part == "speed":
        options.rate = options.rate or 100.0
        result = rehearsed_speed(options)
    else:
        options.rate = options.rate or 25.0
        result = {model: ranking(model, options) for model in options.models.split(",")}
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
