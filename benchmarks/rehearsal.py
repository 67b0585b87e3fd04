"""Rehearsals: time of 32 replicas under eight strategies, and ranking beside measured runs.

    python benchmarks/rehearsal.py speed [--replicas 32] [--iterations 500]
                                         [--strategies NAMES] [--rate 100] [--json FILE]
    python benchmarks/rehearsal.py ranking [--models gpt,digits] [--rate 25] [--steps 200]
                                           [--seeds 0,1,2] [--keep FOLDER] [--minutes M]
                                           [--json FILE]
    python benchmarks/rehearsal.py tables [--speed FILE] [--ranking FILE]

`speed`: the small GPT of `tasks.py`, one strategy after the other: seconds of each rehearsal,
simulated seconds per iteration, and the loss at the end. The profile is measured here, on one core;
messages are estimated from the rate. A run of fewer than 500 iterations also states the time of 500
iterations, computed from the seconds of its later iterations.

`ranking`: seconds to a loss of seven strategies on 4 emulated hosts, measured by `offbeat compare`
and rehearsed from the profile of that run, with the same seeds. A pair of strategies agrees if the
same one is sooner. Needs the lab and a quiet machine. `--minutes` ends the command after this time;
the same command with the same `--keep` continues it, and keeps complete launches and curves.

Both commands write their results to rehearsal-speed.json and rehearsal-ranking.json, or to
`--json`.
`tables` writes results/rehearsal.json from the files that exist, and makes the tables of the pages.
"""

from __future__ import annotations

import argparse
import json
import math
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from functools import partial
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import Any

import tables
import torch
from targets import measured
from tasks import GPT, Batch

import offbeat
from offbeat.experiments.compare import compare
from offbeat.experiments.comparison import Comparison, Contestant, Setup
from offbeat.experiments.elsewhere import described_link, on_links
from offbeat.experiments.record.run_directory import load
from offbeat.experiments.report.losses import target_loss
from offbeat.experiments.report.summary import summarize
from offbeat.lab import Cluster
from offbeat.profile import Profile
from offbeat.rehearsal.command import rehearse_script
from offbeat.strategies import (
    DDP,
    DeAR,
    DiLoCo,
    DreamDDP,
    FedAvg,
    LocalSGD,
    SelSync,
    Strategy,
)

PERIOD = 10
ITERATIONS = 500  # of the target
STRATEGIES: dict[str, Strategy] = {
    "ddp": DDP(),
    "dear": DeAR(),
    "local-sgd": LocalSGD(PERIOD),
    "dreamddp": DreamDDP(PERIOD),
    "dreamddp-delayed-int4": DreamDDP(PERIOD, due="delayed", wire="int4"),
    "diloco": DiLoCo(PERIOD),
    "selsync": SelSync(0.3),
    "fedavg": FedAvg(local_steps=PERIOD),
}
RANKED = ("ddp", "dear", "local-sgd", "dreamddp", "dreamddp-delayed-int4", "diloco", "selsync")
EXAMPLES = Path(__file__).parent.parent / "examples"
SCRIPTS = {
    "gpt": (str(EXAMPLES / "gpt.py"), "--layers", "2", "--width", "64"),
    "digits": (str(EXAMPLES / "digits.py"),),
}
HOSTS = 4
LEAST_AGREEMENT = 0.9  # of the pairs of a model
PARTS = ("speed", "ranking")


# ---- speed ----------------------------------------------------------------------------------


def batches(rank: int, *, ranks: int) -> Any:
    """Batches of one rank, for ever."""
    return GPT.batches(0, ranks, rank)


def gpt_loss(model: Any, batch: Batch) -> Any:
    return GPT.loss(model, batch)


def rehearsed_speed(options: argparse.Namespace) -> dict[str, Any]:
    """Seconds of the rehearsal of each strategy, and their curves."""
    here = Profile.from_dict(measured(GPT))
    torch.distributed.destroy_process_group()  # otherwise this process cannot be forked
    profile = on_links(
        here, options.replicas, [described_link("net", options.replicas, 1e6 * options.rate)]
    )
    names = options.strategies.split(",")
    began_s = time.perf_counter()
    rows = {name: timed_rehearsal(name, profile, options.iterations) for name in names}
    minutes = (time.perf_counter() - began_s) / 60
    print(f"\n{'strategy':24s} seconds  s per iteration: rehearsal  simulated    loss")
    for name, row in rows.items():
        print(
            f"{name:24s} {row['seconds']:7.1f} {row['later_iteration_s']:26.3f} "
            f"{row['simulated_iteration_s']:10.3f} {row['loss']:7.3f}"
        )
    print(
        f"{len(rows)} strategies, {options.replicas} replicas, {options.iterations} iterations: "
        f"{minutes:.1f} minutes (measured)"
    )
    result = {
        "replicas": options.replicas,
        "iterations": options.iterations,
        "minutes": minutes,
        "strategies": rows,
    }
    if options.iterations < ITERATIONS:
        more = ITERATIONS - options.iterations
        each_s = [row["seconds"] + more * row["later_iteration_s"] for row in rows.values()]
        computed = sum(each_s) / 60
        print(f"{ITERATIONS} iterations: {computed:.1f} minutes (computed, not measured)")
        result["computed_minutes"] = {str(ITERATIONS): computed}
    return result


