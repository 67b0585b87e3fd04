"""A rehearsal with a recorded order repeats the weights of real processes."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases import rehearsed
from cases.rehearsed import Recorded
from harness.ranks import run_world

import offbeat
from offbeat.cli import main
from offbeat.core.runtime.event_log import EventLog, RecordedEvents
from offbeat.gossip.chunks import Wire
from offbeat.gossip.exchange import Exchanges
from offbeat.gossip.state import Mixing, State
from offbeat.rehearsal.recorded_order import RecordedOrder
from offbeat.rehearsal.replayed_gossip import GossipReplay, ReplayedState
from offbeat.rehearsal.turns import Turns

WORLD, SEED = 4, 5
JOBS = (
    Recorded("a2cid2:topology=complete"),
    Recorded("a2cid2:rate=3:wire=int8:exchange=before_mixing", consolidates=True),
    Recorded("ad-psgd:topology=ring"),
    Recorded("ssp:s=2", servers=1, consolidates=True),
    Recorded("ssp:apply=push:accumulate=2", servers=2),
    Recorded("ps-bsp", servers=1),
    Recorded("ps-diloco:period=2:quorum=2:grace_s=0.001", servers=1),
    Recorded("ps-diloco:period=2:rule=heloco", servers=1),
)


@dataclass(frozen=True)
class Job:
    """A recorded job: its folder, and losses and final parameters of its workers."""

    job: Recorded
    folder: Path
    results: list[tuple[list[float], torch.Tensor]]

    @property
    def iterations(self) -> int:
        return len(self.results[0][0])

    def rehearse(self, **more: Any) -> Any:
        """Models and curve of a rehearsal with the recorded order."""
        last = self.iterations - 1 if self.job.consolidates else None
        settings: dict[str, Any] = {
            "ranks": len(self.results),
            "iterations": self.iterations,
            "seed": SEED,
            "loss": _loss_that_consolidates(last),
            "order": self.folder,
        }
        return rehearsed.rehearse(more.pop("name", self.job.name), **{**settings, **more})


def _loss_that_consolidates(before: int | None) -> Callable[[Any, Any], torch.Tensor]:
    """The loss of a model that consolidates before an iteration."""
    counts = Counter[int]()

    def loss(model: Any, batch: Any) -> torch.Tensor:
        if counts[id(model)] == before:
            model.consolidate()
        counts[id(model)] += 1
        return model(*batch)

    return loss


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> list[Job]:
    folder = tmp_path_factory.mktemp("records")
    ranks = run_world(rehearsed.train_recorded, WORLD, JOBS, SEED, str(folder), timeout_s=150.0)
    return [
        Job(job, next((folder / str(i)).iterdir()), [r[i] for r in ranks if r[i] is not None])
        for i, job in enumerate(JOBS)
    ]


@pytest.mark.parametrize("number", range(len(JOBS)), ids=[job.name for job in JOBS])
def test_weights_are_those_of_the_real_job(jobs, number):
    job = jobs[number]
    assert len(job.results) == WORLD - job.job.servers
    models, curve = job.rehearse()
    for rank, (losses, tensors) in enumerate(job.results):
        np.testing.assert_allclose(curve.run.logs[rank].losses, losses, rtol=0, atol=1e-12)
        torch.testing.assert_close(rehearsed.flat(models[rank]), tensors, rtol=0, atol=1e-12)
    logs = [RecordedEvents(job.folder / f"order{rank}.json") for rank in range(len(job.results))]
    ends_s = [max(column) for column in zip(*(log.ends_s for log in logs), strict=True)]
    assert list(curve.ends_s) == ends_s
    assert curve.replayed
    assert "times of the recorded job" in str(curve)


@pytest.mark.parametrize("number", [0, 3])
def test_another_order_has_other_weights(jobs, number):
    """The order determines the result, so that equal weights are no accident."""
    models, curve = jobs[number].rehearse(order=None)
    assert not curve.replayed
    tensors = jobs[number].results[0][1]
    assert abs(rehearsed.flat(models[0]) - tensors).max() > 1e-6


SCRIPT = """
import os
import random
import numpy as np
import torch
import offbeat
from cases import rehearsed

