"""Comparison of strategies: launches of all contestants in turns, predictions and the report."""

from __future__ import annotations

import errno
import json
import os
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from offbeat.core import sim
from offbeat.core.files import replace_text, write_text
from offbeat.core.measuring.processors import processors
from offbeat.core.plan import Plan
from offbeat.core.profile import Profile
from offbeat.core.profile.device_speed import Compute, DeviceSpeed
from offbeat.core.runtime.launch_request import SCHEMA as JOB_SCHEMA
from offbeat.core.runtime.launch_request import STRATEGY_VARIABLE
from offbeat.core.runtime.named_strategy import NamedStrategy
from offbeat.core.sim import Votes
from offbeat.core.sim.trace import whole_periods
from offbeat.core.strategy.registry import reference_of
from offbeat.core.transport.addresses import require_interfaces
from offbeat.core.transport.interfaces import parse_link
from offbeat.experiments import report
from offbeat.experiments.profile_for_network import (
    ConvertedProfile,
    compute_for,
    replicas_of,
    with_network,
)
from offbeat.experiments.progress import Count, Progress
from offbeat.experiments.record import record_file as blocks
from offbeat.experiments.record.disturbed import disturbance_of
from offbeat.experiments.record.record_file import records_in
from offbeat.experiments.record.run_directory import (
    BEFORE,
    LOAD,
    PROBLEM,
    PROFILING,
    SCHEMA,
    Repetition,
    load_in,
    load_repetition,
)
from offbeat.experiments.script import require_runnable, script_name
from offbeat.jobs.verdict_file import VARIABLE as VERDICT_VARIABLE
from offbeat.jobs.verdict_file import VERDICT_FILE, read_verdict
from offbeat.jobs.words import count_text, duration
from offbeat.lab import Cluster, Lab, LabError, NoLab, launch
from offbeat.lab import probe_report as asked
from offbeat.lab.machine_load import LoadSampler
from offbeat.strategies import BSP, Strategy

SKIP = 2  # first iterations of a repetition that are not measured; rounded up to whole periods
WAIT_S = 120.0
# fields of run.json that are equal in an interrupted run and in the one that resumes it
SETTINGS_OF_A_RUN = (
    *("script", "contestants", "seeds", "repetitions", "cluster", "lab", "links", "servers"),
    *("target_loss", "target", "options"),
)
NO_LIMIT_S = 7 * 24 * 3600.0

MUST_PREPARE = "it must call offbeat.prepare(model, optimizer) and train some iterations"


@dataclass(frozen=True)
class Contestant:
    """One strategy of a comparison.

    Attributes:
        label: name of its directory and of its row in the report.
        strategy: the strategy.
        arguments: arguments of the script for this strategy alone, after those for all.
    """

    label: str
    strategy: Strategy
    arguments: tuple[str, ...] = ()


@dataclass(frozen=True)
class Setup:
    """A script and the cluster that runs it.

    Attributes:
        script: script or module with its arguments.
        cluster: hosts and links.
        shaped: whether the lab shapes the links to the cluster's rates. If False, all ranks use
            the loopback interface.
        seed: seed of the first repetition.
        timeout_s: seconds after which a launch is stopped.
        wait_s: seconds that a rank waits at most for another rank.
        links: links for `offbeat.prepare`, in place of the cluster's; empty in the lab.
        pace: hosts compute at 1/pace of this machine's core. With "auto" the pace is the smallest
            at which this machine can emulate all hosts at once. With "none" hosts compute at full
            speed. With None the pace is that of the given profile; without a given profile it is
            "auto" in the lab if hosts differ in speed or ranks outnumber processors, else "none".
        servers: number of ranks, the last ones of the cluster, that only serve under strategies
            with servers.
        min_bucket_bytes: `min_bucket_bytes` of `offbeat.prepare`, in place of the script's.
    """

    script: tuple[str, ...]
    cluster: Cluster
    shaped: bool = True
    seed: int = 0
    timeout_s: float = NO_LIMIT_S
    wait_s: float = WAIT_S
    links: tuple[str, ...] = ()
    pace: float | Literal["auto", "none"] | None = None
    servers: int = 0
    min_bucket_bytes: int | None = None

    def __post_init__(self) -> None:
        if isinstance(self.pace, (int, float)) and not 1 <= self.pace < float("inf"):
            raise ValueError(
                f"pace ({self.pace:g}) must be at least 1: a host cannot be faster than this "
                "machine; give a larger one, auto or none"
            )
        if self.uneven and (self.pace == "none" or (self.pace is None and not self.shaped)):
            raise ValueError(
                "speed and jitter of hosts need a pace, by which they are emulated; leave --pace "
                "none out, or give --pace auto on the loopback"
            )
        require_runnable(self.script)
        if self.links and self.shaped:
            raise ValueError(
                f"links ({', '.join(self.links)}) must be left to the cluster's description in the "
                "lab; put them into the cluster file, or add --lab none"
            )
        interfaces = (parse_link(link).interface for link in self.links)
        require_interfaces("--links", (name for name in interfaces if name))
        if not 0 <= self.servers < self.cluster.world_size:
            raise ValueError(
                f"servers ({self.servers}) must be below the number of ranks "
                f"({self.cluster.world_size}), so that a rank trains; add hosts"
            )
        for name in ("timeout_s", "wait_s"):
            if not 0 < getattr(self, name) <= NO_LIMIT_S:
                raise ValueError(
                    f"{name} ({getattr(self, name)}) must be above 0 and at most {NO_LIMIT_S:.0f} s"
                )

    @property
    def uneven(self) -> bool:
        """Whether the hosts differ in speed or have jitter."""
        hosts = range(self.cluster.hosts)
        return any(self.cluster.speed_of(h) != 1 or self.cluster.jitter_of(h) for h in hosts)

    @property
    def measured_pace(self) -> float | Literal["auto"] | None:
        """Pace at which a profile is measured; None for full speed."""
        if self.pace is None:
            crowded = self.workers > processors()
            return "auto" if self.shaped and (crowded or self.uneven) else None
        return None if self.pace == "none" else self.pace

    @property
    def workers(self) -> int:
        """Number of ranks that train."""
        return self.cluster.world_size - self.servers

    @property
    def replicas(self) -> int:
        """Number of replicas that train."""
        return replicas_of(self.cluster, self.workers)

    def lab(self) -> Lab | NoLab:
        """Return the lab. Entering it raises LabError if this machine has no support."""
        return Lab(self.cluster, "offbeat") if self.shaped else NoLab(self.cluster)


