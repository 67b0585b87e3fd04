"""Output of `offbeat advise`, and the strategies of `offbeat compare --strategies advised`."""

from __future__ import annotations

import re
import shlex
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offbeat.cli import texts
from offbeat.cli.options import Where, setup_of
from offbeat.cli.output import FAILED, INTERRUPTED, exit_code
from offbeat.core.profile import Profile
from offbeat.core.profile.device_speed import Compute, DeviceSpeed
from offbeat.core.profile.elsewhere import extrapolate, network_rate_bps
from offbeat.core.strategy.interface import require_choice
from offbeat.core.strategy.parsing import pairs, parse_value, text_of
from offbeat.core.strategy.registry import BASELINE
from offbeat.experiments.advice import CHANGES, MAX_STALENESS, advise
from offbeat.experiments.advice.methods import ALONE
from offbeat.experiments.advice.needs import LEAST_RATE_BPS, SHARES
from offbeat.experiments.advice.place import Place, place_of, place_on_cluster
from offbeat.experiments.advice.selection import excluded_strategies
from offbeat.experiments.advice.verdict import (
    Predictions,
    Row,
    Verdict,
    decide,
    predict_methods,
)
from offbeat.experiments.advice.work import Work
from offbeat.experiments.report import words
from offbeat.experiments.report.table import wrap
from offbeat.jobs.words import digits, seconds, size

if TYPE_CHECKING:
    from offbeat.cli.rehearsed_advice import Losses
    from offbeat.experiments.comparison import Contestant, Setup
    from offbeat.experiments.launcher import Outcome

MEGA, GIGA = 1e6, 1e9
MEASURES = ("change", "staleness", "iteration_s", "update_s")  # fields in the JSON output
DEFAULT_LINK = "net"  # name of the only link of a cluster that is given by options, not by a file
GAP = "  "
DROPPED = ("range", "90 % at")  # columns that narrow terminals leave out, in this order
LEAST_LABEL = 23  # characters of the last column from which no column is left out
UNITS = (("days", 86400.0), ("hours", 3600.0), ("minutes", 60.0), ("seconds", 1.0))
UNIT_FROM = 3.0  # the fastest method takes at least this many of the unit of the table
SHORT = {"days": "d", "hours": "h", "minutes": "min", "seconds": "s"}
SHOWN_SHARE = 0.9  # share of computing time in the table
LARGE_CHANGE = 0.01  # relative change of time from which a change of the machines is worth a word


# --- question and answer -------------------------------------------------------------------------


@dataclass(frozen=True)
class Question:
    """Options of `offbeat advise`.

    Attributes:
        work: amount of training.
        hosts: number of machines; None for the profile's.
        rate: text of the rate of the network; None for the measured one.
        devices: number of devices of each machine.
        cluster: cluster file instead of `hosts` and `rate`.
        max_staleness: largest staleness of the advised strategy.
        device: the user's device; None for the measured one.
        device_text: option that describes it in a command of `compare`.
        device_memory: bytes of a device; None if not given.
        price: price of a machine and hour; None if not given.
        jitter: relative standard deviation of compute times; None for that of the profile.
        everything: whether all strategies and all shares of computing time are computed.
        script: script or module with its arguments; empty if it is not given.
    """

    work: Work
    hosts: int | None = None
    rate: str | None = None
    devices: int | None = None
    cluster: Path | None = None
    max_staleness: int = MAX_STALENESS
    device: DeviceSpeed | None = None
    device_text: str | None = None
    device_memory: float | None = None
    price: float | None = None
    jitter: float | None = None
    everything: bool = False
    script: tuple[str, ...] = ()

    def place(self, profile: Profile) -> Place:
        """Return the machines of the question, with the model of a profile."""
        from offbeat.lab.units import parse_rate_bps

        if self.device is not None:
            profile = self.device.apply(profile)
        if self.jitter is not None:
            profile = extrapolate(profile, jitter=self.jitter)
        if self.devices is not None:
            texts.require_range("--per-host", self.devices, 1, "it is the number of devices")
        if profile.sharded:
            raise ValueError(
                "the profile must be of whole replicas, as sizes of shards do not state the memory "
                "of a model; measure it on one device with `offbeat advise train.py`"
            )
        # The legs of messages inside a machine are part of the profile's message times.
        devices = self.devices or max(profile.topology, default=1)
        profile = profile.of_replicas()
        if self.cluster is None:
            return place_of(profile, self.hosts, parse_rate_bps(self.rate, "--rate"), devices)
        if self.hosts is not None or self.rate is not None:
            raise ValueError("--cluster replaces --hosts and --rate; give one or the other")
        from offbeat.lab import Cluster

        texts.require_file(self.cluster, 'write one with the lines hosts = 4 and rate = "100mbit"')
        return place_on_cluster(profile, Cluster.load(self.cluster), devices)

    def has_nodes(self, devices: int) -> bool:
        """Return whether the ranks of each host of the cluster file share a replica, as the devices
        of a machine do."""
        from offbeat.lab import Cluster

        assert self.cluster is not None
        cluster = Cluster.load(self.cluster)
        sizes = {cluster.ranks_of(host) for host in range(cluster.hosts)}
        return sizes == {devices} and (devices == 1 or cluster.ranks is not None)


