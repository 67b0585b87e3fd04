"""What ranks of SSP's worlds do; a module of its own, so that processes can import it."""

from __future__ import annotations

import io
import os
import signal
from contextlib import redirect_stderr
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import offbeat
from cases.models import (
    Case,
    batch,
    build_model,
    build_optimizer,
    build_scheduler,
    loss_of,
)
from cases.workers import rank, snapshot
from offbeat import Strategy


@dataclass
class Worked:
    """What a worker has at the end."""

    model: dict[str, Tensor]
    optimizer: dict[str, Any]
    evaluated: dict[str, Tensor]
    clock: int
    united: str = ""  # hash of all bits after consolidate()
    begun: int = 0  # offbeat.iteration(model) before the first iteration
    said: str = ""  # what prepare has written to stderr


def work(
    case: Case,
    strategy: Strategy,
    iterations: int,
    servers: int,
    doomed: int | None = None,
    bare: bool = False,
) -> Worked | int | str | None:
    """Train on a worker and serve on the last ranks; `doomed` kills itself half way,
    `bare` calls the user's own module. A server's result is its exit code."""
    os.environ["OFFBEAT_SERVERS"] = str(servers)
    model = build_model(case)
    optimizer = build_optimizer(case, model)
    said = io.StringIO()
    try:
        with redirect_stderr(said):
            model, optimizer = offbeat.prepare(model, optimizer, strategy, timeout_s=20.0)
    except SystemExit as end:
        return end.code
    begun = offbeat.iteration(model)
    scheduler = build_scheduler(case, optimizer)
    for t in range(iterations):
        if rank() == doomed and t == iterations // 2:
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.zero_grad()
        loss_of(model.module if bare else model, *batch(case, rank(), t)).backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
    model.eval()
    with torch.no_grad():
        model(batch(case, rank(), 0)[0])
    evaluated = snapshot(dict(model.module.named_parameters()))
    if doomed is None:
        model.consolidate()
    found = Worked(
        snapshot(model.state_dict()),
        snapshot(optimizer.state_dict()),
        evaluated,
        model._session._client.clock,
        begun=begun,
        said=said.getvalue(),
    )
    assert offbeat.iteration(model) == begun + iterations
    model.close()
    return found


def sparsely(strategy: Strategy) -> list[Tensor]:
    """Parameters before and after a step of an embedding whose gradients are sparse, where this
    worker looks up row 0 and the other one row 1."""
    os.environ["OFFBEAT_SERVERS"] = "1"
    torch.manual_seed(0)
    model: Any = torch.nn.Embedding(3, 2, sparse=True, dtype=torch.float64)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.5)
    found = [model.weight.detach().clone()]
    try:
        model, optimizer = offbeat.prepare(model, optimizer, strategy, timeout_s=20.0)
    except SystemExit:
        return []
    model(torch.tensor([rank()])).sum().backward()
    optimizer.step()
    model.consolidate()
    found.append(model.weight.detach().clone())
    model.close()
    return found


def refused(servers: int, strategy: Any) -> str:
    """The words of the error that every rank gets."""
    os.environ["OFFBEAT_SERVERS"] = str(servers)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if rank() == 1 and servers == 1:
        os.environ["OFFBEAT_SECRET"] = "another"
    try:
        offbeat.prepare(model, optimizer, strategy, timeout_s=20.0)
    except ValueError as error:
        return str(error)
    return ""
