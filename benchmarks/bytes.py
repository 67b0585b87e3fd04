"""Fewer bytes: steps per second and loss with codecs, against messages of numbers.

    python benchmarks/bytes.py [--hosts 2] [--rates 100] [--periods 10,25] [--wires none,int4]
                               [--steps 200] [--repeat 3] [--ddp] [--codecs] [--json FILE]

The digits network of the examples with 800 hidden units (.85 million parameters, 3.4 MB) on 16
pictures per step and rank, one rank per host, as fast as the processors are. Contestants take
turns; medians over repetitions, with least and most. `--codecs` measures instead what codecs take
by themselves, on one core. Needs the lab and a quiet machine.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import torch

from offbeat.lab import Cluster
from offbeat.numerics.codecs import WIRES, codec
from offbeat.report import load, summarize
from offbeat.run.compare import Comparison, Contestant, Setup, compare
from offbeat.strategies import DDP, DreamDDP, LocalSGD
from offbeat.transport.codes.codes import code

SCRIPT = str(Path(__file__).parent.parent / "examples" / "digits.py")
ARGS = {"topk": {"fraction": 0.01}}


def contestants(periods: list[int], wires: list[str], ddp: bool) -> tuple[Contestant, ...]:
    """Local SGD, DreamDDP and delayed averages, by period and codec, perhaps after DDP."""
    found = [Contestant("ddp", DDP())] if ddp else []
    for period in periods:
        for wire in wires:
            label = f"{period} {wire}"
            found += [
                Contestant(f"local-sgd {label}", LocalSGD(period, wire=wire)),
                Contestant(f"dreamddp {label}", DreamDDP(period, wire=wire)),
            ]
            if wire != "none":
                late = DreamDDP(period, due="delayed", wire=wire)
                found.append(Contestant(f"delayed {label}", late))
    return tuple(found)


def measure(rate: str, options: argparse.Namespace) -> dict[str, list[float]]:
    """By contestant: steps per second, least and most of the repetitions, predicted, loss."""
    cluster = Cluster.from_toml(
        f'hosts = {options.hosts}\n[[links]]\nname = "net"\nrate = "{rate}mbit"\n'
    )
    script = (SCRIPT, "--steps", str(options.steps), "--width", "800", "--batch", "16")
    setup = Setup(script, cluster, pace="none")
    chosen = contestants(
        [int(p) for p in options.periods.split(",")], options.wires.split(","), options.ddp
    )
    with tempfile.TemporaryDirectory() as folder:
        outcome = compare(Comparison(setup, chosen, options.repeat), Path(folder, "run"))
        if outcome.failures:
            sys.exit("; ".join(outcome.failures))
        rows = summarize(load(Path(folder, "run")))
    print(f"\n### {options.hosts} hosts, {rate} Mbit/s\n")
    print("| strategy | steps/s | least, most | predicted | MB sent per step | loss |")
    print("|---|---|---|---|---|---|")
    found = {}
    for row in rows:
        assert row.iteration_s is not None
        spread = row.spread_s
        each = (1 / spread[1], 1 / spread[0]) if spread else (1 / row.iteration_s,) * 2
        predicted = 1 / row.predicted_s if row.predicted_s else float("nan")
        sent = (row.sent_bytes or 0) / 1e6
        loss = float("nan") if row.final_loss is None else row.final_loss
        found[row.label] = [1 / row.iteration_s, each[0], each[1], predicted, sent, loss]
        print(
            f"| {row.label} | {1 / row.iteration_s:.1f} | {each[0]:.1f}, {each[1]:.1f} | "
            f"{predicted:.1f} | {sent:.3f} | {loss:.3f} |"
        )
    sys.stdout.flush()
    return found


def codecs() -> None:
    """Gigabytes of float32 per second of one core's time, by codec; medians of 15."""
    torch.set_num_threads(1)
    print("| codec | numbers | encode GB/s | decode GB/s | both GB/s |\n|---|---|---|---|---|")
    for name, cls in WIRES.items():
        if cls.linear:
            continue
        used = codec(name, ARGS.get(name, {}))
        for size in (860_000, 10_000_000):
            x, out = torch.randn(size), torch.zeros(size)
            codes = torch.empty(used.bytes_of(size), dtype=torch.uint8)
            encode_s, decode_s = [], []
            for _ in range(15):
                given = x.clone()
                begin = time.thread_time()
                code(used).encode(given, codes)
                middle = time.thread_time()
                code(used).add(codes, out)
                encode_s.append(middle - begin)
                decode_s.append(time.thread_time() - middle)
            a, b = median(encode_s), median(decode_s)
            rates = [x.nbytes / s / 1e9 for s in (a, b, a + b)]
            print(f"| {name} | {size:,} | " + " | ".join(f"{r:.2f}" for r in rates) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--rates", default="100")
    parser.add_argument("--periods", default="10,25")
    parser.add_argument("--wires", default="none,int4")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--ddp", action="store_true")
    parser.add_argument("--codecs", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.codecs:
        codecs()
        return
    found = {rate: measure(rate, options) for rate in options.rates.split(",")}
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
