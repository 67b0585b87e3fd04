"""One rank of `nodes.py`: its contestants, one after another in one process.

A contestant is "ddp", "fsdp" (shards inside nodes, no averages between them), "hsdp" (torch's own
averages of gradients between nodes), "zero-3" (shards over all ranks), or a kind of nodes and a
strategy: "flat wfbp" (a replica per rank), "replicated wfbp", "sharded dreamddp:period=10",
"torchft local-sgd:period=10" (shards inside nodes, averaged by the package torchft).

    offbeat compare --per-node 2 benchmarks/nodes_worker.py --model gpt --sharded
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import offbeat
from offbeat.core.measuring import codec_speed, links
from offbeat.core.runtime.prepared import Model
from offbeat.core.strategy.parsing import parse
from offbeat.profile import Profile

TORCH = ("ddp", "fsdp", "hsdp", "zero-3")
PACKAGE = "torchft"
OBSERVED = 12
WARM = 10  # iterations before time is taken
WIDTH = 409  # of the model whose bytes are counted: no shard of it is as large as the others

Step = Callable[[], Tensor]


def mesh_of() -> DeviceMesh:
    """The ranks by node."""
    inside = int(os.environ["LOCAL_WORLD_SIZE"])
    shape = dist.get_world_size() // inside, inside
    return init_device_mesh("cpu", shape, mesh_dim_names=("between", "inside"))


def shard(model: nn.Module, mesh: DeviceMesh) -> None:
    """Shard the blocks of a model, and the rest of it."""
    for name, block in model.named_children():
        whole = name in ("blocks", "layers") or isinstance(block, nn.Sequential)
        for part in block.children() if whole else [block]:
            if any(True for _ in part.parameters()):
                fully_shard(part, mesh=mesh)
    fully_shard(model, mesh=mesh)


class Contestant:
    """A model and its optimizer as one of the contestants trains them; `used` computes."""

    def __init__(
        self,
        label: str,
        model: nn.Module,
        optimizer: Callable[[nn.Module], torch.optim.Optimizer],
        **options: Any,
    ) -> None:
        kind, _, text = label.partition(" ")
        if kind == "zero-3":
            shard(model, init_device_mesh("cpu", (dist.get_world_size(),)))
        if kind in ("fsdp", "hsdp", "sharded", PACKAGE):
            mesh = mesh_of()
            shard(model, mesh if kind == "hsdp" else mesh["inside"])
            options["mesh"] = mesh["between"]
        self.used: Any = model
        self.optimizer: Any = optimizer(model)
        if kind == "ddp":
            self.used = DistributedDataParallel(model)
        self.package: ExitStack | None = None
        if kind == PACKAGE:
            self.package = average_with_torchft(model, self.optimizer, parse(text))
        if kind in (*TORCH, PACKAGE):
            return
        if kind == "flat" or os.environ["LOCAL_WORLD_SIZE"] == "1":
            between, *_ = json.loads(os.environ["OFFBEAT_LINKS"])
            options["links"] = [f"net={between['interface']}"]
        if kind == "flat":
            options["nodes"] = 1
        if kind == "replicated":
            options["nodes"] = "auto"
        self.used, self.optimizer = offbeat.prepare(model, self.optimizer, parse(text), **options)

    def flush(self) -> None:
        if isinstance(self.used, Model):
            self.used.flush()

    def close(self) -> None:
        if isinstance(self.used, Model):
            self.used.consolidate()  # pending averages land now, not beside the next contestant's
            self.used.close()
        if self.package is not None:
            self.package.close()


def average_with_torchft(model: nn.Module, optimizer: Any, strategy: Any) -> ExitStack:
    """Let torchft average the shards after the optimizer's steps; what is returned ends it."""
    from torchft.coordination import LighthouseServer
    from torchft.local_sgd import LocalSGD
    from torchft.manager import Manager
    from torchft.process_group import ProcessGroupGloo

    stack, seconds = ExitStack(), timedelta(seconds=60)
    rank, inside = dist.get_rank(), int(os.environ["LOCAL_WORLD_SIZE"])
    nodes, member = dist.get_world_size() // inside, rank % inside
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((os.environ["MASTER_ADDR"], 9))  # sends nothing
        host = probe.getsockname()[0]
    port = lighthouse_port = 0
    if rank == 0:
        lighthouse = LighthouseServer(bind="[::]:0", min_replicas=nodes)
        stack.callback(lighthouse.shutdown)
        lighthouse_port = urlsplit(lighthouse.address()).port
    if member == 0:
        store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)
        stack.callback(lambda: store.delete_key("unused"))  # keeps the store until then
        port = store.port
    everyone = gather_values((host, port, lighthouse_port))
    manager = Manager(
        pg=ProcessGroupGloo(timeout=seconds),
        load_state_dict=None,
        state_dict=None,
        min_replica_size=nodes,
        use_async_quorum=False,
        rank=member,
        world_size=inside,
        store_addr=everyone[rank - member][0],
        store_port=everyone[rank - member][1],
        lighthouse_addr=f"http://{everyone[0][0]}:{everyone[0][2]}",
        replica_id=f"node{rank // inside}",
        hostname=host,
        init_sync=False,
    )
    stack.callback(manager.shutdown)
    stack.callback(dist.barrier)  # no node leaves while another one averages
    stack.enter_context(LocalSGD(manager, model, optimizer, sync_every=strategy.period))
    return stack