@dataclass(frozen=True)
class CheckpointOptions:
    """Checkpoints of a run.

    Attributes:
        folder: folder of the checkpoints.
        every: iterations between two checkpoints; None saves none.
        resume: whether the run continues from the newest checkpoint in `folder`.
    """

    folder: Path
    every: int | None = None
    resume: bool = False

    def __post_init__(self) -> None:
        if self.every is not None and self.every < 1:
            raise ValueError(f"every ({self.every}) must be at least 1 iteration")
        if self.every is None and not self.resume:
            raise ValueError(
                f"checkpoint ({self.folder}) needs --every N to be saved, --resume to go on from, "
                "or both"
            )

    @property
    def job(self) -> dict[str, Any]:
        """Fields of the runtime's job file."""
        return {
            "checkpoint": str(self.folder.absolute()),
            "checkpoint_every": self.every,
            "resume": self.resume,
        }


@dataclass(frozen=True)
class Comparison:
    """Definition of a comparison.

    Attributes:
        setup: script and cluster.
        contestants: strategies to run in turns; None runs the strategy that the script names.
        repetitions: number of repetitions of each contestant.
        target_loss: training loss to which the time is measured.
        profile: file of the profile; None measures the profile first.
        command: command line of the user.
        keeping: checkpoints, for a single contestant.
        repeat_disturbed: whether a disturbed repetition or profile is measured once more.
        notes: remarks that are recorded and printed with the result.
        device: the user's device, on which each contestant is predicted as well.
        target: name and value of a reported metric that replaces the training loss as the target.
        given_seeds: seed of each repetition; empty: those from the setup's seed on.
    """

    setup: Setup
    contestants: tuple[Contestant, ...] | None
    repetitions: int = 1
    target_loss: float | None = None
    profile: Path | None = None
    command: tuple[str, ...] = ()
    keeping: CheckpointOptions | None = None
    repeat_disturbed: bool = False
    notes: tuple[str, ...] = ()
    device: DeviceSpeed | None = None
    given_seeds: tuple[int, ...] = ()
    target: tuple[str, float] | None = None

    def __post_init__(self) -> None:
        if self.repetitions < 1:
            raise ValueError(f"repetitions ({self.repetitions}) must be at least 1")
        if self.given_seeds and len(self.given_seeds) != self.repetitions:
            raise ValueError(
                f"given_seeds ({len(self.given_seeds)}) must be as many as repetitions "
                f"({self.repetitions})"
            )
        if self.contestants is None:
            return
        labels = [contestant.label for contestant in self.contestants]
        served = [c.label for c in self.contestants if c.strategy.needs.servers]
        if served and self.keeping is not None:
            raise ValueError(
                f"checkpoint ({self.keeping.folder}) is not for {served[0]}, whose parameters are "
                "on its servers; let them save their part with --set snapshot=DIRECTORY"
            )
        if served and not self.setup.servers:
            raise ValueError(
                f"servers (0) must be at least 1 for {served[0]}; add --servers 1, which are hosts "
                "beside those that train"
            )
        if self.setup.servers and not served:
            raise ValueError(
                f"servers ({self.setup.servers}) must be 0 unless a strategy has servers; leave "
                "--servers out, or choose one that has: ssp, ps-bsp"
            )
        if not labels:
            raise ValueError("contestants ([]) must not be empty; name a strategy")
        for label in labels:
            if labels.count(label) > 1:
                raise ValueError(
                    f"contestant ({label!r}) must be unique; change one of its settings"
                )

    @property
    def seeds(self) -> tuple[int, ...]:
        """Seed of each repetition; equal for all contestants."""
        if self.given_seeds:
            return self.given_seeds
        return tuple(self.setup.seed + repetition for repetition in range(self.repetitions))