@dataclass(frozen=True)
class Answer:
    """Verdict of a question with its command, the device that it is for, remarks, and the record of
    a rehearsal."""

    verdict: Verdict
    command: str | None
    compute: Compute
    notes: tuple[str, ...] = ()
    rehearsal: dict[str, Any] | None = None

    @property
    def data(self) -> dict[str, Any]:
        """Return the JSON output."""
        found = {**to_dict(self.verdict, self.command), "compute": self.compute.record()}
        found["notes"] += self.notes
        return found if self.rehearsal is None else {**found, "rehearsal": self.rehearsal}

    @property
    def device_text(self) -> str:
        """Return a sentence about the device whose times these are."""
        return self.compute.text or (
            f"these times are of the profile's device ({seconds(self.compute.iteration_s)} of "
            "compute per iteration); --device-speed 20x or --iteration-s .035 predicts for yours"
        )

    def text(self, width: int, *, verbose: bool) -> str:
        """Return the printed output."""
        return verdict_text(
            self.verdict,
            notes=(*self.notes, self.device_text),
            command=self.command,
            width=width,
            verbose=verbose,
        )


def answer(
    question: Question,
    profile: Profile,
    file: Path | None,
    predicted: Predictions | None = None,
    losses: Losses | None = None,
) -> Answer:
    """Return the answer to a question.

    Args:
        question: options of the command.
        profile: measured profile.
        file: its file, if it is kept.
        predicted: predictions for the machines of the question, if they are known.
        losses: rehearsed losses; None: the work is that of the question.
    """
    verdict = decide(
        question.place(profile) if predicted is None else predicted.place,
        question.work if losses is None else losses.work,
        predicted=predicted,
        max_staleness=question.max_staleness,
        device_memory=question.device_memory,
        price=question.price,
        shares=SHARES if question.everything else (SHOWN_SHARE,),
        everything=question.everything,
        rate_text=rate,
    )
    command = compare_command(verdict, question, profile, file)
    found = Answer(verdict, command, Compute.of(profile, question.device))
    if losses is None or predicted is None:
        return found
    return replace(found, notes=tuple(losses.notes(predicted)), rehearsal=losses.record())


def answer_with_losses(
    question: Question,
    profile: Profile,
    file: Path | None,
    settings: Mapping[str, Any],
    resumed: Path | None,
) -> tuple[Answer | None, int]:
    """Rehearse the methods of a question and return the answer, and the exit code without one.

    `settings` are further arguments of `ScriptRehearsal`, `resumed` the folder of an interrupted
    rehearsal.
    """
    from offbeat.cli.rehearsed_advice import rehearse_methods
    from offbeat.experiments.new_run import default_run_dir
    from offbeat.experiments.progress import Progress
    from offbeat.experiments.script import script_name

    progress = Progress(stderr=True)
    predicted = predict_methods(question.place(profile), max_staleness=question.max_staleness)
    run_dir = resumed or default_run_dir(script_name(question.script), "rehearsal-")
    resume = resumed is not None
    losses = rehearse_methods(
        predicted, question.script, settings, profile, run_dir, progress, resume=resume
    )
    if losses.interrupted:
        progress.print_error(f"interrupted; complete it with --resume {run_dir}")
        return None, INTERRUPTED
    if losses.target_loss is None or not losses.work.batches_by_label:
        goal = "" if losses.target_loss is None else f" to loss {losses.target_loss:.4g}"
        progress.print_error(
            f"no loss has decreased{goal}, so there is no verdict; rehearse more iterations, or "
            f"give a higher --target. The losses are in {run_dir}"
        )
        return None, FAILED
    return answer(question, profile, file, predicted, losses), 0


