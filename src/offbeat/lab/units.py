"""Conversion of rates, times and shares between text ("100mbit", "20ms", "1%") and numbers."""

import math
import re
from collections.abc import Mapping
from typing import Any

UNLIMITED = "unlimited"

# tbf holds the rate as 32 bits of bytes per second, and its burst as 32 bits of 64 ns ticks.
MIN_RATE_BPS = 1_000
MAX_RATE_BPS = 32_000_000_000
MAX_LATENCY_S = 10
MAX_MOMENT_S = 7 * 24 * 3600  # upper bound of the duration of a launch

_NUMBER = r"\s*([+-]?[0-9]*\.?[0-9]+(?:e[+-]?[0-9]+)?)\s*([a-z%]*)(/s)?\s*"
_RATE_UNITS = {"bit": 1, "kbit": 10**3, "mbit": 10**6, "gbit": 10**9}
# "100mbit", "100 Mbit/s", "100Mbps", "100M": bits, as networks are rated; "B" stands for bytes.
_RATE_SPELLING = re.compile(r"([kmg]?)(?:b|bits?|bps)?", re.IGNORECASE)
# Of bytes, or of what may be bytes: "MB", "mbytes", and "mb" in small letters.
_BYTES = re.compile(
    r"\s*([0-9]*\.?[0-9]+)\s*([kKmMgG]?)(?:i?B(?![iI])\w*|i?[bB]ytes?|(?<![KMG])b)(?:/s)?\s*",
    re.ASCII,
)
_TIME_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_MOMENT_UNITS = {**_TIME_UNITS, "min": 60.0}
_SHARE_UNITS = {"": 1.0, "%": 0.01}
_RATE_HELP = 'write bit, kbit, mbit or gbit as in "100mbit", or "unlimited"'
_TIME_HELP = 'write us, ms or s as in "20ms"'
_MOMENT_HELP = 'write ms, s or min as in "30s"'
_SHARE_HELP = 'write 0.01 or "1%"'


def parse_rate_bps(value: str | float | None, name: str = "rate") -> int | None:
    """Return the bits per second of a rate.

    Args:
        value: text such as "100mbit", "100 Mbit/s", "1Gbps" or "1G", or a number of bit/s (not as
            text); None is unshaped. "mbps" is a million bits per second, as networks are rated;
            `tc` reads it as bytes.
        name: name of the rate in error messages.

    Raises:
        ValueError: the unit is missing, unknown, or may be of bytes ("MB/s", "mb"), or the rate is
            outside of 1 kbit/s to 32 Gbit/s.
    """
    if value is None or (isinstance(value, str) and value.strip().lower() == UNLIMITED):
        return None
    if isinstance(value, str):
        _require_bits(value, name)
    rate_bps = round(_number(value, name, _RATE_UNITS, "", _RATE_HELP))
    if not MIN_RATE_BPS <= rate_bps <= MAX_RATE_BPS:
        raise ValueError(
            f"{name} ({value!r}) must be from {format_rate(MIN_RATE_BPS)} to "
            f"{format_rate(MAX_RATE_BPS)}; {_RATE_HELP}"
        )
    return rate_bps


def _require_bits(text: str, name: str) -> None:
    """Raise ValueError if the unit of a rate may be of bytes."""
    if (match := _BYTES.fullmatch(text)) is not None:
        number, prefix = float(match[1]), match[2].lower()
        raise ValueError(
            f"{name} ({text!r}) may be bits or bytes per second; write {number:.15g}{prefix}bit "
            f"for bits, or {8 * number:.15g}{prefix}bit for bytes"
        )


def format_rate(rate_bps: int | None) -> str:
    """Return the shortest exact text of a rate in bit/s: 100000000 is "100mbit", None is
    "unlimited"."""
    if rate_bps is None:
        return UNLIMITED
    for unit in ("gbit", "mbit", "kbit"):
        if rate_bps % (_RATE_UNITS[unit] // 1000) == 0 and rate_bps >= _RATE_UNITS[unit]:
            return f"{rate_bps / _RATE_UNITS[unit]:.15g}{unit}"
    return f"{rate_bps}bit"


def format_rounded_rate(rate_bps: float, digits: int = 3) -> str:
    """Return the text of a measured rate in bit/s, with `digits` significant digits."""
    return format_rate(round(float(f"{rate_bps:.{digits}g}")))


def parse_time_s(value: str | float) -> float:
    """Return the seconds of "20ms", "300us", "1s" or a number of seconds; otherwise raise
    ValueError."""
    time_s = _number(value, "latency", _TIME_UNITS, "s", _TIME_HELP)
    return _require_range(time_s, value, "latency", 0, MAX_LATENCY_S, " s", _TIME_HELP)


def parse_moment_s(value: str | float) -> float:
    """Return the seconds of "30s", "2 min" or a number of seconds; otherwise raise ValueError."""
    time_s = _number(value, "at", _MOMENT_UNITS, "s", _MOMENT_HELP)
    return _require_range(time_s, value, "at", 0, MAX_MOMENT_S, " s", _MOMENT_HELP)


def parse_loss(value: str | float) -> float:
    """Return the share of lost packets of 0.01 or "1%"; raise ValueError unless it is in [0, 1)."""
    share = _number(value, "loss", _SHARE_UNITS, "", _SHARE_HELP)
    if not 0 <= share < 1:
        raise ValueError(f"loss ({value!r}) must be at least 0 and below 1; {_SHARE_HELP}")
    return share


def parse_number(value: Any, name: str, least: float, most: float, help_: str) -> float:
    """Return a number from `least` to `most`; raise ValueError for any other value."""
    if isinstance(value, str):
        raise ValueError(f"{name} ({value!r}) must be a number; {help_}")
    number = _number(value, name, _SHARE_UNITS, "", help_)
    return _require_range(number, value, name, least, most, "", help_)


def format_time(time_s: float) -> str:
    """Return the text of a time in seconds: 0.02 is "20ms"."""
    for unit in ("s", "ms"):
        if time_s >= _TIME_UNITS[unit]:
            return f"{time_s / _TIME_UNITS[unit]:.12g}{unit}"
    return f"{time_s * 1e6:.12g}us"


def _require_range(
    number: float, value: Any, name: str, least: float, most: float, unit: str, help_: str
) -> float:
    if not least <= number <= most:
        raise ValueError(f"{name} ({value!r}) must be from {least} to {most}{unit}; {help_}")
    return number


def _number(value: Any, name: str, units: Mapping[str, float], plain: str, help_: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise ValueError(f"{name} ({value!r}) must be text with a unit or a number; {help_}")
    if not isinstance(value, str):
        if not math.isfinite(value):
            raise ValueError(f"{name} ({value!r}) must be finite; {help_}")
        return float(value)
    match = re.fullmatch(_NUMBER, value.lower())
    if match is None:
        raise ValueError(f"{name} ({value!r}) is not a number with a unit; {help_}")
    number, unit, per_second = match.groups()
    if units is _RATE_UNITS and unit and (spelling := _RATE_SPELLING.fullmatch(unit)):
        unit = f"{spelling[1]}bit"
    if (unit or plain) not in units or (per_second and units is not _RATE_UNITS):
        problem = f"has the unknown unit {unit!r}" if unit else "must have a unit"
        raise ValueError(f"{name} ({value!r}) {problem}; {help_}")
    return float(number) * units[unit or plain]
