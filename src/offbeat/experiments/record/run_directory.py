"""Reader of a run directory: contestants, records of all ranks and problems."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from offbeat.core.files import require_schema
from offbeat.core.plan import Plan
from offbeat.core.profile import Profile
from offbeat.core.sim.trace import Trace, spans_from_dict, whole_periods
from offbeat.core.strategy.registry import read_plan
from offbeat.experiments.record.disturbed import Disturbance, disturbance_of
from offbeat.jobs.record_lines import RankLines, rank_files, read_rank

SCHEMA = 1
LOG_TAIL_LINES = 12
PROBLEM = "problem.txt"  # in a repetition's folder: message of its failure
NOT_RUN = "was not run"  # problem of a repetition that has not begun
PROFILING = "profiling"  # in a run's folder: folder of the launch that measured the profile
LOAD = "load.json"  # in a repetition's folder: load of the machine during the repetition
BEFORE = "disturbed-"  # prefix of the folder of a disturbed repetition that was repeated

_UNREADABLE = (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError)


@dataclass(frozen=True)
class RankRecord:
    """Record of one rank.

    Attributes:
        rank: number of the rank.
        strategy: strategy with its settings.
        trace: measured trace of this rank.
        losses: (iteration, seconds from the trace's origin, loss).
        sent_bytes: payload bytes sent over the whole run, by link.
        observed: number of profiled iterations before the plan began.
        without_update: iterations that applied no gradient.
        emulated: whether layers slept instead of computing.
        pace: adherence of the host to its pace; None at full speed.
        sample: sampled parameters (see `replica_sample`).
        warnings: warnings of the runtime.
        decisions: iteration and text of each decision of the runtime.
        votes: columns of `VoteLog`.
        losses_of: number of iterations that each loss averages.
        cut: description of where an unclosed record ends; empty for a closed one.
        metrics: (iteration, seconds from the trace's origin, value) of each reported metric.
    """

    rank: int
    strategy: str
    trace: Trace
    losses: tuple[tuple[int, float, float], ...] = ()
    sent_bytes: Mapping[str, int] = field(default_factory=dict)
    observed: int = 0
    without_update: tuple[int, ...] = ()
    emulated: bool = False
    pace: Mapping[str, float] | None = None
    sample: Mapping[str, Any] | None = None
    warnings: tuple[str, ...] = ()
    decisions: tuple[tuple[int, str], ...] = ()
    votes: Mapping[str, Any] = field(default_factory=dict)
    losses_of: int = 1
    cut: str = ""
    metrics: Mapping[str, tuple[tuple[int, float, float], ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class Repetition:
    """One repetition of one contestant.

    Attributes:
        index: number of the repetition.
        ranks: readable records, in order of rank.
        problems: missing or unreadable records. A repetition with problems is not counted.
        log_tails: last lines of the log of each rank without a record.
        cuts: reasons why a repetition ended early although all ranks have records.
        load: load of the machine during the repetition.
        repeated: whether this repetition replaces a disturbed one.
        zero_s: time of the trace from which seconds to a loss count; None: the end of the first
            iteration, as starting a job is no merit of a strategy.
    """

    index: int
    ranks: tuple[RankRecord, ...]
    problems: tuple[str, ...] = ()
    log_tails: Mapping[int, str] = field(default_factory=dict)
    cuts: tuple[str, ...] = ()
    load: Mapping[str, Any] | None = None
    repeated: bool = False
    zero_s: float | None = None

    @property
    def disturbance(self) -> Disturbance | None:
        """Disturbance that invalidates the repetition as a measurement; None without one."""
        paces = {record.rank: record.pace for record in self.ranks}
        return disturbance_of(self.index, self.load, paces)

    @property
    def has_begun(self) -> bool:
        """Whether the run reached this repetition."""
        return self.problems != (NOT_RUN,)

    @property
    def complete(self) -> bool:
        """Whether every rank finished and left a readable record."""
        return self.readable and not self.cuts

    @property
    def readable(self) -> bool:
        """Whether every rank left a readable record, complete or cut short."""
        return bool(self.ranks) and not self.problems

    @property
    def observed(self) -> int:
        """Number of profiled iterations before the plan began."""
        return max((record.observed for record in self.ranks), default=0)

    @cached_property
    def trace(self) -> Trace:
        """Merged trace of all ranks; ValueError without records."""
        if not self.ranks:
            raise ValueError(f"repetition {self.index} has no rank with a record")
        traces = [record.trace for record in self.ranks]
        return Trace(
            source="measured",
            strategy=self.ranks[0].strategy,
            ends_s=tuple(trace.ends_s[0] for trace in traces),
            starts_s=tuple(trace.starts_s[0] for trace in traces),
            spans=tuple(span for trace in traces for span in trace.spans),
            first=traces[0].first,
            period=traces[0].period,
            uneven=traces[0].uneven,
            notes=traces[0].notes,
        )


@dataclass(frozen=True)
class Contestant:
    """One strategy of the comparison: its plan, its prediction and its repetitions."""

    label: str
    strategy: str
    settings: Mapping[str, Any]
    repetitions: tuple[Repetition, ...]
    plan: Plan | None = None
    predicted: Trace | None = None
    problems: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()

    @property
    def complete(self) -> tuple[Repetition, ...]:
        """Repetitions that are counted: the complete ones.

        If none is complete, these are the ones that were cut short, so that the measurements of an
        aborted long run can be used.
        """
        whole = tuple(rep for rep in self.repetitions if rep.complete)
        return whole or tuple(rep for rep in self.repetitions if rep.readable)

    @property
    def cut(self) -> bool:
        """Whether the counted repetitions were cut short."""
        return any(rep.cuts for rep in self.complete)

    @property
    def text(self) -> str:
        """Strategy with its settings, as in the first record, else from run.json."""
        for repetition in self.repetitions:
            for record in repetition.ranks:
                return record.strategy
        inner = ", ".join(f"{name}={value}" for name, value in self.settings.items())
        return f"{self.strategy}({inner})" if inner else self.strategy


@dataclass(frozen=True)
class Run:
    """Contents of a run directory.

    Attributes:
        path: the run directory.
        contestants: contestants in the order of the command.
        command: command line of the user.
        script: script with its arguments.
        cluster: hosts and links.
        probed: configured and measured values of each link before the run.
        changed: changes of the network that the lab made during the run.
        lab: "netns", or "none" without a lab.
        note: remark of the lab.
        emulated: whether layers slept instead of computing.
        versions: versions of offbeat, torch, Python and the kernel.
        seed: seed of the first repetition.
        cpus: number of processors.
        started: time of the start (ISO 8601, UTC).
        repetitions: planned number of repetitions.
        target_loss: training loss to which the time is measured; None if not set.
        target: name and value of the metric to which the time is measured instead.
        skip: least number of first iterations that are not measured (see `count_skipped`).
        profile: profile of the run.
        profile_load: load of the machine while the profile was measured.
        problems: problems outside of contestants.
        given: file of a given profile, and the quantities computed for this cluster.
        notes: remarks, such as settings of the user that were not used.
        seeds: seed of each repetition.
        device: the user's device, with predicted seconds per iteration by label.
        rehearsed: whether the run is a rehearsal, whose times are simulated.
    """

    path: Path
    contestants: tuple[Contestant, ...]
    command: tuple[str, ...] = ()
    script: tuple[str, ...] = ()
    cluster: Mapping[str, Any] = field(default_factory=dict)
    probed: tuple[Mapping[str, Any], ...] = ()
    changed: tuple[Mapping[str, Any], ...] = ()
    lab: str = "none"
    note: str | None = None
    emulated: bool = False
    versions: Mapping[str, str | None] = field(default_factory=dict)
    seed: int | None = None
    cpus: int | None = None
    started: str = ""
    repetitions: int = 1
    target_loss: float | None = None
    target: Mapping[str, Any] | None = None
    skip: int = 0
    profile: Profile | None = None
    profile_load: Mapping[str, Any] | None = None
    problems: tuple[str, ...] = ()
    given: Mapping[str, Any] | None = None
    notes: tuple[str, ...] = ()
    seeds: tuple[int, ...] = ()
    device: Mapping[str, Any] | None = None
    rehearsed: bool = False

    @property
    def profile_disturbed(self) -> Disturbance | None:
        """Disturbance during the measurement of the profile; None without one."""
        return disturbance_of(0, self.profile_load, {})

    @property
    def world_size(self) -> int:
        """Number of ranks, from the profile, the cluster or the existing records."""
        return _world_size(self.profile, self.cluster) or max(
            (record.rank + 1 for _, _, record in self.records()), default=0
        )

    @property
    def command_line(self) -> tuple[str, ...]:
        """Command with the script and its arguments."""
        size = len(self.script)
        places = range(len(self.command) - size + 1)
        if size and any(self.command[i : i + size] == self.script for i in places):
            return self.command
        return (*self.command, *self.script)

    def records(self) -> Iterator[tuple[Contestant, Repetition, RankRecord]]:
        """Yield all records of all ranks."""
        for contestant in self.contestants:
            for repetition in contestant.repetitions:
                for record in repetition.ranks:
                    yield contestant, repetition, record

    def failures(self) -> list[str]:
        """Return all problems and early ends, each with contestant and repetition."""
        said = list(self.problems)
        for contestant in self.contestants:
            said += [f"{contestant.label}: {problem}" for problem in contestant.problems]
            for rep in contestant.repetitions:
                where = f"{contestant.label}, repetition {rep.index}"
                said += [f"{where}: {words}" for words in (*rep.problems, *rep.cuts)]
        return said


def count_skipped(run: Run, rep: Repetition) -> int:
    """Return the number of first iterations of a trace that are excluded from measured times.

    The profiled iterations are excluded. At least the first `run.skip` iterations of the plan are
    excluded too, rounded up to whole periods if a whole period remains.
    """
    trace, before = rep.trace, rep.observed - rep.trace.first
    return max(0, whole_periods(run.skip, trace.period, trace.iterations - before) + before)


def load(run_dir: str | Path) -> Run:
    """Read a run directory.

    Missing or unreadable files are reported as problems of their repetition.

    Raises:
        ValueError: run.json is missing, unreadable or of another schema.
    """
    path = Path(run_dir)
    data = _read_run_json(path)
    profile, problems = _load_optional(path / "profile.json", Profile.from_dict)
    repetitions = int(data.get("repetitions", 1))
    expected = _world_size(profile, data.get("cluster") or {})
    contestants = [
        _load_contestant(path, entry, repetitions, expected) for entry in data["contestants"]
    ]
    return Run(
        path=path,
        contestants=tuple(contestants),
        emulated=bool(data.get("emulated")) or _has_emulated_record(contestants),
        repetitions=repetitions,
        profile=profile,
        profile_load=load_in(path / PROFILING),
        problems=problems,
        given=data.get("profile"),
        **_tuple_fields(data, "command", "script", "probed", "changed", "notes", "seeds"),
        **_known_fields(data, "cluster", "versions", "lab", "note", "device", "started"),
        **_known_fields(data, "seed", "skip", "cpus", "target_loss", "target", "rehearsed"),
    )


def _known_fields(data: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """Return the fields with these names that have a value."""
    return {name: data[name] for name in names if data.get(name) is not None}


def _tuple_fields(data: Mapping[str, Any], *names: str) -> dict[str, tuple[Any, ...]]:
    return {name: tuple(value) for name, value in _known_fields(data, *names).items()}


def _read_run_json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads((path / "run.json").read_text())
    except FileNotFoundError:
        raise ValueError(
            f"folder ({path}) must hold the run.json of `offbeat compare`, or the record of a job "
            "(OFFBEAT_RECORD); it holds neither"
        ) from None
    except ValueError as error:
        raise ValueError(f"{path / 'run.json'} is not JSON: {error}") from None
    schema = data.get("schema") if isinstance(data, dict) else None
    require_schema(schema, SCHEMA, path / "run.json")
    _check_contestants(data.get("contestants"), path)
    return data


def _check_contestants(entries: Any, path: Path) -> None:
    if not isinstance(entries, list) or not all(isinstance(e, dict) for e in entries):
        raise ValueError(f"{path / 'run.json'}: contestants must be a list of objects")
    labels = [entry.get("label") for entry in entries]
    for label in labels:
        plain = isinstance(label, str) and label == Path(label).name and label not in ("", "..")
        if not plain or "\\" in label:
            raise ValueError(f"label ({label!r}) must be a plain folder name inside {path}")
        if labels.count(label) > 1:
            raise ValueError(f"label ({label!r}) must be unique among the contestants")


def _load_contestant(
    path: Path, entry: Mapping[str, Any], repetitions: int, expected: int
) -> Contestant:
    folder = path / entry["label"]
    plan, plan_problems = _load_optional(folder / "plan.json", read_plan)
    predicted, predicted_problems = _load_optional(folder / "predicted.json", _predicted_from_dict)
    reps = [load_repetition(folder / f"rep{i}", i) for i in range(repetitions)]
    expected = expected or max((r.rank + 1 for rep in reps for r in rep.ranks), default=1)
    return Contestant(
        label=entry["label"],
        strategy=str(entry.get("strategy", "")),
        settings=entry.get("settings") or {},
        repetitions=tuple(_with_missing_ranks(rep, folder, expected) for rep in reps),
        plan=plan,
        predicted=predicted,
        problems=plan_problems + predicted_problems,
        arguments=tuple(entry.get("arguments") or ()),
    )


def load_repetition(folder: Path, index: int) -> Repetition:
    """Read the folder of one repetition."""
    records, problems = list[RankRecord](), list[str]()
    for file in rank_files(folder).values():
        record, failed = _load_optional(file, load_rank, Path)
        problems += failed
        if record is not None:
            records.append(record)
    ends: dict[str, list[int]] = {}
    for record in records:
        if record.cut:
            ends.setdefault(record.cut, []).append(record.rank)
    cuts = [f"the record of {_rank_names(cut)} {end}" for end, cut in ends.items()]
    if (folder / PROBLEM).exists():
        cuts.insert(0, (folder / PROBLEM).read_text(errors="replace").strip())
    ranks = _truncate_losses(records) if cuts else records
    return Repetition(
        index,
        tuple(ranks),
        tuple(problems),
        cuts=tuple(cuts),
        load=load_in(folder),
        repeated=folder.with_name(BEFORE + folder.name).is_dir(),
    )


def load_in(folder: Path) -> Mapping[str, Any] | None:
    """Return the load of the machine during a launch, from the launch's folder; None if unknown."""
    return _load_optional(folder / LOAD, dict)[0]


def _truncate_losses(records: list[RankRecord]) -> list[RankRecord]:
    """Keep only losses of iterations that all ranks recorded. Cut records differ in length."""
    until = min((record.trace.iterations for record in records), default=0)
    return [
        replace(record, losses=tuple(loss for loss in record.losses if loss[0] < until))
        for record in records
    ]


def _with_missing_ranks(rep: Repetition, folder: Path, expected: int) -> Repetition:
    """Return the repetition with a problem for missing ranks and with their last log lines."""
    folder = folder / f"rep{rep.index}"
    if not folder.is_dir():
        return Repetition(rep.index, (), (NOT_RUN,))
    absent = [r for r in range(expected) if r not in {record.rank for record in rep.ranks}]
    problems = list(rep.problems)
    if absent:
        problems.append(f"{_rank_names(absent)} of {expected} left no record that can be read")
    tails = {r: tail for r in absent if (tail := _log_tail(folder / f"rank{r}.log"))}
    return replace(rep, problems=tuple(problems), log_tails=tails)


def _rank_names(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def load_rank(path: Path) -> RankRecord | None:
    """Return the record of a rank of which every iteration is recorded; None without an iteration,
    as of a server.

    Raises:
        ValueError: a line is not one of a record.
    """
    lines = read_rank(path)
    if lines.damaged:
        raise ValueError(f"lines that are no lines of a record: {lines.damaged:,}")
    if not lines.iterations.fields:
        return None
    own, end = lines.iterations, lines.end or {}
    about, last = own.fields, lines.spans[-1] if lines.spans else {}
    events = {
        kind: [e for e in lines.events if e.get("event") == kind]
        for kind in ("decision", "warning")
    }
    trace = Trace(
        "measured",
        about["strategy"],
        (tuple(own.ends_s),),
        (0.0,),
        spans_from_dict(last["spans"]) if last else (),
        period=about["period"],
        notes=last.get("notes") or {},
        uneven=about["uneven"],
    )
    return RankRecord(
        int(path.stem.removeprefix("rank")),
        about["strategy"],
        trace,
        losses=tuple(own.losses()),
        sent_bytes=end.get("bytes") or {},
        observed=about["observed"],
        without_update=tuple(own.without_update),
        emulated=about["emulated"],
        pace=end.get("pace"),
        sample=last.get("sample"),
        warnings=tuple(f"iteration {e['iteration']}: {e['text']}" for e in events["warning"]),
        decisions=tuple((e["iteration"], e["text"]) for e in events["decision"]),
        votes=own.votes,
        losses_of=own.losses_of,
        cut=_describe_cut(lines),
        metrics=own.metrics(),
    )


def _describe_cut(lines: RankLines) -> str:
    """Return where a record ends that does not end with its training; empty for others."""
    own, end = lines.iterations, lines.end
    if end is not None and end["how"] == "ended" and own.gap is None:
        return ""
    why = "the run was killed, or still goes on"
    if own.gap is not None:
        why = "later lines are missing, because they could not be written"
    elif end is not None:
        why = str(end.get("text") or end["how"])
    middle = ", in the middle of a line, which is left out" if lines.torn else ""
    return f"ends after {len(own.ends_s):,} iterations{middle}: {why}"


def _predicted_from_dict(data: Mapping[str, Any]) -> Trace:
    """Return the trace; move `iteration_s`, `bound_s` and `exposed_s` into its notes."""
    fields = ("iteration_s", "bound_s", "exposed_s")
    beside = {name: data[name] for name in fields if name in data}
    rest = {name: value for name, value in data.items() if name not in fields}
    return Trace.from_dict({**rest, "notes": {**data.get("notes", {}), **beside}})


def _read_json(file: Path) -> Any:
    return json.loads(file.read_text())


def _load_optional(file: Path, build: Any, load: Any = _read_json) -> tuple[Any, tuple[str, ...]]:
    """Return (object, no problems), or (None, problems). A missing file is no problem."""
    if not file.exists():
        return None, ()
    try:
        return build(load(file)), ()
    except json.JSONDecodeError as error:
        return None, (f"{file.name} is not JSON: {error}",)
    except KeyError as error:
        return None, (f"{file.name} lacks the field {error}",)
    except _UNREADABLE as error:
        return None, (f"{file.name} cannot be read: {error}",)


def _log_tail(log: Path) -> str:
    try:
        lines = log.read_text(errors="replace").splitlines()
    except OSError:
        return ""
    return "\n".join(lines[-LOG_TAIL_LINES:])


def _world_size(profile: Profile | None, cluster: Mapping[str, Any]) -> int:
    """Return the expected number of ranks; 0 if unknown."""
    if profile is not None:
        return profile.ranks
    hosts = cluster.get("hosts", 0)
    count = hosts if isinstance(hosts, int) else len(hosts)
    each = int(cluster.get("ranks") or cluster.get("processes_per_host", 1))
    overrides = [one for one in cluster.get("overrides", ()) if isinstance(one, Mapping)]
    return count * each + sum(int(one["ranks"]) - each for one in overrides if one.get("ranks"))


def _has_emulated_record(contestants: list[Contestant]) -> bool:
    return any(r.emulated for c in contestants for rep in c.repetitions for r in rep.ranks)
