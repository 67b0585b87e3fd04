"""What the ranks do in the tests of gradients added up over windows, and of the guard."""

from __future__ import annotations

import gc
import io
import json
import os
import re
import warnings
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass, replace
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau, SequentialLR, StepLR

from cases.models import Case, batch, loss_of, profile_of
from cases.oddities import build
from cases.schedules import CASE, Now, Script, follow, go_on, started
from cases.workers import Trained, bits, prepared, rank, snapshot, world_size
from offbeat import WFBP, Plan, Planned, Profile, Strategy
from offbeat.core.runtime import job_profile
from offbeat.jobs.record_lines import rank_file, read_rank
from offbeat.plan import Apply, Buffer, Merge, Moment, Phases, local, transfer
from offbeat.profile import Link
from offbeat.strategies import convergence as guard
from offbeat.testing import inspect

# ---- merged ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Merging(Planned):
    """Windows of `period` iterations. The output side's bucket leaves in the backward that closes
    its window, the others under the next forward, links in turn.

    `guards`: watched; `by`: what the period depends on once gradient noise is known: then it is
    one longer, with "rate" only at rates above 0.07.
    """

    period: int = 2
    merge: Merge = "sum"
    guards: bool = False
    by: str = ""

    name: ClassVar[str] = "merging"
    citation: ClassVar[str] = "tests"

    def fallback(self) -> Planned | None:
        return WFBP() if self.guards else None

    def schedule(self, profile: Profile) -> Plan:
        n, size = self.period, len(profile.buckets)
        noise = profile.noise
        if noise is not None and self.by == "rate":
            n += noise.step_size > 0.7  # that of rank 0 is 0.05 / (1 - 0.9), the other's twice that
        elif noise is not None and self.by:
            n += 1
        first, close = range(1), Moment("grad", 0)
        links = [link.name for link in profile.links]
        closes = Phases([n - 1, 2 * n - 1])
        transfers = [
            transfer(
                "grad",
                range(b, b + 1),
                after=Moment("forward"),
                before=Moment("step", lag=n - 1),
                phases=[n],
                link=links[b % len(links)],
                age=1,
            )
            for b in range(1, size)
        ]
        due = Moment("step", lag=n)
        transfers.append(
            transfer("grad", first, after=close, before=due, phases=closes, link=links[0])
        )
        applies = (
            local(size, Moment("step"), closes, age=1, merge=self.merge),
            Apply("close", range(size), Moment("end"), closes),
        )
        copies = (Buffer("grad", "grad", copies=2),)
        return Plan(
            self.name, size, tuple(transfers), applies, buffers=copies, period=n, prologue=n
        )

    def bound_s(self, profile: Profile) -> float:
        return 0.0


def closes_every(period: int) -> Callable[[int], bool]:
    """When a window of `Merging` is complete."""
    return lambda r: r % period == period - 1


def train_with_pauses(strategy: Strategy, pauses: Sequence[int], iterations: int) -> Trained:
    """Consolidate after these iterations, and at the end."""

    def pause(now: Now) -> None:
        if now.t in pauses:
            now.model.consolidate()

    trained, _ = follow(Script(after=pause), strategy, iterations)
    trained.plan = strategy.plan(profile_of(CASE, world_size()))
    return trained


def consolidate_in_between(strategy: Strategy) -> list[str]:
    """Errors of consolidate after a forward, which may be an evaluation, and after a backward;
    then training goes on."""
    words: list[str] = []

    def refused(model: Any) -> None:
        try:
            model.consolidate()
        except RuntimeError as error:
            words.append(str(error))

    with started(strategy, CASE, 3) as (_, model, optimizer):
        loss_of(model, *batch(CASE, rank(), 3))
        refused(model)
        loss_of(model, *batch(CASE, rank(), 3)).backward()
        refused(model)
        optimizer.step()
        model.consolidate()
    return words


def load_and_consolidate(strategy: Strategy) -> bool:
    """Whether weights loaded while gradients are merged stay as they are."""
    with started(strategy, CASE, 3) as (module, model, _):
        model.load_state_dict({n: torch.ones_like(t) for n, t in module.state_dict().items()})
        model.consolidate()
        return all(bool((t == 1).all()) for t in module.state_dict().values())


def train_on_two_links(strategy: Strategy, iterations: int) -> tuple[Trained, int]:
    """Train, and count the groups of ranks in which gradients are averaged."""
    links = [{"name": name, "interface": "lo"} for name in ("a", "b")]
    os.environ["OFFBEAT_LINKS"] = json.dumps(links)
    profile = profile_of(CASE, world_size(), links=("a", "b"))
    groups, all_reduce = set[int](), dist.all_reduce

    def noted(tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, **more: Any) -> Any:
        if op == dist.ReduceOp.AVG:
            groups.add(id(group))
        return all_reduce(tensor, op, group, **more)

    dist.all_reduce = noted
    trained, _ = follow(Script(), strategy, iterations, profile=profile)
    return trained, len(groups)


def rates_of(strategy: Strategy, name: str, iterations: int) -> list[float]:
    """Learning rates after each iteration; the scheduler `name` is stepped as its users do."""
    with started(strategy, CASE, 0) as (_, model, optimizer):
        scheduler, every = SCHEDULERS[name](optimizer)
        rates = []
        for t in range(iterations):
            go_on(model, optimizer, CASE, range(t, t + 1))
            if t % every == every - 1:
                step_scheduler(scheduler)
            rates.append(optimizer.param_groups[0]["lr"])
        return rates


