"""Slow, readable twins of data-parallel training: all replicas in one process, plain torch.

Every function transcribes the equations of `algorithms.md`, sections 1 and 2, and leaves the
replicas as the real ranks must be.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch
from models import Case, batch, build_model, build_optimizer, build_scheduler, loss_of
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

Names = Collection[str]


@dataclass
class Replica:
    """One worker: a plain model with a plain optimizer."""

    case: Case
    rank: int
    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: LRScheduler | None
    change: Callable[[Replica], None] | None = None  # between backward and step, e.g. clipping

    def gradients(self, iteration: int) -> None:
        """Local gradients at the local weights."""
        self.optimizer.zero_grad()
        loss_of(self.model, *batch(self.case, self.rank, iteration)).backward()

    def step(self) -> None:
        """The local update, with whatever gradients there are."""
        if self.change is not None:
            self.change(self)
        self.optimizer.step()

    def end(self) -> None:
        if self.scheduler is not None:
            self.scheduler.step()


def replicas(
    case: Case, world_size: int, change: Callable[[Replica], None] | None = None
) -> list[Replica]:
    """Replicas that start equal, as after rank 0's broadcast."""
    world = []
    for rank in range(world_size):
        model = build_model(case)
        optimizer = build_optimizer(case, model)
        scheduler = build_scheduler(case, optimizer)
        world.append(Replica(case, rank, model, optimizer, scheduler, change))
    return world


def bsp(world: list[Replica], iterations: range, broadcast_buffers: bool = False) -> None:
    """g <- mean_k(g_k), then every replica steps. DDP also takes rank 0's buffers first."""
    for t in iterations:
        if broadcast_buffers:
            _copy_buffers(world)
        for replica in world:
            replica.gradients(t)
        average_gradients(world)
        for replica in world:
            replica.step()
            replica.end()


def local_sgd(
    world: list[Replica], iterations: range, *, period: int, warmup: int = 0, state: str = "local"
) -> None:
    """Local steps; w <- mean_k(w_k) after every `period`-th. The first `warmup` are BSP."""
    bsp(world, iterations[:warmup])
    for done, t in enumerate(iterations[warmup:], start=1):
        for replica in world:
            replica.gradients(t)
            replica.step()
        if done % period == 0:
            average_parameters(world, names_of(world))
            treat_state(world, names_of(world), state)
        for replica in world:
            replica.end()


def partial_sync(
    world: list[Replica],
    iterations: range,
    *,
    sets: Sequence[Names],
    average: str,
    state: str = "local",
) -> None:
    """In iteration r the tensors in sets[r mod H] are averaged, the others stay local.

    after_update: w_l <- mean_k(w_l^k - eta * g_l^k); before_update: w_l <- mean_k(w_l) - eta * g_k.
    """
    for r, t in enumerate(iterations):
        mine = sets[r % len(sets)]
        for replica in world:
            replica.gradients(t)
        if average == "after_update":
            for replica in world:
                replica.step()
        average_parameters(world, mine)
        treat_state(world, mine, state)
        if average == "before_update":
            for replica in world:
                replica.step()
        for replica in world:
            replica.end()


def consolidate(world: list[Replica]) -> None:
    """Every floating-point tensor becomes the mean; integers are rank 0's."""
    for name, first in world[0].model.state_dict().items():
        tensors = [replica.model.state_dict()[name] for replica in world]
        _assign(tensors, _mean(tensors) if first.is_floating_point() else first)


# ---- what is exchanged ----------------------------------------------------------------------


def names_of(world: list[Replica]) -> list[str]:
    """Trainable parameters and floating-point buffers."""
    model = world[0].model
    buffers = [n for n, b in model.named_buffers() if b.is_floating_point()]
    return [n for n, p in model.named_parameters() if p.requires_grad] + buffers


def average_gradients(world: list[Replica]) -> None:
    """A replica that has no gradient counts as zero; nobody has one: nobody gets one."""
    for parameters in zip(*(replica.model.parameters() for replica in world), strict=True):
        if any(p.grad is not None for p in parameters):
            grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
            for p in parameters:
                p.grad = _mean(grads)


def average_parameters(world: list[Replica], names: Names) -> None:
    """w <- mean_k(w_k) of the named tensors."""
    for name in names:
        tensors = [_tensor(replica, name) for replica in world]
        _assign(tensors, _mean(tensors))


def treat_state(world: list[Replica], names: Names, policy: str) -> None:
    """What becomes of the optimizer state of the parameters that were averaged."""
    for name in names:
        parameters = [dict(r.model.named_parameters()).get(name) for r in world]
        if parameters[0] is None or policy == "local":
            continue
        states = [r.optimizer.state.get(p) for r, p in zip(world, parameters, strict=True)]
        if policy == "reset":
            for replica, p in zip(world, parameters, strict=True):
                replica.optimizer.state.pop(p, None)
        elif states[0]:
            for key, value in states[0].items():
                if isinstance(value, Tensor) and value.shape == parameters[0].shape:
                    tensors = [s[key] for s in states]
                    _assign(tensors, _mean(tensors))


def _copy_buffers(world: list[Replica]) -> None:
    for name, first in world[0].model.named_buffers():
        _assign([_tensor(replica, name) for replica in world], first)


def _tensor(replica: Replica, name: str) -> Tensor:
    return replica.model.state_dict()[name]


def _mean(tensors: Sequence[Tensor]) -> Tensor:
    return torch.stack([t.detach() for t in tensors]).mean(dim=0)


def _assign(tensors: Sequence[Tensor], value: Tensor) -> None:
    with torch.no_grad():
        for tensor in tensors:
            tensor.copy_(value.clone())
