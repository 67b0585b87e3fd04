"""Loss after equal iterations and time to a target loss, on real data in the lab, over seeds.

    python benchmarks/real_data.py [--set periodic|delayed] [--example gpt|digits] [--seeds 3]
                                   [--steps 200] [--rate 100mbit] [--out DIR]

A byte-level GPT on the standard library's source or a convolutional network on handwritten digits,
4 hosts. `periodic`: strategies with period 5; `delayed`: DeFT with and without its Preserver, and
what it has to be better than, at a rate where communication takes about twice the compute (the
coverage rate; it is printed, choose --rate by it). One profile for all; contestants alternate
within a seed; figures are medians over seeds with their range. An iteration is a batch, so all see
equally many samples. "no-sync": DDP that adds up the gradients of k batches and synchronizes their
sum, with k the iterations that DeFT merges per update.
"""

from __future__ import annotations

import argparse
import re
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean, median

from contest import count, coverage_rate

from offbeat import Profile, sim
from offbeat.experiments.compare import compare
from offbeat.experiments.comparison import Comparison, Contestant, Setup
from offbeat.experiments.launcher import measure_profile
from offbeat.experiments.report import Contestant as Finished
from offbeat.experiments.report import Row, Run, load, summarize
from offbeat.experiments.report.losses import SMOOTH, rank_mean
from offbeat.lab import Cluster
from offbeat.strategies import (
    DDP,
    WFBP,
    ByteScheduler,
    DeFT,
    DreamDDP,
    LocalSGD,
    PartialSync,
)

EXAMPLES = Path(__file__).parent.parent / "examples"
RATES = {"gpt": "200mbit", "digits": "200mbit"}  # coverage rates of about 2 on two cores
SETTINGS = {"gpt": (), "digits": ("--width", "256", "--batch", "64")}
# Merged updates come less often, and the schedule of the learning rate with them: to compare by
# samples it has to be constant.
CONSTANT_RATE = {"gpt": ("--decay", "1"), "digits": ()}

PERIODIC = (
    Contestant("ddp", DDP()),
    Contestant("ddp-tuned", DDP(bucket_cap_mb="tuned")),
    Contestant("wfbp", WFBP()),
    Contestant("local-sgd", LocalSGD(period=5)),
    Contestant("partial-sync", PartialSync(period=5)),
    Contestant("dreamddp", DreamDDP(period=5)),
)
DELAYED = (
    Contestant("ddp", DDP()),
    Contestant("ddp-tuned", DDP(bucket_cap_mb="tuned")),
    Contestant("bytescheduler", ByteScheduler()),
    Contestant("deft-sum", DeFT()),
    Contestant("deft-mean", DeFT(scale="mean")),
    Contestant("deft-sum-unpreserved", DeFT(preserver=False)),
    Contestant("deft-mean-unpreserved", DeFT(scale="mean", preserver=False)),
)

Table = dict[str, dict[str, list[float | None]]]  # label, column, one per seed


def merged(profile: Profile) -> int:
    """Iterations per update that DeFT's schedule merges, on average."""
    return round(fmean(DeFT(preserver=False).plan(profile).fact("merges")))


# ---- running ------------------------------------------------------------------------------------


def measured_profile(setup: Setup, path: Path) -> Profile:
    """The profile of the script, in `path`; exits on a failure."""
    outcome = measure_profile(setup, path)
    if outcome.failures:
        raise SystemExit("\n".join(outcome.failures))
    return Profile.load(path)


def raced(setup: Setup, entered: tuple[Contestant, ...], profile: Path, directory: Path) -> Run:
    """The run directory of a comparison; exits on a failure."""
    outcome = compare(Comparison(setup, entered, profile=profile), directory)
    if outcome.failures:
        raise SystemExit("\n".join(outcome.failures))
    return load(directory)


def raced_no_sync(setup: Setup, batches: int, profile: Path, directory: Path) -> Run:
    """DDP that synchronizes the sum of so many batches: a comparison of its own, as contestants
    share the script's arguments."""
    accumulating = replace(setup, script=(*setup.script, "--accumulate", str(batches)))
    return raced(accumulating, (Contestant(no_sync(batches), DDP()),), profile, directory)


def no_sync(batches: int) -> str:
    return f"ddp-no-sync-{batches}"


# ---- reading ------------------------------------------------------------------------------------


def rows_of(runs: Sequence[Run], profile: Profile, batches: int) -> list[Row]:
    """A row per contestant of all runs, with one target loss."""
    entered = tuple(contestant for run in runs for contestant in run.contestants)
    together = replace(runs[0], contestants=entered)
    return [
        per_batch(row, contestant, profile, batches) if row.label == no_sync(batches) else row
        for row, contestant in zip(summarize(together), entered, strict=True)
    ]


