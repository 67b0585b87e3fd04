"""Text of a verdict: headline, table of methods, notes, and the command that compares them."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Sequence
from io import StringIO

from rich.console import Console
from rich.table import Table

from offbeat.core import words
from offbeat.core.strategy.registry import BASELINE
from offbeat.core.words import digits, size
from offbeat.experiments.advice.methods import ALONE, LEAST_RATE_BPS, SHARE
from offbeat.experiments.advice.place import reached_bps
from offbeat.experiments.advice.selection import AS_GOOD, CHANGES
from offbeat.experiments.advice.verdict import Row, Verdict, rate
from offbeat.experiments.report.table import wrap

GAP = "  "
LEAST_WIDTH = 59  # characters of a table with "90 % at", and without range, memory and cost
UNITS = (("days", "d", 86400.0), ("hours", "h", 3600.0), ("minutes", "min", 60.0))
SECONDS = ("seconds", "s", 1.0)
UNIT_FROM = 3.0  # the fastest method takes at least this many of the unit of the table
WINDOW_BYTES = 4e6  # under way on a TCP connection, by the largest default buffer of Linux
LARGE_CHANGE = 0.01  # relative change of time from which a change of the machines is worth a word


def verdict_text(verdict: Verdict, notes: Sequence[str], command: str | None, width: int) -> str:
    """Return the text of `offbeat advise`: the verdict, the table, notes, the compare command.

    Args:
        verdict: verdict to print.
        notes: first remarks, such as the device whose times these are.
        command: command that compares the advised strategies; None if no options describe it.
        width: characters per line.
    """
    parts = [_worth(verdict), _headline(verdict), *_sentences(verdict)]
    legends = [legend for _, _, legend in _columns(verdict, width) if legend]
    remarks = [*legends, *(f"note: {note}" for note in (*notes, *_notes(verdict)))]
    known = verdict.work.target_loss is not None
    remarks.append("measure what was rehearsed" if known else "losses are not predicted; compare")
    remarks[-1] += (
        " on your model:"
        if command
        else " with a cluster file of these machines: offbeat compare --cluster FILE"
    )
    before, after = (
        [line for text in texts for line in wrap(text, width, GAP)] for texts in (parts, remarks)
    )
    shown = _command_lines(command, width) if command else []
    return "\n".join([*before, "", *_table(verdict, width), "", *after, *shown])


def _unit_of(seconds: float) -> tuple[str, str, float]:
    """Return the unit of which a time has at least `UNIT_FROM`: name, sign and seconds."""
    return next((unit for unit in UNITS if seconds >= UNIT_FROM * unit[2]), SECONDS)


def span(seconds: float) -> str:
    """Return a time as '41 h'."""
    _, sign, scale = _unit_of(seconds)
    return f"{digits(seconds / scale, 2)} {sign}"


def least_rate(rate_bps: float | None) -> str:
    """Return the result of a search for a least rate; '-' for None, 'any' for the lowest rate."""
    if rate_bps is None:
        return "-"
    return "any" if rate_bps <= LEAST_RATE_BPS else rate(rate_bps)


def _worth(verdict: Verdict) -> str:
    """Return whether several machines are worth it, and their speed relative to one."""
    count, alone, ddp = verdict.place.machines, verdict.row(ALONE), verdict.row(BASELINE)
    machines = "second machine" if count == 2 else f"{count} machines"
    answer = f"{machines}: {'no' if verdict.best.method.machines == 1 else 'yes'}"
    if alone is None or alone.fits is False:
        return f"{answer}, the model does not fit on one."
    if alone.seconds is None:
        return f"{answer}, one alone does not reach the loss."
    alone_s = alone.seconds

    def times(row: Row) -> str:
        return words.factor(alone_s / row.seconds if row.seconds else None)

    rest = "" if ddp is None or ddp is verdict.together else f"; DDP {times(ddp)}"
    return f"{answer}, {times(verdict.together)} times as fast as one{rest}."


def _headline(verdict: Verdict) -> str:
    """Return the method to take and its time, and those of what most users would take."""
    best, place = verdict.best, verdict.place
    assert best.seconds is not None
    assert best.range_s is not None
    devices = f" of {place.devices} devices" * (place.devices > 1)
    low, high = (digits(s / _unit_of(best.seconds)[2], 2) for s in best.range_s)
    verb = "alone takes" if best.method.machines == 1 else "takes"
    others = [
        f"{row.method.label}: {span(row.seconds)}"
        for row in verdict.rows
        if row.seconds is not None
        and row is not best
        and (row.method.strategy is None or row.method.label == BASELINE)
    ]
    return (
        f"{place.machines} machines{devices} at {rate(place.rate_bps, 3)}, {verdict.work.text}: "
        f"{best.method.label} {verb} {span(best.seconds)} ({low} to {high})."
        + f" Others: {'; '.join(others)}."
        * bool(others)
    )


def _sentences(verdict: Verdict) -> Iterator[str]:
    """Yield sentences about passes, help, changes of the mathematics, memory and cost."""
    place, method, alone = verdict.place, verdict.best.method, verdict.row(ALONE)
    passes, before = place.profile.usage.backwards, place.measured_passes
    if before is not None:
        yield (
            f"Assumed number of backward passes per step: {passes} on each machine, {before} on "
            "one machine alone."
        )
    elif passes > 1:
        yield (
            f"Assumed number of backward passes per step: {passes} on each machine, as measured. "
            "If the script divides it by the number of ranks, add --passes N."
        )
    yield _help_together(verdict) if method.machines == 1 else _help(verdict)
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
        yield _fits(verdict, verdict.device_memory)
    if verdict.best.cost is not None:
        text = f"cost: {_money(verdict.best.cost)}"
        if alone is not None and alone.cost is not None and alone is not verdict.best:
            text += f", one machine {_money(alone.cost)}"
        yield f"{text} at {verdict.price:g} per machine and hour"


def _money(value: float) -> str:
    return digits(value) if value < 1000 else f"{value:,.0f}"


def _help(verdict: Verdict) -> str:
    """Return the sentence about what would help."""
    best, *others = verdict.helps
    if best.saved < LARGE_CHANGE:
        share = min(verdict.place.profile.slowest().compute_s / verdict.best.method.iteration_s, 1)
        names = " or ".join(text for text, _ in verdict.helps)
        return f"No help from {names}: compute takes {_percent(share)} of the time."
    rest = "".join(f", {text} {_percent(saved)}" for text, saved in others)
    text = f"{best.text[:1].upper()}{best.text[1:]}"
    return f"{text} would save {_percent(best.saved)} of the time{rest}."


def _help_together(verdict: Verdict) -> str:
    """Return what makes all machines together faster than one."""
    one_s, all_s = verdict.best.seconds or 0.0, verdict.together.seconds
    if all_s is None:
        return "All machines together do not reach the loss."
    name, best = verdict.together.method.label, verdict.helps[0]
    if all_s <= one_s:
        return f"All machines together ({name}) are faster by at most {_percent(AS_GOOD)}."
    enough = [text for text, saved in verdict.helps if all_s * (1 - saved) < one_s]
    if verdict.worthwhile_bps is not None:
        twice = rate(2 * verdict.place.rate_bps)  # also enough if it is above the least rate
        enough = [
            f"{least_rate(verdict.worthwhile_bps)} or more",
            *(e for e in enough if e != twice),
        ]
    if enough:
        conditions = ", or with ".join(enough)
        return f"With {conditions}, all machines together ({name}) are faster than one."
    rest = f"; {best.text} would save {_percent(best.saved)} of their time"
    rest *= best.saved >= LARGE_CHANGE
    return f"No rate makes all machines together ({name}) faster than one{rest}."


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %".replace("-0 %", "0 %")


def _fits(verdict: Verdict, room_bytes: float) -> str:
    room, label = f"{room_bytes / 1e9:.4g} GB per device", verdict.best.method.label
    too_large = ", ".join(row.method.label for row in verdict.rows if row.fits is False)
    text = f"Does not fit into {room}: {too_large}"
    text = text if too_large else f"Every method fits into {room}"
    text += "; activations are not measured and come on top."
    if verdict.best.sharded:
        text += (
            f" {label} fits only if fully_shard divides the model inside each machine: "
            "offbeat.prepare(..., mesh=mesh['between'])"
        )
    return text


def _notes(verdict: Verdict) -> Iterator[str]:
    """Yield remarks about the profile, the network and the number of machines."""
    yield from verdict.advice.notes
    place, last, critical = verdict.place, verdict.last_machine, verdict.critical_machines
    if verdict.best.method.machines > 1 and verdict.work.target_loss is None:
        if last > place.machines:
            yield f"the last of {last} machines would still add at least half a machine's speed"
        else:
            yield (
                f"beyond {last} machine{'s' * (last > 1)}, a further one adds less than half a "
                "machine's speed"
            )
    if critical is not None and critical < 4 * place.machines:
        yield (
            f"by the measured noise of gradients, {digits(critical, 2)} machines that average "
            "every gradient need twice the samples to the same loss"
        )
    for link in place.profile.links if place.estimated else ():
        reached = reached_bps(link, place.machines)
        window_bytes = reached / 8 * 2 * link.asked_latency_s / link.connections
        if window_bytes > WINDOW_BYTES:
            yield (
                f"{rate(reached)} with this delay are {size(window_bytes)} under way on a "
                f"connection of link {link.name!r}, and Linux allows about {size(WINDOW_BYTES)} by "
                "default: raise net.ipv4.tcp_wmem and net.ipv4.tcp_rmem, or use several connections"
            )


def _columns(verdict: Verdict, width: int) -> Iterator[tuple[str, Callable[[Row], str], str]]:
    """Yield the head, the cell of a row and the legend of each column that fits."""
    compared = [option.strategy for option in verdict.advice.compared]
    unit, _, scale = _unit_of(verdict.best.seconds or 0.0)
    share, memory, price = _percent(SHARE), verdict.device_memory, verdict.price

    def mark(row: Row) -> str:
        return "*" if row is verdict.best else "+" * (row.method.strategy in compared)

    def times(row: Row) -> str:
        return "-".join(digits(s / scale, 2) for s in row.range_s or ()) or "-"

    def room(row: Row) -> str:
        return size(row.memory.total_bytes) + ("!" if row.fits is False else "/" * row.sharded)

    spare = width - LEAST_WIDTH - 11 * (memory is not None) - 8 * (price is not None)
    others = any(mark(row) == "+" for row in verdict.rows)
    yield "", mark, "* the method to take" + "; + also worth comparing on your model" * others
    yield unit, lambda row: "-" if row.seconds is None else digits(row.seconds / scale), ""
    if spare >= 10:
        yield "range", times, ""
    if spare >= 0:
        legend = f"{share} at: least rate at which compute takes {share} of the time; -: at none"
        yield f"{share} at", lambda row: least_rate(row.rate_bps), legend
    if memory is not None:
        divided = "; /: if fully_shard divides the model inside each machine"
        divided *= any(row.sharded for row in verdict.rows)
        yield "memory", room, f"memory: on each device; !: does not fit{divided}"
    if price is not None:
        yield "cost", lambda row: "-" if row.cost is None else _money(row.cost), ""
    yield "numbers", lambda row: row.method.change, ""
    yield "method", lambda row: row.method.label, ""


def _table(verdict: Verdict, width: int) -> list[str]:
    """Return lines with aligned columns; the last column is folded."""
    table, columns = Table(box=None, pad_edge=False, padding=(0, len(GAP), 0, 0)), []
    for head, cell, _ in _columns(verdict, width):
        columns.append(cell)
        justify = "left" if head in ("numbers", "method") else "right"
        table.add_column(head, justify=justify, no_wrap=head != "method", overflow="fold")
    for row in verdict.rows:
        table.add_row(*(cell(row) for cell in columns))
    out = StringIO()
    Console(file=out, width=width, markup=False, emoji=False).print(table)
    return [line.rstrip() for line in out.getvalue().splitlines()]


def _command_lines(command: str, width: int) -> list[str]:
    """Return a shell command on one line, or with an option per line if it is too long."""
    if len(command) + 2 <= width:
        return [f"  {command}"]
    words_ = [shlex.quote(word) for word in shlex.split(command)]
    broken = " ".join(f"\\\n    {word}" if word.startswith("--") else word for word in words_)
    return f"  {broken}".splitlines()
