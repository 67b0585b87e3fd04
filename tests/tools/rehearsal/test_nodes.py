"""Replicas of several ranks in a rehearsal equal their equations, in the simulator's time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from cases.models import batch, build_model, build_optimizer, build_scheduler, loss_of
from cases.node_jobs import (
    ADAM,
    PAIRS,
    STRATEGIES,
    UNEVEN,
    T,
    gradients_everywhere,
    members,
    profile_in,
)
from cases.rehearsed import loaded, returning
from torch import nn

import offbeat
from offbeat import DreamDDP, Strategy
from offbeat.core.strategy.parsing import parse
from offbeat.experiments.advice.place import Place
from offbeat.sim import predict, simulate
from offbeat.strategies.ddp import with_replica_per_rank


def rehearse(
    strategy: Strategy | str, nodes: Sequence[Sequence[int]], **more: Any
) -> tuple[list[nn.Module], offbeat.RehearsedCurve]:
    """The model of each rank after the rehearsal, and the curve."""
    models: list[nn.Module] = []

    def make_model() -> nn.Module:
        models.append(build_model(ADAM))
        return models[-1]

    def make_optimizer(model: nn.Module) -> Any:
        optimizer = build_optimizer(ADAM, model)
        return optimizer, build_scheduler(ADAM, optimizer)

    settings: dict[str, Any] = {
        "profile": profile_in(ADAM, nodes),
        "iterations": len(T),
        "loss": lambda model, one: loss_of(model, *one),
    }
    own_batches = returning(
        lambda rank: [batch(ADAM, rank, t) for t in T], lambda: models[-1].state_dict()
    )
    with own_batches as (batches, states):
        found = offbeat.rehearse(
            make_model, make_optimizer, batches, strategy, **{**settings, **more}
        )
        [curve] = found.values()
        return [loaded(lambda: build_model(ADAM), state) for state in states()], curve


# Numbers of ranks are the weights of an average: of gradients, in windows, of sets, at a vote, with
# an outer step, and of drawn replicas.
CASES = [
    ("halves", PAIRS),
    ("deft", UNEVEN),
    ("dreamddp clipped", UNEVEN),
    ("selsync", UNEVEN),
    ("fragments", PAIRS),
    ("fedavg drawn", PAIRS),
]


@pytest.mark.parametrize(("name", "nodes"), CASES, ids=lambda one: str(one).replace(" ", ""))
def test_equals_the_equations(name, nodes):
    strategy, equations = STRATEGIES[name]
    models, curve = rehearse(strategy, nodes)
    world = members(ADAM, nodes)
    assert len(models) == len(world) == curve.ranks
    equations(world, curve.run.plan, nodes)
    for model, replica in zip(models, world, strict=True):
        expected = dict(replica.model.named_parameters())
        for key, tensor in model.named_parameters():
            torch.testing.assert_close(
                tensor, expected[key], rtol=0, atol=1e-12, msg=f"{key} of rank {replica.rank}"
            )


def flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


@pytest.mark.parametrize("nodes", [PAIRS, UNEVEN])
def test_a_node_encodes_its_average_once(nodes):
    """All ranks of a node have equal bits, and codes lose little."""
    coded, _ = rehearse(DreamDDP(period=3, wire="int8"), nodes)
    exact, _ = rehearse(DreamDDP(period=3), nodes)
    for node in nodes:
        for rank in node[1:]:
            assert torch.equal(flat(coded[rank]), flat(coded[node[0]]))
    apart = abs(flat(coded[0]) - flat(exact[0])).max()
    assert 0 < apart < 0.05


@pytest.mark.parametrize("name", ["wfbp", "dreamddp:period=3", "ddp"])
def test_clock_is_the_simulators(name):
    """Messages of torch's DDP pass a ring of all ranks."""
    strategy = parse(name)
    profile = replace(profile_in(ADAM, PAIRS), jitter=0.1)
    _, curve = rehearse(name, PAIRS, profile=profile)
    there = with_replica_per_rank(profile) if name == "ddp" else profile
    trace = simulate(curve.run.plan, there, iterations=len(T))
    ends_s = [max(ends) for ends in zip(*trace.ends_s, strict=True)]
    np.testing.assert_allclose(curve.ends_s, ends_s, rtol=1e-12)
    assert curve.prediction is not None
    assert (
        curve.prediction.iteration_s == predict(strategy, profile, ran=curve.run.plan).iteration_s
    )


def test_one_node_trains_by_the_mean_gradient_of_its_ranks():
    """As one machine of two devices does; its messages take no time."""
    profile = Place(profile_in(ADAM, PAIRS), devices=2).one_machine
    assert (profile.world_size, profile.topology) == (1, (2,))
    models, curve = rehearse("ddp", PAIRS[:1], profile=profile)
    world = members(ADAM, PAIRS[:1])
    gradients_everywhere(world)
    assert len(models) == curve.ranks == 2
    for model, replica in zip(models, world, strict=True):
        expected = dict(replica.model.named_parameters())
        for key, tensor in model.named_parameters():
            torch.testing.assert_close(tensor, expected[key], rtol=0, atol=1e-12, msg=key)
    free = replace(profile, inside=replace(profile.inside, latency_s=0.0, bytes_per_s=1e30))
    _, curve = rehearse("ddp", PAIRS[:1], profile=free)
    assert curve.ends_s[-1] == pytest.approx(len(T) * free.compute_s)


def test_what_is_refused():
    sharded = replace(profile_in(ADAM, PAIRS), sharded=True, inside=None)
    for name, more, words in (
        ("wfbp", {"profile": sharded}, "profile (sharded) must be of whole replicas"),
        ("a2cid2", {}, "strategy (a2cid2) must be one with a plan in a rehearsal"),
    ):
        with pytest.raises(ValueError) as raised:
            rehearse(name, PAIRS, **more)
        assert words in " ".join(str(raised.value).split())
