"""Replicas in NumPy that run equations of training, for comparison with interpreted plans."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, Literal

import numpy as np

from offbeat.core.plan import Merge, Payload
from offbeat.strategies.equations import Array, World

Optimizer = Callable[[Array, Any, Array], None]
"""Change weights and state in place, given (weights, state, gradients). The state is one array, or
a list of moments."""


def momentum(weights: Array, state: Array, gradients: Array) -> None:
    """Step of SGD with learning rate 0.1 and momentum 0.9.

    Args:
        weights: weights, changed in place.
        state: state of the optimizer, changed in place.
        gradients: gradients.
    """
    state *= 0.9
    state += gradients
    weights -= 0.1 * state


def rmsprop(weights: Array, state: Array, gradients: Array) -> None:
    """Step of RMSprop, which is not linear in the gradients: two small steps differ from a large
    one.

    Args:
        weights: weights, changed in place.
        state: state of the optimizer, changed in place.
        gradients: gradients.
    """
    state *= 0.9
    state += 0.1 * gradients * gradients
    weights -= 0.05 * gradients / (np.sqrt(state) + 1e-3)


def adam(weights: Array, state: Sequence[Array], gradients: Array) -> None:
    """Step of Adam without bias correction, with two moments.

    Args:
        weights: weights, changed in place.
        state: first and second moment, changed in place.
        gradients: gradients.
    """
    first, second = state
    first *= 0.8
    first += 0.2 * gradients
    second *= 0.9
    second += 0.1 * gradients * gradients
    weights -= 0.05 * first / (np.sqrt(second) + 1e-3)


class Task:
    """Training problem: one quadratic function per element, different in each rank and
    iteration.

    Args:
        sizes: number of elements of each bucket.
        seed: seed of the functions and of the initial weights.
    """

    def __init__(self, sizes: Sequence[int], seed: int = 0) -> None:
        self.sizes: list[int] = list(sizes)
        self.seed: int = seed
        self.offsets: list[int] = [0, *np.cumsum(self.sizes).tolist()]
        self.start: Array = np.random.default_rng(seed).normal(size=self.offsets[-1])
        self._known: dict[tuple[int, int], tuple[Array, Array]] = {}

    def gradient(self, rank: int, iteration: int, buckets: range, weights: Array) -> Array:
        """Return the gradient of some buckets.

        Args:
            rank: number of the rank.
            iteration: number of the iteration.
            buckets: run of buckets.
            weights: weights of these buckets, [elements].

        Returns:
            Gradient, [elements].
        """
        if (rank, iteration) not in self._known:
            rng, size = np.random.default_rng((self.seed, rank, iteration)), self.offsets[-1]
            self._known[rank, iteration] = rng.uniform(0.5, 1.5, size), rng.normal(size=size)
        slope, center = self._known[rank, iteration]
        span = self.span(buckets)
        return slope[span] * (weights - center[span])

    def span(self, buckets: range) -> slice:
        """Return the elements of a run of buckets as a slice of all elements.

        Args:
            buckets: run of buckets.
        """
        return slice(self.offsets[buckets.start], self.offsets[buckets.stop])

    def slice_of(self, piece: Payload | None) -> slice:
        """Return the elements of a piece as a slice of all elements.

        Args:
            piece: part of the model; None for all.
        """
        if piece is None:
            return slice(0, self.offsets[-1])
        whole = self.span(piece.buckets)
        part = piece.slice_of(whole.stop - whole.start)
        return slice(whole.start + part.start, whole.start + part.stop)


class NumpyWorld(World):
    """World of replicas that are the rows of NumPy arrays.

    Args:
        task: training problem.
        ranks: number of replicas.
        optimizer: update rule of all replicas.
        moments: names of the moments that `optimizer` receives in place of one state.
    """

    def __init__(
        self,
        task: Task,
        ranks: int,
        optimizer: Optimizer = momentum,
        moments: Sequence[str] = (),
    ) -> None:
        self.task: Task = task
        self.moments: Sequence[str] = moments
        self.optimizer: Optimizer = optimizer
        weights = np.repeat(task.start[None], ranks, axis=0)
        self.arrays: dict[str, Array] = {"param": weights, "state": np.zeros_like(weights)}
        self.arrays["grad"] = np.zeros_like(weights)
        self.arrays |= {name: np.zeros_like(weights) for name in moments}
        self.open: Array = np.zeros_like(weights)
        self.opened: int = 0
        self.closed: tuple[Array, int] | None = None

    @property
    def size(self) -> int:
        return len(self.weights)

    @property
    def weights(self) -> Array:
        """Return the weights of all replicas, [replicas, elements]."""
        return self.arrays["param"]

    def gradients(self, iteration: int) -> None:
        everything = range(len(self.task.sizes))
        for rank, weights in enumerate(self.weights):
            gradient = self.task.gradient(rank, iteration, everything, weights)
            self.arrays["grad"][rank] = gradient

    def average(
        self, kind: str, piece: Payload | None = None, weights: Sequence[float] | None = None
    ) -> None:
        part = self.arrays[kind][:, self.task.slice_of(piece)]
        part[:] = part.mean(0) if weights is None else np.average(part, axis=0, weights=weights)

    def reset(self, piece: Payload | None = None) -> None:
        for name in ("state", *self.moments):
            self.arrays[name][:, self.task.slice_of(piece)] = 0

    def norms(self, piece: Payload | None = None) -> list[float]:
        part = self.arrays["grad"][:, self.task.slice_of(piece)]
        return [float(norm) for norm in (part**2).sum(axis=1)]

    def scale(self, piece: Payload | None, factors: Sequence[float]) -> None:
        self.arrays["grad"][:, self.task.slice_of(piece)] *= np.array(factors)[:, None]

    def step(self, ranks: Collection[int] | None = None) -> None:
        rows = zip(
            *(self.arrays[k] for k in ("param", "state", "grad", *self.moments)), strict=True
        )
        for rank, (weights, state, gradients, *moments) in enumerate(rows):
            if ranks is None or rank in ranks:
                self.optimizer(weights, moments or state, gradients)

    def add_up(self) -> None:
        self.open = self.open + self.arrays["grad"]
        self.opened += 1

    def close(self) -> None:
        self.closed = self.open, self.opened
        self.open, self.opened = np.zeros_like(self.open), 0

    def recall(self, merge: Merge) -> bool:
        if self.closed is None:
            return False
        gradients, iterations = self.closed
        self.arrays["grad"] = gradients / (iterations if merge == "mean" else 1)
        return True

    def keep(self) -> Array:
        return self.weights.copy()

    def use(self, rank: int, piece: Payload | None, kept: Array) -> None:
        part = self.task.slice_of(piece)
        self.weights[rank, part] = kept[rank, part]

    def shift(self, piece: Payload, kept: Array) -> None:
        part = self.task.slice_of(piece)
        self.weights[:, part] += kept[:, part].mean(0) - kept[:, part]

    def change(
        self,
        piece: Payload | None,
        rule: Callable[..., Array],
        *kept: Array,
        kind: Literal["param", "grad"] = "param",
    ) -> None:
        part, changed = self.task.slice_of(piece), self.arrays[kind]
        changed[:, part] = rule(*(array[:, part] for array in (changed, *kept)))

    def end(self) -> None:
        pass
