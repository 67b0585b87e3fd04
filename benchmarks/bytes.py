"""Fewer bytes: steps per second and loss with codecs, against messages of numbers.

    python benchmarks/bytes.py [--rates 100,1000,none] [--periods 10,25] [--wires none,int4,sign]
                               [--steps 200] [--seeds 5] [--only ddp] [--codecs] [--json FILE]

The digits network of the examples with 800 hidden units (.85 million parameters, 3.4 MB) on 16
pictures per step and rank, two hosts, as fast as the processors are, each rank with all its threads
on one of its own; "none" is the loopback.
"of alone" is the share of what a rank does without any averages, in the same launch.
Torch's own: DDP, its hooks for fp16 and PowerSGD, PostLocalSGD. Per seed one launch in which all
contestants take turns, every second launch the other way round; 25 steps of warm-up. Medians, with
least and most. `--codecs` measures instead what codecs take by themselves, on one core, and what
share of a step that is. Needs the lab and a quiet machine.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from front import launched, spread
from front_worker import TORCH
from threads import remembered
from torch import nn

from offbeat import sim
from offbeat.core.codecs import WIRES, codec
from offbeat.core.codecs.tensor_codecs import code
from offbeat.core.strategy.parsing import parse
from offbeat.lab import Cluster, Lab
from offbeat.lab.lab import NoLab
from offbeat.strategies import DDP

HOSTS = 2
ALONE = "local-sgd:period=10000"  # no averages: what the processors can do
LATER = "dreamddp:due=delayed:delay=6:"  # a message may take as long as six iterations
HALF = f"{LATER}gain=0.5:"  # corrects half of each difference
ARGS = {"topk": {"fraction": 0.01}}


def contestants(periods: list[str], wires: list[str]) -> Iterator[str]:
    """Torch's own; local SGD, DreamDDP and delayed averages by period and codec."""
    yield ALONE
    yield from TORCH
    for period in periods:
        for wire in wires:
            for name in ("local-sgd:", "dreamddp:", "dreamddp:due=delayed:", LATER, HALF):
                yield f"{name}period={period}:wire={wire}"


def race(rate: str, seed: int, steps: int, chosen: list[str]) -> dict[str, Any]:
    """By contestant: seconds and bytes per iteration, losses, predicted seconds if we predict."""
    text = f'hosts = {HOSTS}\n[[links]]\nname = "net"\nrate = "{rate}mbit"\n'
    lab = NoLab(Cluster.simple(HOSTS)) if rate == "none" else Lab(Cluster.from_toml(text), "bytes")
    job = {"what": "race", "seed": seed, "contestants": dict.fromkeys(chosen, steps)}
    found, profile = launched(lab, job)
    assert profile is not None
    for label, row in found.items():
        if label == "ddp" or label not in TORCH:
            strategy = DDP() if label == "ddp" else parse(label)
            row["predicted_s"] = sim.predict(strategy, profile).iteration_s
    return found


def table(rate: str, runs: list[dict[str, Any]], chosen: list[str]) -> None:
    """Markdown of one rate, over the seeds."""
    print(f"\n### {HOSTS} hosts, {rate} Mbit/s, {len(runs)} seeds\n")
    print("| strategy | steps/s | of alone | predicted | KB sent per step | loss | held-out loss |")
    print("|---|---|---|---|---|---|---|")
    for label in chosen:
        rows = [run[label] for run in runs if label in run]
        if not rows:
            continue  # a contestant of later launches
        cells = [label, spread([1 / row["iteration_s"] for row in rows], 1)]
        pairs = [(run[ALONE], run[label]) for run in runs if label in run]
        shares = [alone["iteration_s"] / row["iteration_s"] for alone, row in pairs]
        cells.append(spread(shares, 2))
        off = [row["predicted_s"] / row["iteration_s"] - 1 for row in rows if "predicted_s" in row]
        cells.append(f"{median(off):+.1%}" if off else "")
        cells.append(f"{median(row['sent_bytes'] for row in rows) / 1e3:.0f}")
        cells += [spread([row[what] for row in rows], 3) for what in ("loss", "held out")]
        print("|", " | ".join(cells), "|", flush=True)


