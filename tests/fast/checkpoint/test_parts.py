"""Parts of tensors that the ranks of a node hold, as torch divides parameters between them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from offbeat.core.checkpoint.sharded import join_parts, own_part

DIVIDED = [((5, 3), 0, 2), ((3, 2), 0, 4), ((1, 4), 0, 2), ((4, 6), 1, 2), ((5,), 0, 4)]


@pytest.mark.parametrize(("shape", "dim", "ranks"), DIVIDED, ids=str)
def test_cut_and_joined(shape: tuple[int, ...], dim: int, ranks: int) -> None:
    whole = torch.arange(float(torch.Size(shape).numel())).view(shape)
    parts = [*whole.chunk(ranks, dim)]
    parts += [whole.narrow(dim, 0, 0)] * (ranks - len(parts))
    for rank, part in enumerate(parts):
        found = own_part(whole, parameter(shape, dim, rank, ranks), "")
        assert torch.equal(found, part)
        assert found.is_contiguous()
        assert found.untyped_storage().nbytes() == 4 * part.numel(), "the whole tensor is released"
    assert torch.equal(join_parts(parts, torch.empty(shape), ""), whole)


def parameter(shape: tuple[int, ...], dim: int, rank: int, ranks: int) -> Any:
    mesh = SimpleNamespace(size=lambda: ranks, get_local_rank=lambda: rank)
    placements = [SimpleNamespace(dim=dim)]
    size = torch.Size(shape)
    return SimpleNamespace(
        shape=size, size=size.__getitem__, placements=placements, device_mesh=mesh
    )


def test_what_is_not_divided() -> None:
    """Buffers, numbers of steps, and tensors of a whole model."""
    for value in (torch.ones(4), torch.tensor(3.0), 3):
        assert join_parts([value, value], torch.empty(4), "") is value


def test_state_of_another_shape_cannot_be_divided() -> None:
    """As the factors of Adafactor."""
    words = (
        r"the saved tensor 'row_var' of parameter 2 has shape \(4, 1\), which must be that of the "
        r"parameter, \(4, 6\), .*; load the checkpoint where every rank holds the whole model"
    )
    with pytest.raises(ValueError, match=words):
        own_part(torch.ones(4, 1), parameter((4, 6), 0, 0, 2), "'row_var' of parameter 2")
