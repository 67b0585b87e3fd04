"""A small job that is trained by real processes and in a rehearsal, from the same functions."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from oracle.quadratic import MOMENTUM, RATE, Net, Quadratic
from torch import Tensor, nn

import offbeat
from offbeat import Profile
from offbeat.profile import Bucket, Link

ITERATIONS, ROWS = 7, 4
SIZES, K, T = (5, 3, 7, 4, 6), 3, 9  # of the quadratic


class SmallNet(nn.Module):
    """Dropout, running statistics, and a layer that only some batches use, or all of them."""

    def __init__(self, *, uses_all: bool = False) -> None:
        super().__init__()
        self.uses_all = uses_all
        # A bias before a normalization has a gradient of rounding noise, which Adam enlarges.
        self.first, self.norm = nn.Linear(5, 6, bias=False), nn.BatchNorm1d(6)
        self.branch, self.head = nn.Linear(6, 6), nn.Linear(6, 3)
        self.drop = nn.Dropout(0.3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.drop(torch.tanh(self.norm(self.first(x))))
        if self.uses_all or x[0, 0] > 0:
            h = h + self.branch(h)
        return nn.functional.cross_entropy(self.head(h), y)


def make_model(strategy: str = "") -> nn.Module:
    """The model for a strategy: torch's DDP raises if a layer has no gradient."""
    return SmallNet(uses_all=strategy == "ddp").double()


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.1)


def batches(rank: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches from all three global streams, other ones on every rank."""
    for _ in range(ITERATIONS):
        x = torch.randn(ROWS, 5, dtype=torch.float64) + 0.1 * rank
        x[0, 0] += random.random() - 0.5
        yield x, torch.from_numpy(np.random.randint(0, 3, ROWS))


def profile_of(ranks: int) -> Profile:
    """A profile whose messages take longer than its compute."""
    parameters = dict(make_model().named_parameters())
    names = [["head.weight", "head.bias"], ["branch.weight", "branch.bias"]]
    names += [["norm.weight", "norm.bias"], ["first.weight"]]
    statistics = ["norm.running_mean", "norm.running_var"]
    buckets = [
        Bucket(
            own[0].partition(".")[0],
            0.01,
            0.02,
            sum(parameters[n].nbytes for n in own),
            state_bytes=2 * sum(parameters[n].nbytes for n in own),  # of AdamW
            tensors=(*own, *(statistics if "norm.weight" in own else ())),
        )
        for own in names
    ]
    return Profile(tuple(buckets), (Link("net", 0.01, 1e4),), ranks, update_s=0.004)


def train_here(strategies: Sequence[str], seed: int) -> dict[str, tuple[list[float], Tensor]]:
    """Losses and final parameters of this rank of a real job, by strategy."""
    found, rank = {}, int(os.environ["RANK"])
    profile = profile_of(int(os.environ["WORLD_SIZE"]))
    for name in strategies:
        random.seed(seed + rank)
        np.random.seed(seed + rank)
        torch.manual_seed(seed + rank)
        module = make_model(name)
        optimizer = make_optimizer(module)
        model, optimizer = offbeat.prepare(module, optimizer, name, profile=profile)
        losses = []
        for batch in batches(rank):
            optimizer.zero_grad()
            loss = model(*batch)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        model.close()
        found[name] = losses, flat(module)
    return found


def flat(module: nn.Module) -> Tensor:
    return torch.cat([t.detach().reshape(-1).double() for t in module.state_dict().values()])


def rehearse(
    strategy: str,
    *,
    ranks: int = 2,
    more_ranks: int | None = None,
    profile: Profile | None = None,
    iterations: int = ITERATIONS,
    **more: Any,
) -> tuple[list[nn.Module], offbeat.RehearsedCurve]:
    """The replicas after the rehearsal, and its curve."""
    models: list[nn.Module] = []

    def make() -> nn.Module:
        models.append(make_model(strategy))
        return models[-1]

    found = offbeat.rehearse(
        make,
        make_optimizer,
        batches,
        strategy,
        profile or profile_of(ranks),
        more_ranks,
        iterations=iterations,
        **more,
    )
    [curve] = found.values()
    return models, curve


# ---- a quadratic of which every weight is known ---------------------------------------------


def quadratic_profile(ranks: int) -> Profile:
    buckets = tuple(
        Bucket(f"b{b}", 0.01, 0.02, 8 * size, state_bytes=8 * size, tensors=(f"layers.{b}.w",))
        for b, size in enumerate(SIZES)
    )
    return Profile(buckets, (Link("net", 0.01, 2e3),), ranks, update_s=0.004)


def rehearse_quadratic(
    strategy: str,
    *,
    before: Callable[[Any, int, int], None] = lambda *_: None,
    iterations: int = T,
    **more: Any,
) -> tuple[offbeat.RehearsedCurve, list[list[np.ndarray]]]:
    """The curve, and the weights that each forward of each replica has seen.

    `before` is called with model, rank and iteration before each forward. After T iterations the
    numbers of the task repeat.
    """
    task = Quadratic(SIZES, K, T)
    start, a, c = task.numbers
    nets: list[Net] = []
    seen: list[list[np.ndarray]] = []

    def make_model() -> Net:
        nets.append(Net(start, SIZES))
        seen.append([])
        return nets[-1]

    def make_optimizer(net: torch.nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(net.parameters(), RATE, MOMENTUM, weight_decay=task.decay)

    def batches(rank: int):
        for i in range(T):
            yield (
                rank,
                torch.from_numpy(a[rank]).split(SIZES),
                torch.from_numpy(c[rank, i]).split(SIZES),
            )

    def loss(model: Any, batch: Any) -> Tensor:
        before(model, batch[0], len(seen[batch[0]]))
        value = model(*batch[1:])
        net = nets[batch[0]]
        seen[batch[0]].append(torch.cat([layer.seen for layer in net.steps]).numpy())
        return value

    curves = offbeat.rehearse(
        make_model,
        make_optimizer,
        batches,
        strategy,
        quadratic_profile(K),
        iterations=iterations,
        loss=loss,
        **more,
    )
    [curve] = curves.values()
    return curve, seen
