"""Conversion of rates, times, sizes, counts and shares between text ("100mbit", "20ms", "5GB",
"10M", "1%") and numbers."""

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
_COUNT_UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
_SIZE_UNITS = {f"{name}b": scale for name, scale in _COUNT_UNITS.items() if name} | {
    f"{name}ib": 2.0 ** (10 * power) for power, name in enumerate("kmgt", 1)
}
_RATE_HELP = 'write bit, kbit, mbit or gbit as in "100mbit", or "unlimited"'
_TIME_HELP = 'write us, ms or s as in "20ms"'
_MOMENT_HELP = 'write ms, s or min as in "30s"'
_COUNT_HELP = "write 10M or 2e6"
_SIZE_HELP = "write kB, MB, GB or TB as in 24GB, or GiB"
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


def parse_given_rate_bps(text: str | None, name: str = "--rate") -> int | None:
    """Return the bits per second of an option; None if it is not given.

    Raises:
        ValueError: the rate is unlimited or no rate.
    """
    rate_bps = parse_rate_bps(text, name)
    if text is not None and rate_bps is None:
        raise ValueError(
            f"{name} ({text!r}) must be a number with a unit, as messages are estimated from it; "
            "write 200mbit, or leave it out for the measured one"
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


def parse_count(value: str, name: str) -> float:
    """Return the number of a text such as "10M", "2e6" or "50k", if it is above 0."""
    return require_positive(_number(value, name, _COUNT_UNITS, "", _COUNT_HELP), value, name)


def parse_size(value: str, name: str) -> float:
    """Return the bytes of a text such as "24GB" or "16GiB", if they are above 0."""
    return require_positive(_number(value, name, _SIZE_UNITS, "", _SIZE_HELP), value, name)


def parse_duration_s(value: str, name: str) -> float:
    """Return the seconds of a text such as "35ms", "2 min" or ".35", if they are above 0."""
    return require_positive(_number(value, name, _MOMENT_UNITS, "s", _MOMENT_HELP), value, name)


def parse_whole(value: str, name: str, least: int | None = None, most: int | None = None) -> int:
    """Return a whole number from `least` to `most`. Raise ValueError instead of rounding."""
    try:
        number = int(value)
    except ValueError:
        raise ValueError(f"{name} ({value!r}) must be a whole number, such as 4") from None
    if (least is None or least <= number) and (most is None or number <= most):
        return number
    limits = f"at least {least}" if most is None else f"from {least} to {most}"
    raise ValueError(f"{name} ({number}) must be {limits}")


def parse_deviation(value: str, name: str) -> float:
    """Return the relative standard deviation of a text such as ".1" or "10%", from 0 to 2."""
    number = _number(value, name, _SHARE_UNITS, "", _SHARE_HELP)
    return _require_range(number, value, name, 0, 2, "", _SHARE_HELP)


def require_positive(number: float, value: str, name: str) -> float:
    """Return a finite number above 0; raise ValueError for any other one."""
    if not 0 < number < math.inf:
        raise ValueError(f"{name} ({value!r}) must be a number above 0")
    return number


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
