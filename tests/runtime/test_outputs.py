"""Tensors are found wherever a forward puts them."""

from __future__ import annotations

from collections import OrderedDict

import torch

from offbeat.runtime.outputs import tensors_of


def test_tensors_in_containers_in_their_order() -> None:
    a, b, c = (torch.zeros(n) for n in range(3))
    output = OrderedDict(loss=a, hidden=(b, [None, c]), name="text")
    assert [*map(id, tensors_of(output))] == [*map(id, (a, b, c))]
    assert [*map(id, tensors_of(a))] == [id(a)]
    assert not [*tensors_of(None)]
