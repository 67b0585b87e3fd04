"""Parameters that appear after prepare are refused by name; those that are frozen may rest."""

import os

import torch
from cases.batches import Batch
from harness.ranks import run_ranks
from torch import nn

import offbeat
from offbeat.profile import Bucket, Link, Profile
from offbeat.testing import inspect

TIMEOUT_S = 20.0
ONE = Batch(1)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.later = nn.Linear(4, 4)
        self.later.requires_grad_(False)
        self.extra = nn.ModuleList()

    def forward(self, x):
        return self.later(self.b(self.a(x)))


def profile():
    buckets = [
        Bucket(name, 0.001, 0.002, 80, tensors=(f"{name}.weight", f"{name}.bias"))
        for name in ("b", "a")
    ]
    return Profile(tuple(buckets), (Link("net", 1e-3, 1e6),), world_size=1)


def prepared(strategy=None):
    torch.manual_seed(0)
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, weight_decay=0.1)
    return net, *offbeat.prepare(net, optimizer, strategy, profile=profile(), timeout_s=TIMEOUT_S)


def step(model, optimizer):
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()


def error_of(model, optimizer):
    try:
        step(model, optimizer)
    except (ValueError, RuntimeError) as error:
        return str(error)
    finally:
        model.close()
    return ""


def scenes():
    found = {}
    net, model, optimizer = prepared()
    step(model, optimizer)
    net.later.bias.requires_grad_(True)
    found["unfrozen"] = error_of(model, optimizer)
    net, model, optimizer = prepared()
    net.adapter = nn.Linear(4, 4)
    found["added"] = error_of(model, optimizer)
    net, model, optimizer = prepared()
    net.extra.insert(0, nn.Linear(4, 4))  # which calls no hooks
    found["inserted"] = error_of(model, optimizer)
    earlier = nn.Linear(4, 4)
    net, model, optimizer = prepared()
    net.extra.insert(0, nn.Sequential(earlier))
    found["wrapped"] = error_of(model, optimizer)
    net, model, optimizer = prepared()
    net.a.weight = nn.Parameter(torch.zeros(4, 4))
    found["replaced"] = error_of(model, optimizer)
    net, model, optimizer = prepared()
    nn.Sequential(nn.Linear(2, 2))  # somebody else's
    net.b.weight.requires_grad_(False)
    before = net.b.weight.detach().clone()
    step(model, optimizer)
    step(model, optimizer)
    found["frozen moved"] = bool((net.b.weight != before).any())
    model.close()
    found["closed"] = error_of(model, optimizer)
    _, model, optimizer = prepared(offbeat.LocalSGD(period=10**6))
    step(model, optimizer)
    found["plans"] = len(inspect(model).plan.transfers)
    model.close()
    for strategy in (offbeat.A2CiD2("complete"), offbeat.ADPSGD("complete")):
        net, model, optimizer = prepared(strategy)
        step(model, optimizer)
        net.later.bias.requires_grad_(True)
        found[strategy.name] = error_of(model, optimizer)
    return found


def served_scenes():
    """What a worker says when a parameter is unfrozen, and on a second model."""
    os.environ["OFFBEAT_SERVERS"] = "1"
    strategy, words = offbeat.SSP(s=0), []
    try:
        net, model, optimizer = prepared(strategy)
    except SystemExit:  # a server
        return words
    step(model, optimizer)
    try:
        prepared(strategy)
    except ValueError as error:
        words.append(str(error))
    net.later.bias.requires_grad_(True)
    return [*words, error_of(model, optimizer)]


def test_with_servers():
    (second, unfrozen), _ = run_ranks(2, served_scenes)
    assert "another model is prepared with servers" in second
    assert "parameter 'later.bias' was unfrozen after offbeat.prepare" in unfrozen


@ONE.given(scenes)
def test_parameters_after_prepare(call):
    [found] = call.results
    for name in ("unfrozen", "a2cid2", "ad-psgd"):
        assert "parameter 'later.bias' was unfrozen after offbeat.prepare" in found[name]
    for scene, name in (
        ("added", "adapter"),
        ("inserted", "extra.0"),
        ("wrapped", "extra.0.0"),
        ("replaced", "a"),
    ):
        assert f"parameter '{name}.weight' was added after offbeat.prepare" in found[scene]
    assert not found["frozen moved"]
    assert "the model is closed" in found["closed"]
    assert found["plans"] == 1  # a period of a million iterations is one rule, and starts at once


def attributes() -> dict[str, object]:
    """What attributes set on the prepared model do to the module."""
    net, model, optimizer = prepared("local-sgd:period=2")
    net.scale = 1.0
    model.scale = 3.0
    model.fresh = "new"
    setattr(model, "_note", "kept by a wrapper")  # noqa: B010
    model.require_backward_grad_sync = False
    model.require_backward_grad_sync = True
    found = {"scale": net.scale, "fresh": net.fresh, "private": "_note" in net.__dict__}
    del model.fresh
    found["deleted"] = "fresh" not in net.__dict__
    model.eval()
    model.train()
    found["training"] = net.training
    model.adapter = nn.Linear(2, 2)
    found["registered"] = "adapter" in dict(net.named_children())
    found["refused"] = error_of(model, optimizer)
    return found


@ONE.given(attributes)
def test_attributes_set_on_the_prepared_model_are_the_modules(call):
    [found] = call.results
    assert "parameter 'adapter.weight' was added after offbeat.prepare" in found.pop("refused")
    private = found.pop("private")
    assert not private
    expected = {"scale": 3.0, "fresh": "new", "deleted": True, "training": True}
    assert found == expected | {"registered": True}
