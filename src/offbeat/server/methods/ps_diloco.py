"""DiLoCo over parameter servers: a quorum of workers per outer step, or late changes corrected."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from offbeat.core.profile import Profile
from offbeat.core.strategy.interface import require_count
from offbeat.server.simulation import ServedJob, Timeline
from offbeat.server.strategies import SSP
from offbeat.strategies.outer_optimizer import OuterSGD, is_real, outer_of

if TYPE_CHECKING:
    import torch

    from offbeat.core.plan import Plan
    from offbeat.core.runtime.session import Session
    from offbeat.core.runtime.training_job import TrainingJob
    from offbeat.core.sim.separate_workers import Server
    from offbeat.server.layout import Layout
    from offbeat.server.parameters import Store
    from offbeat.server.session import SSPSession

STEADY = OuterSGD()


@dataclass(frozen=True)
class PSDiLoCo(SSP):
    """DiLoCo whose outer optimizer is on servers, which need not wait for all workers.

    A worker trains `period` iterations with its own optimizer from parameters w~ of the servers,
    pushes the change d = w~ - w, and continues from the parameters that it pulls then.

    With `rule="quorum"` a server steps once `quorum` workers have pushed and `grace_s` seconds have
    passed since, or all workers have pushed. It steps with the mean of the changes, weighted by
    tokens; a later change counts in the next step. A pull waits for the next step.

        D = sum_k(c_k d_k) / sum_k(c_k), c_k = tokens_k^2 / iterations_k;  w~ = outer(w~, D)

    With `rule="heloco"` a server steps with every push at once, and no worker waits for another. A
    late change is corrected against the momentum m, block by block. With u = d / |d|, v = m / |m|
    and c = u v: d remains if c >= .2; if c < 0, its part along v is reduced; otherwise it is turned
    towards v.

        conf = |d| / (|d| + |m|);  c < 0: d -= min(-c conf, 1) c |d| v
        0 <= c < .2: l = min((1 - c) conf, 1), d = |d| ((1 - l) u + l v) / |(1 - l) u + l v|
        m = momentum m + (1 - momentum) d;  w~ -= lr (d + momentum m)

    Readings: fragments are the shards of the servers, each with a quorum of its own; workers wait
    for the next step instead of training on; the blocks of HeLoCo are the pieces of tensors on a
    server; its thresholds are ours.
    """

    period: int = 50
    """Local steps between two pushes."""
    rule: Literal["quorum", "heloco"] = "quorum"
    """`quorum`: steps with the changes of enough workers (Decoupled DiLoCo). `heloco`: a step with
    each change, corrected against the momentum."""
    outer: OuterSGD = STEADY
    """Outer optimizer on the servers: OuterSGD(lr, momentum, nesterov), or text."""
    quorum: int | None = None
    """K: workers whose changes a step needs; None: all. Of fewer workers that are left, all."""
    grace_s: float = 0.0
    """Seconds that a server waits for further workers when the quorum is complete."""
    tokens: tuple[float, ...] | None = None
    """Tokens of an iteration of each worker (`2048/1024`); None: equal numbers."""

    # Constants in place of settings of SSP.
    s: ClassVar[int] = 0  # type: ignore[misc]
    apply: ClassVar[Literal["clock", "push"]] = "clock"  # type: ignore[misc]
    accumulate: ClassVar[Any]  # type: ignore[misc] # the period
    updates_locally: ClassVar[bool] = True

    name: ClassVar[str] = "ps-diloco"
    synchronous: ClassVar[bool] = False
    citation: ClassVar[str] = (
        "Douillard et al., Decoupled DiLoCo for resilient distributed pre-training, arXiv "
        "2604.21428, 2026; Al Asif et al., HeLoCo, arXiv 2606.00271, 2026"
    )

    def __post_init__(self) -> None:
        require_count("period", self.period, remedy="1 pushes after every iteration")
        super().__post_init__()
        object.__setattr__(self, "outer", outer_of(self.outer))
        if self.outer is None:
            raise ValueError("outer (None) must be an OuterSGD, such as OuterSGD(0.8, 0.3)")
        if self.quorum is not None:
            require_count("quorum", self.quorum, remedy="None waits for all workers")
        if not is_real(self.grace_s) or not 0 <= self.grace_s < math.inf:
            raise ValueError(f"grace_s ({self.grace_s!r}) must be a number of seconds, at least 0")
        if self.tokens is not None:
            tokens = tuple(map(float, self.tokens))
            if not tokens or not all(0 < count < math.inf for count in tokens):
                raise ValueError(f"tokens ({self.tokens}) must be numbers above 0, one per worker")
            object.__setattr__(self, "tokens", tokens)
        if self.rule == "heloco" and (self.quorum is not None or self.grace_s or self.tokens):
            raise ValueError(
                "quorum, grace_s and tokens must be left out with rule='heloco': it steps with "
                "every change at once"
            )

    @property
    def accumulate(self) -> int:  # type: ignore[no-redef, misc]
        """Iterations per clock."""
        return self.period

    @property
    def waits_for_steps(self) -> bool:
        """Whether a pull waits for the next step of the servers."""
        return self.rule == "quorum"

    @property
    def applies_late(self) -> bool:
        return self.rule == "heloco" or self.quorum is not None

    def describe_change(self, plan: Plan | None) -> str | None:
        late = ", some of them late" if self.applies_late else ""
        return f"averaged: changes on servers, every {self.period} iterations{late}"

    def weight(self, rank: int, iterations: int) -> float:
        """Return the weight of a worker's change: squared tokens per iteration.

        Args:
            rank: rank of the worker.
            iterations: local steps of the change.
        """
        if self.tokens is None:
            return float(iterations)
        return (self.tokens[rank] * iterations) ** 2 / iterations

    def bound_s(self, profile: Profile) -> float:
        """Return the seconds per iteration of the fastest rank, as no worker waits for a slower
        one with a quorum or with HeLoCo; of the slowest rank if all take part in every step."""
        slowest = profile.slowest()
        if self.rule == "quorum" and self.quorum is None:
            return slowest.compute_s
        return slowest.compute_s / slowest_scale(profile)

    def open(self, job: TrainingJob) -> Session:
        self._require_tokens(len(job.ranks.workers))
        return super().open(job)

    def _require_tokens(self, workers: int) -> None:
        if self.tokens is not None and len(self.tokens) != workers:
            raise ValueError(
                f"tokens ({len(self.tokens)} numbers) must have one number per worker ({workers})"
            )

    def require_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Accept every optimizer: workers step their own."""

    def make_store(
        self,
        layout: Layout,
        server: int,
        optimizer: torch.optim.Optimizer,
        workers: Iterable[int],
    ) -> Store:
        import torch

        from offbeat.server.outer_rules import WEIGHT, CorrectingShard, QuorumShard
        from offbeat.server.parameters import Store

        workers = list(workers)
        self._require_tokens(len(workers))
        outer = torch.optim.SGD(
            [{"params": group["params"], WEIGHT: 1.0} for group in optimizer.param_groups],
            lr=self.outer.lr,
            momentum=self.outer.momentum,
            nesterov=self.outer.nesterov and self.outer.momentum > 0,
        )
        make = partial(QuorumShard, quorum=self.quorum, grace_s=self.grace_s)
        if self.rule == "heloco":
            make = partial(CorrectingShard, rate=self.outer.lr, momentum=self.outer.momentum)
        return Store(layout, server, outer, self.apply, workers, make)

    def session_class(self) -> type[SSPSession]:
        from offbeat.server.diloco_session import DiLoCoSession

        return DiLoCoSession

    def simulate_clocks(self, server: Server, compute_s: NDArray[np.float64]) -> Timeline:
        return _RoundsJob(server, compute_s, self).run()


