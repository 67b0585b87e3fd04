"""What the runtime costs when there is nothing to communicate: microseconds per hook.

    python benchmarks/overhead.py [--layers 200] [--iterations 100] [--repeat 7]

A chain of tiny layers, a world of one, the plain PyTorch loop against prepared ones, alternating.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from figures import spread
from torch import nn

import offbeat
from offbeat.strategies import BSP, WFBP, PartialSync, Strategy


def profile_of(model: nn.Module) -> offbeat.Profile:
    """A made-up profile with one bucket per layer, so that nothing has to be observed."""
    buckets = [
        {"name": name, "forward_s": 1e-5, "backward_s": 1e-5, "size_bytes": layer.weight.nbytes}
        for name, layer in reversed(list(model.named_children()))
    ]
    link = {"name": "net", "latency_s": 1e-6, "bytes_per_s": 1e12}
    return offbeat.Profile.from_dict(
        {"schema": 1, "world_size": 1, "links": [link], "buckets": buckets}
    )


def contestant(strategy: Strategy | None, layers: int) -> Callable[[], None]:
    """One iteration of the loop, plain or prepared."""
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(*[nn.Linear(16, 16, bias=False) for _ in range(layers)])
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    if strategy is not None:
        model, optimizer = offbeat.prepare(model, optimizer, strategy, profile=profile_of(model))
    inputs = torch.randn(4, 16)

    def iteration() -> None:
        optimizer.zero_grad()
        model(inputs).sum().backward()
        optimizer.step()

    return iteration


def seconds(iteration: Callable[[], None], iterations: int) -> float:
    """Seconds per iteration."""
    start = time.perf_counter()
    for _ in range(iterations):
        iteration()
    return (time.perf_counter() - start) / iterations


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=200)
    parser.add_argument("--iterations", type=int, default=100)
    parser.add_argument("--repeat", type=int, default=7)
    args = parser.parse_args()
    torch.set_num_threads(1)
    loops = {
        "plain PyTorch": contestant(None, args.layers),
        "BSP": contestant(BSP(), args.layers),
        "WFBP, no fusion": contestant(WFBP(fusion="none"), args.layers),
        "PartialSync, updates in backward": contestant(PartialSync(period=5), args.layers),
    }
    times: dict[str, list[float]] = {name: [] for name in loops}
    for _ in range(args.repeat):
        for name, loop in loops.items():
            times[name].append(seconds(loop, args.iterations))
    plain = times["plain PyTorch"]
    print(f"{args.layers} layers, {args.repeat} repetitions of {args.iterations} iterations\n")
    print("| loop | ms per iteration | microseconds more per layer |\n|---|---|---|")
    for name, values in times.items():
        more = [(v - p) / args.layers * 1e6 for v, p in zip(values, plain, strict=True)]
        print(f"| {name} | {spread([v * 1e3 for v in values])} | {spread(more)} |")


if __name__ == "__main__":
    main()
