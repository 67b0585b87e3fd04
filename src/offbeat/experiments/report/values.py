"""JSON values as texts and tables of the page, and strict JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from offbeat.core.words import NONE


def as_text(value: Any) -> str:
    """Return a JSON value on one line: 'a: 1, b: 2'."""
    if isinstance(value, Mapping):
        return ", ".join(f"{key}: {as_text(item)}" for key, item in value.items()) or NONE
    if isinstance(value, list):
        return ", ".join(map(as_text, value)) or NONE
    return NONE if value is None else str(value)


def record_table(
    name: str, records: Sequence[Mapping[str, Any]], text: Callable[[Any], str] = as_text
) -> dict[str, Any]:
    """Return records as a table for the template, with one column per key."""
    columns = list(dict.fromkeys(key for record in records for key in record))
    rows = [[text(record.get(key)) for key in columns] for record in records]
    return {"name": name, "columns": columns, "rows": rows}


def dumps(data: Any) -> str:
    """Return compact JSON. Numbers that are not finite become null."""
    try:
        return json.dumps(data, allow_nan=False, separators=(",", ":"))
    except ValueError:  # rare; a check of all numbers in advance would take ten times as long
        return json.dumps(_finite(data), allow_nan=False, separators=(",", ":"))


def _finite(data: Any) -> Any:
    if isinstance(data, float):
        return data if math.isfinite(data) else None
    if isinstance(data, Mapping):
        return {key: _finite(value) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [_finite(value) for value in data]
    return data
