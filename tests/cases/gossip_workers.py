"""What ranks of gossip's worlds do; a module of its own, so that processes can import it."""

from __future__ import annotations

import json
import os
import signal
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import offbeat
from cases.models import Case, batch, build_model, build_optimizer, build_scheduler, loss_of
from cases.tiny_runs import data_of
from cases.workers import rank, snapshot, world_size
from offbeat.core.transport.control import Control
from offbeat.gossip import pairs
from offbeat.gossip import session as gossip_session
from offbeat.gossip.clock import Clock, Line
from offbeat.gossip.strategies import Gossip
from offbeat.gossip.view import State
from offbeat.strategies import A2CiD2
from offbeat.testing import inspect


@dataclass
class Gossiped:
    """What a worker has at the end."""

    model: dict[str, Tensor]
    before: dict[str, Tensor]
    seen: list[bool]  # whether forward and backward saw the same weights
    exchanges: int
    units: list[tuple[float, float]]  # units of time that were agreed on, and since when
    said: list[str] = field(default_factory=list)


def gossip(
    case: Case,
    strategy: Gossip,
    iterations: int,
    doomed: int | None = None,
    exchanges: int = 0,
) -> Gossiped:
    """Train with gossip, for so many iterations and until there were so many exchanges; `doomed`
    kills itself when it has had one."""
    model = build_model(case)
    optimizer = build_optimizer(case, model)
    model, optimizer = offbeat.prepare(model, optimizer, strategy, timeout_s=20.0)
    scheduler = build_scheduler(case, optimizer)
    state, seen, t, size = inspect(model), [], 0, world_size()
    units = noted_units(model._session._clock)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        while t < iterations or (size > 1 and sum(state.exchanges.values()) < exchanges):
            if rank() == doomed and state.exchanges:
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.zero_grad()
            loss = loss_of(model, *batch(case, rank(), t))
            weights = [p.clone() for p in model.module.parameters()]
            loss.backward()
            seen.append(all(map(torch.equal, weights, model.module.parameters())))
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
            t += 1
        if rank() == doomed:  # its first exchange came with its last iteration
            os.kill(os.getpid(), signal.SIGKILL)
        while doomed is not None and model._session._gossip.view.dead_workers() != [doomed]:
            pass_on(model, optimizer, case)
        before = snapshot(model.state_dict())
        model.consolidate()
    found = Gossiped(
        snapshot(model.state_dict()),
        before,
        seen,
        sum(state.exchanges.values()),
        [*units],
        [str(one.message) for one in said],
    )
    model.close()
    return found


def noted_units(clock: Clock) -> list[tuple[float, float]]:
    """A list that grows with the units of a clock."""
    follow, line = clock.follow, clock.line
    units = [] if line.unit_s is None else [(line.unit_s, line.since_s)]

    def note(line: Line) -> None:
        if line != clock.line and line.unit_s is not None:
            units.append((line.unit_s, line.since_s))
        follow(line)

    clock.follow = note  # type: ignore[method-assign]
    return units


def in_evaluation_mode(strategy: Gossip) -> int:
    """Train a model in evaluation mode, by its bare module, with a look at all parameters after
    every step, until there was an exchange; again after `consolidate`. How many there were."""
    case = Case("mlp", "sgd")
    model = build_model(case)
    optimizer = build_optimizer(case, model)
    model, optimizer = offbeat.prepare(model, optimizer, strategy, timeout_s=20.0)
    model.eval()
    state = inspect(model)
    for trained in (model, model.module):
        before = sum(state.exchanges.values())
        while sum(state.exchanges.values()) == before:
            pass_on(trained, optimizer, case)
            list(model.parameters())
        model.consolidate()
    found = sum(state.exchanges.values())
    model.close()
    return found


def recorded(
    directory: str, case: Case, strategy: Gossip, iterations: int, exchanges: int
) -> dict[str, Any]:
    """The record of such a training."""
    job = Path(directory) / f"job{rank()}.json"
    job.write_text(json.dumps({"schema": 1, "record_dir": directory}))
    os.environ["OFFBEAT_JOB"] = str(job)
    gossip(case, strategy, iterations, None, exchanges)
    return data_of(directory, rank())


def pass_on(model: Any, optimizer: Any, case: Case) -> None:
    """One more iteration."""
    optimizer.zero_grad()
    loss_of(model, *batch(case, rank(), 0)).backward()
    optimizer.step()


def refused(strategy: Gossip, optimizer: str = "sgd") -> str:
    """The words of the error that every rank gets."""
    model = torch.nn.Linear(3, 2)
    if optimizer == "coupled":
        made: Any = Clipping(model.parameters(), lr=0.1)
    else:
        made = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        offbeat.prepare(model, made, strategy, timeout_s=20.0)
    except ValueError as error:
        return str(error)
    return ""


