"""Anchors: copies of both workers' x at the ends of an edge, equal bit for bit.

With a codec, an exchange sends codes of x - anchor. Both ends add the decoded change to the anchor
and use the difference of the two anchors for the exchange. The difference m = own anchor - other
anchor is equal at both ends except for the sign, so the average is preserved whatever the codec
drops. Dropped parts stay in the next x - anchor. Both ends apply the effect of the exchange to both
anchors. The next exchange therefore encodes only the changes since the previous one.

Source: CHOCO-SGD (Koloskova, Stich, Jaggi, ICML 2019), with anchors for each edge instead of each
    worker, because pairs exchange at different times.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from offbeat.core.codecs.pieces import pieces
from offbeat.core.codecs.tensor_codecs import code
from offbeat.gossip.chunks import Wire

NEVER = 0  # number of missing anchors


@dataclass
class Anchors:
    """Anchors of one edge after exchange `number`."""

    number: int
    mine: list[Tensor]
    theirs: list[Tensor]


@dataclass
class Coded:
    """Codes that an exchange sends and receives instead of numbers, one tensor per chunk, relative
    to `anchors`.
    """

    anchors: Anchors
    mine: list[Tensor]
    theirs: list[Tensor]


def encode(wire: Wire, number: int, x: list[Tensor], anchors: list[Tensor], codes: Tensor) -> None:
    """Encode a chunk of x. Replace x by the value that the partner decodes."""
    assert wire.codec is not None
    chunk = wire.chunks[number]
    one, anchor = x[chunk.flat][chunk.span], anchors[chunk.flat][chunk.span]
    # Infinity becomes NaN, because no codec clips NaN: the partner must not decode a finite number.
    change = (one - anchor).nan_to_num_(math.nan, math.nan, math.nan)
    code(wire.codec).encode(change, codes)
    decode(wire, number, x, anchors, codes)


def decode(wire: Wire, number: int, x: list[Tensor], anchors: list[Tensor], codes: Tensor) -> None:
    """Set a chunk of x to its anchor plus the decoded change."""
    assert wire.codec is not None
    chunk = wire.chunks[number]
    one = x[chunk.flat][chunk.span]
    one.copy_(anchors[chunk.flat][chunk.span])
    code(wire.codec).add(codes, one)


def advance_anchors(mine: list[Tensor], theirs: list[Tensor], alpha: float) -> bool:
    """Apply an exchange to both anchors in place. Return whether all numbers are finite.

    Anchors with NaN or infinity would never become finite again.
    """
    finite = True
    for one, other in zip(mine, theirs, strict=True):
        for piece in pieces(one):
            moved = (one[piece] - other[piece]) * alpha
            one[piece] -= moved
            other[piece] += moved
            finite = finite and bool(torch.isfinite(one[piece] + other[piece]).all())
    return finite
