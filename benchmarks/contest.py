"""Contests on emulated accelerators: one launch for a profile and every contestant, then tables.

Shared by `emulated.py` and `schedules.py`; `emulated_worker.py` is what each rank runs.
"""

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

from figures import spread

from offbeat import Profile, Strategy, sim
from offbeat.lab import Cluster, Lab, launch
from offbeat.plan import Plan, base_link
from offbeat.profile import Bucket
from offbeat.strategies import DeFT

HOSTS = 4
SKIP = 2  # iterations: DDP rebuilds its buckets after the first


@dataclass(frozen=True)
class Contest:
    """Who trains what on which cluster; `iterations`: of each, how many are measured at least."""

    cluster: Cluster
    layers: Sequence[Bucket]
    contestants: Mapping[str, Strategy]
    iterations: Mapping[str, int]


@dataclass(frozen=True)
class Row:
    """One contestant in one repetition, seconds per iteration; compute is F + B and the rest of
    the loop, `merges` the iterations per update over one cycle."""

    measured_s: float
    predicted_s: float
    bound_s: float
    compute_s: float
    periods_s: list[float]
    links: int
    merges: list[int]

    @property
    def difference(self) -> float:
        return self.measured_s / self.predicted_s - 1


Rows = dict[str, Row]
Check = tuple[Callable[[Rows], float | None], float]  # None: does not apply; wanted: at most


@dataclass(frozen=True)
class Repetition:
    """One launch: its profile and a row per contestant."""

    profile: Profile
    rows: Rows


# ---- running ------------------------------------------------------------------------------------