def slowest_scale(profile: Profile) -> float:
    """Return how many times as long the slowest rank computes as the fastest."""
    scales = profile.rank_scale or (1.0,)
    return max(scales) / min(scales)


class _RoundsJob(ServedJob):
    """Simulation of workers that wait for parameters after each push."""

    def __init__(self, server: Server, compute_s: NDArray[np.float64], strategy: PSDiLoCo) -> None:
        super().__init__(server, compute_s, 0, each_push=True)
        self._strategy = strategy
        self._members: set[int] = set()
        self._rounds = 0  # steps with a quorum that have begun
        self._is_complete = False  # the quorum of the round, whose grace window runs

    def _begin(self, n: int, now_s: float) -> None:
        worker = self._workers[n]
        if worker.clock == self._clocks:
            return
        if worker.clock and worker.arrived is None:
            worker.waiting = True
            if worker.pulling is None:
                worker.pulling = worker.low + 1 if self._strategy.waits_for_steps else 0
                self.timeline.pulls += 1
                worker.pull_follows = worker.pushing
            return
        if worker.arrived is not None:
            worker.low, worker.arrived = worker.arrived, None
        self._compute(n, now_s, 0)

    def _resume(self, n: int, now_s: float) -> None:
        self._begin(n, now_s)

    def _take_push(self, n: int, now_s: float) -> float:
        if not self._strategy.waits_for_steps:
            self._begin_step(now_s)
        else:
            self._members.add(n)
            self._advance_round(now_s)
        return max(now_s, self._cpu_free_s)

    def _advance_round(self, now_s: float) -> None:
        """Step if all workers have pushed; with a quorum, step after the grace window."""
        running = {n for n, w in enumerate(self._workers) if w.taken < self._clocks}
        present = running | self._members
        quorum = self._strategy.quorum
        needed = len(present) if quorum is None else min(quorum, len(present))
        if self._members >= running:
            self._end_round(now_s)
        elif len(self._members) >= needed and not self._is_complete:
            self._is_complete = True
            end_s = now_s + self._strategy.grace_s
            self._schedule_event(end_s, "end_grace", self._rounds)

    def _end_grace(self, number: int, now_s: float) -> None:
        if number == self._rounds:
            self._end_round(now_s)

    def _end_round(self, now_s: float) -> None:
        self._members, self._is_complete = set(), False
        self._rounds += 1
        self._begin_step(now_s)

    def _end_apply(self, n: int, now_s: float) -> None:
        self._version += 1
        for other, worker in enumerate(self._workers):
            if worker.parked:
                self._answer(other, now_s)
