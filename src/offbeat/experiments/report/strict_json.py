"""Strict JSON: numbers that are not finite become null."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any


def dumps(data: Any) -> str:
    """Return compact JSON."""
    try:
        return json.dumps(data, allow_nan=False, separators=(",", ":"))
    except ValueError:  # rare; a check of all numbers in advance would take ten times as long
        return json.dumps(_finite(data), allow_nan=False, separators=(",", ":"))


def script_safe(text: str) -> str:
    """Escape JSON for a script element, so that it contains no HTML character."""
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _finite(data: Any) -> Any:
    if isinstance(data, float):
        return data if math.isfinite(data) else None
    if isinstance(data, Mapping):
        return {key: _finite(value) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [_finite(value) for value in data]
    return data
