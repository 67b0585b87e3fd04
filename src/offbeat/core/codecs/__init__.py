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

WIRES: dict[str, type[Codec]] = {
    cls.name: cls for cls in (BF16, FP16, Int8, Int4, Sign, TopK, RandomK, PowerSGD)
}
"""Codec class by the name of a plan's wire."""

SETTINGS.update(
    (
        name,
        cls.settings
        | {
            "via": Setting("word", "reduce", words=("reduce",))
            if cls.linear
            else Setting("word", "gather", words=("gather", "scatter"))
        },
    )
    for name, cls in WIRES.items()
)


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
    "way",
]
