"""Nodes of several ranks: bytes, predictions, seconds to DDP's loss, cost of a step.

    python benchmarks/nodes.py bytes                    kernel counters against the computed bytes
    python benchmarks/nodes.py predictions [--minutes 60]
    python benchmarks/nodes.py race [--minutes 60] [--seeds 3]
    python benchmarks/nodes.py zero3 [--minutes 60] [--seeds 3]
    python benchmarks/nodes.py overhead [--minutes 10]
    python benchmarks/nodes.py tables                   writes results/nodes.json from what there is

`bytes`: bytes of a host by the counters of its interfaces, on the thin link and on the loopback,
for 2 and 3 hosts of 1 to 3 ranks. `predictions`: `offbeat compare` on 2 hosts of 2 ranks at 25, 100
and 200 Mbit/s, a GPT and the digits network, replicated and sharded, on hosts with a pace of their
own. `race`: a GPT on 2 hosts of 2 ranks at 100 Mbit/s; losses, messages and compute are real, ranks
share the processors. Loss: mean over ranks and the last 20 iterations; the aim is DDP's after 150
iterations. HSDP is predicted by the equations of advice. `zero3`: the same GPT under ZeRO-3 and
HSDP on 2 and 4 hosts of one rank at 25 and 100 Mbit/s, beside the equations of advice. `overhead`:
one host of 2 ranks, without averages between nodes, beside plain FSDP2 and DDP in turns.

The package torchft races with its own local SGD if it is installed (`pip install torchft`).
DeToNATION does not: its `prepare_detonation` needs CUDA, as FSDP1 refuses a model on the CPU.

Everything is kept in --out, and a second start goes on from there; after --minutes no further
launch begins. All but `bytes` need a quiet machine. Needs the lab.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import tables

from offbeat import sim
from offbeat.core.strategy.parsing import parse
from offbeat.experiments.advice.methods import full_shards, hybrid_shards
from offbeat.experiments.advice.place import place_of
from offbeat.experiments.advice.sharded import hsdp
from offbeat.lab import Cluster, Lab, launch
from offbeat.profile import Profile
from offbeat.strategies import DDP

HERE = Path(__file__).parent
WORKER = HERE / "nodes_worker.py"
RESULT = "nodes"
INSIDE = "10gbit"
SHAPES = ((2, 1), (2, 2), (2, 3), (3, 2))  # hosts, ranks of each
PERIOD = 10
COUNTED = {
    "ddp": 4,
    "hsdp": 4,
    "flat wfbp": 4,
    "replicated wfbp": 4,
    "replicated local-sgd:period=4": 4,
    "sharded wfbp": 4,
    "sharded local-sgd:period=4": 4,
}
RACED = (
    "ddp",
    "hsdp",
    f"flat dreamddp:period={PERIOD}",
    f"replicated dreamddp:period={PERIOD}",
    f"replicated dreamddp:period={PERIOD}:wire=int4",
    "sharded wfbp",
    f"sharded dreamddp:period={PERIOD}",
    f"sharded dreamddp:period={PERIOD}:wire=int4",
)
TORCHFT = f"torchft local-sgd:period={PERIOD}"  # races where the package is installed
RATE, RATES, MODELS = 100, (25, 100, 200), ("gpt", "digits")
AIM, LENGTH, MEAN = 150, 240, 20  # iterations: of DDP until the aim, of each, of a mean loss
DIVIDED = ("ddp", "hsdp", "zero-3")  # on hosts of one rank
DIVIDED_HOSTS, DIVIDED_RATES, DIVIDED_LENGTH = (2, 4), (25, 100), 40
PREDICTED = {
    "replicated": ("ddp", "wfbp", "local-sgd:period=5", "dreamddp:period=5"),
    "sharded": ("wfbp", "local-sgd:period=5", "dreamddp:period=5", "dreamddp:period=5:wire=int4"),
}
PAIRS = (
    ("fsdp", "sharded local-sgd:period=100000"),
    ("ddp", "replicated local-sgd:period=100000"),
)
ROUNDS, STEPS = 15, 20
LIMITS = {"bytes": 3.0, "predictions": 3.0, "overhead": 1.02}  # %, %, ratio


class Keep:
    """Results of launches in a file, by name; a launch that is there is not repeated."""

    def __init__(self, path: Path, minutes: float) -> None:
        self.path, self.until_s = path, time.monotonic() + 60 * minutes

    def run(self, key: str, launch_one: Callable[..., Any], *args: Any) -> None:
        """Keep what a function returns, unless it is known, or the time is over."""
        known = json.loads(self.path.read_text()) if self.path.exists() else {}
        if key in known or time.monotonic() > self.until_s:
            return
        print(f"{self.path.stem}: {key}", flush=True)
        known[key] = launch_one(*args)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(known))


# ---- launches -------------------------------------------------------------------------------


def launched(cluster: Cluster, job: Mapping[str, Any]) -> dict[str, Any]:
    """Launch `nodes_worker.py` and return its result; exit if a rank fails."""
    with tempfile.TemporaryDirectory() as folder, Lab(cluster, "nodes") as lab:
        path = Path(folder, "job.json")
        path.write_text(json.dumps({**job, "folder": folder}))
        argv = [sys.executable, str(WORKER), str(path)]
        result = launch(lab, argv, log_dir=Path(folder, "logs"), timeout_s=1800)
        if result.problem:
            sys.exit(result.problem)
        return json.loads(Path(folder, "found.json").read_text())


def cluster_of(hosts: int, ranks: int, rate: int) -> Cluster:
    return Cluster.simple(hosts, f"{rate}mbit", ranks=ranks, inside=INSIDE)


# ---- bytes ----------------------------------------------------------------------------------


def compute_bytes(label: str, hosts: int, ranks: int, size: float) -> tuple[float, float]:
    """Bytes of a host per iteration, between hosts and inside.

    A ring of n ranks sends `2 (n - 1) / n` of a message per rank. A ring of all ranks passes each
    link between hosts once. Between nodes each rank sends its own part of a message. FSDP gathers
    parameters twice, and scatters gradients once, which sends as much as an all-reduce with gloo.
    """
    kind, _, text = label.partition(" ")
    all_ranks = hosts * ranks
    share = 1 / parse(text).plan(_profile()).period if text else 1.0
    if kind in ("ddp", "flat"):
        passes = 2 * (all_ranks - 1) / all_ranks * size * share
        return passes, (ranks - 1) * passes
    between = 2 * (hosts - 1) / hosts * size * share
    if kind != "replicated":
        return between, 4 * (ranks - 1) * size
    averages = share + (0.0 if share == 1.0 else 1.0)  # of parameters, and gradients inside
    return between, 2 * (ranks - 1) * size * averages


def _profile() -> Profile:
    from offbeat.profile import Bucket, Link

    return Profile((Bucket("b", 1.0, 1.0, 1 << 20),), (Link("net", 0.0, 1e6),), 2)


def count(keep: Keep) -> None:
    for hosts, ranks in SHAPES:
        chosen = {label: n for label, n in COUNTED.items() if ranks > 1 or label == "ddp"}
        if ranks == 1:
            chosen |= {"flat wfbp": 4, "flat local-sgd:period=4": 4}
        job = {"what": "bytes", "contestants": chosen}
        keep.run(f"{hosts}x{ranks}", launched, cluster_of(hosts, ranks, 400), job)


def byte_rows(found: Mapping[str, Any]) -> Iterator[list[Any]]:
    for shape, contestants in found.items():
        hosts, ranks = map(int, shape.split("x"))
        for label, row in contestants.items():
            between, inside = compute_bytes(label, hosts, ranks, row["model"])
            off = 100 * (row["between"] / between - 1)
            yield [
                *(label, hosts, ranks),
                *(round(x / row["model"], 3) for x in (between, row["between"])),
                round(off, 1),
                round(inside / row["model"], 3),
                round(row["inside"] / row["model"], 3),
            ]


# ---- predictions ----------------------------------------------------------------------------


def measure_errors(model: str, rate: int, kind: str) -> dict[str, Any]:
    """By contestant: measured and predicted seconds per iteration."""
    from offbeat.experiments.compare import compare
    from offbeat.experiments.comparison import Comparison, Contestant, Setup
    from offbeat.experiments.report import load, summarize

    script = (str(WORKER), "--model", model, *["--sharded"] * (kind == "sharded"))
    chosen = tuple(Contestant(text.replace(":", "-"), parse(text)) for text in PREDICTED[kind])
    setup = Setup(script, cluster_of(2, 2, rate), pace="auto")
    with tempfile.TemporaryDirectory() as folder:
        outcome = compare(Comparison(setup, chosen, 3, repeat_disturbed=True), Path(folder, "run"))
        if outcome.failures:
            sys.exit("; ".join(outcome.failures))
        return {
            row.label: {
                "measured_s": row.iteration_s,
                "predicted_s": row.predicted_s,
                "disturbed": len(row.disturbed),
            }
            for row in summarize(load(Path(folder, "run")))
        }


def predict(keep: Keep) -> None:
    for rate in RATES:
        for model in MODELS:
            for kind in PREDICTED:
                key = f"{model}, {rate} Mbit/s, {kind}"
                keep.run(key, measure_errors, model, rate, kind)


def prediction_rows(found: Mapping[str, Any]) -> Iterator[list[Any]]:
    for key, rows in found.items():
        model, rate, kind = key.split(", ")
        for label, row in rows.items():
            off = 100 * (row["predicted_s"] / row["measured_s"] - 1)
            ms = [round(1e3 * row[name], 1) for name in ("measured_s", "predicted_s")]
            remark = "disturbed" if row["disturbed"] else None
            yield [label, model, kind, int(rate.split()[0]), *ms, round(off, 1), remark]


# ---- the race -------------------------------------------------------------------------------


def race(keep: Keep, seeds: int) -> None:
    for seed in range(seeds):
        raced = (*RACED, TORCHFT) if find_spec("torchft") else RACED
        turns = raced[:: -1 if seed % 2 else 1]
        job = {
            "what": "race",
            "task": "gpt",
            "seed": seed,
            "contestants": dict.fromkeys(turns, LENGTH),
        }
        keep.run(f"seed {seed}", launched, cluster_of(2, 2, RATE), job)


def smooth(losses: list[float]) -> list[float]:
    """Mean of the last losses at each iteration."""
    return [sum(losses[max(0, i - MEAN) : i]) / min(i, MEAN) for i in range(1, len(losses) + 1)]


def find_seconds(row: Mapping[str, Any], aim: float) -> float | None:
    """Seconds from the end of the first iteration until the loss is at the aim; None: never."""
    ends = zip(row["ends_s"], smooth(row["losses"]), strict=True)
    return next((end for end, loss in ends if loss <= aim), None)


def predict_seconds(label: str, profiles: Mapping[str, Any]) -> float:
    kind, _, text = label.partition(" ")
    replicated = Profile.from_dict(profiles["replicated"])
    if label == "hsdp":
        # Compute with FSDP's waits, and updates of shards, are measured.
        return hsdp(Profile.from_dict(profiles["sharded"]).of_replicas(), 1).iteration_s
    if label == "ddp":
        return sim.predict(DDP(), replicated).iteration_s
    kind = "sharded" if label == TORCHFT else kind
    return sim.predict(parse(text), Profile.from_dict(profiles[kind])).iteration_s


def race_rows(found: Mapping[str, Any]) -> Iterator[list[Any]]:
    aims = [smooth(run["ddp"]["losses"])[AIM - 1] for run in found.values()]
    base = [find_seconds(run["ddp"], aim) for run, aim in zip(found.values(), aims, strict=True)]
    for label in [*RACED, TORCHFT]:
        if not all(label in run for run in found.values()):
            continue
        runs = [run[label] for run in found.values()]
        times = [find_seconds(row, aim) for row, aim in zip(runs, aims, strict=True)]
        known = [t for t in times if t is not None]
        gains = [b / t for b, t in zip(base, times, strict=True) if b is not None and t is not None]
        seconds = [1e3 * row["iteration_s"] for row in runs]
        guessed = [1e3 * predict_seconds(label, run["profiles"]) for run in found.values()]
        yield [
            label,
            spread(known, 1) if len(known) == len(times) else "never",
            spread(gains, 2) if len(known) == len(times) else None,
            spread(seconds, 1),
            round(median(guessed), 1),
            round(median(row["between"] for row in runs) / 1e3, 1),
            spread([smooth(row["losses"])[-1] for row in runs], 3),
        ]


# ---- ZeRO-3 ---------------------------------------------------------------------------------


def divide(keep: Keep, seeds: int) -> None:
    for seed in range(seeds):
        for hosts in DIVIDED_HOSTS:
            for rate in DIVIDED_RATES:
                job = {
                    "what": "race",
                    "task": "gpt",
                    "seed": seed,
                    "contestants": dict.fromkeys(DIVIDED, DIVIDED_LENGTH),
                    "profiles": ["flat", "sharded"],
                }
                key = f"{hosts} hosts, {rate} Mbit/s, seed {seed}"
                keep.run(key, launched, cluster_of(hosts, 1, rate), job)


def divided_rows(found: Mapping[str, Any]) -> Iterator[list[Any]]:
    """Yield the rows of `zero3`, each of all seeds of a method, a number of hosts and a rate."""
    for case in dict.fromkeys(key.rpartition(", ")[0] for key in found):
        runs = [run for key, run in found.items() if key.rpartition(", ")[0] == case]
        hosts, rate = (int(part.split()[0]) for part in case.split(", "))
        for label in DIVIDED:
            kind = "flat" if label == "ddp" else "sharded"
            profiles = [Profile.from_dict(run["profiles"][kind]).of_replicas() for run in runs]
            measured = spread([1e3 * run[label]["iteration_s"] for run in runs], 1)
            if label == "ddp":
                ms = median(1e3 * sim.predict(DDP(), one).iteration_s for one in profiles)
            else:
                made = full_shards if label == "zero-3" else hybrid_shards
                methods = (made(place_of(one, None, None)) for one in profiles)
                ms = median(1e3 * one.iteration_s for one in methods)
            passes = 2 if label == "zero-3" else 1
            sent = median(run[label]["between"] for run in runs)
            size = profiles[0].payload_bytes("grad", range(len(profiles[0].buckets)))
            yield [
                *(label, hosts, rate, measured, round(ms, 1)),
                round(100 * (ms / measured[0] - 1), 1),
                round(passes * 2 * (hosts - 1) / hosts, 3),
                round(sent / size, 3),
            ]


def spread(values: list[float], digits: int) -> list[float]:
    return [round(x, digits) for x in (median(values), min(values), max(values))]


# ---- overhead -------------------------------------------------------------------------------


def overhead(keep: Keep) -> None:
    for task in MODELS:
        job = {"what": "overhead", "task": task, "pairs": PAIRS, "rounds": ROUNDS, "steps": STEPS}
        keep.run(task, launched, Cluster.simple(1, "1gbit", ranks=2), job)


def overhead_rows(found: Mapping[str, Any]) -> Iterator[list[Any]]:
    for task, pairs in found.items():
        for plain, ours in PAIRS:
            seconds = pairs[ours]
            ratios = [a / b for a, b in zip(seconds[ours], seconds[plain], strict=True)]
            ms = (round(1e3 * median(seconds[label]), 2) for label in (plain, ours))
            yield [task, plain, ours.partition(" ")[0], *ms, spread(ratios, 3)]


NOTES = (
    "The package torchft races with its local SGD over shards. DeToNATION (detonation 0.5 on PyPI) does not race, because it needs FSDP1, which refuses models on CPUs.",  # noqa: E501
    "Predictions beyond 3 % have two causes. Messages of torch's DDP between hosts alternate between two durations, which no prediction contains, and at 200 Mbit/s they pass faster than the measured rate, probably in the burst of the shaper. Of replicated nodes with large messages at 25 Mbit/s the first messages of a connection take longer, until TCP has found the rate, because two ranks overflow the queue of their host; a profile takes its rate from the fastest of them.",  # noqa: E501
    "Cost of a step: no processor is idle, and the ranks of replicated nodes send their gradients in one message. A rank needs about as much processor time per iteration as one of DDP; the threads of gloo take the rest.",  # noqa: E501
    "Race: FSDP's messages of HSDP block backward on CPUs, so its prediction hides none. Predictions of replicated nodes contain the wait for the slower rank of each node as if its ranks had independent times, although four ranks share two processors; without the wait they are from 24 % too short to 15 % too long, because the compute times of the profile vary as much between the seeds.",  # noqa: E501
)


def notes(parts: Mapping[str, list[list[Any]]]) -> Iterator[str]:
    """Yield the remarks, and the errors of the predictions in the race."""
    yield from NOTES
    if "zero3" in parts:
        yield (
            "Sharded methods on hosts of one rank: on CPUs FSDP hides no messages, and gloo's "
            "reduce-scatter sends a whole all-reduce, as predicted. Compute is that of FSDP on one "
            "rank."
        )
    errors = [
        100 * (row[4] / row[3][0] - 1)
        for row in parts.get("race", ())
        if row[0].startswith(("flat", "replicated", "sharded"))
    ]
    if errors:
        yield (
            f"Race: predictions of offbeat's contestants are between {min(errors):+.0f} and "
            f"{max(errors):+.0f} % off."
        )


# ---- result ---------------------------------------------------------------------------------

COLUMNS: dict[str, tuple[str, str, list[str]]] = {
    "bytes": (
        "Bytes of a host per iteration, in models: computed, and by the kernel's counters",
        "measured",
        [
            *("contestant", "hosts", "ranks of each", "between, computed", "between, counted"),
            *("difference, %", "inside, computed", "inside, counted"),
        ],
    ),
    "predictions": (
        "Predictions on 2 hosts of 2 ranks, ms per iteration; hosts compute at an emulated pace",
        "emulated",
        [
            *("strategy", "model", "nodes", "Mbit/s", "measured", "predicted", "error, %"),
            "remark",
        ],
    ),
    "race": (
        f"GPT on 2 hosts of 2 ranks at {RATE} Mbit/s: seconds to DDP's loss after {AIM} iterations",
        "measured",
        [
            *("contestant", "s to DDP's loss", "gain over DDP", "ms per iteration"),
            *("predicted ms", "KB of a host per iteration", "last loss"),
        ],
    ),
    "zero3": (
        "Sharded methods of torch on hosts of one rank, ms per iteration, and bytes of a host",
        "measured",
        [
            *("method", "hosts", "Mbit/s", "measured", "predicted", "error, %"),
            *("models sent, computed", "models sent, counted"),
        ],
    ),
    "overhead": (
        "A step inside a node without averages between nodes, ms, in turns with torch's own",
        "measured",
        ["model", "torch", "nodes", "torch, ms", "offbeat, ms", "ratio"],
    ),
}
ROWS = {
    "bytes": byte_rows,
    "predictions": prediction_rows,
    "race": race_rows,
    "zero3": divided_rows,
    "overhead": overhead_rows,
}


def misses(parts: Mapping[str, list[list[Any]]]) -> Iterator[str]:
    """Yield the rows that are beyond a limit."""
    limited = (("bytes", 5, "{}, {} hosts of {}"), ("predictions", 6, "{}, {}, {}, {} Mbit/s"))
    for name, column, label in limited:
        for row in parts.get(name, ()):
            if abs(row[column]) > LIMITS[name]:
                yield f"{name}: {label.format(*row)}: {row[column]:+} %"
    for row in parts.get("overhead", ()):
        if row[5][0] > LIMITS["overhead"]:
            yield f"overhead: {row[0]}, {row[2]}: {row[5][0]}"


def result(out: Path) -> dict[str, Any]:
    """Return the result of everything in a folder."""
    paths = {name: out / f"{name}.json" for name in ROWS}
    found = {name: json.loads(path.read_text()) for name, path in paths.items() if path.exists()}
    parts = {name: [*ROWS[name](values)] for name, values in found.items()}
    seeds = {"race": f" of {len(found['race'])} seeds"} if "race" in found else {}
    return {
        "title": "Nodes of several ranks",
        "what": "Replicas of several ranks, whole or sharded: bytes of a host by the kernel's counters, predicted and measured seconds, seconds to DDP's loss, cost of a step inside a node.",  # noqa: E501
        "how": sorted({COLUMNS[name][1] for name in parts}),
        "date": time.strftime("%Y-%m-%d"),
        "machine": tables.machine(),
        "command": "; ".join(f"python benchmarks/nodes.py {part}" for part in (*parts, "tables")),
        "tables": [
            {
                "name": name,
                "title": COLUMNS[name][0],
                "how": [COLUMNS[name][1]],
                "spread": f"median [least, greatest]{seeds.get(name, '')}",
                "columns": COLUMNS[name][2],
                "rows": rows,
            }
            for name, rows in parts.items()
        ],
        "misses": [*misses(parts)],
        "notes": [*notes(parts)],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=(*ROWS, "tables"))
    parser.add_argument("--minutes", type=float, default=60.0, help="no launch begins after them")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("runs/nodes"))
    options = parser.parse_args()
    keep = Keep(options.out / f"{options.what}.json", options.minutes)
    if options.what == "bytes":
        count(keep)
    elif options.what == "predictions":
        predict(keep)
    elif options.what == "race":
        race(keep, options.seeds)
    elif options.what == "zero3":
        divide(keep, options.seeds)
    elif options.what == "overhead":
        overhead(keep)
    else:
        tables.save(RESULT, result(options.out))


if __name__ == "__main__":
    main()
