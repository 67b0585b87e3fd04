"""Line charts as HTML and SVG: losses and distances of replicas against time or iterations."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

from offbeat.experiments.report.boxes import ticks

SIZE = 10_000  # coordinates of a chart: [0, SIZE] in both directions
NEAR = 0.075  # share of the height from which names at the ends of lines do not overlap

Values = Sequence[float | None]


@dataclass(frozen=True)
class Line:
    """Line of one strategy.

    Attributes:
        name: name at the end of the line.
        look: CSS class: "best", "base" or "other".
        xs: values on the horizontal axis.
        ys: values on the vertical axis; None for a gap.
        low: lowest repetition; empty for one repetition.
        high: highest repetition.
        faint: (xs, ys) of a line in the background.
        hit: point that is marked.
    """

    name: str
    look: str
    xs: Sequence[float]
    ys: Values
    low: Values = ()
    high: Values = ()
    faint: tuple[Sequence[float], Values] | None = None
    hit: tuple[float, float] | None = None

    @property
    def known_points(self) -> list[tuple[float, float]]:
        """Points that are no gap."""
        return [(x, y) for x, y in zip(self.xs, self.ys, strict=True) if y is not None]


@dataclass(frozen=True)
class Axes:
    """Ranges of a chart."""

    right: float
    low: float
    high: float

    def x(self, value: float) -> int:
        return round(SIZE * value / (self.right or 1.0))

    def y(self, value: float) -> int:
        share = (self.high - value) / (self.high - self.low)
        return round(SIZE * max(-1.0, min(2.0, share)))


def chart(
    lines: Sequence[Line],
    title: str,
    unit: str,
    target: tuple[float, str] | None = None,
    from_zero: bool = False,
) -> str:
    """Return a chart as HTML; empty without a line.

    Args:
        lines: lines; the last one is in front.
        title: description for screen readers.
        unit: unit of the horizontal axis.
        target: horizontal line with its text.
        from_zero: whether the vertical axis begins at zero.
    """
    lines = [line for line in lines if line.known_points]
    if not lines:
        return ""
    axes = _axes(lines, target, from_zero)
    across, up = ticks(0.0, axes.right, 6), ticks(axes.low, axes.high, 5)
    parts = [
        f'<div class="chart" role="img" tabindex="0" aria-label="{escape(title)}" '
        f'data-x="{axes.right:.6g}" data-y="{axes.low:.6g} {axes.high:.6g}" data-unit="{unit}">'
        f'<svg viewBox="0 0 {SIZE} {SIZE}" preserveAspectRatio="none" aria-hidden="true">'
    ]
    parts += [f'<path class="grid" d="M0 {axes.y(value)}H{SIZE}"/>' for value in up]
    for line in lines:
        if line.low:
            parts.append(f'<path class="band" d="{_band(line, axes)}"/>')
        if line.faint is not None:
            parts.append(f'<path class="faint" d="{_path(*line.faint, axes)}"/>')
    if target is not None:
        parts.append(f'<path class="target" d="M0 {axes.y(target[0])}H{SIZE}"/>')
    for n, line in enumerate(lines):
        look = f"line {line.look} d{n % 4}"
        name = escape(line.name)
        parts.append(
            f'<path class="{look}" data-name="{name}" d="{_path(line.xs, line.ys, axes)}"/>'
        )
    parts.append("</svg>")
    decimals = _decimals(up)
    parts += [_label(f"{v:.{decimals}f}", 0, axes.y(v), "up") for v in up]
    for value in across:
        text = f"{value:g}" + f" {unit}" * (not value)
        parts.append(_label(text, axes.x(value), SIZE, "across" + " first" * (not value)))
    if target is not None:
        parts.append(_label(target[1], 0, axes.y(target[0]), "aim"))
    for line in lines:
        if line.hit is not None:
            parts.append(_label("", axes.x(line.hit[0]), axes.y(line.hit[1]), f"hit {line.look}"))
    parts += _names(lines, axes)
    return "".join([*parts, "</div>"])


def _axes(lines: Sequence[Line], target: tuple[float, str] | None, from_zero: bool) -> Axes:
    """Return ranges from the lowest value to where the lines begin; rising lines are clipped."""
    right = max(line.xs[-1] for line in lines)
    if from_zero:
        return Axes(
            right, 0.0, 1.05 * max(1e-9, *(y for line in lines for _, y in line.known_points))
        )
    lows = [y for line in lines for _, y in line.known_points] + (
        [] if target is None else [target[0]]
    )
    tops = [line.known_points[0][1] for line in lines]
    for line in lines:
        lows += [y for y in line.low if y is not None]
        tops += [y for y in line.high[:1] if y is not None]
        if line.faint is not None:
            raw = sorted(y for y in line.faint[1] if y is not None)
            lows += raw[len(raw) // 50 : len(raw) // 50 + 1]
            tops += [y for y in line.faint[1][:1] if y is not None]
    low = min(lows)
    high = max(low + 1e-9 + 1e-3 * abs(low), *tops)
    return Axes(right, low - 0.05 * (high - low), high + 0.05 * (high - low))


def _path(xs: Sequence[float], ys: Values, axes: Axes) -> str:
    """Return the points as a path that is interrupted at gaps."""
    parts, pen = [], "M"
    for x, y in zip(xs, ys, strict=True):
        if y is None:
            pen = "M"
            continue
        parts.append(f"{pen}{axes.x(x)} {axes.y(y)}")
        pen = "L"
    return "".join(parts)


def _band(line: Line, axes: Axes) -> str:
    points = [
        (x, a, b)
        for x, a, b in zip(line.xs, line.low, line.high, strict=True)
        if a is not None and b is not None
    ]
    there = [f"{axes.x(x)} {axes.y(b)}" for x, _, b in points]
    back = [f"{axes.x(x)} {axes.y(a)}" for x, a, _ in reversed(points)]
    return f"M{'L'.join([*there, *back])}z" if points else ""


def _names(lines: Sequence[Line], axes: Axes) -> Iterator[str]:
    """Yield the names at the ends of lines, moved apart where they would overlap."""
    placed: list[tuple[float, float]] = []
    ends = [
        (axes.y(line.known_points[-1][1]), axes.x(line.known_points[-1][0]), line) for line in lines
    ]
    for y, x, line in sorted(ends, key=lambda end: end[:2]):
        at = float(min(max(y, 0), SIZE))
        near = [there for there in placed if abs(there[0] - x) < 0.3 * SIZE]
        while any(abs(at - other) < NEAR * SIZE for _, other in near):
            at += NEAR * SIZE / 4
        placed.append((x, at))
        side = "end left" if x > 0.8 * SIZE else "end"
        yield _label(line.name, x, at, f"{side} {line.look}")


def _label(text: str, x: float, y: float, look: str) -> str:
    place = f"left:{100 * x / SIZE:.2f}%;top:{100 * y / SIZE:.2f}%"
    return f'<span class="{look}" style="{place}">{escape(text)}</span>'


def _decimals(values: Sequence[float]) -> int:
    step = values[1] - values[0] if len(values) > 1 else 1.0
    return max(0, -math.floor(math.log10(step) + 1e-9))
