"""Boxes of time on lanes: pictures of traces, and their HTML with widths in percent.

The pages of the documentation draw the same pictures as SVG. The style sheet is `boxes.css`, with
the same heights as `HEIGHTS`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from typing import Any

from offbeat.core import words
from offbeat.core.sim.trace import COMPUTE, Span
from offbeat.experiments.report.timeline import Generations, held_generation

HEIGHTS = {"big": 30, "": 24, "low": 15, "small": 8}  # heights of lanes with their margin, pixels
TOP = 17  # height of the row of numbers above the lanes, pixels
BEFORE = 6  # space above a group of lanes, pixels
SLIVER = 0.004  # share of a window up to which a box is merged into its neighbour
LOOKS = {
    "forward": ("f", "forward"),
    "backward": ("b", "backward"),
    "update": ("u", "update"),
    "other": ("o", "rest of the loop"),
    "sending": ("o", "rest of the loop"),
    "computes": ("c", "computes"),
    "wait": ("w", "waits"),
}
MESSAGE = ("n", "a message is on the way")
NOUNS = {
    "grad": "gradients",
    "reduce_scatter": "reduce-scatter of gradients",
    "all_gather": "all-gather of gradients",
    "param": "parameters",
    "state": "optimizer state",
    "broadcast": "buffers",
    "send": "activations or gradients",
    "exchange": "exchange of parameters",
}

Interval = tuple[float, float]
Describe = Callable[[Span], str]  # text of a span for its tooltip


@dataclass(frozen=True)
class Box:
    """Box of one span or of merged spans.

    Attributes:
        begin_s: begin in the window.
        end_s: end in the window.
        look: CSS class.
        text: tooltip.
        label: word inside the box, shown if it fits.
        short: shorter word for narrower boxes.
    """

    begin_s: float
    end_s: float
    look: str
    text: str
    label: str = ""
    short: str = ""


@dataclass(frozen=True)
class Lane:
    """Lane of boxes that do not overlap.

    Attributes:
        name: name beside the lane.
        boxes: boxes in order of time.
        size: key of `HEIGHTS`.
        marks: times with a vertical line.
        note: text inside an empty lane.
        first: whether the lane begins a group.
    """

    name: str
    boxes: Sequence[Box]
    size: str = ""
    marks: Sequence[float] = ()
    note: str = ""
    first: bool = False


@dataclass(frozen=True)
class Tie:
    """Line between two lanes at one time, for an exchange of two workers."""

    at_s: float
    lanes: tuple[int, int]
    text: str


@dataclass(frozen=True)
class Numbers:
    """Text above each interval of a picture, such as the number of an iteration."""

    intervals: Sequence[Interval]
    texts: Sequence[str]


@dataclass(frozen=True)
class Picture:
    """Lanes of time from 0 to `length_s`.

    Attributes:
        label: description for readers who do not see the picture.
        lanes: lanes from top to bottom.
        length_s: length of the window.
        numbers: texts above the lanes.
        ties: lines between lanes.
    """

    label: str
    lanes: Sequence[Lane]
    length_s: float
    numbers: Numbers | None = None
    ties: Sequence[Tie] = ()

    @property
    def middles(self) -> list[float]:
        """Vertical middle of each lane, in pixels."""
        found, top = list[float](), TOP * (self.numbers is not None)
        for lane in self.lanes:
            top += BEFORE * lane.first
            found.append(top + (HEIGHTS[lane.size] - 2) / 2)
            top += HEIGHTS[lane.size]
        return found


def figure(picture: Picture) -> str:
    """Return a picture as one line of HTML."""
    length_s, numbers = picture.length_s, picture.numbers
    parts = [f'<div class="lanes" role="img" tabindex="0" aria-label="{escape(picture.label)}">']
    if numbers is not None:
        parts.append('<div class="nums">')
        for (begin_s, end_s), text in zip(numbers.intervals, numbers.texts, strict=False):
            parts.append(f'<em style="{_place(begin_s, end_s, length_s)}">{escape(text)}</em>')
        parts.append("</div>")
    parts += [part for lane in picture.lanes for part in _lane(lane, length_s)]
    middles = picture.middles
    for tie in picture.ties:
        high, low = sorted(middles[i] for i in tie.lanes)
        left = 100 * tie.at_s / length_s
        style = f"left:{left:.2f}%;top:{high:g}px;height:{low - high:g}px"
        parts.append(f'<s class="tie" style="{style}" title="{escape(tie.text)}"></s>')
    return "".join([*parts, "</div>"])


def axis(length_s: float) -> str:
    """Return a time axis from 0 to `length_s`."""
    units = (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6))
    name, scale = next((unit for unit in units if length_s >= unit[1]), units[-1])
    texts = "".join(
        f'<span style="left:{100 * value * scale / length_s:.2f}%">{value:g}'
        f"{f' {name}' * (value == 0)}</span>"
        for value in ticks(0.0, length_s / scale, 6)
    )
    return f'<div class="axis" aria-hidden="true">{texts}</div>'


def ticks(low: float, high: float, count: int) -> list[float]:
    """Return about `count` round numbers between two numbers."""
    rough = (high - low) / max(1, count) or 1.0
    power = 10.0 ** int(f"{rough:e}".partition("e")[2])
    step = next(k * power for k in (1, 2, 5, 10) if k * power >= rough * (1 - 1e-9))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [float(f"{i * step:.9g}") for i in range(first, last + 1)]


def legend(html: str) -> str:
    """Return the legend of the looks that occur in pictures."""
    keys = {look: text for look, text in (*LOOKS.values(), MESSAGE) if f'<i class="{look}"' in html}
    texts = "".join(f'<span><i class="key {look}"></i>{text}</span>' for look, text in keys.items())
    return f'<p class="keys">{texts}</p>'


def compute_boxes(
    spans: Iterable[Span], zero_s: float, length_s: float, describe: Describe
) -> list[Box]:
    """Return the boxes of a compute lane: neighbours of one kind are merged, and slivers too."""
    least_s = SLIVER * length_s
    groups = _join([[span] for span in spans], least_s, lambda a, b: _kind(a) == _kind(b))
    thin = [_length_s(group) < least_s for group in groups]
    # Adjacent slivers form a group of their own, such as updates between parts of backward.
    runs: list[list[Span]] = []
    for n, group in enumerate(groups):
        if n and thin[n] and thin[n - 1] and _adjacent(runs[-1], group, least_s):
            runs[-1] = [*runs[-1], *group]
        else:
            runs.append(group)
    kept: list[list[Span]] = []
    for run in runs:
        last = kept[-1] if kept else None
        slivers = last is not None and min(_length_s(run), _length_s(last)) < least_s
        if last is not None and slivers and _adjacent(last, run, least_s):
            kept[-1] = [*last, *run]
        else:
            kept.append(run)
    merged = _join(kept, least_s, lambda a, b: _kind(a) == _kind(b))
    boxes = (_merged_box(_kind(group), group, zero_s, length_s, describe) for group in merged)
    return [box for box in boxes if box is not None]


def _join(
    groups: Iterable[list[Span]], least_s: float, alike: Callable[[list[Span], list[Span]], bool]
) -> list[list[Span]]:
    """Join adjacent groups that are alike."""
    joined: list[list[Span]] = []
    for group in groups:
        if joined and _adjacent(joined[-1], group, least_s) and alike(joined[-1], group):
            joined[-1] += group
        else:
            joined.append([*group])
    return joined


def _adjacent(group: Sequence[Span], other: Sequence[Span], least_s: float) -> bool:
    near = other[0].start_s - group[-1].end_s < least_s
    return near and group[-1].iteration == other[0].iteration


def _length_s(group: Sequence[Span]) -> float:
    return group[-1].end_s - group[0].start_s


def _kind(group: Sequence[Span]) -> str:
    """Return the kind that takes most of a group's time."""
    seconds: Counter[str] = Counter()
    for span in group:
        seconds[span.kind] += span.end_s - span.start_s  # type: ignore[assignment]
    return max(seconds, key=seconds.__getitem__)