# --- text ----------------------------------------------------------------------------------------


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
    paragraphs = [_headline(verdict), *_sentences(verdict), ""]
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


def rate(rate_bps: float | None, count: int = 2) -> str:
    """Return a rate as '150 Mbit/s', with `count` digits; '-' for None, 'any' for the least rate
    of a search."""
    if rate_bps is None:
        return "-"
    if rate_bps <= LEAST_RATE_BPS:
        return "any"
    return words.rate(float(f"{rate_bps:.{count}g}"))


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
        named = [f"{row.method.label} {span(row.seconds or 0.0)}" for row in others]
        text += f" Others: {', '.join(named)}."
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
    """Yield sentences about help, changes of the mathematics, memory and cost."""
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


def _money(value: float) -> str:
    return digits(value) if value < 1000 else f"{value:,.0f}"


def _help(verdict: Verdict) -> str:
    """Return the sentence about what would help."""
    if verdict.best.method.machines == 1:
        return _help_together(verdict)
    best = verdict.helps[0]
    if best.saved < LARGE_CHANGE:
        names = " nor ".join(one.text for one in verdict.helps)
        return f"Neither {names} would help: compute takes the time."
    text = f"{best.text[:1].upper()}{best.text[1:]} would save {_percent(best.saved)} of the time"
    rest = [one for one in verdict.helps if one is not best]
    if rest:
        text += ", " + ", ".join(f"{one.text} {_percent(one.saved)}" for one in rest)
    return f"{text}."


def _help_together(verdict: Verdict) -> str:
    """Return what makes all machines together faster than one."""
    one_s, all_s = verdict.best.seconds or 0.0, verdict.together.seconds
    if all_s is None:
        return "All machines together do not reach the loss."
    enough = [one.text for one in verdict.helps if all_s * (1 - one.saved) < one_s]
    if verdict.worthwhile_bps is not None:
        enough.append(f"{rate(verdict.worthwhile_bps)} or more")
    name = verdict.together.method.label
    if enough:
        return f"All machines together ({name}) are faster than one with {' or '.join(enough)}."
    text = f"No rate makes all machines together ({name}) faster than one"
    best = verdict.helps[0]
    if best.saved >= LARGE_CHANGE:
        text += f"; {best.text} would save {_percent(best.saved)} of its time"
    return f"{text}."


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %".replace("-0 %", "0 %")


def _fits(verdict: Verdict) -> str:
    room = f"{(verdict.device_memory or 0.0) / GIGA:.4g} GB"
    too_large = [row.method.label for row in verdict.rows if row.fits is False]
    known = all(row.memory.activations_bytes is not None for row in verdict.rows)
    left_out = "" if known else "; activations are not measured and come on top"
    if not too_large:
        return f"Every method fits into {room} per device{left_out}."
    return f"Does not fit into {room} per device: {', '.join(too_large)}{left_out}."


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
        cells.append(rate(row.rates_bps.get(SHOWN_SHARE)))
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


