"""Micro-batches interleaved over processes, beside a direct transcription of the equations."""

from __future__ import annotations

import os
import re
import signal
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases.cyclic import ITERATIONS, batch, chain, equations, optimizer_of
from harness.parts import Placement, Timetable, Work
from harness.ranks import run_ranks, watch_ranks
from torch import Tensor, nn

from offbeat.cyclic import Interleaved, merge_records, recording
from offbeat.strategies import Cyclic

RULES = (
    ("sgd", Cyclic()),
    ("adam", Cyclic(rule="v1")),
    ("sgd", Cyclic(rule="random", seed=1)),
    ("adam", Cyclic(start="skip")),
    ("sgd", Cyclic(rule="v1", clip=0.1)),
)


def trained(n: int, placement: Placement, anew: int | None) -> list[Any]:
    """By rule: losses that this rank has computed, and all parameters in the end."""
    dist.init_process_group("gloo")
    found = []
    for name, strategy in RULES:
        model = chain(n)
        if dist.get_rank():  # as with another seed: rank 0's weights count
            nn.init.zeros_(model[0][0].weight)
        trainer = Interleaved(
            [*model],
            optimizer_of(name, model),
            nn.functional.mse_loss,
            strategy,
            placement,
            timeout_s=20,
        )
        losses = []
        for t in range(ITERATIONS):
            if t == anew:
                losses += trainer.consolidate()
            losses += trainer.step([batch(i, t) for i in range(1, n + 1)])
            here = [j for j, stage in enumerate(trainer.stages) if stage.versions]
            assert placement == "zero" or here == trainer.table.stages_of(dist.get_rank())
        losses += trainer.consolidate()
        found.append(([loss.item() for loss in losses], dict(model.state_dict())))
    dist.destroy_process_group()
    return found


@pytest.mark.parametrize(
    ("placement", "n", "anew"),
    [
        ("workers", 3, None),
        ("pyramid", 3, 2),
        ("pipeline", 4, 3),
        ("zero", 4, 2),
    ],
)
def test_equals_its_equations(placement: Placement, n: int, anew: int | None) -> None:
    ranks = run_ranks(Timetable(placement, n).devices, trained, n, placement, anew)
    for k, (name, strategy) in enumerate(RULES):
        expected, theta = equations(n, name, strategy, anew=anew)
        losses = sorted(loss for found in ranks for loss in found[k][0])
        torch.testing.assert_close(
            torch.tensor(losses),
            torch.tensor(expected, dtype=torch.float64).flatten().sort().values.float(),
        )
        for found in ranks:
            for key, value in found[k][1].items():
                torch.testing.assert_close(value, theta[key], rtol=0, atol=1e-12)


def nesterov(n: int) -> list[dict[str, Tensor]]:
    """By placement: all parameters in the end, of an optimizer whose step writes to gradients."""
    dist.init_process_group("gloo")
    found = []
    placements: tuple[Placement, ...] = ("single", "workers")
    for placement in placements:
        model = chain(n)
        optimizer = torch.optim.SGD(
            model.parameters(), lr=0.1, momentum=0.9, nesterov=True, foreach=True
        )
        trainer = Interleaved([*model], optimizer, nn.functional.mse_loss, None, placement, 20)
        for t in range(ITERATIONS):
            trainer.step([batch(i, t) for i in range(1, n + 1)])
        trainer.consolidate()
        found.append(dict(model.state_dict()))
    dist.destroy_process_group()
    return found


def test_copies_of_a_stage_stay_equal_where_steps_write_to_gradients() -> None:
    """Each worker steps its copy with the average gradient, which they pass on one by one."""
    n = 3
    for alone, together in run_ranks(n, nesterov, n):
        for key, value in together.items():
            torch.testing.assert_close(value, alone[key], rtol=0, atol=1e-12)


def resumed(n: int, placement: Placement) -> list[Any]:
    """Two iterations, a checkpoint, and the rest with a new trainer that starts from it."""
    dist.init_process_group("gloo")
    found = []
    for name in ("sgd", "adam"):
        saved = None
        for iterations in (range(2), range(2, ITERATIONS)):
            model = chain(n)
            optimizer = optimizer_of(name, model)
            if saved is not None:
                model.load_state_dict(saved[0])
                optimizer.load_state_dict(saved[1])
            trainer = Interleaved(
                [*model], optimizer, nn.functional.mse_loss, placement=placement, timeout_s=20
            )
            for t in iterations:
                trainer.step([batch(i, t) for i in range(1, n + 1)])
            trainer.consolidate()
            saved = model.state_dict(), optimizer.state_dict()
        assert saved is not None
        found.append(saved[0])
    dist.destroy_process_group()
    return found


@pytest.mark.parametrize("placement", ["pyramid", "zero"])
def test_goes_on_from_a_checkpoint(placement: Placement) -> None:
    n = 2
    for found in run_ranks(Timetable(placement, n).devices, resumed, n, placement):
        for k, name in enumerate(("sgd", "adam")):
            _, theta = equations(n, name, Cyclic(), anew=2)
            for key, value in found[k].items():
                torch.testing.assert_close(value, theta[key], rtol=0, atol=1e-12)