def codecs(device: str) -> None:
    """Gigabytes of float32 per second of one core's time, or of a GPU's, by codec; medians of
    15."""
    torch.set_num_threads(1)
    print("| codec | numbers | encode GB/s | decode GB/s | both GB/s |\n|---|---|---|---|---|")
    for name, cls in WIRES.items():
        if cls.linear:
            continue
        for size in (860_000, 10_000_000):
            a, b = (median(times) for times in coded(name, size, 15, device))
            rates = [4 * size / s / 1e9 for s in (a, b, a + b)]
            print(f"| {name} | {size:,} | " + " | ".join(f"{r:.2f}" for r in rates) + " |")


def coded(
    name: str, size: int, repeats: int, device: str = "cpu"
) -> tuple[list[float], list[float]]:
    """Seconds of one core, or of a GPU, to encode, and to decode, so many numbers."""
    used = codec(name, ARGS.get(name, {}))
    x, out = torch.randn(size, device=device), torch.zeros(size, device=device)
    codes = torch.empty(used.bytes_of(size), dtype=torch.uint8, device=device)
    encode_s, decode_s = [], []

    def now() -> float:
        if device == "cpu":
            return time.thread_time()
        torch.cuda.synchronize()
        return time.perf_counter()

    for _ in range(repeats):
        given = x.clone()
        begin = now()
        code(used).encode(given, codes)
        middle = now()
        code(used).add(codes, out)
        encode_s.append(middle - begin)
        decode_s.append(now() - middle)
    return encode_s, decode_s


def shares() -> None:
    """Encoding and decoding of all parameters, as shares of a step of a model of so many."""
    torch.set_num_threads(1)
    print("| parameters | a step | codec | once per step | every 10 |\n|---|---|---|---|---|")
    for width, layers in ((576, 2), (768, 14)):
        layer = nn.TransformerEncoderLayer(width, 8, 4 * width, 0.0, batch_first=True)
        model = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        optimizer = torch.optim.AdamW(model.parameters())
        x, steps_s = torch.randn(4, 128, width), []
        for _ in range(5):
            begin = time.thread_time()
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            steps_s.append(time.thread_time() - begin)
        step_s, size = median(steps_s), sum(p.numel() for p in model.parameters())
        del model, optimizer
        for name, cls in WIRES.items():
            if cls.linear:
                continue
            encode_s, decode_s = (median(times) for times in coded(name, size, 3))
            whole_s = encode_s + HOSTS * decode_s
            cells = f"{whole_s / step_s:.1%} | {whole_s / step_s / 10:.2%}"
            print(f"| {size / 1e6:.0f} M | {step_s * 1e3:.0f} ms | {name} | {cells} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rates", default="100,1000,none", help="Mbit/s")
    parser.add_argument("--periods", default="10,25")
    parser.add_argument("--wires", default="none,int4,sign")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="of --codecs")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--only", help="contestants whose label contains this")
    parser.add_argument("--codecs", action="store_true")
    parser.add_argument("--json", type=Path, default=Path("bytes.json"))
    options = parser.parse_args()
    if options.codecs:
        codecs(options.device)
        if options.device == "cpu":
            shares()
        return
    every = contestants(options.periods.split(","), options.wires.split(","))
    chosen = [label for label in every if label == ALONE or (options.only or "") in label]
    for rate in options.rates.split(","):
        runs = []
        for seed in range(options.seeds):
            turns = chosen[:: -1 if seed % 2 else 1]
            run = partial(race, rate, seed, options.steps, turns)
            runs.append(remembered(options.json, f"{rate} Mbit/s, seed {seed}", run))
        table(rate, runs, chosen)


if __name__ == "__main__":
    main()
