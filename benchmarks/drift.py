"""A rate that halves and doubles during a run, and one that jitters: plans made again.

    python benchmarks/drift.py [--rate 40] [--period 5] [--periods 40] [--out FILE]

Four emulated hosts train a model of 12 emulated layers (`EmulatedModel`) under DreamDDP with
`replan="always"`. In `drift` the rate of all hosts is halved after a third of the iterations and
doubled again after two thirds. In `jitter` it is drawn anew between 90 % and 110 % every 2 s. The
two references are planned with the profile at the whole and at half the rate, and run at that rate.

Wanted: the same sequence of digests on all ranks; in the last quarter of each third at most 5 %
above the reference at that rate; no other plan under jitter. Needs the lab (root or user
namespaces) and a quiet machine. About 8 minutes.
"""

import argparse
import datetime
import json
import random
import sys
import tempfile
import threading
import time
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from tables import machine, save

HOSTS, LAYERS = 4, 12
FORWARD_S, BACKWARD_S = 0.1, 0.2
MODEL_BYTES = 2_400_000  # 0.8 s of messages at 40 Mbit/s: more than half a period's backward
JITTER, JITTER_S = 0.1, 2.0
ALLOWED = 0.05
SETTLING = 0.75  # share of a third after which its iterations count


def work(path: Path) -> None:
    """Train as one rank; rank 0 prints when a third has ended."""
    import torch
    import torch.distributed as dist

    import offbeat
    from offbeat.lab.emulate import EmulatedModel
    from offbeat.profile import Bucket

    job = json.loads(path.read_text())
    torch.manual_seed(0)
    model = EmulatedModel([Bucket(**layer) for layer in job["layers"]])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    model, optimizer = offbeat.prepare(
        model,
        optimizer,
        f"dreamddp:period={job['period']}",
        profile=job["profile"],
        observe=5,
        min_bucket_bytes=1,
        replan=job["replan"],
    )
    inputs, rank = torch.full((1,), float(dist.get_rank())), dist.get_rank()
    ends_s, digests = list[float](), list[str]()
    third = max(1, job["iterations"] // 3)
    for t in range(job["iterations"]):
        loss = model(inputs)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ends_s.append(time.perf_counter())
        session = model._session
        digests.append("" if session.observing else session.plan.digest)
        if rank == 0 and (t + 1) % third == 0:
            print(f"third {(t + 1) // third}", flush=True)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (ends_s, digests))
    model.close()
    if rank == 0:
        ends = [max(of_ranks) for of_ranks in zip(*(e for e, _ in everyone), strict=True)]
        alike = all(d == everyone[0][1] for _, d in everyone)
        Path(job["result"]).write_text(
            json.dumps({"ends_s": ends, "digests": everyone[0][1], "alike": alike})
        )


