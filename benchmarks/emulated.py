"""Schedules on emulated accelerators: measured, predicted, and their lower bounds.

    python benchmarks/emulated.py [--rates 25,50,100,200] [--iterations N] [--json FILE]

20 layers of 0.4 MB, forward 100 ms, backward 200 ms, 4 hosts, period 5. Compute is emulated
(layers sleep), parameters and messages are real and cross shaped links. One launch per rate and
repetition: it measures a profile, then every contestant, in turns (the second time backwards), so
each prediction comes from the profile of its own run. Seconds per iteration are the median over
whole periods of the slowest rank, without the first two iterations.

Bounds: synchronous methods max(F + B, C), periodic ones F + max(B, C / 5), with the measured F, B
and C (one message of all bytes). Needs the lab (root or user namespaces) and a quiet machine.
About 25 minutes; each of 100 and 200 about 5.
"""

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

from offbeat import BSP, DDP, WFBP, DreamDDP, LocalSGD, PartialSync, Profile, Strategy, sim
from offbeat.lab import Cluster, Lab, launch

HOSTS = 4
PERIOD = 5
LAYERS = {"layers": 20, "forward_s": 0.1, "backward_s": 0.2, "size_bytes": 400_000}
SKIP = 2  # iterations: DDP rebuilds its buckets after the first
SYNCHRONOUS_SHARE = 2  # so many times fewer iterations where each one is a period

CONTESTANTS: dict[str, Strategy] = {
    "DDP, cap 25 MB (default)": DDP(),
    "DDP, cap 1 MB": DDP(1.0),
    "DDP, cap 0.3 MB": DDP(0.3),
    "WFBP, no fusion": WFBP("none"),
    "WFBP, optimal fusion": WFBP("optimal"),
    "BSP": BSP(),
    "local SGD": LocalSGD(PERIOD),
    "equal-number": PartialSync(PERIOD),
    "DreamDDP, contiguous": DreamDDP(PERIOD, solver="optimal"),
    "DreamDDP, balanced": DreamDDP(PERIOD, solver="balanced"),
    "DreamDDP (default)": DreamDDP(PERIOD),
    "DreamDDP, split": DreamDDP(PERIOD, split=True),
}
DDP_CAPS = [label for label, strategy in CONTESTANTS.items() if isinstance(strategy, DDP)]


@dataclass(frozen=True)
class Row:
    """One contestant in one repetition, seconds per iteration."""

    measured_s: float
    predicted_s: float
    bound_s: float
    periods_s: list[float]

    @property
    def difference(self) -> float:
        return self.measured_s / self.predicted_s - 1


@dataclass(frozen=True)
class Repetition:
    """One launch: its profile and a row per contestant."""

    profile: Profile
    rows: dict[str, Row]


