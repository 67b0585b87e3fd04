"""`offbeat watch`: screen of a running job.

The screen is made from three files of rank 0, without torch, so it costs the job nothing but a few
milliseconds of a processor.
"""

from __future__ import annotations

import io
import json
import sys
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from offbeat.core.words import (
    NONE,
    local_time,
    loss_text,
    one_line,
    percent,
    prediction_error,
    seconds,
    size,
)
from offbeat.jobs.job_view import ACTIVE, FAILED, JobFollower, JobView, RankView, find_run, view

WIDE = 72  # characters of a line from which less important facts are shown
POLL_S = 1.0  # time between two screens
LINE_S = 10.0  # time between two lines without a terminal
ALL_RANKS, SOME_RANKS = 16, 6  # most ranks of a full table; rows of the table of a larger job
EVENT_ROWS = 4  # rows of a screen that events need, with their title
OFF_PREDICTION = 0.1  # a larger departure from the prediction is coloured
SCRIPT_SHARE = 0.05  # a smaller share of time between iterations is not shown
BARS = "▁▂▃▄▅▆▇█"
BARS_RANGE = 1.25  # least ratio of the highest to the lowest bar, so that noise stays low

STATES = {
    "running": "running",
    "checking": "checking whether rank 0 runs",
    "ended": "ended",
    "raised": "STOPPED by an exception",
    "signal": "STOPPED by a signal",
}
CELLS = {"!": "silent", "x": "failed", "*": "delays others", "w": "waiting", "·": "running"}
CELLS |= {"-": "left"}