def train(
    folder: Path, name: str, rate_mbit: float, iterations: int, options: argparse.Namespace
) -> dict[str, Any]:
    """Run one job in a fresh lab, in which rates change by the job's name."""
    from offbeat.lab import Cluster, Lab, launch
    from offbeat.profile import Bucket

    of_layer = (FORWARD_S / LAYERS, BACKWARD_S / LAYERS, MODEL_BYTES // LAYERS)
    layers = [asdict(Bucket(f"layer{i}", *of_layer)) for i in range(LAYERS)]
    is_planned = name in ("drift", "jitter")
    job = {
        "layers": layers,
        "period": options.period,
        "profile": str(folder / ("whole" if is_planned else name)) + ".profile.json",
        "iterations": iterations,
        "replan": "always" if is_planned else "never",
        "result": str(folder / f"{name}.result.json"),
    }
    path = folder / f"{name}.json"
    path.write_text(json.dumps(job))
    over = threading.Event()
    with Lab(Cluster.simple(HOSTS, 1e6 * rate_mbit), name) as lab:

        def set_rate(share: float) -> None:
            for host in range(HOSTS):
                lab.set_rate(host, "net", 1e6 * rate_mbit * share)

        def on_line(_: int, line: str) -> None:
            print(f"  {name}: {line}", flush=True)
            if name == "drift" and line in ("third 1", "third 2"):
                set_rate(0.5 if line == "third 1" else 1.0)

        def jitter() -> None:
            draw = random.Random(0)
            while not over.wait(JITTER_S):
                set_rate(1 + JITTER * draw.uniform(-1, 1))

        jittering = threading.Thread(target=jitter, daemon=True)
        if name == "jitter":
            jittering.start()
        result = launch(
            lab,
            [sys.executable, __file__, "--rank", str(path)],
            env={"OMP_NUM_THREADS": "1"},
            log_dir=folder / f"{name}.logs",
            timeout_s=3600,
            on_line=on_line,
        )
        over.set()
        if name == "jitter":
            jittering.join()
    if result.problem:
        sys.exit(result.problem)
    return json.loads(Path(job["result"]).read_text())


def seconds(found: dict[str, Any], period: int, first: int, stop: int) -> float:
    """Median seconds per iteration of the whole periods in the last part of a stretch."""
    ends_s, start = found["ends_s"], first + int(SETTLING * (stop - first))
    of_periods = [
        (ends_s[t + period - 1] - ends_s[t - 1]) / period
        for t in range(max(start, 1), stop - period + 1, period)
    ]
    return median(of_periods)


def main(options: argparse.Namespace) -> None:
    iterations = 3 * options.period * options.periods
    third, period = iterations // 3, options.period
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        runs = {
            "whole": train(folder, "whole", options.rate, third, options),
            "half": train(folder, "half", options.rate / 2, third, options),
            "drift": train(folder, "drift", options.rate, iterations, options),
            "jitter": train(folder, "jitter", options.rate, iterations, options),
        }
    reference = {name: seconds(runs[name], period, 0, third) for name in ("whole", "half")}
    rows = []
    for number, rate in enumerate(("whole", "half", "whole")):
        took_s = seconds(runs["drift"], period, number * third, (number + 1) * third)
        over = took_s / reference[rate] - 1
        at_mbit = options.rate / (2 if rate == "half" else 1)
        rows.append([at_mbit, round(reference[rate], 3), round(took_s, 3), round(100 * over, 1)])
        missed = "" if over <= ALLOWED else " (missed)"
        print(f"| {' | '.join(map(str, rows[-1]))}{missed} |")
    plans = {name: list(dict.fromkeys(runs[name]["digests"][6:])) for name in ("drift", "jitter")}
    print(f"same digests on all ranks: {runs['drift']['alike']} and {runs['jitter']['alike']}")
    print(f"plans: drift {len(plans['drift'])}, jitter {len(plans['jitter'])} (wanted: 1)")
    alike = {name: "yes" if runs[name]["alike"] else "no" for name in plans}
    save_result(rows, plans, alike, options)


def save_result(
    rows: list[list[Any]],
    plans: dict[str, list[str]],
    alike: dict[str, str],
    options: argparse.Namespace,
) -> None:
    """Write results/drift.json, or a file of the same content."""
    misses = [
        f"At {row[0]} Mbit/s an iteration takes {row[3]} % more than planned at that rate."
        for row in rows
        if row[3] > 100 * ALLOWED
    ]
    misses += [f"The job of {name} has other plans on some ranks." for name in plans
               if alike[name] == "no"]  # fmt: skip
    if len(plans["jitter"]) > 1:
        misses.append("The job is planned again under jitter.")
    result = {
        "title": "A rate that halves, doubles and jitters",
        "what": " ".join(" ".join((__doc__ or "").split("\n\n")[2:4]).split()),
        "how": ["emulated"],
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "machine": machine(),
        "command": f"python benchmarks/drift.py --rate {options.rate:g} --period {options.period} "
        f"--periods {options.periods}",
        "tables": [
            {
                "name": "thirds",
                "title": "Seconds per iteration at the end of each third, and of a job that is "
                "planned with that rate",
                "columns": ["Mbit/s", "planned with it, s", "planned again, s", "more, %"],
                "rows": rows,
            },
            {
                "name": "plans",
                "title": "Plans of a job",
                "columns": ["rates", "plans", "the same on all ranks"],
                "rows": [[name, len(plans[name]), alike[name]] for name in plans],
            },
        ],
        "misses": misses,
        "notes": [],
    }
    if options.out:
        Path(options.out).write_text(json.dumps(result, indent=1))
    else:
        save("drift", result)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rate", type=float, default=40.0, help="Mbit/s of each host")
    parser.add_argument("--period", type=int, default=5)
    parser.add_argument("--periods", type=int, default=40, help="periods of each third, at least 8")
    parser.add_argument("--out", help="file of the result instead of results/drift.json")
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.periods < 8:
        parser.error(f"--periods ({given.periods}) must be at least 8: the last quarter counts")
    if given.rank:
        work(Path(given.rank))
    else:
        main(given)