def iterations_of(strategy: Strategy, iterations: int) -> int:
    """Iterations of one contestant, with those that are skipped."""
    periodic = hasattr(strategy, "period")
    return SKIP + (iterations if periodic else max(2, iterations // SYNCHRONOUS_SHARE))


def measure(rate_mbit: int, repetition: int, iterations: int) -> Repetition:
    """One launch in a fresh lab; exits with the log's end if it fails."""
    order = list(CONTESTANTS)[:: -1 if repetition % 2 else 1]
    with tempfile.TemporaryDirectory() as folder:
        job = {
            "folder": folder,
            "layers": LAYERS,
            "contestants": [
                {
                    "label": label,
                    "strategy": CONTESTANTS[label].name,
                    "settings": CONTESTANTS[label].settings(),
                    "iterations": iterations_of(CONTESTANTS[label], iterations),
                }
                for label in order
            ],
        }
        path = Path(folder, "job.json")
        path.write_text(json.dumps(job))
        argv = [sys.executable, str(Path(__file__).with_name("emulated_worker.py")), str(path)]
        cluster = Cluster.simple(HOSTS, f"{rate_mbit}mbit")
        with Lab(cluster, "emulated") as lab:
            result = launch(lab, argv, log_dir=Path(folder, "logs"), timeout_s=3600)
        if result.problem:
            sys.exit(result.problem)
        profile = Profile.load(Path(folder, "profile.json"))
        ends_s = json.loads(Path(folder, "ends.json").read_text())
    return Repetition(profile, {label: row(label, profile, ends_s[label]) for label in CONTESTANTS})


def row(label: str, profile: Profile, ends_s: Sequence[float]) -> Row:
    """Measured against predicted; `ends_s` is the end of every iteration."""
    prediction = sim.predict(CONTESTANTS[label], profile)
    period = prediction.plan.period
    periods_s = [
        (ends_s[i + period] - ends_s[i]) / period
        for i in range(SKIP - 1, len(ends_s) - period, period)
    ]
    assert prediction.bound_s is not None
    measured_s = statistics.median(periods_s)
    return Row(measured_s, prediction.iteration_s, prediction.bound_s, periods_s)


def spread(values: Sequence[float], form: str) -> str:
    """Median [least, greatest]."""
    return f"{statistics.median(values):{form}} [{min(values):{form}}, {max(values):{form}}]"


def table(repetitions: Sequence[Repetition]) -> list[str]:
    """Markdown, one row per contestant."""
    lines = [
        "| contestant | measured, ms | predicted, ms | difference | bound, ms | measured / bound |",
        "|---|---|---|---|---|---|",
    ]
    for label in CONTESTANTS:
        rows = [repetition.rows[label] for repetition in repetitions]
        cells = [
            label,
            spread([1e3 * r.measured_s for r in rows], ".0f"),
            f"{1e3 * statistics.median(r.predicted_s for r in rows):.0f}",
            f"{statistics.median(r.difference for r in rows):+.1%}",
            f"{1e3 * statistics.median(r.bound_s for r in rows):.0f}",
            f"{statistics.median(r.measured_s / r.bound_s for r in rows):.3f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


Ratio = Callable[[dict[str, Row]], float]


def over(label: str, other: str) -> Ratio:
    """Measured times of two contestants of the same launch."""
    return lambda rows: rows[label].measured_s / rows[other].measured_s


def over_best_ddp(label: str) -> Ratio:
    return lambda rows: rows[label].measured_s / min(rows[cap].measured_s for cap in DDP_CAPS)


def over_bound(label: str) -> Ratio:
    return lambda rows: rows[label].measured_s / rows[label].bound_s


RATIOS: dict[str, tuple[Ratio, float]] = {
    "WFBP, optimal fusion / best DDP cap": (over_best_ddp("WFBP, optimal fusion"), 1.02),
    "DreamDDP (default) / its bound": (over_bound("DreamDDP (default)"), 1.09),
    "DreamDDP, split / its bound": (over_bound("DreamDDP, split"), 1.09),
    "DreamDDP / best DDP cap": (over_best_ddp("DreamDDP (default)"), 1.0),
    "DreamDDP / local SGD": (over("DreamDDP (default)", "local SGD"), 1.0),
    "DreamDDP / equal-number": (over("DreamDDP (default)", "equal-number"), 1.0),
    "balanced / contiguous sets": (over("DreamDDP, balanced", "DreamDDP, contiguous"), 1.0),
}


def ratios(repetitions: Sequence[Repetition]) -> list[str]:
    """Markdown: the ratios that were promised, each within one launch."""
    lines = ["| ratio of measured times | median [min, max] | wanted: at most |", "|---|---|---|"]
    for name, (ratio, wanted) in RATIOS.items():
        values = [ratio(repetition.rows) for repetition in repetitions]
        verdict = "" if statistics.median(values) <= wanted else " (missed)"
        lines.append(f"| {name} | {spread(values, '.3f')} | {wanted:.2f}{verdict} |")
    return lines


def show(rate_mbit: int, repetitions: Sequence[Repetition]) -> None:
    """Print one rate's tables."""
    profiles = [repetition.profile for repetition in repetitions]

    def typical_ms(seconds: Callable[[Profile], float]) -> str:
        return f"{1e3 * statistics.median(map(seconds, profiles)):.1f} ms"

    print(
        f"\n### {rate_mbit} Mbit/s, repetitions: {len(repetitions)}\n\n"
        f"Profile: F = {typical_ms(lambda p: p.forward_s)}, "
        f"B = {typical_ms(lambda p: p.backward_s)}, "
        f"update {typical_ms(lambda p: p.update_s)}, other {typical_ms(lambda p: p.other_s)}; "
        f"message {typical_ms(lambda p: p.default_link.latency_s)} + bytes / "
        f"({statistics.median(p.default_link.bytes_per_s for p in profiles) / 1e6:.2f} MB/s)\n"
    )
    print("\n".join([*table(repetitions), "", *ratios(repetitions)]), flush=True)


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rates", default="25,50,100,200", help="Mbit/s, with commas between")
    parser.add_argument("--iterations", type=int, default=2 * PERIOD, help="measured, per launch")
    parser.add_argument("--repetitions", type=int, help="default: 3, below 100 Mbit/s 2")
    parser.add_argument("--json", type=Path, help="write all results to this file")
    options = parser.parse_args()
    if options.iterations < PERIOD:
        parser.error(f"--iterations ({options.iterations}) must be at least a period ({PERIOD})")
    facts = machine()
    print(f"Emulated compute, {HOSTS} hosts, {', '.join(f'{k} {v}' for k, v in facts.items())}")
    report: dict[str, list[dict[str, object]]] = {}
    for rate in map(int, options.rates.split(",")):
        repetitions = []
        for n in range(options.repetitions or (3 if rate >= 100 else 2)):
            start_s = time.monotonic()
            repetitions.append(measure(rate, n, options.iterations))
            took_s = time.monotonic() - start_s
            print(f"{rate} Mbit/s, repetition {n + 1}: {took_s:.0f} s", file=sys.stderr, flush=True)
        show(rate, repetitions)
        report[f"{rate} Mbit/s"] = [as_json(repetition) for repetition in repetitions]
        if options.json:
            options.json.write_text(json.dumps({"machine": facts, **report}, indent=1) + "\n")


if __name__ == "__main__":
    main()
