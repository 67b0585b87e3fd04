"""Schedules of gradients on emulated accelerators: VGG-19 over one link or two.

    python benchmarks/schedules.py [--rates 50,67,100,200] [--scale X] [--json FILE]

Buckets as in DeFT's Table II (`papers/deft.py`), 4 hosts, F = 111 ms and B = 279 ms: three times
the paper's, and as many bytes as make communication as long as compute at 100 Mbit/s. Rates are
those of the first link; a second one has 0.6 of it. `--scale` multiplies the bytes. Measured as in
`emulated.py`: one launch per rate and repetition, predictions from its own profile, whole periods
after any prologue. Nothing is learned here, so DeFT's Preserver is off.

Bounds: synchronous methods max(F + B, C) (DeAR: each half under its own side), DeFT F + B, with
the measured F, B and C. "merges": iterations per update, over one cycle. Needs the lab (root or
user namespaces) and a quiet machine. About 25 minutes.
"""

import math
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median

from contest import (
    HOSTS,
    Check,
    Contest,
    Repetition,
    Row,
    Rows,
    arguments,
    coverage_rate,
    hold,
    loop,
    message,
    spread,
    table,
    verdicts,
)

from offbeat import BSP, DDP, WFBP, Strategy
from offbeat.lab import Cluster, Link
from offbeat.profile import Bucket
from offbeat.strategies import ASCWFBP, P3, ByteScheduler, DeAR, DeFT, USByte

sys.path.insert(0, str(Path(__file__).parent / "papers"))

from deft import BUCKETS

SLOWER = 3  # than the paper's accelerators
BYTES_PER_S = 7.8e6  # payload of an all-reduce over 4 hosts at 100 Mbit/s
SECOND_LINK = 0.6  # of the first one's rate
ITERATIONS = 12
OFF_PREDICTION = {1: 0.03, 2: 0.05}  # by the number of links that are used
HIDDEN = 1.01  # predicted over compute: all communication is hidden
OVER_COMPUTE = 1.05  # then measured over compute, at most

FORWARD_S = SLOWER * 1e-6 * sum(forward for forward, _, _ in BUCKETS.values())
BACKWARD_S = SLOWER * 1e-6 * sum(backward for _, backward, _ in BUCKETS.values())


def layers(scale: float) -> tuple[Bucket, ...]:
    """The model: bytes in proportion to the measured communication."""
    total_us = sum(us for _, _, us in BUCKETS.values())
    elements = scale * BYTES_PER_S * (FORWARD_S + BACKWARD_S) / 4
    return tuple(
        Bucket(
            f"bucket{number}",
            SLOWER * 1e-6 * forward_us,
            SLOWER * 1e-6 * backward_us,
            4 * round(elements * us / total_us),
        )
        for number, (forward_us, backward_us, us) in BUCKETS.items()
    )


def contestants() -> dict[str, Strategy]:
    """All schedules."""
    return {
        "DDP, cap 25 MB (default)": DDP(),
        "DDP, cap 1 MB": DDP(1.0),
        "DDP, best cap": DDP("tuned"),
        "WFBP, optimal fusion": WFBP("optimal"),
        "ASC-WFBP": ASCWFBP(),
        "P3": P3(),
        "ByteScheduler": ByteScheduler(),
        "US-Byte": USByte(),
        "DeAR": DeAR(),
        "DeFT, one link": DeFT(links="first", preserver=False),
        "DeFT, two links": DeFT(links="all", preserver=False),
        "DeFT (default links)": DeFT(preserver=False),
        "DeFT, greedy": DeFT(solver="greedy", preserver=False),
        "BSP": BSP(),
    }


def contest(rate_mbit: int, scale: float, iterations: int) -> Contest:
    """All contestants at one rate of the first link."""
    entered = contestants()
    links = (
        Link(name="net", rate=1e6 * rate_mbit),
        Link(name="second", rate=1e6 * rate_mbit * SECOND_LINK),
    )
    cluster = Cluster(hosts=HOSTS, links=links)
    return Contest(cluster, layers(scale), entered, dict.fromkeys(entered, iterations))