rank, seed, passes = int(os.environ["RANK"]), int(os.environ["OFFBEAT_SEED"]), {passes}
random.seed(seed + rank)
np.random.seed(seed + rank)
torch.manual_seed(seed + rank)
module = rehearsed.make_model()
model, optimizer = offbeat.prepare(module, rehearsed.make_optimizer(module))
for _ in range(passes):
    for batch in rehearsed.batches(rank):
        optimizer.zero_grad()
        loss = model(*batch)
        loss.backward()
        optimizer.step()
"""


@pytest.mark.usefixtures("forked_rehearsals")
def test_a_script_repeats_the_job(jobs, tmp_path, monkeypatch, capsys):
    """`offbeat rehearse --order` writes a curve and a report with the times of the job."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    job = jobs[0]
    passes = job.iterations // rehearsed.ITERATIONS
    (tmp_path / "train.py").write_text(SCRIPT.format(passes=passes))
    rehearsed.profile_of(WORLD).save(tmp_path / "profile.json")
    typed = ["rehearse", "--profile", str(tmp_path / "profile.json"), "--seeds", str(SEED)]
    typed += ["--strategies", job.job.name, "--order", str(job.folder), "--out"]
    assert main([*typed, str(tmp_path / "run"), str(tmp_path / "train.py")]) == 0
    assert "replayed: losses real" in " ".join(capsys.readouterr().out.split())
    [path] = (tmp_path / "run").glob("*/rep0/curve.json")
    curve = offbeat.RehearsedCurve.from_dict(json.loads(path.read_text()))
    losses = np.mean([losses for losses, _ in job.results], axis=0)
    np.testing.assert_allclose(curve.losses, losses, rtol=0, atol=1e-12)
    assert curve.replayed

    (tmp_path / "train.py").write_text(SCRIPT.format(passes=passes - 1))
    assert main([*typed, str(tmp_path / "short"), str(tmp_path / "train.py")]) == 1
    words = f"iterations ({7 * (passes - 1)}) must be those of order"
    assert words in " ".join(capsys.readouterr().err.split())
    assert main([*typed, str(tmp_path / "x"), "--jitter", "0.1", str(tmp_path / "train.py")]) == 2
    assert "jitter (0.1) must be left out" in " ".join(capsys.readouterr().err.split())


def test_another_job_is_refused(jobs):
    job = jobs[0]
    count = job.iterations
    for more, words in (
        ({"ranks": 3}, "ranks (3) must be those of order"),
        ({"name": "a2cid2:topology=ring"}, "strategy (a2cid2) must be that of order"),
        ({"name": "wfbp"}, "strategy (wfbp) must be that of order"),
        ({"iterations": count - 1}, f"iterations ({count - 1}) must be those of order"),
        ({"jitter": 0.1}, "jitter (0.1) must be left out with order"),
        ({"order": job.folder.parent}, "must be a record of the job"),
    ):
        with pytest.raises(ValueError) as raised:
            job.rehearse(**more)
        assert words in str(raised.value)


def test_another_script_is_refused(jobs):
    """A script that consolidates where the recorded one did not."""
    with pytest.raises(ValueError, match="script must make the calls of the recorded job"):
        jobs[2].rehearse(loss=_loss_that_consolidates(2))


SIZE, MIXING = 10, Mixing(0.3, 0.5, 1.4)  # three chunks


class NoState:
    """State of the process that a replica without a script has."""

    def enter(self) -> None: ...

    def leave(self) -> None: ...


def two_workers(make: Any) -> list[tuple[torch.Tensor, Any, Exchanges]]:
    numbers = torch.Generator().manual_seed(3)
    found = []
    for rank in range(2):
        flat = torch.randn(SIZE, dtype=torch.float64, generator=numbers)
        wire = Wire([flat], chunk_bytes=32)
        state = make([flat], wire, rank)
        found.append((flat, state, Exchanges(state, wire)))
    return found


