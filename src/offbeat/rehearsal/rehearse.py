"""Rehearsal of strategies on a model that Python functions describe."""

from __future__ import annotations

import json
import os
import pickle
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn

import offbeat
from offbeat.core.buckets.random_states import preserve_random_states, seed_all
from offbeat.core.profile import Profile
from offbeat.core.profile.elsewhere import extrapolate
from offbeat.core.sim import Prediction
from offbeat.core.start.launch_request import SCHEMA, VARIABLE
from offbeat.core.strategy.interface import Planned, Strategy, require_count
from offbeat.core.strategy.parsing import parse
from offbeat.core.words import loss_text
from offbeat.experiments.report.headline import REHEARSED
from offbeat.lab import NoLab
from offbeat.rehearsal.observer import INPUTS, RehearsalObserver, record_rehearsal
from offbeat.rehearsal.ranks import WAIT_S, ForkedRanks, cluster_of, environments_of
from offbeat.rehearsal.simulated import Run, simulate_run

SMOOTH = 10  # iterations of which a loss is the mean

Progress = Callable[[str, int], None]
"""Called with a strategy and its number of finished iterations."""


@dataclass(frozen=True)
class RehearsedCurve:
    """Loss against simulated time of one strategy.

    Attributes:
        strategy: name and settings of the strategy.
        ranks: number of ranks of the job.
        losses: training loss of each iteration, mean over the ranks.
        ends_s: simulated seconds from the start to the end of each iteration on the slowest rank.
        held_out: (iteration, result of `evaluate`) of the average of the replicas.
        votes: outcomes by vote and iteration.
        decisions: iteration and text of each decision of the runtime.
        input_elements: elements of the input tensors of one rank per iteration, mean over replicas
            and iterations.
        prediction: predicted steady state of the last plan.
        run: records of all ranks, their losses, and the plan.
    """

    strategy: str
    ranks: int
    losses: tuple[float, ...]
    ends_s: tuple[float, ...]
    held_out: tuple[tuple[int, float], ...] = ()
    votes: Mapping[str, tuple[bool, ...]] = field(default_factory=dict)
    decisions: tuple[tuple[int, str], ...] = ()
    input_elements: float = 0.0
    prediction: Prediction | None = field(default=None, compare=False, repr=False)
    run: Run | None = field(default=None, compare=False, repr=False)

    @property
    def points(self) -> list[tuple[float, float]]:
        """Return (simulated seconds, loss) of each iteration."""
        return list(zip(self.ends_s, self.losses, strict=True))

    @property
    def iteration_s(self) -> float:
        """Return the simulated seconds per iteration, mean over the rehearsal."""
        return self.ends_s[-1] / len(self.ends_s)

    def seconds_to(self, loss: float, *, smooth: int = SMOOTH) -> float | None:
        """Return the simulated seconds until the loss is at most `loss`; None if it is never.

        Args:
            loss: loss to reach.
            smooth: number of last iterations of which the loss is the mean.
        """
        count = self.iterations_to(loss, smooth=smooth)
        return None if count is None else self.ends_s[count - 1]

    def iterations_to(self, loss: float, *, smooth: int = SMOOTH) -> int | None:
        """Return the number of iterations until the loss is at most `loss`; None if it is never.

        Args:
            loss: loss to reach.
            smooth: number of last iterations of which the loss is the mean.
        """
        means = self._means(smooth)
        return next((smooth + i for i, mean in enumerate(means) if mean <= loss), None)

    def lowest_loss(self, *, smooth: int = SMOOTH) -> float | None:
        """Return the lowest mean loss; None if the loss never decreases.

        Args:
            smooth: number of iterations of which a loss is the mean.
        """
        first, *later = *self._means(smooth), float("inf")
        lowest = min(later)
        return lowest if lowest < first else None

    def _means(self, smooth: int) -> list[float]:
        stops = range(smooth, len(self.losses) + 1)
        return [fmean(self.losses[stop - smooth : stop]) for stop in stops]

    def __str__(self) -> str:
        return (
            f"{self.strategy} on {self.ranks} ranks: loss {loss_text(self.losses[-1])} after "
            f"{len(self.losses)} iterations and {self.ends_s[-1]:.4g} s "
            f"({REHEARSED})"
        )


