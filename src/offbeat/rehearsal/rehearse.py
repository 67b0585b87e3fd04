"""Rehearsal of strategies on a model that Python functions describe."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field, fields, replace
from functools import partial
from math import nan
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import fmean
from threading import Thread, get_native_id
from typing import Any, Self

import torch
from torch import Tensor, nn

from offbeat.core.buckets.random_states import preserve_random_states
from offbeat.core.profile import Profile
from offbeat.core.profile.elsewhere import extrapolate
from offbeat.core.runtime.training_job import Watch
from offbeat.core.sim import Prediction
from offbeat.core.strategy.interface import Planned, Strategy, require_count
from offbeat.core.strategy.parsing import parse
from offbeat.core.words import loss_text
from offbeat.experiments.report.headline import REHEARSED
from offbeat.rehearsal.clock import simulate_run
from offbeat.rehearsal.job import Run, train_replicas
from offbeat.rehearsal.replica import Replica

SMOOTH = 10  # iterations of which a loss is the mean
IDLE_S = 10.0  # longest wait for other threads before a fork
START_S, STARTS = 20.0, 3  # seconds within which forked processes must compute; attempts

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
        run: logs of all replicas, and plans.
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

    def to_dict(self) -> dict[str, Any]:
        """Return the curve as JSON types, without prediction and run."""
        names = (f.name for f in fields(self) if f.name not in ("prediction", "run"))
        return {name: getattr(self, name) for name in names}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> RehearsedCurve:
        """Return the curve of a result of `to_dict`.

        Args:
            data: curve as JSON types.
        """
        pairs = ("held_out", "decisions")
        listed = {name: tuple(map(tuple, data[name])) for name in pairs}
        votes = {name: tuple(outcomes) for name, outcomes in data["votes"].items()}
        series = {name: tuple(data[name]) for name in ("losses", "ends_s")}
        return cls(**{**data, **listed, **series, "votes": votes})

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
    processes: int = 1,
    progress: Progress | None = None,
) -> dict[str, RehearsedCurve]:
    """Train all replicas of a job in this process, and return losses against simulated time.

    The replicas run the sessions of a real job, one replica after the other, and exchange messages
    in memory. So losses, votes and weights are those of a job with one process per rank. The time
    is that of the simulator, for the plans and votes of the rehearsal.

    Args:
        make_model: returns a new model. Called once per replica; all replicas start with the
            weights of replica 0.
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
        processes: number of processes that rehearse strategies at the same time. Each of them
            computes in one thread.
        progress: called with a strategy and its number of finished iterations.

    Returns:
        Curve of each strategy, by its name and settings.

    Raises:
        ValueError: an argument is invalid, the profile does not match the model, or a strategy has
            no plan or cannot train the model.
        RuntimeError: one of several processes does not start to compute, or ends without a result.

    The random streams of the caller stay as they are.
    """
    for name, value in (("iterations", iterations), ("evaluate_every", evaluate_every)):
        require_count(name, value)
    require_count("processes", processes)
    several = [strategies] if isinstance(strategies, (Strategy, str)) else list(strategies)
    chosen = [parse(one) if isinstance(one, str) else one for one in several]
    if not chosen:
        raise ValueError("strategies ([]) must name at least one strategy, such as 'dreamddp'")
    there = extrapolate(profile, hosts=ranks, jitter=jitter)
    script = _FunctionScript(
        make_model,
        make_optimizer,
        batches,
        loss or model_loss,
        iterations,
        evaluate,
        evaluate_every,
    )
    for strategy in chosen:
        require_plan(strategy)
    require_whole_replicas(there)
    rehearse_one = partial(_rehearse_one, script=script, profile=there, seed=seed)
    curves = run_all(rehearse_one, chosen, min(processes, len(chosen)), progress)
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
            "profile (sharded) must be of whole replicas, because FSDP divides a model between "
            "processes, and all ranks of a rehearsal are in one process; rehearse the profile of "
            "one rank per replica, with the batch of a node on each rank"
        )


@dataclass(frozen=True)
class _FunctionScript:
    """Training loop of the caller's functions."""

    make_model: Callable[[], nn.Module]
    make_optimizer: Callable[[nn.Module], Any]
    batches: Callable[[int], Iterable[Any]]
    loss: Callable[[nn.Module, Any], Tensor]
    iterations: int
    evaluate: Callable[[nn.Module], float] | None
    evaluate_every: int

    def run(
        self, replica: Replica, held_out: list[tuple[int, float]], report: Callable[[int], None]
    ) -> None:
        """Train one replica. Replica 0 appends to `held_out` and reports its progress."""
        module = self.make_model()
        made = self.make_optimizer(module)
        own, scheduler = made if isinstance(made, tuple) else (made, None)
        watch = Watch(compare_every=0, on_nonfinite="raise")
        model, optimizer = replica.prepare(module, own, None, watch)
        batches = self._repeat(replica.rank)
        for iteration in range(self.iterations):
            optimizer.zero_grad()
            self.loss(model, next(batches)).backward()
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
            if self.evaluate is not None and (iteration + 1) % self.evaluate_every == 0:
                average = replica.average_model()
                if average is not None:
                    with preserve_random_states(), torch.no_grad():
                        held_out.append((iteration, float(self.evaluate(average))))
            if replica.rank == 0:
                report(iteration + 1)

    def _repeat(self, rank: int) -> Iterator[Any]:
        while True:
            count = 0
            for count, batch in enumerate(self.batches(rank), 1):  # noqa: B007
                yield batch
            if not count:
                raise ValueError(f"batches({rank}) (empty) must return at least one batch")


