"""Which code does the work of which codec."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from offbeat.core.codecs import BF16, FP16, Codec, Int4, Int8, Sign, TopK
from offbeat.core.codecs.blocks import Eight, Four, One
from offbeat.core.codecs.halves import Halves
from offbeat.core.codecs.sparse import Largest
from offbeat.core.codecs.tensor_codec import Code

_CODES: dict[type[Codec], Callable[[Any], Code]] = {
    BF16: lambda _: Halves(torch.bfloat16),
    FP16: lambda _: Halves(torch.float16),
    Int8: lambda _: Eight(),
    Int4: lambda _: Four(),
    Sign: lambda _: One(),
    TopK: Largest,
}


_mine = threading.local()


def code(codec: Codec) -> Code:
    """What does a codec's work on tensors, of one that is not linear; one for each thread."""
    known: dict[Codec, Code] = _mine.__dict__.setdefault("codes", {})
    if codec not in known:
        known[codec] = _CODES[type(codec)](codec)
    return known[codec]
