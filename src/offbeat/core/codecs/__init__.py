"""Codecs: encodings that replace the numbers of a message on a link, one module per codec."""

from __future__ import annotations

from typing import Any

from offbeat.core.codecs.bf16 import BF16
from offbeat.core.codecs.codec import Codec, Exact, Memory
from offbeat.core.codecs.fp16 import FP16
from offbeat.core.codecs.int4 import Int4
from offbeat.core.codecs.int8 import Int8
from offbeat.core.codecs.powersgd import PowerSGD
from offbeat.core.codecs.randomk import RandomK
from offbeat.core.codecs.sign import Sign
from offbeat.core.codecs.topk import TopK
from offbeat.core.rules.vocabulary import SETTINGS, Setting

WIRES: dict[str, type[Codec]] = {}
"""Codec class by the name of a plan's wire."""


def register(cls: type[Codec]) -> type[Codec]:
    """Register a codec class for the wires of plans, and return it.

    A codec that is not linear also needs a tensor implementation, see
    `tensor_codecs.register_code`.

    Raises:
        ValueError: a rule, vote or codec with this name is registered already.
    """
    if cls.name in SETTINGS:
        raise ValueError(
            f"codec ({cls.name!r}) must have a name that no rule, vote or codec has; choose "
            "another name"
        )
    words = ("reduce",) if cls.linear else ("gather", "scatter")
    WIRES[cls.name] = cls
    SETTINGS[cls.name] = {**cls.settings, "via": Setting("word", words[0], words=words)}
    return cls


for _cls in (BF16, FP16, Int8, Int4, Sign, TopK, RandomK, PowerSGD):
    register(_cls)


def codec(name: str, args: dict[str, Any]) -> Codec:
    """Return the codec of a plan's wire. The setting `via` is ignored: it is not the codec's."""
    return WIRES[name](**{k: v for k, v in args.items() if k != "via"})


def way(name: str, args: dict[str, Any]) -> str:
    """Return how the codes of a wire are exchanged: `gather`, `scatter` or `reduce`."""
    return args.get("via", SETTINGS[name]["via"].default)


__all__ = [
    "BF16",
    "FP16",
    "WIRES",
    "Codec",
    "Exact",
    "Int4",
    "Int8",
    "Memory",
    "PowerSGD",
    "RandomK",
    "Sign",
    "TopK",
    "codec",
    "register",
    "way",
]
