"""SSP for `slides.py`: simulated time, real numbers.

The library's own simulation of workers and server (`server/simulation.py`) says when a worker
begins to compute, when its push has reached the server, and when it gets parameters. At these
moments real gradients of the real model are computed and the library's own server
(`server/parameters.py`) takes them. A run ends when as many pushes were applied as the other
methods compute gradients.
"""

from __future__ import annotations

import time
from collections import deque
from contextlib import suppress
from typing import Any

import torch
from slides_runs import EVERY, quality_of_mean
from slides_tasks import Task
from torch import Tensor

from offbeat.core.sim.ranks import Ranks
from offbeat.profile import Profile
from offbeat.server.layout import Layout
from offbeat.server.optimizers import settings_of
from offbeat.server.parameters import Shard
from offbeat.server.simulation import ServedJob
from offbeat.sessions.separate_workers import Server, compute_seconds, server_of
from offbeat.strategies import SSP

FASTER = 4  # a fast worker may compute so many times its share of the gradients


def train_served(
    task: Task, strategy: SSP, profile: Profile, seed: int, iterations: int, servers: int
) -> dict[str, Any]:
    """Quality over iterations (pushes over workers), and simulated seconds until then."""
    begin = time.perf_counter()
    server = server_of(profile, servers)
    compute_s = compute_seconds(profile, Ranks(), FASTER * iterations, seed)
    job = _Training(server, compute_s, strategy, task, seed, iterations)
    with suppress(_Enough):
        job.run()
    return {
        "quality": job.quality,
        "times_s": job.times_s,
        "apart": job.apart,
        "servers": servers,
        "took_s": time.perf_counter() - begin,
    }


class _Enough(Exception):  # noqa: N818
    """All gradients have been applied."""


class _Training(ServedJob):
    """A simulation whose workers really compute and whose server really steps."""

    def __init__(
        self,
        server: Server,
        compute_s: Any,
        strategy: SSP,
        task: Task,
        seed: int,
        iterations: int,
    ) -> None:
        super().__init__(server, compute_s, strategy.s, each_push=strategy.apply == "push")
        workers = compute_s.shape[1]
        torch.manual_seed(seed)
        self._first = first = task.model()
        self._task, self._iterations = task, iterations
        self._models = [task.model() for _ in range(workers)]
        for model in self._models:
            model.load_state_dict(first.state_dict())
        self._batches = [task.batches(n, workers, seed) for n in range(workers)]
        self._optimizer = task.optimizer(first)
        groups = [group["params"] for group in self._optimizer.param_groups]
        self._layout = Layout(groups, 1)
        self._flats = self._layout.flats()
        with torch.no_grad():
            torch._foreach_copy_(self._layout.views(self._flats), self._layout.parameters)
        (self._flat,) = self._flats.values()  # one dtype
        self._shards = [
            Shard(
                spec,
                self._flat[spec.start : spec.stop],
                self._optimizer,
                self._layout.parameters,
                range(workers),
                strategy.apply,
            )
            for spec in self._layout.shards
        ]
        self._order = [self._places(model) for model in self._models]
        self._snapshots: list[Tensor | None] = [None] * workers
        self._pushes: list[deque[Tensor]] = [deque() for _ in range(workers)]
        self._applied_pushes = 0
        self.quality: list[list[float]] = []
        self.times_s: list[float] = []
        self.apart: list[int] = []

    def _places(self, model: torch.nn.Module) -> list[Tensor]:
        """A worker's parameters in the order of the flat ones."""
        return [p for g in self._task.optimizer(model).param_groups for p in g["params"]]

    # ---- what the simulation tells of ---------------------------------------------------------

    def load(self, n: int) -> None:
        snapshot = self._snapshots[n]
        assert snapshot is not None
        with torch.no_grad():
            views = self._layout.views({snapshot.dtype: snapshot})
            torch._foreach_copy_(self._order[n], views)

    def begin(self, n: int, clock: int, low: int) -> None:
        """Compute the gradient that worker n pushes when its compute is over."""
        super().begin(n, clock, low)
        model, parameters = self._models[n], self._order[n]
        loss = self._task.loss(model, next(self._batches[n]))
        gradients = torch.autograd.grad(loss, parameters)
        flat = torch.empty_like(self._flat)
        views = self._layout.views({flat.dtype: flat})
        torch._foreach_copy_(views, list(gradients))
        self._pushes[n].append(flat)

    def answer(self, n: int) -> None:
        self._snapshots[n] = self._flat.clone()

    # ---- numbers ------------------------------------------------------------------------------

    def apply(self, n: int, clock: int) -> None:
        super().apply(n, clock)
        gradient = self._pushes[n].popleft()
        for group in self._optimizer.param_groups:
            group["lr"] = self._task.rate(clock, self._iterations)
        settings = settings_of(self._optimizer)
        for shard in self._shards:
            part = gradient[shard.spec.start : shard.spec.stop]
            shard.push(n, clock, part, settings)
        self._applied_pushes += 1
        if self._applied_pushes % (EVERY * self.workers) == 0:
            self._look(self._applied_pushes // self.workers)
        if self._applied_pushes == self._iterations * self.workers:
            raise _Enough

    def _look(self, iteration: int) -> None:
        """The server's parameters, and the mean of the workers' running statistics."""
        with torch.no_grad():
            torch._foreach_copy_(self._layout.parameters, self._layout.views(self._flats))
        held = {name: p.detach() for name, p in self._first.named_parameters()}
        states = [{**model.state_dict(), **held} for model in self._models]
        self.quality.append([iteration, *quality_of_mean(self._task, states)])
        self.times_s.append(self.kernel.now)
        clocks = self.clocks.present.values()
        self.apart.append(max(clocks) - min(clocks))
