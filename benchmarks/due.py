"""DreamDDP whose averages also hide behind the forward pass: seconds, bounds, memory, loss.

    python benchmarks/due.py [--parts speed,quality] [--rates 25,50,100,200] [--iterations N]
                             [--json FILE] [--out FILE] [--seeds 3]

`speed`: the 20 emulated layers of `emulated.py` (0.4 MB each, F = 100 ms, B = 200 ms) on 4 hosts,
period 5: the paper's variant (layers whole or in slices, whatever is predicted faster), due at the
next forward, and delayed by 1 and 2 iterations. One launch per rate and repetition measures a
profile, then every contestant. Needs the lab and a quiet machine; one to two minutes per rate and
repetition.

`quality`: the byte-level GPT of `targets.py` trained for 200 iterations by 4 ranks as threads, with
each variant and with DDP; losses are real. About 8 minutes of one core; runs are kept in `--out`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median

import torch
from contest import (
    HOSTS,
    Check,
    Contest,
    Repetition,
    arguments,
    hold,
    loop,
    message,
    table,
    verdicts,
)
from emulated import LAYERS, PERIOD, over, over_bound
from targets import STEPS, TASKS, ends, hosts, measured, pace_for, spread, trained
from threads import remembered

from offbeat.lab import Cluster
from offbeat.profile import Profile
from offbeat.strategies import BSP, DreamDDP, Strategy

PAPER, FORWARD = "the paper's", "due at the next forward"
CONTESTANTS: dict[str, Strategy] = {
    PAPER: DreamDDP(PERIOD),
    FORWARD: DreamDDP(PERIOD, due="forward"),
    "delayed by 1": DreamDDP(PERIOD, due="delayed"),
    "delayed by 2": DreamDDP(PERIOD, due="delayed", delay=2),
}
LATE = DreamDDP(PERIOD, due="delayed", delay=4)
QUALITY = {
    "DDP": BSP(),
    **CONTESTANTS,
    "delayed by 4": LATE,
    "delayed by 4, gain .5": replace(LATE, gain=0.5),
}
QUALITY_RATE = 50  # Mbit/s, for which plans are made
SOLO = "profile of GPT"
# Where averages are late and the link is slow, the first iterations run ahead of it, for up to two
# periods. The median of five is of the others.
ITERATIONS = 5 * PERIOD

RATIOS: dict[str, Check] = {
    **{f"{label} / its bound": (over_bound(label), 1.09) for label in CONTESTANTS},
    **{f"{label} / the paper's": (over(label, PAPER), 1.0) for label in CONTESTANTS},
}


def contest(rate_mbit: int, iterations: int) -> Contest:
    """All variants at one rate."""
    cluster = Cluster.simple(HOSTS, f"{rate_mbit}mbit")
    return Contest(cluster, LAYERS, CONTESTANTS, dict.fromkeys(CONTESTANTS, iterations))


def show(rate_mbit: int, repetitions: Sequence[Repetition]) -> None:
    """Print one rate's tables."""
    profile = repetitions[0].profile

    print(
        f"\n### {rate_mbit} Mbit/s, repetitions: {len(repetitions)}\n\n"
        f"Profile: {loop(repetitions)}; message {message(repetitions, profile.default_link.name)}\n"
    )
    rows = table(repetitions)
    print("\n".join([*rows, "", *verdicts("ratio of measured times", RATIOS, repetitions)]))
    for label, strategy in CONTESTANTS.items():
        plan = strategy.plan(profile)
        memory, staleness = plan.fact("memory_bytes", 0), plan.fact("staleness", 0)
        messages = sum(len(t.phases) for t in plan.transfers) / plan.period
        print(
            f"{label}: {memory / 1e6:.1f} MB more, stale for {staleness} iterations, "
            f"{messages:.1f} messages per iteration",
            flush=True,
        )


def quality(out: Path, seeds: int) -> None:
    """Print the losses."""
    torch.set_num_threads(1)
    task = TASKS["GPT"]
    alone = Profile.from_dict(remembered(out, SOLO, partial(measured, task)))
    profile = hosts(alone, pace_for(alone), QUALITY_RATE)
    print("\n| | final loss | held-out loss | replicas apart, % |\n|---|---|---|---|")
    for label, strategy in QUALITY.items():
        rows = [
            remembered(
                out,
                f"{strategy} {strategy.plan(profile).digest}, seed {seed}",
                partial(trained, task, strategy, profile, STEPS["GPT"], seed),
            )
            for seed in range(seeds)
        ]
        apart = [100 * median(row["relative"]) if row["relative"] else 0.0 for row in rows]
        cells = [
            spread([ends(row["losses"])[1] for row in rows], 3),
            spread([row["held out"] for row in rows], 3),
            spread(apart, 2),
        ]
        print("|", label, "|", " | ".join(cells), "|", flush=True)


def main() -> None:
    parser = arguments(__doc__, rates="25,50,100,200", iterations=ITERATIONS)
    parser.add_argument("--parts", default="speed,quality")
    parser.add_argument("--out", type=Path, default=Path("due.json"), help="runs of `quality`")
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    if "quality" in options.parts:
        quality(options.out, options.seeds)
    if "speed" in options.parts:
        hold(options, lambda rate_mbit: contest(rate_mbit, options.iterations), show)


if __name__ == "__main__":
    main()
