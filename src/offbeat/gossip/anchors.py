"""Anchors: what both ends of an edge know of each other's x, the same at both bit for bit.

With a codec an exchange sends codes of x - anchor. Both ends add what is decoded to the anchor, and
exchange the difference of their two: m = anchor of mine - anchor of theirs is the same at both but
for the sign, so the mean is kept whatever the codec has lost. What it has lost is part of the next
x - anchor. Both know what the exchange does to either x, so the anchors follow it: what is left to
encode is what happens between two exchanges.

Source: CHOCO-SGD (Koloskova, Stich, Jaggi, ICML 2019), with anchors of each edge in place of each
worker's, as pairs of neighbours meet at times of their own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from offbeat.core.codecs.pieces import pieces
from offbeat.core.codecs.tensor_codecs import code
from offbeat.gossip.chunks import Wire

NEVER = 0  # label of anchors that there are not


@dataclass
class Anchors:
    """Of one edge, as exchange `number` has left them."""

    number: int
    mine: list[Tensor]
    theirs: list[Tensor]


@dataclass
class Coded:
    """What an exchange sends in place of its numbers: codes by chunk, against these anchors."""

    anchors: Anchors
    mine: list[Tensor]
    theirs: list[Tensor]


def encode(wire: Wire, number: int, x: list[Tensor], anchors: list[Tensor], codes: Tensor) -> None:
    """The codes of a chunk of x; x becomes what the partner will take it for."""
    assert wire.codec is not None
    chunk = wire.chunks[number]
    one, anchor = x[chunk.flat][chunk.span], anchors[chunk.flat][chunk.span]
    # Infinity becomes NaN, which no codec cuts off: the partner shall not take it for a number.
    change = (one - anchor).nan_to_num_(math.nan, math.nan, math.nan)
    code(wire.codec).encode(change, codes)
    decode(wire, number, x, anchors, codes)


def decode(wire: Wire, number: int, x: list[Tensor], anchors: list[Tensor], codes: Tensor) -> None:
    """What a chunk of x is known as from now on: its anchor, and what is decoded."""
    assert wire.codec is not None
    chunk = wire.chunks[number]
    one = x[chunk.flat][chunk.span]
    one.copy_(anchors[chunk.flat][chunk.span])
    code(wire.codec).add(codes, one)


def followed(mine: list[Tensor], theirs: list[Tensor], alpha: float) -> bool:
    """Both as the exchange leaves them, in place; whether all numbers are finite. Others would
    never leave the anchors again."""
    finite = True
    for one, other in zip(mine, theirs, strict=True):
        for piece in pieces(one):
            moved = (one[piece] - other[piece]) * alpha
            one[piece] -= moved
            other[piece] += moved
            finite = finite and bool(torch.isfinite(one[piece] + other[piece]).all())
    return finite