def _rehearse_one(
    strategy: Strategy,
    report: Callable[[int], None],
    *,
    script: _FunctionScript,
    profile: Profile,
    seed: int,
) -> RehearsedCurve:
    held_out: list[tuple[int, float]] = []
    run = train_replicas(
        lambda replica: script.run(replica, held_out, report),
        strategy,
        profile,
        seed=seed,
    )
    return curve_of(strategy, run, profile, seed=seed, held_out=held_out)


def curve_of(
    strategy: Strategy,
    run: Run,
    profile: Profile,
    *,
    seed: int,
    held_out: Sequence[tuple[int, float]] = (),
) -> RehearsedCurve:
    """Return the curve of a rehearsed run, with its times on the cluster of a profile."""
    clock, log = simulate_run(run, strategy, profile, seed=seed), run.logs[0]
    columns = zip(*(one.losses for one in run.logs), strict=False)
    votes = log.votes.get("by_vote", {})
    return RehearsedCurve(
        str(strategy),
        profile.ranks,
        tuple(fmean(nan if x is None else x for x in column) for column in columns),
        clock.ends_s,
        tuple(held_out),
        {name: tuple(map(bool, column["yes"])) for name, column in votes.items()},
        tuple(log.decisions),
        fmean(one.input_elements for one in run.logs) / len(log.losses),
        clock.prediction,
        run,
    )


# ---- processes ------------------------------------------------------------------------------

_inherited: Any = None  # work of a forked process: functions of the caller cannot be pickled


def run_all(
    work: Callable[[Strategy, Callable[[int], None]], RehearsedCurve],
    strategies: Sequence[Strategy],
    processes: int,
    progress: Progress | None,
) -> list[RehearsedCurve]:
    """Rehearse strategies, several at the same time in processes of their own.

    Args:
        work: function of (strategy, report of its iterations).
        strategies: strategies to rehearse.
        processes: number of processes, at most that of strategies; 1: this process.
        progress: called with a strategy and its number of finished iterations.

    Raises:
        RuntimeError: a process does not start to compute, or ends without a result.
    """
    report = progress or (lambda *_: None)
    if processes == 1:
        return [work(strategy, partial(report, str(strategy))) for strategy in strategies]
    if torch.cuda.is_initialized():
        raise ValueError(
            f"processes ({processes}) must be 1 where this process uses a GPU, which a forked "
            "process cannot use; call rehearse before the first use of the GPU"
        )
    names = [str(strategy) for strategy in strategies]
    pool, receiver, sender = _start_processes(work, strategies, processes)
    curves = pool.map(_run_inherited, range(len(strategies)))
    try:
        with _Listener(receiver, sender, lambda number, done: report(names[number], done)), pool:
            return list(curves)
    except BrokenProcessPool as error:
        raise RuntimeError(
            f"processes ({processes}): one of them has ended without a result, as when memory is "
            "exhausted; use processes=1"
        ) from error