# ---- what is promised ---------------------------------------------------------------------------


def off(label: str, allowed: float) -> Check:
    """How far a measured time is from its prediction."""
    return lambda rows: abs(rows[label].difference), allowed


def over_compute(label: str) -> Check:
    """Measured time over compute, where the prediction says that everything is hidden."""

    def check(rows: Rows) -> float | None:
        row = rows[label]
        hides = row.predicted_s <= HIDDEN * row.compute_s
        return row.measured_s / row.compute_s if hides else None

    return check, OVER_COMPUTE


def checks(repetitions: Sequence[Repetition]) -> dict[str, Check]:
    """Predictions, then DeFT where its plan hides everything."""
    found: dict[str, Check] = {}
    for label in repetitions[0].rows:
        links = max(repetition.rows[label].links for repetition in repetitions)
        found[f"{label}: off its prediction by"] = off(label, OFF_PREDICTION[links])
    deft = [label for label in repetitions[0].rows if label.startswith("DeFT")]
    return found | {f"{label}: all hidden, over compute": over_compute(label) for label in deft}


# ---- tables -------------------------------------------------------------------------------------


def merges(rows: Sequence[Row]) -> str:
    """'1.33 (2, 1, 1)', of every repetition that differs."""
    found = dict.fromkeys(tuple(row.merges) for row in rows if row.merges)
    return "; ".join(f"{fmean(cycle):.2f} ({', '.join(map(str, cycle))})" for cycle in found)


def times_compute(rows: Sequence[Row]) -> str:
    return f"{median(row.measured_s / row.compute_s for row in rows):.3f}"


def together(repetitions: Sequence[Repetition]) -> list[str]:
    """What links lose to each other: 'net 0.98 beside second 0.97', of their speed alone."""
    found: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for repetition in repetitions:
        for pair in repetition.profile.contention:
            found.setdefault(pair.links, []).append(pair.speeds)
    return [
        f"{a} {median(s for s, _ in speeds):.2f} beside {b} {median(s for _, s in speeds):.2f}"
        for (a, b), speeds in found.items()
    ]


def show(rate_mbit: int, repetitions: Sequence[Repetition]) -> None:
    """Print one rate's tables."""
    first = repetitions[0].profile
    messages = [f"{link.name}: {message(repetitions, link.name)}" for link in first.links]
    print(
        f"\n### {rate_mbit} + {rate_mbit * SECOND_LINK:g} Mbit/s, "
        f"{first.payload_bytes('grad', range(len(first.buckets))) / 1e6:.2f} MB, "
        f"repetitions: {len(repetitions)}\n\n"
        f"Profile: {loop(repetitions)}; coverage rate "
        f"{spread([coverage_rate(r.profile) for r in repetitions], 2)}\n\n"
        f"Messages: {'; '.join(messages)}\n\n"
        f"Share of the speed alone: {'; '.join(together(repetitions)) or 'not measured'}\n"
    )
    columns = {"measured / compute": times_compute, "merges": merges}
    seen = verdicts("check", checks(repetitions), repetitions)
    print("\n".join([*table(repetitions, columns), "", *seen]), flush=True)


def main() -> None:
    parser = arguments(__doc__, rates="50,67,100,200", iterations=ITERATIONS)
    parser.add_argument("--scale", type=float, default=1.0, help="times the bytes of the model")
    options = parser.parse_args()
    if not 0 < options.scale < math.inf:
        parser.error(f"--scale ({options.scale}) must be above 0; 1 is the model as described")
    hold(
        options,
        lambda rate_mbit: contest(rate_mbit, options.scale, options.iterations),
        show,
    )


if __name__ == "__main__":
    main()