def message_boxes(
    spans: Iterable[Span], zero_s: float, length_s: float, describe: Describe
) -> list[Box]:
    """Return the boxes of a link's lane. Messages that are thin and adjacent are merged."""
    groups: list[list[Span]] = []
    least_s = SLIVER * length_s
    for span in spans:
        if groups:
            last = groups[-1][-1]
            thin = span.end_s - max(span.start_s, last.end_s) < least_s
            if thin and max(s.end_s for s in groups[-1]) - groups[-1][0].start_s < least_s:
                groups[-1].append(span)
                continue
        groups.append([span])
    boxes, until_s = [], 0.0
    for group in groups:
        [first, *others] = group
        end_s = max(span.end_s for span in group) - zero_s
        begin_s = max(first.start_s - zero_s, until_s)
        if not (begin_s < length_s and end_s > begin_s):
            continue
        noun = NOUNS.get(first.kind, first.kind)
        text = describe(first)
        if others:
            sizes = words.size(sum(span.bytes for span in group))
            text = f"{len(group)} messages, {sizes}\n{text}"
        range_ = bucket_range(first.buckets)
        label = f"{noun} {range_}" if not others else f"{len(group)} messages"
        boxes.append(
            Box(
                begin_s,
                min(end_s, length_s),
                "n",
                text,
                label,
                range_ if not others else "",
            )
        )
        until_s = end_s
    return boxes


