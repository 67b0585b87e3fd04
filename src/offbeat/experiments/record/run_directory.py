"""A run directory as data: what was compared, what every rank recorded, what went wrong."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from offbeat.core.plan import Plan
from offbeat.core.profile import Profile
from offbeat.core.sim.trace import Trace, whole_periods
from offbeat.experiments.record.disturbed import Disturbance, disturbance_of
from offbeat.experiments.record.record_file import read, records_in

SCHEMA = 1
LOG_TAIL_LINES = 12
PROBLEM = "problem.txt"  # in a repetition's folder: how it has failed
PROFILING = "profiling"  # in a run's folder: the launch that measured its profile
LOAD = "load.json"  # in a repetition's folder: the machine's load beside it
BEFORE = "disturbed-"  # begins the folder of a repetition that was repeated

_UNREADABLE = (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError)


@dataclass(frozen=True)
class RankRecord:
    """What one rank recorded; `losses` are (iteration, seconds from the trace's origin, loss).

    `sent_bytes` is the payload handed to each link over the whole run, by link name; `observed`
    the number of iterations spent on profiling before the plan took over; `without_update` are the
    iterations that applied no gradient; `decisions` what was decided while it ran, each an
    iteration with words; `pace` how this host kept its pace, None if it computed as it could;
    `sample` some parameters after some iterations (see `replica_sample`); `votes` what it saw
    of votes, as it was written. Of a long run each loss is the mean of `losses_of` iterations.
    `cut` says how a record ends that was never closed, empty if it was.
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
    checks: tuple[str, ...] = ()
    decisions: tuple[Any, ...] = ()
    votes: Mapping[str, Any] = field(default_factory=dict)
    losses_of: int = 1
    cut: str = ""


@dataclass(frozen=True)
class Repetition:
    """One repetition of one contestant. It never counts with `problems`.

    `cuts` say why it did not come to its end, though all ranks have records. `log_tails` holds the
    last lines of the log of every rank that left no record. `load` is the machine's load beside
    it; `repeated`: an earlier attempt was disturbed.
    """

    index: int
    ranks: tuple[RankRecord, ...]
    problems: tuple[str, ...] = ()
    log_tails: Mapping[int, str] = field(default_factory=dict)
    cuts: tuple[str, ...] = ()
    load: Mapping[str, Any] | None = None
    repeated: bool = False

    @property
    def disturbance(self) -> Disturbance | None:
        """Why this is not a measurement, None if it is one."""
        paces = {record.rank: record.pace for record in self.ranks}
        return disturbance_of(self.index, self.load, paces)

    @property
    def complete(self) -> bool:
        """True if every rank finished and left a readable record."""
        return self.readable and not self.cuts

    @property
    def readable(self) -> bool:
        """True if every rank left a readable record, whole or cut short."""
        return bool(self.ranks) and not self.problems

    @property
    def observed(self) -> int:
        """Iterations before the plan took over."""
        return max((record.observed for record in self.ranks), default=0)

    @cached_property
    def trace(self) -> Trace:
        """The ranks' traces as one; ValueError if there is none."""
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

    @property
    def complete(self) -> tuple[Repetition, ...]:
        """The repetitions that count: those that came to their end. Where none did, those that
        were cut short, as what a week has measured is worth more than nothing."""
        whole = tuple(rep for rep in self.repetitions if rep.complete)
        return whole or tuple(rep for rep in self.repetitions if rep.readable)

    @property
    def cut(self) -> bool:
        """Whether the repetitions that count were cut short."""
        return any(rep.cuts for rep in self.complete)

    @property
    def text(self) -> str:
        """The strategy with its settings, in the words of whoever ran it."""
        for repetition in self.repetitions:
            for record in repetition.ranks:
                return record.strategy
        inner = ", ".join(f"{name}={value}" for name, value in self.settings.items())
        return f"{self.strategy}({inner})" if inner else self.strategy


@dataclass(frozen=True)
class Run:
    """A run directory that was read; at least `skip` iterations are left out of every measured time
    (`skipped`).

    `probed` compares what was asked of the links with what was measured before the run; `changed`
    is what the lab changed while ranks ran. `given` describes a profile that was given instead of
    measured: its file, and the quantities that were computed for this cluster. `profile_load` was
    the machine's load beside the measuring of the profile. `notes` name what the user wrote and
    what was not used. `seeds` holds the seed of every repetition. `device`
    describes the user's device, with the predicted seconds per iteration there by label.
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
    skip: int = 0
    profile: Profile | None = None
    profile_load: Mapping[str, Any] | None = None
    problems: tuple[str, ...] = ()
    given: Mapping[str, Any] | None = None
    notes: tuple[str, ...] = ()
    seeds: tuple[int, ...] = ()
    device: Mapping[str, Any] | None = None

    @property
    def profile_disturbed(self) -> Disturbance | None:
        """Why the profile, if it was measured for this run, is not a measurement."""
        return disturbance_of(0, self.profile_load, {})

    @property
    def world_size(self) -> int:
        """Number of ranks: from the profile, the cluster, or the records that exist."""
        return _world_size(self.profile, self.cluster) or max(
            (record.rank + 1 for _, _, record in self.records()), default=0
        )

    @property
    def command_line(self) -> tuple[str, ...]:
        """The command and, unless it contains them, the script and its arguments."""
        size = len(self.script)
        places = range(len(self.command) - size + 1)
        if size and any(self.command[i : i + size] == self.script for i in places):
            return self.command
        return (*self.command, *self.script)

    def records(self) -> Iterator[tuple[Contestant, Repetition, RankRecord]]:
        """Every record of every rank."""
        for contestant in self.contestants:
            for repetition in contestant.repetitions:
                for record in repetition.ranks:
                    yield contestant, repetition, record

    def failures(self) -> list[str]:
        """Everything that could not be read or did not finish, each with its place."""
        said = list(self.problems)
        for contestant in self.contestants:
            said += [f"{contestant.label}: {problem}" for problem in contestant.problems]
            for rep in contestant.repetitions:
                where = f"{contestant.label}, repetition {rep.index}"
                said += [f"{where}: {words}" for words in (*rep.problems, *rep.cuts)]
        return said


def count_skipped(run: Run, rep: Repetition) -> int:
    """Return how many iterations at the beginning of a repetition's trace no measured time
    includes: whole periods of its plan if a whole one remains after them."""
    trace, before = rep.trace, rep.observed - rep.trace.first
    return max(0, whole_periods(run.skip, trace.period, trace.iterations - before) + before)


def load(run_dir: str | Path) -> Run:
    """Read a run directory; what is missing or broken becomes a problem of its repetition.

    Raises ValueError without a readable run.json, or when it has another schema.
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
        command=tuple(map(str, data.get("command", ()))),
        script=tuple(map(str, data.get("script", ()))),
        cluster=data.get("cluster") or {},
        probed=tuple(data.get("probed") or ()),
        changed=tuple(data.get("changed") or ()),
        lab=str(data.get("lab", "none")),
        note=data.get("note"),
        emulated=bool(data.get("emulated")) or _has_emulated_record(contestants),
        versions=data.get("versions") or {},
        seed=data.get("seed"),
        cpus=data.get("cpus"),
        started=str(data.get("started", "")),
        repetitions=repetitions,
        target_loss=data.get("target_loss"),
        skip=int(data.get("skip", 0)),
        profile=profile,
        profile_load=load_in(path / PROFILING),
        problems=problems,
        given=data.get("profile"),
        notes=tuple(map(str, data.get("notes") or ())),
        seeds=tuple(map(int, data.get("seeds") or ())),
        device=data.get("device"),
    )


