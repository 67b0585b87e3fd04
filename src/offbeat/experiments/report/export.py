"""Export of a comparison: CSV and LaTeX of the table, SVG of the bars and the curves."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from typing import Any

from offbeat.experiments.record.disturbed import describe_disturbances
from offbeat.experiments.record.run_directory import Run
from offbeat.experiments.report import curves, table, words
from offbeat.experiments.report.bars import Bar, bars_of
from offbeat.experiments.report.chart import Chart, Label, outline
from offbeat.experiments.report.curves import Ordered
from offbeat.experiments.report.headline import conditions, typed_text
from offbeat.experiments.report.page import asset
from offbeat.experiments.report.summary import Row, repetition_rows, summarize

WIDTH = 640  # of the SVG, pixels
LEFT, RIGHT = 150, 90  # of the bars: space of names and of seconds
BAR, THIN, PITCH = 16, 5, 34  # heights: measured bar, predicted bar, distance of two strategies
SIDE, TALL = 52, 230  # of a chart: space of its numbers, height
LETTER = 6.6  # width of a letter of 12 pixels
DASHES = ("6 4", "2 3", "10 4 2 4", "12 5")  # of lines that are neither best nor DDP
TEX = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "−": "$-$",
    "×": r"$\times$",
    "≈": r"$\approx$",
    "↑": r"$\uparrow$",
    "↓": r"$\downarrow$",
    "µ": r"\textmu{}",
    "–": "--",
} | {sign: f"\\{sign}" for sign in "&%$#_{}"}


def export(run: Run, form: str) -> str:
    """Return the results of a run as "csv", "json", "latex" or "svg"."""
    if form in ("csv", "json"):
        records = [_record(index, row) for index, row in repetition_rows(run)]
        return as_csv(records) if form == "csv" else words.dumps(records) + "\n"
    rows = summarize(run)
    return _latex(run, rows) if form == "latex" else _svg(run, rows)


# --- numbers -------------------------------------------------------------------------------------


def as_csv(records: Sequence[Mapping[str, Any]]) -> str:
    """Return a line per record after a title line; unknown numbers are empty."""
    columns = dict.fromkeys(name for record in records for name in record)
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)
    return text.getvalue()


def _record(index: int, row: Row) -> dict[str, Any]:
    parts = None if row.split is None else row.split.measured
    state = "not run" if row.not_run else "failed" if row.problem else "measured"
    return {
        "strategy": typed_text(row),
        "repetition": index,
        "seed": next(iter(row.seeds), None),
        "state": "cut short" if row.cut else state,
        "disturbed": bool(row.disturbed),
        "iterations": row.iterations or None,
        "iteration_s": row.iteration_s,
        "computes_s": parts and parts.compute_s,
        "waits_for_messages_s": parts and parts.messages_s,
        "waits_for_hosts_s": parts and parts.waiting_s,
        "parts_estimated": row.split and row.split.estimated,
        "updates_per_s": row.updates_per_s,
        "predicted_iteration_s": row.predicted_s,
        "bound_iteration_s": row.bound_s,
        "sent_bytes_per_iteration": row.sent_bytes,
        "target": row.goal,
        "to_target_s": row.target_s,
        "to_target_iterations": row.target_iterations,
        "final_loss": row.final_loss,
        **{f"final_{name}": value for name, value in row.metrics.items()},
        "problem": row.problem or None,
    }


# --- LaTeX ---------------------------------------------------------------------------------------


def _latex(run: Run, rows: Sequence[Row]) -> str:
    """Return the printed table with all columns, for the package booktabs."""
    found = table.grid(rows)
    heads = [" ".join(filter(None, head)) for head in found.heads]
    disturbed = [
        f"~ {describe_disturbances(row.disturbed, typed_text(row), row.repetitions)}"
        for row in rows
        if row.disturbed
    ]
    lines = [f"% {text}" for text in (conditions(run, rows), *found.legend, *disturbed)]
    lines += [f"\\begin{{tabular}}{{l{'r' * (len(heads) - 1)}}}", r"\toprule", _tex(heads)]
    lines += [r"\midrule", *map(_tex, found.cells)]
    for name, why in found.failed:
        cells = [name, "not measured", *[""] * (len(heads) - 2)]
        lines.append(f"{_tex(cells)} % {' '.join(why.split())}")
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", ""])


def _tex(cells: Iterable[str]) -> str:
    return " & ".join("".join(TEX.get(sign, sign) for sign in cell) for cell in cells) + r" \\"


# --- SVG -----------------------------------------------------------------------------------------


def _svg(run: Run, rows: Sequence[Row]) -> str:
    """Return the bars of an iteration, the loss and each metric against time, below each other."""
    order = curves.rank_contestants(run, rows)
    losses = curves.losses_of(order)
    charts = {
        "loss": curves.loss_chart(order, losses, "seconds"),
        **curves.metric_charts(run, order, "seconds"),
    }
    colours = dict(re.findall(r"--([\w-]+): (#\w+)", asset("boxes.css").partition("@media")[0]))
    panels = [("iteration", *_bars(run, order, colours))]
    panels += [(name, *_chart(one, colours)) for name, one in charts.items() if one.lines]
    body, top = list[str](), 0.0
    for name, marks, height in panels:
        body += [f'<g id="{escape(name)}" transform="translate(0 {top:g})">', *marks, "</g>"]
        top += height
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{top:g}" '
            f'viewBox="0 0 {WIDTH} {top:g}" font-family="sans-serif" font-size="12" '
            f'fill="{colours["text"]}">',
            f'<rect width="{WIDTH}" height="{top:g}" fill="{colours["ground"]}"/>',
            *body,
            "</svg>\n",
        ]
    )


def _bars(run: Run, order: Ordered, colours: Mapping[str, str]) -> tuple[list[str], float]:
    """Return the measured bar of each strategy above its predicted one, and their height."""
    pairs = bars_of(run, order)
    most_s = max([bar.total_s for pair in pairs for bar in pair if bar is not None] or [1.0])
    scale, top, marks = (WIDTH - LEFT - RIGHT) / most_s, 8.0, list[str]()
    for (row, _, name), (measured, predicted) in zip(order, pairs, strict=True):
        if row.iteration_s is None:
            why = "was not run" if row.not_run else "failed"
            marks.append(_text(why, LEFT, top + 12, fill=colours["bad"]))
        shade = ' opacity="0.55"' * bool(row.disturbed)
        marks.append(_text(name + " ~" * bool(row.disturbed), LEFT - 8, top + 12, "end"))
        for bar, height, at in ((measured, BAR, 0), (predicted, THIN, BAR + 2)):
            marks += _bar(bar, scale, top + at, height, colours, shade) if bar is not None else []
        if row.bound_s is not None:
            x = LEFT + scale * row.bound_s
            marks.append(_path(f"M{x:.1f} {top - 2:g}V{top + BAR + THIN + 4:g}", colours["text"]))
        if measured is not None:
            x = LEFT + scale * measured.total_s + 6
            marks.append(_text(words.seconds(measured.total_s), x, top + 12))
        top += PITCH
    measured_bars = [bar for bar, _ in pairs if bar is not None]
    keys = [("sum", "computes"), ("network", "waits for the network")]
    keys = keys * any(bar.split for bar in measured_bars)
    keys += [("muted", "parts not recorded")] * any(not bar.split for bar in measured_bars)
    x = float(LEFT)
    for colour, key in keys:
        marks.append(_rect(x, top, 10, 10, colours[colour]))
        marks.append(_text(key, x + 15, top + 9, fill=colours["muted"]))
        x += 15 + LETTER * len(key) + 18
    notes = ["thin: predicted"] * any(predicted for _, predicted in pairs)
    notes += ["line: bound"] * any(row.bound_s is not None for row, *_ in order)
    notes += ["~ disturbed, does not compare"] * any(row.disturbed for row, *_ in order)
    marks.append(_text(", ".join(notes), LEFT, top + 27, fill=colours["muted"]))
    return marks, top + 44


def _bar(
    bar: Bar, scale: float, top: float, height: float, colours: Mapping[str, str], shade: str
) -> Iterator[str]:
    wide = scale * bar.compute_s
    yield _rect(LEFT, top, wide, height, colours["sum" if bar.split else "muted"], shade)
    if bar.network_s > 0:
        yield _rect(LEFT + wide, top, scale * bar.network_s, height, colours["network"], shade)


def _chart(chart: Chart, colours: Mapping[str, str]) -> tuple[list[str], float]:
    """Return a chart with its axes, and its height."""
    width = WIDTH - SIDE - 16
    marks = [_text(chart.title, SIDE, 14, fill=colours["muted"])]
    marks.append(f'<svg x="{SIDE}" y="24" width="{width}" height="{TALL}">')
    for path in chart.paths():
        d = outline(path, width, TALL, decimals=1)
        kind, *looks = path.look.split()
        colour = colours["grid" if kind == "grid" else "text" if "best" in looks else "muted"]
        if kind == "target":
            marks.append(_path(d, colours["text"], 1, "4 3"))
        elif kind == "band":
            marks.append(f'<path d="{d}" fill="{colours["muted"]}" opacity="0.16"/>')
        else:
            dashes = DASHES[int(looks[1][1:])] if "other" in looks else ""
            wide = {"grid": 1.0, "faint": 0.6}.get(kind, 2.6 if "best" in looks else 1.6)
            marks.append(_path(d, colour, wide, dashes, 0.4 if kind == "faint" else 1.0))
    marks.append("</svg>")
    marks += [_label(label, width, colours) for label in chart.labels()]
    return marks, TALL + 62.0


def _label(label: Label, width: float, colours: Mapping[str, str]) -> str:
    kind, *looks = label.look.split()
    x, y = SIDE + width * label.place[0], 24 + TALL * label.place[1]
    ink = colours["text" if "best" in looks else "muted"]
    if kind == "hit":
        fill = colours["ground"]
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{fill}" stroke="{ink}"/>'
    dx, dy, anchor = {
        "up": (-8, 4, "end"),
        "across": (0, 18, "start" if "first" in looks else "middle"),
        "aim": (6, -5, "start"),
        "end": (0, -8, "end") if "left" in looks else (6, 4, "start"),
    }[kind]
    return _text(label.text, x + dx, y + dy, anchor, ink, "bold" if kind == "end" else "")


def _text(text: str, x: float, y: float, anchor: str = "", fill: str = "", weight: str = "") -> str:
    known = {"text-anchor": anchor, "fill": fill, "font-weight": weight}
    attributes = "".join(f' {name}="{value}"' for name, value in known.items() if value)
    return f'<text x="{x:.1f}" y="{y:.1f}"{attributes}>{escape(text)}</text>'


def _rect(x: float, y: float, width: float, height: float, fill: str, more: str = "") -> str:
    size = f'width="{max(0.0, width):.1f}" height="{height:g}"'
    return f'<rect x="{x:.1f}" y="{y:g}" {size} fill="{fill}"{more}/>'


def _path(d: str, stroke: str, width: float = 1.5, dashes: str = "", opacity: float = 1.0) -> str:
    more = f' stroke-dasharray="{dashes}"' * bool(dashes) + f' opacity="{opacity}"' * (opacity < 1)
    return f'<path d="{d}" fill="none" stroke="{stroke}" stroke-width="{width:g}"{more}/>'
