"""Text of a verdict: headline, table of methods, notes, and the command that compares them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from io import StringIO

from rich.console import Console
from rich.table import Table

from offbeat.core import words
from offbeat.core.strategy.registry import BASELINE
from offbeat.core.words import digits, size
from offbeat.experiments.advice.methods import ALONE
from offbeat.experiments.advice.needs import LEAST_RATE_BPS, reached_bps
from offbeat.experiments.advice.options import CHANGES
from offbeat.experiments.advice.selection import AS_GOOD, excluded_strategies
from offbeat.experiments.advice.verdict import Row, Verdict, rate
from offbeat.experiments.report.table import wrap

MEGA, GIGA = 1e6, 1e9
GAP = "  "
LEAST_WIDTH = 59  # characters of a table with "90 % at", and without range, memory and cost
UNITS = (("days", 86400.0), ("hours", 3600.0), ("minutes", 60.0), ("seconds", 1.0))
UNIT_FROM = 3.0  # the fastest method takes at least this many of the unit of the table
SHORT = {"days": "d", "hours": "h", "minutes": "min", "seconds": "s"}
SHOWN_SHARE = 0.9  # share of computing time in the table
WINDOW_BYTES = 4e6  # under way on a TCP connection, by the largest default buffer of Linux
LARGE_CHANGE = 0.01  # relative change of time from which a change of the machines is worth a word


def verdict_text(
    verdict: Verdict,
    *,
    notes: Sequence[str],
    command: str | None,
    launch: str | None,
    width: int,
    verbose: bool,
) -> str:
    """Return the text of `offbeat advise`: the verdict, the table, notes, the compare command.

    Args:
        verdict: verdict to print.
        notes: first remarks, such as the device whose times these are.
        command: command that compares the advised strategies; None if they cannot be compared.
        launch: command that trains on the machines, if they have several devices.
        width: characters per line.
        verbose: whether all shares, counts and notes are printed.
    """
    columns = list(_columns(verdict, width, verbose=verbose))
    rows = [[cell(row) for _, cell, _ in columns] for row in verdict.rows]
    parts = [_worth(verdict), _headline(verdict), *_sentences(verdict), ""]
    lines = [line for text in parts for line in (wrap(text, width, GAP) or [""])]
    lines += [*_table([head for head, _, _ in columns], rows, width), ""]
    notes = [*notes, *_notes(verdict, verbose=verbose)]
    if verdict.place.devices > 1:
        notes.append("messages inside a machine count as free, and its devices share one replica")
    if launch is not None:
        notes.append(f"on these machines: {launch}")
    legends = [legend for _, _, legend in columns if legend]
    for text in (*legends, *(f"note: {note}" for note in notes)):
        lines += wrap(text, width, GAP)
    if verbose:
        title = "Mbit/s from which compute takes a share of the time; MB sent per iteration:"
        lines += ["", *wrap(title, width, GAP), *_rate_table(verdict, width)]
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
    devices = f" of {place.devices} devices" * (place.devices > 1)
    where = f"{place.machines} machines{devices} at {rate(place.rate_bps, 3)}"
    others = [
        f"{row.method.label}: {span(row.seconds)}"
        for row in verdict.rows
        if row.seconds is not None
        and row is not best
        and (row.method.strategy is None or row.method.label == BASELINE)
    ]
    text = f"{where}, {verdict.work.text}: {_with_range(best)}."
    return text + f" Others: {'; '.join(others)}." * bool(others)


def _with_range(row: Row) -> str:
    assert row.seconds is not None
    assert row.range_s is not None
    _, scale = _unit_of(row.seconds)
    low, high = (digits(seconds / scale, 2) for seconds in row.range_s)
    verb = "alone takes" if row.method.machines == 1 else "takes"
    return f"{row.method.label} {verb} {span(row.seconds)} ({low} to {high})"


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
        names = " nor ".join(one.text for one in verdict.helps)
        several = len(verdict.helps) > 1
        text = f"Neither {names} would help" if several else f"{names} would not help"
        share = verdict.place.profile.slowest().compute_s / verdict.best.method.iteration_s
        return f"{text}: compute takes {_percent(min(share, 1.0))} of the time."
    text = f"{best.text[:1].upper()}{best.text[1:]} would save {_percent(best.saved)} of the time"
    rest = "".join(f", {one.text} {_percent(one.saved)}" for one in verdict.helps[1:])
    return f"{text}{rest}."


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


def _columns(
    verdict: Verdict, width: int, *, verbose: bool
) -> Iterator[tuple[str, Callable[[Row], str], str]]:
    """Yield the head, the cell of a row and the legend of each column."""
    compared = [option.strategy for option in verdict.advice.compared]
    unit, scale = _unit_of(verdict.best.seconds or 0.0)
    share, memory, price = _percent(SHOWN_SHARE), verdict.device_memory, verdict.price

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
        yield f"{share} at", lambda row: least_rate(row.rates_bps.get(SHOWN_SHARE)), legend
    if memory is not None:
        divided = "; /: if fully_shard divides the model inside each machine"
        divided *= any(row.sharded for row in verdict.rows)
        yield "memory", room, f"memory: on each device; !: does not fit{divided}"
    if price is not None:
        yield "cost", lambda row: "-" if row.cost is None else _money(row.cost), ""
    legend = (
        "numbers: same numbers as DDP; larger batch (rarer updates); averaged (rarely); late; "
        "lossy (encoded)"
    )
    yield "numbers", lambda row: row.method.change, legend * verbose
    yield "method", lambda row: row.method.label, ""


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> list[str]:
    """Return lines with aligned columns; the last column is folded."""
    table = Table(box=None, pad_edge=False, padding=(0, len(GAP), 0, 0))
    for head in heads:
        is_text = head in ("numbers", "method")
        table.add_column(
            head,
            justify="left" if is_text else "right",
            no_wrap=head != "method",
            overflow="fold",
        )
    for row in rows:
        table.add_row(*row)
    out = StringIO()
    Console(file=out, width=width, markup=False, emoji=False).print(table)
    return [line.rstrip() for line in out.getvalue().splitlines()]


def _notes(verdict: Verdict, *, verbose: bool) -> Iterator[str]:
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
    for one in place.profile.links if place.estimated else ():
        reached = reached_bps(one, place.machines)
        window_bytes = reached / 8 * 2 * one.asked_latency_s / one.connections
        if window_bytes > WINDOW_BYTES:
            yield (
                f"{rate(reached)} with this delay are {size(window_bytes)} "
                f"under way on a connection of link {one.name!r}. Linux allows about "
                f"{size(WINDOW_BYTES)} by default, so messages may take longer than estimated. "
                "Raise net.ipv4.tcp_wmem and net.ipv4.tcp_rmem, or use several connections"
            )
    if verbose:
        for reason, names in excluded_strategies().items():
            yield f"{', '.join(names)}: never advised; {reason}"
    if place.estimated and verbose:
        yield "message times are estimated from the rate; `offbeat profile` measures them"


def _rate_table(verdict: Verdict, width: int) -> list[str]:
    """Return the least rates in Mbit/s for all shares of computing time, bytes and staleness."""
    shares = sorted({share for row in verdict.rows for share in row.rates_bps})
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
    return _table([*map(_percent, shares), "MB sent", "stale", "method"], rows, width)


def _megabits(rate_bps: float | None) -> str:
    if rate_bps is None or rate_bps <= LEAST_RATE_BPS:
        return "-" if rate_bps is None else "any"
    return digits(float(f"{rate_bps / MEGA:.2g}"), 2)


def _command_lines(command: str, width: int) -> list[str]:
    """Return a shell command on one line, or with an option per line if it is too long."""
    if len(command) + 2 <= width:
        return [f"  {command}"]
    return f"  {command}".replace(" --", " \\\n    --").splitlines()
