"""Jobs whose nodes share a replica: models, and what their ranks do."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

import offbeat
from offbeat.core.buckets.shards import local_of, own_parameters
from offbeat.plan import Plan
from offbeat.strategies import Strategy
from offbeat.strategies.equations import NumpyWorld, Task
from support.workers import bits_of

TIMEOUT_S = 30.0
RATE, MOMENTUM = 0.05, 0.9
OBSERVED = 2  # iterations, each of which ends with an average of all parameters


def build_net() -> nn.Module:
    """Return a model whose rows do not divide by 2 or 3."""
    torch.manual_seed(1)
    net = nn.Sequential(
        nn.Linear(7, 9), nn.Tanh(), nn.Linear(9, 5), nn.Tanh(), nn.Linear(5, 1), nn.Linear(1, 3)
    )
    return net.double()


def batch_of(rank: int, iteration: int) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(1000 * rank + iteration)
    x = torch.randn(5, 7, generator=random, dtype=torch.float64)
    return x, torch.randint(0, 3, (5,), generator=random)


def shard(net: nn.Module, mesh: DeviceMesh, **options: Any) -> nn.Module:
    """Apply `fully_shard` to each layer and to the rest."""
    for layer in net:  # type: ignore[attr-defined]
        if any(True for _ in layer.parameters()):
            fully_shard(layer, mesh=mesh, **options)
    fully_shard(net, mesh=mesh, **options)
    return net


def mesh_of(replicas: int) -> DeviceMesh:
    """Return the mesh of a job, (between, inside); join the job before."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    members = int(os.environ["WORLD_SIZE"]) // replicas
    return init_device_mesh("cpu", (replicas, members), mesh_dim_names=("between", "inside"))


def train_sharded(
    strategy: str, replicas: int, iterations: int
) -> tuple[Strategy, Plan, list[list[str]], list[dict[str, Tensor]]]:
    """Return the strategy that ran, its plan, names by bucket, and the whole weights of this rank's
    replica after each iteration."""
    mesh, rank = mesh_of(replicas), int(os.environ["RANK"])
    net = shard(build_net(), mesh["inside"])
    optimizer = torch.optim.SGD(net.parameters(), RATE, MOMENTUM)
    model, optimizer = offbeat.prepare(
        net,
        optimizer,
        strategy,
        mesh=mesh["between"],
        observe=OBSERVED,
        min_bucket_bytes=1,
        timeout_s=TIMEOUT_S,
    )
    weights = []
    for iteration in range(OBSERVED + iterations):
        x, y = batch_of(rank, iteration)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        model.flush()
        weights.append({n: p.full_tensor().detach().clone() for n, p in net.named_parameters()})
    session = model._session
    names = [list(bucket.tensors) for bucket in session.profile.buckets]
    model.close()
    return session._strategy, session.plan, names, weights


def train_saved(path: str, strategy: str) -> list[str]:
    """Return hashes of this rank's weights and optimizer state after 9 iterations, twice: without a
    pause, and resumed in iteration 6 from a checkpoint."""
    mesh, rank = mesh_of(2), int(os.environ["RANK"])
    hashes = []
    for resumed in (False, True):
        net = shard(build_net(), mesh["inside"])
        optimizer = torch.optim.AdamW(net.parameters(), RATE)
        model, optimizer = offbeat.prepare(
            net,
            optimizer,
            strategy,
            mesh=mesh["between"],
            profile=f"{path}.profile",
            observe=OBSERVED,
            min_bucket_bytes=1,
            timeout_s=TIMEOUT_S,
        )
        first = offbeat.load(path, model, optimizer).iteration if resumed else 0
        for iteration in range(first, 9):
            x, y = batch_of(rank, iteration)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            if iteration == 5 and not resumed:
                offbeat.save(path, model, optimizer).wait()
        model.flush()
        kept = [*own_parameters(net).values()]
        kept += [local_of(t) for s in optimizer.state.values() for t in s.values()]
        hashes.append(bits_of(kept))
        model.close()
    return hashes


VARIANTS: dict[str, dict[str, Any]] = {
    "mixed precision": {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)},
    "whole after forward": {"reshard_after_forward": False},
    "accumulation": {},
    "clipping": {},
    "evaluation": {"reshard_after_forward": False},
    "activation checkpoints": {},
}