def _read_run_json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads((path / "run.json").read_text())
    except FileNotFoundError:
        raise ValueError(
            f"run directory ({path}) must hold run.json; `offbeat compare` writes it"
        ) from None
    except ValueError as error:
        raise ValueError(f"{path / 'run.json'} is not JSON: {error}") from None
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        found = data.get("schema") if isinstance(data, dict) else None
        raise ValueError(
            f"schema ({found!r}) of {path / 'run.json'} must be {SCHEMA}; "
            "run `offbeat compare` again with this version"
        )
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
    plan, plan_problems = _load_optional(folder / "plan.json", Plan.from_dict)
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
    )


def load_repetition(folder: Path, index: int) -> Repetition:
    """Read the folder of one repetition."""
    records, problems = [], []
    for file in records_in(folder):
        record, failed = _load_optional(file, _record_from_dict, read)
        problems += failed
        if record is not None:
            records.append(record)
    records.sort(key=lambda record: record.rank)
    cuts = [f"the record of rank {record.rank} {record.cut}" for record in records if record.cut]
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
    """Return the machine's load beside a launch, from its folder; None if it is not known."""
    return _load_optional(folder / LOAD, dict)[0]


def _truncate_losses(records: list[RankRecord]) -> list[RankRecord]:
    """With the losses of the iterations that all have: records that were cut end apart."""
    until = min((record.trace.iterations for record in records), default=0)
    return [
        replace(record, losses=tuple(loss for loss in record.losses if loss[0] < until))
        for record in records
    ]


