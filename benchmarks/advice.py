"""Advice: how near the first choice is to the best that can be simulated, over many profiles.

    python benchmarks/advice.py [--profiles 200] [--max-staleness 6] [--first 0] [--processes 2]
                                [--save] [--measured FILE ...]

Profiles are made up: 3 to 12 layers of unequal size, messages a twentieth to ten times the
compute, three latencies, some with jitter, codecs of .5 to 2 GB/s; or they are those of files. The
best is the fastest of all strategies with the numbers of DDP, and of all allowed periods and delays
without a codec and with each codec that advice knows. A strategy whose lower bound is within
`MERITED` of the fastest one so far is not simulated. All times are simulated. `--save` writes
results/advice.json.
"""

from __future__ import annotations

import argparse
import os
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from operator import itemgetter
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any

import tables

from offbeat.experiments.advice.selection import Option, advise, predict_option
from offbeat.profile import Bucket, CodecSpeed, Link, Profile
from offbeat.strategies import (
    WFBP,
    DeFT,
    DreamDDP,
    LocalSGD,
    Planned,
    Strategy,
    find,
    strategy_names,
)
from offbeat.strategies.compressible import SUGGESTED_WIRES as WIRES

JITTERS = (0.0, 0.0, 0.0, 0.1)
LATENCIES_S = (1e-4, 1e-3, 2e-2)
MERITED = 0.001  # gain over the fastest so far, by the bound, that merits a simulation
SAMPLE_ERROR = 0.015  # of mean compute times in a simulation with jitter
LIMIT = 1.03  # greatest time of the first choice relative to the best
RESULT = "advice"


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
    found: list[Strategy] = [
        find(name)() for name in strategy_names() if issubclass(find(name), Planned)
    ]
    found = [strategy for strategy in found if strategy.synchronous]
    found.append(DeFT())
    for period in range(2, max_staleness + 2):
        found += [LocalSGD(period), DreamDDP(period), DreamDDP(period, due="forward")]
        delays = range(1, min(period, max_staleness + 2 - period))
        found += [DreamDDP(period, due="delayed", delay=delay) for delay in delays]
    wired = [one for one in found if isinstance(one, (WFBP, LocalSGD, DreamDDP))]
    return found + [replace(one, wire=wire) for one in wired for wire in WIRES]


def best(
    profile: Profile, max_staleness: int, known: Iterable[Option] = ()
) -> tuple[float, Strategy]:
    """Return the least seconds per update of all strategies, and a strategy with this time.

    Args:
        profile: profile of the job.
        max_staleness: largest staleness, in iterations.
        known: options that were simulated before.
    """

    def allowed_times(options: Iterable[Option | None]) -> Iterator[tuple[float, Strategy]]:
        for one in options:
            if one is not None and one.staleness <= max_staleness:
                yield one.update_s, one.strategy

    found = min(allowed_times(known), key=itemgetter(0), default=(float("inf"), DeFT()))
    for strategy, least_s in least_times(profile, max_staleness, found[0]):
        if least_s < found[0] * (1 - MERITED):
            option = predict_option(strategy, profile)
            found = min([found, *allowed_times([option])], key=itemgetter(0))
    return found


def least_times(
    profile: Profile, max_staleness: int, enough_s: float
) -> list[tuple[Strategy, float]]:
    """Return strategies with lower bounds of their seconds, the smallest first.

    Jitter lengthens the iterations of a plan on average, but for the error of the sample. So with
    jitter the bound is the time without it, which is simulated faster, less `SAMPLE_ERROR`.
    Strategies whose bound is at least `enough_s` may be left out.
    """
    bounds_s = {one: one.bound_s(one.costed(profile)) for one in everything(max_staleness)}
    if any(profile.jitters):
        even = replace(profile, jitter=0.0)
        for strategy, bound_s in bounds_s.items():
            if bound_s < enough_s and (option := predict_option(strategy, even)) is not None:
                bounds_s[strategy] = max(bound_s, option.update_s * (1 - SAMPLE_ERROR))
    return sorted(bounds_s.items(), key=itemgetter(1))


@dataclass(frozen=True)
class Case:
    """First choice on one profile, beside the best strategy.

    Attributes:
        name: seed or file of the profile.
        jitter: whether compute times vary.
        chosen: first choice of advice.
        change: change of the first choice.
        best: the best strategy.
        behind: time of the first choice relative to the best.
        options: number of options that advice has simulated.
    """

    name: str
    jitter: bool
    chosen: Strategy
    change: str
    best: Strategy
    behind: float
    options: int


