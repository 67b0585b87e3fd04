"""`offbeat simulate --memory`: activation memory of workers in parallel and one after the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from offbeat.profile import Profile
from offbeat.report.words import size
from offbeat.sim.activations import Curve, Memory, curve_of, cyclic, memory

COLUMNS, ROWS = 64, 10  # of the picture
HEADINGS = ("hosts", "parallel, per host", "cyclic, per host", "reduction")


def require_alone(given: Mapping[str, Any]) -> None:
    """ValueError for the first option that says something; they are about time, or a plan."""
    for name, value in given.items():
        if value:
            shown = " ".join(value) if isinstance(value, list) else value
            text = name if value is True else f"{name} {shown}"
            raise ValueError(
                f"--memory takes --profile, --hosts and --json only: activations depend on no "
                f"plan, rate or jitter; leave out {text}"
            )


def of(profile: Profile, hosts: Sequence[int | None]) -> tuple[Curve, list[Memory]]:
    """One worker's curve, and a row for each number of hosts (None: as many as were measured)."""
    if not any(bucket.activation_bytes for bucket in profile.buckets):
        raise ValueError(
            "activation_bytes (0 in every bucket) of the profile must be known; measure the "
            "profile again with `offbeat profile`, or write them into it"
        )
    one = curve_of(profile)
    return one, [memory(one, n or profile.world_size) for n in hosts]


def to_dict(one: Curve, rows: Sequence[Memory]) -> dict[str, Any]:
    """The table, and one worker's curve."""
    table = [
        {
            "hosts": row.workers,
            "parallel_bytes": row.parallel_bytes,
            "cyclic_bytes": row.cyclic_bytes,
            "reduction": row.reduction,
        }
        for row in rows
    ]
    return {"rows": table, "at_s": one.at_s, "kept_bytes": one.kept_bytes}


def text(profile: Profile, one: Curve, rows: Sequence[Memory]) -> str:
    """The table, and the curve of most hosts under it."""
    lines = [HEADINGS, *(_cells(row) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    table = ["  ".join(c.rjust(w) for c, w in zip(line, widths, strict=True)) for line in lines]
    most = max(row.workers for row in rows)
    title = f"kept by a host over one iteration: ░ in parallel, ━ cyclic, the mean of {most}"
    return "\n".join([*table, "", title, *_picture(profile, one, most)])


def _cells(row: Memory) -> tuple[str, ...]:
    percent = f"{100 * row.reduction:.1f} %"
    return str(row.workers), size(row.parallel_bytes), size(row.cyclic_bytes), percent


def _picture(profile: Profile, one: Curve, workers: int) -> list[str]:
    middle = (np.arange(COLUMNS) + 0.5) / COLUMNS * one.period_s
    together = cyclic(one, workers)
    filled = _rows(one, one, middle)
    line = np.ceil(_rows(together, one, middle % together.period_s))
    label = size(one.peak_bytes)
    lines = []
    for row in range(ROWS, 0, -1):
        cells = [
            "━" if level == row else "░" if height > row - 0.5 else " "
            for height, level in zip(filled, line, strict=True)
        ]
        lines.append(f"{label if row == ROWS else '':>{len(label)}} │{''.join(cells).rstrip()}")
    back = round(COLUMNS * profile.forward_s / one.period_s)
    axis = f"{0:>{len(label)}} └{'─' * COLUMNS}"
    names = "forward".ljust(back) + "backward" if back > 7 else "forward, backward"
    return [*lines, axis, " " * (len(label) + 2) + names]


def _rows(curve: Curve, one: Curve, at_s: np.ndarray) -> np.ndarray:
    """Heights in rows, of a curve as it is just after some times."""
    return curve.limits(at_s)[1] * (ROWS / one.peak_bytes)
