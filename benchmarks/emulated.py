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

from collections.abc import Callable, Sequence

from contest import (
    HOSTS,
    Check,
    Contest,
    Repetition,
    Rows,
    arguments,
    hold,
    loop,
    message,
    table,
    verdicts,
)

from offbeat import BSP, DDP, WFBP, DreamDDP, LocalSGD, PartialSync, Strategy
from offbeat.lab import Cluster
from offbeat.profile import Bucket

PERIOD = 5
LAYERS = tuple(Bucket(f"layers.{i}", 0.1 / 20, 0.2 / 20, 400_000) for i in reversed(range(20)))
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


Ratio = Callable[[Rows], float]


def over(label: str, other: str) -> Ratio:
    """Measured times of two contestants of the same launch."""
    return lambda rows: rows[label].measured_s / rows[other].measured_s


def over_best_ddp(label: str) -> Ratio:
    return lambda rows: rows[label].measured_s / min(rows[cap].measured_s for cap in DDP_CAPS)


def over_bound(label: str) -> Ratio:
    return lambda rows: rows[label].measured_s / rows[label].bound_s


RATIOS: dict[str, Check] = {
    "WFBP, optimal fusion / best DDP cap": (over_best_ddp("WFBP, optimal fusion"), 1.02),
    "DreamDDP (default) / its bound": (over_bound("DreamDDP (default)"), 1.09),
    "DreamDDP, split / its bound": (over_bound("DreamDDP, split"), 1.09),
    "DreamDDP / best DDP cap": (over_best_ddp("DreamDDP (default)"), 1.0),
    "DreamDDP / local SGD": (over("DreamDDP (default)", "local SGD"), 1.0),
    "DreamDDP / equal-number": (over("DreamDDP (default)", "equal-number"), 1.0),
    "balanced / contiguous sets": (over("DreamDDP, balanced", "DreamDDP, contiguous"), 1.0),
}


def contest(rate_mbit: int, iterations: int) -> Contest:
    """All contestants at one rate; synchronous ones run for fewer iterations."""
    few = max(2, iterations // SYNCHRONOUS_SHARE)
    return Contest(
        Cluster.simple(HOSTS, f"{rate_mbit}mbit"),
        LAYERS,
        CONTESTANTS,
        {
            label: iterations if hasattr(strategy, "period") else few
            for label, strategy in CONTESTANTS.items()
        },
    )


def show(rate_mbit: int, repetitions: Sequence[Repetition]) -> None:
    """Print one rate's tables."""
    link = repetitions[0].profile.default_link.name
    print(
        f"\n### {rate_mbit} Mbit/s, repetitions: {len(repetitions)}\n\n"
        f"Profile: {loop(repetitions)}; message {message(repetitions, link)}\n"
    )
    ratios = verdicts("ratio of measured times", RATIOS, repetitions)
    print("\n".join([*table(repetitions), "", *ratios]), flush=True)


def main() -> None:
    options = arguments(__doc__, rates="25,50,100,200", iterations=2 * PERIOD).parse_args()
    hold(options, lambda rate_mbit: contest(rate_mbit, options.iterations), show)


if __name__ == "__main__":
    main()
