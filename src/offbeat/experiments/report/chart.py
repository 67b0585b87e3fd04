"""Line charts: paths and labels in shares of the width and the height, and their HTML."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from html import escape
from typing import Literal

from offbeat.experiments.report.boxes import ticks

SIZE = 10_000  # coordinates of a chart in HTML: [0, SIZE] in both directions
NEAR = 0.075  # share of the height from which names at the ends of lines do not overlap
RAISED = 0.055  # share of the height by which the style sheet raises names left of their ends
BESIDE = 0.5  # share of the width within which two names may overlap in a narrow window

Values = Sequence[float | None]
Point = tuple[float, float]  # shares of the width from the left and of the height from the top


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
    hit: Point | None = None

    @cached_property
    def known_points(self) -> list[Point]:
        """Points that are no gap."""
        return [(x, y) for x, y in zip(self.xs, self.ys, strict=True) if y is not None]

    def scaled(self, scale: float) -> Line:
        """Return the line with horizontal values in a unit of `scale`."""
        if scale == 1.0:
            return self
        faint, hit = self.faint, self.hit
        return replace(
            self,
            xs=[x / scale for x in self.xs],
            faint=None if faint is None else ([x / scale for x in faint[0]], faint[1]),
            hit=None if hit is None else (hit[0] / scale, hit[1]),
        )


@dataclass(frozen=True)
class Path:
    """Connected points of a chart: a class of the style sheet, and parts between gaps."""

    look: str
    parts: Sequence[Sequence[Point]]
    name: str = ""


@dataclass(frozen=True)
class Label:
    """Text at a place of a chart, or a mark without text."""

    look: str
    text: str
    place: Point


@dataclass(frozen=True)
class Chart:
    """Lines of all strategies on common axes.

    Attributes:
        title: description for screen readers.
        unit: unit of the horizontal axis.
        lines: lines with at least one point; the last one is in front.
        target: value of a horizontal line with its text.
        reach: vertical range: "fall" from the lowest value to where the lines begin (lines that
            rise are clipped), "zero" from zero to the highest value, "all" for all values.
    """

    title: str
    unit: str
    lines: Sequence[Line]
    target: tuple[float, str] | None = None
    reach: Literal["fall", "zero", "all"] = "fall"

    @cached_property
    def right(self) -> float:
        """Largest value of the horizontal axis."""
        return max(line.xs[-1] for line in self.lines) or 1.0

    @cached_property
    def range(self) -> tuple[float, float]:
        """Lowest and highest value of the vertical axis."""
        known = [y for line in self.lines for _, y in line.known_points]
        aims = [] if self.target is None else [self.target[0]]
        if self.reach == "zero":
            return 0.0, 1.05 * max(1e-9, *known, *aims)
        lows = known + aims
        tops = [line.known_points[0][1] for line in self.lines] if self.reach == "fall" else [*lows]
        for line in self.lines:
            lows += [y for y in line.low if y is not None]
            tops += [y for y in line.high[: 1 if self.reach == "fall" else None] if y is not None]
            if line.faint is not None:
                raw = sorted(y for y in line.faint[1] if y is not None)
                lows += raw[len(raw) // 50 : len(raw) // 50 + 1]
                tops += [y for y in line.faint[1][:1] if y is not None]
        low = min(lows)
        high = max(low + 1e-9 + 1e-3 * abs(low), *tops)
        return low - 0.05 * (high - low), high + 0.05 * (high - low)

    def place(self, x: float, y: float) -> Point:
        """Return the place of a point; far outside of the chart it is moved nearer."""
        low, high = self.range
        return x / self.right, max(-1.0, min(2.0, (high - y) / (high - low)))

    def paths(self) -> Iterator[Path]:
        """Yield the grid, bands, lines and the target, from back to front."""
        for value in ticks(*self.range, 5):
            yield self._across("grid", value)
        for line in self.lines:
            if line.low:
                yield Path("band", [self._band(line)])
            if line.faint is not None:
                yield Path("faint", self._parts(*line.faint))
        if self.target is not None:
            yield self._across("target", self.target[0])
        for n, line in enumerate(self.lines):
            yield Path(f"line {line.look} d{n % 4}", self._parts(line.xs, line.ys), line.name)

    def labels(self) -> Iterator[Label]:
        """Yield the texts of the axes, of the target and of the lines, and marked points."""
        up = ticks(*self.range, 5)
        step = up[1] - up[0] if len(up) > 1 else 1.0
        decimals = max(0, -math.floor(math.log10(step) + 1e-9))
        for value in up:
            yield Label("up", f"{value:.{decimals}f}", self.place(0.0, value))
        for value in ticks(0.0, self.right, 6):
            first = not value
            text = f"{value:g}" + f" {self.unit}" * first
            yield Label("across" + " first" * first, text, (value / self.right, 1.0))
        if self.target is not None:
            yield Label("aim", self.target[1], self.place(0.0, self.target[0]))
        for line in self.lines:
            if line.hit is not None:
                yield Label(f"hit {line.look}", "", self.place(*line.hit))
        yield from self._names()

    def _across(self, look: str, value: float) -> Path:
        _, y = self.place(0.0, value)
        return Path(look, [[(0.0, y), (1.0, y)]])

    def _parts(self, xs: Sequence[float], ys: Values) -> list[list[Point]]:
        parts: list[list[Point]] = [[]]
        for x, y in zip(xs, ys, strict=True):
            if y is not None:
                parts[-1].append(self.place(x, y))
            elif parts[-1]:
                parts.append([])
        return [part for part in parts if part]

    def _band(self, line: Line) -> list[Point]:
        known = [
            (x, a, b)
            for x, a, b in zip(line.xs, line.low, line.high, strict=True)
            if a is not None and b is not None
        ]
        there = [self.place(x, b) for x, _, b in known]
        return there + [self.place(x, a) for x, a, _ in reversed(known)]

    def _names(self) -> Iterator[Label]:
        """Yield the names at the ends of lines, moved apart where they would overlap."""
        placed: list[Point] = []
        ends = [(*self.place(*line.known_points[-1]), line) for line in self.lines]
        for x, y, line in sorted(ends, key=lambda end: (end[1], end[0])):
            at, is_left = min(max(y, 0.0), 1.0), x > 0.8
            near = [other for beside, other in placed if abs(beside - x) < BESIDE]
            while any(abs(at - RAISED * is_left - other) < NEAR for other in near):
                at += NEAR / 4
            placed.append((x, at - RAISED * is_left))
            yield Label(f"end{' left' * is_left} {line.look}", line.name, (x, at))


def as_html(chart: Chart) -> str:
    """Return a chart as HTML; empty without a line."""
    if not chart.lines:
        return ""
    low, high = chart.range
    parts = [
        f'<div class="chart" role="img" tabindex="0" aria-label="{escape(chart.title)}" '
        f'data-x="{chart.right:.6g}" data-y="{low:.6g} {high:.6g}" data-unit="{chart.unit}">'
        f'<svg viewBox="0 0 {SIZE} {SIZE}" preserveAspectRatio="none" aria-hidden="true">'
    ]
    for path in chart.paths():
        name = f' data-name="{escape(path.name)}"' * bool(path.name)
        parts.append(f'<path class="{path.look}"{name} d="{_outline(path)}"/>')
    parts.append("</svg>")
    for label in chart.labels():
        place = f"left:{100 * label.place[0]:.2f}%;top:{100 * label.place[1]:.2f}%"
        parts.append(f'<span class="{label.look}" style="{place}">{escape(label.text)}</span>')
    return "".join([*parts, "</div>"])


def _outline(path: Path) -> str:
    """Return the `d` of an SVG path; bands are closed."""
    parts = (
        "L".join(f"{SIZE * x:.0f} {SIZE * y:.0f}" for x, y in part) for part in path.parts if part
    )
    return "".join(f"M{part}{'z' * (path.look == 'band')}" for part in parts)
