"""Memory of a rank in training, as Linux counts it.

PYTHONPATH=tests python -m cases.memories    # the table of docs/codecs.md, in two minutes
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import offbeat
from offbeat.core.strategy.parsing import parse
from offbeat.profile import Bucket, Link, Profile

WIDTH, LAYERS = 1024, 6  # 25 MB
THRESHOLD, M_MMAP_THRESHOLD = 1 << 18, -3  # of mallopt
ITERATIONS = 7  # two averages of a period of 3, and one that is late


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    """Six equal layers; one message of a set is a part of the model."""
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)]
    model = nn.Sequential(*layers)
    return model, torch.optim.SGD(model.parameters(), lr=1e-3)


def build_uneven() -> tuple[nn.Module, torch.optim.Optimizer]:
    """17 MB, of which one layer has a half, with biases and AdamW."""
    torch.manual_seed(0)
    sizes = (1024, 2048, 512, 1024, 512)
    layers = [nn.Linear(a, b) for a, b in pairwise(sizes)]
    layers.append(nn.Linear(512, WIDTH))
    model = nn.Sequential(*layers)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def profile_of(model: nn.Module, ranks: int) -> Profile:
    """One bucket per parameter, on a slow link."""
    names = [name for name, _ in model.named_parameters()][::-1]
    sizes = [p.nbytes for p in model.parameters()][::-1]
    buckets = [Bucket(n, 0.002, 0.004, s) for n, s in zip(names, sizes, strict=True)]
    return Profile(tuple(buckets), (Link("net", 1e-3, 1e8),), ranks, update_s=0.001)


def status(key: str) -> int:
    """Bytes of this process from /proc: `VmRSS` now, `VmHWM` at most since the last `reset`."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) << 10
    raise KeyError(key)


def reset() -> None:
    """Count the largest resident memory anew."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")


Build = Callable[[], tuple[nn.Module, torch.optim.Optimizer]]


def added_copies(strategy: str, build: Build) -> float:
    """Predicted memory that a strategy adds to model, gradients and optimizer, in copies of the
    parameters."""
    model, _ = build()
    profile, chosen = profile_of(model, 2), parse(strategy)
    memory = chosen.memory(profile, chosen.plan(profile))
    return (memory.buffers_bytes + memory.staged_bytes) / memory.parameters_bytes


def peak_copies(strategy: str | None, build: Build) -> float:
    """Largest resident memory of a rank in training, in copies of the parameters, with the model,
    its gradients and all temporary tensors. Without a strategy: that of a bare loop."""
    # Freed tensors go back to the system at once, so that the resident memory is that of live ones.
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, THRESHOLD)
    begun = status("VmRSS")
    model, optimizer = build()
    size = sum(p.nbytes for p in model.parameters())
    if strategy is not None:
        given = None if strategy.startswith("a2cid2") else profile_of(model, 2)
        model, optimizer = offbeat.prepare(model, optimizer, strategy, profile=given)
    reset()
    x = torch.ones(2, WIDTH)
    for _ in range(ITERATIONS):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    found = status("VmHWM") - begun
    if dist.is_initialized():
        dist.barrier()
    return found / size


METHODS = "wfbp local-sgd:period=3 dreamddp:period=3 dreamddp:period=3:due=delayed diloco:period=3"


def main() -> None:
    """Print the table of docs/codecs.md: copies above those of `wfbp`, and predicted ones."""
    from harness.ranks import run_ranks

    for made in (build, build_uneven):

        def copies(strategy: str, made: Build = made) -> float:
            return max(run_ranks(2, peak_copies, strategy, made))

        base = copies("wfbp")
        for strategy in METHODS.split():
            for coded in (strategy, f"{strategy}:wire=int4"):
                predicted = added_copies(coded, made)
                print(f"{made.__name__} {coded}: {copies(coded) - base:.1f} ({predicted:.1f})")
        print(f"{made.__name__} a2cid2: {copies('a2cid2:rate=4') - base:.1f}")


if __name__ == "__main__":
    main()
