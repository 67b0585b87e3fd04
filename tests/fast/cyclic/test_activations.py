"""Bytes that autograd keeps for backward."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from offbeat.cyclic import Activations


def test_a_tensor_that_is_changed_before_backward_is_refused_as_without_hooks() -> None:
    layer = nn.Linear(5, 5)
    with Activations(layer.parameters):
        y = layer(torch.ones(3, 5)).sigmoid()
        y.mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_tensors_without_storage_are_counted() -> None:
    weight, dense = nn.Parameter(torch.ones(5, 5)), torch.ones(3, 5)
    with Activations(lambda: [weight]) as meter:
        y = torch.sparse.mm(torch.eye(3).to_sparse(), dense @ weight)
    assert meter.missed == 1
    assert meter.live_bytes == dense.nbytes
    y.sum().backward()
    assert meter.live_bytes == 0