@dataclass
class Outcome:
    """Result of a comparison. Measurements are in `run_dir`.

    Attributes:
        run_dir: run directory.
        failures: messages of the failures, in order.
        interrupted: whether Ctrl-C ended the comparison.
        measured: number of repetitions without failure.
        report: path of the HTML page; None without a record.
        changed: changes of the network that the lab made, with their times.
        contestants: the strategies that ran.
        notes: remarks to print with the result.
        device: the user's device, with predicted seconds per iteration by label.
    """

    run_dir: Path
    failures: list[str] = field(default_factory=list)
    interrupted: bool = False
    measured: int = 0
    report: Path | None = None
    changed: list[dict[str, Any]] = field(default_factory=list)
    contestants: tuple[Contestant, ...] = ()
    notes: list[str] = field(default_factory=list)
    device: dict[str, Any] | None = None


def default_run_dir(script: str) -> Path:
    """Return runs/<UTC time>-<script's stem or module>, a path that does not exist yet."""
    stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    name = Path(script).name
    base = Path("runs") / f"{stamp}-{name.removesuffix('.py')}"
    names = [base, *(base.with_name(f"{base.name}-{n}") for n in range(2, 1000))]
    return next(path for path in names if not path.exists())


def compare(
    comparison: Comparison,
    run_dir: Path,
    progress: Progress | None = None,
    *,
    resume: bool = False,
) -> Outcome:
    """Run all contestants in turns and write the run directory with its report.

    With `resume`, `run_dir` holds an interrupted run of the same comparison. Its complete
    repetitions are kept and all others run.

    The failure of a contestant is added to `Outcome.failures`. Ctrl-C ends the comparison early.
    Measurements made before a failure or Ctrl-C are kept.

    Raises:
        ValueError: the run directory is not empty, or with `resume` it is of another comparison, or
            the profile does not fit the cluster.
        LabError: this machine cannot run the lab.
    """
    progress = progress or Progress()
    before = _read_record(run_dir) if resume else {}
    if not resume:
        _require_unused_directory(run_dir)
    verdict = os.environ.get(VERDICT_VARIABLE)
    kept = read_verdict(verdict) if verdict else None
    path = comparison.profile
    given = None if path is None else given_profile(comparison.setup, path)
    with comparison.setup.lab() as lab:
        outcome = Outcome(run_dir, notes=list(comparison.notes))
        run = _ComparisonRun(comparison, lab, outcome, progress)
        record = _describe_run(comparison, lab) | {"probed": run.probe_links()}
        record["profile"] = None if given is None else given.record()
        known = run_dir / "profile.json"
        if resume:
            _require_same(record, before, run_dir)
            outcome.notes += _changed_limits(record, before)
            record["started"] = before["started"]
            outcome.changed = list(before.get("changed", ()))
            if known.exists():
                _require_same_profile(given, known)
                record["profile"] = before.get("profile")
        run_dir.mkdir(parents=True, exist_ok=True)
        _write_json(run_dir / "run.json", record)
        if kept is not None:
            _write_json(run_dir / VERDICT_FILE, kept)
        for note in outcome.notes:
            progress.print_error(f"note: {note}")
        if lab.note:
            progress.print_line(lab.note)
        progress.print_line(f"what the script prints goes to {logs_of(comparison, run_dir)}")
        try:
            if given is not None:
                progress.print_line(given.text)
            if resume and known.exists():
                run.run_contestants(Profile.load(known))
            else:
                run.run_contestants(given and given.profile)
        except KeyboardInterrupt:
            outcome.interrupted = True
        except LabError as error:
            run.report_failure(f"the lab: {error}")
        except OSError as error:
            run.report_failure(f"{_file_error(error)}; what was measured is kept in {run_dir}")
    try:
        _write_result(record, outcome)
    except OSError as error:
        again = f"then write the report with `offbeat report {run_dir}`"
        run.report_failure(f"{_file_error(error)}, {again}")
    return outcome


def _write_result(record: dict[str, Any], outcome: Outcome) -> None:
    """Write run.json again and, if anything was measured, the report."""
    run_dir = outcome.run_dir
    record["interrupted"] = outcome.interrupted
    if outcome.measured or any(map(records_in, run_dir.glob("*/rep*"))):
        record |= {"emulated": _has_emulated_record(run_dir), "changed": outcome.changed}
        record |= {"contestants": _contestant_entries(outcome.contestants), "notes": outcome.notes}
        record["device"] = outcome.device
        _write_json(run_dir / "run.json", record)
        outcome.report = report.write(run_dir)
    else:
        _write_json(run_dir / "run.json", record)


