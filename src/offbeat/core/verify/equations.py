"""Equations of training, as plain as papers write them: what a strategy's plan must compute.

They say what all replicas do in an iteration, without messages, moments or links. A `World` knows
how: `NumpyWorld` for the interpreter of plans, another one for real models.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import count, pairwise
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from offbeat.core.derive import effects
from offbeat.core.plan import Kind, Merge, Payload, Plan

Array = NDArray[np.float64]
State = Literal["local", "averaged", "reset"]


class World(Protocol):
    """All replicas of one job."""

    @property
    def size(self) -> int:
        """How many."""
        ...

    def gradients(self, iteration: int) -> None:
        """Every replica's own gradients at its own weights; they are the current ones."""
        ...

    def average(
        self, kind: Kind, piece: Payload | None = None, weights: Sequence[float] | None = None
    ) -> None:
        """What replicas have of a piece (None: of everything) becomes their mean, a weighted one
        if there are `weights`, one per replica."""
        ...

    def reset(self, piece: Payload | None = None) -> None:
        """Optimizer state of a piece begins anew."""
        ...

    def norms(self, piece: Payload | None = None) -> Sequence[float]:
        """Of every replica: the squared norm of its current gradients of a piece."""
        ...

    def scale(self, piece: Payload | None, factors: Sequence[float]) -> None:
        """Every replica's current gradients of a piece times its factor."""
        ...

    def step(self, ranks: Collection[int] | None = None) -> None:
        """The optimizers of these replicas (None: of all), with their current gradients."""
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

    def keep(self) -> Any:
        """The weights of all replicas as they are."""
        ...

    def use(self, rank: int, piece: Payload | None, kept: Any) -> None:
        """One replica takes a piece of its weights from those that were kept."""
        ...

    def shift(self, piece: Payload, kept: Any) -> None:
        """`w += mean(kept) - kept` of a piece, with what every replica has kept."""
        ...

    def change(self, piece: Payload | None, rule: Callable[..., Any], *kept: Any) -> None:
        """`w = rule(w, *kept)` of a piece: arrays with one row per replica. The rule may change
        those that were kept."""
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


def local_sgd(
    period: int, warmup: int = 0, state: State = "local", outer: Outer | None = None
) -> Equations:
    """Local steps; `w = mean_k(w_k)` after every `period`-th, and an outer step on it if there is
    one. The first `warmup` iterations are synchronous; before outer steps an average ends them.
    State as in `partial`."""
    first = synchronous()

    def advance(world: World, iteration: int) -> None:
        if iteration < warmup:
            first(world, iteration)
            if outer is not None and iteration + 1 == warmup:
                world.average("param")
            return
        if outer is not None:
            outer.start(world)
        world.gradients(iteration)
        world.step()
        if (iteration - warmup + 1) % period == 0:
            _average(world, None, state)
            if outer is not None:
                outer(world, None)
        world.end()

    return advance


def partial(
    sets: Sequence[Collection[Payload]],
    average: Literal["after_update", "before_update"],
    state: State = "local",
    clip: Clip | None = None,
    outer: Outer | None = None,
) -> Equations:
    """In iteration r the pieces in `sets[r mod H]` are averaged, the others stay local; gradients
    may be clipped first. An outer step may come on each average.

    after_update: `w = mean_k(w_k - rate g_k)`; before_update: `w = mean_k(w_k) - rate g_k`.
    Optimizer state stays local, is averaged too, or is reset.
    """

    def averages(world: World, iteration: int) -> None:
        for piece in sets[iteration % len(sets)]:
            _average(world, piece, state)
            if outer is not None:
                outer(world, piece)

    def advance(world: World, iteration: int) -> None:
        if outer is not None:
            outer.start(world)
        world.gradients(iteration)
        if clip is not None:
            clip(world)
        if average == "before_update":
            averages(world, iteration)
        world.step()
        if average == "after_update":
            averages(world, iteration)
        world.end()

    return advance


def delayed(
    sets: Sequence[Collection[Payload]],
    delay: int,
    average: Literal["after_update", "before_update"],
    clip: Clip | None = None,
    outer: Outer | None = None,
) -> Equations:
    """In iteration r snapshots s of the pieces in `sets[r mod H]` are taken, after the local step
    or before it; after the step of iteration r + delay `w += mean_k(s_k) - s_k`. With an outer
    optimizer the sets are those of iterations delay, delay + 1, ..., and what lands is its step on
    the mean."""
    taken: list[Any] = []

    def landing(iteration: int) -> Collection[Payload]:
        first = 0 if outer is None else delay
        return sets[(iteration - first) % len(sets)] if iteration >= 0 else ()

    def advance(world: World, iteration: int) -> None:
        if outer is not None:
            outer.start(world)
        world.gradients(iteration)
        if clip is not None:
            clip(world)
        if average == "before_update":
            taken.append(world.keep())
        world.step()
        if average == "after_update":
            taken.append(world.keep())
        then = iteration - delay
        for piece in landing(then):
            if outer is None:
                world.shift(piece, taken[then])
            else:
                outer.land(world, piece, taken[then])
        world.end()

    return advance


