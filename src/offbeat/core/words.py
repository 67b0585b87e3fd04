"""Numbers as texts: counts, seconds, bytes, rates, shares, losses, durations and times."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

NONE = "–"
NO_BREAK = "\u00a0"
MOST_TEXT = 600  # characters of an error that are printed
_UNIT = re.compile(r"(?<=\d) (?=(?:s|ms|µs|min|h|d|times|[kMGT]?B|Mbit/s|Gbit/s)\b|%)")


def digits(value: float, count: int = 3) -> str:
    """Return `count` significant digits without an exponent: '1,234', '56.7', '0.0120'."""
    if value == 0 or not math.isfinite(value):
        return "0" if value == 0 else str(value)
    exponent = int(f"{value:.{count - 1}e}".partition("e")[2])  # of the rounded value
    decimals = max(0, count - 1 - exponent)
    return f"{value:,.{min(decimals, 12)}f}"


def seconds(value: float | None) -> str:
    """Return a time such as '1.13 s', '341 ms' or '12.3 µs'."""
    if value is None:
        return NONE
    for name, scale in (("s", 1.0), ("ms", 1e-3)):
        if abs(value) >= 0.9995 * scale:
            return f"{digits(value / scale)} {name}"
    return f"{digits(value / 1e-6)} µs"


def size(value: float | None) -> str:
    """Return bytes in decimal units, such as '8.39 MB'."""
    if value is None:
        return NONE
    for name, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(value) >= 0.9995 * scale:
            return f"{digits(value / scale)} {name}"
    return f"{digits(value)} B"


def percent(value: float | None) -> str:
    """Return a share such as '9 %'; with one decimal below 1 %."""
    if value is None:
        return NONE
    return f"{100 * value:.{int(0 < abs(value) < 0.00995)}f} %"


def error(value: float | None) -> str:
    """Return a relative error such as '+0.3 %' or '−12 %'; one decimal below 10 %."""
    if value is None:
        return NONE
    text = f"{100 * value:+.{int(abs(value) < 0.0995)}f} %"
    return "0.0 %" if text[1:] == "0.0 %" else text.replace("-", "−")


def prediction_error(predicted_s: float, measured_s: float) -> str:
    """Return the error of a prediction, relative to the measured seconds."""
    return error(predicted_s / measured_s - 1 if measured_s else None)


def loss_text(value: float) -> str:
    """Return a loss with at most four significant digits: '1.001', '0.805'; '0' also for -0."""
    return f"{value + 0.0:.4g}"


def duration(value: float) -> str:
    """Return a duration in its two largest units: '3 d 2 h', '4 min 10 s' or '1.92 s'."""
    if value < 60:
        return seconds(value)
    units = (("d", 86400), ("h", 3600), ("min", 60), ("s", 1))
    for (name, scale), (next_name, next_scale) in pairwise(units):
        if value >= scale:
            rest = int(value % scale // next_scale)
            return f"{int(value // scale)} {name}" + (f" {rest} {next_name}" if rest else "")
    return seconds(value)


def local_time(t: float) -> str:
    """Return a time in seconds since 1970 as local time: 'Nov 25 15:39:21'."""
    return time.strftime("%b %d %H:%M:%S", time.localtime(t))


def one_line(text: object) -> str:
    """Return a text without line breaks and repeated spaces; empty for None."""
    return "" if text is None else " ".join(str(text).split())


def count_text(count: int, noun: str) -> str:
    """Return a number with its noun: '1 rank', '2 ranks'."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def amount(value: float) -> str:
    """Return a count as '850', '12,000' or '10 M'."""
    for unit, scale in (("T", 1e12), ("G", 1e9), ("M", 1e6)):
        if value >= scale:
            return f"{value / scale:.4g} {unit}"
    return f"{value:,.0f}" if value >= 1 else f"{value:.3g}"


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
    return _UNIT.sub(NO_BREAK, text)


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
