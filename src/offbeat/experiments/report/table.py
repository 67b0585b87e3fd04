"""Comparison as a table for the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from offbeat.experiments.report import words
from offbeat.experiments.report.summary import Row, measurement_text, merges_gradients, rank_rows


def table(rows: Sequence[Row]) -> Table:
    """Return the table, best row first. Columns are marked as measured, predicted or bound."""
    unit = words.unit_for(s for r in rows for s in (r.iteration_s, r.predicted_s, r.bound_s))
    target = next((row.target_loss for row in rows if row.target_loss is not None), None)
    caption = words.sentence(measurement_text(rows))
    on_device = any(row.device_s is not None for row in rows)
    if any(row.emulated for row in rows):
        caption += " Emulated compute."
    elif pace := max((row.pace for row in rows), default=0.0):
        caption += f" Emulated: each host computes at 1/{pace:g} of this machine's core, so "
        caption += "these times are not those of your device"
        caption += "." if on_device else " (--device-speed predicts for it)."
    paces, voted = merges_gradients(rows), any(row.lssr is not None for row in rows)
    caption += f" {words.NO_PROGRESS}" if paces else ""
    result = Table(caption=caption, caption_justify="left", caption_style="dim")
    result.add_column("strategy", overflow="fold")
    for heading, word in (
        ("time to loss" + ("" if target is None else f" {words.loss(target)}"), "measured"),
        (f"{unit.name}/iteration", "measured"),
        *([("iterations/s, updates/s", "measured")] if paces else []),
        ("vs DDP", "measured"),
        (f"{unit.name}/iteration", "predicted"),
        (f"{unit.name}/iteration", "bound"),
        *([("your device, per iteration", "predicted")] if on_device else []),
        ("sent/iteration/rank", "measured"),
        *([("LSSR", "measured")] if voted else []),
        ("final loss", "measured"),
    ):
        result.add_column(Text.assemble(heading, "\n", (word, "dim")), justify="right")
    for place, row in enumerate(rank_rows(rows)):
        result.add_row(
            *_cells(row, unit, paces, on_device, voted),
            style="bold" if place == 0 and len(rows) > 1 else "",
        )
    return result


def _cells(row: Row, unit: words.Unit, paces: bool, on_device: bool, voted: bool) -> list[Text]:
    return [
        _two_lines(row.label, _row_note(row)),
        _two_lines(words.seconds(row.target_s), _range_text(row.target_spread_s)),
        _two_lines(unit.text(row.iteration_s), unit.span(row.spread_s)),
        *([Text(words.paces(row.iterations_per_s, row.updates_per_s))] if paces else []),
        Text(words.ratio(row.speedup)),
        _two_lines(
            unit.text(row.predicted_s),
            "" if row.predicted_error is None else words.share(row.predicted_error),
        ),
        Text(unit.text(row.bound_s)),
        *([Text(words.seconds(row.device_s))] if on_device else []),
        _two_lines(words.size(row.sent_bytes), words.unevenness(row.unevenness)),
        *([Text(words.loss(row.lssr))] if voted else []),
        _two_lines(words.loss(row.final_loss), _loss_note(row)),
    ]


def _row_note(row: Row) -> str:
    said = [row.strategy] if row.strategy != row.label else []
    return ", ".join(said + ["cut short"] * row.cut + ["disturbed"] * bool(row.disturbed))


def _loss_note(row: Row) -> str:
    """Return the range over repetitions and the flags of the loss."""
    spread = row.final_spread
    span = [] if spread is None or row.same_losses else [" to ".join(map(words.loss, spread))]
    return ", ".join(
        span
        + ["not finite"] * row.diverged
        + ["rose"] * row.rising
        + ["still falling"] * row.falling
    )


def _two_lines(first: str, second: str) -> Text:
    return Text.assemble(first, *((("\n" + second, "dim not bold"),) if second else ()))


def _range_text(spread_s: tuple[float, float] | None) -> str:
    return "" if spread_s is None else " to ".join(map(words.seconds, spread_s))
