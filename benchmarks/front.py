"""Seconds and bytes until DDP's loss: codecs, outer steps and delayed averages, beside torch's own.

    python benchmarks/front.py times [--tasks digits,gpt] [--hosts 4,8] [--rates 10,25,100]
                               [--repetitions 1] [--out times.json]
    python benchmarks/front.py losses [--tasks ...] [--hosts ...] [--seeds 3] [--out losses.json]
    python benchmarks/front.py tables [--svg FILE]

`times`: seconds and bytes per iteration in the lab. Messages, codecs and hosts' links are real; of
compute a host only takes the time, 30 ms for forward and backward, as two cores cannot compute for
eight hosts. All contestants run one after another in one launch. `losses`: the same contestants
train the real model, without a lab; held-out loss of the mean of all replicas every 10 iterations.
`tables`: iterations until DDP's loss times seconds per iteration. Everything is kept in files, and
a second start goes on from there. `times` needs a quiet machine.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from figures import spread
from front_picture import picture
from front_worker import ADVISED, PERIOD, TASKS, TORCH, text_in
from threads import layout, remembered

from offbeat import sim
from offbeat.core.strategy.parsing import parse
from offbeat.lab import Cluster, Lab, launch
from offbeat.lab.lab import NoLab
from offbeat.profile import Bucket, Link, Profile
from offbeat.strategies import DDP

FORWARD_S, BACKWARD_S = 0.01, 0.02
WIRES = ("bf16", "fp16", "int8", "int4", "sign", "topk:0.01", "randomk:0.01", "powersgd:4")
LENGTHS = {"digits": 240, "gpt": 240}  # iterations that are trained
MOMENTS = {"digits": 1, "gpt": 2}  # that the optimizer keeps per parameter
AIMS = {"digits": 120, "gpt": 120}  # DDP's loss after so many is the aim
COUNTED = {True: 4, False: 40}  # iterations whose time is taken, of every one's averages or not


def contestants() -> Iterator[str]:
    """Labels: torch's own by name, ours by their text. `dear` computes what DDP computes."""
    yield from TORCH
    yield "dear"
    for name in (f"local-sgd:period={PERIOD}", f"dreamddp:period={PERIOD}"):
        yield name
        for wire in WIRES:
            yield f"{name}:wire={wire}"
    for wire in ("", ":wire=int4"):
        yield f"dreamddp:period={PERIOD}:due=delayed{wire}"
        yield f"diloco:period={PERIOD}{wire}"
        yield f"diloco:period={PERIOD}:fragments=3:delay=2:alpha=0.5{wire}"
    # With few bytes, averages may be frequent.
    yield "dreamddp:period=2:due=delayed:wire=int4"
    yield "dreamddp:period=2:due=delayed:gain=0.5:wire=int4"


def buckets_of(task: str) -> tuple[Bucket, ...]:
    """The model's buckets; the time of forward and backward is shared out by size."""
    model = TASKS[task].model()
    parameters = dict(model.named_parameters())
    specs = layout(model)
    sizes = [sum(parameters[name].nbytes for name in spec.parameters) for spec in specs]
    return tuple(
        Bucket(
            spec.name,
            FORWARD_S * size / sum(sizes),
            BACKWARD_S * size / sum(sizes),
            size,
            state_bytes=MOMENTS[task] * size,
            tensors=spec.parameters + spec.buffers,
        )
        for spec, size in zip(specs, sizes, strict=True)
    )


def launched(
    lab: AbstractContextManager[Any], job: Mapping[str, Any]
) -> tuple[dict[str, Any], Profile | None]:
    """What the ranks of `front_worker.py` have found, and the profile if they measured one; exits
    if they fail."""
    with tempfile.TemporaryDirectory() as folder, lab as ready:
        path = Path(folder, "job.json")
        path.write_text(json.dumps({"layers": [], **job, "folder": folder}))
        argv = [sys.executable, str(Path(__file__).with_name("front_worker.py")), str(path)]
        result = launch(ready, argv, log_dir=Path(folder, "logs"), timeout_s=1800)
        if result.problem:
            sys.exit(result.problem)
        found = json.loads(Path(folder, "found.json").read_text())
        measured = Path(folder, "profile.json")
        return found, Profile.load(measured) if measured.exists() else None


