"""What the ranks do in the tests of wires."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

import offbeat
from cases.workers import bits, prepared, rank
from offbeat import Strategy

ITERATIONS, WIDTH = 10, 128


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    """With running statistics, which travel as they are."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh(), nn.Linear(WIDTH, 3)
    )
    return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def loss_of(model: Any, t: int) -> Tensor:
    rng = torch.Generator().manual_seed(100 * t + rank())
    x = torch.randn(16, WIDTH, generator=rng)
    return (model(x) - x[:, :3].sin()).square().mean()


def train(strategies: Sequence[Strategy]) -> list[dict[str, Any]]:
    """Of every strategy a hash of all parameters after each iteration, the statistics at the end,
    losses, bytes sent and predicted. The first one measures the profile of all."""
    found = []
    # Buffers that are broadcast are not coded, so they would hide how few bytes codes are.
    how: dict[str, Any] = {"observe": 2, "min_bucket_bytes": 1, "broadcast_buffers": False}
    for strategy in strategies:
        model, optimizer = build()
        with prepared(model, optimizer, strategy, **how) as (model, optimizer):
            hashes, losses = [], []
            for t in range(2 + ITERATIONS):
                if t == 2:
                    before = sum(model._session.traffic().values())
                optimizer.zero_grad()
                loss = loss_of(model, t)
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
                hashes.append(bits(model))
            session = model._session
            how = {"profile": session.profile, "broadcast_buffers": False}
            statistics, sent = model.state_dict()["1.running_mean"].clone(), session.traffic()
            model.consolidate()
            found.append(
                {
                    "hashes": hashes[2:],
                    "consolidated": bits(model),
                    "losses": losses,
                    "statistics": statistics,
                    "bytes": sum(sent.values()) - before,
                    "wires": [t.wire for t in session.plan.transfers],
                    "codecs": sorted(c.name for c in session.profile.codecs),
                }
            )
    return found


def loaded(strategy: Strategy, odd: int) -> str:
    """All load weights in the middle, one rank others: what becomes of it, in words."""
    model, optimizer = build()
    how: dict[str, Any] = {"observe": 1, "min_bucket_bytes": 1, "timeout_s": 20.0}
    model, optimizer = offbeat.prepare(model, optimizer, strategy, **how)
    for t in range(8):
        if t == 4:
            model.consolidate()
            weights = {k: v.clone() for k, v in model.state_dict().items()}
            if rank() == odd:
                weights["0.weight"] += 1
            model.load_state_dict(weights)
        try:
            optimizer.zero_grad()
            loss_of(model, t).backward()
            optimizer.step()
        except RuntimeError as error:
            return str(error)
    return "trained on"


def killed_between(strategy: Strategy, doomed: int) -> tuple[str, list[bool]]:
    """The doomed rank has encoded its second message when it dies, and does not send. Of the
    others: the error, and whether errors and anchor are what they were when it began."""
    model, optimizer = build()
    model, optimizer = offbeat.prepare(model, optimizer, strategy, observe=1, timeout_s=5.0)
    words, kept = "", []
    for t in range(20):
        session = model._session
        if t == 3:
            interrupt(session, doomed)
        flat = session.engine.flat
        names = [b.name for b in session.plan.buffers] if t > 2 else []
        before = [x.clone() for name in names for x in flat.contents(name)[0]]
        try:
            optimizer.zero_grad()
            loss_of(model, t).backward()
            optimizer.step()
        except RuntimeError as error:
            words = str(error)
            after = [x for name in names for x in flat.contents(name)[0]]
            kept = [torch.equal(a, b) for a, b in zip(before, after, strict=True)]
            break
    return words, kept


def interrupt(session: Any, doomed: int) -> None:
    """Kill a rank in place of its next gathering of codes."""
    link = session.engine.links["net"]
    gather = link.collectives.by_verb["all_gather"]

    def act(tensor: Tensor) -> None:
        if rank() == doomed:
            os.kill(os.getpid(), signal.SIGKILL)
        gather(tensor)

    by_verb = {**link.collectives.by_verb, "all_gather": act}
    link.collectives = replace(link.collectives, by_verb=by_verb)
