"""Top-k sparsification: only the largest entries count."""

from __future__ import annotations

from typing import Any

from offbeat.numerics.base import Setting, takes


@takes(fraction=Setting("number", least=0, most=1))
def topk(array: Any, settings: dict[str, Any]) -> Any:
    """The largest share `fraction` of a flat array by magnitude, at least one entry; the rest is
    zero. The message stays dense. Source: Stich et al., Sparsified SGD with Memory, 2018."""
    count = max(1, int(len(array) * settings["fraction"])) if len(array) else 0
    kept = array * 0
    if count:
        places = abs(array).argsort()[-count:]
        kept[places] = array[places]
    return kept