def step_scheduler(scheduler: Any) -> None:
    """A metric that never gets better."""
    if isinstance(scheduler, ReduceLROnPlateau):
        scheduler.step(1.0)
    else:
        scheduler.step()


def sequential(optimizer: torch.optim.Optimizer) -> LRScheduler:
    parts: list[LRScheduler] = [StepLR(optimizer, 1, 0.9), StepLR(optimizer, 1, 0.5)]
    return SequentialLR(optimizer, parts, milestones=[2])


# (scheduler, iterations between its steps)
SCHEDULERS: dict[str, Callable[[Any], tuple[Any, int]]] = {
    "per iteration": lambda o: (StepLR(o, 1, 0.5), 1),
    "per epoch": lambda o: (StepLR(o, 1, 0.5), 3),
    "plateau": lambda o: (ReduceLROnPlateau(o, factor=0.5, patience=1), 1),
    "plateau per epoch": lambda o: (ReduceLROnPlateau(o, factor=0.5, patience=0), 3),
    "sequential": lambda o: (sequential(o), 1),
}


def tensor_bytes(strategy: Strategy) -> tuple[int, int]:
    """(bytes of all tensors alive, of one copy of the gradients) after some iterations."""
    case = Case("mlp", "sgd")
    with started(strategy, case, 5) as (_, model, optimizer):
        optimizer.zero_grad()
        gc.collect()
        alive = {
            t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
            for t in gc.get_objects()
            if isinstance(t, Tensor)
        }
        return sum(alive.values()), sum(p.nbytes for p in model.parameters() if p.requires_grad)


# ---- guarded -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Watched:
    """What a guarded rank saw."""

    trained: Trained
    strategies: list[str]  # of the plan after each iteration
    periods: list[int]
    warnings: list[str]
    decisions: list[tuple[int, str]]  # with warnings
    united: str  # hash of all bits after consolidate()


def train_guarded(
    strategy: Strategy,
    window: int,
    offsets: dict[tuple[int, int], float],
    iterations: int,
    rates: Sequence[float] = (0.05, 0.05),
) -> Watched:
    """Train with a guard that looks every `window` iterations. `offsets`: what is added to the
    loss per (rank, iteration), without an effect on gradients; `rates`: per rank."""
    guard.WINDOW, guard.WINDOWS_PER_LOOK, guard.LOOKS_PER_ESTIMATE = window, 1, 1
    directory = mkdtemp()
    job = Path(directory) / "job.json"
    job.write_text(json.dumps({"schema": 1, "record_dir": directory}))
    os.environ["OFFBEAT_JOB"] = str(job)
    module, plain = build(CASE)
    names, periods = [], []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        # Different rates make replicas differ, which is not the point here.
        options = {"profile": profile_of(CASE, world_size()), "timeout_s": 8.0, "compare_every": 0}
        with prepared(module, plain, strategy, **options) as (model, optimizer):
            optimizer.param_groups[0]["lr"] = rates[rank()]
            for t in range(iterations):
                optimizer.zero_grad()
                loss = loss_of(model, *batch(CASE, rank(), t))
                (loss + offsets.get((rank(), t), 0.0)).backward()
                optimizer.step()
                names.append(inspect(model).plan.strategy)
                periods.append(inspect(model).plan.period)
            trained = Trained(snapshot(model.state_dict()), snapshot(optimizer.state_dict()))
            model.consolidate(repair=rates[0] != rates[1])
            united = bits(model)
    events = read_rank(rank_file(Path(directory), rank())).events
    told = [one for one in events if one["event"] in ("decision", "warning") and one["iteration"]]
    decisions = [(one["iteration"], one["text"]) for one in told]
    rmtree(directory)
    texts = [str(w.message) for w in caught]
    return Watched(trained, names, periods, texts, decisions, united)


def without_a_window(strategy: Strategy, observed: bool, iterations: int) -> Watched:
    """Train on links whose latency no window can hide, given in a profile or "measured"."""
    profile = profile_of(CASE, world_size())
    slow = (Link(profile.default_link.name, 9.0, 1e9),)
    job_profile.measure_cluster = lambda *_, **__: (slow, ())  # type: ignore[assignment]
    module, plain = build(CASE)
    given = {} if observed else {"profile": replace(profile, links=slow)}
    with (
        redirect_stderr(io.StringIO()) as printed,
        prepared(module, plain, strategy, **given) as (model, optimizer),
    ):
        go_on(model, optimizer, CASE, range(iterations))
        names = [inspect(model).plan.strategy]
        trained = Trained(snapshot(model.state_dict()), snapshot(optimizer.state_dict()))
        united = bits(model)
    text = " ".join(printed.getvalue().split())  # lines are wrapped
    lines = re.findall(r"offbeat: [^;]*; WFBP runs instead of DeFT", text)
    return Watched(trained, names, [], lines, [], united)


def noise_around_a_pause(strategy: Strategy, iterations: int) -> list[tuple[float, float]]:
    """(|G|^2, S / K) before consolidate and after it, where all gradients are three times as
    large; they are constants, twice as large on rank 1."""
    found = []
    with started(strategy, CASE, 0) as (_, model, optimizer):
        for scale in (1.0, 3.0):
            for _ in range(iterations):
                optimizer.zero_grad()
                trainable = [p for p in model.parameters() if p.requires_grad]
                loss = torch.stack([p.sum() for p in trainable]).sum()
                (scale * (1 + rank()) * loss).backward()
                optimizer.step()
            meter = model._session.planner.convergence.meter
            found.append(meter.take())
            model.consolidate()
            meter.take()  # of what consolidate has applied, if that counts
    return found