def _file_error(error: OSError) -> str:
    """Return a message that names the file and the remedy."""
    what = f"{error.filename or 'a file of the run'} cannot be written: {error.strerror or error}"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"{what}; make room on that disk, or give --out a folder on another one"
    return f"{what}; check the path and its permissions"


def given_profile(setup: Setup, path: Path) -> ConvertedProfile:
    """Read a profile and convert it to the cluster of a setup; see `compute_for`."""
    return compute_for(
        Profile.load(path),
        setup.cluster,
        setup.workers,
        shaped=setup.shaped,
        pace=setup.pace,
        file=str(path),
    )


def logs_of(comparison: Comparison, run_dir: Path) -> str:
    """Return the path pattern of the log files, one file per rank."""
    labels = comparison.contestants or ()
    contestant = labels[0].label if len(labels) == 1 else "STRATEGY"
    repetition = "rep0" if comparison.repetitions == 1 else "repN"
    return str(run_dir / contestant / repetition / "rankR.log")


def measure_profile(setup: Setup, path: Path, progress: Progress | None = None) -> Outcome:
    """Run the script until its profile is measured and write the profile to `path`.

    The logs in `Outcome.run_dir` are deleted unless the measurement failed. Raises LabError if this
    machine cannot run the lab.
    """
    progress = progress or Progress()
    outcome = Outcome(Path(tempfile.mkdtemp(prefix="offbeat-profile-")))
    progress.print_line(
        f"what the script prints goes to {outcome.run_dir / 'rankR.log'}, which stays if it fails"
    )
    try:
        with setup.lab() as lab:
            launcher = _Launcher(setup, lab, outcome, progress)
            launcher.probe_links()
            outcome.measured = launcher.measure(path, outcome.run_dir)
    except KeyboardInterrupt:
        outcome.interrupted = True
    finally:
        if not outcome.failures:
            shutil.rmtree(outcome.run_dir)
    return outcome


def predict(
    strategy: Strategy,
    profile: Profile,
    directory: Path,
    plan: Plan | None = None,
    votes: Votes | None = None,
    servers: int = 0,
) -> float:
    """Write plan.json and predicted.json of a contestant.

    Args:
        strategy: the contestant's strategy.
        profile: profile of the model and its network.
        directory: folder of the contestant.
        plan: the executed plan; None plans anew. Strategies with servers and gossip have no plan.
        votes: outcomes of the strategy's votes, by name; None predicts a yes in each vote.
        servers: number of servers.

    Returns:
        Predicted seconds per iteration.

    Raises:
        ValueError: the strategy has no plan for this profile.
    """
    skip = 0
    if strategy.needs.profile:
        plan = plan or strategy.plan(profile)
        if known := [len(v) for v in (votes or {}).values() if not isinstance(v, (int, float))]:
            skip = whole_periods(SKIP, plan.period, min(known))
    prediction = sim.predict(strategy, profile, servers=servers, votes=votes, skip=skip, ran=plan)
    directory.mkdir(parents=True, exist_ok=True)
    if plan is not None:
        _write_json(directory / "plan.json", plan.to_dict())
    prediction.trace.save(directory / "predicted.json")
    return prediction.iteration_s


# --- launches ------------------------------------------------------------------------------------