def times(
    task: str,
    hosts: int,
    rate: int,
    chosen: list[str],
    keep: Path,
    advised: bool = True,
    adam: bool = False,
) -> dict[str, Any]:
    """By contestant: seconds and bytes per iteration, and predicted seconds where we predict; the
    measured profile is kept in a folder. With `advised` the advised strategies take part. With
    `adam` the optimizer keeps two moments, otherwise none."""
    text = f'hosts = {hosts}\n[[links]]\nname = "net"\nrate = "{rate}mbit"\n'
    job = {
        "what": "times",
        "advised": advised,
        "adam": adam,
        "layers": [asdict(bucket) | {"tensors": ()} for bucket in buckets_of(task)],
        "contestants": {label: COUNTED[label.startswith("ddp")] for label in chosen},
    }
    found, profile = launched(Lab(Cluster.from_toml(text), "front"), job)
    assert profile is not None
    keep.mkdir(exist_ok=True)
    profile.save(keep / f"{task}-{hosts}-{rate}.json")
    for label, row in found.items():
        if label == "ddp" or label not in TORCH:
            strategy = DDP() if label == "ddp" else parse(text_in(label))
            row["predicted_s"] = sim.predict(strategy, profile).iteration_s
    return found


def losses(
    task: str, hosts: int, seed: int, chosen: list[str], sgd: Mapping[str, float] | None = None
) -> dict[str, Any]:
    """By contestant: (iteration, held-out loss) every few iterations. `sgd` has the learning rates
    of contestants that step with plain SGD."""
    given = Profile(buckets_of(task), (Link("net", 1e-3, 2e6),), hosts)
    job = {
        "what": "losses",
        "task": task,
        "seed": seed,
        "profile": given.to_dict(),
        "contestants": dict.fromkeys(chosen, LENGTHS[task]),
        "sgd": dict(sgd or {}),
    }
    return launched(NoLab(Cluster.simple(hosts)), job)[0]


# ---- tables -------------------------------------------------------------------------------------


def reached(curve: list[list[float]], aim: float) -> float | None:
    """The iteration at which a loss is reached, between two looks; None if it never is."""
    before = None
    for at, loss in curve:
        if loss <= aim:
            if before is None:
                return at
            earlier, higher = before
            return earlier + (at - earlier) * (higher - aim) / (higher - loss)
        before = at, loss
    return None


def aim_of(curve: list[list[float]], task: str) -> float:
    return next(loss for at, loss in curve if at == AIMS[task])


def rows(options: argparse.Namespace, task: str, hosts: int) -> Iterator[dict[str, Any]]:
    """One per contestant: iterations to the aim by seed, and by rate seconds and bytes, of the runs
    that it took part in."""
    known = [json.loads(path.read_text()) for path in (options.losses, options.times)]
    curves = [v for k, v in known[0].items() if k.startswith(f"{task}, {hosts} hosts, ")]
    for label in contestants():
        own = [c for c in curves if label in c]
        needed = [reached(c[label], aim_of(c["ddp"], task)) for c in own]
        last = [c[label][-1][1] for c in own]
        row: dict[str, Any] = {"label": label, "needed": needed, "last": last, "rates": {}}
        for rate in map(int, options.rates.split(",")):
            start = f"{task}, {hosts} hosts, {rate} Mbit/s, "
            found = [v for k, v in known[1].items() if k.startswith(start)]
            runs = [v[label] for v in found if label in v]
            if runs:
                row["rates"][rate] = runs
        yield row


def tables(options: argparse.Namespace) -> None:
    panels = {}
    for task in options.tasks.split(","):
        for hosts in map(int, options.hosts.split(",")):
            found = [row for row in rows(options, task, hosts) if row["rates"] and row["last"]]
            table(options, task, hosts)
            title = f"{task}, {hosts} hosts: held-out loss after {LENGTHS[task]} iterations"
            if found:
                panels[title] = {
                    short(row["label"]): (sent_by(row), median(row["last"])) for row in found
                }
    if options.svg:
        ours = [short(label) for label in contestants() if label not in TORCH]
        options.svg.write_text(picture(panels, ours))


def short(label: str) -> str:
    """Without the period that all but one share, and without names of parameters."""
    for words, fewer in ((f"period={PERIOD}", ""), ("due=", ""), ("wire=", ""), ("::", ":")):
        label = label.replace(words, fewer)
    return label.rstrip(":")


def sent_by(row: Mapping[str, Any]) -> float:
    """Bytes of a rank and iteration, at whatever rate."""
    return median(run["sent_bytes"] for runs in row["rates"].values() for run in runs)


