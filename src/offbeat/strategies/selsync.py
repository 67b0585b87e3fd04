"""SelSync: local steps, and an average when the gradient of any worker has changed by a
threshold."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import inf
from typing import Any, ClassVar, Literal

import numpy as np

from offbeat.core.plan import (
    Apply,
    Fact,
    Moment,
    Payload,
    Phases,
    Plan,
    Transfer,
    Vote,
    local,
)
from offbeat.core.profile import Profile
from offbeat.core.strategy.interface import (
    Planned,
    periodic_bound_s,
    require_count,
    synchronous_bound_s,
)
from offbeat.strategies.averaging import kinds_of
from offbeat.strategies.bsp import averages
from offbeat.strategies.compressible import Wired
from offbeat.strategies.dreamddp.late import Planning
from offbeat.strategies.dreamddp.sets import cheaper_sets
from offbeat.strategies.dreamddp.strategy import cycle_of
from offbeat.strategies.equations import Equations, StatePolicy, World, average_piece
from offbeat.strategies.pieces import Sets

STEP, END, NEXT = Moment("step"), Moment("end"), Moment("forward", lag=1)


@dataclass(frozen=True)
class SelSync(Wired):
    """Selective synchronization: average if the gradient of any worker has changed by `delta`.

    The change is the relative change of the squared gradient norm between two iterations, smoothed.
    The first iteration synchronizes, as does any iteration whose norm is zero or not finite.

    With delta=0 and aggregate="gradients" the method is BSP. With delta=0 and parameters it equals
    BSP up to rounding for SGD with momentum, but not for optimizers that are not linear in the
    gradients, such as Adam. With delta=inf only the first iteration and `max_period` synchronize.
    """

    delta: float = 0.3
    """Threshold of the relative change at which all workers average; 0: average in every iteration;
    inf: never."""
    window: int = 25
    """Number of iterations of the smoothing window; the newest has weight min(1, workers / 100)."""
    smooth: Literal["norm", "change"] = "norm"
    """Quantity that is smoothed: squared norms (`norm`) or their relative changes (`change`)."""
    aggregate: Literal["parameters", "gradients"] = "parameters"
    """Quantity that is averaged: `parameters` after the local step, or `gradients` before the step,
    which then waits for the vote."""
    vote_lag: Literal[0, 1] = 0
    """Iterations between the change and the decision; 1 hides the time of the vote."""
    scope: Literal["model", "layer"] = "model"
    """One vote for the whole `model`, or one vote per `layer` (extension of offbeat). Per-layer
    votes use the change of the previous iteration, and averages run under backward."""
    max_period: int | None = None
    """Largest number of iterations between two averages of a parameter, regardless of votes; None:
    no bound."""
    state: StatePolicy = "local"
    """Treatment of optimizer state at an average, as in `LocalSGD`."""

    name: ClassVar[str] = "selsync"
    synchronous: ClassVar[bool] = False
    unadvised: ClassVar[str] = "its messages depend on votes during training"
    citation: ClassVar[str] = (
        "Tyagi and Swany, Accelerating Distributed ML Training via Selective Synchronization, "
        "CLUSTER 2023, Algorithm 1"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.delta >= 0:
            raise ValueError(
                f"delta ({self.delta}) must be a number of at least 0; 0 synchronizes in every "
                "iteration, inf never"
            )
        require_count("window", self.window)
        if self.max_period is not None:
            require_count("max_period", self.max_period, remedy="leave it out for no bound")
        if self.aggregate == "gradients":
            self._require_votes_in_time()

    def _require_votes_in_time(self) -> None:
        """Raise ValueError for settings under which a vote would come after the step of averaged
        gradients."""
        late = {"vote_lag": (self.vote_lag, 0), "scope": (self.scope, "model")}
        for name, (value, needed) in (late | {"state": (self.state, "local")}).items():
            if value != needed:
                why = "are not averaged with it" if name == "state" else "cannot wait for its vote"
                raise ValueError(
                    f"{name} ({value!r}) must be {needed!r} with aggregate 'gradients', which "
                    f"{why}; use aggregate='parameters'"
                )

    @property
    def _lag(self) -> int:
        return 1 if self.scope == "layer" else self.vote_lag

    def schedule(self, profile: Profile) -> Plan:
        everything, forced = range(len(profile.buckets)), self._forced_runs(profile)
        always, by_layer = range(len(forced)), self.scope == "layer"
        runs = [range(b, b + 1) for b in everything] if by_layer else [everything]
        # Gradients that are averaged inside replicas first are complete in the step.
        late = profile.inside is not None and not by_layer
        if late and self.aggregate == "gradients":
            raise ValueError(
                "aggregate ('gradients') must be 'parameters' where replicas have several ranks, "
                "because a vote on averaged gradients comes too late for an average of them"
            )
        before = NEXT if late and not self._lag else END
        updated = Moment("grad") if by_layer else STEP if self.aggregate == "parameters" else END
        applies = [local(len(everything), updated, always)]
        if by_layer or late:  # the vote takes place after the gradients have been applied
            applies.insert(0, Apply("measure", everything, updated, Phases(always)))
        kinds = ("grad",) if self.aggregate == "gradients" else kinds_of(self.state)
        transfers: list[Transfer] = []
        for i, run in enumerate(runs):
            whatever = [phase for phase in always if i in forced[phase]]
            after = Moment("grad", run[-1]) if by_layer else STEP if before is END else END
            for phases, condition in self._conditions(run, always, whatever):
                transfers += averages(
                    profile, kinds, run, after=after, before=before, phases=phases, **condition
                )
                if self.state == "reset":
                    applies.append(Apply("reset", run, END, Phases(phases), **condition))
        facts = [Fact("forced", [sorted(some) for some in forced], "averaged whatever the votes")]
        return Plan(
            self.name,
            len(everything),
            tuple(transfers),
            tuple(applies),
            tuple(self._vote(run, always, profile, late) for run in runs),
            period=len(forced),
            facts=tuple(facts if self.max_period else ()),
        )

    def _forced_runs(self, profile: Profile) -> Sets:
        """Return, for each iteration of the period, the indices of the runs that are averaged
        regardless of votes."""
        if self.max_period is None:
            return ((),)
        if self.scope == "model":
            return (*((),) * (self.max_period - 1), (0,))
        job = Planning(self.name, profile, self.max_period, "after_update", self.state)
        return cheaper_sets(cycle_of(job, "end"), self.max_period)

    def _conditions(
        self, run: range, always: range, whatever: list[int]
    ) -> Iterator[tuple[list[int], dict[str, Any]]]:
        """Yield the phases of an average with the vote on which it depends; no vote for forced
        averages."""
        voted = [phase for phase in always if phase not in whatever]
        if voted:
            yield voted, {"when": self._vote_name(run), "ago": self._lag}
        if whatever:
            yield whatever, {}

    def _vote_name(self, run: range) -> str:
        return f"layer {run[0]}" if self.scope == "layer" else "sync"

    def _vote(self, run: range, always: range, profile: Profile, late: bool) -> Vote:
        at = STEP if late else Moment("grad", len(profile.buckets) - 1)
        due = END if late and not self.vote_lag else Moment("step", lag=self.vote_lag)
        if self.scope == "layer":
            due = Moment("grad", run[-1], lag=1)
        args = {
            "threshold": float(self.delta),
            "smooth": self.smooth,
            "window": self.window,
            "weight": min(1.0, profile.world_size / 100),
        }
        return Vote(
            self._vote_name(run),
            "changed",
            at,
            due,
            Phases(always),
            tuple(args.items()),
            run if self.scope == "layer" else None,
        )

    def at_step(self) -> Planned | None:
        return replace(self, scope="model") if self.scope == "layer" else None

    def equations(self, plan: Plan) -> Equations:
        weight = plan.votes[0].arg("weight")
        changes = Changes(self.smooth, self.window, weight)
        pieces = [None if v.buckets is None else Payload("param", v.buckets) for v in plan.votes]
        forced = plan.fact("forced", [[]])
        return selective(changes, pieces, forced, self.delta, self._lag, self.aggregate, self.state)

    def bound_s(self, profile: Profile) -> float:
        period = 1 if self.delta == 0 else self.max_period or inf
        if self.aggregate == "gradients":
            return synchronous_bound_s(profile, period=period, fused=True)
        return periodic_bound_s(profile, period, fused=self.scope == "model")


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
    state: StatePolicy = "local",
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
                average_piece(world, piece, state)
        world.end()

    return advance