def rehearse(
    make_model: Callable[[], nn.Module],
    make_optimizer: Callable[[nn.Module], Any],
    batches: Callable[[int], Iterable[Any]],
    strategies: Strategy | str | Sequence[Strategy | str],
    profile: Profile,
    ranks: int | None = None,
    iterations: int = 100,
    *,
    loss: Callable[[nn.Module, Any], Tensor] | None = None,
    evaluate: Callable[[nn.Module], float] | None = None,
    evaluate_every: int = 10,
    jitter: float | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> dict[str, RehearsedCurve]:
    """Train all replicas of a job on this machine, and return losses against simulated time.

    Each replica is a fork of this process and a rank of a real job on the loopback. So losses,
    votes and weights are those of a job. The time is that of the simulator, for the plan and the
    votes of the rehearsal.

    Args:
        make_model: returns a new model. Called once per replica; all replicas start with the
            weights of replica 0. This and the other functions run in the forks, so what they change
            stays there.
        make_optimizer: returns the optimizer of a model, or (optimizer, learning-rate scheduler);
            the scheduler steps after every iteration.
        batches: returns the batches of a replica, given its number. After its last batch a replica
            begins again with the first one.
        strategies: strategies with a plan, or their names and settings as "dreamddp:period=8".
        profile: profile of the model. With another number of ranks it is extrapolated. If its
            replicas have several ranks, each of these has a model and batches of its own, and the
            ranks of a replica average their gradients.
        ranks: number of replicas of the job; None for that of the profile.
        iterations: number of iterations.
        loss: function of (model, batch) that returns the scalar to minimize. None: the model
            returns it, given the batch.
        evaluate: function of the average of all replicas, for example its loss on held-out data.
        evaluate_every: iterations between two calls of `evaluate`.
        jitter: relative standard deviation of compute times; None for that of the profile.
        seed: replica k starts with the random streams (Python, NumPy, torch) of seed `seed + k`.
            The jitter has the seed `seed`.
        progress: called with a strategy and its number of finished iterations.

    Returns:
        Curve of each strategy, by its name and settings.

    Raises:
        ValueError: an argument is invalid, the profile does not match the model, or a strategy has
            no plan or cannot train the model.
        RuntimeError: a replica was killed, or this process uses a GPU or a process group already.

    An error of a function of the caller is raised with a note that names the replica.

    The random streams of the caller stay as they are.
    """
    for name, value in (("iterations", iterations), ("evaluate_every", evaluate_every)):
        require_count(name, value)
    several = [strategies] if isinstance(strategies, (Strategy, str)) else list(strategies)
    chosen = [parse(one) if isinstance(one, str) else one for one in several]
    if not chosen:
        raise ValueError("strategies ([]) must name at least one strategy, such as 'dreamddp'")
    there = replace(extrapolate(profile, hosts=ranks, jitter=jitter), pace=0.0)
    for strategy in chosen:
        require_plan(strategy)
    require_whole_replicas(there)
    if torch.cuda.is_initialized():
        raise RuntimeError("a process that uses a GPU cannot be forked; rehearse in another one")
    if dist.is_initialized():
        raise RuntimeError(
            "a process group of this process must be destroyed before it is forked: call "
            "torch.distributed.destroy_process_group(), or rehearse in another process"
        )
    training = _Training(
        make_model,
        make_optimizer,
        batches,
        loss or model_loss,
        iterations,
        evaluate,
        evaluate_every,
    )
    curves = [_rehearse_one(one, training, there, seed, progress) for one in chosen]
    return {curve.strategy: curve for curve in curves}


def model_loss(model: nn.Module, batch: Any) -> Tensor:
    """Return the loss that a model returns for a batch: a scalar, or the attribute `loss`."""
    if isinstance(batch, Mapping):
        output = model(**batch)
    else:
        output = model(*batch) if isinstance(batch, (tuple, list)) else model(batch)
    found = output if isinstance(output, Tensor) else getattr(output, "loss", None)
    if not isinstance(found, Tensor) or found.numel() != 1:
        raise ValueError(
            f"output of the model ({type(output).__name__}) must be the loss, one number; pass "
            "loss=, a function of (model, batch)"
        )
    return found


# ---- replicas -------------------------------------------------------------------------------


def require_plan(strategy: Strategy) -> None:
    """Raise ValueError for a strategy whose workers go at their own pace."""
    if not isinstance(strategy, Planned):
        raise ValueError(
            f"strategy ({strategy}) must be one with a plan in a rehearsal, because the times of "
            "its messages determine its losses; train it on emulated hosts with `offbeat compare`"
        )


def require_whole_replicas(profile: Profile) -> None:
    """Raise ValueError if ranks share a replica in a way that a rehearsal does not have."""
    if profile.sharded:
        raise ValueError(
            "profile (sharded) must be of whole replicas in a rehearsal, on whose one machine "
            "`fully_shard` saves no memory; rehearse the profile of one rank per replica, with the "
            "batch of a node on each rank"
        )


@dataclass(frozen=True)
class _Training:
    """Training loop of the caller's functions."""

    make_model: Callable[[], nn.Module]
    make_optimizer: Callable[[nn.Module], Any]
    batches: Callable[[int], Iterable[Any]]
    loss: Callable[[nn.Module, Any], Tensor]
    iterations: int
    evaluate: Callable[[nn.Module], float] | None
    evaluate_every: int

    def run(
        self, rank: int, strategy: Strategy, profile: Profile, report: Callable[[int], None]
    ) -> tuple[list[float], list[tuple[int, float]]]:
        """Train one replica, and return its losses and on rank 0 the results of `evaluate`."""
        module = self.make_model()
        made = self.make_optimizer(module)
        own, scheduler = made if isinstance(made, tuple) else (made, None)
        how: dict[str, Any] = {"profile": profile, "compare_every": 0}
        model, optimizer = offbeat.prepare(module, own, strategy, **how)
        batches, losses, held_out = self._repeat(rank), list[Tensor](), list[tuple[int, float]]()
        for iteration in range(self.iterations):
            optimizer.zero_grad()
            loss = self.loss(model, next(batches))
            losses.append(loss.detach())
            loss.backward()
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
            if self.evaluate is not None and (iteration + 1) % self.evaluate_every == 0:
                average = _average_model(model.module, rank)
                if rank == 0:
                    with preserve_random_states(), torch.no_grad():
                        held_out.append((iteration, float(self.evaluate(average))))
            report(iteration + 1)
        model.close()
        return [float(one) for one in losses], held_out

    def _repeat(self, rank: int) -> Iterator[Any]:
        while True:
            count = 0
            for count, batch in enumerate(self.batches(rank), 1):  # noqa: B007
                yield batch
            if not count:
                raise ValueError(f"batches({rank}) (empty) must return at least one batch")


def _average_model(module: nn.Module, rank: int) -> nn.Module:
    """Return on rank 0 a copy with the average of all replicas; every rank must call it."""
    plan = RehearsalObserver.last.plan
    source = None if plan is None else plan.source
    whole = deepcopy(module).eval() if rank == 0 else module
    with torch.no_grad():
        for place in (*whole.parameters(), *whole.buffers()):
            given = place.to("cpu", copy=True)
            if source is not None:
                dist.broadcast(given, source)
            elif given.is_floating_point():
                dist.reduce(given, 0)
                given /= dist.get_world_size()
            if rank == 0:
                place.copy_(given)
    return whole


def _rehearse_one(
    strategy: Strategy,
    training: _Training,
    profile: Profile,
    seed: int,
    progress: Progress | None,
) -> RehearsedCurve:
    results: dict[int, Any] = {}
    lab = NoLab(cluster_of(profile))
    with tempfile.TemporaryDirectory(prefix="offbeat-rehearsal-") as folder, ForkedRanks() as ranks:
        job = {"schema": SCHEMA, "record_dir": folder, "rehearsed": True, "timeout_s": WAIT_S}
        path = Path(folder, "job.json")
        path.write_text(json.dumps(job))
        environments = environments_of(lab)
        ranks.fork(len(environments))
        if ranks.rank is not None:
            own = {VARIABLE: str(path), "OFFBEAT_LOG": "off", **environments[ranks.rank]}
            _live(ranks, own, training, strategy, profile, seed)
        for rank, (kind, value) in ranks.messages():
            if kind == "error":
                raise value
            if kind == "result":
                results[rank] = value
            elif progress is not None:
                progress(str(strategy), value)
            if len(results) == len(environments):
                break
        run = simulate_run(Path(folder), strategy, profile, seed=seed)
    losses = tuple(tuple(results[rank][0]) for rank in range(len(results)))
    return curve_of(replace(run, losses=losses), strategy, results[0][1])


def _live(
    ranks: ForkedRanks,
    environment: Mapping[str, str],
    training: _Training,
    strategy: Strategy,
    profile: Profile,
    seed: int,
) -> NoReturn:
    """Train the replica of this rank, send its result, and wait for the end of the others."""
    rank, sender = int(environment["RANK"]), ranks.sender
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the caller's process ends all ranks
        for name in [name for name in os.environ if name.startswith("OFFBEAT_")]:
            del os.environ[name]
        os.environ.update(environment)
        torch.set_num_threads(1)  # threads of OpenMP do not survive a fork
        record_rehearsal()
        seed_all(seed + rank, [torch.device("cpu")])

        def report(done: int) -> None:
            if rank == 0:
                sender.send(("done", done))

        sender.send(("result", training.run(rank, strategy, profile, report)))
    except BaseException as error:
        sender.send(("error", _sendable(error, rank, strategy)))
    sys.stdout.flush()
    while True:
        signal.pause()  # rank 0 has the store that others still read


def _sendable(error: BaseException, rank: int, strategy: Strategy) -> BaseException:
    """Return an error with a note that names its rank, or its text if it cannot be pickled."""
    text = f"rank {rank} of the rehearsal of {strategy}"
    error.add_note(f"in {text}:\n{''.join(traceback.format_tb(error.__traceback__))}")
    try:
        return pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__} in {text}: {error}")


def curve_of(
    run: Run, strategy: Strategy, held_out: Sequence[tuple[int, float]] = ()
) -> RehearsedCurve:
    """Return the curve of a rehearsed run."""
    inputs = [rank.trace.notes[INPUTS] for rank in run.ranks]
    return RehearsedCurve(
        str(strategy),
        len(run.ranks),
        tuple(map(fmean, zip(*run.losses, strict=True))),
        run.ends_s,
        tuple(held_out),
        {name: tuple(outcomes) for name, outcomes in run.votes.items()},
        run.ranks[0].decisions,
        fmean(inputs) / len(run.losses[0]),
        run.prediction,
        run,
    )