def train_variant(name: str, averaged_by_us: bool, mesh: DeviceMesh) -> str:
    """Return the hash of this rank's shards after local SGD of period 3,
    by offbeat or by all-reduces of this function."""
    rank = int(os.environ["RANK"])
    net = build_net().float()
    shard(net, mesh["inside"], **VARIANTS[name])
    optimizer: Any = torch.optim.AdamW(net.parameters(), RATE)
    model: Any = net
    if averaged_by_us:
        strategy = offbeat.LocalSGD(period=3)
        model, optimizer = offbeat.prepare(
            net, optimizer, strategy, mesh=mesh["between"], observe=OBSERVED, min_bucket_bytes=1
        )
    for iteration in range(OBSERVED + 5):
        optimizer.zero_grad()
        for part in range(2 if name == "accumulation" else 1):
            x, y = batch_of(rank, 10 * part + iteration)
            net.set_requires_gradient_sync(name != "accumulation" or part == 1)
            call = model
            if name == "activation checkpoints":
                call = partial(checkpoint, model, use_reentrant=False)
            nn.functional.cross_entropy(call(x.float()), y).backward()
        if name == "clipping":
            nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        optimizer.step()
        if not averaged_by_us and (iteration < OBSERVED or (iteration - OBSERVED) % 3 == 2):
            for own in own_parameters(net).values():
                average(own, mesh["between"])
        if name == "evaluation":
            with torch.no_grad():
                model(x.float())
    if averaged_by_us:
        model.close()
    return bits_of(own_parameters(net).values())


def average(own: Tensor, mesh: DeviceMesh) -> None:
    """Average a shard between nodes; some ranks hold no elements of some parameters."""
    if own.numel():
        dist.all_reduce(own, op=dist.ReduceOp.SUM, group=mesh.get_group())
        own /= mesh.size()


def train_variants(names: list[str]) -> dict[str, tuple[str, str]]:
    """Return by variant the hashes of `train_variant` with and without offbeat."""
    torch.set_num_threads(1)
    mesh = mesh_of(2)
    return {n: (train_variant(n, True, mesh), train_variant(n, False, mesh)) for n in names}


def train_all(calls: list[tuple[str, int, int]]) -> list[Any]:
    """Return the results of several trainings in one world."""
    torch.set_num_threads(1)
    return [train_sharded(*call) for call in calls]


class Replicas(Task):
    """The task of `train_sharded` for whole replicas: a replica's gradient is the mean over the
    batches of its ranks.

    Args:
        names: names of the parameters by bucket.
        members: ranks of each replica.
    """

    def __init__(self, names: list[list[str]], members: int):
        self._net, self._members = build_net(), members
        self._parameters = dict(self._net.named_parameters())
        self._names = names
        super().__init__([sum(self._parameters[n].numel() for n in own) for own in names])
        self.start = self.flat(self._parameters)

    def flat(self, tensors: dict[str, Tensor]) -> NDArray[np.float64]:
        """Return tensors by name as one vector in the order of the buckets, [elements]."""
        parts = [tensors[n].detach().reshape(-1) for own in self._names for n in own]
        return torch.cat(parts).numpy().copy()

    def gradient(
        self, rank: int, iteration: int, buckets: range, weights: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        at = 0
        for name in (n for own in self._names for n in own):
            p = self._parameters[name]
            p.data = torch.from_numpy(weights[at : at + p.numel()].copy()).view_as(p)
            p.grad, at = None, at + p.numel()
        for member in range(self._members):
            x, y = batch_of(rank * self._members + member, iteration)
            (nn.functional.cross_entropy(self._net(x), y) / self._members).backward()
        return self.flat({n: p.grad for n, p in self._parameters.items() if p.grad is not None})


def sgd(weights: Any, velocity: Any, gradients: Any) -> None:
    """Apply torch's SGD with momentum to arrays."""
    velocity[:] = MOMENTUM * velocity + gradients
    weights[:] = weights - RATE * velocity


class MeasuredReplicas(NumpyWorld):
    """Replicas after the measured iterations, from which a plan counts its iterations."""

    def __init__(self, task: Replicas, replicas: int):
        super().__init__(task, replicas, sgd)
        for iteration in range(OBSERVED):
            super().gradients(iteration)
            self.step()
            self.average("param")

    def gradients(self, iteration: int) -> None:
        super().gradients(OBSERVED + iteration)
