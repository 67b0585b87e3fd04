"""Tensor implementation of bf16 and fp16 by dtype conversion."""

from __future__ import annotations

import torch
from torch import Tensor

from offbeat.core.codecs.fp16 import LARGEST
from offbeat.core.codecs.pieces import pieces


class HalfCode:
    """Code with one bfloat16 or float16 per number."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def encode(self, x: Tensor, codes: Tensor) -> None:
        halves = codes.view(self._dtype)
        for piece in pieces(x):
            one, to = x[..., piece], halves[..., piece]
            if self._dtype == torch.float16:
                to.copy_(one.clamp(-LARGEST, LARGEST))
            else:
                to.copy_(one)
            one -= to

    def add(self, codes: Tensor, out: Tensor) -> None:
        halves = codes.view(self._dtype)
        for piece in pieces(out):
            out[..., piece].add_(halves[..., piece])

    def add_all(self, codes: Tensor, out: Tensor) -> None:
        for piece in pieces(out):
            for row in codes.view(self._dtype):
                out[piece].add_(row[piece])
