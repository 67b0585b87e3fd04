"""Numbers as texts: seconds, bytes, shares, durations and times."""

from __future__ import annotations

import math
import time
from itertools import pairwise

NONE = "–"


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
