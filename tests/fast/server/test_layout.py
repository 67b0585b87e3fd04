"""Layout: every element once, equal shares, memory order kept."""

from __future__ import annotations

import pytest
import torch

from offbeat.server.layout import Layout, in_order_of


def tensors(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [torch.randn(shape).to(dtype) for shape in shapes]


@pytest.mark.parametrize("servers", [1, 2, 3, 7])
@pytest.mark.parametrize("shard_bytes", [16, 100, 1 << 20])
def test_every_element_once(servers: int, shard_bytes: int) -> None:
    groups = [tensors((7, 3), (5,)), tensors((11,), dtype=torch.float64) + tensors((2, 2, 2))]
    layout = Layout(groups, servers, shard_bytes)
    seen = [torch.zeros(p.numel()) for group in groups for p in group]
    for shard in layout.shards:
        assert shard.bytes <= max(shard_bytes, shard.dtype.itemsize)
        assert sum(piece.stop - piece.start for piece in shard.pieces) == shard.stop - shard.start
        for piece in shard.pieces:
            seen[piece.parameter][piece.start : piece.stop] += 1
            assert layout.spans[piece.parameter].start + piece.start == shard.start + piece.at
    assert all(bool((counts == 1).all()) for counts in seen)
    shares = [sum(shard.bytes for shard in layout.of(server)) for server in range(servers)]
    assert max(shares) - min(shares) <= 2 * 8  # an element at each end


def test_digest_tells_layouts_apart() -> None:
    one = Layout([tensors((4,), (4,))], 1)
    assert one.digest == Layout([tensors((4,), (4,))], 1).digest
    assert one.digest != Layout([tensors((4,)), tensors((4,))], 1).digest
    assert one.digest != Layout([tensors((4,), (4,))], 2).digest


def test_a_server_without_parameters() -> None:
    with pytest.raises(ValueError, match=r"servers \(3\) must be fewer"):
        Layout([tensors((2,))], 3)


def test_memory_order() -> None:
    """Also of what is not row-major: pieces are runs of memory."""
    p = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    layout = Layout([[p]], 1)
    flats = layout.flats()
    layout.views(flats)[0].copy_(p)
    assert torch.equal(flats[torch.float32], in_order_of(p, p))
    gaps = torch.randn(4, 6)[:, ::2]
    assert torch.equal(in_order_of(gaps, gaps), gaps.reshape(-1))
    assert in_order_of(torch.tensor(3.0), torch.tensor(1.0)).shape == (1,)
