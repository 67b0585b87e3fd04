"""Text of the report of a job: how it ended, and where its time went."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from offbeat.core import words
from offbeat.core.strategy.registry import BASELINE
from offbeat.core.words import count_text, duration, local_time
from offbeat.experiments.report.job import JobReport, Restart
from offbeat.experiments.report.table import wrap

INDENT = 13  # characters before the texts of the printed report
MOST_EVENTS = 6  # newest events that are printed

TITLES = {
    "ended": "ended",
    "running": "running",
    "raised": "STOPPED by an exception",
    "signal": "STOPPED by a signal",
    "silent": "CUT SHORT",
}


def as_text(report: JobReport, width: int) -> str:
    """Return the printed report; no line is wider than `width`, except for long words."""
    title = (
        f"{report.folder}: {report.strategy}, {rank_text(report)}, "
        f"started {local_time(report.started_t)}, {duration(report.duration_s)}, "
        f"{TITLES[report.state]}"
    )
    lines = wrap(title, width, "  ")
    for name, text in _rows(report):
        lines += wrap(f"  {name:<{INDENT - 2}}{text}", width, " " * INDENT)
    return "\n".join(lines)


def rank_text(report: JobReport) -> str:
    """Return the number of ranks, and of nodes if replicas have several ranks; of members if they
    have changed."""
    if report.members is not None:
        members = count_text(len(report.members.members), "member")
        return f"{members} at last, {report.world_size} processes in all"
    ranks = count_text(report.world_size, "rank")
    return f"{ranks} in {count_text(len(report.nodes), 'node')}" if report.nodes else ranks


def _rows(report: JobReport) -> Iterator[tuple[str, str]]:  # noqa: C901
    yield "ended" if report.state != "running" else "running", report.ending
    is_part = report.counted < report.iterations  # the others have measured the profile
    if report.iteration_s is not None and report.range_s is not None:
        low, high = map(words.seconds, report.range_s)
        text = f"{words.seconds(report.iteration_s)} per iteration"
        text += f" of the last {report.counted:,}" * is_part
        text += f" (95 % within {low} to {high})"
        if report.predicted_s is not None:
            error = words.prediction_error(report.predicted_s, report.iteration_s)
            text += f"; predicted {report.mark}{words.seconds(report.predicted_s)} ({error})"
        yield "measured", text
        yield "went to", split_text(report)
    if report.sent_bytes is not None:
        text = f"{words.size(report.sent_bytes)} per rank"
        text += " between nodes" * bool(report.nodes) + " in these iterations" * is_part
        if report.baseline_share is not None:
            text += f", {words.percent(report.baseline_share)} of what {BASELINE} would have sent"
        yield "bytes", text
    if report.members is not None:
        yield "members", report.members.describe()
    if report.losses is not None:
        first, last = map(words.loss, report.losses)
        text = f"{first} -> {last} (means of the first and the last interval)"
        if report.nonfinite_losses:
            text += f"; {count_text(report.nonfinite_losses, 'loss')[:-1]}es not finite"
        yield "loss", text
    shown = [event for event in report.events if "continues" not in event]
    if len(shown) > MOST_EVENTS:
        yield "events", f"{count_text(len(shown), 'event')}; the newest:"
    for event in shown[-MOST_EVENTS:]:
        yield str(event.get("event", "event")), _event_text(event)
    if report.restarts:
        yield "restarts", "; ".join(_restart_text(restart) for restart in report.restarts)
    for problem in report.problems:
        yield "problem", problem


def split_text(report: JobReport) -> str:
    """Return the parts of an iteration in one unit."""
    late = words.join_texts([f"rank {rank}" for rank in report.late_ranks])
    parts = {
        "compute": report.compute_s,
        "waiting for messages": report.messages_s,
        f"for late ranks ({late})" if late else "for late ranks": report.late_s or None,
        "script between iterations": report.script_s,
    }
    text = words.column_of(parts.values())
    return ", ".join(f"{name} {text(s)}" for name, s in parts.items() if s is not None)


def _restart_text(restart: Restart) -> str:
    verb = "continued" if restart.iteration else "began again"
    after = f"{verb} at iteration {restart.iteration:,}"
    if restart.run is None:
        return f"{after} from a checkpoint of a job without a record"
    if restart.folder is None:
        return f"{after} from {restart.run}, whose record is not beside this one"
    twice = f"; {count_text(restart.repeated or 0, 'iteration')} done twice"
    return f"{after} from {restart.folder}{twice * bool(restart.repeated)}"


def _event_text(event: Mapping[str, Any]) -> str:
    text = words.shorten(str(event.get("text", "")))
    place = f"iteration {event.get('iteration', 0):,}"
    return text if place in text else f"{place}: {text}"
