"""Equations on torch models: the replicas of `reference/training.py` as a `World`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from itertools import accumulate
from typing import Any, Literal

import numpy as np
import torch
from torch import nn

from offbeat import Profile
from offbeat.plan import Payload
from offbeat.strategies import Strategy
from oracle.training import (
    Piece,
    Replica,
    _keys,
    _state,
    average,
    average_gradients,
    average_parameters,
    treat_state,
)


class TorchWorld:
    """Replicas of a torch model. Numbers are arrays `[replicas, elements]` of the parameters,
    bucket by bucket; running statistics follow averages alone."""

    def __init__(self, world: list[Replica], iterations: Sequence[int], profile: Profile) -> None:
        self._world, self._iterations = world, iterations
        self._names = [bucket.tensors for bucket in profile.buckets]
        sizes = [sum(p.numel() for p in self._parameters(world[0], range(b, b + 1)))
                 for b in range(len(self._names))]  # fmt: skip
        self._offsets = [0, *accumulate(sizes)]

    @property
    def size(self) -> int:
        return len(self._world)

    def gradients(self, iteration: int) -> None:
        for replica in self._world:
            replica.gradients(self._iterations[iteration])

    def average(self, kind: str, piece: Payload | None = None, weights: Any = None) -> None:
        if kind == "grad":
            assert piece is None
            assert weights is None
            average_gradients(self._world)
        elif kind == "param":
            average_parameters(self._world, self._piece(piece), weights)
        elif kind == "state":
            treat_state(self._world, self._piece(piece), "averaged", weights)
        else:
            self._average_moment(int(kind.removeprefix("state.")), self._piece(piece))

    def _average_moment(self, number: int, piece: Piece) -> None:
        """Of each parameter the tensor of its state with this number, in the order of names."""
        names = sorted({name for _, name in _keys(self._world, piece)})
        for name in names[number : number + 1]:
            keys = [key for key in _keys(self._world, piece) if key[1] == name]
            average([_state(replica, piece, keys) for replica in self._world], piece)

    def step(self, ranks: Collection[int] | None = None) -> None:
        for replica in self._world:
            if ranks is None or replica.rank in ranks:
                replica.step()

    def keep(self) -> np.ndarray[Any, Any]:
        run = range(len(self._names))
        rows = [[p.detach() for p in self._parameters(r, run)] for r in self._world]
        return np.stack([torch.cat([x.reshape(-1) for x in row]).numpy() for row in rows])

    def change(
        self,
        piece: Payload | None,
        rule: Callable[..., Any],
        *kept: Any,
        kind: Literal["param", "grad"] = "param",
    ) -> None:
        run = range(len(self._names)) if piece is None else piece.buckets
        assert piece is None or piece.parts == 1
        tensors = [self._values(replica, run, kind) for replica in self._world]
        rows = np.stack([torch.cat([x.reshape(-1) for x in row]).numpy() for row in tensors])
        part = slice(self._offsets[run.start], self._offsets[run.stop])
        for row, new in zip(tensors, rule(rows, *(k[:, part] for k in kept)), strict=True):
            values = torch.from_numpy(np.array(new)).split([x.numel() for x in row])
            for tensor, value in zip(row, values, strict=True):
                tensor.copy_(value.view(tensor.shape))

    def end(self) -> None:
        for replica in self._world:
            replica.end()

    def _values(self, replica: Replica, run: range, kind: str) -> list[torch.Tensor]:
        parameters = self._parameters(replica, run)
        if kind == "param":
            return [p.detach() for p in parameters]
        for p in parameters:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        return [p.grad for p in parameters if p.grad is not None]

    def _parameters(self, replica: Replica, run: range) -> list[nn.Parameter]:
        tensors = [replica.tensors[name] for b in run for name in self._names[b]]
        return [t for t in tensors if isinstance(t, nn.Parameter)]

    def _piece(self, piece: Payload | None) -> Piece:
        run = range(len(self._names)) if piece is None else piece.buckets
        names = tuple(n for b in run for n in self._names[b])
        return Piece(names) if piece is None else Piece(names, piece.part, piece.parts, piece.width)


def by_own_equations(
    world: list[Replica], iterations: Sequence[int], strategy: Strategy, profile: Profile
) -> None:
    """What the strategy's own equations compute; they count iterations from zero."""
    numbers = TorchWorld(world, iterations, profile)
    advance = strategy.equations(strategy.plan(profile))
    for iteration in range(len(iterations)):
        advance(numbers, iteration)  # type: ignore[arg-type]
