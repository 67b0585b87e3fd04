"""One rank of `front.py` and `bytes.py`: the contestants, one after another in one process."""

from __future__ import annotations

import gc
import json
import math
import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from contest import counted
from tasks import GPT, Task, digits_task, text_batches
from threads import LEAST_BYTES
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.nn.parallel import DistributedDataParallel

import offbeat
from offbeat.core.runtime.prepared import Model
from offbeat.core.strategy.parsing import parse, text_of
from offbeat.experiments.advice.selection import advise
from offbeat.profile import Bucket, Profile

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
from emulated_model import EmulatedModel  # pyright: ignore[reportMissingImports]

TASKS = {
    "digits": digits_task(800, batch=16),
    "gpt": replace(GPT, batches=partial(text_batches, batch=4)),
}
TORCH = ("ddp", "ddp fp16", "ddp powersgd", "post-local-sgd")
PERIOD, WARM = 10, 10  # iterations between averages; before PowerSGD begins
EVERY = 10  # iterations between two looks at the held-out data
SKIP = 3  # iterations of torch's contestants that do not count when time is taken
OBSERVED = 12
# Iterations before time is taken of averages every few. Connections are new, and TCP opens their
# windows by and by, the more slowly the fewer bytes each carries: 3.4 MB as fp16 between 8 hosts
# at 25 Mbit/s took 1.48 s at first, then 1.34, 1.30, 1.30, 1.28, 1.26, 1.19, 1.13, 1.10 in the end.
OPENING = 100
ADVISED, ADVISED_COUNT = "advised", 40
RACE_WARM = 25  # iterations before time is taken of a race


class Contestant:
    """A model and its optimizer as one of the contestants trains them; `used` computes."""

    def __init__(
        self, label: str, model: nn.Module, optimizer: torch.optim.Optimizer, profile: Profile
    ) -> None:
        self.model, self.optimizer = model, optimizer
        self.used: Any = model
        if label not in TORCH:
            self.used, self.optimizer = offbeat.prepare(
                model, optimizer, parse(text_in(label)), profile=profile, min_bucket_bytes=1
            )
        elif label == "post-local-sgd":
            for parameter in model.parameters():
                dist.broadcast(parameter.data, 0)
            averager = PeriodicModelAverager(period=PERIOD, warmup_steps=0)
            self.optimizer = PostLocalSGDOptimizer(optimizer, averager)
        else:
            # PowerSGD's later messages leave in no order that all ranks share, but for one bucket.
            cap_mb = 1000 if label == "ddp powersgd" else None
            self.used = ddp = DistributedDataParallel(model, bucket_cap_mb=cap_mb)
            if label == "ddp fp16":
                ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
            elif label == "ddp powersgd":
                state = powerSGD_hook.PowerSGDState(
                    None, matrix_approximation_rank=4, start_powerSGD_iter=WARM
                )
                ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)

    def close(self) -> None:
        if isinstance(self.used, Model):
            self.used.consolidate()  # pending averages land now, not beside the next contestant's
            self.used.close()


def sent_bytes() -> int:
    """What this host has sent on its links since it is there."""
    rows = [line.split(":") for line in Path("/proc/net/dev").read_text().splitlines()[2:]]
    return sum(int(rest.split()[8]) for name, rest in rows if name.strip() != "lo")


def advised(profile: Profile) -> dict[str, int]:
    """The advised strategy and those to compare it with, and the iterations that count of each."""
    texts: list[Any] = [None]
    if dist.get_rank() == 0:
        advice = advise(profile)
        first = [option for option in advice.compared if option != advice.chosen]
        texts = [[text_of(option.strategy) for option in (advice.chosen, *first)]]
    dist.broadcast_object_list(texts)
    return {f"{ADVISED} {n}: {text}": ADVISED_COUNT for n, text in enumerate(texts[0], 1)}


