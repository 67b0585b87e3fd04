"""Pictures of simulated timelines as SVG files, from the boxes of the report."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

from offbeat.core.sim.trace import COMPUTE, Span, Trace
from offbeat.experiments.report import boxes
from offbeat.experiments.report.boxes import Box, Lane, Numbers, Picture
from offbeat.experiments.report.page import asset
from offbeat.experiments.report.timeline import Window, lane_name, lanes_of, window_of

WIDTH, LEFT, RIGHT = 860, 84, 6
LETTER = 6.4  # width of a letter
KEY, SWATCH = 18, 11  # legend: height of a line, side of a swatch
INKS = {"f": "--forward-ink", "b": "--backward-ink", "c": "--sum-ink", "n": "--network-ink"}
FILLS = {
    "f": "var(--forward)",
    "b": "var(--backward)",
    "c": "var(--sum)",
    "u": "var(--update)",
    "o": "var(--wait-line)",
    "w": "url(#hatch)",
    "n": "var(--network)",
}
HATCH = (
    '<pattern id="hatch" width="6" height="6" patternUnits="userSpaceOnUse" '
    'patternTransform="rotate(45)"><rect class="paper" width="6" height="6"/>'
    '<line class="line" x1="0" y1="0" x2="0" y2="6"/></pattern>'
)
RULES = """.ground { fill: var(--ground); }
text { font: 11px system-ui, sans-serif; fill: var(--text); }
.quiet { fill: var(--muted); }
.lane { fill: var(--surface); }
.paper { fill: var(--wait); }
.line { stroke: var(--wait-line); stroke-width: 1.6; }
.mark, .tie { stroke: var(--text); fill: var(--text); stroke-width: 1.2; }
"""


# --- pictures ------------------------------------------------------------------------------------


def iterations_picture(
    trace: Trace, title: str, iterations: range, names: Sequence[str]
) -> Picture:
    """Return iterations of a plan's trace: compute and links of each rank, bucket by bucket.

    If one row represents all ranks, `names` are written above the iterations.
    """
    window = window_of(trace, iterations)
    lanes = [lane for rank in window.shown for lane in _rank_lanes(window, rank)]
    numbers = None
    if window.stands_for_all:
        bounds = window.bounds_s(next(iter(window.shown)))
        numbers = Numbers(list(pairwise(bounds)), names)
    return Picture(title, lanes, window.length_s, numbers)


def workers_picture(
    spans: Iterable[Span], title: str, until_s: float, part: str = "iteration"
) -> Picture:
    """Return compute and waits of workers without common iterations, up to `until_s`. `part` names
    what a span's iteration counts."""
    lanes = []
    spans = sorted((s for s in spans if s.start_s < until_s), key=lambda s: (s.rank, s.start_s))
    for rank in dict.fromkeys(span.rank for span in spans):
        own = []
        for s in (s for s in spans if s.rank == rank):
            look, what = ("w", "waits before") if s.kind == "wait" else ("c", "computes")
            number = "" if look == "w" else str(s.iteration)
            text = f"worker {rank} {what} {part} {s.iteration}"
            own.append(Box(s.start_s, min(s.end_s, until_s), look, text, short=number))
        lanes.append(Lane(f"worker {rank}", own, "big"))
    return Picture(title, lanes, until_s)


def _rank_lanes(window: Window, rank: int) -> Iterator[Lane]:
    zero_s, spans = window.zero_s[rank], window.shown[rank]
    describe = boxes.describer(zero_s, window.generations)

    def box(span: Span) -> Box:
        kind = boxes.LOOKS.get(span.kind, boxes.LOOKS["other"])[0]
        look = "n" if span.lane != COMPUTE else kind
        times = max(0.0, span.start_s - zero_s), min(span.end_s - zero_s, window.length_s)
        range_ = "" if look in "wo" else boxes.bucket_range(span.buckets)
        noun = f"{boxes.NOUNS.get(span.kind, span.kind)} {range_}" if look == "n" else ""
        if look in "fb" and not range_:
            noun = span.kind
        return Box(*times, look, describe(span), noun, range_)

    marks = window.bounds_s(rank)
    compute = [box(span) for span in spans if span.lane == COMPUTE]
    name = "computes" if window.stands_for_all else f"rank {rank}"
    yield Lane(name, compute, "big", marks, first=True)
    links = [("sends", [box(s) for s in spans if s.way and s.way[0] == rank])]
    links += [
        (lane_name(lane), [box(s) for s in spans if s.lane == lane and not s.way])
        for lane in lanes_of([window], ())
        if lane != COMPUTE
    ]
    for name, own in links:
        for n, track in enumerate(_tracks(own)):
            yield Lane("" if n else name, track, marks=marks)


def _tracks(spans: Iterable[Box]) -> list[list[Box]]:
    """Distribute boxes over as few lanes as possible."""
    tracks: list[list[Box]] = []
    for box in sorted(spans, key=lambda box: box.begin_s):
        free = (track for track in tracks if track[-1].end_s <= box.begin_s + 1e-9)
        track = next(free, None)
        if track is None:
            tracks.append(track := [])
        track.append(box)
    return tracks