def bucket_range(buckets: tuple[int, int] | None) -> str:
    """Return '3' or '3–5'."""
    if buckets is None:
        return ""
    return str(buckets[0]) if buckets[1] - buckets[0] == 1 else f"{buckets[0]}–{buckets[1] - 1}"


def iteration_text(iterations: tuple[int, int]) -> str:
    """Return 'iteration 3' or 'iterations 3–4'."""
    return f"iteration{'s' * (iterations[1] - iterations[0] > 1)} {bucket_range(iterations)}"


def describer(
    zero_s: float,
    generations: Generations,
    names: Sequence[str] = (),
    expected_s: Mapping[Any, float] | None = None,
    first: int = 0,
) -> Describe:
    """Return a function that describes spans of one rank.

    Args:
        zero_s: begin of the window on the rank's clock.
        generations: generations of the window; they are named if messages are late.
        names: names of the buckets.
        expected_s: predicted seconds by `key_of`.
        first: first iteration of the window.
    """

    def describe(span: Span) -> str:
        noun = NOUNS.get(span.kind) if span.lane != COMPUTE else LOOKS.get(span.kind, ("", ""))[1]
        head = noun or span.kind
        if span.buckets is not None:
            count = span.buckets[1] - span.buckets[0]
            head += f" of bucket{'s' * (count > 1)} {bucket_range(span.buckets)}"
            if count == 1 and span.buckets[0] < len(names):
                head += f" ({names[span.buckets[0]]})"
        if span.way is not None:
            head += f" from rank {span.way[0]} to rank {span.way[1]}"
        seconds = span.end_s - span.start_s
        lines = [f"{head}, iteration {span.iteration}"]
        held = generations.generation_of(span) if generations.late else None
        if held is not None and (held_generation(span) or span.kind == "update"):
            verb = "applies" if span.lane == COMPUTE else "holds"
            lines.append(f"{verb} the gradients of {iteration_text(held)}")
        if span.bytes and span.lane != COMPUTE:
            lines.append(words.size(span.bytes))
        line = f"starts at {words.seconds(span.start_s - zero_s)}, takes {words.seconds(seconds)}"
        expected = (expected_s or {}).get(key_of(span, first))
        lines.append(line + f", predicted {words.seconds(expected)}" * (expected is not None))
        return "\n".join(lines)

    return describe


def key_of(span: Span, first: int) -> Any:
    """Return the iteration within the window, lane, kind and buckets of a span."""
    return span.iteration - first, span.lane, span.kind, span.buckets


# --- HTML ----------------------------------------------------------------------------------------


def _merged_box(
    kind: str, group: Sequence[Span], zero_s: float, length_s: float, describe: Describe
) -> Box | None:
    begin_s, end_s = group[0].start_s - zero_s, group[-1].end_s - zero_s
    if end_s <= 0 or begin_s >= length_s:
        return None
    look, noun = LOOKS.get(kind, LOOKS["other"])
    whole = replace(group[0], kind=kind, end_s=group[-1].end_s)
    if len(group) > 1:
        whole = replace(whole, buckets=None)
    text = describe(whole)
    label = "waits" if look == "w" else "" if look in "uo" else noun
    return Box(max(0.0, begin_s), min(end_s, length_s), look, text, label)


def _lane(lane: Lane, length_s: float) -> Iterator[str]:
    size = " ".join(filter(None, ("lane", lane.size, "first" * lane.first)))
    yield f'<div class="{size}" data-n="{escape(lane.name)}">'
    if lane.note:
        yield f"<p>{escape(lane.note)}</p>"
    for box in lane.boxes:
        if box.end_s - box.begin_s >= 1e-4 * length_s:
            yield from _box(box, length_s, lane.size != "small")
    for mark in lane.marks:
        if 0 < mark < length_s * (1 - 1e-6):
            yield f'<s style="left:{100 * mark / length_s:.2f}%"></s>'
    yield "</div>"


def _box(box: Box, length_s: float, labelled: bool) -> Iterator[str]:
    style = _place(box.begin_s, box.end_s, length_s)
    yield f'<i class="{box.look}" style="{style}" title="{escape(box.text)}">'
    if labelled and box.label:
        yield f"<b>{escape(box.label)}</b>"
    if labelled and box.short:
        wide = ' class="wide"' * (len(box.short) > 2)
        yield f"<u{wide}>{escape(box.short)}</u>"
    yield "</i>"


def _place(begin_s: float, end_s: float, length_s: float) -> str:
    left, width = 100 * begin_s / length_s, 100 * (end_s - begin_s) / length_s
    return f"left:{left:.2f}%;width:{width:.2f}%"
