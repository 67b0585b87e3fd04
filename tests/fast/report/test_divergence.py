"""Divergence of replicas: what the report says equals the definition on the whole model."""

from __future__ import annotations

import base64
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from offbeat.core.buckets.flat import Flat
from offbeat.core.buckets.layout import BucketSpec
from offbeat.core.measuring import replica_sample as sampling
from offbeat.core.measuring.replica_sample import Sample
from offbeat.core.sim.trace import Trace
from offbeat.experiments.record.run_directory import RankRecord, Repetition
from offbeat.experiments.report.divergence import distance_curve, gamma, relative_distances

RANKS, ITERATIONS = 3, 6


def replicas(numbers: int) -> tuple[Repetition, np.ndarray]:
    """What ranks record of random walks, and all parameters [iteration, rank, parameter]."""
    records, everything = [], []
    for rank in range(RANKS):
        torch.manual_seed(rank)
        model = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, numbers))
        names = [name for name, _ in model.named_parameters()]
        sample = Sample.of(Flat(model, [BucketSpec(name, (name,)) for name in reversed(names)]))
        seen = []
        for iteration in range(ITERATIONS):
            for p in model.parameters():
                p.data.add_(torch.randn_like(p) * 0.1)
            sample.take(iteration)
            seen.append(torch.cat([p.detach().reshape(-1) for p in model.parameters()]).numpy())
        everything.append(np.array(seen, dtype=float))
        ends = tuple(float(i + 1) for i in range(ITERATIONS))
        trace = Trace(source="measured", strategy="s", ends_s=(ends,), starts_s=(0.0,), spans=())
        records.append(RankRecord(rank, "s", trace, sample=sample.record()))
    return Repetition(0, tuple(records)), np.array(everything).swapaxes(0, 1)


def exact(weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Gamma and the squared norm of the mean, by iteration."""
    mean = weights.mean(axis=1, keepdims=True)
    return ((weights - mean) ** 2).sum(axis=2).mean(axis=1), (mean**2).sum(axis=(1, 2))


def test_a_sample_of_everything_is_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    everything = SimpleNamespace(
        default_rng=lambda _: SimpleNamespace(integers=lambda n, **_: np.arange(n))
    )
    monkeypatch.setattr(sampling.np, "random", everything)
    monkeypatch.setattr(sampling, "NUMBERS", 10**6)
    rep, weights = replicas(3)
    spread, square = exact(weights)
    assert [*gamma(rep).values()] == pytest.approx(spread, rel=1e-6)
    assert [*relative_distances(rep).values()] == pytest.approx(np.sqrt(spread / square), rel=1e-6)


def test_a_sample_is_near() -> None:
    rep, weights = replicas(2000)
    spread, _ = exact(weights)
    assert [*gamma(rep).values()] == pytest.approx(spread, rel=0.2)
    curve = distance_curve(rep)
    assert curve.iterations == (0, 1, 2, 3, 4, 5)
    assert curve.seconds == (1, 2, 3, 4, 5, 6)


def test_old_iterations_are_thinned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "MOST", 3)
    rep, _ = replicas(2)
    assert [*gamma(rep)] == [0, 2, 4]


def test_nothing_is_said_of_one_rank() -> None:
    rep, _ = replicas(2)
    assert len(distance_curve(Repetition(0, rep.ranks[:1]))) == 0


def test_any_memory_format() -> None:
    model = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    names = [name for name, _ in model.named_parameters()]
    sample = Sample.of(Flat(model, [BucketSpec("conv", tuple(names))]))
    sample.take(0)
    numbers = np.frombuffer(base64.b64decode(sample.record()["numbers"]))
    held = torch.cat([p.detach().reshape(-1) for p in model.parameters()]).double().numpy()
    assert set(numbers) <= set(held)
