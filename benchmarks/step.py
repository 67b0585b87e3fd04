"""What an iteration costs beyond a plain loop, between two synchronizations.

    python benchmarks/step.py [--cases mb,tiny,gpt] [--rounds 15] [--seconds 1] [--turn 8]
    python benchmarks/step.py --device cuda    # time of the clock, with a wait for the device
    torchrun --nproc-per-node 2 benchmarks/step.py ...

A world of one, one thread. Processor time of the process, so that other load on the machine does
not count. Under torchrun so many ranks on the loopback, and time is the clock's. Contestants take
turns of `--turn` iterations. In the first iteration of a turn, the code of a contestant is not in
the caches of the processor, because the tensors of the others are: with `--turn 1`, a function of
Python takes 5 to 50 us. Ratios are of the medians of rounds, and of the fastest quarter of all
iterations, which other load disturbs least. A second plain loop shows the noise.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from statistics import median, quantiles

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore

import offbeat

LOOPS = [
    "plain",
    "plain again",
    "DDP, no_sync",
    "DDP",
    "local-sgd:period=100000",
    "dreamddp:period=10",
    "dreamddp:period=1",
]


class GPT(nn.Module):
    """Tokens in, logits out; by default 49 M parameters."""

    def __init__(self, words: int = 512, width: int = 576, heads: int = 8, layers: int = 12):
        super().__init__()
        self.embed = nn.Embedding(words, width)
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, 0.0, batch_first=True)
        self.body = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, words)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.embed(x)))


def chain(count: int, width: int) -> nn.Module:
    """So many layers without biases, which keep the size of what goes through them."""
    layers = [nn.Linear(width, width, bias=False) for _ in range(count)]
    for layer in layers:
        nn.init.orthogonal_(layer.weight)
    return nn.Sequential(*layers)


def mb() -> tuple[nn.Module, torch.Tensor]:
    return chain(12, 512), torch.randn(32, 512)


def tiny() -> tuple[nn.Module, torch.Tensor]:
    return chain(1000, 16), torch.randn(4, 16)


def gpt() -> tuple[nn.Module, torch.Tensor]:
    return GPT(), torch.randint(0, 512, (1, 64))


CASES = {"mb": ("12 x 1 MB", mb), "tiny": ("1,000 of 1 KB", tiny), "gpt": ("GPT of 49 M", gpt)}


def contestant(case: str, name: str, warm: int, device: str) -> Callable[[], float]:
    """Seconds of one iteration of the usual loop: of the processor on a host, of the clock on a
    GPU."""
    torch.manual_seed(0)
    model, x = CASES[case][1]()
    model, x = model.to(device), x.to(device)
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=1e-5, momentum=0.9)
    calm = None
    alone = dist.get_world_size() == 1 and device == "cpu"
    clock = time.process_time if alone else time.perf_counter
    finish = torch.cuda.synchronize if device == "cuda" else lambda: None
    if name.startswith("DDP"):
        model = nn.parallel.DistributedDataParallel(model)
        calm = model.no_sync if "no_sync" in name else None
    elif not name.startswith("plain"):
        model, optimizer = offbeat.prepare(model, optimizer, name, observe=3)

    def iterate() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    def timed() -> float:
        finish()
        begun = clock()
        if calm is None:
            iterate()
        else:
            with calm():
                iterate()
        finish()
        return clock() - begun

    for _ in range(warm):
        timed()
    return timed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--loops", default=";".join(LOOPS))
    parser.add_argument("--warm", type=int, default=12, help="iterations before")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=0.5, help="of a contestant in a round")
    parser.add_argument("--turn", type=int, default=8, help="iterations of a contestant in a row")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        backend = "gloo" if args.device == "cpu" else "nccl"
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    say = print if dist.get_rank() == 0 else lambda *_, **__: None
    say("| model | loop | ms | of plain | fastest quarter |\n|---|---|---|---|---|")
    for case in args.cases.split(","):
        loops = {
            name: contestant(case, name, args.warm, args.device) for name in args.loops.split(";")
        }
        counts = torch.tensor([args.seconds / median(loops["plain"]() for _ in range(3))])
        counts = counts.to(args.device)
        dist.all_reduce(counts, dist.ReduceOp.MIN)
        turns = max(2, round(counts.item() / args.turn))
        count = turns * args.turn
        times: dict[str, list[float]] = {name: [] for name in loops}
        for _ in range(args.rounds * turns):
            for name, timed in loops.items():
                times[name] += [timed() for _ in range(args.turn)]
        rounds = {name: in_rounds(seconds, count) for name, seconds in times.items()}
        for name, seconds in times.items():
            ratios = [s / p for s, p in zip(rounds[name], rounds["plain"], strict=True)]
            low, middle, high = quantiles(ratios, n=4)
            fastest = quantiles(seconds, n=4)[0] / quantiles(times["plain"], n=4)[0]
            say(
                f"| {CASES[case][0]} | {name} | {1000 * median(seconds):.2f} | "
                f"{middle:.3f} [{low:.3f}, {high:.3f}] | {fastest:.3f} |",
                flush=True,
            )


def in_rounds(seconds: list[float], count: int) -> list[float]:
    """The median of every so many iterations."""
    return [median(seconds[i : i + count]) for i in range(0, len(seconds), count)]


if __name__ == "__main__":
    main()