def _with_missing_ranks(rep: Repetition, folder: Path, expected: int) -> Repetition:
    """The repetition with its missing ranks as problems, and what those ranks said last."""
    folder = folder / f"rep{rep.index}"
    if not folder.is_dir():
        return Repetition(rep.index, (), ("was not run",))
    absent = [r for r in range(expected) if r not in {record.rank for record in rep.ranks}]
    known = {path.stem for path in records_in(folder)}
    gone = [r for r in absent if f"rank{r}" not in known]
    problems = list(rep.problems)
    if gone:
        names = ", ".join(map(str, gone))
        problems.append(f"rank{'s' if len(gone) > 1 else ''} {names} of {expected} left no record")
    tails = {r: tail for r in absent if (tail := _log_tail(folder / f"rank{r}.log"))}
    return replace(rep, problems=tuple(problems), log_tails=tails)


def _record_from_dict(data: Mapping[str, Any]) -> RankRecord:
    _require_schema(data)
    trace = Trace.from_dict(data["trace"])
    if trace.world_size != 1:
        raise ValueError(f"trace has {trace.world_size} rows of ends_s, must have its own only")
    return RankRecord(
        rank=int(data["rank"]),
        strategy=str(data["strategy"]),
        trace=trace,
        losses=tuple((int(i), float(s), _parse_loss(x)) for i, s, x in data.get("losses", ())),
        sent_bytes={str(link): int(n) for link, n in data.get("bytes", {}).items()},
        observed=int(data.get("observed", 0)),
        without_update=tuple(map(int, data.get("without_update", ()))),
        emulated=bool(data.get("emulated", False)),
        pace=data.get("pace"),
        sample=data.get("sample"),
        warnings=tuple(map(str, data.get("warnings", ()))),
        checks=tuple(map(str, data.get("checks", ()))),
        decisions=tuple(data.get("decisions") or ()),
        votes=data.get("votes") or {},
        losses_of=int(data.get("losses_of", 1)),
        cut=data.get("cut") or "",
    )


def _predicted_from_dict(data: Mapping[str, Any]) -> Trace:
    """A trace; `iteration_s`, `bound_s`, `exposed_s` beside its fields are notes as well."""
    fields = ("iteration_s", "bound_s", "exposed_s")
    beside = {name: data[name] for name in fields if name in data}
    rest = {name: value for name, value in data.items() if name not in fields}
    return Trace.from_dict({**rest, "notes": {**data.get("notes", {}), **beside}})


def _require_schema(data: Mapping[str, Any]) -> None:
    if data.get("schema") != SCHEMA:
        raise ValueError(f"schema ({data.get('schema')!r}) must be {SCHEMA}")


def _read_json(file: Path) -> Any:
    return json.loads(file.read_text())


def _load_optional(file: Path, build: Any, load: Any = _read_json) -> tuple[Any, tuple[str, ...]]:
    """(object, no problems), or (None, why not); a file that does not exist is no problem."""
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


def _parse_loss(value: Any) -> float:
    """A loss; null, which is how strict JSON writes it, is not a number."""
    return float("nan") if value is None else float(value)


def _log_tail(log: Path) -> str:
    try:
        lines = log.read_text(errors="replace").splitlines()
    except OSError:
        return ""
    return "\n".join(lines[-LOG_TAIL_LINES:])


def _world_size(profile: Profile | None, cluster: Mapping[str, Any]) -> int:
    """Number of ranks that there should be, 0 if nobody says so."""
    if profile is not None:
        return profile.world_size
    hosts = cluster.get("hosts", 0)
    count = hosts if isinstance(hosts, int) else len(hosts)
    return count * int(cluster.get("processes_per_host", 1))


def _has_emulated_record(contestants: list[Contestant]) -> bool:
    return any(r.emulated for c in contestants for rep in c.repetitions for r in rep.ranks)