# ---- bytes ----------------------------------------------------------------------------------


def counters() -> dict[str, int]:
    """Bytes that this host has sent so far, to other hosts and between its own ranks."""
    rows = [line.split(":") for line in Path("/proc/self/net/dev").read_text().splitlines()[2:]]
    sent = {name.strip(): int(rest.split()[8]) for name, rest in rows}
    inside = sent.pop("lo")
    return {"between": sum(sent.values()), "inside": inside}


def gather_values(value: Any) -> list[Any]:
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, value)
    return everyone


def measure_little() -> None:
    """Shorten measurements, which count no bytes here."""
    links.BUDGET_S, codec_speed.MANY = 0.3, 1 << 14
    codec_speed.REPEATS = {codec_speed.FEW: 1, codec_speed.MANY: 1}


def count_bytes(label: str, iterations: int) -> dict[str, float]:
    """Bytes per host and iteration by the kernel's counters, and those of the model."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
    size = sum(p.nbytes for p in model.parameters())
    options = {"observe": 2, "min_bucket_bytes": 1}
    mine = Contestant(label, model, lambda m: torch.optim.SGD(m.parameters(), 1e-3), **options)
    x = torch.full((2, WIDTH), 1.0 + dist.get_rank())

    def train(count: int) -> None:
        for _ in range(count):
            mine.optimizer.zero_grad()
            mine.used(x).square().mean().backward()
            mine.optimizer.step()
        mine.flush()
        dist.barrier()

    train(2 + iterations)
    before = counters()
    dist.barrier()
    train(iterations)
    after = counters()
    everyone = gather_values({name: (after[name] - before[name]) / iterations for name in after})
    mine.close()
    first = everyone[:: int(os.environ["LOCAL_WORLD_SIZE"])]
    mean = {name: sum(host[name] for host in first) / len(first) for name in after}
    return mean | {"model": size}


# ---- race -----------------------------------------------------------------------------------


def task_of(name: str) -> Any:
    from tasks import GPT, digits_task

    return {"gpt": GPT, "digits": digits_task(800, batch=16)}[name]


def measure_profile(kind: str, task: Any, path: Path) -> Path:
    """Measure the profile of a kind of nodes."""
    torch.manual_seed(0)
    batches = task.batches(0, dist.get_world_size(), dist.get_rank())
    mine = Contestant(f"{kind} local-sgd:period=2", task.model(), task.optimizer, profile=path,
                      observe=OBSERVED)  # fmt: skip
    for _ in range(OBSERVED + 2):
        mine.optimizer.zero_grad()
        task.loss(mine.used, next(batches)).backward()
        mine.optimizer.step()
    mine.close()
    return path


def run_race(
    label: str, task: Any, profiles: Mapping[str, Path], seed: int, iterations: int
) -> dict[str, Any]:
    """Ends of iterations on the slowest rank, losses as means over ranks, bytes of a host."""
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(seed)
    batches = task.batches(seed, size, rank)
    kind = label.partition(" ")[0]
    options = {"profile": profiles[kind]} if kind in profiles else {}
    mine = Contestant(label, task.model(), task.optimizer, **options)
    rates = [group["lr"] for group in mine.optimizer.param_groups]
    losses, ends_s = [], []
    gc.collect()  # else Python does it in the midst, which takes a fifth of a second
    dist.barrier()
    before = counters()
    for step in range(iterations):
        for group, lr in zip(mine.optimizer.param_groups, rates, strict=True):
            group["lr"] = lr * min(1.0, (step + 1) / task.warmup)
        mine.optimizer.zero_grad()
        loss = task.loss(mine.used, next(batches))
        loss.backward()
        mine.optimizer.step()
        losses.append(loss.detach())
        ends_s.append(time.perf_counter())
    sent = {name: (n - before[name]) / iterations for name, n in counters().items()}
    everyone = gather_values((ends_s, torch.stack(losses).tolist(), sent))
    mine.close()
    ends = [max(each) for each in zip(*(ends for ends, _, _ in everyone), strict=True)]
    means = [sum(each) / size for each in zip(*(own for _, own, _ in everyone), strict=True)]
    return {
        "ends_s": [end - ends[0] for end in ends],
        "losses": means,
        "iteration_s": (ends[-1] - ends[WARM - 1]) / (iterations - WARM),
        **everyone[0][2],
    }


# ---- overhead -------------------------------------------------------------------------------


def overhead(plain: str, ours: str, task: Any, rounds: int, steps: int) -> dict[str, Any]:
    """Seconds per iteration of both in turns, in rounds of `steps` iterations."""
    batch = next(task.batches(0, dist.get_world_size(), dist.get_rank()))
    both: dict[str, Step] = {}
    contestants = []
    for label in (plain, ours):
        torch.manual_seed(0)
        options = {} if label in TORCH else {"observe": 4}
        mine = Contestant(label, task.model(), task.optimizer, **options)
        contestants.append(mine)

        def step(mine: Contestant = mine) -> Tensor:
            mine.optimizer.zero_grad()
            loss = task.loss(mine.used, batch)
            loss.backward()
            mine.optimizer.step()
            return loss

        both[label] = step
    seconds: dict[str, list[float]] = {label: [] for label in both}
    for number in range(rounds + 1):
        for label in (plain, ours) if number % 2 else (ours, plain):
            gc.collect()
            dist.barrier()
            begin_s = time.perf_counter()
            for _ in range(steps):
                both[label]()
            took = torch.tensor((time.perf_counter() - begin_s) / steps, dtype=torch.float64)
            dist.all_reduce(took, dist.ReduceOp.MAX)
            if number:  # the first round warms up, and measures the profile
                seconds[label].append(took.item())
    for mine in contestants:
        mine.close()
    return seconds


# ---- a script for comparisons -------------------------------------------------------------------


def script(options: argparse.Namespace) -> None:
    """Train a model as any script; with `--sharded` it is divided inside nodes."""
    task, rank = task_of(options.model), int(os.environ["RANK"])
    torch.manual_seed(int(os.environ.get("OFFBEAT_SEED", 0)))
    batches = task.batches(0, int(os.environ["WORLD_SIZE"]), rank)
    label = "sharded wfbp" if options.sharded else "replicated wfbp"
    mine = Contestant(label, task.model(), task.optimizer)
    for _ in range(options.steps):
        mine.optimizer.zero_grad()
        task.loss(mine.used, next(batches)).backward()
        mine.optimizer.step()
    mine.close()


def work(job: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found: dict[str, Any] = {}
    if job["what"] == "bytes":
        measure_little()
        for label, iterations in job["contestants"].items():
            found[label] = count_bytes(label, iterations)
    elif job["what"] == "race":
        task, folder = task_of(job["task"]), Path(job["folder"])
        kinds = {label.partition(" ")[0] for label in job["contestants"]} - {*TORCH, PACKAGE}
        kinds |= {*job.get("profiles", ())}
        profiles = {
            kind: measure_profile(kind, task, folder / f"{kind}.json") for kind in sorted(kinds)
        }
        for label, iterations in job["contestants"].items():
            found[label] = run_race(label, task, profiles, job["seed"], iterations)
        if dist.get_rank() == 0:
            found["profiles"] = {k: Profile.load(path).to_dict() for k, path in profiles.items()}
    else:
        for plain, ours in job["pairs"]:
            found[ours] = overhead(plain, ours, task_of(job["task"]), job["rounds"], job["steps"])
    if dist.get_rank() == 0:
        Path(job["folder"], "found.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def main() -> None:
    if len(sys.argv) == 2:
        work(json.loads(Path(sys.argv[1]).read_text()))
        return
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=("gpt", "digits"), required=True)
    parser.add_argument("--sharded", action="store_true")
    parser.add_argument("--steps", type=int, default=32)
    if "OFFBEAT_JOB" in os.environ and not dist.is_initialized():
        dist.init_process_group("gloo")
    script(parser.parse_args())


if __name__ == "__main__":
    main()