@dataclass
class Clip:
    """`g_k` times `norm / (n_k + 1e-6)` where that is below 1; `n_k` is the norm of `g_k`. With so
    many `buckets` it is that of the iteration before; at first, of buckets 0..b for bucket b."""

    norm: float
    buckets: int | None = None

    def __post_init__(self) -> None:
        self._last: list[float] = []

    def __call__(self, world: World) -> None:
        own, before = list(world.norms(None)), self._last
        self._last = own
        if self.buckets is None:
            world.scale(None, self._factors(own))
            return
        runs = [range(b + 1) for b in range(self.buckets)]
        so_far = [list(world.norms(Payload("grad", run))) for run in runs]
        for b, known in enumerate(so_far):
            world.scale(Payload("grad", range(b, b + 1)), self._factors(before or known))

    def _factors(self, squared_norms: Sequence[float]) -> list[float]:
        return [min(1.0, self.norm / (float(n) ** 0.5 + 1e-6)) for n in squared_norms]


@dataclass
class Outer:
    """SGD with momentum on `d = w~ - mean_k(w_k)`, how far workers have come from the common
    parameters w~: `v = momentum v + d; w~ = w~ - lr (d + momentum v)`, without Nesterov
    `w~ = w~ - lr v` (Douillard et al., DiLoCo, 2023, Algorithm 1, with torch's Nesterov).

    Workers go on from w~. Where what they had is older (s_k), by `w_k = w~ + w_k - s_k`, or with
    `alpha` by `w_k = alpha w_k + (1 - alpha) w~` (Douillard et al., Streaming DiLoCo, 2025).
    """

    lr: float
    momentum: float
    nesterov: bool = True
    alpha: float | None = None

    def __post_init__(self) -> None:
        self._common: Any = None
        self._velocity: Any = None

    def start(self, world: World) -> None:
        """The common parameters are those that all replicas start with."""
        if self._common is None:
            self._common, self._velocity = world.keep(), 0 * world.keep()

    def __call__(self, world: World, piece: Payload | None) -> None:
        """After an average."""
        world.change(piece, self._stepped, self._common, self._velocity)

    def land(self, world: World, piece: Payload, kept: Any) -> None:
        """What was kept earlier was averaged meanwhile."""

        def landed(w: Array, snapshot: Array, common: Array, velocity: Array) -> Array:
            new = self._stepped(snapshot, common, velocity)
            if self.alpha is None:
                return new + w - snapshot
            return self.alpha * w + (1 - self.alpha) * new

        world.change(piece, landed, kept, self._common, self._velocity)

    def _stepped(self, w: Array, common: Array, velocity: Array) -> Array:
        d = common - w.mean(axis=0)
        velocity[...] = self.momentum * velocity + d
        common -= self.lr * (d + self.momentum * velocity if self.nesterov else velocity)
        return common


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


def federated(
    local_steps: int | Sequence[int],
    weights: Callable[[int], Sequence[float] | None],
    state: State = "local",
) -> Equations:
    """Local steps, so many in every round, of all replicas or of each; who has done its own waits
    for the others. After a round `w = sum_k(n_k w_k) / sum_k(n_k)` on all replicas with the
    weights n of so many rounds before (None: all alike). State as in `partial`."""
    rounds = count()
    each = None if isinstance(local_steps, int) else local_steps
    length = local_steps if isinstance(local_steps, int) else max(local_steps)

    def advance(world: World, iteration: int) -> None:
        world.gradients(iteration)
        place = iteration % length
        world.step(None if each is None else [k for k, steps in enumerate(each) if steps > place])
        if place + 1 == length:
            _average(world, None, state, weights(next(rounds)))
        world.end()

    return advance


def cyclic(
    stages: Sequence[range], fresh: Callable[[int, int, int], bool], skipped: int = 0
) -> Equations:
    """`w_(t+1) = w_t - rate / N * sum_i grad f_i(w^_(i,t))`, where stage j of `w^_(i,t)` is w_t if
    it is `fresh(t, i, j)`, else w_(t-1); w_-1 = w_0. The first `skipped` updates are left out."""
    last: list[Any] = []

    def advance(world: World, iteration: int) -> None:
        newest = last[0] if last else world.keep()
        world.gradients(iteration)
        world.average("grad")
        for rank in range(world.size):
            world.use(rank, None, newest)
        if iteration >= skipped:
            world.step()
        last[:] = [world.keep()]
        for rank in range(world.size):
            for stage, run in enumerate(stages):
                if not fresh(iteration + 1, rank, stage):
                    world.use(rank, Payload("param", run), newest)
        world.end()

    return advance


