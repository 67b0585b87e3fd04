"""Codecs: encodings that replace the numbers of a message on a link."""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules
from typing import Any

from offbeat.core.codecs import methods
from offbeat.core.codecs.codec import Codec
from offbeat.core.codecs.powersgd import PowerSGD
from offbeat.core.codecs.quantization import BF16, FP16, Int4, Int8, Sign
from offbeat.core.codecs.sparsification import RandomK, TopK
from offbeat.core.plan import Transfer
from offbeat.core.rules.vocabulary import SETTINGS, Setting

MEMORY_PREFIX = "wire of "  # of the names under which ranks store the state of codecs
WIRES: dict[str, type[Codec]] = {}
"""Codec class by the name of a plan's wire."""


def register(cls: type[Codec]) -> type[Codec]:
    """Register a codec class for the wires of plans, and return it.

    A codec that is not linear also needs a tensor implementation, see `Codec.tensor_code`.

    Raises:
        ValueError: a rule, vote or codec with this name is registered already.
    """
    if cls.name in SETTINGS:
        raise ValueError(
            f"codec ({cls.name!r}) must have a name that no rule, vote or codec has; choose "
            "another name"
        )
    words = ("reduce",) if cls.linear else cls.ways
    WIRES[cls.name] = cls
    SETTINGS[cls.name] = {**cls.settings, "via": Setting("word", words[0], words=words)}
    return cls


for _cls in (BF16, FP16, Int8, Int4, Sign, TopK, RandomK, PowerSGD):
    register(_cls)
for _info in iter_modules(methods.__path__, f"{methods.__name__}."):
    for _cls in vars(import_module(_info.name)).values():
        if isinstance(_cls, type) and issubclass(_cls, Codec) and _cls.__module__ == _info.name:
            register(_cls)


def codec(name: str, args: dict[str, Any]) -> Codec:
    """Return the codec of a plan's wire. The setting `via` is ignored: it is not the codec's."""
    return WIRES[name](**{k: v for k, v in args.items() if k != "via"})


def way(name: str, args: dict[str, Any]) -> str:
    """Return how the codes of a wire are exchanged: `gather`, `scatter` or `reduce`."""
    return args.get("via", SETTINGS[name]["via"].default)


def memory_of(t: Transfer) -> str:
    """Return the name under which a rank stores the codec state of a transfer."""
    return f"{MEMORY_PREFIX}{t.id}"