def held(n: int) -> tuple[int, int, Any]:
    """The most stages that are here at once: when all workers are busy, and ever; a record."""
    dist.init_process_group("gloo")
    model = chain(n)
    trainer = Interleaved(
        [*model], optimizer_of("sgd", model), nn.functional.mse_loss, None, "zero", 20
    )
    here = {}
    with recording(trainer) as record:
        told = trainer.on_work
        assert told is not None

        def worked(work: Work, begin_s: float, end_s: float) -> None:
            told(work, begin_s, end_s)
            here[work.time] = sum(stage.nbytes > 0 for stage in trainer.stages)

        trainer.on_work = worked
        for t in range(4):
            trainer.step([batch(i, t) for i in range(1, n + 1)])
        trainer.finish()
    dist.destroy_process_group()
    busy = range(2 * n, 4 * 2 * n)
    return max(here[time] for time in busy), max(here.values()), record


def test_a_worker_holds_two_travelling_stages_at_a_time() -> None:
    n = 4
    ranks = run_ranks(n, held, n)
    assert [(busy, ever) for busy, ever, _ in ranks] == [(2, 3)] * n
    run = merge_records(Timetable("zero", n), [record for _, _, record in ranks])
    assert len(run.works) == 4 * 2 * n * n
    busy = range(2 * n, 4 * 2 * n - 1)
    for record in (record for _, _, record in ranks):
        steps = [message.sent for message, _, _ in record.sent if message.sent in busy]
        assert len(steps) == len(set(steps))  # one message between two time steps
        assert record.peak_activation_bytes > 0


def killed(n: int, placement: Placement, victim: int, pause_s: float) -> None:
    dist.init_process_group("gloo")
    model = chain(n)
    trainer = Interleaved(
        [*model], optimizer_of("sgd", model), nn.functional.mse_loss, None, placement, 20
    )
    for t in range(ITERATIONS):
        if t == 3 and dist.get_rank() == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        elif t == 3:
            time.sleep(pause_s)
        trainer.step([batch(i, t) for i in range(1, n + 1)])


@pytest.mark.parametrize(
    ("placement", "n", "victim", "pause_s"),
    [("pyramid", 3, 2, 0.0), ("zero", 4, 0, 0.0), ("zero", 4, 0, 1.0)],
    ids=["pyramid", "zero", "connections closed before"],
)
def test_names_the_worker_that_died(
    placement: Placement, n: int, victim: int, pause_s: float
) -> None:
    world = [n, placement, victim, pause_s]
    devices = Timetable(placement, n).devices
    outcomes = watch_ranks(devices, killed, *world, doomed=[victim], timeout_s=60)
    for outcome in outcomes:
        if outcome.rank != victim:
            assert outcome.kind == "RuntimeError"
            named = re.search(
                r"Rank (\d+) \(\S+\) (?:has died|cannot be reached|keeps)", outcome.error
            )
            assert named is not None, outcome.error
            assert int(named[1]) == victim


def refused(kind: str) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = chain(3 if kind == "processes" else 2)
    if kind == "model" and rank == 1:
        model[1] = nn.Sequential(nn.Linear(5, 5, bias=False)).double()
    kinds = {"state": torch.optim.Adafactor}
    rate = 0.2 if kind == "rate" and rank == 1 else 0.1
    optimizer = kinds.get(kind, torch.optim.SGD)(model.parameters(), lr=rate)
    placement: Placement = "zero" if kind == "state" else "pipeline"
    trainer = Interleaved([*model], optimizer, nn.functional.mse_loss, None, placement, 5)
    whole, part = batch(1, 0), tuple(x[:2] for x in batch(2, 0))
    trainer.step([whole, part])
    trainer.finish()


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("processes", ["pipeline", "3 stages", "needs 3 processes", "there are 2"]),
        ("model", ["stages", "rank 1"]),
        ("rate", ["optimizer", "rank 1", "0.2"]),
        ("shape", ["micro-batch 1", "stage 1", "(2, 5)", "drop_last"]),
        ("state", ["Adafactor", "zero"]),
    ],
)
def test_refuses_in_words(kind: str, words: list[str]) -> None:
    outcomes = watch_ranks(2, refused, kind, timeout_s=40)
    errors = [outcome.error for outcome in outcomes if outcome.kind == "ValueError"]
    assert errors
    for error in errors:
        for word in words:
            assert word in error


class _Turned(nn.Module):
    """Its output is not contiguous in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(x)).transpose(0, 1)


def turned(placement: Placement) -> tuple[list[float], dict[str, Tensor]]:
    if placement != "single":
        dist.init_process_group("gloo")
    torch.manual_seed(4)
    model = nn.Sequential(_Turned(), nn.Sequential(_Turned(), nn.Tanh())).double()
    trainer = Interleaved(
        [*model], optimizer_of("sgd", model), nn.functional.mse_loss, None, placement, 20
    )
    made = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(3):
        data = torch.randn(2, 2, 5, 5, generator=made, dtype=torch.float64)
        losses += trainer.step([(x, y) for x, y in data])
    losses += trainer.consolidate()
    return [loss.item() for loss in losses], dict(model.state_dict())


def test_outputs_that_are_not_contiguous() -> None:
    [(losses, theta)] = run_ranks(1, turned, "single")
    ranks = run_ranks(2, turned, "pipeline")
    assert [loss for own, _ in ranks for loss in own] == pytest.approx(losses, abs=1e-12)
    for _, found in ranks:
        for key, value in found.items():
            torch.testing.assert_close(value, theta[key], rtol=0, atol=1e-12)