def _start_processes(
    work: Callable[..., RehearsedCurve], strategies: Sequence[Strategy], processes: int
) -> tuple[ProcessPoolExecutor, Connection, Connection]:
    """Return processes that compute, and both ends of the pipe of their reports.

    A fork copies locks in their state, but not the threads that would release them. Threads of an
    earlier rehearsal end after their `join`, and hold locks of MKL while they free their memory. A
    process that was forked at that moment never ends a product of matrices. So processes are forked
    when no thread runs, and forked again if they do not compute.

    Raises:
        RuntimeError: a process has not computed in any attempt.
    """
    context = get_context("fork")
    for _ in range(STARTS):
        receiver, sender = context.Pipe(duplex=False)
        pool = ProcessPoolExecutor(processes, context, _start_process, (work, strategies, sender))
        _await_idle_threads()
        pool.submit(int)  # forks all processes
        forked, until_s = [*pool._processes.values()], time.monotonic() + START_S
        started = 0
        while started < processes and receiver.poll(max(0.0, until_s - time.monotonic())):
            receiver.recv()
            started += 1
        if started == processes:
            return pool, receiver, sender
        for process in forked:
            process.kill()
        pool.shutdown()
    raise RuntimeError(
        f"processes ({processes}): one of them has not computed within {START_S:g} s in {STARTS} "
        "attempts, as if a thread of this process held a lock during the fork; use processes=1, or "
        "call rehearse in a process without other threads"
    )


def _await_idle_threads() -> None:
    """Wait until all other threads of this process sleep, for at most `IDLE_S` seconds."""
    until_s, own = time.monotonic() + IDLE_S, str(get_native_id())
    while time.monotonic() < until_s and any(
        _is_running(task) for task in Path("/proc/self/task").glob("*") if task.name != own
    ):
        time.sleep(0.002)


def _is_running(task: Path) -> bool:
    """Return whether a thread of this process neither sleeps nor has ended."""
    try:
        state = (task / "stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state in "RD"


def _start_process(*inherited: Any) -> None:
    """Keep the work in a forked process, and report as soon as a new thread of it computes."""
    global _inherited
    _inherited = inherited
    torch.set_num_threads(1)  # threads of OpenMP do not survive a fork
    thread = Thread(target=_compute)
    thread.start()
    thread.join()
    inherited[-1].send(None)


def _compute() -> None:
    """Compute as a replica does, with matrices for which MKL allocates memory."""
    x = torch.ones(400, 400, requires_grad=True)
    (x @ x).sum().backward()


def _run_inherited(index: int) -> RehearsedCurve:
    work, strategies, reports = _inherited
    curve = work(strategies[index], lambda done: reports.send((index, done)))
    return replace(curve, prediction=None)  # a prediction holds functions


class _Listener:
    """Thread that passes on the reports of forked processes while the body runs.

    The ends of the pipe have no lock, which a killed process would keep: the system writes so few
    bytes at once. The pipe is read until the body ends, because a full one would stop processes. An
    error of `report` is raised at the end.
    """

    def __init__(
        self, receiver: Connection, sender: Connection, report: Callable[[int, int], None]
    ) -> None:
        self._receiver, self._sender, self._report = receiver, sender, report
        self._thread = Thread(target=self._listen, name="offbeat-rehearsal-progress", daemon=True)
        self._error: BaseException | None = None

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self._sender.send(None)
        self._thread.join()
        self._sender.close()
        self._receiver.close()
        if kind is None and self._error is not None:
            raise self._error

    def _listen(self) -> None:
        while (one := self._receiver.recv()) is not None:
            if self._error is None:
                try:
                    self._report(*one)
                except BaseException as error:
                    self._error = error
