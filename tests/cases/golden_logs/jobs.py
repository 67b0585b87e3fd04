"""Jobs whose steps are logged: a model with one bucket per layer, trained by the runtime and by the
interpreter of plans.

Gradients are constants of iteration and rank, so that both see the same ones, and votes do not
depend on rounding.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import offbeat
from cases.member_jobs import SECRET
from offbeat import Members, Plan, Profile, Strategy
from offbeat.core.verify.interpreter import Interpreter
from offbeat.core.verify.worker import InterpretedModel, Worker
from offbeat.testing import log_steps

PROFILES = Path(__file__).parents[2] / "golden" / "profiles"
TIMEOUT_S = 40.0
EVALUATION = "evaluation"  # place after the last iteration


@dataclass(frozen=True)
class Job:
    """What is trained.

    Attributes:
        strategy: the strategy.
        iterations: number of iterations.
        profile: name of a stored profile. Its topology gives the number of ranks.
        adam: whether the optimizer is Adam; otherwise SGD with momentum.
        service: address of a membership service; empty: the ranks do not change.
    """

    strategy: Strategy
    iterations: int
    profile: str = "one_link"
    adam: bool = False
    service: str = ""


def profile_of(job: Job) -> Profile:
    return Profile.load(PROFILES / f"{job.profile}.json")


def slope(iteration: int, rank: int, bucket: int) -> float:
    """Gradient of each element of a bucket. It jumps on rank 1 in every third iteration."""
    jump = 3.0 if rank == 1 and iteration % 3 == 2 else 1.0
    return jump * (1.0 + 0.01 * (iteration + bucket))


def update_line(iteration: int, buckets: Sequence[int]) -> str:
    return f"it {iteration} update {' '.join(map(str, sorted(buckets)))}"


# ---- the runtime ----------------------------------------------------------------------------


@dataclass
class Script:
    """State of the training script of one rank.

    Attributes:
        rank: this rank.
        log: steps of the plan, calls of the optimizer, and the places of this script.
        iteration: number of the iteration.
    """

    rank: int
    log: list[str] = field(default_factory=list)
    iteration: int = 0

    def note(self, place: str) -> None:
        """Log what the script or autograd does next."""
        self.log.append(f"at {self.iteration} {place}")


class Slope(torch.autograd.Function):
    """`x + slope * sum(weight)`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, layer: Layer) -> Tensor:
        ctx.layer, ctx.size = layer, weight.shape
        return x + layer.slope * weight.sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        ctx.layer.script.note(f"backward {ctx.layer.bucket}")
        return gradient, (ctx.layer.slope * gradient).expand(ctx.size).clone(), None


class Layer(nn.Module):
    def __init__(self, script: Script, bucket: int, size: int) -> None:
        super().__init__()
        self.script, self.bucket = script, bucket
        self.weight = nn.Parameter(torch.zeros(size))

    @property
    def slope(self) -> float:
        return slope(self.script.iteration, self.script.rank, self.bucket)

    def forward(self, x: Tensor) -> Tensor:
        self.script.note(f"forward {self.bucket}")
        return Slope.apply(x, self.weight, self)


class Layers(nn.Module):
    """Layers by bucket; the last bucket runs first."""

    def __init__(self, script: Script, sizes: Sequence[int]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(script, b, size) for b, size in enumerate(sizes))

    def forward(self, x: Tensor) -> Tensor:
        for layer in reversed(self.layers):
            x = layer(x)
        return x


class _Logged(torch.optim.Optimizer):
    """Optimizer that logs the buckets that a step updates."""

    script: Script
    buckets: dict[int, int]  # by id of the parameter

    def step(self, closure: Any = None) -> Any:
        parameters = [p for group in self.param_groups for p in group["params"]]
        if all(id(p) in self.buckets for p in parameters):  # no trial on other parameters
            found = [self.buckets[id(p)] for p in parameters]
            self.script.log.append(update_line(self.script.iteration, found))
        return super().step(closure)


class LoggedSGD(_Logged, torch.optim.SGD):
    pass


class LoggedAdam(_Logged, torch.optim.Adam):
    pass


def train(job: Job) -> list[str]:
    """Train on this rank, evaluate and consolidate. Return its log."""
    profile, script = profile_of(job), Script(int(os.environ["RANK"]))
    options: dict[str, Any] = {}
    ranks = profile.topology[0] if profile.topology else 1
    elements = [bucket.size_bytes // 4 for bucket in profile.buckets]
    if profile.sharded:
        elements = [ranks * own for own in elements]
    net = Layers(script, elements)
    if profile.sharded:
        mesh = mesh_of(len(profile.topology), ranks)
        for layer in net.layers:
            fully_shard(layer, mesh=mesh["inside"])
        fully_shard(net, mesh=mesh["inside"])
        options["mesh"] = mesh["between"]
    elif ranks > 1:
        options["nodes"] = ranks
    if len(profile.links) > 1:
        options["links"] = [f"{link.name}=lo" for link in profile.links]
    if job.service:
        for name in ("LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            del os.environ[name]
        os.environ["OFFBEAT_SECRET"] = SECRET
        options["members"] = Members(job.service, first=profile.world_size)
    parameters = [layer.weight for layer in net.layers]
    optimizer = (
        LoggedAdam(parameters, lr=0.01)
        if job.adam
        else LoggedSGD(parameters, lr=0.01, momentum=0.9)
    )
    optimizer.script = script
    optimizer.buckets = {id(p): b for b, p in enumerate(parameters)}
    model, optimizer = offbeat.prepare(
        net,
        optimizer,
        job.strategy,
        profile=profile,
        timeout_s=TIMEOUT_S,
        compare_every=0,
        **options,
    )
    script.log = log_steps(model)
    for script.iteration in range(job.iterations):
        script.note("start")
        optimizer.zero_grad()
        model(torch.zeros(())).backward()
        script.note("step")
        optimizer.step()
    script.iteration += 1
    script.note(EVALUATION)
    with torch.no_grad():
        model(torch.zeros(()))
    script.note("consolidate")
    model.consolidate()
    log = list(script.log)
    model.close()
    return log


def mesh_of(replicas: int, ranks: int) -> DeviceMesh:
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    table = torch.arange(replicas * ranks).view(replicas, ranks)
    return DeviceMesh("cpu", table, mesh_dim_names=("between", "inside"))


# ---- the interpreter ------------------------------------------------------------------------


def interpret(job: Job, plan: Plan) -> list[list[str]]:
    """Return by rank the steps of an interpreted plan."""
    profile = profile_of(job)
    sizes = [bucket.size_bytes // 4 for bucket in profile.buckets]

    def gradient(rank: int, iteration: int, buckets: range, _: Any) -> Any:
        parts = [np.full(sizes[b], slope(iteration, rank, b)) for b in buckets]
        return np.concatenate(parts)

    def update(worker: Worker, buckets: range, *_: Any) -> None:
        logs[worker.rank].append(update_line(worker.cursor.planned, buckets))

    model = InterpretedModel(sizes, np.zeros(sum(sizes)), gradient, update)
    interpreter = Interpreter(plan, model, profile.world_size)
    logs = [log_steps(worker) for worker in interpreter.workers]
    interpreter.run(job.iterations)
    return logs
