"""Comparison as plain text for terminals of any width."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from io import StringIO

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from offbeat.core import words
from offbeat.experiments.record.run_directory import Run
from offbeat.experiments.report.headline import conditions, display_names, headline, typed_text
from offbeat.experiments.report.summary import Row, rank_rows

GAP = "   "


@dataclass(frozen=True, slots=True)
class _Column:
    """A column that is shown in terminals of at least `least` characters."""

    heads: tuple[str, str]
    text: Callable[[Row], str]
    least: int = 0


def render(run: Run, rows: Sequence[Row], width: int, *, sentence: bool = True) -> str:
    """Return the table, the headline and the conditions; no line is wider than `width`.

    Columns are left out in narrow terminals. A strategy without a measurement is one sentence.
    Without `sentence` the headline consists of its reservations.
    """
    names, found = display_names(rows), headline(run, rows)
    lines = list(_table(rows, width))
    if times := [
        f"{names[row.label]} {words.seconds(row.device_s)}" for row in rows if row.device_s
    ]:
        lines += wrap(f"predicted per iteration on your device: {', '.join(times)}", width)
    lines.append("")
    reservations = " ".join([*[found.sentence] * sentence, *found.reservations])
    lines += wrap(reservations, width)
    return "\n".join([*lines, *wrap(conditions(run, rows), width)])


def render_details(rows: Sequence[Row], width: int) -> str:
    """Return one paragraph per strategy with the numbers that the table leaves out."""
    names, lines = display_names(rows), list[str]()
    indent = 2 + max(map(len, names.values()), default=0)
    for row in rank_rows(rows):
        if texts := list(details(row)):
            name = names[row.label].ljust(indent)
            lines += wrap(name + "; ".join(texts), width, " " * indent)
    return "\n".join(lines)


def details(row: Row) -> Iterator[str]:
    """Yield the numbers of a row that the columns leave out."""
    if row.target_iterations is not None:
        yield f"{row.target_iterations:g} iterations to the target"
    if row.target_spread_s is not None:
        yield f"to loss in {' to '.join(map(words.seconds, row.target_spread_s))}"
    if row.spread_s is not None:
        whose = (
            "its repetitions" if row.spread_of == "repetitions" else "the middle half of periods"
        )
        yield f"{whose} {' to '.join(map(words.seconds, row.spread_s))}"
    if row.bound_s is not None:
        yield f"bound {words.seconds(row.bound_s)}"
    if row.predicted_s is not None:
        waits = f", {words.seconds(row.exposed_s)} of it waiting" if row.exposed_s else ""
        yield f"predicted {words.seconds(row.predicted_s)}{waits}"
    if row.updates_per_s != row.iterations_per_s and row.updates_per_s is not None:
        yield f"{words.digits(row.updates_per_s)} updates per second"
    if row.lssr is not None:
        yield f"{words.percent(row.lssr)} of its averages omitted by votes"
    if row.final_spread is not None and not row.same_losses:
        yield f"final loss {' to '.join(map(words.loss, row.final_spread))}"


def _table(rows: Sequence[Row], width: int) -> Iterator[str]:
    """Yield the lines of the table with the columns that fit, failures, and the legend."""
    names = display_names(rows)
    marks = {row.label: names[row.label] + " ~" * bool(row.disturbed) for row in rows}
    failed = [row for row in rows if row.iteration_s is None]
    measured = [row for row in rank_rows(rows) if row.iteration_s is not None]
    columns = [column for column in _columns(rows, marks) if column.least <= width]
    least = max((len(marks[row.label]) for row in failed), default=0)
    console = Console(file=StringIO(), width=width, markup=False, emoji=False, highlight=False)
    unlimited = console.options.update(width=1 << 16)
    table = _rich_table(columns, measured, least)
    while console.measure(table, options=unlimited).maximum > width:
        if not any(column.least for column in columns):
            break
        columns.remove(max(reversed(columns), key=lambda column: column.least))
        table = _rich_table(columns, measured, least)
    with console.capture() as captured:
        console.print(table)
    lines = [line.rstrip() for line in captured.get().splitlines()]
    yield from lines
    indent = " " * (max([least, *(len(marks[row.label]) for row in measured), 8]) + len(GAP))
    for row in failed:
        why = "was not run" if row.not_run else row.problem
        yield from wrap(marks[row.label].ljust(len(indent)) + why, width, indent)
    yield from _legend(rows, names)


def _rich_table(columns: Sequence[_Column], rows: Sequence[Row], least: int) -> Table:
    """Return the table; its first column has at least `least` characters."""
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, len(GAP) - 1, 0, 0))
    for number, column in enumerate(columns):
        justify = "right" if number else "left"
        size = 0 if number else least
        table.add_column("\n".join(column.heads), justify=justify, no_wrap=True, min_width=size)
    for row in rows:
        table.add_row(*(column.text(row) for column in columns))
    return table


def _columns(rows: Sequence[Row], marks: dict[str, str]) -> list[_Column]:
    """Return the columns, from left to right."""
    unit = words.column_of(s for r in rows for s in (r.iteration_s, r.predicted_s))
    to_loss = words.column_of(r.target_s for r in rows)
    target = next((row.goal for row in rows if row.goal is not None), None)
    columns = [_Column(("strategy", ""), lambda row: marks[row.label])]
    if target is not None:

        def text(row: Row) -> str:
            return "never" if row.target_s is None else to_loss(row.target_s)

        name, value = target.rsplit(" ", 1)
        columns.append(_Column((f"to {name}", value), text))
    columns.append(_Column(("iteration", ""), lambda row: unit(row.iteration_s)))
    if any(row.waits_share is not None for row in rows):
        columns.append(_Column(("waits for", "network"), _waits_text, 80))
    if any(row.speedup is not None for row in rows):
        columns.append(_Column(("vs", "DDP"), _speedup_text))
    if any(row.predicted_s is not None for row in rows):
        columns.append(_Column(("predicted", ""), lambda row: unit(row.predicted_s), 100))
        columns.append(
            _Column(("prediction", "error"), lambda row: words.error(row.predicted_error))
        )
    columns.append(_Column(("a host", "sends"), lambda row: words.size(row.sent_bytes), 80))
    if any(row.final_loss is not None or row.diverged for row in rows):
        columns.append(_Column(("final", "loss"), _loss_text, 100))
    metrics = dict.fromkeys(name for row in rows for name in row.metrics)
    columns += [_Column(("final", name), partial(_metric_text, name), 80) for name in metrics]
    return columns


def _metric_text(name: str, row: Row) -> str:
    return words.digits(row.metrics[name], 4) if name in row.metrics else words.NONE


def _waits_text(row: Row) -> str:
    return "≈ " * row.waits_estimated + words.percent(row.waits_share)


def _speedup_text(row: Row) -> str:
    if row.speedup is None:
        return words.NONE
    return "~" * bool(row.disturbed) + words.factor(row.speedup).removesuffix(".0") + "×"


def _loss_text(row: Row) -> str:
    """Return the final loss with an arrow if it rose, or was still falling at the end."""
    if row.diverged:
        return "not finite"
    return words.loss(row.final_loss) + " ↑" * row.rising + " ↓" * row.falling


def _legend(rows: Sequence[Row], names: dict[str, str]) -> Iterator[str]:
    """Yield the settings of numbered names and the meaning of marks."""
    for row in rows:
        if names[row.label].endswith("]"):
            yield f"{names[row.label].rpartition(' ')[2]} {typed_text(row)}"
    if any(row.falling for row in rows):
        yield "↓ the loss was still falling"


def wrap(text: str, width: int, indent: str = "") -> list[str]:
    """Return lines that break between words, so that paths and numbers with units stay whole."""
    lines = textwrap.wrap(
        words.join_units(text),
        width,
        subsequent_indent=indent,
        break_on_hyphens=False,
        break_long_words=False,
    )
    return [line.replace(words.NO_BREAK, " ") for line in lines]
