"""Methods without a plan in a rehearsal: gossip, servers, and the recorded order of a job."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from cases import rehearsed
from cases.rehearsed import K, T, quadratic_profile, rehearse_quadratic
from harness.ranks import run_ranks

from offbeat.core.strategy.parsing import parse
from offbeat.sim import predict

SERVED, SEED = "ssp:s=2", 5


def test_the_clock_of_gossip_is_the_prediction():
    curve, seen = rehearse_quadratic("a2cid2")
    expected = predict(parse("a2cid2"), quadratic_profile(K))
    assert curve.iteration_s == pytest.approx(expected.iteration_s, rel=1e-12)
    assert [len(rows) for rows in seen] == [T] * K
    with pytest.raises(ValueError, match="weights"):
        rehearse_quadratic("a2cid2:weights=live")


def test_one_clock_for_all_is_synchronous():
    _, served = rehearse_quadratic("ps-bsp", jitter=0.3)
    _, expected = rehearse_quadratic("bsp")
    np.testing.assert_allclose(np.array(served), np.array(expected), rtol=0, atol=1e-12)


def test_a_recorded_order_repeats_the_weights_of_the_job(tmp_path):
    results = run_ranks(3, rehearsed.train_recorded, SERVED, SEED, str(tmp_path), timeout_s=150.0)
    workers = [result for result in results if result is not None]
    assert len(workers) == 2
    [folder] = tmp_path.iterdir()
    models, curve = rehearsed.rehearse(SERVED, ranks=2, seed=SEED, order=folder)
    for rank, (losses, tensors) in enumerate(workers):
        np.testing.assert_allclose(curve.run.logs[rank].losses, losses, rtol=0, atol=1e-12)
        torch.testing.assert_close(rehearsed.flat(models[rank]), tensors, rtol=0, atol=1e-12)
    assert curve.replayed