# --- SVG -----------------------------------------------------------------------------------------


def svg_file(picture: Picture) -> str:
    """Return a picture as an SVG file with axis, legend and the colours of the report."""
    scale = (WIDTH - LEFT - RIGHT) / picture.length_s
    body: list[str] = []
    base = 0.0
    for lane, middle in zip(picture.lanes, picture.middles, strict=True):
        height = boxes.HEIGHTS[lane.size] - 2
        top, base = middle - height / 2, middle + height / 2
        body += [_text(lane.name, LEFT - 8, middle + 4, anchor="end")] if lane.name else []
        body.append(_rect("lane", LEFT, top, WIDTH - LEFT - RIGHT, height))
        for box in lane.boxes:
            left, wide = LEFT + scale * box.begin_s, scale * (box.end_s - box.begin_s)
            if wide > 0.1:
                body += _box(box, left, wide - 0.8, top, height)
        body += [_line("mark", LEFT + scale * mark, top, base + 2) for mark in lane.marks]
    for tie in picture.ties:
        ends = [picture.middles[i] for i in tie.lanes]
        x = LEFT + scale * tie.at_s
        body.append(_line("tie", x, *ends))
        body += [f'<circle class="tie" cx="{x:.1f}" cy="{y:g}" r="3"/>' for y in ends]
    if picture.numbers is not None:
        numbers = zip(picture.numbers.intervals, picture.numbers.texts, strict=False)
        body += [_text(text, LEFT + scale * a + 5, 12, "quiet") for (a, _), text in numbers]
    for left, text in re.findall(r"left:([\d.]+)%\">([^<]+)<", boxes.axis(picture.length_s)):
        x = LEFT + float(left) / 100 * (WIDTH - LEFT - RIGHT)
        body.append(_text(text, x, base + 16, "quiet", "middle" if float(left) else "start"))
    keys, bottom = _legend("".join(body), base + 36)
    head = (
        f'<svg viewBox="0 0 {WIDTH} {bottom:g}" role="img" '
        f'aria-label="{html.escape(picture.label)}" xmlns="http://www.w3.org/2000/svg">'
    )
    ground = _rect("ground", 0, 0, WIDTH, bottom)
    return "\n".join([head, f"<style>\n{style()}</style>", HATCH, ground, *body, keys, "</svg>\n"])


def style() -> str:
    """Return the style sheet: the colours of the report, light and dark, and rules for SVG."""
    light, dark = re.findall(r":root \{\n(.*?)\n *\}", asset("boxes.css"), re.DOTALL)
    light = re.sub(r" *color-scheme.*?\n", "", light)
    fills = "".join(f".box.{look} {{ fill: {fill}; }}\n" for look, fill in FILLS.items())
    inks = "".join(f"text.{look} {{ fill: var({ink}); }}\n" for look, ink in INKS.items())
    dark = f"@media (prefers-color-scheme: dark) {{\n  svg {{\n{dark}\n  }}\n}}"
    return f"svg {{\n{light}\n}}\n{dark}\n{RULES}{fills}{inks}"


def _legend(body: str, y: float) -> tuple[str, float]:
    """Return the legend of the looks that occur, and the height of the whole picture."""
    x, parts = float(LEFT), []
    for look, text in dict.fromkeys((*boxes.LOOKS.values(), boxes.MESSAGE)):
        if f'class="box {look}"' not in body:
            continue
        if x + SWATCH + LETTER * len(text) > WIDTH:
            x, y = float(LEFT), y + KEY
        parts += [_rect(f"box {look}", x, y - SWATCH + 1, SWATCH, SWATCH), _text(text, x + 17, y)]
        x += SWATCH + LETTER * len(text) + 24
    return "".join(parts), y + 10


def _box(box: Box, left: float, wide: float, top: float, height: float) -> Iterator[str]:
    yield f"<g><title>{html.escape(box.text)}</title>"
    yield _rect(f"box {box.look}", left, top, max(wide, 0.6), height)
    texts = [text for text in (box.label, box.short) if text and LETTER * len(text) + 2 < wide]
    if texts:
        yield _text(texts[0], left + wide / 2, top + height / 2 + 4, box.look, "middle")
    yield "</g>"


def _rect(look: str, x: float, y: float, width: float, height: float) -> str:
    place = f'x="{x:.1f}" y="{y:g}" width="{width:.1f}" height="{height:g}"'
    return f'<rect class="{look}" {place}/>'


def _line(look: str, x: float, top: float, base: float) -> str:
    return f'<line class="{look}" x1="{x:.1f}" x2="{x:.1f}" y1="{top:g}" y2="{base:g}"/>'


def _text(text: str, x: float, y: float, look: str = "name", anchor: str = "start") -> str:
    place = f'x="{x:.1f}" y="{y:g}" text-anchor="{anchor}"'
    return f'<text class="{look}" {place}>{html.escape(text)}</text>'