def per_batch(row: Row, contestant: Finished, profile: Profile, batches: int) -> Row:
    """The row of a contestant whose recorded iterations are of so many batches each."""
    local = profile.slowest()
    alone_s = local.other_s + local.forward_s + local.backward_s
    synchronized_s = sim.predict(DDP(), profile).iteration_s
    reached = None
    if row.target_s is not None and row.target_loss is not None:
        curve = rank_mean(contestant.complete[0]).smooth(max(1, SMOOTH // batches))
        reached = curve.reach(row.target_loss)
    return replace(
        row,
        iteration_s=None if row.iteration_s is None else row.iteration_s / batches,
        predicted_s=(synchronized_s + (batches - 1) * alone_s) / batches,
        target_s=reached[1] if reached else None,
    )


def printed(what: str, run: Run, label: str) -> float | None:
    """The number that rank 0 printed last after these words."""
    log = (run.path / label / "rep0" / "rank0.log").read_text()
    found = re.findall(rf"{what} ([0-9.]+)", log)
    return float(found[-1]) if found else None


def decided(contestant: Finished) -> str:
    """What a plan with delayed updates merges, and why; empty for other plans."""
    merges = None if contestant.plan is None else contestant.plan.fact("merges")
    if merges is None:
        return ""
    decisions = [d for rep in contestant.complete for d in rep.ranks[0].decisions]
    later = [f"iteration {d['iteration']}: {d['what']}" for d in decisions]
    return "; ".join([f"merges {merges}", contestant.plan.fact("preserver")["decision"], *later])


def spread(values: Sequence[float | None], digits: int) -> str:
    """Median [smallest..largest]; how many seeds are missing, if any."""
    known = [v for v in values if v is not None]
    if not known:
        return "never"
    text = f"{median(known):.{digits}f} [{min(known):.{digits}f}..{max(known):.{digits}f}]"
    missing = len(values) - len(known)
    return f"{text}, {missing} never" if missing else text


def add(table: Table, rows: Sequence[Row], runs: Sequence[Run]) -> None:
    """One more seed."""
    home = {contestant.label: run for run in runs for contestant in run.contestants}
    for row in rows:
        values = table[row.label]
        values["s/iteration"].append(row.iteration_s)
        values["predicted"].append(row.predicted_s)
        values["training loss"].append(row.final_loss)
        values["held-out loss"].append(printed("held-out loss", home[row.label], row.label))
        accuracy = printed("held-out accuracy", home[row.label], row.label)
        if accuracy is not None:
            values["held-out accuracy"].append(accuracy)
        values["seconds to target"].append(row.target_s)


def markdown(table: Table) -> list[str]:
    columns = list(next(iter(table.values())))
    lines = ["| strategy | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for label, values in table.items():
        cells = [spread(values[c], 1 if "seconds" in c else 3) for c in columns]
        lines.append(f"| {label} | " + " | ".join(cells) + " |")
    return lines


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--set", choices=("periodic", "delayed"), default="periodic")
    parser.add_argument("--example", choices=tuple(RATES), default="gpt")
    parser.add_argument("--seeds", type=count, default=3)
    parser.add_argument("--steps", type=count, default=200)
    parser.add_argument("--rate", help="default: 100mbit; delayed: by the example")
    parser.add_argument("--hosts", type=count, default=4)
    parser.add_argument("--out", type=Path, default=None)
    return parser.parse_args()


def main() -> None:
    args = options()
    delayed = args.set == "delayed"
    rate = args.rate or (RATES[args.example] if delayed else "100mbit")
    out = args.out or Path(tempfile.mkdtemp(prefix="offbeat-real-data-"))
    path = out / "profile.json"
    script = (str(EXAMPLES / f"{args.example}.py"), *SETTINGS[args.example])
    if args.set == "delayed":
        script = (*script, *CONSTANT_RATE[args.example])
    setup = Setup(script, Cluster.simple(args.hosts, rate))
    profile = measured_profile(setup, path)
    batches = merged(profile) if delayed else 1
    steps = max(args.steps // batches, 1) * batches  # as many samples for everyone
    setup = replace(setup, script=(*setup.script, "--steps", str(steps)))

    table: Table = defaultdict(lambda: defaultdict(list))
    targets: set[str] = set()
    decisions: list[str] = []
    for seed in range(args.seeds):
        setup = replace(setup, seed=seed)
        directory = out / f"seed{seed}"
        runs = [raced(setup, PERIODIC if args.set == "periodic" else DELAYED, path, directory)]
        if batches > 1:
            beside = directory.with_name(f"{directory.name}-no-sync")
            runs.append(raced_no_sync(setup, batches, path, beside))
        rows = rows_of(runs, profile, batches)
        add(table, rows, runs)
        targets |= {f"{row.target_loss:.3f}" for row in rows if row.target_loss is not None}
        told = [(contestant.label, decided(contestant)) for contestant in runs[0].contestants]
        decisions += [f"seed {seed}, {label}: {words}" for label, words in told if words]

    print(f"\n{args.hosts} hosts, {rate}, {steps} iterations, {args.seeds} seeds")
    print(f"coverage rate of the profile: {coverage_rate(profile):.2f}")
    print(f"target losses: {', '.join(sorted(targets))}\n")
    print("\n".join([*markdown(table), "", *decisions]))
    print(f"\nrun directories: {out}")


if __name__ == "__main__":
    main()
