"""What prepare costs a transformer of 10 M parameters where nothing is communicated.

    python benchmarks/transformer_overhead.py [--rounds 9] [--iterations 6]

A world of one, guards included. Contestants take turns, a few iterations each; ratios are of the
medians of rounds that lie next to each other. Memory is of a process of its own for each: peak
resident size, what torch itself takes included.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median, quantiles

import torch
from step import GPT
from torch import nn

import offbeat

CONTESTANTS = ["plain", "bsp", "wfbp", "local-sgd:period=10", "dreamddp:period=10"]


SIZES = {"words": 256, "width": 320, "heads": 5, "layers": 8}


def contestant(name: str) -> Callable[[], None]:
    """One iteration of the usual loop."""
    torch.manual_seed(0)
    model: nn.Module = GPT(**SIZES)
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    if name != "plain":
        model, optimizer = offbeat.prepare(model, optimizer, name, observe=3)
    x = torch.randint(0, 256, (4, 64))

    def iterate() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x).flatten(0, 1), x.flatten()).backward()
        optimizer.step()

    for _ in range(5):
        iterate()
    return iterate


def memory(name: str) -> float:
    """Peak MB of a few iterations, in this process."""
    iterate = contestant(name)
    for _ in range(3):
        iterate()
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--iterations", type=int, default=6)
    parser.add_argument("--memory", choices=CONTESTANTS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.memory:
        print(json.dumps(memory(args.memory)))
        return
    print(f"{sum(p.numel() for p in GPT(**SIZES).parameters()) / 1e6:.1f} M parameters")
    loops = {name: contestant(name) for name in CONTESTANTS}
    times: dict[str, list[float]] = {name: [] for name in loops}
    for _ in range(args.rounds):
        for name, iterate in loops.items():
            each = []
            for _ in range(args.iterations):
                begun = time.perf_counter()
                iterate()
                each.append(time.perf_counter() - begun)
            times[name].append(median(each))
    print("| loop | ms per iteration | of plain | peak MB |\n|---|---|---|---|")
    for name, seconds in times.items():
        ratios = [s / p for s, p in zip(seconds, times["plain"], strict=True)]
        low, middle, high = quantiles(ratios, n=4)
        ran = subprocess.run(
            [sys.executable, __file__, "--memory", name], capture_output=True, check=True
        )
        print(
            f"| {name} | {1000 * median(seconds):.1f} | {middle:.3f} [{low:.3f}, {high:.3f}] | "
            f"{json.loads(ran.stdout):.0f} |"
        )


if __name__ == "__main__":
    main()