def test_broken_exchanges_are_repeated(tmp_path):
    """An exchange that one worker has reverted at once, and the other one when it knew that."""
    logs = [
        EventLog(
            tmp_path / f"order{rank}.json",
            {"strategy": "a2cid2", "model": "", "rank": rank, "ranks": 2, "servers": 0},
        )
        for rank in range(2)
    ]
    real = two_workers(lambda flats, wire, rank: State(flats, wire, MIXING, log=logs[rank]))

    def begin(number: int, label: float) -> None:
        for rank, (_, _, exchanges) in enumerate(real):
            exchanges.begin(1 - rank, number, label, MIXING)

    def apply(rank: int, chunk: int) -> None:
        own, other = real[rank][2], real[1 - rank][2]
        own.buffer(chunk)[:] = other.data(chunk)
        own.apply_chunk()

    def train(i: int, rank: int, label: float) -> None:
        flat, state, _ = real[rank]
        state.step(label, lambda: flat.add_(i + 1 + rank))
        logs[rank].end_iteration()

    for _, state, _ in real:
        state.refresh()
    begin(1, 1.0)
    for chunk in range(3):
        for rank in range(2):
            apply(rank, chunk)
    for _, _, exchanges in real:
        exchanges.now.confirmed = True
        exchanges.end_if_complete()
    for rank in range(2):
        train(0, rank, 1.5)
        real[rank][1].refresh()
    begin(2, 2.0)
    for chunk in range(3):
        apply(0, chunk)
    apply(1, 0)
    for rank in range(2):
        real[rank][2].abort(1 - rank)
        train(1, rank, 2.5)
        real[rank][1].refresh()
    before = real[0][0].clone()
    real[0][2].settle(1, 1)
    for rank in range(2):
        train(2, rank, 3.0)
        real[rank][1].mix_until(3.25)
        logs[rank].save()
    assert not torch.equal(real[0][0], before + 3)  # the exchange counts no more

    turns = Turns([NoState(), NoState()])
    replay = GossipReplay(RecordedOrder.load(tmp_path), turns)
    again = two_workers(lambda flats, wire, _: ReplayedState(flats, wire, MIXING))
    for rank, (_, state, exchanges) in enumerate(again):
        replay.join(rank, state, exchanges)

    def live(rank: int) -> None:
        flat, state, _ = again[rank]
        for i in range(3):
            state.refresh()
            state.step(0.0, lambda i=i: flat.add_(i + 1 + rank))
        state.mix_until(0.0)

    turns.run(live)
    for (mine, _, _), (theirs, _, _) in zip(again, real, strict=True):
        assert torch.equal(mine, theirs)


def test_joining_workers_cannot_be_repeated(tmp_path):
    log = EventLog(tmp_path / "order0.json", {})
    flat = torch.zeros(SIZE)
    with State([flat], Wire([flat]), MIXING, log=log).frozen_x(1.0):
        assert log.problem == "a worker has joined the running job"


def test_broken_records_are_refused(jobs, tmp_path):
    folder = tmp_path / "record"
    shutil.copytree(jobs[0].folder, folder)
    path = folder / "order2.json"
    data = json.loads(path.read_text())
    for change, words in (
        ({"problem": "a checkpoint was loaded"}, "cannot be repeated: a checkpoint was loaded"),
        ({"strategy": "ad-psgd"}, "must have files of one job; those of ranks 0 and 2"),
        ({"ends_s": data["ends_s"][:-1]}, "of the ranks in order"),
        ({"schema": 2}, "schema (2)"),
        ({"kinds": None}, "must be a file that a job has written"),
    ):
        path.write_text(json.dumps(data | change))
        with pytest.raises(ValueError) as raised:
            jobs[0].rehearse(order=folder)
        assert words in str(raised.value)
    path.unlink()
    with pytest.raises(ValueError, match=r"without order2\.json"):
        jobs[0].rehearse(order=folder)