class Clipping(torch.optim.SGD):
    """Clips by the norm of all gradients in its step."""

    def step(self, closure: Any = None) -> Any:
        parameters = [p for group in self.param_groups for p in group["params"]]
        torch.nn.utils.clip_grad_norm_(parameters, 0.1)
        return super().step(closure)


def around(strategy: Gossip) -> list[tuple[int, int]]:
    """The edges of the job."""
    case = Case("mlp", "sgd")
    model = build_model(case)
    model, _ = offbeat.prepare(model, build_optimizer(case, model), strategy, timeout_s=20.0)
    edges = model._session._gossip.view.edges(State.LEFT)
    model.close()
    return edges


def pairs_with_a_slow_one() -> tuple[list[list[float]], list[list[float]]]:
    """What is measured of all pairs, where large messages between ranks 0 and 3 take .2 s more."""
    swap = pairs._swap

    def slow(control: Control, partner: int, mine: Tensor) -> float:
        late_s = 0.2 if {control.rank, partner} == {0, 3} and mine.numel() > 1 else 0.0
        return swap(control, partner, mine) + late_s

    pairs._swap = slow
    dist.init_process_group("gloo")
    rates, delays = pairs.measure_pairs(Control(20.0), 1 << 20)
    return rates.tolist(), delays.tolist()


def loaded() -> tuple[Tensor, ...]:
    """x and x~ before a checkpoint is loaded, what it holds, and x and x~ afterwards."""
    case = Case("mlp", "nesterov")
    model = build_model(case)
    optimizer = build_optimizer(case, model)
    model, optimizer = offbeat.prepare(model, optimizer, A2CiD2("complete", 4.0), timeout_s=20.0)
    session = model._session
    while sum(inspect(model).exchanges.values()) < 3:
        pass_on(model, optimizer, case)
    session._gossip.pause()
    saved = snapshot(model.state_dict())
    for _ in range(50):  # until an exchange has set them apart
        session._gossip.resume()
        pass_on(model, optimizer, case)
        session._gossip.pause()
        before = [session._flats[0].clone(), session._state._tilde[0].clone()]
        if not torch.equal(*before):
            break
    model.load_state_dict(saved)
    trained = [p.detach().flatten() for p in model.module.parameters() if p.requires_grad]
    after = [session._flats[0].clone(), session._state._tilde[0].clone()]
    model.close()
    return (*before, torch.cat(trained), *after)


def consolidated() -> tuple[int, int]:
    """How many meetings that took, and what became of counts of 9 and 10 batches."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    prepared, _ = offbeat.prepare(model, optimizer, A2CiD2("complete"), timeout_s=20.0)
    count: Any = model[1].num_batches_tracked
    count.fill_(9 + rank())
    prepared.consolidate()
    found = prepared._session._gossip._reductions.held, int(count)
    prepared.close()
    return found


def gradient_seconds() -> list[float]:
    """What gossip is told of gradients that take 1 s, and data .5 s before each; after the fourth
    one somebody looks at the model for 100 s. Seconds are made up."""
    os.environ["OFFBEAT_LOG"] = "off"  # the gossip of this session is replaced below
    case, told, clock = Case("mlp", "sgd"), [], SimpleNamespace(now=0.0)
    gossip_session.time = SimpleNamespace(perf_counter=lambda: clock.now)  # type: ignore[assignment]
    model = build_model(case)
    model, optimizer = offbeat.prepare(model, build_optimizer(case, model), A2CiD2())
    nothing = dict.fromkeys(("resume", "check", "close"), lambda: None)
    model._session._gossip = SimpleNamespace(
        record_gradient=told.append, take_notices=list, **nothing
    )
    for t in range(6):
        clock.now += 0.5
        optimizer.zero_grad()
        loss = loss_of(model, *batch(case, 0, t))
        clock.now += 1.0
        loss.backward()
        optimizer.step()
        if t == 3:
            model.state_dict()
            clock.now += 100.0
    model.close()
    return told


def exchanged_before(training: bool) -> bool:
    """Whether a forward sees what was exchanged since the last step."""
    case = Case("mlp", "sgd")
    model = build_model(case)
    model, optimizer = offbeat.prepare(model, build_optimizer(case, model), A2CiD2())
    pass_on(model, optimizer, case)
    session = model._session
    session._state._separate_x()
    session._state._x[0].add_(1.0)
    before = session._flats[0].clone()
    model.train(training)
    loss_of(model, *batch(case, 0, 0))
    after = session._flats[0].clone()
    model.close()
    return torch.equal(after, before + 1.0)
