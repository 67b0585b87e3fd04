"""Table of the tensor implementation of each codec."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from offbeat.core.codecs import BF16, FP16, Codec, Int4, Int8, Sign, TopK
from offbeat.core.codecs.blocks import Int4Code, Int8Code, SignCode
from offbeat.core.codecs.halves import HalfCode
from offbeat.core.codecs.sparse import TopKCode
from offbeat.core.codecs.tensor_codec import Code

_CODES: dict[type[Codec], Callable[[Any], Code]] = {
    BF16: lambda _: HalfCode(torch.bfloat16),
    FP16: lambda _: HalfCode(torch.float16),
    Int8: lambda _: Int8Code(),
    Int4: lambda _: Int4Code(),
    Sign: lambda _: SignCode(),
    TopK: TopKCode,
}


def register_code(cls: type[Codec], implementation: Callable[[Any], Code]) -> None:
    """Register the tensor implementation of a codec.

    Args:
        cls: codec class, registered by `offbeat.core.codecs.register`.
        implementation: function of a codec that returns its implementation. It is called once per
            thread and codec.
    """
    _CODES[cls] = implementation


_mine = threading.local()


def code(codec: Codec) -> Code:
    """Return this thread's tensor implementation of a codec that is not linear."""
    known: dict[Codec, Code] = _mine.__dict__.setdefault("codes", {})
    if codec not in known:
        known[codec] = _CODES[type(codec)](codec)
    return known[codec]
