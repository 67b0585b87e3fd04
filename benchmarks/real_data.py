"""Loss after equal iterations and time to a target loss, on real data in the lab, over seeds.

    python benchmarks/real_data.py [--seeds 3] [--steps 200] [--rate 100mbit] [--out DIR]

A byte-level GPT on the standard library's source, 4 hosts; every strategy with period 5.
Contestants alternate within a seed; figures are medians over seeds with their range.
"""

from __future__ import annotations

import argparse
import re
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from offbeat.compare import Comparison, Contestant, Setup, compare
from offbeat.lab import Cluster
from offbeat.report import load, summarize
from offbeat.strategies import DDP, WFBP, DreamDDP, LocalSGD, PartialSync

EXAMPLE = Path(__file__).parent.parent / "examples" / "gpt.py"
CONTESTANTS = (
    Contestant("ddp", DDP()),
    Contestant("ddp-tuned", DDP(bucket_cap_mb="tuned")),
    Contestant("wfbp", WFBP()),
    Contestant("local-sgd", LocalSGD(period=5)),
    Contestant("partial-sync", PartialSync(period=5)),
    Contestant("dreamddp", DreamDDP(period=5)),
)


def held_out(directory: Path) -> float:
    """The held-out loss that rank 0 printed last."""
    return float(re.findall(r"held-out loss ([0-9.]+)", (directory / "rank0.log").read_text())[-1])


def spread(values: Sequence[float | None], digits: int) -> str:
    """Median [smallest..largest]; how many seeds are missing, if any."""
    known = [v for v in values if v is not None]
    if not known:
        return "never"
    text = f"{median(known):.{digits}f} [{min(known):.{digits}f}..{max(known):.{digits}f}]"
    missing = len(values) - len(known)
    return f"{text}, {missing} never" if missing else text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rate", default="100mbit")
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args()
    out = args.out or Path(tempfile.mkdtemp(prefix="offbeat-real-data-"))

    columns = ("s/iteration", "predicted", "training loss", "held-out loss", "seconds to target")
    table: dict[str, dict[str, list[float | None]]] = defaultdict(lambda: defaultdict(list))
    targets = []
    profile = None
    for seed in range(args.seeds):
        setup = Setup(
            (str(EXAMPLE), "--steps", str(args.steps)),
            Cluster.simple(hosts=args.hosts, rate=args.rate),
            seed=seed,
        )
        directory = out / f"seed{seed}"
        outcome = compare(Comparison(setup, CONTESTANTS, profile=profile), directory)
        if outcome.failures:
            raise SystemExit("\n".join(outcome.failures))
        profile = profile or directory / "profile.json"
        run = load(directory)
        for row in summarize(run):
            values = table[row.label]
            values["s/iteration"].append(row.iteration_s)
            values["predicted"].append(row.predicted_s)
            values["training loss"].append(row.final_loss)
            values["held-out loss"].append(held_out(directory / row.label / "rep0"))
            values["seconds to target"].append(row.target_s)
            targets.append(row.target_loss)

    shown = ", ".join(sorted({f"{t:.3f}" for t in targets if t is not None}))
    print(f"\n{args.hosts} hosts, {args.rate}, {args.steps} iterations, {args.seeds} seeds")
    print(f"target losses: {shown}")
    print("\n| strategy | " + " | ".join(columns) + " |")
    print("|---" * (len(columns) + 1) + "|")
    for label, values in table.items():
        cells = [spread(values[c], 1 if "seconds" in c else 3) for c in columns]
        print(f"| {label} | " + " | ".join(cells) + " |")
    print(f"\nrun directories: {out}")


if __name__ == "__main__":
    main()
