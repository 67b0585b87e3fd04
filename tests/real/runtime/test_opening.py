"""Connections are open before the first iteration that a record counts."""

from __future__ import annotations

import json
import os
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from cases import workers
from cases.models import Case
from harness.ranks import run_ranks

from offbeat.core.measuring.connections import LARGE_MESSAGES, MESSAGE_S, open_connections
from offbeat.core.runtime import training_job
from offbeat.core.transport.collectives import Collectives
from offbeat.core.transport.device import CPU
from offbeat.jobs.observer import JobObserver
from offbeat.profile import Bucket, Link, Profile
from offbeat.strategies import ASCWFBP, DDP, Strategy

CASE = Case("mlp", "sgd")


def test_every_link_carries_the_model_around_and_between_all_pairs() -> None:
    sent: list[tuple[str, str, int]] = []

    def link(name: str) -> SimpleNamespace:
        def note(what: str) -> Any:
            return lambda tensor: sent.append((name, what, tensor.nbytes))

        verbs = Collectives({"all_reduce": note("ring")}, lambda *_: None, note("pairs"), size=3)
        return SimpleNamespace(collectives=verbs)

    control = SimpleNamespace(world_size=3, collective=lambda _: nullcontext())
    links = {name: link(name) for name in ("fast", "fast#1", "slow")}
    cluster: Any = SimpleNamespace(
        control=control, links=links, where=torch.device("cpu"), device=CPU()
    )
    profile = Profile(
        (Bucket("a", 0.1, 0.1, 40_000),), (Link("fast", 0.0, 1e6), Link("slow", 0.0, 1e4)), 3
    )
    open_connections(cluster, profile)
    for name, size in (("fast", 40_000), ("fast#1", 40_000), ("slow", int(MESSAGE_S * 1e4))):
        mine = [(what, nbytes) for at, what, nbytes in sent if at == name]
        assert mine[:-1] == [("ring", size)] * LARGE_MESSAGES
        assert mine[-1][0] == "pairs"
        assert size - 12 < mine[-1][1] <= size
        assert mine[-1][1] % 12 == 0  # even shards

    sent.clear()
    control.world_size = 1
    open_connections(cluster, profile)
    assert sent == []


def order(directory: str, strategy: Strategy, recorded: bool) -> list[Any]:
    """Return the events in order: names of opened links, and iterations."""
    events: list[Any] = []
    real, iteration = training_job.open_connections, JobObserver.ended

    def spy(cluster: Any, profile: Profile) -> None:
        events.append(sorted(cluster.links))
        real(cluster, profile)

    def noted(self: JobObserver, done: Any) -> None:
        events.append("iteration")
        iteration(self, done)

    training_job.open_connections, JobObserver.ended = spy, noted  # type: ignore[assignment]
    job = Path(directory, f"job{workers.rank()}.json")
    job.write_text(json.dumps({"schema": 1, **({"record_dir": directory} if recorded else {})}))
    os.environ |= {"OFFBEAT_JOB": str(job), "OFFBEAT_LOG": "off"}
    try:
        workers.train(CASE, strategy, range(2))
    finally:
        training_job.open_connections, JobObserver.ended = real, iteration
    return events


def orders(directory: str) -> list[list[Any]]:
    cases = (ASCWFBP(), True), (ASCWFBP(), False), (DDP(), True)
    return [order(directory, strategy, recorded) for strategy, recorded in cases]


def test_before_the_first_recorded_iteration(tmp_path: Path) -> None:
    """Channels of the plan among them; nothing is sent for it without a record."""
    for planned, unrecorded, ddp in run_ranks(2, orders, str(tmp_path)):
        assert planned == [["net", "net#1"], "iteration", "iteration"]
        assert unrecorded == []
        assert ddp == [["net"], "iteration", "iteration"]
