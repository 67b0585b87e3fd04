"""Static timelines as SVG, for pages without scripts.

Elements have CSS classes; a style sheet colours them (`svg_file` stores it in the picture).
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from offbeat.core.sim.trace import COMPUTE, Span, Trace
from offbeat.experiments.report.generations import held_generation
from offbeat.experiments.report.timeline import Window, lane_name, lanes_of, window_of

WIDTH, LEFT, RIGHT, TOP, BOTTOM = 860, 84, 6, 20, 22
ROW, TRACK, GAP = (
    26,
    18,
    6,
)  # heights: compute row, message track, gap of rows
LETTER = 6.4  # width of a letter in a box
SWATCH, KEY = 10, 18  # legend: side of a swatch, height of a line


@dataclass(frozen=True)
class Box:
    """Box of a span. `kind` is its CSS class, `words` its tooltip."""

    begin_s: float
    end_s: float
    kind: str
    label: str
    words: str


@dataclass(frozen=True)
class Row:
    """Named row with tracks of boxes. Boxes of one track do not overlap."""

    name: str
    tracks: Sequence[Sequence[Box]]
    track_height: int = TRACK

    @property
    def height(self) -> int:
        return self.track_height * len(self.tracks)


@dataclass(frozen=True)
class Tie:
    """Vertical line between two rows, for an exchange of two workers."""

    at_s: float
    rows: tuple[int, int]


def iterations_svg(trace: Trace, title: str, iterations: range, names: Sequence[str] = ()) -> str:
    """Draw iterations of a plan's trace, with compute and links of each rank.

    If one row represents all ranks, iterations are separated by marks with optional `names`.
    """
    window = window_of(trace, iterations)
    rows = [row for rank in window.shown for row in _rows(window, rank)]
    marks = window.bounds_s(next(iter(window.shown))) if window.stands_for_all else ()
    return svg(title, rows, window.length_s, marks=marks, names=names if marks else ())


def workers_svg(spans: Iterable[Span], title: str, until_s: float) -> str:
    """Draw compute and waits of workers without common iterations, up to `until_s`."""
    spans, rows = list(spans), []
    for rank in sorted({span.rank for span in spans}):
        own = [s for s in spans if s.rank == rank and s.start_s < until_s]
        boxes = [
            Box(
                s.start_s,
                s.end_s,
                "wait" if s.kind == "wait" else "computes",
                "" if s.kind == "wait" else str(s.iteration),
                f"worker {rank}, {'waits before' if s.kind == 'wait' else 'computes'} "
                f"iteration {s.iteration}",
            )
            for s in own
        ]
        rows.append(Row(f"worker {rank}", [boxes], ROW))
    return svg(title, rows, until_s)


def gossip_svg(trace: Trace, title: str, units: float) -> str:
    """Draw the last `units` time units of a simulated gossip: gradients, exchanges and pairs."""
    notes: Mapping[str, Any] = trace.notes["gossip"]
    end = min(
        max(e for w, _, e in notes["gradients"] if w == worker)
        for worker in range(notes["workers"])
    )
    begin = end - units * notes["unit_s"]
    rows = []
    for worker in range(notes["workers"]):
        gradients = [
            Box(b - begin, e - begin, "computes", "", f"worker {worker} computes a gradient")
            for w, b, e in notes["gradients"]
            if w == worker
        ]
        exchanges = [
            Box(b - begin, e - begin, "exchange", "", f"workers {i} and {j} exchange")
            for i, j, b, e, _ in notes["exchanges"]
            if worker in (i, j)
        ]
        rows.append(Row(f"worker {worker}", [gradients, exchanges]))
    ties = [
        Tie((b + e) / 2 - begin, (i, j))
        for i, j, b, e, _ in notes["exchanges"]
        if begin < (b + e) / 2 < end
    ]
    return svg(title, rows, end - begin, ties=ties)


def svg(
    title: str,
    rows: Sequence[Row],
    length_s: float,
    *,
    marks: Sequence[float] = (),
    names: Sequence[str] = (),
    ties: Sequence[Tie] = (),
) -> str:
    """Draw rows of boxes from 0 to `length_s`. `marks` are vertical lines, `names` their labels."""
    tops = [*accumulate((row.height + GAP for row in rows), initial=TOP)]
    base = tops[-1] - GAP

    def x(at_s: float) -> float:
        return LEFT + min(max(at_s / length_s, 0.0), 1.0) * (WIDTH - LEFT - RIGHT)

    parts = [
        f'<svg class="still" viewBox="0 0 {WIDTH} {base + BOTTOM}" role="img" '
        f'aria-label="{html.escape(title)}" xmlns="http://www.w3.org/2000/svg">'
    ]
    for row, top in zip(rows, tops, strict=False):
        parts += [
            _text(row.name, LEFT - 8, top + row.height / 2 + 4, anchor="end"),
            _lane_tag(row, top),
        ]
        for n, track in enumerate(row.tracks):
            for box in track:
                left, right = x(box.begin_s), x(box.end_s)
                if left < right:
                    parts += _box(box, left, right, top + n * row.track_height, row.track_height)
    parts += [_line_tag("mark", x(mark), 4, base) for mark in marks]
    parts += [_text(n, x(at) + 5, 13, "quiet") for n, at in zip(names, marks, strict=False)]
    for tie in ties:
        ends = [tops[row] + rows[row].height - TRACK / 2 for row in tie.rows]
        parts.append(_line_tag("tie", x(tie.at_s), *ends))
        parts += [f'<circle class="tie" cx="{x(tie.at_s):.1f}" cy="{y:g}" r="3"/>' for y in ends]
    parts.append(_text("0", LEFT, base + 15, "quiet"))
    parts.append(_text(_time(length_s), WIDTH - RIGHT, base + 15, "quiet", "end"))
    return "".join([*parts, "</svg>"])


def _text(text: str, x: float, y: float, kind: str = "name", anchor: str = "start") -> str:
    where = f'x="{x:.1f}" y="{y:g}" text-anchor="{anchor}"'
    return f'<text class="{kind}" {where}>{html.escape(text)}</text>'


def _line_tag(kind: str, x: float, top: float, base: float) -> str:
    return f'<line class="{kind}" x1="{x:.1f}" x2="{x:.1f}" y1="{top:g}" y2="{base:g}"/>'


def _lane_tag(row: Row, top: float) -> str:
    where = f'x="{LEFT}" y="{top}" width="{WIDTH - LEFT - RIGHT}" height="{row.height}"'
    return f'<rect class="lane" {where}/>'


def legend_kinds(picture: str) -> list[str]:
    """Return the box classes in a picture, in the order of the legend."""
    return [kind for kind in LEGEND if f'class="box {kind}"' in picture]


def svg_file(picture: str, style: str) -> str:
    """Return a picture of `svg` as a file of its own, with ground, legend and style sheet."""
    found = re.match(r"<svg [^>]*?viewBox=\"0 0 (\d+) ([\d.]+)\"[^>]*>", picture)
    assert found is not None
    width, height = int(found[1]), float(found[2])
    kinds: dict[str, list[str]] = {}
    for kind in legend_kinds(picture):
        kinds.setdefault(LEGEND[kind], []).append(kind)
    x, y, legend = LEFT, height + 10, ""
    for text, swatches in kinds.items():
        if x + (SWATCH + 4) * len(swatches) + LETTER * len(text) > width:
            x, y = LEFT, y + KEY
        for kind in swatches:
            legend += f'<rect class="box {kind}" x="{x:.1f}" y="{y - SWATCH + 1:g}" '
            legend += f'width="{SWATCH}" height="{SWATCH}" rx="2"/>'
            x += SWATCH + 4
        legend += _text(text, x + 2, y)
        x += LETTER * len(text) + 16
    head = found[0].replace(f' {found[2]}"', f' {y + 8:g}"')
    ground = f'<rect class="ground" width="{width}" height="{y + 8:g}"/>'
    body = picture[found.end() :].removesuffix("</svg>").replace("<g>", "\n<g>")
    return f"{head}\n<style>\n{style}</style>\n{ground}{body}\n{legend}\n</svg>\n"


# Legend: text of each box class.
LEGEND = {
    "computes": "computes",
    "exchange": "exchanges",
    "forward": "forward",
    "backward": "backward",
    "update": "update",
    "other": "rest of the loop",
    "wait": "waits",
    "grad": "gradients",
    "reduce_scatter": "reduce-scatter",
    "all_gather": "all-gather",
    "broadcast": "buffers",
    "g0": "gradients of one update",
    "g1": "of another",
    "g2": "of another",
    "g3": "of another",
    "param": "parameters",
    "send": "from one rank to another",
    "state": "optimizer state",
}


def _rows(window: Window, rank: int) -> Iterable[Row]:
    spans = window.shown[rank]
    zero, alone = window.zero_s[rank], window.stands_for_all
    generations = window.generations
    colours = generations.colours(window.iterations.start)

    def box(span: Span) -> Box:
        kind = "other" if span.kind == "sending" else span.kind
        held = generations.generation_of(span)
        if held in colours and (held_generation(span) or span.kind == "update"):
            kind = f"g{colours[held]}"
        label = "" if span.kind in ("wait", "other", "sending") else _bucket_range(span.buckets)
        way = f", from rank {span.way[0]} to rank {span.way[1]}" if span.way else ""
        words = f"{span.name}{way}, iteration {span.iteration}: {_time(span.end_s - span.start_s)}"
        return Box(span.start_s - zero, span.end_s - zero, kind, label, words)

    compute = [box(s) for s in spans if s.lane == COMPUTE]
    yield Row("compute" if alone else f"rank {rank}", [compute], ROW)
    sends = [s for s in spans if s.way]
    if sends:
        yield Row("sends", _tracks([box(s) for s in sends if s.way and s.way[0] == rank]))
    for lane in lanes_of([window], ()):
        boxes = [box(s) for s in spans if s.lane == lane and not s.way]
        if lane != COMPUTE and boxes:
            yield Row(lane_name(lane), _tracks(boxes))


def _tracks(boxes: Sequence[Box]) -> list[list[Box]]:
    """Distribute boxes over as few tracks as possible."""
    tracks: list[list[Box]] = [[]]
    for box in sorted(boxes, key=lambda box: box.begin_s):
        free = (track for track in tracks if not track or track[-1].end_s <= box.begin_s + 1e-9)
        track = next(free, None)
        if track is None:
            tracks.append(track := [])
        track.append(box)
    return tracks


def _box(box: Box, left: float, right: float, top: float, height: int) -> Iterable[str]:
    wide = max(right - left - 0.8, 0.6)
    yield f'<g><title>{html.escape(box.words)}</title><rect class="box {box.kind}" x="{left:.1f}" '
    yield f'y="{top + 1:g}" width="{wide:.1f}" height="{height - 2}" rx="2"/>'
    if box.label and wide > LETTER * len(box.label) + 2:
        yield _text(box.label, left + wide / 2, top + height / 2 + 4, f"in {box.kind}", "middle")
    yield "</g>"


def _bucket_range(buckets: tuple[int, int] | None) -> str:
    if buckets is None:
        return ""
    first, last = buckets[0], buckets[1] - 1
    return str(first) if first == last else f"{first}-{last}"


def _time(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"
