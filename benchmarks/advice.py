"""Advice: how near the first choice is to the best that can be simulated, over many profiles.

    python benchmarks/advice.py [--profiles 200] [--max-staleness 6] [--first 0]
                                [--measured FILE ...]

Profiles are made up: 3 to 12 layers of unequal size, messages a twentieth to ten times the
compute, three latencies, some with jitter, codecs of .5 to 2 GB/s; or they are those of files. The
best is the fastest of everything that computes the same as DDP and of all periods and delays that
are allowed, without a codec and with those that advice knows. All of it is simulated.
"""

from __future__ import annotations

import argparse
from collections import Counter
from dataclasses import replace
from pathlib import Path
from random import Random
from statistics import fmean

from offbeat.experiments.advice import Option, advise, predict_option
from offbeat.profile import Bucket, CodecSpeed, Link, Profile
from offbeat.strategies import WFBP, DeFT, DreamDDP, LocalSGD, Strategy, find, strategy_names
from offbeat.strategies.compressible import SUGGESTED_WIRES as WIRES

JITTERS = (0.0, 0.0, 0.0, 0.1)
LATENCIES_S = (1e-4, 1e-3, 2e-2)


def profile_of(seed: int) -> Profile:
    rng = Random(seed)
    sizes = [rng.randrange(1, 40) * 25_000 for _ in range(rng.randrange(3, 13))]
    backward_s = [rng.uniform(0.002, 0.03) for _ in sizes]
    compute_s, ratio = 1.5 * sum(backward_s), 10 ** rng.uniform(-1.3, 1)
    return Profile(
        tuple(
            Bucket(f"b{i}", s / 2, s, size)
            for i, (s, size) in enumerate(zip(backward_s, sizes, strict=True))
        ),
        (Link("net", rng.choice(LATENCIES_S), sum(sizes) / (ratio * compute_s)),),
        world_size=rng.choice((2, 4, 8)),
        update_s=rng.uniform(0.02, 0.2) * compute_s,
        jitter=rng.choice(JITTERS),
        codecs=tuple(
            CodecSpeed(wire, 1e-9 * rng.uniform(0.5, 2), 1e-9 * rng.uniform(0.2, 1))
            for wire in WIRES
        ),
    )


def everything(max_staleness: int) -> list[Strategy]:
    found: list[Strategy] = [find(name)() for name in strategy_names() if find(name).needs.profile]
    found = [strategy for strategy in found if strategy.synchronous]
    found.append(DeFT())
    for period in range(2, max_staleness + 2):
        found += [LocalSGD(period), DreamDDP(period), DreamDDP(period, due="forward")]
        delays = range(1, min(period, max_staleness + 2 - period))
        found += [DreamDDP(period, due="delayed", delay=delay) for delay in delays]
    wired = [one for one in found if isinstance(one, (WFBP, LocalSGD, DreamDDP))]
    return found + [replace(one, wire=wire) for one in wired for wire in WIRES]


def best(profile: Profile, max_staleness: int) -> tuple[float, Strategy]:
    found = (predict_option(strategy, profile) for strategy in everything(max_staleness))
    allowed = [one for one in found if one is not None and one.staleness <= max_staleness]
    return min(((one.update_s, one.strategy) for one in allowed), key=lambda one: one[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--profiles", type=int, default=200)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--max-staleness", type=int, default=6)
    parser.add_argument(
        "--measured", type=Path, nargs="+", help="profiles, instead of made-up ones"
    )
    options = parser.parse_args()
    behind: list[float] = []
    chosen: Counter[str] = Counter()
    options_of: list[Option] = []
    for seed in options.measured or range(options.first, options.first + options.profiles):
        profile = Profile.load(seed) if isinstance(seed, Path) else profile_of(seed)
        advice = advise(profile, max_staleness=options.max_staleness)
        best_s, strategy = best(profile, options.max_staleness)
        behind.append(advice.chosen.update_s / best_s)
        chosen[f"{advice.chosen.strategy.name}, {advice.chosen.change}"] += 1
        options_of += advice.options
        if behind[-1] > 1.02:
            print(
                f"profile {seed}: {advice.chosen.strategy}, {behind[-1]:.4f} of {strategy}",
                flush=True,
            )
    behind.sort()
    most = behind[len(behind) * 9 // 10]
    over = sum(share > 1.03 for share in behind)
    print(
        f"{len(behind)} profiles: the first choice takes {fmean(behind):.4f} of the best on "
        f"average, {most:.4f} in nine of ten, {behind[-1]:.4f} at most; over 3 %: {over}; "
        f"{len(options_of) / len(behind):.1f} options simulated"
    )
    for name, count in chosen.most_common():
        print(f"  {count:4d} {name}")


if __name__ == "__main__":
    main()
