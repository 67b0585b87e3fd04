"""What a host of `gossip_lab.py` runs: a task of `papers/slides.py`, for so many samples in all.

Where nobody waits for anybody, faster workers take more steps; the sum is the same.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from itertools import islice
from pathlib import Path

import torch
from slides_tasks import task_of
from torch import Tensor

import offbeat
from offbeat.core.start.launch_request import current_job

RANK, WORKERS = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
WARM_UP = 3  # steps that do not count


def steps_of(rank: int, steps: int, slow: list[int]) -> int:
    """So that all workers end together, after `steps` each in the mean."""
    fast = steps * WORKERS / (WORKERS - len(slow) / 2)
    return round(fast / 2 if rank in slow else fast)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--task", required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--slow", required=True)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    job, slow = current_job(), [int(rank) for rank in args.slow.split(",")]
    gossips = job.strategy in ("a2cid2", "ad-psgd")
    steps = steps_of(RANK, args.steps, slow) if gossips else args.steps

    torch.manual_seed(args.seed)
    task = task_of(args.task)
    model = task.model()
    optimizer = task.optimizer(model)
    model, optimizer = offbeat.prepare(model, optimizer)
    begin_s = time.time()
    for step, batch in enumerate(islice(task.batches(RANK, WORKERS, args.seed), steps)):
        if step == WARM_UP:
            begin_s = time.time()
        for group in optimizer.param_groups:
            group["lr"] = task.rate(step, steps)
        optimizer.zero_grad()
        task.loss(model, batch).backward()
        optimizer.step()
    end_s = time.time()
    before = [p.detach().clone() for p in model.parameters()]
    model.consolidate()
    off = _norm([p - own for p, own in zip(model.parameters(), before, strict=True)])
    found = {
        "steps": steps,
        "begin_s": begin_s,
        "end_s": end_s,
        "off": off / _norm(list(model.parameters())),
        "quality": task.quality(model.module),
    }
    if job.record_dir:
        Path(job.record_dir, f"lab{RANK}.json").write_text(json.dumps(found))


def _norm(parts: list[Tensor]) -> float:
    return sum(float(part.detach().double().square().sum()) for part in parts) ** 0.5


if __name__ == "__main__":
    main()
