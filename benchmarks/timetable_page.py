"""Timetables drawn: who computes which stage when, and the activations that are held meanwhile.

One page without scripts: a panel for each run, simulated or measured, in the manner of Fig. 1 and 2
of Cyclic Data Parallelism.
"""

from __future__ import annotations

import html
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import jinja2
from markupsafe import Markup
from timetable_costs import MIDDLE, StageFacts, total_activation_curve

from offbeat.cyclic.record import Done, TimetableRun
from offbeat.experiments.report.page import asset

WIDTH, ROW, CURVE, LEFT, RIGHT = 980, 22, 84, 92, 12
HUES = (215, 25, 155, 320, 45, 265, 0, 185)
SHOWN = 2  # iterations


@dataclass(frozen=True)
class Panel:
    """A run with its title; `unit` of time: a step, or seconds. `source`: simulated or measured."""

    title: str
    source: str
    run: TimetableRun
    facts: StageFacts
    unit: str = "step"


def page(title: str, panels: Sequence[Panel]) -> str:
    """An HTML page."""
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    stages = range(max((panel.run.table.n for panel in panels), default=0))
    return environment.from_string(
        Path(__file__).with_name("timetable.html").read_text(encoding="utf-8")
    ).render(
        title=title,
        css=Markup(asset("boxes.css") + asset("page.css")),
        stages=[_colour(stage) for stage in stages],
        panels=[
            {
                "title": panel.title,
                "source": panel.source,
                "facts": _facts(panel),
                "picture": Markup(svg(panel)),
            }
            for panel in panels
        ],
    )


def svg(panel: Panel) -> str:
    """Rows of devices, and the memory curve below."""
    run, n = panel.run, panel.run.table.n
    begin, end = _window(run)
    scale = (WIDTH - LEFT - RIGHT) / (end - begin)
    lanes = _lanes(run)
    height = ROW * len(lanes) + CURVE + 40

    def x(at: float) -> float:
        return LEFT + (min(max(at, begin), end) - begin) * scale

    parts = [
        f'<svg class="timetable" viewBox="0 0 {WIDTH} {height}" role="img" '
        f'aria-label="{html.escape(panel.title)}">'
    ]
    for row, (name, works) in enumerate(lanes):
        top = ROW * row
        parts.append(f'<text x="{LEFT - 8}" y="{top + 15}" text-anchor="end">{name}</text>')
        for done in works:
            if done.end_s <= begin or done.begin_s >= end:
                continue
            left, wide = x(done.begin_s), x(done.end_s) - x(done.begin_s)
            which = "backward" if done.work.backward else "forward"
            label = done.work.batch % n + 1
            words = (
                f"{which} of stage {done.work.stage + 1}, micro-batch {label} of iteration "
                f"{done.work.batch // n}: {_time(done.end_s - done.begin_s, panel.unit)}"
            )
            parts.append(
                f'<g class="cell {which}"><title>{words}</title>'
                f'<rect class="h{done.work.stage}" x="{left:.2f}" y="{top + 2}" '
                f'width="{max(wide - 1, 0.5):.2f}" height="{ROW - 5}" rx="2"/>'
            )
            if wide > 12:
                parts.append(
                    f'<text class="h{done.work.stage} ink" x="{left + wide / 2:.2f}" '
                    f'y="{top + 14.5}">{label}</text>'
                )
            parts.append("</g>")
    parts += [*_curve(panel, x, ROW * len(lanes) + 14), "</svg>"]
    return "".join(parts)


def _curve(panel: Panel, x: Callable[[float], float], top: float) -> list[str]:
    """The activations of all devices."""
    run = panel.run
    begin, end = _window(run)
    whole = run.table.n * sum(panel.facts.activation_bytes)
    base = top + CURVE

    def y(level: float) -> float:
        return base - CURVE * level / (whole * 1.04)

    curve = total_activation_curve(run, panel.facts)
    before = [level for at, level in curve if at <= begin]
    level = before[-1] if before else 0.0
    points = [f"{x(begin):.2f},{base:.2f}", f"{x(begin):.2f},{y(level):.2f}"]
    most = level
    for at, now in curve:
        if begin < at < end:
            points += [f"{x(at):.2f},{y(level):.2f}", f"{x(at):.2f},{y(now):.2f}"]
            level, most = now, max(most, now)
    points += [f"{x(end):.2f},{y(level):.2f}", f"{x(end):.2f},{base:.2f}"]
    return [
        f'<polygon class="area" points="{" ".join(points)}"/>',
        f'<line class="most" x1="{LEFT}" x2="{WIDTH - RIGHT}" '
        f'y1="{y(whole):.2f}" y2="{y(whole):.2f}"/>',
        f'<text x="{LEFT - 8}" y="{y(most) + 4:.2f}" text-anchor="end">'
        f"{100 * most / whole:.0f} %</text>",
        f'<text class="muted" x="{LEFT - 8}" y="{base:.2f}" text-anchor="end">activations</text>',
        f'<text class="muted" x="{LEFT}" y="{base + 18:.2f}">0</text>',
        f'<text class="muted" x="{WIDTH - RIGHT}" y="{base + 18:.2f}" text-anchor="end">'
        f"{_time(end - begin, panel.unit)}</text>",
    ]


def _lanes(run: TimetableRun) -> list[tuple[str, list[Done]]]:
    """By device; on one that has several works at a time by micro-batch."""
    lanes: list[tuple[str, list[Done]]] = []
    for device in sorted({done.work.device for done in run.works}):
        works = sorted((d for d in run.works if d.work.device == device), key=lambda d: d.begin_s)
        if all(b.begin_s >= a.end_s - 1e-9 for a, b in pairwise(works)):
            lanes.append((_device(run, device), works))
            continue
        for i in range(run.table.n):
            mine = [done for done in works if done.work.batch % run.table.n == i]
            lanes.append((f"micro-batch {i + 1}", mine))
    return lanes


def _device(run: TimetableRun, device: int) -> str:
    if not run.table.is_staged:
        return "device" if run.table.placement == "single" else f"worker {device + 1}"
    stage = run.table.stages_of(device)[0]
    place = device - min(d for d in range(run.table.devices) if run.table.stages_of(d) == [stage])
    return f"stage {stage + 1}" + (f".{place + 1}" if run.table.copies(stage) > 1 else "")


def _window(run: TimetableRun) -> tuple[float, float]:
    """Some iterations in the middle."""
    n = run.table.n
    begins = [done.begin_s for done in run.works if done.work.batch // n == MIDDLE]
    begin = min(begins)
    return begin, begin + SHOWN * run.iteration_s


def _facts(panel: Panel) -> list[tuple[str, str]]:
    begin, end = _window(panel.run)
    levels = [
        level for at, level in total_activation_curve(panel.run, panel.facts) if begin <= at < end
    ]
    whole = panel.run.table.n * sum(panel.facts.activation_bytes)
    return [
        (_time(panel.run.iteration_s, panel.unit), "per iteration"),
        (str(panel.run.table.devices), "device" + "s" * (panel.run.table.devices > 1)),
        (f"{100 * max(levels) / whole:.0f} %", "of all activations at most"),
    ]


def _time(amount: float, unit: str) -> str:
    if unit == "step":
        return f"{amount:g} steps"
    return f"{amount:.3g} s" if amount >= 1 else f"{1e3 * amount:.3g} ms"


def _colour(stage: int) -> str:
    light = 68 - 12 * (stage // len(HUES) % 4)
    return f"hsl({HUES[stage % len(HUES)]} 62% {light}%)"