class _Launcher:
    """Launches of a setup in a running lab. Failures are added to `outcome`."""

    def __init__(
        self, setup: Setup, lab: Lab | NoLab, outcome: Outcome, progress: Progress
    ) -> None:
        self.setup, self.lab, self.outcome, self.progress = setup, lab, outcome, progress

    def report_failure(self, words: str) -> None:
        self.outcome.failures.append(words)
        self.progress.print_error(words)

    def probe_links(self) -> list[dict[str, Any]]:
        """Measure the links, and print the values; LabError on a slow machine."""
        found = self.lab.probe()
        for line in asked.lines(found):
            self.progress.print_line(line)
        records = [measured.record() for measured in found if measured.has_values]
        carried = self.lab.verify()
        if carried is None:
            return records
        self.progress.print_line(carried.text)
        return [*records, carried.record()]

    def measure(
        self, path: Path, logs: Path, *, again: bool = False, least_buckets: int = 1
    ) -> bool:
        """Run the script until its profile is measured and saved to `path`.

        With `again`, a disturbed profile is measured once more. Report a failure and return False.
        """
        setup = self.setup
        draft = logs / "profile.json"  # becomes the profile only if the launch succeeds
        problem, _ = self.launch(
            "measuring the profile",
            logs,
            BSP(),
            save_profile=str(draft.absolute()),
            save_strategy=str((logs / "strategy.json").absolute()),
            stop_after_profile=True,
            least_buckets=least_buckets,
            pace=setup.measured_pace,
            turns=str((logs / "turns").absolute()) if setup.measured_pace else None,
        )
        if problem is None and not draft.exists():
            script = script_name(setup.script)
            problem = f"{script} ended before a profile was measured; {MUST_PREPARE}"
        if problem is not None:
            self.report_failure(f"measuring the profile: {problem}")
            return False
        profile = Profile.load(draft)
        profile = with_network(profile, setup.cluster, setup.workers) if setup.shaped else profile
        profile.save(path)
        if disturbance := disturbance_of(0, load_in(logs), {}):
            once_more = "; it is measured once more" if again else ""
            self.progress.print_line(f"the profile was disturbed: {disturbance.text}{once_more}")
            if again:
                logs.rename(logs.with_name(BEFORE + logs.name))
                return self.measure(path, logs, least_buckets=least_buckets)
        return True

    def launch(
        self,
        step: str,
        directory: Path,
        strategy: Strategy | None = None,
        *,
        arguments: tuple[str, ...] = (),
        seed: int | None = None,
        count: Count | None = None,
        **rest: Any,
    ) -> tuple[str | None, list[dict[str, Any]]]:
        """Launch all ranks of a job.

        The lab makes no changes while a profile is measured, as the profile describes the initial
        cluster.

        Args:
            step: name of the step for the display.
            directory: folder of the logs and of the job file.
            strategy: strategy of the job; None leaves it to the script.
            arguments: further arguments of the script.
            seed: seed of the script; None: that of the setup.
            count: returns the number of finished iterations.
            rest: other fields of the job file.

        Returns:
            (problem, changes): a message, None if all ranks succeeded, and the lab's changes.
        """
        setup = self.setup
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / "job.json"
        job = _job(setup, strategy, **rest)
        _write_json(path, job)
        seed = setup.seed if seed is None else seed
        env = {"OFFBEAT_JOB": str(path.absolute()), "OFFBEAT_SEED": str(seed)}
        if setup.links:
            env["OFFBEAT_LINKS"] = ",".join(setup.links)
        with (
            self.progress.step(step, count) as on_line,
            LoadSampler(self.lab.process.pid) as sampler,
        ):
            result = launch(
                self.lab,
                [sys.executable, *setup.script, *arguments],
                env=env,
                log_dir=directory,
                timeout_s=setup.timeout_s,
                on_line=lambda rank, line: on_line(line) if rank == 0 else None,
                changes=not (job["stop_after_profile"] or job.get("stop_after_strategy")),
                workers=setup.workers,
                servers=setup.servers if strategy and strategy.needs.servers else 0,
                survive=bool(strategy and strategy.needs.survives_ranks),
            )
        if (load := sampler.load()) is not None:
            _write_json(directory / LOAD, load.record())
        changes = setup.cluster.changes
        return result.problem, [
            {"at_s": at_s, "change": changes[number].text} for at_s, number in result.changes
        ]


def _job(setup: Setup, strategy: Strategy | None, **rest: Any) -> dict[str, Any]:
    """Return the job file of the runtime; see `offbeat.core.runtime.launch_request`."""
    if strategy and strategy.needs.script:
        strategy = None  # the script passes it to `prepare`
    job = {
        "schema": JOB_SCHEMA,
        "strategy": strategy and reference_of(strategy),
        "settings": strategy.settings() if strategy else {},
        "profile": None,
        "save_profile": None,
        "stop_after_profile": False,
        "min_bucket_bytes": setup.min_bucket_bytes,
        "record_dir": None,
        "timeout_s": setup.wait_s,
        "pace": None,
        "turns": None,
    }
    return job | rest


# --- steps of a comparison -----------------------------------------------------------------------


