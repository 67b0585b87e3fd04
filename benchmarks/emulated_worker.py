"""One rank of a contest (`contest.py`): the contestants, one after another in one process.

Each gets a fresh model and `offbeat.prepare`. Before them plain BSP is observed for a few
iterations; all plan from the profile measured there. Rank 0 writes when every iteration ended.
"""

import gc
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from contest import counted

import offbeat
from offbeat.profile import Bucket
from offbeat.strategies import Strategy, create

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
from emulated_model import EmulatedModel  # pyright: ignore[reportMissingImports]

OBSERVED = 5


def main(job: dict[str, Any]) -> None:
    """`job`: folder, layers as buckets, contestants with the iterations to measure."""
    torch.manual_seed(0)
    layers = [Bucket(**layer) for layer in job["layers"]]
    path = Path(job["folder"], "profile.json")
    train(layers, offbeat.BSP(), path, OBSERVED)
    profile = offbeat.Profile.load(path)
    ends_s: dict[str, list[float]] = {}
    for contestant in job["contestants"]:
        strategy = create(contestant["strategy"], contestant["settings"])
        iterations = counted(strategy.plan(profile), contestant["iterations"]).stop
        ends_s[contestant["label"]] = train(layers, strategy, profile, iterations)
        if dist.get_rank() == 0:
            print(f"{contestant['label']} is done", flush=True)
    if dist.get_rank() == 0:
        Path(job["folder"], "ends.json").write_text(json.dumps(ends_s))


def train(
    layers: Sequence[Bucket],
    strategy: Strategy,
    profile: offbeat.Profile | Path,
    iterations: int,
) -> list[float]:
    """When each iteration ended on the slowest rank, in seconds of the machine's clock."""
    model = EmulatedModel(layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    model, optimizer = offbeat.prepare(
        model, optimizer, strategy, profile=profile, observe=OBSERVED, min_bucket_bytes=1
    )
    inputs = torch.full((1,), float(dist.get_rank()))
    gc.collect()  # else Python does it in the midst, which takes a fifth of a second
    dist.barrier()
    ends_s = []
    for _ in range(iterations):
        loss = model(inputs)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ends_s.append(time.perf_counter())
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, ends_s)
    model.consolidate()  # delayed gradients land now, not beside the next contestant's
    model.close()
    return [max(ends) for ends in zip(*everyone, strict=True)]


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
