"""A small job that is trained by real processes and in a rehearsal, from the same functions."""

from __future__ import annotations

import os
import random
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
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
    made: list[nn.Module] = []

    def make() -> nn.Module:
        made.append(make_model(strategy))
        return made[-1]

    with returning(batches, lambda: made[-1].state_dict()) as (own, states):
        found = offbeat.rehearse(
            make,
            make_optimizer,
            own,
            strategy,
            profile or profile_of(ranks),
            more_ranks,
            iterations=iterations,
            **more,
        )
        [curve] = found.values()
        return [loaded(partial(make_model, strategy), state) for state in states()], curve


@contextmanager
def returning(
    batches: Callable[[int], Iterable[Any]], value: Callable[[], Any]
) -> Iterator[tuple[Callable[[int], Iterator[Any]], Callable[[], list[Any]]]]:
    """Batches for the forks of a rehearsal that leave a value of each rank at the end of its
    training, and a function that returns these values."""
    with tempfile.TemporaryDirectory() as folder:

        def own(rank: int) -> Iterator[Any]:
            try:
                yield from batches(rank)
            finally:
                torch.save(value(), f"{folder}/{rank}")

        def values() -> list[Any]:
            count = len([*Path(folder).iterdir()])
            return [torch.load(f"{folder}/{rank}", weights_only=False) for rank in range(count)]

        yield own, values


def loaded(make_model: Callable[[], nn.Module], state: dict[str, Tensor]) -> nn.Module:
    with torch.random.fork_rng():
        module = make_model()
    module.load_state_dict(state)
    return module


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
    iterations: int = T,
    **more: Any,
) -> tuple[offbeat.RehearsedCurve, list[list[np.ndarray]]]:
    """The curve, and the weights that each forward of each replica has seen. After T iterations the
    numbers of the task repeat."""
    task = Quadratic(SIZES, K, T)
    start, a, c = task.numbers
    nets: list[Net] = []
    seen: list[np.ndarray] = []

    def make_model() -> Net:
        nets.append(Net(start, SIZES))
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
        value = model(*batch[1:])
        seen.append(torch.cat([layer.seen for layer in nets[-1].steps]).numpy())
        return value

    with returning(batches, lambda: seen) as (own, values):
        curves = offbeat.rehearse(
            make_model,
            make_optimizer,
            own,
            strategy,
            quadratic_profile(K),
            iterations=iterations,
            loss=loss,
            **more,
        )
        [curve] = curves.values()
        return curve, values()
