"""Former names of strategies: they emit a FutureWarning until version 0.3."""

from __future__ import annotations

import warnings
from typing import Literal

from offbeat.former_names import REMOVED_IN
from offbeat.strategies.selsync import SelSync


def PSSelSync(  # noqa: N802
    delta: float = 0.3,
    window: int = 25,
    smooth: Literal["norm", "change"] = "norm",
    aggregate: Literal["parameters", "gradients"] = "parameters",
    silent_s: float | None = None,  # noqa: ARG001
) -> SelSync:
    """Emit a FutureWarning and return `SelSync` with the same settings. `silent_s` has no effect
    without servers."""
    warnings.warn(
        "ps-selsync (PSSelSync) runs selsync, which computes the same without servers, and will be "
        f"removed in {REMOVED_IN}; use selsync (SelSync), and leave --servers and silent_s out",
        FutureWarning,
        stacklevel=2,
    )
    return SelSync(delta, window, smooth, aggregate)