def text_in(label: str) -> str:
    """The strategy's text in a label."""
    return label.split(": ", 1)[1] if label.startswith(ADVISED) else label


def timed(
    label: str, layers: list[Bucket], profile: Profile, iterations: int, adam: bool
) -> dict[str, Any]:
    """When each iteration that counts ended on the slowest rank, and what a rank sent in it."""
    model = EmulatedModel(layers)
    if label in TORCH:  # with the sides that PowerSGD compresses
        for part in model.modules():
            weight = getattr(part, "weight", None)
            if isinstance(weight, nn.Parameter):
                part.weight = nn.Parameter(squarest(weight.detach()))
        first, count = SKIP + (WARM if "powersgd" in label else 0), iterations
        if label == "post-local-sgd":
            first, count = OPENING, math.ceil(iterations / PERIOD) * PERIOD
        chosen = range(first, first + count)
    else:
        plan = parse(text_in(label)).plan(profile)
        chosen = counted(plan, iterations)
        if plan.period > 1:
            later = math.ceil(OPENING / plan.period) * plan.period
            chosen = range(chosen.start + later, chosen.stop + later)
    make = torch.optim.Adam if adam else torch.optim.SGD
    mine = Contestant(label, model, make(model.parameters(), lr=0.05), profile)
    inputs = torch.full((1,), float(dist.get_rank()))
    gc.collect()  # else Python does it in the midst, which takes a fifth of a second
    dist.barrier()
    ends_s, sent = [], {}
    for step in range(chosen.stop):
        loss = mine.used(inputs)
        mine.optimizer.zero_grad()
        loss.backward()
        mine.optimizer.step()
        ends_s.append(time.perf_counter())
        if step in (chosen.start - 1, chosen.stop - 1):
            sent[step] = sent_bytes()
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, ends_s)
    mine.close()
    ends = [max(each) for each in zip(*everyone, strict=True)]
    before, last = chosen.start - 1, chosen.stop - 1
    return {
        "iteration_s": (ends[last] - ends[before]) / len(chosen),
        "sent_bytes": (sent[last] - sent[before]) / len(chosen),
        "iterations": len(chosen),
    }


def squarest(flat: Tensor) -> Tensor:
    """The same numbers as a matrix that is as square as can be."""
    rows = next(n for n in range(math.isqrt(flat.numel()), 0, -1) if flat.numel() % n == 0)
    return flat.view(rows, -1)


def learned(
    label: str,
    task: Task,
    profile: Profile,
    seed: int,
    iterations: int,
    sgd_rate: float | None = None,
) -> list[tuple[int, float]]:
    """Held-out loss of the mean of all replicas, every few iterations; with plain SGD if its rate
    is given."""
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(seed)
    model, judge = task.model(), task.model()
    batches = task.batches(seed, size, rank)
    optimizer = task.optimizer(model)
    if sgd_rate is not None:
        optimizer = torch.optim.SGD(model.parameters(), lr=sgd_rate)
    mine = Contestant(label, model, optimizer, profile)
    rates = [group["lr"] for group in mine.optimizer.param_groups]
    losses = []
    for step in range(iterations):
        for group, lr in zip(mine.optimizer.param_groups, rates, strict=True):
            group["lr"] = lr * min(1.0, (step + 1) / task.warmup)
        mine.optimizer.zero_grad()
        task.loss(mine.used, next(batches)).backward()
        mine.optimizer.step()
        if (step + 1) % EVERY == 0:
            loss = look(task, model, judge)
            if rank == 0:
                losses.append((step + 1, loss))
    mine.close()
    return losses


