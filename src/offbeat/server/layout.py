"""Layout of the parameters on servers: flat tensors cut into shards, equal bytes per server."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from offbeat.core.buckets.flat import view_like

SHARD_BYTES = 1 << 20
"""Upper bound of a shard's bytes, and so of the memory for one frame in each direction."""


@dataclass(frozen=True)
class Piece:
    """Elements [start, stop) of a parameter, in the order of its memory.

    `parameter` is its number in the layout, `group` the number of its param group. `at` is the
    offset of the first element in the shard.
    """

    parameter: int
    group: int
    start: int
    stop: int
    at: int


@dataclass(frozen=True)
class ShardSpec:
    """Elements [start, stop) of the flat tensor of one dtype, on one server."""

    number: int
    server: int
    dtype: torch.dtype
    start: int
    stop: int
    pieces: tuple[Piece, ...]

    @property
    def bytes(self) -> int:
        return (self.stop - self.start) * self.dtype.itemsize


@dataclass(frozen=True)
class Span:
    """Elements [start, stop) of the flat tensor of `dtype` that hold one parameter of a `group`."""

    dtype: torch.dtype
    start: int
    stop: int
    group: int


class Layout:
    """Place of every trained parameter in flat tensors, and their shards on the servers.

    `spans` has one entry per parameter, `sizes` the elements of the flat tensor of each dtype.
    `digest` identifies the layout: ranks with equal models and optimizers have equal digests.
    """

    def __init__(
        self, groups: Sequence[Sequence[Tensor]], servers: int, shard_bytes: int = SHARD_BYTES
    ):
        self.parameters = [p for group in groups for p in group]
        self.spans: list[Span] = []
        self.sizes: dict[torch.dtype, int] = {}
        for number, group in enumerate(groups):
            for p in group:
                start = self.sizes.get(p.dtype, 0)
                self.sizes[p.dtype] = stop = start + p.numel()
                self.spans.append(Span(p.dtype, start, stop, number))
        self.bytes = sum(dtype.itemsize * size for dtype, size in self.sizes.items())
        self.shards = tuple(self._cut(servers, shard_bytes))
        for server in range(servers):
            if not self.of(server):
                raise ValueError(
                    f"servers ({servers}) must be fewer: the parameters ({self.bytes} bytes) leave "
                    f"nothing for server {server}"
                )
        text = repr((self.spans, self.shards))
        self.digest = hashlib.sha256(text.encode()).hexdigest()[:16]

    def of(self, server: int) -> tuple[ShardSpec, ...]:
        """Return the shards of one server."""
        return tuple(shard for shard in self.shards if shard.server == server)

    def flats(self) -> dict[torch.dtype, Tensor]:
        """Return new flat tensors on the host, one per dtype, filled with zeros.

        Memory for parameters of a GPU is pinned, so that copies of single parameters need no wait.
        """
        pinned = any(p.is_cuda for p in self.parameters)
        return {
            dtype: torch.zeros(size, dtype=dtype, device="cpu", pin_memory=pinned)
            for dtype, size in self.sizes.items()
        }

    def views(self, flats: dict[torch.dtype, Tensor]) -> list[Tensor]:
        """Return one view of the flat tensors per parameter, with the parameter's shape."""
        return [
            view_like(flats[span.dtype], p, span.start)
            for p, span in zip(self.parameters, self.spans, strict=True)
        ]

    def _cut(self, servers: int, shard_bytes: int) -> list[ShardSpec]:
        shards: list[ShardSpec] = []
        before = 0  # bytes of the flat tensors before this one
        for dtype, size in self.sizes.items():
            item = dtype.itemsize
            for server in range(servers):
                first, last = (
                    min(max(-(-(self.bytes * i // servers - before) // item), 0), size)
                    for i in (server, server + 1)
                )
                count = max(1, -(-(last - first) * item // shard_bytes))
                edges = [first + (last - first) * k // count for k in range(count + 1)]
                for start, stop in pairwise(edges):
                    if stop > start:
                        pieces = self._pieces(dtype, start, stop)
                        shards.append(ShardSpec(len(shards), server, dtype, start, stop, pieces))
            before += size * item
        return shards

    def _pieces(self, dtype: torch.dtype, start: int, stop: int) -> tuple[Piece, ...]:
        found: list[Piece] = []
        for number, span in enumerate(self.spans):
            first, last = max(start, span.start), min(stop, span.stop)
            if span.dtype == dtype and first < last:
                inside = first - span.start, last - span.start
                found.append(Piece(number, span.group, *inside, first - start))
        return tuple(found)


def in_order_of(value: Tensor, like: Tensor) -> Tensor:
    """Return the elements of `value` [n] in the memory order of `like`.

    The result is a view of `value` if its strides permit it.
    """
    strides = like.stride()
    order = sorted(range(like.dim()), key=lambda d: -strides[d])
    dense = like.permute(order).is_contiguous()
    return (value.permute(order) if dense else value).reshape(-1)
