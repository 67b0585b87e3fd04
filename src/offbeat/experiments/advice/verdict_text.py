"""Text of a verdict: headline, table of methods, notes, and the command that compares them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from offbeat.core.strategy.registry import BASELINE
from offbeat.experiments.advice.commands import launch_command
from offbeat.experiments.advice.methods import ALONE
from offbeat.experiments.advice.needs import LEAST_RATE_BPS
from offbeat.experiments.advice.options import CHANGES
from offbeat.experiments.advice.selection import AS_GOOD, excluded_strategies
from offbeat.experiments.advice.verdict import Row, Verdict
from offbeat.experiments.report import words
from offbeat.experiments.report.table import wrap
from offbeat.jobs.words import digits, size

MEGA, GIGA = 1e6, 1e9
GAP = "  "
DROPPED = ("range", "90 % at")  # columns that narrow terminals leave out, in this order
LEAST_LABEL = 23  # characters of the last column from which no column is left out
UNITS = (("days", 86400.0), ("hours", 3600.0), ("minutes", 60.0), ("seconds", 1.0))
UNIT_FROM = 3.0  # the fastest method takes at least this many of the unit of the table
SHORT = {"days": "d", "hours": "h", "minutes": "min", "seconds": "s"}
SHOWN_SHARE = 0.9  # share of computing time in the table
WINDOW_BYTES = 4e6  # under way on a TCP connection, by the largest default buffer of Linux
LARGE_CHANGE = 0.01  # relative change of time from which a change of the machines is worth a word


def verdict_text(
    verdict: Verdict, *, notes: Sequence[str], command: str | None, width: int, verbose: bool
) -> str:
    """Return the text of `offbeat advise`: the verdict, the table, notes, the compare command.

    Args:
        verdict: verdict to print.
        notes: first remarks, such as the device whose times these are.
        command: command that compares the advised strategies; None if they cannot be compared.
        width: characters per line.
        verbose: whether all shares, counts and notes are printed.
    """
    unit, scale = _unit_of(verdict.best.seconds or 0.0)
    paragraphs = [_worth(verdict), _headline(verdict), *_sentences(verdict), ""]
    lines = [line for text in paragraphs for line in (wrap(text, width, GAP) or [""])]
    lines += _table(verdict, unit, scale, width)
    lines.append("")
    for text in _legend(verdict, verbose=verbose):
        lines += wrap(text, width, GAP)
    for note in (*notes, *_notes(verdict, verbose=verbose)):
        lines += wrap(f"note: {note}", width, GAP)
    if verbose:
        lines += ["", *_rate_table(verdict, width)]
    if command is not None:
        known = verdict.work.target_loss is not None
        first = "measure what was rehearsed:" if known else "losses are not predicted; compare on "
        lines += [first + "your model:" * (not known), *_command_lines(command, width)]
    return "\n".join(lines)


def _unit_of(seconds: float) -> tuple[str, float]:
    """Return the unit of which a time has at least `UNIT_FROM`, and its seconds."""
    return next((unit for unit in UNITS if seconds >= UNIT_FROM * unit[1]), UNITS[-1])


def span(seconds: float) -> str:
    """Return a time as '41 h'."""
    unit, scale = _unit_of(seconds)
    return f"{digits(seconds / scale, 2)} {SHORT[unit]}"


def rate(rate_bps: float, count: int = 2) -> str:
    """Return a rate as '150 Mbit/s', with `count` digits."""
    return words.rate(float(f"{rate_bps:.{count}g}"))


def least_rate(rate_bps: float | None) -> str:
    """Return the result of a search for a least rate; '-' for None, 'any' for the lowest rate."""
    if rate_bps is None:
        return "-"
    return "any" if rate_bps <= LEAST_RATE_BPS else rate(rate_bps)


def _worth(verdict: Verdict) -> str:
    """Return whether several machines are worth it, and their speed relative to one."""
    count, alone = verdict.place.machines, verdict.row(ALONE)
    machines = "second machine" if count == 2 else f"{count} machines"
    answer = "no" if verdict.best.method.machines == 1 else "yes"
    ddp = verdict.row(BASELINE)
    if alone is None or alone.fits is False:
        return f"{machines}: {answer}, the model does not fit on one."
    if alone.seconds is None:
        return f"{machines}: {answer}, one alone does not reach the loss."
    text = f"{machines}: {answer}, {_times(verdict.together, alone)} times as fast as one"
    if ddp is not None and ddp is not verdict.together:
        text += f"; DDP {_times(ddp, alone)}"
    return f"{text}."


def _times(row: Row, alone: Row) -> str:
    """Return the speed of a row relative to one machine."""
    return words.factor(None if not row.seconds else (alone.seconds or 0.0) / row.seconds)


def _headline(verdict: Verdict) -> str:
    """Return the method to take and its time, and those of what most users would take."""
    best, place = verdict.best, verdict.place
    link = rate(place.rate_bps, 3)
    machines = f"{place.machines} machines"
    if place.devices > 1:
        machines += f" of {place.devices} devices"
    text = f"{machines} at {link}, {verdict.work.text}: {_with_range(best)}."
    others = [
        row
        for row in verdict.rows
        if row.seconds is not None
        and row is not best
        and (row.method.strategy is None or row.method.label == BASELINE)
    ]
    if others:
        named = [f"{row.method.label}: {span(row.seconds or 0.0)}" for row in others]
        text += f" Others: {'; '.join(named)}."
    return text


def _with_range(row: Row) -> str:
    assert row.seconds is not None
    assert row.range_s is not None
    unit, scale = _unit_of(row.seconds)
    low, high = (digits(seconds / scale, 2) for seconds in row.range_s)
    verb = "alone takes" if row.method.machines == 1 else "takes"
    time = digits(row.seconds / scale, 2)
    return f"{row.method.label} {verb} {time} {SHORT[unit]} ({low} to {high})"


def _sentences(verdict: Verdict) -> Iterator[str]:
    """Yield sentences about passes, help, changes of the mathematics, memory and cost."""
    yield from _passes(verdict)
    yield _help(verdict)
    method = verdict.best.method
    if verdict.rows_within_spread:
        names = ", ".join(row.method.label for row in verdict.rows_within_spread)
        yield f"By the spread over seeds, these may be as fast: {names}"
    to_loss = verdict.work.target_loss is not None
    if method.machines > 1 and method.change != CHANGES[0] and not to_loss:
        yield (
            f"warning: these are times for equal numbers of samples. {method.label} changes what "
            f"is learnt ({method.changes}), so it may need more samples to the same loss"
        )
    if verdict.device_memory is not None:
        yield _fits(verdict)
        if verdict.best.sharded:
            yield (
                f"{method.label} fits only if fully_shard divides the model inside each machine: "
                "offbeat.prepare(..., mesh=mesh['between'])"
            )
    if verdict.price is not None and verdict.best.cost is not None:
        alone = verdict.row(ALONE)
        text = f"cost: {_money(verdict.best.cost)}"
        if alone is not None and alone.cost is not None and alone is not verdict.best:
            text += f", one machine {_money(alone.cost)}"
        yield f"{text} at {verdict.price:g} per machine and hour"


def _passes(verdict: Verdict) -> Iterator[str]:
    """Yield the assumed number of backward passes per step, if it is given or above 1."""
    place = verdict.place
    passes = place.profile.usage.backwards
    if place.measured_passes is not None:
        yield (
            f"Assumed number of backward passes per step: {passes} on each machine, "
            f"{place.measured_passes} on one machine alone."
        )
    elif passes > 1:
        yield (
            f"Assumed number of backward passes per step: {passes} on each machine, as measured. "
            "If the script divides it by the number of ranks, add --passes N."
        )


def _money(value: float) -> str:
    return digits(value) if value < 1000 else f"{value:,.0f}"


def _help(verdict: Verdict) -> str:
    """Return the sentence about what would help."""
    if verdict.best.method.machines == 1:
        return _help_together(verdict)
    best = verdict.helps[0]
    if best.saved < LARGE_CHANGE:
        names = [one.text for one in verdict.helps]
        text = f"{names[0]} would not help" if len(names) == 1 else _neither(names)
        share = verdict.place.profile.slowest().compute_s / verdict.best.method.iteration_s
        return f"{text}: compute takes {_percent(min(share, 1.0))} of the time."
    text = f"{best.text[:1].upper()}{best.text[1:]} would save {_percent(best.saved)} of the time"
    rest = [one for one in verdict.helps if one is not best]
    if rest:
        text += ", " + ", ".join(f"{one.text} {_percent(one.saved)}" for one in rest)
    return f"{text}."


def _neither(names: Sequence[str]) -> str:
    return f"Neither {' nor '.join(names)} would help"


def _help_together(verdict: Verdict) -> str:
    """Return what makes all machines together faster than one."""
    one_s, all_s = verdict.best.seconds or 0.0, verdict.together.seconds
    if all_s is None:
        return "All machines together do not reach the loss."
    name = verdict.together.method.label
    if all_s <= one_s:
        return f"All machines together ({name}) are faster by at most {_percent(AS_GOOD)}."
    enough = [one.text for one in verdict.helps if all_s * (1 - one.saved) < one_s]
    if verdict.worthwhile_bps is not None:
        twice = rate(2 * verdict.place.rate_bps)  # also enough if it is above the least rate
        enough = [
            f"{least_rate(verdict.worthwhile_bps)} or more",
            *(e for e in enough if e != twice),
        ]
    if enough:
        conditions = ", or with ".join(enough)
        return f"With {conditions}, all machines together ({name}) are faster than one."
    text = f"No rate makes all machines together ({name}) faster than one"
    best = verdict.helps[0]
    if best.saved >= LARGE_CHANGE:
        text += f"; {best.text} would save {_percent(best.saved)} of their time"
    return f"{text}."


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %".replace("-0 %", "0 %")


def _fits(verdict: Verdict) -> str:
    room = f"{(verdict.device_memory or 0.0) / GIGA:.4g} GB"
    too_large = [row.method.label for row in verdict.rows if row.fits is False]
    more = "; activations are not measured and come on top"
    if not too_large:
        return f"Every method fits into {room} per device{more}."
    return f"Does not fit into {room} per device: {', '.join(too_large)}{more}."


def _table(verdict: Verdict, unit: str, scale: float, width: int) -> list[str]:
    """Return the table of methods. The columns after the time are left out if there is no room."""
    heads = ["", unit, "range"]
    if any(row.rates_bps for row in verdict.rows):
        heads.append(f"{_percent(SHOWN_SHARE)} at")
    heads += ["memory"] * (verdict.device_memory is not None)
    heads += ["cost"] * (verdict.price is not None)
    rows = [[*heads, "numbers", "method"], *(_cells(row, verdict, scale) for row in verdict.rows)]
    rows = [[*row[:-2], row[-2].ljust(max(len(one[-2]) for one in rows)), row[-1]] for row in rows]
    for _ in DROPPED:
        if width - _numbers_width(rows) < LEAST_LABEL:
            rows = [[*row[:2], *row[3:]] for row in rows]
    return _lines(rows, width)


def _lines(rows: Sequence[Sequence[str]], width: int) -> list[str]:
    """Return lines with aligned columns; the last column is wrapped between settings."""
    widths = [max(map(len, column)) for column in zip(*(row[:-1] for row in rows), strict=True)]
    indent, lines = _numbers_width(rows), list[str]()
    for *numbers, label in rows:
        cells = [cell.rjust(w) for cell, w in zip(numbers, widths, strict=True)]
        first, *more = _label_lines(label, width - indent)
        lines += [GAP.join([*cells, first]), *(" " * indent + part for part in more)]
    return [line.rstrip() for line in lines]


def _numbers_width(rows: Sequence[Sequence[str]]) -> int:
    """Return the characters before the last column."""
    columns = zip(*(row[:-1] for row in rows), strict=True)
    return sum(max(map(len, column)) + len(GAP) for column in columns)


def _cells(row: Row, verdict: Verdict, scale: float) -> list[str]:
    method = row.method
    compared = [option.strategy for option in verdict.advice.compared]
    cells = ["*" if row is verdict.best else "+" if method.strategy in compared else " "]
    if row.seconds is None or row.range_s is None:
        cells += ["-", "-"]
    else:
        low, high = (digits(s / scale, 2) for s in row.range_s)
        cells += [digits(row.seconds / scale), f"{low}-{high}"]
    if any(one.rates_bps for one in verdict.rows):
        cells.append(least_rate(row.rates_bps.get(SHOWN_SHARE)))
    if verdict.device_memory is not None:
        mark = "!" if row.fits is False else "/" * row.sharded
        cells.append(size(row.memory.total_bytes) + mark)
    if verdict.price is not None:
        cells.append("-" if row.cost is None else _money(row.cost))
    return [*cells, method.change, method.label]


def _label_lines(label: str, room: int) -> list[str]:
    """Return the label in lines of at most `room` characters, broken before settings."""
    lines, line = [], ""
    for part in re.split(r"(?=:)", label):
        if line and len(line) + len(part) > room:
            lines.append(line)
            line = GAP
        line += part
    return [*lines, line]


def _legend(verdict: Verdict, *, verbose: bool) -> Iterator[str]:
    compared = any(
        row.method.strategy == option.strategy
        for row in verdict.rows
        for option in verdict.advice.compared
        if row is not verdict.best
    )
    yield "* the method to take" + ("; + also worth comparing on your model" if compared else "")
    if any(row.rates_bps for row in verdict.rows):
        share = _percent(SHOWN_SHARE)
        yield f"{share} at: least rate at which compute takes {share} of the time; -: at none"
    if verdict.device_memory is not None:
        divided = any(row.sharded for row in verdict.rows)
        text = "; /: if fully_shard divides the model inside each machine" * divided
        yield f"memory: on each device; !: does not fit{text}"
    if verbose:
        yield (
            "numbers: same numbers as DDP; larger batch (rarer updates); averaged (rarely); late; "
            "lossy (encoded)"
        )


def _notes(verdict: Verdict, *, verbose: bool) -> Iterator[str]:  # noqa: C901
    """Yield remarks about the profile, the network and the number of machines."""
    yield from verdict.advice.notes
    place = verdict.place
    if verdict.best.method.machines > 1 and verdict.work.target_loss is None:
        if verdict.last_machine > place.machines:
            yield (
                f"the last of {verdict.last_machine} machines would still add at least half a "
                "machine's speed"
            )
        else:
            yield (
                f"beyond {verdict.last_machine} machine{'s' * (verdict.last_machine > 1)}, a "
                "further one adds less than half a machine's speed"
            )
    if verdict.critical_machines is not None and (
        verbose or verdict.critical_machines < 4 * place.machines
    ):
        yield (
            f"by the measured noise of gradients, {digits(verdict.critical_machines, 2)} machines "
            "that average every gradient need twice the samples to the same loss"
        )
    link = place.profile.default_link
    if link.connections > 1:
        yield f"link {link.name!r} has {link.connections} connections between two machines"
    for network in place.networks:
        if network.window_bytes > WINDOW_BYTES:
            yield (
                f"{rate(network.tcp_rate_bps)} with this delay are {size(network.window_bytes)} "
                f"under way on a connection of link {network.name!r}. Linux allows about "
                f"{size(WINDOW_BYTES)} by default, so messages may take longer than estimated. "
                "Raise net.ipv4.tcp_wmem and net.ipv4.tcp_rmem, or use several connections"
            )
    if verbose:
        for reason, names in excluded_strategies().items():
            yield f"{', '.join(names)}: never advised; {reason}"
    if place.estimated and verbose:
        yield "message times are estimated from the rate; `offbeat profile` measures them"
    if place.devices > 1:
        yield "messages inside a machine count as free, and its devices share one replica"
        if (command := launch_command(verdict)) is not None:
            yield f"on these machines: {command}"


def _rate_table(verdict: Verdict, width: int) -> list[str]:
    """Return the least rates in Mbit/s for all shares of computing time, bytes and staleness."""
    shares = sorted({share for row in verdict.rows for share in row.rates_bps})
    heads = [*map(_percent, shares), "MB sent", "stale", "method"]
    rows = [
        [
            *(_megabits(row.rates_bps[share]) for share in shares),
            f"{row.method.sent_bytes / MEGA:.3g}",
            str(row.method.staleness),
            row.method.label,
        ]
        for row in verdict.rows
        if row.rates_bps
    ]
    title = "Mbit/s from which compute takes a share of the time; MB sent per iteration:"
    return [*wrap(title, width, GAP), *_lines([heads, *rows], width)]


def _megabits(rate_bps: float | None) -> str:
    if rate_bps is None or rate_bps <= LEAST_RATE_BPS:
        return "-" if rate_bps is None else "any"
    return digits(float(f"{rate_bps / MEGA:.2g}"), 2)


def _command_lines(command: str, width: int) -> list[str]:
    """Return a shell command on one line, or with an option per line if it is too long."""
    if len(command) + 2 <= width:
        return [f"  {command}"]
    return f"  {command}".replace(" --", " \\\n    --").splitlines()
