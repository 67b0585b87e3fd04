"""Memory of a rank in training, as Linux counts it."""

from __future__ import annotations

import ctypes
import gc
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import offbeat
from offbeat.profile import Bucket, Link, Profile

WIDTH, LAYERS = 1024, 6  # 25 MB
THRESHOLD, M_MMAP_THRESHOLD = 1 << 18, -3  # of mallopt
ITERATIONS = 7  # two averages of a period of 3, and one that is late


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)]
    model = nn.Sequential(*layers)
    return model, torch.optim.SGD(model.parameters(), lr=1e-3)


def profile_of(model: nn.Module, ranks: int) -> Profile:
    """One bucket per layer, on a slow link."""
    names = [name for name, _ in model.named_parameters()][::-1]
    sizes = [p.nbytes for p in model.parameters()]
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


def peak_copies(strategy: str | None) -> float:
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
