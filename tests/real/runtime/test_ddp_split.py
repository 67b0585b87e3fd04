"""How long torch's DDP waits within backward, as recorded and as reported."""

from __future__ import annotations

import json
import os
import time
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cases.tiny_runs import data_of
from cases.workers import rank
from harness.ranks import run_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import offbeat
from offbeat.profile import Bucket, Link, Profile
from offbeat.strategies.ddp_session import BackwardClock

LATE_S, BACKWARD_S, ITERATIONS = 0.3, 0.02, 5


class Late(torch.autograd.Function):
    """Rank 1 takes longer in backward, before its gradients exist."""

    @staticmethod
    def forward(_: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(_: Any, grad: torch.Tensor) -> torch.Tensor:
        time.sleep(LATE_S * rank())
        return grad


def record_of(directory: str, accumulate: bool, private: bool) -> dict[str, Any]:
    """The record of some iterations of DDP; with `accumulate` two backwards each."""
    folder = Path(directory, f"{accumulate}{private}")
    folder.mkdir(exist_ok=True)
    bucket = Bucket("linear", 0.001, BACKWARD_S, 4 * 8 * 8 + 32, tensors=("weight", "bias"))
    profile = folder / f"profile{rank()}.json"
    Profile((bucket,), (Link("net", 1e-4, 1e8),), 2).save(profile)
    job = folder / f"job{rank()}.json"
    job.write_text(json.dumps({"schema": 1, "record_dir": str(folder), "profile": str(profile)}))
    os.environ["OFFBEAT_JOB"] = str(job)
    if not private:
        DistributedDataParallel._get_ddp_logging_data = None  # type: ignore[method-assign]
    linear = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(linear.parameters(), 0.1)
    with warnings.catch_warnings():  # torch warns of former names of DDP's options
        warnings.simplefilter("error", FutureWarning)
        model, optimizer = offbeat.prepare(linear, optimizer, offbeat.DDP())
    for _ in range(ITERATIONS):
        optimizer.zero_grad()
        if accumulate:
            with model.no_sync():
                Late.apply(model(torch.ones(2, 8))).sum().backward()
        Late.apply(model(torch.ones(2, 8))).sum().backward()
        optimizer.step()
    model.close()
    return data_of(folder, rank())


def records(directory: str) -> list[dict[str, Any]]:
    return [
        record_of(directory, accumulate, private)
        for accumulate, private in ((False, True), (True, True), (False, False))
    ]


def seconds_of(record: dict[str, Any], kind: str) -> dict[int, float]:
    """By iteration what a kind of span took."""
    spans = record["trace"]["spans"]
    rows = [dict(zip(spans["fields"], row, strict=True)) for row in spans["rows"]]
    found: dict[int, float] = {}
    for row in rows:
        if row["kind"] == kind and row["lane"] == "compute":
            at = row["iteration"]
            found[at] = found.get(at, 0.0) + row["end_s"] - row["start_s"]
    return found


def test_waiting_within_backward_is_not_compute(tmp_path: Path) -> None:
    zero, one = run_ranks(2, records, str(tmp_path))
    for usual, accumulated, estimated in (zero, one):
        for record in (usual, accumulated):
            notes = record["trace"]["notes"]
            # The times of the last iteration are never known: torch is one iteration late.
            assert notes["backward"]["measured"] == ITERATIONS - 1
            assert (notes["backward"]["estimated"], notes["estimated"]) == (1, [ITERATIONS - 1])
        notes = estimated["trace"]["notes"]
        assert (notes["backward"]["measured"], notes["backward"]["estimated"]) == (0, ITERATIONS)
        assert notes["estimated"] == [ITERATIONS - 3, ITERATIONS - 2, ITERATIONS - 1]
    measured = [ITERATIONS - 3, ITERATIONS - 2]
    for record in zero[:2]:  # rank 0 waits for rank 1 once per iteration
        waits = seconds_of(record, "wait")
        for i in measured:
            assert waits[i] > 0.5 * LATE_S
    for record in one[:2]:
        assert min(seconds_of(record, "backward")[i] for i in measured) > 0.9 * LATE_S
    waited = [record["trace"]["notes"]["backward"]["waited_s"] for record in (zero[0], one[0])]
    assert waited[0] > 0.5 * LATE_S > waited[1]
    for record in (zero[2], one[2]):  # without times, compute is as profiled
        backward = seconds_of(record, "backward")
        for i in record["trace"]["notes"]["estimated"]:
            assert backward[i] == pytest.approx(BACKWARD_S, abs=1e-6)


def test_times_that_were_read_before_are_not_taken_again() -> None:
    """The times stay the same while gradients accumulate."""
    data: dict[str, Any] = {}
    module: Any = SimpleNamespace(_get_ddp_logging_data=lambda: data)
    clock = BackwardClock(module)
    assert clock.new_times() is None
    data |= {"backward_compute_time_start": 7, "backward_comm_time": 3_000_000}
    assert clock.new_times() is None
    data["backward_compute_comm_overlap_time"] = 1_000_000
    assert clock.new_times() == pytest.approx((0.003, 0.002))
    assert clock.new_times() is None
    data["backward_compute_time_start"] = 8
    assert clock.new_times() == pytest.approx((0.003, 0.002))
    assert BackwardClock(SimpleNamespace()).new_times() is None  # type: ignore[arg-type]