def table(options: argparse.Namespace, task: str, hosts: int) -> None:
    """Markdown for one task and number of hosts."""
    found = [row for row in rows(options, task, hosts) if row["rates"] or row["last"]]
    rates = [int(rate) for rate in options.rates.split(",") if int(rate) in found[0]["rates"]]
    print(f"\n**{task}, {hosts} hosts**\n")
    heads = ["", "iterations", "last loss", "KB per iteration"]
    heads += [f"{rate} Mbit/s: ms, predicted, s to DDP's loss" for rate in rates]
    print("|", " | ".join(heads), "|\n" + "|---" * len(heads) + "|")
    errors = []
    for row in found:
        needed = [n for n in row["needed"] if n is not None]
        never = len(row["needed"]) - len(needed)
        counts = spread(needed, 0) if needed else ""
        cells = [row["label"], counts + (f" (never: {never})" if never else "")]
        cells.append(spread(row["last"], 3) if row["last"] else "")
        cells.append(f"{sent_by(row) / 1e3:.1f}" if row["rates"] else "")
        for rate in rates:
            if not (runs := row["rates"].get(rate)):
                cells.append("")
                continue
            each_s = median(run["iteration_s"] for run in runs)
            cell = spread([1e3 * run["iteration_s"] for run in runs], 1)
            if "predicted_s" in runs[0]:
                off = median(run["predicted_s"] / run["iteration_s"] - 1 for run in runs)
                errors.append((abs(off), row["label"], rate))
                cell += f", {off:+.1%}"
            if row["needed"]:
                cell += ", never" if never else f", **{each_s * median(needed):.1f} s**"
            cells.append(cell)
        print("|", " | ".join(cells), "|")
    for rate in rates:
        print(advice_in_words(options, task, hosts, rate))
    if errors:
        middle = median(error for error, *_ in errors)
        print(
            f"\nprediction off by {middle:.1%} (median), {max(errors)[0]:.1%} ({max(errors)[1:]})"
        )


def is_advisable(label: str) -> bool:
    """Whether advice may name it: averages every ten at most, codecs that lose little."""
    if label.startswith(ADVISED) or label == "ddp":
        return True
    words = ("due=delayed", "delay=", "sign", "topk", "randomk", "powersgd")
    return label not in TORCH and not any(word in label for word in words)


def advice_in_words(options: argparse.Namespace, task: str, hosts: int, rate: int) -> str:
    """The advised strategies of each launch against the best of those that are as fresh: averages
    every ten."""
    known = json.loads(options.times.read_text())
    start, lines = f"{task}, {hosts} hosts, {rate} Mbit/s, ", []
    for key, found in known.items():
        if key.startswith(start):
            fresh = {k: v["iteration_s"] for k, v in found.items() if is_advisable(k)}
            best = min(fresh, key=lambda label: fresh[label])
            shares = [
                f"{label} {row['iteration_s'] / fresh[best]:.3f}"
                for label, row in found.items()
                if label.startswith(ADVISED)
            ]
            lines.append(f"{rate} Mbit/s, of the best measured ({best}): {', '.join(shares)}")
    return "\n".join(lines)


# ---- the command --------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("times", "losses", "tables"))
    parser.add_argument("--tasks", default=",".join(TASKS))
    parser.add_argument("--hosts", default="4,8")
    parser.add_argument("--rates", default="10,25,100", help="Mbit/s")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--repetitions", type=int, default=1)
    parser.add_argument("--only", help="contestants whose label contains this")
    parser.add_argument("--times", type=Path, default=Path("front-times.json"))
    parser.add_argument("--svg", type=Path, help="where `tables` draws loss against bytes")
    parser.add_argument("--losses", type=Path, default=Path("front-losses.json"))
    options = parser.parse_args()
    if options.what == "tables":
        tables(options)
        return
    chosen = [label for label in contestants() if options.only is None or options.only in label]
    numbers = range(options.seeds if options.what == "losses" else options.repetitions)
    for n in numbers:  # whole rounds, so that a part of them says something
        for task in options.tasks.split(","):
            for hosts in map(int, options.hosts.split(",")):
                if options.what == "losses":
                    key, run = f"{task}, {hosts} hosts, seed {n}", partial(losses, task, hosts, n)
                    remembered(options.losses, key, partial(run, chosen))
                    continue
                for rate in map(int, options.rates.split(",")):
                    key = f"{task}, {hosts} hosts, {rate} Mbit/s, {n}"
                    turns = chosen[:: -1 if n % 2 else 1]
                    keep = options.times.with_suffix(".profiles")
                    run = partial(times, task, hosts, rate, turns, keep)
                    remembered(options.times, key, run)


if __name__ == "__main__":
    main()
