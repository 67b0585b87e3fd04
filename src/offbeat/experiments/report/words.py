"""Text forms of data: numbers with significant digits and units, and strict JSON."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from offbeat.jobs.words import (  # noqa: F401
    NONE,
    count_text,
    digits,
    error,
    one_line,
    percent,
    prediction_error,
    seconds,
    size,
)

NO_PROGRESS = (
    "Iterations without an update are no progress: where gradients are merged, compare updates per "
    "second as well."
)
UNIT = re.compile(r"(?<=\d) (?=(?:s|ms|µs|min|h|d|times|[kMGT]?B)\b|%)")
MOST_TEXT = 600  # characters of an error that are printed
NO_BREAK = "\u00a0"


@dataclass(frozen=True, slots=True)
class Unit:
    """Unit of time of a whole column, so that its numbers can be compared by eye."""

    name: str
    seconds: float
    decimals: int

    def text(self, value: float | None) -> str:
        """Return the number without the unit."""
        return NONE if value is None else f"{value / self.seconds:,.{self.decimals}f}"


def unit_for(times: Iterable[float | None]) -> Unit:
    """Return the unit of a column: the largest number chooses s, ms or µs, the smallest one the
    decimals."""
    values = [abs(s) for s in times if s]
    low, high = min(values, default=1.0), max(values, default=1.0)
    name, scale = ("s", 1.0) if high >= 10 else ("ms", 1e-3) if high >= 1e-2 else ("µs", 1e-6)
    return Unit(name, scale, max(0, min(2, 2 - math.floor(math.log10(low / scale)))))


def column_of(values: Iterable[float | None]) -> Callable[[float | None], str]:
    """Return a function that writes all times of a column in one unit, with three digits."""
    high = max((abs(s) for s in values if s), default=1.0)
    name, scale = (
        ("s", 1.0) if high >= 0.9995 else ("ms", 1e-3) if high >= 9.995e-4 else ("µs", 1e-6)
    )
    return lambda value: NONE if value is None else f"{digits(value / scale)} {name}"


def factor(value: float | None) -> str:
    """Return a factor with two digits, such as '3.1' or '12'."""
    return NONE if value is None else digits(value, 2)


def rate(rate_bps: float | None) -> str:
    """Return a rate such as '25 Mbit/s'; None is 'unlimited'."""
    if rate_bps is None:
        return "unlimited"
    for name, scale in (("Tbit/s", 1e12), ("Gbit/s", 1e9), ("Mbit/s", 1e6), ("kbit/s", 1e3)):
        if rate_bps >= scale:
            return f"{rate_bps / scale:.6g} {name}"
    return f"{rate_bps:.6g} bit/s"


def loss(value: float | None) -> str:
    """Return a loss with four significant digits; with an exponent from 1e7 on."""
    if value is None or abs(value) < 1e7:
        return NONE if value is None else digits(value, 4)
    return f"{value:.3e}"


def join_units(text: str) -> str:
    """Return the text with no-break spaces between numbers and their units."""
    return UNIT.sub(NO_BREAK, text)


def join_texts(texts: Sequence[str]) -> str:
    """Return 'a', 'a and b' or 'a, b and c'."""
    *most, last = texts or [""]
    return f"{', '.join(most)} and {last}" if most else last


def shorten(text: str) -> str:
    """Return a text on one line, cut after `MOST_TEXT` characters."""
    text = one_line(text)
    return text if len(text) <= MOST_TEXT else f"{text[:MOST_TEXT]}…"


def sentence(text: str) -> str:
    """Return the text with a capital letter and a full stop."""
    return text[:1].upper() + text[1:] + "."


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
