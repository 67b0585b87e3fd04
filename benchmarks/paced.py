"""Real models on hosts with a pace of their own: predicted against measured.

    python benchmarks/paced.py [--models gpt,cnn,resnet,llama] [--rates 25,50,100,200]
                               [--strategies main|others|cyclic|due] [--steps 32] [--repeat 1]
                               [--uneven] [--delay 20ms] [--json FILE] [--keep FOLDER]

4 hosts. `main`: DDP, WFBP, local SGD, equal numbers of layers and DreamDDP with period 5. `others`:
priority schedules, DeFT, selective synchronization and federated averaging. `cyclic`: DDP, WFBP and
DreamDDP beside cyclic data parallelism by v2, with the paper's stagger too, and v1. `due`: DreamDDP
beside its averages due at the next forward, and delayed.

Each host computes at 1/K of this machine's core, K as `--pace auto` has it: numerics, messages and
losses are real, compute time is emulated. `--uneven`: one host computes half as fast. `--keep`:
where the runs' directories stay, as MODEL-RATE. Needs the lab and a quiet machine; two to four
minutes per model and rate.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from statistics import median

from link_load import table

from offbeat.experiments.compare import compare
from offbeat.experiments.comparison import Comparison, Contestant, Setup
from offbeat.experiments.report import load, summarize
from offbeat.experiments.report.pace_notes import describe_pace
from offbeat.lab import Cluster
from offbeat.profile import Profile
from offbeat.strategies import (
    ASCWFBP,
    DDP,
    P3,
    WFBP,
    ByteScheduler,
    Cyclic,
    DeAR,
    DeFT,
    DreamDDP,
    FedAvg,
    LocalSGD,
    PartialSync,
    SelSync,
    USByte,
)

HERE = Path(__file__).parent
SCRIPTS = {
    "gpt": (str(HERE.parent / "examples" / "gpt.py"),),
    "cnn": (str(HERE.parent / "examples" / "digits.py"),),
    "resnet": (str(HERE / "paced_worker.py"), "--model", "resnet"),
    "llama": (str(HERE / "paced_worker.py"), "--model", "llama"),
}
CONTESTANTS = {
    "main": (
        Contestant("ddp", DDP()),
        Contestant("wfbp", WFBP()),
        Contestant("local-sgd", LocalSGD(5)),
        Contestant("equal-number", PartialSync(5)),
        Contestant("dreamddp", DreamDDP(5)),
    ),
    "others": (
        Contestant("asc-wfbp", ASCWFBP()),
        Contestant("p3", P3()),
        Contestant("bytescheduler", ByteScheduler()),
        Contestant("us-byte", USByte()),
        Contestant("dear", DeAR()),
        Contestant("deft", DeFT()),
        Contestant("selsync", SelSync(0.3)),
        Contestant("selsync-layer", SelSync(0.3, scope="layer")),
        Contestant("fedavg", FedAvg(local_steps=5)),
    ),
    "cyclic": (
        Contestant("ddp", DDP()),
        Contestant("wfbp", WFBP()),
        Contestant("dreamddp", DreamDDP(5)),
        Contestant("cyclic-v2", Cyclic(stagger="least")),
        Contestant("cyclic-v1", Cyclic(rule="v1", stagger="least")),
        Contestant("cyclic-paper", Cyclic(stagger="paper")),
    ),
    "due": (
        Contestant("ddp", DDP()),
        Contestant("dreamddp", DreamDDP(5)),
        Contestant("due-forward", DreamDDP(5, due="forward")),
        Contestant("delayed-1", DreamDDP(5, due="delayed")),
    ),
}
HALF_AS_FAST = "[[overrides]]\nhost = 3\nspeed = 0.5\n"


def cluster(rate: str, options: argparse.Namespace) -> Cluster:
    """Four hosts, as the options have it."""
    text = f'hosts = 4\n[[links]]\nname = "net"\nrate = "{rate}mbit"\n'
    if options.delay:
        text += f'latency = "{options.delay}"\n'
    return Cluster.from_toml(text + (HALF_AS_FAST if options.uneven else ""))


def measure(model: str, rate: str, options: argparse.Namespace) -> dict[str, list[float]]:
    """By contestant: measured and predicted ms per iteration, relative error in percent."""
    script = (*SCRIPTS[model], "--steps", str(options.steps))
    with tempfile.TemporaryDirectory() as folder:
        directory = (options.keep / f"{model}-{rate}") if options.keep else Path(folder, "run")
        setup = Setup(script, cluster(rate, options), pace="auto")
        outcome = compare(
            Comparison(setup, CONTESTANTS[options.strategies], options.repeat), directory
        )
        if outcome.failures:
            sys.exit("; ".join(outcome.failures))
        run = load(directory)
        rows, profile = summarize(run), Profile.load(directory / "profile.json")
    compute_s = profile.forward_s + profile.backward_s + profile.update_s + profile.other_s
    print(
        f"\n### {model}, {rate} Mbit/s: compute {compute_s * 1e3:.0f} ms at pace {profile.pace:g}"
    )
    print("\n".join(describe_pace(run)))
    print("\n| strategy | measured ms | predicted ms | error | final loss |\n|---|---|---|---|---|")
    found = {}
    for row in rows:
        assert row.iteration_s is not None
        assert row.predicted_s is not None
        measured, predicted = row.iteration_s * 1e3, row.predicted_s * 1e3
        error = 100 * (predicted / measured - 1)
        found[row.label] = [measured, predicted, error]
        loss = "" if row.final_loss is None else f"{row.final_loss:.3f}"
        print(f"| {row.label} | {measured:.1f} | {predicted:.1f} | {error:+.1f} % | {loss} |")
    print(f"\nLoad of links:\n{table(run)}")
    sys.stdout.flush()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default="gpt,cnn,resnet,llama")
    parser.add_argument("--rates", default="25,50,100,200")
    parser.add_argument("--strategies", choices=tuple(CONTESTANTS), default="main")
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--uneven", action="store_true")
    parser.add_argument("--delay")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--keep", type=Path)
    options = parser.parse_args()
    cells = {
        f"{model} {rate}": measure(model, rate, options)
        for model in options.models.split(",")
        for rate in options.rates.split(",")
    }
    errors = [abs(row[2]) for cell in cells.values() for row in cell.values()]
    print(f"\nabsolute errors: median {median(errors):.1f} %, worst {max(errors):.1f} %")
    if options.json:
        options.json.write_text(json.dumps(cells, indent=1))


if __name__ == "__main__":
    main()
