"""Metrics: what a run tells of itself, and who passes it on."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from cases.batches import Batch, Call
from cases.metrics_workers import EVERY, LR, SIZES, STEPS, log_alone, log_on_full_disk, logged

from offbeat import ADPSGD, DDP, WFBP, LocalSGD
from offbeat.core.runtime.iteration import MomentTimes, Timestamps
from offbeat.core.transport.device import CPU
from offbeat.jobs.meter import Meter, exposed_communication_s, gamma
from offbeat.jobs.metrics import Metrics, TensorBoard, WandB
from offbeat.jobs.replica_sample import SampledElements

NUMBERS = {"loss": 0.5, "bytes_per_iteration/net": 40.0, "bytes_per_iteration/eth1": 2.0}


ONE, TWO = Batch(1), Batch(2)


@TWO.each(logged, [LocalSGD(period=STEPS + 1)], [WFBP()], [DDP()], [ADPSGD()])
def test_what_ranks_are_told(calls: list[Call]) -> None:
    """Rank 1 logs, rank 0 does not; replicas drift apart by a known distance, or not at all."""
    local, wfbp, ddp, gossip = [call.results for call in calls]
    for seen, _ in (local[0], wfbp[0], ddp[0], gossip[0]):
        assert seen == []
    for seen, losses in (local[1], wfbp[1], ddp[1], gossip[1]):
        assert [iteration for _, iteration in seen] == [2, 4, 6]
        assert all(numbers["seconds_per_iteration"] > 0 for numbers, _ in seen)
        means = np.reshape(losses, (-1, EVERY)).mean(1)
        assert [numbers["loss"] for numbers, _ in seen] == pytest.approx(list(means))
    # Samples that were left at the same step may be there only at the next report.
    count = sum(SIZES)
    apart = {2 * t: count * (2 * t * LR / 2) ** 2 for t in (1, 2, 3)}  # gradients 1 and 2
    found = [numbers["divergence"] for numbers, _ in local[1][0] if "divergence" in numbers]
    assert found
    assert all(any(x == pytest.approx(gamma) for gamma in apart.values()) for x in found)
    assert any(numbers.get("divergence") == 0.0 for numbers, _ in wfbp[1][0])
    # Nothing is averaged in so few local steps; gradients and who had none travel with WFBP.
    assert all(numbers["bytes_per_iteration/net"] == 0 for numbers, _ in local[1][0])
    assert all(numbers["bytes_per_iteration/net"] == 8 * (count + 2) for numbers, _ in wfbp[1][0])
    assert all(numbers["bytes_per_iteration/net"] == 8 * count for numbers, _ in ddp[1][0])
    # DDP waits within backward, which nobody sees.
    assert all(numbers["exposed_communication_s"] >= 0 for numbers, _ in wfbp[1][0])
    assert all("exposed_communication_s" not in numbers for numbers, _ in ddp[1][0])


@ONE.given(log_alone)
def test_alone_there_is_nobody_to_differ_from(call: Call) -> None:
    told = {"seconds_per_iteration", "exposed_communication_s", "bytes_per_iteration/net", "loss"}
    [(seen, nothing_left)] = call.results
    assert seen == [(1, told), (2, told)]
    assert nothing_left


def test_exposed_is_what_compute_waits_for() -> None:
    marks = Timestamps(
        begin=0.0, forward=1.0, forward_end=2.0, backward_end=5.0, waited=5.5, step=6.0
    )
    marks.stepped, marks.end = 7.0, 7.25
    marks.acted = [MomentTimes(3, begin=4.0, waited=4.125, applied=4.5)]
    assert exposed_communication_s(marks, CPU()) == 0.5 + 0.25 + 0.125


def test_gamma_of_a_sample() -> None:
    rng = np.random.default_rng(1)
    replicas = rng.normal(size=(3, 2, 400))
    rows = []
    for replica in replicas:
        chosen = SampledElements([torch.from_numpy(part) for part in replica])
        rows.append(chosen.numbers().numpy())
    centre = replicas.mean(0)
    exact = np.mean([np.sum((replica - centre) ** 2) for replica in replicas])
    assert chosen.weight * gamma(np.stack(rows)) == pytest.approx(exact, rel=0.3)


def test_what_metrics_refuse() -> None:
    for settings in ({"log": 3}, {"every": 0}, {"divergence_every": -1}, {"divergence_every": 2.5}):
        with pytest.raises(ValueError, match=next(iter(settings))):
            Metrics(**{"log": print, **settings})
    for name in ("every", "divergence_every"):
        with pytest.raises(ValueError, match=rf"{name} \(True\)"):
            Metrics(print, **{name: True})


@ONE.given(log_on_full_disk)
def test_training_goes_on_if_a_log_cannot_be_written(call: Call) -> None:
    """One warning names the directory. Other errors of the log are errors of the script."""
    [(calls, warned, error)] = call.results
    assert calls == 2
    [text] = warned
    assert "TensorBoard" in text
    assert "runs/full" in text
    assert "No space" in text
    assert error == "KeyError"


def test_logs_count_all_iterations_from_a_resume_on() -> None:
    """Also if a call follows several iterations, as with accumulation of separate averages."""
    seen = list[tuple[float, int]]()
    session = Mock(traffic=lambda: {"net": sent}, iteration=0)
    sent = 0

    def log(numbers: dict[str, float], iteration: int) -> None:
        seen.append((numbers["bytes_per_iteration/net"], iteration))

    meter = Meter(Metrics(log, every=10), session, CPU(), None, 0, [])
    for session.iteration in (48, 56, 64, 72, 80):
        sent += 8 * 5
        meter.stepped(session.iteration)
    meter.close()
    assert seen == [(80 / 9, 56), (5, 64), (5, 72), (5, 80)]


# ---- adapters -------------------------------------------------------------------------------


def test_tensorboard(tmp_path: Path) -> None:
    tensorboard = pytest.importorskip("torch.utils.tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    writer = tensorboard.SummaryWriter(str(tmp_path))
    TensorBoard(writer)(NUMBERS, 7)
    writer.close()
    events = EventAccumulator(str(tmp_path)).Reload()
    assert sorted(events.Tags()["scalars"]) == sorted(f"offbeat/{name}" for name in NUMBERS)
    (event,) = events.Scalars("offbeat/loss")
    assert (event.step, event.value) == (7, 0.5)


def test_weights_and_biases() -> None:
    class Run:
        def log(self, numbers: dict[str, float], step: int) -> None:
            self.logged = numbers, step

    run = Run()
    WandB(run, prefix="")(NUMBERS, 7)
    assert run.logged == (NUMBERS, 7)
