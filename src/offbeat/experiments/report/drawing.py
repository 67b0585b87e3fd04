"""Timelines of the page: all strategies in one window and on one scale."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from markupsafe import Markup

from offbeat.core import words
from offbeat.core.profile import Profile
from offbeat.core.sim.trace import COMPUTE
from offbeat.experiments.record.run_directory import Contestant, Run
from offbeat.experiments.report.boxes import (
    SLIVER,
    Lane,
    Numbers,
    Picture,
    compute_boxes,
    describer,
    figure,
    key_of,
    message_boxes,
)
from offbeat.experiments.report.breakdown import rank_parts
from offbeat.experiments.report.gossip import gossip_picture, gossips_of, visible_part
from offbeat.experiments.report.timeline import (
    Window,
    lane_name,
    lanes_of,
    measured_window,
    predicted_window,
)

MANY = 8  # ranks from which slowest, median and fastest host are shown
NOT_RECORDED = "not recorded in this run"


@dataclass(frozen=True)
class Drawn:
    """Timeline of one strategy.

    Attributes:
        name: name of the strategy.
        html: lanes.
        count: measured iterations in the window; empty if unknown.
        text: unit of `count` and the predicted number.
        hosts: compute and wait of each host, if there are many: (rank, seconds, seconds).
        gossips: whether workers exchange parameters in pairs.
    """

    name: str
    html: Markup
    count: str
    text: str
    hosts: Sequence[tuple[int, float, float]] = ()
    gossips: bool = False

    @property
    def most_s(self) -> float:
        """Longest iteration of a host, for the scale of `hosts`."""
        return max((compute_s + wait_s for _, compute_s, wait_s in self.hosts), default=1.0)


def window_length_s(run: Run) -> float:
    """Return the length of the longest period, measured if possible; 0 without any."""
    lengths, gossip = [0.0], [0.0]
    for contestant in run.contestants:
        if parts := gossips_of(contestant):
            gossip += [visible_part(of).length_s for of in parts.values()]
            continue
        found, expected = measured_window(run, contestant), predicted_window(contestant)
        window = found[1] if found else expected
        lengths.append(window.length_s if window else 0.0)
    return max(lengths) or max(gossip)


def draw(run: Run, contestant: Contestant, name: str, length_s: float) -> Drawn | None:
    """Return the timeline of a contestant; None without any spans."""
    if gossips := gossips_of(contestant):
        return _draw_gossip(gossips, name, length_s)
    found = measured_window(run, contestant, length_s)
    measured, predicted = found[1] if found else None, predicted_window(contestant, length_s)
    if measured is None and predicted is None:
        return None
    names = [bucket.name for bucket in run.profile.buckets] if run.profile else []
    expected_s = {} if predicted is None else _expected_seconds(predicted)
    order = _lane_names(run.profile, (measured, predicted))
    lanes, hosts, ranks = list[Lane](), list[tuple[int, float, float]](), list[tuple[int, str]]()
    if measured is not None:
        hosts = _host_parts(measured)
        ranks = _shown_ranks(measured, hosts)
        about = measured.generations, names, expected_s, measured.iterations.start
        for rank, host in ranks:
            describe = describer(measured.zero_s[rank], *about)
            lanes += _lanes(measured, rank, order, describe, host)
    if predicted is not None:
        rank = next(iter(predicted.shown))
        describe = describer(predicted.zero_s[rank], predicted.generations, names)
        lanes += _lanes(predicted, rank, order, describe, small=True)
    counts = [
        None if w is None else _count_within(w.bounds_s(next(iter(w.shown))), length_s)
        for w in (measured, predicted)
    ]
    shown = measured or predicted
    assert shown is not None
    first = ranks[0][0] if ranks else next(iter(shown.shown))
    numbers = _numbers(shown.bounds_s(first), length_s)
    count, text = _count_texts(counts, f"iterations in {words.seconds(length_s)}")
    label = f"{name}: {count} {text}"
    html = figure(Picture(label, lanes, length_s, numbers))
    return Drawn(name, Markup(html), count, text, hosts if len(ranks) > 1 else ())


def _lane_names(profile: Profile | None, windows: Sequence[Window | None]) -> Mapping[str, str]:
    """Return the displayed names of the lanes of links, in order."""
    links = [link.name for link in profile.all_links] if profile else []
    lanes = [lane for lane in lanes_of(windows, links) if lane != COMPUTE]
    if profile is not None and profile.topology and len(profile.links) == 1:
        return {lane: lane_name(lane, {links[0]: "between"}) for lane in lanes}
    if len(lanes) == 1 and len(links) < 2:
        return dict.fromkeys(lanes, "network")
    return {lane: lane_name(lane) for lane in lanes}


def _draw_gossip(gossips: Mapping[str, Any], name: str, length_s: float) -> Drawn:
    parts = {panel: visible_part(of, length_s) for panel, of in gossips.items()}
    part = next(iter(parts.values()))
    counts = []
    for panel in ("measured", "predicted"):
        unit_s = gossips[panel].unit_s if panel in gossips else 0.0
        counts.append(length_s / unit_s if unit_s else None)
    count, text = _count_texts(counts, f"gradients of a worker in {words.seconds(length_s)}")
    label = f"{name}: {count} {text}"
    html = ""
    if part.length_s:
        width = f"width:{100 * min(1.0, part.length_s / length_s):.2f}%"
        html = f'<div style="{width}">{figure(gossip_picture(part, label))}</div>'
    return Drawn(name, Markup(html), count, text, gossips=True)


def _lanes(
    window: Window,
    rank: int,
    order: Mapping[str, str],
    describe: Any,
    host: str = "",
    small: bool = False,
) -> Iterator[Lane]:
    zero_s, length_s = window.zero_s[rank], window.length_s
    bounds = window.bounds_s(rank)
    spans = window.shown[rank]
    own = [span for span in spans if span.lane == COMPUTE]
    name = "predicted" if small else host or "computes"
    boxes = compute_boxes(own, zero_s, length_s, describe)
    yield Lane(name, boxes, "small" if small else "big", bounds, first=True)
    sent = {lane for shown in window.shown.values() for s in shown if (lane := s.lane) != COMPUTE}
    if not sent and order and not small:
        yield Lane("network", (), "", note=NOT_RECORDED)
        return
    for lane, name in order.items():
        own = [span for span in spans if span.lane == lane]
        boxes = message_boxes(own, zero_s, length_s, describe)
        size = "small" if small else ""
        yield Lane("" if small else name, boxes, size, () if small else bounds)


def _expected_seconds(window: Window) -> dict[Any, float]:
    """Return the predicted seconds of each span, and of each kind of compute per iteration."""
    expected: dict[Any, float] = defaultdict(float)
    for span in window.shown[next(iter(window.shown))]:
        key = key_of(span, window.iterations.start)
        expected[key] += span.end_s - span.start_s
        if span.lane == COMPUTE and span.buckets is not None:
            expected[*key[:3], None] += span.end_s - span.start_s
    return expected


def _host_parts(window: Window) -> list[tuple[int, float, float]]:
    """Return compute and wait seconds per iteration of each rank."""
    count = len(window.iterations)
    found = [(rank, rank_parts(window, rank, ())) for rank in window.shown]
    return [(rank, parts[0] / count, parts[2] / count) for rank, parts in found]


def _shown_ranks(
    window: Window, hosts: Sequence[tuple[int, float, float]]
) -> list[tuple[int, str]]:
    """Return the ranks with lanes and their names: one, or three if there are many."""
    if len(hosts) < MANY:
        return [(next(iter(window.shown)), "")]
    order = sorted(hosts, key=lambda host: -host[1])
    picked = {"slowest": order[0], "median": order[len(order) // 2], "fastest": order[-1]}
    return [(host[0], name) for name, host in picked.items()]


def _count_within(bounds: Sequence[float], length_s: float) -> float | None:
    """Return the number of iterations in a window.

    If the trace ends less than an iteration before the window, the rest counts by the mean of the
    iterations; if it ends earlier, the number is None.
    """
    whole = [end for end in bounds[1:] if end <= length_s * (1 + 1e-9)]
    if len(whole) == len(bounds) - 1:
        rest = max(0.0, length_s - bounds[-1]) * len(whole) / (bounds[-1] - bounds[0])
        return len(whole) + rest if rest < 1 else None
    begin, end = bounds[len(whole)], bounds[len(whole) + 1]
    return len(whole) + max(0.0, length_s - begin) / (end - begin)


def _count_texts(counts: Sequence[float | None], unit: str) -> tuple[str, str]:
    measured, predicted = ("" if n is None else f"{n:.1f}" for n in counts)
    if not measured:
        return predicted, f"{unit}, predicted" if predicted else unit
    return measured, f"{unit}, {predicted} predicted" if predicted else unit


def _numbers(bounds: Sequence[float], length_s: float) -> Numbers:
    pairs = [(a, min(b, length_s)) for a, b in pairwise(bounds) if a < length_s * (1 - SLIVER)]
    return Numbers(pairs, [str(n + 1) for n in range(len(pairs))])