@dataclass(frozen=True)
class Changes:
    """How SelSync smooths, and what changes come out."""

    smooth: Literal["norm", "change"] = "norm"
    window: int = 25
    weight: float = 1.0

    def change(self, norms: Sequence[float]) -> float:
        """Smoothed relative change of the last of some norms; nan for the first."""
        if self.smooth == "norm":
            now, before = self.mean(norms), self.mean(norms[:-1])
            return abs(now - before) / before
        return self.mean([abs(b - a) / a for a, b in pairwise(norms)])

    def mean(self, values: Sequence[float]) -> float:
        """Of the last `window` values: `sum_j (1 - weight)^j v_(i-j) / sum_j (1 - weight)^j`."""
        recent = np.array(values[::-1][: self.window])
        shares = (1 - self.weight) ** np.arange(len(recent))
        return float(shares @ recent / shares.sum()) if len(recent) else float("nan")


def selective(
    changes: Changes,
    pieces: Sequence[Payload | None],
    forced: Sequence[Collection[int]],
    delta: float,
    lag: int = 0,
    aggregate: Literal["parameters", "gradients"] = "parameters",
    state: State = "local",
) -> Equations:
    """Every piece is averaged where any replica's change is at least `delta`, or unknown; with a
    `lag` by the changes of so many iterations before. In iteration r the pieces in
    `forced[r mod H]` are averaged anyway.

    parameters: `w = mean_k(w_k - rate g_k)`; gradients: `g = mean_k(g_k)`, then the step.
    """
    norms: dict[tuple[int, int], list[float]] = defaultdict(list)  # by piece and replica
    votes: list[list[bool]] = []  # by iteration and piece

    def vote(world: World) -> Iterator[bool]:
        for i, piece in enumerate(pieces):
            says = []
            for replica, norm in enumerate(world.norms(piece)):
                odd = not 0 < norm < float("inf")
                if not odd:
                    norms[i, replica].append(norm)
                says.append(odd or not changes.change(norms[i, replica]) < delta)
            yield any(says)

    def advance(world: World, iteration: int) -> None:
        world.gradients(iteration)
        votes.append(list(vote(world)))
        decisive = votes[-1 - lag] if len(votes) > lag else [True] * len(pieces)
        anyway = forced[(len(votes) - 1) % len(forced)]
        chosen = [p for i, p in enumerate(pieces) if decisive[i] or i in anyway]
        if aggregate == "gradients":
            for piece in chosen:
                world.average("grad", piece)
        world.step()
        if aggregate == "parameters":
            for piece in chosen:
                _average(world, piece, state)
        world.end()

    return advance


def layer_sets(plan: Plan, buffer: str = "param") -> list[list[Payload]]:
    """Which pieces of the parameters a plan averages in each iteration of its period."""
    return [
        [t.payload for t in plan.transfers if t.payload.buffer == buffer and phase in t.phases]
        for phase in plan.cycle
    ]


def closing(plan: Plan) -> Callable[[int], bool]:
    """Whether an iteration closes a window of the plan."""
    phases = {p for apply in plan.applies if effects.is_window_end(apply) for p in apply.phases}
    return lambda iteration: plan.phase(iteration) in phases


def _average(
    world: World,
    piece: Payload | None,
    state: State,
    weights: Sequence[float] | None = None,
) -> None:
    world.average("param", piece, weights)
    if state == "averaged":
        world.average("state", piece, weights)
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
    def size(self) -> int:
        return len(self.weights)

    @property
    def weights(self) -> Array:
        return self.arrays["param"]

    def gradients(self, iteration: int) -> None:
        everything = range(len(self.task.sizes))
        for rank, weights in enumerate(self.weights):
            gradient = self.task.gradient(rank, iteration, everything, weights)
            self.arrays["grad"][rank] = gradient

    def average(
        self, kind: Kind, piece: Payload | None = None, weights: Sequence[float] | None = None
    ) -> None:
        part = self.arrays[kind][:, self.task.slice_of(piece)]
        part[:] = part.mean(0) if weights is None else np.average(part, axis=0, weights=weights)

    def reset(self, piece: Payload | None = None) -> None:
        self.arrays["state"][:, self.task.slice_of(piece)] = 0

    def norms(self, piece: Payload | None = None) -> list[float]:
        part = self.arrays["grad"][:, self.task.slice_of(piece)]
        return [float(norm) for norm in (part**2).sum(axis=1)]

    def scale(self, piece: Payload | None, factors: Sequence[float]) -> None:
        self.arrays["grad"][:, self.task.slice_of(piece)] *= np.array(factors)[:, None]

    def step(self, ranks: Collection[int] | None = None) -> None:
        rows = zip(*(self.arrays[k] for k in ("param", "state", "grad")), strict=True)
        for rank, (weights, state, gradients) in enumerate(rows):
            if ranks is None or rank in ranks:
                self.optimizer(weights, state, gradients)

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

    def change(self, piece: Payload | None, rule: Callable[..., Array], *kept: Array) -> None:
        part = self.task.slice_of(piece)
        self.weights[:, part] = rule(*(array[:, part] for array in (self.weights, *kept)))

    def end(self) -> None:
        pass
