"""Equations of training algorithms, as papers state them: the result that a plan must compute.

Equations state the arithmetic of all replicas in one iteration, without messages, moments and
links. They run on a `World`, such as the replicas in NumPy of `offbeat.testing.replicas`.
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
from offbeat.core.plan import Merge, Payload, Plan

Array = NDArray[np.float64]
State = Literal["local", "averaged", "reset"]


class World(Protocol):
    """All replicas of one job. Optional `piece` arguments select a part of the model; None
    selects all."""

    @property
    def size(self) -> int:
        """Return the number of replicas."""
        ...

    def gradients(self, iteration: int) -> None:
        """Compute the gradients of each replica at its own weights; they become the current
        gradients.

        Args:
            iteration: iteration, which selects the batch.
        """
        ...

    def average(
        self, kind: str, piece: Payload | None = None, weights: Sequence[float] | None = None
    ) -> None:
        """Replace the values of all replicas by their mean.

        Args:
            kind: "grad", "param", "state", or the name of a moment, such as "state.0".
            piece: part of the model.
            weights: one weight per replica for a weighted mean; None for equal weights.
        """
        ...

    def reset(self, piece: Payload | None = None) -> None:
        """Reset the optimizer's state to its initial values.

        Args:
            piece: part of the model; None for all.
        """
        ...

    def norms(self, piece: Payload | None = None) -> Sequence[float]:
        """Return the squared norm of the current gradients, for each replica.

        Args:
            piece: part of the model; None for all.
        """
        ...

    def scale(self, piece: Payload | None, factors: Sequence[float]) -> None:
        """Multiply the current gradients by one factor per replica.

        Args:
            piece: part of the model; None for all.
            factors: factor of each replica.
        """
        ...

    def step(self, ranks: Collection[int] | None = None) -> None:
        """Step the optimizers with the current gradients.

        Args:
            ranks: replicas to step; None for all.
        """
        ...

    def add_up(self) -> None:
        """Add the current gradients to those of the open window."""
        ...

    def close(self) -> None:
        """Close the open window and open a new one."""
        ...

    def recall(self, merge: Merge) -> bool:
        """Make the gradients of the window that was closed last the current gradients.

        Args:
            merge: "sum" for the sum over the iterations of the window, "mean" for their mean.

        Returns:
            False if no window has been closed, in which case nothing changes.
        """
        ...

    def keep(self) -> Any:
        """Return a copy of the weights of all replicas."""
        ...

    def use(self, rank: int, piece: Payload | None, kept: Any) -> None:
        """Replace the weights of one replica by those of a copy.

        Args:
            rank: number of the replica.
            piece: part of the model; None for all.
            kept: copy of the weights of all replicas, a result of `keep`.
        """
        ...

    def shift(self, piece: Payload, kept: Any) -> None:
        """Add `mean(kept) - kept` to the weights.

        Args:
            piece: part of the model.
            kept: copy of the weights of all replicas, a result of `keep`.
        """
        ...

    def change(
        self,
        piece: Payload | None,
        rule: Callable[..., Any],
        *kept: Any,
        kind: Literal["param", "grad"] = "param",
    ) -> None:
        """Replace a piece of the weights or of the current gradients by `rule(w, *kept)`.

        Args:
            piece: part of the model.
            rule: function of arrays with one row per replica. It may change the arrays in
                `kept`.
            kept: copies of the weights of all replicas.
            kind: values to replace.
        """
        ...

    def end(self) -> None:
        """End an iteration; learning rate schedules advance here."""
        ...


Equations = Callable[[World, int], None]
"""One iteration of all replicas."""


def synchronous() -> Equations:
    """Return the equations of synchronous SGD: `g = mean_k(g_k)`, then each replica steps."""

    def advance(world: World, iteration: int) -> None:
        world.gradients(iteration)
        world.average("grad")
        world.step()
        world.end()

    return advance


def local_sgd(
    period: int, warmup: int = 0, state: State = "local", outer: Outer | None = None
) -> Equations:
    """Return the equations of local SGD: local steps, then `w = mean_k(w_k)` after every
    `period`-th.

    Args:
        period: iterations between two averages.
        warmup: number of synchronous iterations at the start. With `outer`, an average ends
            them.
        state: treatment of the optimizer's state at an average: "local", "averaged" or "reset".
        outer: optimizer that steps on each average; None for none.
    """
    first = synchronous()

    def advance(world: World, iteration: int) -> None:
        if iteration < warmup:
            first(world, iteration)
            if outer is not None and iteration + 1 == warmup:
                world.average("param")
            return
        _compute_gradients(world, iteration, None, outer)
        world.step()
        if (iteration - warmup + 1) % period == 0:
            _average_piece(world, None, state)
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
    """Return the equations of partial averaging: the pieces in `sets[r mod H]` in iteration r.

    The other pieces stay local. This is Algorithm 1 of DreamDDP (Tang et al., 2025), whose line
    numbers are those in the code; `average="before_update"` moves lines 5-7 before line 4.

    Args:
        sets: pieces to average in each iteration of a period of H iterations.
        average: "after_update" for `w = mean_k(w_k - rate g_k)`, "before_update" for `w =
            mean_k(w_k) - rate g_k`.
        state: treatment of the optimizer's state at an average: "local", "averaged" or "reset".
        clip: clipping of the gradients before the step; None for none.
        outer: optimizer that steps on each average; None for none.
    """

    def synchronize(world: World, iteration: int) -> None:
        for piece in sets[iteration % len(sets)]:  # 5-6
            _average_piece(world, piece, state)  # 7
            if outer is not None:
                outer(world, piece)

    def advance(world: World, iteration: int) -> None:  # 1-2: iteration r of all workers
        _compute_gradients(world, iteration, clip, outer)  # 3
        if average == "before_update":
            synchronize(world, iteration)
        world.step()  # 4; 8-9: the other layers keep their local update
        if average == "after_update":
            synchronize(world, iteration)
        world.end()

    return advance


def delayed(
    sets: Sequence[Collection[Payload]],
    delay: int,
    average: Literal["after_update", "before_update"],
    clip: Clip | None = None,
    outer: Outer | None = None,
    gain: float = 1.0,
) -> Equations:
    """Return the equations of delayed averaging.

    In iteration r, snapshots s of the pieces in `sets[r mod H]` are taken. After the step of
    iteration r + delay, `w += gain (mean_k(s_k) - s_k)`.

    Args:
        sets: pieces to average in each iteration of a period of H iterations. With `outer`, the
            first set belongs to iteration `delay`.
        delay: iterations from a snapshot to its average.
        average: "after_update" for snapshots after the local step, "before_update" for
            snapshots before it.
        clip: clipping of the gradients before the step; None for none.
        outer: optimizer that steps on the average of the snapshots; None for none.
        gain: share of the difference that is corrected; counts without `outer`.
    """
    taken: list[Any] = []

    def correct(w: Array, snapshot: Array) -> Array:
        return w + gain * (snapshot.mean(0) - snapshot)

    def averaged_pieces(iteration: int) -> Collection[Payload]:
        first = 0 if outer is None else delay
        return sets[(iteration - first) % len(sets)] if iteration >= 0 else ()

    def advance(world: World, iteration: int) -> None:
        _compute_gradients(world, iteration, clip, outer)
        if average == "before_update":
            taken.append(world.keep())
        world.step()
        if average == "after_update":
            taken.append(world.keep())
        then = iteration - delay
        for piece in averaged_pieces(then):
            if outer is None and gain < 1:
                world.change(piece, correct, taken[then])
            elif outer is None:
                world.shift(piece, taken[then])
            else:
                outer.land(world, piece, taken[then])
        world.end()

    return advance


@dataclass
class Clip:
    """Clipping: `g_k` times `norm / (n_k + 1e-6)` if that factor is below 1.

    `n_k` is the norm of `g_k`.

    Attributes:
        norm: largest norm.
        buckets: number of buckets for clipping with the norm of the previous iteration. In the
            first iteration bucket b uses the norm of buckets 0..b. None for the norm of this
            iteration.
    """

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
    """SGD with momentum on `d = w~ - mean_k(w_k)`, the change since the common parameters w~.

    `v = momentum v + d; w~ = w~ - lr (d + momentum v)`, without Nesterov `w~ = w~ - lr v`. Workers
    continue from w~. If the average is of older parameters s_k, workers continue from `w_k = w~ +
    w_k - s_k`, or with `alpha` from `w_k = alpha w_k + (1 - alpha) w~`.

    Attributes:
        lr: learning rate.
        momentum: momentum.
        nesterov: whether to use Nesterov momentum, as torch defines it.
        alpha: share of the local parameters that remains; None for none.

    Source: Douillard et al., DiLoCo, 2023, Algorithm 1; Douillard et al., Streaming DiLoCo, 2025.
    """

    lr: float
    momentum: float
    nesterov: bool = True
    alpha: float | None = None

    def __post_init__(self) -> None:
        self._common: Any = None
        self._velocity: Any = None

    def start(self, world: World) -> None:
        """Store the initial parameters of the replicas as the common parameters, at the first
        call.

        Args:
            world: replicas.
        """
        if self._common is None:
            self._common, self._velocity = world.keep(), 0 * world.keep()

    def __call__(self, world: World, piece: Payload | None) -> None:
        """Step on the average that the replicas hold."""
        world.change(piece, self._outer_step, self._common, self._velocity)

    def land(self, world: World, piece: Payload, kept: Any) -> None:
        """Step on the average of snapshots, and merge the result with the weights.

        Args:
            world: replicas.
            piece: part of the model.
            kept: snapshots of the weights of all replicas.
        """

        def add_outer_step(w: Array, snapshot: Array, common: Array, velocity: Array) -> Array:
            new = self._outer_step(snapshot, common, velocity)
            if self.alpha is None:
                return new + w - snapshot
            return self.alpha * w + (1 - self.alpha) * new

        world.change(piece, add_outer_step, kept, self._common, self._velocity)

    def _outer_step(self, w: Array, common: Array, velocity: Array) -> Array:
        d = common - w.mean(axis=0)
        velocity[...] = self.momentum * velocity + d
        common -= self.lr * (d + self.momentum * velocity if self.nesterov else velocity)
        return common


def merged(closes: Callable[[int], bool], merge: Merge = "sum") -> Equations:
    """Return the equations of merged gradients with a late update.

    Gradients are added up until an iteration closes their window. When the next window closes,
    their mean over replicas is applied. No optimizer steps in between.

    Args:
        closes: function of an iteration that returns whether it closes a window.
        merge: "sum" or "mean" over the iterations of a window.
    """

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
    """Return the equations of federated averaging: rounds of local steps, then a weighted average.

    After a round, `w = sum_k(n_k w_k) / sum_k(n_k)` on all replicas.

    Args:
        local_steps: local steps per round, for all replicas or one number for each. A replica
            with fewer steps waits for the others.
        weights: function of the number of previous rounds that returns the weights n of the
            replicas; None for equal weights.
        state: treatment of the optimizer's state at an average: "local", "averaged" or "reset".
    """
    rounds = count()
    each = None if isinstance(local_steps, int) else local_steps
    length = local_steps if isinstance(local_steps, int) else max(local_steps)

    def advance(world: World, iteration: int) -> None:
        world.gradients(iteration)
        place = iteration % length
        world.step(None if each is None else [k for k, steps in enumerate(each) if steps > place])
        if place + 1 == length:
            _average_piece(world, None, state, weights(next(rounds)))
        world.end()

    return advance


def cyclic(
    stages: Sequence[range], fresh: Callable[[int, int, int], bool], skipped: int = 0
) -> Equations:
    """Return the equations of cyclic data parallelism.

    `w_(t+1) = w_t - rate / N * sum_i grad f_i(w^_(i,t))`, where stage j of `w^_(i,t)` is w_t if
    `fresh(t, i, j)`, otherwise w_(t-1). w_-1 = w_0.

    Args:
        stages: runs of buckets.
        fresh: function of (iteration t, replica i, stage j).
        skipped: number of initial iterations without an update.
    """
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
    """Relative change of gradient norms, as SelSync smooths it.

    Attributes:
        smooth: "norm" to smooth the norms, "change" to smooth their relative changes.
        window: number of values in a mean.
        weight: weight of the newest value in a mean.
    """

    smooth: Literal["norm", "change"] = "norm"
    window: int = 25
    weight: float = 1.0

    def change(self, norms: Sequence[float]) -> float:
        """Return the smoothed relative change of the last norm.

        Args:
            norms: squared norms of all iterations so far.

        Returns:
            Relative change; nan for the first norm.
        """
        if self.smooth == "norm":
            now, before = self.mean(norms), self.mean(norms[:-1])
            return abs(now - before) / before
        return self.mean([abs(b - a) / a for a, b in pairwise(norms)])

    def mean(self, values: Sequence[float]) -> float:
        """Return the weighted mean of the last `window` values.

        The mean is `sum_j (1 - weight)^j v_(i-j) / sum_j (1 - weight)^j`.

        Args:
            values: values v_0 to v_i.
        """
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
    """Return the equations of selective averaging (SelSync).

    A piece is averaged if the change of at least one replica is unknown or at least `delta`. With
    `aggregate="parameters"`, `w = mean_k(w_k - rate g_k)`; with "gradients", `g = mean_k(g_k)`,
    then the step.

    Args:
        changes: smoothing of the changes.
        pieces: parts of the model, each with its own decision.
        forced: indices of the pieces that iteration r averages in any case, as `forced[r mod
            H]`.
        delta: threshold of the relative change.
        lag: iterations from a decision to its average. The first `lag` iterations average all
            pieces.
        aggregate: values to average.
        state: treatment of the optimizer's state at an average: "local", "averaged" or "reset".
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
                _average_piece(world, piece, state)
        world.end()

    return advance


def layer_sets(plan: Plan, buffer: str = "param") -> list[list[Payload]]:
    """Return the pieces that a plan averages in each iteration of its period.

    Args:
        plan: plan.
        buffer: buffer of the transfers to select.
    """
    return [
        [t.payload for t in plan.transfers if t.payload.buffer == buffer and phase in t.phases]
        for phase in plan.cycle
    ]


def closing(plan: Plan) -> Callable[[int], bool]:
    """Return a function of an iteration that returns whether it closes a window of the plan.

    Args:
        plan: plan with accumulation windows.
    """
    phases = {p for apply in plan.applies if effects.is_window_end(apply) for p in apply.phases}
    return lambda iteration: plan.phase(iteration) in phases


def _compute_gradients(
    world: World, iteration: int, clip: Clip | None, outer: Outer | None
) -> None:
    if outer is not None:
        outer.start(world)
    world.gradients(iteration)
    if clip is not None:
        clip(world)


def _average_piece(
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