def watch(folder: Path, width: int, *, once: bool, as_json: bool) -> int:
    """Show a job until it ends, and return the exit code: 1 if it failed or is silent.

    Args:
        folder: folder of a run, or of runs.
        width: characters per line of a single screen.
        once: print one screen.
        as_json: print one JSON object with everything that a screen shows.

    Raises:
        ValueError: there is no run.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # bars, on a terminal without UTF-8
    job = JobFollower(find_run(folder))
    if once or as_json:
        while not job.is_certain:
            time.sleep(POLL_S / 5)
            job.read()
        _print_once(view(job), width, as_json=as_json)
    elif sys.stdout.isatty():
        _show_screens(job)
    else:
        _print_lines(job)
    return int(view(job).has_failed)


def _print_once(shown: JobView, width: int, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(asdict(shown), indent=1))
        return
    Console(width=width, highlight=False).print(Group(*screen(shown, width)))


def _show_screens(job: JobFollower) -> None:
    """Show screens until the job ends. The last one stays on the terminal."""
    console = Console(highlight=False)
    try:
        with Live(console=console, screen=True, auto_refresh=False) as live:
            while True:
                lines = screen(view(job), console.width, console.height)
                live.update(Group(*lines), refresh=True)
                if job.end is not None:
                    break
                time.sleep(POLL_S)
                job.read()
    finally:
        console.print(Group(*screen(view(job), console.width)))


def _print_lines(job: JobFollower) -> None:
    """Print a line every `LINE_S` seconds, and new events."""
    printed_events = 0
    while True:
        new_events = min(max(0, job.event_count - printed_events), len(job.events))
        for event in list(job.events)[len(job.events) - new_events :]:
            print(event_text(event))
        printed_events = job.event_count
        print(line(view(job)), flush=True)
        if job.end is not None:
            return
        wait_until = time.monotonic() + LINE_S
        while job.end is None and time.monotonic() < wait_until:
            time.sleep(POLL_S)
            job.read()


# --- lines of a screen ---------------------------------------------------------------------------


def screen(shown: JobView, width: int, height: int | None = None) -> list[Text]:
    """Return the lines of a screen. Without `height` there may be any number of lines."""
    lines = _flow(_title(shown, width), width, "  ")
    lines += _flow(_pace(shown), width, "  ")
    if shown.series_s:
        lines.append(Text(_sparkline(shown.series_s, width)))
    if shown.members:
        lines += _membership(shown, width)
    if len(shown.ranks) <= ALL_RANKS and (
        height is None or len(lines) + 2 + len(shown.ranks) + EVENT_ROWS <= height
    ):
        lines += _table(shown.ranks, width)
    elif shown.ranks:
        listed = sorted(shown.ranks, key=_urgency)[:SOME_RANKS]
        lines += [*_cells(shown.ranks, width), *_table(listed, width)]
        others = _range_parts([rank for rank in shown.ranks if rank not in listed])
        lines += _flow(others, width, ", ")
    last = _last_lines(shown, width)
    room = None if height is None else height - len(lines) - len(last)
    lines += [*_events(shown.events, width, room), *last]
    for text in lines:
        text.no_wrap = True
        text.truncate(width, overflow="ellipsis")
    return lines[:height]


def line(shown: JobView) -> str:
    """Return the state of a job in one line."""
    late = [f"rank {r.rank} delays the others" for r in shown.ranks if r.delays_others]
    state = [] if shown.state == "running" else [state_text(shown)]
    members = [f"{shown.world_size} members"] if shown.members else []
    return ", ".join([*(str(part) for part in _pace(shown)), *members, *late, *state])


def state_text(shown: JobView) -> str:
    """Return how the job runs or has ended, with the ranks that are the reason."""
    if shown.state in STATES:
        ended_t = None if shown.end is None else shown.end.get("t")
        return STATES[shown.state] + (f" {local_time(ended_t)}" if ended_t is not None else "")
    if shown.state == "failed":
        return _rank_list([r for r in shown.ranks if r.state in FAILED], "failed")
    if shown.rank_0_silent_s is None:
        return _rank_list([rank for rank in shown.ranks if rank.silent], "silent")
    if shown.last_sign_t is None:
        return f"rank 0 silent for {shown.rank_0_silent_s:.0f} s"
    return f"rank 0 silent since {local_time(shown.last_sign_t)}"


def event_text(event: Mapping[str, Any]) -> str:
    """Return the iteration and the text of an event in one line."""
    text = one_line(event.get("text"))
    return f"iteration {event.get('iteration', 0):,}: {text}"


def _rank_list(ranks: Sequence[RankView], state: str) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0].rank} {state}"
    if len(ranks) <= 3:
        return f"ranks {', '.join(str(rank.rank) for rank in ranks)} {state}"
    return f"{len(ranks)} ranks {state}"


def _title(shown: JobView, width: int) -> list[Text]:
    on = f" on {shown.hosts} hosts" if shown.hosts > 1 and width >= WIDE else ""
    style = {"running": "green", "ended": "green", "checking": "yellow"}
    return [
        Text(shown.run, "bold"),
        Text(shown.strategy, "bold"),
        Text(f"{shown.world_size} ranks{on}"),
        Text(state_text(shown), style.get(shown.state, "bold red")),
    ]


def _pace(shown: JobView) -> list[Text]:
    if shown.iteration_s is None:
        return [Text("no iteration has ended yet")]
    pace, style = f"{seconds(shown.iteration_s)} each", ""
    if shown.predicted_s:
        error = prediction_error(shown.predicted_s, shown.iteration_s)
        pace += f", predicted {shown.mark}{seconds(shown.predicted_s)} ({error})"
        departure = shown.iteration_s / shown.predicted_s - 1  # as notices measure it
        style = "yellow" if abs(departure) > OFF_PREDICTION else ""
    parts = [Text(f"iteration {shown.iteration:,}"), Text(pace, style)]
    parts.append(Text(f"{percent(shown.wait_share)} waiting"))
    if shown.script_share is not None and shown.script_share >= SCRIPT_SHARE:
        parts.append(Text(f"{percent(shown.script_share)} between iterations"))
    if shown.loss is not None:
        parts.append(Text(f"mean loss {loss_text(shown.loss)}"))
    if shown.nonfinite_losses:
        parts.append(Text(f"{shown.nonfinite_losses:,} losses not finite", "bold red"))
    return parts


def _sparkline(series_s: Sequence[float], width: int) -> str:
    """Return bars of the mean seconds per iteration of groups of intervals, and their range."""
    group = _intervals_per_bar(series_s, width)
    means = [fmean(series_s[i : i + group]) for i in range(0, len(series_s), group)]
    low, high = min(means), max(means)
    scale = (len(BARS) - 1) / max(high - low, (BARS_RANGE - 1) * low, 1e-9)
    drawn = "".join(BARS[round((mean - low) * scale)] for mean in means)
    return f"seconds {drawn} {seconds(low)} to {seconds(high)}"


def _intervals_per_bar(series_s: Sequence[float], width: int) -> int:
    bars = width - len("seconds  ") - len(" 38.4 ms to 38.4 ms")
    return max(1, -(-len(series_s) // bars))


def _wrap(text: str, width: int, indent: str = "") -> list[str]:
    """Return lines that break between words, so that names of strategies stay whole."""
    return textwrap.wrap(text, width, subsequent_indent=indent, break_on_hyphens=False)


def _membership(shown: JobView, width: int) -> list[Text]:
    """Return bars of the number of members over time, and the changes as a sentence."""
    begin_t = shown.members[0][0]
    end_t = max(shown.members[-1][0], shown.last_sign_t or 0.0)
    most = max(count for _, count in shown.members)
    cells = max(1, -(-len(shown.series_s) // _intervals_per_bar(shown.series_s, width)))
    drawn = ""
    for cell in range(cells):
        at_t = begin_t + (cell + 1) / cells * (end_t - begin_t)
        count = [count for t, count in shown.members if t <= at_t][-1]
        drawn += BARS[round(count / most * (len(BARS) - 1))]
    rows = _wrap(f"members: {shown.members_text}", width, "  ")
    return [Text(f"members {drawn}"), *(Text(row, "dim") for row in rows)]


def _table(ranks: Sequence[RankView], width: int) -> list[Text]:
    """Return a row for each rank, with as many columns as there is room for."""
    columns = [column for column in COLUMNS if width >= column.from_width]
    title = " ".join(f"{column.title:{column.format}}" for column in columns)
    lines = [Text(), Text(f"{title} activity", "dim")]
    for rank in ranks:
        cells = (f"{column.text(rank):{column.format}}" for column in columns)
        row = " ".join(cells)
        lines.append(Text(f"{row} {_activity(rank, width - len(row) - 1)}", _style(rank)))
    return lines if ranks else []


class Column(NamedTuple):
    """Column of the table of ranks, which screens of at least `from_width` characters have."""

    title: str
    format: str
    text: Callable[[RankView], str]
    from_width: int = 0


COLUMNS = (
    Column("rank", ">4", lambda rank: str(rank.rank)),
    Column("host", "<10.10", lambda rank: rank.host),
    Column("iteration", ">9", lambda rank: f"{rank.iteration:,}" if rank.iteration >= 0 else NONE),
    Column("compute", ">7", lambda rank: seconds(rank.compute_s)),
    Column("waiting", ">7", lambda rank: seconds(rank.wait_s), WIDE),
    Column("script", ">7", lambda rank: seconds(rank.script_s), 90),
    Column("sent/s", ">7", lambda rank: size(rank.sent_bytes_per_s), WIDE),
)


def _activity(rank: RankView, width: int) -> str:
    """Return the activity of a rank, without its phase if there is no room for it."""
    text = rank.activity
    if len(text) > width and rank.state == "waiting":
        text = text[max(0, text.find("waiting for")) :]
    if rank.silent:
        return f"SILENT {rank.age_s:.0f} s, {text}"
    if rank.state in FAILED:
        return f"FAILED: {text.removeprefix('failed with ')}"
    return f"delays others: {text}" if rank.delays_others else text


def _mark(rank: RankView) -> str:
    """Return the cell of a rank: a key of `CELLS`."""
    if rank.silent:
        return "!"
    if rank.state in FAILED:
        return "x"
    if rank.delays_others:
        return "*"
    return {"waiting": "w", "left": "-"}.get(rank.state, "·")


def _style(rank: RankView) -> str:
    return {"!": "bold red", "x": "bold red", "*": "yellow"}.get(_mark(rank), "")


def _urgency(rank: RankView) -> tuple[int, float]:
    """Return the order of ranks in a large job: the most urgent first, then the slowest."""
    return "!x*".find(_mark(rank)) % 4, -(rank.compute_s or 0.0)


def _cells(ranks: Sequence[RankView], width: int) -> list[Text]:
    """Return one cell per rank, in order, and the meaning of the cells."""
    lines, row = [Text()], Text("ranks  ")
    for rank in ranks:
        if len(row) >= width:
            lines.append(row)
            row = Text("       ")
        row.append(_mark(rank), _style(rank))
    present = {_mark(rank) for rank in ranks}
    legend = "  ".join(f"{mark} {meaning}" for mark, meaning in CELLS.items() if mark in present)
    return [*lines, row, Text(f"       {legend}", "dim")]


def _range_parts(ranks: Sequence[RankView]) -> list[Text]:
    """Return the ranges of the ranks that have no row."""
    parts = [f"{len(ranks)} others"]
    if times := [rank.compute_s for rank in ranks if rank.compute_s is not None]:
        parts[0] += f": compute {seconds(min(times))} to {seconds(max(times))}"
    if ages := [rank.age_s for rank in ranks if rank.state in ACTIVE]:
        parts.append(f"last heartbeat at most {max(ages):.1f} s ago")
    return [Text(part, "dim") for part in parts]


def _events(events: Sequence[Mapping[str, Any]], width: int, room: int | None) -> list[Text]:
    """Return the newest events that have room, oldest first."""
    lines: list[Text] = []
    for event in reversed(events):
        text = one_line(event.get("text"))
        text = f"{event.get('iteration', 0):>9,} {text}"
        rows = _wrap(text, width, " " * 10)
        if len(lines) + len(rows) > (4 * EVENT_ROWS if room is None else room - 2):
            break
        style = "yellow" if event.get("event") in ("notice", "warning") else ""
        lines = [*(Text(row, style) for row in rows), *lines]
    return [Text(), Text("iteration event", "dim"), *lines] if lines else []


def _last_lines(shown: JobView, width: int) -> list[Text]:
    """Return the reason of an end, or the command that inspects a silent rank."""
    if shown.end is not None:
        text = one_line(shown.end.get("text"))
        return [Text(), *(Text(row, "bold") for row in _wrap(text, width))] if text else []
    for rank in shown.ranks:
        if rank.silent and rank.pid is not None:
            return [Text(), Text(f"inspect it: ssh {rank.host} py-spy dump --pid {rank.pid}")]
    return []


def _flow(parts: Sequence[Text], width: int, gap: str) -> list[Text]:
    """Return the parts in as few lines as have room for them."""
    lines = [parts[0]]
    for part in parts[1:]:
        if len(lines[-1]) + len(gap) + len(part) <= width:
            lines[-1] = Text.assemble(lines[-1], gap, part)
        else:
            lines.append(part)
    return lines