def timed_rehearsal(name: str, profile: Profile, iterations: int) -> dict[str, Any]:
    """Seconds of one rehearsal, and the end of its curve."""
    ends_s: list[float] = []
    began_s = time.perf_counter()
    [curve] = offbeat.rehearse(
        GPT.model,
        GPT.optimizer,
        partial(batches, ranks=profile.world_size),
        STRATEGIES[name],
        profile,
        iterations=iterations,
        loss=gpt_loss,
        jitter=0.1,
        progress=lambda *_: ends_s.append(time.perf_counter()),
    ).values()
    seconds = time.perf_counter() - began_s
    half = len(ends_s) // 2  # the first iterations are slower
    print(f"{name}: {seconds:.1f} s", flush=True)
    return {
        "seconds": seconds,
        "later_iteration_s": (ends_s[-1] - ends_s[half - 1]) / (len(ends_s) - half),
        "simulated_iteration_s": curve.iteration_s,
        "loss": curve.losses[-1],
    }


# ---- ranking --------------------------------------------------------------------------------


def ranking(model: str, options: argparse.Namespace) -> dict[str, Any] | None:
    """Seconds to a loss of each strategy, measured and rehearsed, and the share of pairs that
    agree. None if the time was too short; complete launches and curves are kept.

    Raises:
        SystemExit: a launch or a rehearsal has failed, or no loss is a target.
    """
    script = (*SCRIPTS[model], "--steps", str(options.steps))
    seeds = tuple(int(seed) for seed in options.seeds.split(","))
    contestants = tuple(Contestant(name, STRATEGIES[name]) for name in RANKED)
    cluster = Cluster.from_toml(f'hosts = {HOSTS}\nrate = "{options.rate:g}mbit"\n')
    run_dir, rehearsed_dir = (
        options.keep / f"{model}-{what}" for what in ("measured", "rehearsed")
    )
    outcome = compare(
        Comparison(
            Setup(script, cluster, pace="auto"),
            contestants,
            len(seeds),
            repeat_disturbed=True,
            given_seeds=seeds,
        ),
        run_dir,
        resume=(run_dir / "run.json").exists(),
    )
    if outcome.failures:
        sys.exit("; ".join(outcome.failures))
    if outcome.interrupted:
        return None
    run = load(run_dir)
    target = target_loss(run)
    if target is None:
        sys.exit(f"{model}: no loss is a target; train longer with --steps")
    found = rehearse_script(
        script,
        contestants,
        Profile.load(run_dir / "profile.json"),
        rehearsed_dir,
        seeds=seeds,
        target_loss=target,
        resume=(rehearsed_dir / "run.json").exists(),
    )
    if found.failures:
        sys.exit("; ".join(found.failures))
    if found.interrupted:
        return None
    real = {row.label: row.target_s for row in summarize(run)}
    again = {row.label: row.target_s for row in summarize(load(rehearsed_dir))}
    agreed, compared = agreement(real, again)
    print(f"\n### {model}: seconds to loss {target:.4g}, measured and rehearsed")
    for name in RANKED:
        print(f"{name:24s} {_text(real[name])} {_text(again[name])}")
    print(f"{agreed} of {compared} pairs agree (goal: {LEAST_AGREEMENT:.0%})")
    errors = [abs(again[n] / real[n] - 1) for n in RANKED if real[n] and again[n]]  # type: ignore[operator]
    return {
        "rate_mbps": options.rate,
        "iterations": options.steps,
        "seeds": len(seeds),
        "target": target,
        "measured_s": real,
        "rehearsed_s": again,
        "agreed": agreed,
        "compared": compared,
        "median_error": median(errors) if errors else None,
    }


def agreement(
    real: Mapping[str, float | None], again: Mapping[str, float | None]
) -> tuple[int, int]:
    """Pairs of which the same one is sooner in both, and all pairs of which one is sooner in both.

    A strategy without a time never reaches the loss. It is later than all that reach it.
    """
    agreed = compared = 0
    for one, other in combinations(real, 2):
        first = []
        for times in (real, again):
            a, b = (math.inf if times[name] is None else times[name] for name in (one, other))
            first.append(None if a == b else a < b)  # type: ignore[operator]
        if None not in first:
            compared += 1
            agreed += first[0] == first[1]
    return agreed, compared


def _text(seconds: float | None) -> str:
    return "   never" if seconds is None else f"{seconds:8.2f}"


def _interrupt(*_: object) -> None:
    """End a comparison or a rehearsal as Ctrl-C does. Complete launches and curves are kept."""
    raise KeyboardInterrupt