class _ComparisonRun(_Launcher):
    """Steps of a comparison in a running lab."""

    def __init__(
        self, comparison: Comparison, lab: Lab | NoLab, outcome: Outcome, progress: Progress
    ) -> None:
        super().__init__(comparison.setup, lab, outcome, progress)
        self.comparison, self.run_dir = comparison, outcome.run_dir
        self._predicted_s: dict[str, float] = {}  # per iteration, by label

    def run_contestants(self, given: Profile | None) -> None:
        """Measure the profile unless it is given; predict all contestants and run them in turns."""
        comparison, outcome = self.comparison, self.outcome
        path = self.run_dir / "profile.json"
        if given is not None:
            given.save(path)
        else:
            shutil.rmtree(self.run_dir / PROFILING, ignore_errors=True)  # of an interrupted run
            replicas = self.setup.replicas
            counts = [c.strategy.least_buckets(replicas) for c in comparison.contestants or ()]
            if not self.measure(
                path,
                self.run_dir / PROFILING,
                again=comparison.repeat_disturbed,
                least_buckets=max(counts, default=1),
            ):
                return
        profile = Profile.load(path)
        if profile.pace:
            busy = min(1.0, profile.ranks / processors() / profile.pace)
            self.progress.print_line(
                f"emulated: each host computes at 1/{profile.pace:g} of this machine's core, which "
                f"is {100 * busy:.0f} % busy with it"
            )
        outcome.contestants = self._contestants()
        self._note_unused_strategy()
        ready = [c for c in outcome.contestants if self._predict(c, profile)]
        if comparison.device is not None:
            outcome.device = _device_record(ready, comparison.device, profile, self.setup.servers)
        turns = [(c, repetition) for repetition in range(comparison.repetitions) for c in ready]
        for number, (contestant, repetition) in enumerate(turns):
            begin_s = time.monotonic()
            self._run_repetition(contestant, repetition)
            labels = [turn[0].label for turn in turns]
            if number == 0 and (
                text := remaining_text(labels, self._predicted_s, time.monotonic() - begin_s)
            ):
                self.progress.print_line(text)
        if given is not None:  # the first launch has written the strategy that the script names
            self._note_unused_strategy()
        for contestant in ready:
            self._adopt_executed_plan(contestant, profile)

    def _contestants(self) -> tuple[Contestant, ...]:
        """Return the contestants, or the strategy that the script names; empty on failure."""
        if self.comparison.contestants is not None:
            return self.comparison.contestants
        path = _named_path(self.run_dir)
        step = "reading the strategy of the script"
        if not path.exists():  # the profile was given
            wanted = {"save_strategy": str(path.absolute()), "stop_after_strategy": True}
            problem, _ = self.launch(step, path.parent, **wanted)
            if problem is not None:
                self.report_failure(f"{step}: {problem}")
                return ()
        named = NamedStrategy.load(path)
        try:
            if named is None:
                raise ValueError(f"{script_name(self.setup.script)} names none; {MUST_PREPARE}")
            chosen = (Contestant(named.strategy.name, named.strategy),)
            replace(self.comparison, contestants=chosen)  # checks servers and checkpoints
        except ValueError as error:
            self.report_failure(str(error))
            return ()
        origin = "the default" if named.text is None else "as the script names it"
        if os.environ.get(STRATEGY_VARIABLE):
            origin = f"as {STRATEGY_VARIABLE} names it"
        self.progress.print_line(f"strategy: {named.strategy}, {origin}")
        return chosen

    def _note_unused_strategy(self) -> None:
        """Add a note if the script names a strategy that is not among the contestants."""
        named = NamedStrategy.load(_named_path(self.run_dir))
        if named is None or named.text is None:
            return
        ran = [str(contestant.strategy) for contestant in self.outcome.contestants]
        if ran and named.text not in ran:
            used = ", ".join(ran)
            note = f"{named.text}, which the script names, is not used; {used} runs instead"
            self.outcome.notes.append(note)
            self.progress.print_error(f"note: {note}")

    def _predict(self, contestant: Contestant, profile: Profile) -> bool:
        """Predict one contestant. Report a failure and return False without a plan."""
        label, strategy = contestant.label, contestant.strategy
        if strategy.needs.script:
            self.progress.print_line(f"{label}: predicted after its run, from the plan that runs")
            return True
        servers = self.setup.servers
        try:
            seconds = predict(strategy, profile, self.run_dir / label, servers=servers)
        except ValueError as error:
            self.report_failure(f"{label}: {error}")
            return False
        self._predicted_s[label] = seconds
        if_yes = " if every vote is a yes" if strategy.vote_names(profile) else ""
        self.progress.print_line(f"{label}: predicted {seconds:.4g} s per iteration{if_yes}")
        return True

    def _run_repetition(self, contestant: Contestant, repetition: int) -> None:
        """Run one repetition; with `repeat_disturbed`, run a disturbed one once more."""
        outcome = self.outcome
        directory = self.run_dir / contestant.label / f"rep{repetition}"
        if self._is_measured(directory, repetition):
            outcome.measured += 1
            what = self._describe(contestant, repetition)
            self.progress.print_line(f"{what}: kept, as it is complete")
            return
        changed = list(outcome.changed)
        rep = self._launch_repetition(contestant, repetition)
        if rep is None:
            return
        outcome.measured += 1
        if (disturbance := rep.disturbance) is None:
            return
        again = "; it is repeated once" if self.comparison.repeat_disturbed else ""
        what = self._describe(contestant, repetition)
        self.progress.print_line(f"{what} was disturbed: {disturbance.text}{again}")
        if not self.comparison.repeat_disturbed:
            return
        kept = directory.with_name(BEFORE + directory.name)
        directory.rename(kept)
        outcome.changed, before = changed, outcome.changed
        try:
            if self._launch_repetition(contestant, repetition) is None:
                outcome.measured -= 1
        except KeyboardInterrupt:
            shutil.rmtree(directory, ignore_errors=True)
            kept.rename(directory)
            outcome.changed = before
            raise

    def _is_measured(self, directory: Path, repetition: int) -> bool:
        """Whether an interrupted run has left a complete repetition; delete an incomplete one."""
        if directory.is_dir():
            rep = load_repetition(directory, repetition)
            if rep.complete and len(rep.ranks) >= self.setup.workers:
                return True
        for folder in (directory, directory.with_name(BEFORE + directory.name)):
            shutil.rmtree(folder, ignore_errors=True)
        name, changed = directory.parent.name, self.outcome.changed
        self.outcome.changed = [
            c for c in changed if (c["strategy"], c["repetition"]) != (name, repetition)
        ]
        return False

    def _describe(self, contestant: Contestant, repetition: int) -> str:
        count = self.comparison.repetitions
        return f"{contestant.label}, repetition {repetition + 1} of {count}"

    def _launch_repetition(self, contestant: Contestant, repetition: int) -> Repetition | None:
        """Launch one repetition and return its records. Report a failure and return None."""
        comparison, what = self.comparison, self._describe(contestant, repetition)
        directory = self.run_dir / contestant.label / f"rep{repetition}"
        path = self.run_dir / "profile.json"
        try:
            problem, changes = self.launch(
                what,
                directory,
                contestant.strategy,
                arguments=contestant.arguments,
                seed=comparison.seeds[repetition],
                count=partial(blocks.iterations_so_far, blocks.path_of(directory, 0)),
                profile=str(path.absolute()),
                pace=Profile.load(path).pace or None,
                record_dir=str(directory.absolute()),
                save_strategy=str(_named_path(self.run_dir).absolute()),
                **(comparison.keeping.job if comparison.keeping is not None else {}),
            )
        except KeyboardInterrupt:
            with suppress(OSError):
                write_text(directory / PROBLEM, "interrupted with Ctrl-C")
            raise
        where = {"strategy": contestant.label, "repetition": repetition}
        self.outcome.changed += [{**where, **change} for change in changes]
        if problem is None and not records_in(directory):
            script = script_name(self.setup.script)
            problem = f"{script} left no record in {directory}; {MUST_PREPARE}"
        if problem is None:
            rep = load_repetition(directory, repetition)
            self.progress.print_line(f"{what}: {_seconds_in_words(rep)}")
            return rep
        # The record up to the failure is kept; the report marks it as cut short.
        self.report_failure(f"{what}: {problem}")
        write_text(directory / PROBLEM, problem.partition("; the end of")[0])
        return None

    def _adopt_executed_plan(self, contestant: Contestant, profile: Profile) -> None:
        """Save the executed plan and its prediction with the recorded vote outcomes.

        They replace the expected plan and its prediction in the run directory.
        """
        directory, strategy = self.run_dir / contestant.label, contestant.strategy
        if not strategy.needs.profile:
            return
        ran = next(iter(sorted(directory.glob("rep*/plan.json"))), None)
        if ran is None:
            return
        plan, votes = Plan.from_dict(json.loads(ran.read_text())), _vote_outcomes(ran.parent)
        planned = directory / "plan.json"
        if not planned.exists():
            seconds = predict(strategy, profile, directory, plan, votes)
            self.progress.print_line(f"{contestant.label}: predicted {seconds:.4g} s per iteration")
            return
        expected = Plan.from_dict(json.loads(planned.read_text()))
        if votes or plan.digest != expected.digest:
            predict(strategy, profile, directory, plan, votes)


