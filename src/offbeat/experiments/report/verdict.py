"""Winner of a comparison, with one sentence about the reason."""

from __future__ import annotations

from collections.abc import Sequence

from offbeat.experiments.report import words
from offbeat.experiments.report.summary import Interval, Row, rank_rows


def winner(rows: Sequence[Row]) -> tuple[Row | None, str]:
    """Return the winner and one sentence about the reason.

    The winner has the least seconds to the target, or the least seconds per iteration if no
    contestant reached the target. If nothing was measured, the winner is None.
    """
    order = [row for row in rank_rows(rows) if row.iteration_s is not None]
    if not order:
        return None, "Nothing was measured: no contestant finished a repetition."
    best = order[0]
    if len(order) == 1:
        return best, _sentence(_describe_single(best) + _load_note(best), best)
    other = _reference_row(order)
    text = _iteration_text(best, other) if best.target_s is None else _target_win_text(best, other)
    return best, _sentence(text + _draw_note(best, order[1]) + _load_note(best, other), best)


def _sentence(text: str, row: Row) -> str:
    """Close the sentence, with a reservation for emulated compute."""
    return text + (" (emulated compute)." if row.emulated or row.pace else ".")


def _load_note(*rows: Row) -> str:
    """Return a reservation if one of the rows was disturbed."""
    labels = [row.label for row in rows if row.disturbed]
    return f"; disturbed: {' and '.join(labels)}" if labels else ""


def _reference_row(order: Sequence[Row]) -> Row:
    """Return the row to compare with: the fastest DDP if it did not win, else the runner-up."""
    yardstick = next((row for row in order[1:] if row.speedup == 1.0), None)
    return yardstick or order[1]


def _describe_single(row: Row) -> str:
    text = f"{row.label} takes {words.seconds(row.iteration_s)} per iteration"
    if row.target_s is not None:
        text += f" and reaches loss {_target_text(row)} in {words.seconds(row.target_s)}"
    return text + "; no other contestant was measured"


def _target_win_text(best: Row, other: Row) -> str:
    head = f"{best.label} reaches loss {_target_text(best)} in {words.seconds(best.target_s)}"
    if other.target_s is None:
        return f"{head}; {other.label} does not reach it{_iteration_times(best, other)}"
    gain = f"{_format_ratio(other.target_s, best.target_s)} sooner than {other.label}"
    return f"{head}, {gain} ({words.seconds(other.target_s)}){_gain_factors(best, other)}"


def _gain_factors(best: Row, other: Row) -> str:
    """Return the gain as two factors: seconds per iteration and iterations until the target."""
    own, others = best.target_iterations, other.target_iterations
    if not own or not others or not best.target_s or not other.target_s:
        return _iteration_times(best, other)
    own_s, others_s = best.target_s / own, other.target_s / others
    unit = words.unit_for((own_s, others_s))
    text = f"iterations take {unit.text(own_s)} instead of {unit.full(others_s)} until then"
    if own == others:
        return f": its {text}, and both need {own:g} of them"
    return (
        f" = {others_s / own_s:.2f} × {others / own:.2f}: its {text}, and it needs {own:g} of "
        f"them instead of {others:g}"
    )


def _format_ratio(large: float, small: float | None) -> str:
    return f"{large / small:.2f} times" if small else "much"


def _iteration_times(best: Row, other: Row) -> str:
    unit = words.unit_for((best.iteration_s, other.iteration_s))
    own, others = unit.text(best.iteration_s), unit.full(other.iteration_s)
    return f": its iterations take {own} instead of {others}"


def _iteration_text(best: Row, other: Row) -> str:
    assert other.iteration_s is not None
    unit = words.unit_for((best.iteration_s, other.iteration_s))
    return (
        f"{best.label} takes {unit.full(best.iteration_s)} per iteration, "
        f"{_format_ratio(other.iteration_s, best.iteration_s)} less than {other.label} "
        f"({unit.full(other.iteration_s)}); there is no target loss to compare by"
        f"{_update_note(best, other)}"
    )


def _update_note(best: Row, other: Row) -> str:
    """Return a reservation if the winner has iterations without an update."""
    if best.updates_per_s is None or best.updates_per_s == best.iterations_per_s:
        return ""
    text = f", and not every iteration updates: {words.digits(best.updates_per_s)} updates"
    if other.updates_per_s is None:
        return f"{text} per second"
    return f"{text} instead of {words.digits(other.updates_per_s)} per second"


def _draw_note(best: Row, second: Row) -> str:
    """Return a reservation if the repetitions of the first two rows overlap."""
    if not _has_overlap(_repetition_range(best), _repetition_range(second)):
        return ""
    return f"; the repetitions of {best.label} and {second.label} overlap, so call these two a draw"


def _repetition_range(row: Row) -> Interval | None:
    """Return the range over repetitions of the number that decides the order."""
    if row.target_s is not None:
        return row.target_spread_s
    return row.spread_s if row.spread_of == "repetitions" else None


def _has_overlap(one: Interval | None, two: Interval | None) -> bool:
    return one is not None and two is not None and one[0] <= two[1] and two[0] <= one[1]


def _target_text(row: Row) -> str:
    return words.loss(row.target_loss)
