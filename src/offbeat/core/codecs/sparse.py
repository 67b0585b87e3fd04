"""Tensor implementation of topk. Layout of the codes: values, then indices."""

from __future__ import annotations

import torch
from torch import Tensor

from offbeat.core.codecs import TopK
from offbeat.core.codecs.topk import PLACE_BYTES, kept_count


class TopKCode:
    """Code with the elements of largest magnitude and their indices."""

    def __init__(self, codec: TopK) -> None:
        self._fraction = codec.fraction

    def encode(self, x: Tensor, codes: Tensor) -> None:
        count = kept_count(x.shape[-1], self._fraction)
        if count == 0:
            return
        places = x.abs().topk(count, sorted=False).indices
        values, where = self._parts(codes, x.dtype)
        values.copy_(x.gather(-1, places))
        where.copy_(places)
        x.scatter_(-1, places, 0.0)

    def add(self, codes: Tensor, out: Tensor) -> None:
        values, where = self._parts(codes, out.dtype)
        out.scatter_add_(-1, where.long(), values)

    def add_all(self, codes: Tensor, out: Tensor) -> None:
        # One call for all rows could add several rows at one index. On a GPU the order of these
        # additions is not fixed, so the sums of the ranks would differ in their last bits.
        for row in codes:
            self.add(row, out)

    @staticmethod
    def _parts(codes: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        count = codes.shape[-1] // (dtype.itemsize + PLACE_BYTES)
        edge = count * dtype.itemsize
        return codes[..., :edge].view(dtype), codes[..., edge:].view(torch.int32)
