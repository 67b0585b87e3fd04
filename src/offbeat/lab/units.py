"""Rates and times as people write them ("100mbit", "20ms"), to and from numbers."""

import math
import re

UNLIMITED = "unlimited"

# tbf holds the rate as 32 bits of bytes per second, and its burst as 32 bits of 64 ns ticks.
MIN_RATE_BPS = 1_000
MAX_RATE_BPS = 32_000_000_000

_NUMBER = r"\s*([0-9]*\.?[0-9]+(?:e[+-]?[0-9]+)?)\s*([a-z]*)(/s)?\s*"
_RATE_UNITS = {"bit": 1, "kbit": 10**3, "mbit": 10**6, "gbit": 10**9}
_TIME_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_RATE_HELP = 'write bit, kbit, mbit or gbit as in "100mbit", or "unlimited"'
_TIME_HELP = 'write us, ms or s as in "20ms"'


def parse_rate_bps(value: str | float | None) -> int | None:
    """Bits per second of "100mbit", "1.5gbit" or a plain number of bit/s; None is unshaped.

    Raises ValueError for another unit (tc's "mbps" means bytes: refused as ambiguous) or a rate
    outside of 1 kbit/s to 32 Gbit/s.
    """
    if value is None or (isinstance(value, str) and value.strip().lower() == UNLIMITED):
        return None
    rate_bps = round(_number(value, "rate", _RATE_UNITS, "bit", _RATE_HELP))
    if not MIN_RATE_BPS <= rate_bps <= MAX_RATE_BPS:
        raise ValueError(
            f"rate ({value!r}) must be from {format_rate(MIN_RATE_BPS)} to "
            f'{format_rate(MAX_RATE_BPS)}; use "{UNLIMITED}" for an unshaped link'
        )
    return rate_bps


def format_rate(rate_bps: int | None) -> str:
    """The shortest exact text of a rate in bit/s: 100000000 is "100mbit", None "unlimited"."""
    if rate_bps is None:
        return UNLIMITED
    for unit in ("gbit", "mbit", "kbit"):
        if rate_bps % (_RATE_UNITS[unit] // 1000) == 0 and rate_bps >= _RATE_UNITS[unit]:
            return f"{rate_bps / _RATE_UNITS[unit]:.15g}{unit}"
    return f"{rate_bps}bit"


def parse_time_s(value: str | float) -> float:
    """Seconds of "20ms", "300us", "1s" or a plain number of seconds; ValueError otherwise."""
    time_s = _number(value, "latency", _TIME_UNITS, "s", _TIME_HELP)
    if not 0 <= time_s <= 10:
        raise ValueError(f"latency ({value!r}) must be from 0 to 10 s; {_TIME_HELP}")
    return time_s


def format_time(time_s: float) -> str:
    """Text of a time in seconds: 0.02 is "20ms"."""
    for unit in ("s", "ms"):
        if time_s >= _TIME_UNITS[unit]:
            return f"{time_s / _TIME_UNITS[unit]:.12g}{unit}"
    return f"{time_s * 1e6:.12g}us"


def _number(
    value: str | float, name: str, units: dict[str, float] | dict[str, int], plain: str, help_: str
) -> float:
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
    if (unit or plain) not in units or (per_second and name != "rate"):
        raise ValueError(f"{name} ({value!r}) has the unknown unit {unit!r}; {help_}")
    return float(number) * units[unit or plain]
