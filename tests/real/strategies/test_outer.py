"""Outer optimizers: texts, plans, and that an outer step of one is the average itself."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from cases.models import USUAL, Case, build_model, build_optimizer, profile_of
from cases.workers import User, prepared, rank, snapshot
from harness.ranks import in_turn, run_ranks
from torch import nn

import offbeat
from offbeat.core.strategy.parsing import parse
from offbeat.core.verify.check import check
from offbeat.profile import Bucket, Link, Profile
from offbeat.strategies import DiLoCo, DreamDDP, LocalSGD, OuterSGD, PartialSync
from offbeat.strategies.methods.eager import Eager
from offbeat.testing.conformance import interpret_plan
from offbeat.testing.replicas import Task

PROFILE = Profile(
    tuple(Bucket(str(b), 0.01, 0.02, 100_000 * (1 + b % 3)) for b in range(5)),
    (Link("net", 1e-3, 1e7),),
    2,
)
AVERAGE = OuterSGD(lr=1, momentum=0)


@pytest.mark.parametrize(
    ("text", "outer"),
    [
        ("0.7/0.9", OuterSGD(0.7, 0.9)),
        ("1/0", OuterSGD(1, 0)),
        ("0.8/0.5/plain", OuterSGD(0.8, 0.5, nesterov=False)),
    ],
)
def test_outer_optimizers_have_a_text(text, outer):
    assert OuterSGD.parse(text) == outer
    assert str(outer) == text
    assert parse(f"local-sgd:outer={text}") == LocalSGD(outer=outer)


def test_a_text_that_is_none():
    with pytest.raises(ValueError, match=r"outer \('abc'\) must be LR/MOMENTUM .* such as 0.8/0.3"):
        OuterSGD.parse("abc")


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: OuterSGD(nesterov="no"), "nesterov"),
        (lambda: DiLoCo(outer={"lr": 1, "beta": 0.5}), r"outer .*beta"),
        (lambda: DiLoCo(delay=1, alpha="0.5"), "alpha"),
    ],
)
def test_settings_that_cannot_be(make, words):
    with pytest.raises(ValueError, match=words):
        make()


@pytest.mark.parametrize(
    "strategy",
    [
        LocalSGD(period=3),
        PartialSync(period=3, average="before_update"),
        DreamDDP(period=3, fill=False, split=False, due="forward"),
        DreamDDP(period=3, due="delayed", delay=2),
    ],
    ids=str,
)
def test_a_step_of_one_without_momentum_is_the_average(strategy):
    settings = {**strategy.settings(), "outer": AVERAGE}
    outer = type(strategy)(**settings)
    plans = strategy.plan(PROFILE), outer.plan(PROFILE)
    task = Task([3] * 5)
    plain, stepped = (np.array(interpret_plan(plan, task, 2, 11)) for plan in plans)
    assert abs(plain - stepped).max() < 1e-12


@pytest.mark.parametrize(("fragments", "delay"), [*product((1, 2, 5), (0, 2))])
def test_fragments_are_spread_over_the_period(fragments, delay):
    plan = DiLoCo(period=10, fragments=fragments, delay=delay).plan(PROFILE)
    sending = {phase for t in plan.transfers for phase in t.phases if phase >= plan.prologue}
    assert len(sending) == fragments
    rounds = sorted(sending)
    gaps = [b - a for a, b in zip(rounds, [*rounds[1:], rounds[0] + 10], strict=True)]
    assert max(gaps) - min(gaps) <= 1
    moved = sorted(b for t in plan.transfers for b in t.payload.buckets)
    assert moved == list(range(5))


def test_what_lands_was_sent_before():
    """The first iterations send and land nothing: there is nothing yet to land."""
    plan = DiLoCo(period=4, fragments=2, delay=3).plan(PROFILE)
    assert plan.prologue == 3
    landings = [a for a in plan.applies if a.rule in ("outer", "delta")]
    assert landings
    assert all(phase >= 3 for a in landings for phase in a.phases)
    assert not check(plan)


def test_a_share_of_one_never_lands():
    plan = DiLoCo(period=4, delay=1, alpha=0.9).plan(PROFILE)
    assert not check(plan)
    applies = tuple(
        replace(a, args=(("share", 1.0),)) if a.rule == "blend" else a for a in plan.applies
    )
    assert check(replace(plan, applies=applies))


def test_memory_is_told():
    size = PROFILE.payload_bytes("param", range(5))
    copies = {
        LocalSGD(outer=AVERAGE): 2,
        DiLoCo(delay=1): 4,
        DiLoCo(delay=1, alpha=0.0): 3,
    }
    for strategy, count in copies.items():
        assert strategy.plan(PROFILE).fact("memory_bytes") == count * size


@pytest.mark.usefixtures("own_group")
def test_weights_that_are_loaded_are_where_the_outer_optimizer_begins():
    own = nn.Sequential(nn.Linear(2, 2))
    optimizer = torch.optim.SGD(own.parameters(), lr=0.0)
    layout = Profile((Bucket("0", 1e-5, 1e-5, 24),), (Link("net", 1e-6, 1e12),), 1)
    strategy = LocalSGD(period=1, outer=OuterSGD(0.5, 0.5))
    model, optimizer = offbeat.prepare(own, optimizer, strategy, profile=layout)

    def iterate():
        optimizer.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()

    iterate()
    loaded = {name: torch.full_like(value, 3.0) for name, value in own.state_dict().items()}
    model.load_state_dict(loaded)
    iterate()
    iterate()
    for value in own.state_dict().values():
        assert torch.equal(value, torch.full_like(value, 3.0))
    model.close()


CASE = Case("mlp", "sgd")


def trained_after_a_load(iterations: int) -> dict[str, torch.Tensor]:
    """Weights of five iterations that begin with loaded weights, after some with others. Averages
    are in flight for two iterations."""
    model = build_model(CASE, seed=rank())
    optimizer = build_optimizer(CASE, model)
    profile = profile_of(CASE, 2)
    with prepared(model, optimizer, Eager(period=2), profile=profile) as (model, optimizer):
        user = User(CASE, model, optimizer, USUAL)
        for t in range(iterations):
            user.iterate(t)
        model.load_state_dict(build_model(CASE, seed=9).state_dict())
        for t in range(10, 15):
            user.iterate(t)
        return snapshot(model.state_dict())


def test_a_load_drops_the_average_in_flight():
    """In the middle of a period, and at its end: training goes on as from a start."""
    calls = [(0,), (3,), (2,)]
    for expected, *others in run_ranks(2, in_turn, trained_after_a_load, calls):
        for found in others:
            for name, value in expected.items():
                assert torch.equal(found[name], value), name