def remaining_text(labels: list[str], predicted_s: dict[str, float], first_s: float) -> str:
    """Return how long the runs after the first one take; empty below a minute.

    Args:
        labels: contestant of each run, in order.
        predicted_s: predicted seconds per iteration by label; unknown for some.
        first_s: seconds of the first run.
    """
    one_s = predicted_s.get(labels[0], 1.0)
    rest_s = sum(first_s * predicted_s.get(label, one_s) / one_s for label in labels[1:])
    if rest_s < 60:
        return ""
    return f"about {duration(rest_s)} for the other {count_text(len(labels) - 1, 'run')}"


def _device_record(
    contestants: Iterable[Contestant], device: DeviceSpeed, profile: Profile, servers: int
) -> dict[str, Any]:
    """Return the record of the user's device with predicted seconds per iteration by label.

    Each contestant is planned anew for the device. The prediction is None if there is no plan
    for the device.
    """
    there, seconds = device.apply(profile), dict[str, float | None]()
    for contestant in contestants:
        try:
            found = sim.predict(contestant.strategy, there, servers=max(servers, 1))
        except ValueError:
            seconds[contestant.label] = None
        else:
            seconds[contestant.label] = found.iteration_s
    return {**Compute.of(profile, device).record(), "seconds": seconds}


def _named_path(run_dir: Path) -> Path:
    """Return the file of the strategy that the script names."""
    measured = run_dir / PROFILING / "strategy.json"
    return measured if measured.exists() else run_dir / "reading" / "strategy.json"


def outcomes_of(record: dict[str, Any]) -> dict[str, list[bool]]:
    """Return the outcome of each vote in each iteration, by name of the vote, from a record."""
    by_vote = record.get("votes", {}).get("by_vote", {})
    return {name: [bool(yes) for yes in columns["yes"]] for name, columns in by_vote.items()}


def _vote_outcomes(repetition: Path) -> dict[str, list[bool]]:
    """Return the vote outcomes of a repetition from the record of rank 0."""
    records = records_in(repetition)
    with suppress(ValueError):  # killed before its first block
        return outcomes_of(blocks.read(records[0])) if records else {}
    return {}


