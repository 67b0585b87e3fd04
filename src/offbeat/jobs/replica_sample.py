"""Sample of a replica's parameters, from which a report computes the distance of replicas.

Sampling needs no communication.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from offbeat.core.buckets.flat import Flat

NUMBERS = 256  # parameters in the sample, the same on every rank
MOST = 256  # largest number of iterations in a sample; above it every second one is dropped


class SampledElements:
    """A random sample of elements of some tensors.

    The sample is the same on all ranks whose tensors have the same sizes. `weight` is the number of
    elements per sampled element.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        sizes = [tensor.numel() for tensor in tensors]
        total, starts = sum(sizes), np.concatenate([[0], np.cumsum(sizes)])
        chosen = np.sort(np.random.default_rng(0).integers(total, size=min(NUMBERS, total)))
        self.weight = total / len(chosen)
        # (tensor, indices of its sampled elements)
        self._places: list[tuple[Tensor, Tensor]] = []
        for tensor, start, stop in zip(tensors, starts, starts[1:], strict=False):
            inside = chosen[(chosen >= start) & (chosen < stop)] - start
            if len(inside):
                self._places.append((tensor, torch.from_numpy(inside).to(tensor.device)))

    def parts(self) -> list[Tensor]:
        """Return the current values, one tensor of values per tensor."""
        with torch.no_grad():
            return [torch.take(tensor, at) for tensor, at in self._places]

    def numbers(self) -> Tensor:
        """Return the current values as one float64 tensor on the host."""
        return join_parts(self.parts())


def join_parts(parts: Sequence[Tensor]) -> Tensor:
    """Return the parts as one float64 tensor on the host."""
    return torch.cat([part.double() for part in parts]).cpu()  # one wait for the device


class Sample:
    """Values of the same sampled parameters after several iterations.

    `storages` are the flat tensors of the parameters.

    Attributes:
        elements: the sampled parameters.
    """

    def __init__(self, storages: Sequence[Tensor]) -> None:
        self.elements = SampledElements(storages)
        self._every = 1
        self._seen: list[tuple[int, list[Tensor]]] = []

    @classmethod
    def of(cls, flat: Flat) -> Sample:
        """Return a sample of the parameters of all buckets, without module buffers."""
        return cls(flat.parameters_of("param", range(len(flat.buckets))))

    def take(self, iteration: int) -> None:
        """Record the values after an iteration, without waiting for the device."""
        if iteration % self._every:
            return
        self._seen.append((iteration, self.elements.parts()))
        if len(self._seen) > MOST:
            self._every *= 2
            self._seen = [seen for seen in self._seen if seen[0] % self._every == 0]

    def record(self) -> dict[str, Any]:
        """Return the sample as a dict for JSON.

        Returns:
            `iterations`, `weight` (parameters per number), and `numbers`
            ([iterations, numbers], little-endian float64, as base64).
        """
        rows = [join_parts(parts) for _, parts in self._seen]
        numbers = np.array([row.numpy() for row in rows], dtype="<f8")
        return {
            "iterations": [i for i, _ in self._seen],
            "weight": self.elements.weight,
            "numbers": base64.b64encode(numbers.tobytes()).decode(),
        }