def rank_models(options: argparse.Namespace) -> dict[str, Any]:
    """The ranking of each model, up to the first one for which the time was too short."""
    result: dict[str, Any] = {}
    if options.minutes is not None:
        signal.signal(signal.SIGALRM, _interrupt)
        signal.setitimer(signal.ITIMER_REAL, 60 * options.minutes)
    try:
        for model in options.models.split(","):
            found = ranking(model, options)
            if found is None:
                raise KeyboardInterrupt
            result[model] = found
    except KeyboardInterrupt:
        missing = [model for model in options.models.split(",") if model not in result]
        print(f"not complete: {', '.join(missing)}; repeat the command with --keep {options.keep}")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    return result


# ---- tables ---------------------------------------------------------------------------------


def result(speed: Mapping[str, Any], rankings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the result.

    Args:
        speed: what `speed` has found; empty if it was not measured.
        rankings: what `ranking` has found, by model; empty if it was not measured.
    """
    found = [*speed_tables(speed), *ranking_tables(rankings)]
    misses = [
        f"{model}: {one['agreed']} of {one['compared']} pairs agree (goal {LEAST_AGREEMENT:.0%})"
        for model, one in rankings.items()
        if one["agreed"] < LEAST_AGREEMENT * one["compared"]
    ]
    return {
        "title": "Rehearsals: seconds, and ranking beside measured runs",
        "what": "All replicas train on this machine, as the forked ranks of a job. "
        f"The ranking is by seconds to a loss on {HOSTS} emulated hosts, whose profile the "
        "rehearsal has, with the same seeds.",
        "how": ["measured", "emulated", "simulated"],
        "date": datetime.now(UTC).date().isoformat(),
        "machine": tables.machine(),
        "command": "python benchmarks/rehearsal.py speed; python benchmarks/rehearsal.py ranking; "
        "python benchmarks/rehearsal.py tables",
        "tables": found,
        "misses": misses,
        "notes": [],
    }


def speed_tables(speed: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the table of `speed`; nothing if it was not measured."""
    if not speed:
        return
    title = (
        f"{speed['replicas']} replicas of the small GPT, {speed['iterations']} iterations: "
        f"{speed['minutes']:.1f} minutes"
    )
    for iterations, minutes in speed.get("computed_minutes", {}).items():
        title += f"; {minutes:.1f} minutes for {iterations} iterations, computed"
    places = {"seconds": 1, "later_iteration_s": 3, "simulated_iteration_s": 4, "loss": 3}
    yield {
        "name": "speed",
        "title": title,
        "how": ["measured", "simulated"],
        "columns": [
            *("strategy", "s of the rehearsal", "s per iteration of it"),
            *("simulated s per iteration of the job", "training loss"),
        ],
        "rows": [
            [name, *(round(row[key], digits) for key, digits in places.items())]
            for name, row in speed["strategies"].items()
        ],
    }


def ranking_tables(rankings: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the agreement of each model, and the seconds of its strategies."""
    if not rankings:
        return
    yield {
        "name": "agreement",
        "title": "Pairs of strategies of which the same one is sooner, measured and rehearsed",
        "how": ["emulated", "simulated"],
        "columns": [
            *("model", "Mbit/s", "iterations", "seeds", "training loss"),
            *("pairs that agree", "pairs", "median error, %"),
        ],
        "rows": [
            [
                model,
                one["rate_mbps"],
                one["iterations"],
                one["seeds"],
                round(one["target"], 3),
                one["agreed"],
                one["compared"],
                one["median_error"] and round(100 * one["median_error"], 1),
            ]
            for model, one in rankings.items()
        ],
    }
    yield {
        "name": "ranking",
        "title": "Seconds to the loss, measured and rehearsed",
        "how": ["emulated", "simulated"],
        "columns": ["model", "strategy", "measured, s", "rehearsed, s"],
        "rows": [
            [model, name, *(_cell(one[what][name]) for what in ("measured_s", "rehearsed_s"))]
            for model, one in rankings.items()
            for name in one["measured_s"]
        ],
    }


def _cell(seconds: float | None) -> float | str:
    return "never" if seconds is None else round(seconds, 2)


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.exists() else {}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=(*PARTS, "tables"))
    parser.add_argument("--replicas", type=int, default=32)
    parser.add_argument("--iterations", type=int, default=ITERATIONS)
    parser.add_argument("--strategies", default=",".join(STRATEGIES))
    parser.add_argument("--models", default="gpt,digits")
    parser.add_argument("--rate", type=float, default=None, help="Mbit/s")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--keep", type=Path, default=Path("runs", "ranking"))
    parser.add_argument("--minutes", type=float, default=None)
    parser.add_argument("--json", type=Path, default=None)
    for part in PARTS:
        parser.add_argument(f"--{part}", type=Path, default=Path(f"rehearsal-{part}.json"))
    options = parser.parse_args()
    if options.part == "tables":
        speed, rankings = _read(options.speed), _read(options.ranking)
        if not (speed or rankings):
            sys.exit(f"{options.speed} and {options.ranking} do not exist; measure a part first")
        tables.save("rehearsal", result(speed, rankings))
        tables.main([])
        return
    if options.part == "speed":
        options.rate = options.rate or 100.0
        found = rehearsed_speed(options)
    else:
        options.rate = options.rate or 25.0
        found = rank_models(options)
    path = options.json or getattr(options, options.part)
    path.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
