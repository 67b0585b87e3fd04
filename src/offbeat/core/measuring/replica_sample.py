"""Divergence: a sample of every replica's parameters, from which the report tells how far apart
replicas are. Nothing is communicated."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from offbeat.core.buckets.flat import Flat

NUMBERS = 256  # parameters in the sample, the same on every rank
MOST = 256  # iterations kept; then every other one is dropped


class SampledElements:
    """A few elements of some tensors, the same wherever the tensors have the same sizes; `weight`
    is how many elements each of them stands for."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        sizes = [tensor.numel() for tensor in tensors]
        total, starts = sum(sizes), np.concatenate([[0], np.cumsum(sizes)])
        chosen = np.sort(np.random.default_rng(0).integers(total, size=min(NUMBERS, total)))
        self.weight = total / len(chosen)
        # Every tensor, and which of its elements are in the sample.
        self._places: list[tuple[Tensor, Tensor]] = []
        for tensor, start, stop in zip(tensors, starts, starts[1:], strict=False):
            inside = chosen[(chosen >= start) & (chosen < stop)] - start
            if len(inside):
                self._places.append((tensor, torch.from_numpy(inside).to(tensor.device)))

    def parts(self) -> list[Tensor]:
        """What they are now, by tensor."""
        with torch.no_grad():
            return [torch.take(tensor, at) for tensor, at in self._places]

    def numbers(self) -> Tensor:
        """What they are now, as float64 on the host."""
        return joined(self.parts())


def joined(parts: Sequence[Tensor]) -> Tensor:
    """As one tensor of float64 on the host."""
    return torch.cat([part.double().cpu() for part in parts])


class Sample:
    """The same few parameters of the model after some iterations."""

    def __init__(self, storages: Sequence[Tensor]) -> None:
        """Of parameters that live in these flat tensors."""
        self._chosen = SampledElements(storages)
        self._every = 1
        self._seen: list[tuple[int, list[Tensor]]] = []

    @classmethod
    def of(cls, flat: Flat) -> Sample:
        """Of the parameters of buckets, without the buffers behind them."""
        sizes = [sum(p.numel() for p in bucket.parameters) for bucket in flat.buckets]
        return cls([b.param[:n] for b, n in zip(flat.buckets, sizes, strict=True)])

    def take(self, iteration: int) -> None:
        """After an iteration has ended. Nothing waits for a device."""
        if iteration % self._every:
            return
        self._seen.append((iteration, self._chosen.parts()))
        if len(self._seen) > MOST:
            self._every *= 2
            self._seen = [seen for seen in self._seen if seen[0] % self._every == 0]

    def record(self) -> dict[str, Any]:
        """JSON-ready: iterations, and for each the numbers in float64, base64; `weight` is how
        many parameters each number stands for."""
        rows = [joined(parts) for _, parts in self._seen]
        numbers = np.array([row.numpy() for row in rows], dtype="<f8")
        return {
            "iterations": [i for i, _ in self._seen],
            "weight": self._chosen.weight,
            "numbers": base64.b64encode(numbers.tobytes()).decode(),
        }
