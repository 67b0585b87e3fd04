"""Steps of one bucket: the user's hooks, schedulers and torch's profiler see them as ever."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

import offbeat
from offbeat import P3, DeAR, PartialSync, Strategy
from offbeat.core.observers import Observer
from offbeat.core.runtime.stepper import BucketStepper

LAYERS = 3
PROFILE = offbeat.Profile.from_dict(
    {
        "schema": 1,
        "world_size": 1,
        "links": [{"name": "net", "latency_s": 1e-6, "bytes_per_s": 1e12}],
        "buckets": [
            {"name": str(i), "forward_s": 1e-5, "backward_s": 1e-5, "size_bytes": 80}
            for i in reversed(range(LAYERS))
        ],
    }
)
CALLS = 2  # in the second iteration: one layer leaves in backward, the others are stepped together

pytestmark = pytest.mark.usefixtures("own_group")


def prepared(inner: type[torch.optim.Optimizer] = torch.optim.SGD) -> tuple[Any, Any, Any]:
    """Model, prepared optimizer, the user's own."""
    own = nn.Sequential(*[nn.Linear(4, 4) for _ in range(LAYERS)])
    optimizer = inner(own.parameters(), lr=0.1)  # type: ignore[call-arg]
    model, prepared = offbeat.prepare(own, optimizer, PartialSync(2), profile=PROFILE)
    iterate(model, prepared)  # the first step is of all buckets at once
    return model, prepared, optimizer


def iterate(model: Any, optimizer: Any) -> None:
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()


@pytest.mark.parametrize("moment", ["pre", "post"])
def test_step_hooks_are_called_for_every_call(moment: str) -> None:
    model, optimizer, own = prepared()
    iterate(model, optimizer)
    calls: list[int] = []
    register = getattr(own, f"register_step_{moment}_hook")
    handle = register(lambda *_: calls.append(len(own.param_groups[0]["params"])))
    iterate(model, optimizer)
    handle.remove()
    iterate(model, optimizer)
    model.close()
    # Weight and bias of one layer each: two layers leave in this iteration, the third is the rest.
    assert calls == [2] * LAYERS


def test_the_profiler_sees_every_step() -> None:
    model, optimizer, _ = prepared()
    with torch.autograd.profiler.profile() as profile:
        iterate(model, optimizer)
    model.close()
    steps = [e for e in profile.function_events if e.name == "Optimizer.step#SGD.step"]
    # The prepared optimizer's own step may contain a bucket's step of the same name.
    inner = [e for e in steps if all(child.name != e.name for child in e.cpu_children)]
    assert len(inner) == CALLS


def test_schedulers_know_that_the_optimizer_has_stepped() -> None:
    model, optimizer, own = prepared()
    scheduler = torch.optim.lr_scheduler.StepLR(own, 1, 0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        iterate(model, optimizer)
        scheduler.step()
    model.close()
    assert own.param_groups[0]["lr"] == 0.05


def test_a_step_of_the_users_own_is_called() -> None:
    calls: list[int] = []

    class Counting(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            calls.append(1)
            return super().step(closure)

    model, optimizer, own = prepared(Counting)
    calls.clear()
    iterate(model, optimizer)
    assert len(calls) == CALLS
    before = own.step

    def patched(*args: Any) -> Any:
        calls.append(10)
        return before(*args)

    own.step = patched
    iterate(model, optimizer)
    model.close()
    assert sum(calls) == CALLS + LAYERS * 11


@pytest.mark.parametrize("strategy", [DeAR(fusion_bytes=1), P3(slice_elements=7)], ids=str)
def test_a_plain_loop_keeps_the_updates_at_the_next_forward(strategy: Strategy) -> None:
    """In the first iteration, reads of gradients by the optimizer do not count as the script's."""
    own = nn.Sequential(*[nn.Linear(4, 4) for _ in range(LAYERS)])
    optimizer = torch.optim.SGD(own.parameters(), lr=0.1)
    model, optimizer = offbeat.prepare(own, optimizer, strategy, profile=PROFILE)
    for _ in range(2):
        iterate(model, optimizer)
    assert model._session.engine.traits.on_arrival
    model.close()


def test_an_observer_sees_every_update_and_changes_none() -> None:
    class Updates(Observer):
        every_bucket = True

        def updated(self, iteration: Any, buckets: Any) -> None:
            updates.append(buckets)

    updates: list[Any] = []
    model, optimizer, _ = prepared()
    model._session.observers.add(Updates())
    iterate(model, optimizer)
    model.close()
    assert [len(buckets) for buckets in updates] == [1, LAYERS - 1]  # as many as `CALLS`


def test_param_groups_are_whole_again_after_a_step_that_raises() -> None:
    class Failing(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            raise RuntimeError("out of memory")

    layers = [nn.Linear(2, 1) for _ in range(2)]
    optimizer = Failing([p for layer in layers for p in layer.parameters()], lr=0.1)
    groups = optimizer.param_groups
    stepper = BucketStepper(optimizer, [[*layer.parameters()] for layer in layers], "")
    with pytest.raises(RuntimeError, match="out of memory"):
        stepper.step([0], None, compare=False)
    assert optimizer.param_groups is groups
    assert len(groups[0]["params"]) == 4


def test_settings_for_later_steps_are_copies() -> None:
    """A learning rate may be a tensor, which a scheduler changes in place."""
    layer, rate = nn.Linear(2, 1), torch.tensor(0.5)
    optimizer = torch.optim.SGD(layer.parameters(), lr=rate)
    [settings] = BucketStepper(optimizer, [[*layer.parameters()]], "").settings().values()
    rate.zero_()
    assert settings["lr"].item() == 0.5