def counted(plan: Plan, iterations: int) -> range:
    """The iterations that count: whole periods, at least so many, after a prologue and `SKIP`."""
    first = plan.prologue + SKIP
    return range(first, first + -(-iterations // plan.period) * plan.period)


def coverage_rate(profile: Profile) -> float:
    """Communication of all buckets on the first link over forward and backward."""
    communication_s = sum(profile.communication_s(profile.default_link.name))
    return communication_s / (profile.forward_s + profile.backward_s)


def measure(contest: Contest, repetition: int) -> Repetition:
    """One launch in a fresh lab; exits with the log's end if it fails."""
    order = list(contest.contestants)[:: -1 if repetition % 2 else 1]
    with tempfile.TemporaryDirectory() as folder:
        job = {
            "folder": folder,
            "layers": [asdict(layer) for layer in contest.layers],
            "contestants": [
                {
                    "label": label,
                    "strategy": contest.contestants[label].name,
                    "settings": contest.contestants[label].settings(),
                    "iterations": contest.iterations[label],
                }
                for label in order
            ],
        }
        path = Path(folder, "job.json")
        path.write_text(json.dumps(job))
        argv = [sys.executable, str(Path(__file__).with_name("emulated_worker.py")), str(path)]
        with Lab(contest.cluster, "emulated") as lab:
            result = launch(lab, argv, log_dir=Path(folder, "logs"), timeout_s=3600)
        if result.problem:
            sys.exit(result.problem)
        profile = Profile.load(Path(folder, "profile.json"))
        ends_s = json.loads(Path(folder, "ends.json").read_text())
    rows = {
        label: row(strategy, profile, ends_s[label], contest.iterations[label])
        for label, strategy in contest.contestants.items()
    }
    return Repetition(profile, rows)


def row(strategy: Strategy, profile: Profile, ends_s: Sequence[float], iterations: int) -> Row:
    """Measured against predicted; `ends_s` is the end of every iteration."""
    prediction = sim.predict(strategy, profile)
    assert prediction.bound_s is not None
    plan = prediction.plan
    periods_s = [
        (ends_s[first + plan.period - 1] - ends_s[first - 1]) / plan.period
        for first in counted(plan, iterations)[:: plan.period]
    ]
    return Row(
        measured_s=statistics.median(periods_s),
        predicted_s=prediction.iteration_s,
        bound_s=prediction.bound_s,
        compute_s=DeFT().bound_s(profile),
        periods_s=periods_s,
        links=len(set(map(base_link, plan.links))),
        merges=list(plan.fact("merges", ())),
    )


# ---- tables -------------------------------------------------------------------------------------


def typical_ms(repetitions: Sequence[Repetition], seconds: Callable[[Profile], float]) -> str:
    """Median over the repetitions' profiles."""
    return f"{1e3 * statistics.median(seconds(r.profile) for r in repetitions):.1f} ms"


def loop(repetitions: Sequence[Repetition]) -> str:
    """The measured F, B and the rest of the loop."""
    return (
        f"F = {typical_ms(repetitions, lambda p: p.forward_s)}, "
        f"B = {typical_ms(repetitions, lambda p: p.backward_s)}, "
        f"update {typical_ms(repetitions, lambda p: p.update_s)}, "
        f"other {typical_ms(repetitions, lambda p: p.other_s)}"
    )


def message(repetitions: Sequence[Repetition], link: str) -> str:
    """The measured time of a message on one link."""
    rate = statistics.median(r.profile.link(link).bytes_per_s for r in repetitions) / 1e6
    latency = typical_ms(repetitions, lambda p: p.link(link).latency_s)
    return f"{latency} + bytes / ({rate:.2f} MB/s)"


def table(
    repetitions: Sequence[Repetition],
    more: Mapping[str, Callable[[Sequence[Row]], str]] | None = None,
) -> list[str]:
    """Markdown, one row per contestant; `more` columns from the rows of all repetitions."""
    more = more or {}
    heads = ["contestant", "measured, ms", "predicted, ms", "difference", "bound, ms"]
    heads += ["measured / bound", *more]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for label in repetitions[0].rows:
        rows = [repetition.rows[label] for repetition in repetitions]
        cells = [
            label,
            spread([1e3 * r.measured_s for r in rows], 0),
            f"{1e3 * statistics.median(r.predicted_s for r in rows):.0f}",
            f"{statistics.median(r.difference for r in rows):+.1%}",
            f"{1e3 * statistics.median(r.bound_s for r in rows):.0f}",
            f"{statistics.median(r.measured_s / r.bound_s for r in rows):.3f}",
            *(cell(rows) for cell in more.values()),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def verdicts(
    title: str, checks: Mapping[str, Check], repetitions: Sequence[Repetition]
) -> list[str]:
    """Markdown: what was promised, each within one launch; "(missed)" where the median is more."""
    lines = [f"| {title} | median [min, max] | wanted: at most |", "|---|---|---|"]
    for name, (check, wanted) in checks.items():
        found = [check(repetition.rows) for repetition in repetitions]
        values = [value for value in found if value is not None]
        seen = spread(values, 3) if values else "does not apply"
        missed = values and statistics.median(values) > wanted
        lines.append(f"| {name} | {seen} | {wanted:.2f}{' (missed)' if missed else ''} |")
    return lines


# ---- the command --------------------------------------------------------------------------------


def arguments(description: str | None, rates: str, iterations: int) -> argparse.ArgumentParser:
    """What both commands take."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rates", default=rates, help="Mbit/s, with commas between")
    parser.add_argument(
        "--iterations", type=count, default=iterations, help="measured at least, in whole periods"
    )
    parser.add_argument("--repetitions", type=count, help="default: 3, below 100 Mbit/s 2")
    parser.add_argument("--json", type=Path, help="write all results to this file")
    return parser


def count(text: str) -> int:
    """A command line's integer of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"({text}) must be an integer of at least 1")
    return int(text)


def hold(
    options: argparse.Namespace,
    contest_at: Callable[[int], Contest],
    show: Callable[[int, Sequence[Repetition]], None],
) -> None:
    """The contest at every rate, shown when it is over; its argument is the rate in Mbit/s."""
    facts = machine()
    print(f"Emulated compute, {HOSTS} hosts, {', '.join(f'{k} {v}' for k, v in facts.items())}")
    report: dict[str, list[dict[str, object]]] = {}
    for rate in map(int, options.rates.split(",")):
        repetitions = []
        for n in range(options.repetitions or (3 if rate >= 100 else 2)):
            start_s = time.monotonic()
            repetitions.append(measure(contest_at(rate), n))
            took_s = time.monotonic() - start_s
            print(f"{rate} Mbit/s, repetition {n + 1}: {took_s:.0f} s", file=sys.stderr, flush=True)
        show(rate, repetitions)
        report[f"{rate} Mbit/s"] = [as_json(repetition) for repetition in repetitions]
        if options.json:
            options.json.write_text(json.dumps({"machine": facts, **report}, indent=1) + "\n")


def machine() -> dict[str, object]:
    return {
        "cpus": os.cpu_count(),
        "load at start": round(os.getloadavg()[0], 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": metadata.version("torch"),
        "congestion_control": Cluster.simple(HOSTS).congestion_control,
    }


def as_json(repetition: Repetition) -> dict[str, object]:
    rows = {label: asdict(row) for label, row in repetition.rows.items()}
    return {"profile": repetition.profile.to_dict(), "rows": rows}