def raced(label: str, task: Task, profile: Profile, seed: int, iterations: int) -> dict[str, float]:
    """Seconds and bytes per iteration as fast as the processors are, after a warm-up; losses of the
    last iterations on all ranks, and of the held-out data on the mean of the replicas."""
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(seed)
    model, judge = task.model(), task.model()
    batches = task.batches(seed, size, rank)
    mine = Contestant(label, model, task.optimizer(model), profile)
    losses = []
    gc.collect()  # else Python does it in the midst, which takes a fifth of a second
    dist.barrier()
    begin_s, before = 0.0, 0
    for step in range(RACE_WARM + iterations):
        if step == RACE_WARM:
            begin_s, before = time.perf_counter(), sent_bytes()
        mine.optimizer.zero_grad()
        loss = task.loss(mine.used, next(batches))
        loss.backward()
        mine.optimizer.step()
        losses.append(loss.detach())
    took_s = torch.tensor((time.perf_counter() - begin_s) / iterations, dtype=torch.float64)
    sent = (sent_bytes() - before) / iterations
    dist.all_reduce(took_s, dist.ReduceOp.MAX)
    last = torch.stack(losses[-EVERY * 2 :]).mean()
    dist.all_reduce(last)
    held_out = look(task, model, judge)
    mine.close()
    return {
        "iteration_s": took_s.item(),
        "sent_bytes": sent,
        "loss": last.item() / size,
        "held out": held_out,
    }


def look(task: Task, model: nn.Module, judge: nn.Module) -> float:
    """Held-out loss of the mean of all replicas; changes nothing. Messages may be under way."""
    numbers = [value for value in model.state_dict().values() if value.is_floating_point()]
    flat = torch.cat([value.detach().flatten() for value in numbers])
    dist.all_reduce(flat)
    parts = (flat / dist.get_world_size()).split([value.numel() for value in numbers])
    if dist.get_rank():
        return 0.0
    state = judge.state_dict()
    names = [name for name, value in state.items() if value.is_floating_point()]
    judge.load_state_dict(
        state | {n: part.view_as(state[n]) for n, part in zip(names, parts, strict=True)}
    )
    judge.eval()
    return task.held_out_loss(judge)


def profiled(
    model: nn.Module,
    compute: Callable[[nn.Module], Tensor],
    path: Path,
    least_bytes: int,
    adam: bool = False,
) -> Profile:
    """What plain BSP measures in a few iterations."""
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    if adam:
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    model, optimizer = offbeat.prepare(
        model,
        optimizer,
        offbeat.BSP(),
        profile=path,
        observe=OBSERVED,
        min_bucket_bytes=least_bytes,
    )
    for _ in range(OBSERVED + 2):
        optimizer.zero_grad()
        compute(model).backward()
        optimizer.step()
    model.consolidate()
    model.close()
    return Profile.load(path)


def main(job: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    layers = [Bucket(**layer) for layer in job["layers"]]
    path = Path(job["folder"], "profile.json")
    found: dict[str, Any] = {}
    if job["what"] == "times":
        adam = job["adam"]
        profile = profiled(EmulatedModel(layers), lambda m: m(torch.ones(1)), path, 1, adam)
        chosen = job["contestants"] | (advised(profile) if job["advised"] else {})
        for label, iterations in chosen.items():
            found[label] = timed(label, layers, profile, iterations, adam)
    elif job["what"] == "race":
        # Else the scheduler moves two computing ranks to one processor now and then.
        os.sched_setaffinity(0, {int(os.environ["RANK"]) % (os.cpu_count() or 1)})
        task = TASKS["digits"]
        batches = task.batches(0, 1, 0)
        profile = profiled(task.model(), lambda m: task.loss(m, next(batches)), path, LEAST_BYTES)
        for label, iterations in job["contestants"].items():
            found[label] = raced(label, task, profile, job["seed"], iterations)
    else:
        dist.init_process_group("gloo")
        profile = Profile.from_dict(job["profile"])
        for label, iterations in job["contestants"].items():
            task = TASKS[job["task"]]
            rate = job["sgd"].get(label)
            found[label] = learned(label, task, profile, job["seed"], iterations, rate)
    if dist.get_rank() == 0:
        Path(job["folder"], "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