def case_of(source: int | Path, max_staleness: int) -> Case:
    profile = Profile.load(source) if isinstance(source, Path) else profile_of(source)
    advice = advise(profile, max_staleness=max_staleness)
    chosen = advice.chosen
    best_s, strategy = best(profile, max_staleness, advice.options)
    return Case(
        str(source),
        any(profile.jitters),
        chosen.strategy,
        chosen.change,
        strategy,
        chosen.update_s / best_s,
        len(advice.options),
    )


def rows_of(cases: Sequence[Case]) -> Iterator[list[Any]]:
    """Yield the rows of the table: all profiles, and those without and with jitter."""
    groups = {
        "all": cases,
        "equal compute times": [case for case in cases if not case.jitter],
        "compute times with jitter": [case for case in cases if case.jitter],
    }
    for name, group in groups.items():
        if group:
            behind = sorted(case.behind for case in group)
            figures = fmean(behind), behind[len(behind) * 9 // 10], behind[-1]
            over = sum(share > LIMIT for share in behind)
            yield [name, len(group), *(round(figure, 4) for figure in figures), over]


def result(cases: Sequence[Case], command: str) -> dict[str, Any]:
    """Return the result, with the measured table of the former one."""
    former = tables.load(RESULT)
    lab = next(table for table in former["tables"] if table["name"] == "lab")
    lab.setdefault("date", former["date"])
    over = [case for case in cases if case.behind > LIMIT]
    kinds = Counter(case.change for case in cases)
    counts = ", ".join(f"{change} {count}" for change, count in kinds.most_common())
    options = fmean(case.options for case in cases)
    return {
        "title": former["title"],
        "what": (
            f"{len(cases)} made-up profiles, 3 to 12 layers, messages a twentieth to ten times the "
            "compute, three latencies, one in four with jitter: predicted time of the first choice "
            "relative to the best period, delay and codec. Then the advised strategy in the lab of "
            "`front`, relative to the fastest measured of the contestants of that race."
        ),
        "how": ["predicted"],
        "date": time.strftime("%Y-%m-%d"),
        "machine": tables.machine(),
        "command": command,
        "tables": [
            {
                "name": "profiles",
                "title": f"Time of the first choice relative to the best, {len(cases)} profiles",
                "columns": [
                    *("compute", "profiles", "mean", "nine of ten below", "largest"),
                    "more than 3 % behind",
                ],
                "rows": [*rows_of(cases)],
            },
            lab,
        ],
        "misses": [
            *(f"Profile {case.name}: {case.behind:.4f} of {case.best}." for case in over),
            *(text for text in former["misses"] if not text.startswith("Profile ")),
        ],
        "notes": [
            f"Changes of the first choices: {counts}. {options:.1f} options are simulated on "
            "average.",
            *(text for text in former["notes"] if text.startswith(("Wanted", "With an allowance"))),
        ],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--profiles", type=int, default=200)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--max-staleness", type=int, default=6)
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--save", action="store_true", help="write results/advice.json")
    parser.add_argument(
        "--measured", type=Path, nargs="+", help="profiles, instead of made-up ones"
    )
    options = parser.parse_args()
    sources = options.measured or range(options.first, options.first + options.profiles)
    one, begin_s, cases = partial(case_of, max_staleness=options.max_staleness), time.time(), []
    with ProcessPoolExecutor(options.processes) as pool:
        for case in pool.map(one, sources):
            cases.append(case)
            if case.behind > 1.02:
                print(
                    f"profile {case.name}: {case.chosen}, {case.behind:.4f} of {case.best}",
                    flush=True,
                )
    seconds = time.time() - begin_s
    for name, count, mean, most, largest, over in rows_of(cases):
        print(
            f"{name}, {count} profiles: the first choice takes {mean} of the best on average, "
            f"{most} in nine of ten, {largest} at most; over 3 %: {over}"
        )
    chosen = Counter(f"{case.chosen.name}, {case.change}" for case in cases)
    for name, count in chosen.most_common():
        print(f"  {count:4d} {name}")
    print(f"{fmean(case.options for case in cases):.1f} options simulated; {seconds:.0f} s")
    if options.save:
        command = f"python benchmarks/advice.py --profiles {len(cases)} --save"
        tables.save(RESULT, result(cases, command))


if __name__ == "__main__":
    main()