def _notes(verdict: Verdict, *, verbose: bool) -> Iterator[str]:
    """Yield remarks about the profile, the network and the number of machines."""
    yield from verdict.advice.notes
    place = verdict.place
    if verdict.best.method.machines > 1 and verdict.work.target_loss is None:
        if verdict.last_machine > place.machines:
            yield (
                f"up to {verdict.last_machine} machines, each further one adds at least half a "
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


def compare_command(
    verdict: Verdict, question: Question, profile: Profile, file: Path | None
) -> str | None:
    """Return the command that compares the advised strategies on these machines; None if they have
    several devices and the cluster file does not state these.

    It reuses the profile in `file`, if `compare` can convert it. `--hosts` and `--rate` can
    describe one link without delay; other clusters need a cluster file.
    """
    place, options = verdict.place, verdict.advice.compared
    where = _place(place.profile) or ["--cluster", "cluster.toml"]
    if question.cluster is not None:
        where = ["--cluster", str(question.cluster)]
        if not question.has_nodes(place.devices):
            return None
    elif place.devices > 1 and where[0] == "--cluster":
        return None
    elif place.devices > 1:
        where += ["--per-node", str(place.devices)]
    same_nodes = max(profile.topology, default=1) == place.devices
    if file is not None and profile.world_size > 1 and same_nodes:
        where += ["--profile", str(file)]
    where += ["--device-speed", question.device_text] if question.device_text else []
    if verdict.work.target_loss is not None:
        where += ["--target", f"loss={verdict.work.target_loss:.4g}"]
    strategies = [option.strategy for option in options]
    if (best := verdict.best.method.strategy) is not None and best not in strategies:
        strategies.insert(0, best)  # by the time to a loss it can be another one
    names = ",".join(map(text_of, strategies))
    script = question.script or ("train.py",)
    return shlex.join(["offbeat", "compare", *where, "--strategies", names, *script])


def launch_command(verdict: Verdict) -> str | None:
    """Return the command that trains one replica per machine by the advised strategy; None if the
    best method is not a strategy, or if machines have one device."""
    place, best = verdict.place, verdict.best.method
    if place.devices == 1 or best.strategy is None:
        return None
    nodes = "" if verdict.best.sharded else "OFFBEAT_NODES=auto "  # or the mesh of the script
    return (
        f"OFFBEAT_STRATEGY={best.label} {nodes}torchrun --nnodes {place.machines} "
        f"--nproc-per-node {place.devices} train.py"
    )


def _place(profile: Profile) -> list[str] | None:
    from offbeat.lab.units import MAX_RATE_BPS, MIN_RATE_BPS, format_rate

    link, hosts = profile.default_link, ["--hosts", str(profile.world_size)]
    uneven = profile.pace and (profile.rank_scale or profile.rank_jitter or profile.jitter)
    plain = link.name == DEFAULT_LINK and not link.asked_latency_s and not link.asked_loss
    if len(profile.links) > 1 or uneven or not plain:
        return None
    if profile.world_size < 2:
        return hosts
    rate_bps = network_rate_bps(link, profile.world_size)
    if not MIN_RATE_BPS <= rate_bps <= MAX_RATE_BPS:
        return hosts
    return [*hosts, "--rate", format_rate(round(float(f"{rate_bps:.3g}")))]


def to_dict(verdict: Verdict, command: str | None) -> dict[str, Any]:
    """Return the JSON output of `offbeat advise`."""
    advice = verdict.advice
    return {
        **verdict.to_dict(),
        "command": command,
        "advised": text_of(advice.chosen.strategy),
        "compared": [text_of(option.strategy) for option in advice.compared],
        "notes": list(advice.notes),
        "never_advised": {
            name: reason for reason, names in excluded_strategies().items() for name in names
        },
        "options": [
            {
                "strategy": text_of(option.strategy),
                **{name: getattr(option, name) for name in MEASURES},
                "bytes_per_iteration": option.bytes,
            }
            for option in advice.options
        ],
    }


# --- compare -------------------------------------------------------------------------------------


def profile_here(
    script: str, args: Sequence[str], given: Path | None, resume: Path | None, *, stderr: bool
) -> tuple[Profile | None, int]:
    """Return the given profile, that of an interrupted rehearsal, or the newly measured one of a
    script on one device; without one the exit code."""
    setup, known = setup_of(Where(hosts=1, lab="none", pace="none"), script, args), given
    if given is None and resume is not None:
        from offbeat.rehearsal.command import MEASURED

        known = resume / MEASURED
    with open_profile(setup, known, stderr=stderr) as (path, outcome):
        if path is None:
            return None, exit_code(outcome, "no profile was written")
        return texts.load_profile(path), 0


@contextmanager
def open_profile(
    setup: Setup, given: Path | None, *, stderr: bool
) -> Iterator[tuple[Path | None, Outcome]]:
    """Yield the path of the given or a newly measured profile, and the outcome of the measurement.

    The path is None if the measurement has failed. A new profile is deleted on exit.
    """
    from offbeat.experiments.launcher import Outcome, measure_profile
    from offbeat.experiments.progress import Progress

    if given is not None:
        texts.require_file(given, "measure one with `offbeat profile`")
        yield given, Outcome(given.parent)
        return
    with tempfile.TemporaryDirectory(prefix="offbeat-advised-") as folder:
        path = Path(folder, "profile.json")
        outcome = measure_profile(setup, path, Progress(stderr=stderr))
        yield (path if outcome.measured else None), outcome


def advised_contestants(
    profile: Profile, asked: str, settings: Sequence[str]
) -> tuple[Contestant, ...]:
    """Return the advised contestants for a profile.

    `asked` is "advised", possibly with a setting: "advised:max_staleness=19".
    """
    limit = pairs(asked.split(":")[1:])
    for name in limit:
        require_choice("setting of advised", name, ("max_staleness",))
    known = {name: parse_value(name, value, int) for name, value in limit.items()}
    advice = advise(profile, **known)
    names = ",".join(text_of(option.strategy) for option in advice.compared)
    return texts.contestants(names, settings)
