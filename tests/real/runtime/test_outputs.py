"""Tensors are found wherever a forward puts them."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from cases import oddities
from harness.ranks import in_turn, run_ranks

from offbeat import LocalSGD, PartialSync
from offbeat.core.runtime.hooks import tensors_of
from offbeat.strategies import Strategy


def test_tensors_in_containers_in_their_order() -> None:
    a, b, c = (torch.zeros(n) for n in range(3))
    output = OrderedDict(loss=a, hidden=(b, [None, c]), name="text")
    assert [*map(id, tensors_of(output))] == [*map(id, (a, b, c))]
    assert [*map(id, tensors_of(a))] == [id(a)]
    assert not [*tensors_of(None)]


@dataclass(frozen=True, slots=True)
class Out:
    loss: torch.Tensor
    more: object = None


def test_tensors_in_objects() -> None:
    a, b, c = (torch.zeros(n) for n in range(3))
    output = Out(a, {"more": Out(b, SimpleNamespace(x=[c], vocabulary={"c": c}, name="text"))})
    assert [*map(id, tensors_of(output))] == [*map(id, (a, b, c))]
    assert not [*tensors_of((Out, "text", 3, object(), len))]


@pytest.mark.parametrize("strategy", [LocalSGD(2), PartialSync(1)], ids=str)
def test_iterations_are_steps_whatever_a_forward_returns(strategy: Strategy) -> None:
    """Also if gradients are zeroed between forward and backward."""
    calls = [(kind, strategy) for kind in oddities.RETURNS]
    for found in run_ranks(2, in_turn, oddities.train_returning, calls):
        assert [iterations for _, iterations in found] == [8] * len(calls)
        assert len({bits for bits, _ in found}) == 1
