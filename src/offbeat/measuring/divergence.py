"""Divergence: a sample of every replica's parameters, from which the report tells how far apart
replicas are. Nothing is communicated."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import torch

from offbeat.storage.flat import Flat

NUMBERS = 256  # parameters in the sample, the same on every rank
MOST = 256  # iterations kept; then every other one is dropped


class Sample:
    """The same few parameters of the model after some iterations."""

    def __init__(self, flat: Flat) -> None:
        sizes = [p.numel() for bucket in flat.buckets for p in bucket.parameters]
        parameters = [p for bucket in flat.buckets for p in bucket.parameters]
        total = sum(sizes)
        chosen = np.random.default_rng(0).integers(total, size=min(NUMBERS, total))
        self._weight = total / len(chosen)
        self._places = []
        starts = np.concatenate([[0], np.cumsum(sizes)])
        for index in np.unique(np.searchsorted(starts, chosen, side="right") - 1):
            inside = chosen[(chosen >= starts[index]) & (chosen < starts[index + 1])]
            self._places.append((parameters[index], torch.from_numpy(inside - starts[index])))
        self._every = 1
        self._seen: list[tuple[int, np.ndarray]] = []

    def take(self, iteration: int) -> None:
        """After an iteration has ended."""
        if iteration % self._every:
            return
        with torch.no_grad():
            numbers = [p.view(-1)[at.to(p.device)].double().cpu() for p, at in self._places]
        self._seen.append((iteration, torch.cat(numbers).numpy()))
        if len(self._seen) > MOST:
            self._every *= 2
            self._seen = [seen for seen in self._seen if seen[0] % self._every == 0]

    def record(self) -> dict[str, Any]:
        """JSON-ready: iterations, and for each the numbers in float64, base64; `weight` is how
        many parameters each number stands for."""
        numbers = np.array([n for _, n in self._seen], dtype="<f8")
        return {
            "iterations": [i for i, _ in self._seen],
            "weight": self._weight,
            "numbers": base64.b64encode(numbers.tobytes()).decode(),
        }