# --- the run directory ---------------------------------------------------------------------------


def _require_unused_directory(run_dir: Path) -> None:
    if run_dir.exists() and (not run_dir.is_dir() or any(run_dir.iterdir())):
        raise ValueError(f"run directory ({run_dir}) must be new or empty; choose another --out")


def _read_record(run_dir: Path) -> dict[str, Any]:
    """Return run.json of an interrupted run."""
    path = run_dir / "run.json"
    if not path.is_file():
        raise ValueError(
            f"run directory ({run_dir}) must hold the run.json of an interrupted comparison; leave "
            "--resume out to begin one"
        )
    return json.loads(path.read_text())


def _require_same(record: dict[str, Any], before: dict[str, Any], run_dir: Path) -> None:
    """Raise ValueError unless two comparisons have the same settings."""
    now, was = map(_settings_in, (json.loads(json.dumps(record)), before))
    for name in now.keys() & was.keys():
        if now[name] != was[name]:
            raise ValueError(
                f"{name} ({json.dumps(now[name])}) must be that of {run_dir} "
                f"({json.dumps(was[name])}); repeat the command that began it and add --resume, or "
                "begin another run"
            )


def _settings_in(record: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a run by name. Runs of earlier versions lack some."""
    settings = {name: record[name] for name in SETTINGS_OF_A_RUN if name in record}
    return settings | settings.pop("options", {})


def _require_same_profile(given: ConvertedProfile | None, known: Path) -> None:
    """Raise ValueError unless the given profile is the one in the run directory."""
    if given is not None and given.profile.to_dict() != Profile.load(known).to_dict():
        raise ValueError(
            f"profile ({given.file}) must be {known}, from which the interrupted run was planned; "
            "leave --profile out, or begin another run"
        )


def _changed_limits(record: dict[str, Any], before: dict[str, Any]) -> list[str]:
    """Return a remark on each limit of time that differs from the interrupted run's."""
    was = before.get("limits", {})
    return [
        f"{name} is {_limit_text(now)}; it was {_limit_text(was[name])} in the repetitions that "
        "are kept"
        for name, now in record["limits"].items()
        if was.get(name, now) != now
    ]


def _limit_text(seconds: float) -> str:
    return "unlimited" if seconds == NO_LIMIT_S else f"{seconds:g} s"


def _describe_run(comparison: Comparison, lab: Lab | NoLab) -> dict[str, Any]:
    setup = comparison.setup
    return {
        "schema": SCHEMA,
        "command": list(comparison.command),
        "script": list(setup.script),
        "cluster": setup.cluster.record(),
        "links": list(setup.links),
        "servers": setup.servers,
        "lab": "netns" if setup.shaped else "none",
        "note": lab.note,
        "emulated": False,
        "versions": {
            "offbeat": metadata.version("offbeat"),
            "torch": _installed_version("torch"),
            "python": platform.python_version(),
            "kernel": platform.release(),
        },
        "cpus": os.cpu_count(),
        "congestion_control": lab.congestion_control,
        "seed": setup.seed,
        "seeds": list(comparison.seeds),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "contestants": _contestant_entries(comparison.contestants or ()),
        "repetitions": comparison.repetitions,
        "target_loss": comparison.target_loss,
        "target": comparison.target
        and dict(zip(("name", "value"), comparison.target, strict=True)),
        "skip": SKIP,
        "options": {
            "pace": setup.pace,
            "min_bucket_bytes": setup.min_bucket_bytes,
            "device_speed": comparison.device and asdict(comparison.device),
        },
        "limits": {"timeout_s": setup.timeout_s, "wait_s": setup.wait_s},
    }


def _contestant_entries(contestants: Iterable[Contestant]) -> list[dict[str, Any]]:
    return [
        {
            "label": c.label,
            "strategy": c.strategy.name,
            "settings": c.strategy.settings(),
            "arguments": list(c.arguments),
        }
        for c in contestants
    ]


def _installed_version(package: str) -> str | None:
    """Return the version of an installed package without importing it."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _has_emulated_record(run_dir: Path) -> bool:
    found = (record for folder in run_dir.glob("*/rep*") for record in records_in(folder))
    return any(blocks.first_block(record).get("emulated") for record in found)


def _seconds_in_words(rep: Repetition) -> str:
    """Return rank 0's seconds per iteration, for display; the report uses all ranks."""
    if not rep.ranks:
        return "; ".join(rep.problems)
    trace, observed = rep.ranks[0].trace, rep.ranks[0].observed
    skip = whole_periods(SKIP, trace.period, trace.iterations - observed)
    try:
        seconds = trace.iteration_s(observed + skip)
    except ValueError:
        return "too short for a whole period"
    return f"{seconds:.4g} s per iteration"


def _write_json(path: Path, data: dict[str, Any]) -> None:
    replace_text(path, json.dumps(data, indent=1))
