"""Equations of training, as plain as papers write them: what a strategy's plan must compute.

They say what all replicas do in an iteration, without messages, moments or links. A `World` knows
how: `NumpyWorld` for the interpreter of plans, another one for real models.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from offbeat.plan import Kind, Merge, Payload, Plan

Array = NDArray[np.float64]
State = Literal["local", "averaged", "reset"]


class World(Protocol):
    """All replicas of one job."""

    def gradients(self, iteration: int) -> None:
        """Every replica's own gradients at its own weights; they are the current ones."""
        ...

    def average(self, kind: Kind, piece: Payload | None = None) -> None:
        """What replicas have of a piece (None: of everything) becomes their mean."""
        ...

    def reset(self, piece: Payload | None = None) -> None:
        """Optimizer state of a piece begins anew."""
        ...

    def step(self) -> None:
        """Every replica's optimizer, with its current gradients."""
        ...

    def add_up(self) -> None:
        """Add the current gradients to those of the open window."""
        ...

    def close(self) -> None:
        """The open window is complete; a new one opens."""
        ...

    def recall(self, merge: Merge) -> bool:
        """The gradients of the window closed last become the current ones, `mean`: divided by its
        iterations. False if there is none."""
        ...

    def end(self) -> None:
        """An iteration is over (learning rates may change)."""
        ...


Equations = Callable[[World, int], None]
"""One iteration of all replicas."""


def synchronous() -> Equations:
    """`g = mean_k(g_k)`, then every replica steps."""

    def advance(world: World, iteration: int) -> None:
        world.gradients(iteration)
        world.average("grad")
        world.step()
        world.end()

    return advance


def local_sgd(period: int, warmup: int = 0, state: State = "local") -> Equations:
    """Local steps; `w = mean_k(w_k)` after every `period`-th. The first `warmup` iterations are
    synchronous. State as in `partial`."""
    first = synchronous()

    def advance(world: World, iteration: int) -> None:
        if iteration < warmup:
            first(world, iteration)
            return
        world.gradients(iteration)
        world.step()
        if (iteration - warmup + 1) % period == 0:
            _average(world, None, state)
        world.end()

    return advance


def partial(
    sets: Sequence[Collection[Payload]],
    average: Literal["after_update", "before_update"],
    state: State = "local",
) -> Equations:
    """In iteration r the pieces in `sets[r mod H]` are averaged, the others stay local.

    after_update: `w = mean_k(w_k - rate g_k)`; before_update: `w = mean_k(w_k) - rate g_k`.
    Optimizer state stays local, is averaged too, or is reset.
    """

    def averages(world: World, iteration: int) -> None:
        for piece in sets[iteration % len(sets)]:
            _average(world, piece, state)

    def advance(world: World, iteration: int) -> None:
        world.gradients(iteration)
        if average == "before_update":
            averages(world, iteration)
        world.step()
        if average == "after_update":
            averages(world, iteration)
        world.end()

    return advance


def merged(closes: Callable[[int], bool], merge: Merge = "sum") -> Equations:
    """Gradients are added up until an iteration closes their window; when the next one closes,
    their mean over replicas is applied. Nothing steps in between."""

    def advance(world: World, iteration: int) -> None:
        world.gradients(iteration)
        world.add_up()
        if not closes(iteration):
            return
        if world.recall(merge):
            world.average("grad")
            world.step()
            world.end()
        world.close()

    return advance


def layer_sets(plan: Plan) -> list[list[Payload]]:
    """Which pieces of the parameters a plan averages in each iteration of its period."""
    return [
        [t.payload for t in plan.transfers if t.payload.buffer == "param" and phase in t.phases]
        for phase in plan.cycle
    ]


def closing(plan: Plan) -> Callable[[int], bool]:
    """Whether an iteration closes a window of the plan."""
    phases = {p for apply in plan.applies if apply.rule == "close" for p in apply.phases}
    return lambda iteration: plan.phase(iteration) in phases


def _average(world: World, piece: Payload | None, state: State) -> None:
    world.average("param", piece)
    if state == "averaged":
        world.average("state", piece)
    elif state == "reset":
        world.reset(piece)


# ---- replicas in NumPy ----------------------------------------------------------------------

Optimizer = Callable[[Array, Array, Array], None]
"""Change weights and state in place, given (weights, state, gradients)."""


def momentum(weights: Array, state: Array, gradients: Array) -> None:
    """SGD with momentum."""
    state *= 0.9
    state += gradients
    weights -= 0.1 * state


def rmsprop(weights: Array, state: Array, gradients: Array) -> None:
    """Not linear in the gradients: two small steps are not a large one."""
    state *= 0.9
    state += 0.1 * gradients * gradients
    weights -= 0.05 * gradients / (np.sqrt(state) + 1e-3)


class Task:
    """What is trained: a quadratic per element, another one on every rank in every iteration."""

    def __init__(self, sizes: Sequence[int], seed: int = 0) -> None:
        self.sizes, self.seed = list(sizes), seed
        self.offsets = [0, *np.cumsum(self.sizes).tolist()]
        self.start: Array = np.random.default_rng(seed).normal(size=self.offsets[-1])
        self._known: dict[tuple[int, int], tuple[Array, Array]] = {}

    def gradient(self, rank: int, iteration: int, buckets: range, weights: Array) -> Array:
        if (rank, iteration) not in self._known:
            rng, size = np.random.default_rng((self.seed, rank, iteration)), self.offsets[-1]
            self._known[rank, iteration] = rng.uniform(0.5, 1.5, size), rng.normal(size=size)
        slope, center = self._known[rank, iteration]
        span = self.span(buckets)
        return slope[span] * (weights - center[span])

    def span(self, buckets: range) -> slice:
        return slice(self.offsets[buckets.start], self.offsets[buckets.stop])

    def slice_of(self, piece: Payload | None) -> slice:
        if piece is None:
            return slice(0, self.offsets[-1])
        whole = self.span(piece.buckets)
        part = piece.slice_of(whole.stop - whole.start)
        return slice(whole.start + part.start, whole.start + part.stop)


class NumpyWorld:
    """Replicas as the rows of arrays."""

    def __init__(self, task: Task, ranks: int, optimizer: Optimizer = momentum) -> None:
        self.task, self.optimizer = task, optimizer
        weights = np.repeat(task.start[None], ranks, axis=0)
        self.arrays = {"param": weights, "state": np.zeros_like(weights)}
        self.arrays["grad"] = np.zeros_like(weights)
        self.open, self.opened = np.zeros_like(weights), 0
        self.closed: tuple[Array, int] | None = None

    @property
    def weights(self) -> Array:
        return self.arrays["param"]

    def gradients(self, iteration: int) -> None:
        everything = range(len(self.task.sizes))
        for rank, weights in enumerate(self.weights):
            gradient = self.task.gradient(rank, iteration, everything, weights)
            self.arrays["grad"][rank] = gradient

    def average(self, kind: Kind, piece: Payload | None = None) -> None:
        part = self.arrays[kind][:, self.task.slice_of(piece)]
        part[:] = part.mean(axis=0)

    def reset(self, piece: Payload | None = None) -> None:
        self.arrays["state"][:, self.task.slice_of(piece)] = 0

    def step(self) -> None:
        for rows in zip(*(self.arrays[k] for k in ("param", "state", "grad")), strict=True):
            self.optimizer(*rows)

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

    def end(self) -> None:
        pass
