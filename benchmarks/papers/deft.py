"""VGG-19 on 16 GPUs as DeFT's authors measured it: iteration times, merges and expected loss.

    python benchmarks/papers/deft.py [--json FILE]

Table II of the DeFT paper, with bucket 1's communication at 11,968 us (1,968 as printed does not
add up to the printed total), no latency and no time for updates. Needs no torch.
"""

import argparse
import json
from itertools import pairwise
from pathlib import Path

from offbeat.core.strategy.interface import Strategy
from offbeat.profile import Bucket, Link, Profile
from offbeat.sim import predict
from offbeat.strategies import WFBP, ByteScheduler
from offbeat.strategies.deft import DeFT
from offbeat.strategies.solvers import preserver

# Output side first: forward, backward, communication in us.
BUCKETS = {
    6: (103, 162, 8651),
    5: (326, 484, 31754),
    4: (1899, 2319, 178643),
    3: (4801, 4872, 15447),
    2: (28799, 12786, 11262),
    1: (1238, 72496, 11968),
}
PARAMETERS = 143_652_544
MU = 1.65  # how much slower gloo is than NCCL
WHOLE = PARAMETERS  # elements: nothing is cut but what does not fit a window
SINGLE_STEPS = (0.2103, 0.2054, 0.1989, 0.1967, 0.1922)  # Table V, row O_B
ETA = 0.01


def profile(mus: dict[str, float]) -> Profile:
    """The model on links that take so many times the measured communication."""
    total_us = sum(row[2] for row in BUCKETS.values())
    return Profile(
        tuple(
            Bucket(
                f"bucket {number}",
                forward_s=forward * 1e-6,
                backward_s=backward * 1e-6,
                size_bytes=round(4 * PARAMETERS * us / total_us),
                communication_s={link: mu * us * 1e-6 for link, mu in mus.items()},
            )
            for number, (forward, backward, us) in BUCKETS.items()
        ),
        tuple(Link(link, 0.0, 4e6 * PARAMETERS / mu / total_us) for link, mu in mus.items()),
        world_size=16,
    )


def table_v() -> float:
    """Expected loss after single steps over that after the merges of two links."""
    mu = [(before - after) / ETA for before, after in pairwise(SINGLE_STEPS)]
    return preserver.LossWalk(SINGLE_STEPS[0], ETA, sigma=0.0).ratio([2, 1, 1], mu)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write all results to this file")
    options = parser.parse_args()
    one, two = profile({"nccl": 1.0}), profile({"nccl": 1.0, "gloo": MU})
    cases: list[tuple[str, Strategy, Profile, float]] = [
        ("WFBP, one message per bucket", WFBP(fusion="none"), one, 295.1),
        ("ByteScheduler", ByteScheduler(), one, 258.3),
        ("DeFT, one link", DeFT(partition_elements=WHOLE), one, 130.3),
        ("DeFT, two links", DeFT(partition_elements=WHOLE), two, 130.3),
    ]
    report: dict[str, object] = {}
    print("| schedule | ms per iteration | expected | merges |\n|---|---|---|---|")
    for label, strategy, measured, expected_ms in cases:
        prediction = predict(strategy, measured)
        iteration_ms = 1e3 * prediction.iteration_s
        merges = prediction.plan.fact("merges", [1])
        print(f"| {label} | {iteration_ms:.1f} | {expected_ms} | {merges} |")
        report[label] = {"ms": iteration_ms, "expected_ms": expected_ms, "merges": merges}
    report["table V"] = ratio = table_v()
    print(f"\nTable V, ratio of expected losses: {ratio:.4f} (paper: 0.993)")
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
