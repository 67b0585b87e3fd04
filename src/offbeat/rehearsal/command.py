"""Rehearsal of a script under several strategies, with the run directory of a comparison."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from offbeat.core.files import write_text
from offbeat.core.measuring.processors import processors
from offbeat.core.profile import Profile
from offbeat.core.profile.elsewhere import network_rate_bps
from offbeat.core.strategy.registry import reference_of
from offbeat.core.words import count_text, loss_text
from offbeat.experiments import report
from offbeat.experiments.comparison import Contestant, require_labels
from offbeat.experiments.new_run import (
    describe,
    read_record,
    require_same,
    require_unused_directory,
    write_json,
)
from offbeat.experiments.progress import Progress
from offbeat.experiments.record.record_file import records_in
from offbeat.experiments.record.run_directory import PROBLEM
from offbeat.experiments.report.headline import REHEARSED
from offbeat.experiments.script import require_runnable, script_name
from offbeat.rehearsal.child import COUNT, CURVE, Assignment
from offbeat.rehearsal.rehearse import RehearsedCurve, require_plan, require_whole_replicas

CHILD = "offbeat.rehearsal.child"
MEASURED = "measured.json"  # in the run directory
JOB, LOG = "job.json", "rehearsal.log"  # in the folder of a repetition
LOG_LINES = 3  # last lines of the log of a failed rehearsal that its problem states


@dataclass(frozen=True)
class ScriptRehearsal:
    """Definition of a rehearsal of a script.

    Attributes:
        script: script or module with its arguments.
        contestants: strategies to rehearse.
        profile: profile of the job, with its number of ranks, network and jitter.
        iterations: iterations after which the script is ended; None: at its own end.
        seeds: seed of each repetition.
        processes: number of strategies that are rehearsed at the same time.
        target_loss: training loss to which the time is counted.
        command: command line of the user.
        measured: profile from which the one of the job was computed, to resume with; None: the
            profile of the job.
    """

    script: tuple[str, ...]
    contestants: tuple[Contestant, ...]
    profile: Profile
    iterations: int | None = None
    seeds: tuple[int, ...] = (0,)
    processes: int = 1
    target_loss: float | None = None
    command: tuple[str, ...] = ()
    measured: Profile | None = None

    def __post_init__(self) -> None:
        require_runnable(self.script)
        require_labels(self.contestants)
        for contestant in self.contestants:
            reference_of(contestant.strategy)  # raises for a class of the script
            require_plan(contestant.strategy)
        require_whole_replicas(self.profile)


@dataclass
class RehearsalOutcome:
    """Result of a rehearsal of a script.

    Attributes:
        run_dir: run directory.
        curves: curves by label, one per seed in the order of the seeds.
        failures: messages of the failures, in order.
        interrupted: whether Ctrl-C ended the rehearsal.
        report: path of the HTML page; None without a curve.
    """

    run_dir: Path
    curves: dict[str, list[RehearsedCurve]] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    interrupted: bool = False
    report: Path | None = None


def rehearse_script(
    rehearsal: ScriptRehearsal,
    run_dir: Path,
    progress: Progress | None = None,
    *,
    resume: bool = False,
) -> RehearsalOutcome:
    """Rehearse a script under all contestants, and write the run directory with its report.

    Each contestant and seed runs in a process of its own. A failure is added to
    `RehearsalOutcome.failures`, and the other contestants go on. Ctrl-C ends the rehearsal early;
    complete curves are kept.

    Args:
        rehearsal: definition of the rehearsal.
        run_dir: new folder, or with `resume` the folder of an interrupted rehearsal.
        progress: display of the progress.
        resume: keep the complete curves in `run_dir`, and rehearse the missing ones.

    Raises:
        ValueError: the run directory is not empty, or with `resume` it is of another rehearsal.
    """
    progress, outcome = progress or Progress(), RehearsalOutcome(run_dir)
    record = _describe(rehearsal)
    if resume:
        _require_same(record, rehearsal.profile, run_dir)
    else:
        require_unused_directory(run_dir)
    run_dir.mkdir(parents=True, exist_ok=True)
    write_json(run_dir / "run.json", record)
    rehearsal.profile.save(run_dir / "profile.json")
    (rehearsal.measured or rehearsal.profile).save(run_dir / MEASURED)
    progress.print_line(f"what the script prints goes to {run_dir / 'STRATEGY/repN/rankR.log'}")
    children = _Children(rehearsal, outcome, progress)
    try:
        children.run()
    except KeyboardInterrupt:
        outcome.interrupted = True
    outcome.curves = children.curves
    record["interrupted"] = outcome.interrupted
    write_json(run_dir / "run.json", record)
    if any(map(records_in, run_dir.glob("*/rep*"))):
        outcome.report = report.write(run_dir)
    return outcome


class _Children:
    """Processes of a rehearsal, one per contestant and seed."""

    def __init__(
        self, rehearsal: ScriptRehearsal, outcome: RehearsalOutcome, progress: Progress
    ) -> None:
        self._rehearsal, self._outcome, self._progress = rehearsal, outcome, progress
        self._folders: list[Path] = []  # of the repetitions to rehearse
        self._running: list[subprocess.Popen[bytes]] = []
        self._is_stopped = False
        self._curves: dict[tuple[str, str], RehearsedCurve] = {}  # by label and repetition

    @property
    def curves(self) -> dict[str, list[RehearsedCurve]]:
        """Return the curves so far by label, in the order of the seeds."""
        names = [f"rep{repetition}" for repetition in range(len(self._rehearsal.seeds))]
        labels = [contestant.label for contestant in self._rehearsal.contestants]
        known = self._curves
        found = {
            label: [known[label, name] for name in names if (label, name) in known]
            for label in labels
        }
        return {label: curves for label, curves in found.items() if curves}

    def run(self) -> None:
        """Run all processes; several at the same time."""
        rehearsal = self._rehearsal
        missing = []
        for repetition, seed in enumerate(rehearsal.seeds):
            for contestant in rehearsal.contestants:
                folder = self._outcome.run_dir / contestant.label / f"rep{repetition}"
                if not self._keep(contestant, folder):
                    missing.append((contestant, folder, seed))
                    self._folders.append(folder)
        if not missing:
            return
        count = min(rehearsal.processes, len(missing))
        with self._progress.step(self._title(len(missing)), self._count_iterations):
            pool = ThreadPoolExecutor(count, "offbeat-rehearsal")
            try:
                for work in [pool.submit(self._rehearse, *one) for one in missing]:
                    work.result()
            except KeyboardInterrupt:
                self._is_stopped = True
                pool.shutdown(wait=False, cancel_futures=True)
                for process in list(self._running):
                    process.terminate()
                raise
            finally:
                pool.shutdown()

    def _title(self, count: int) -> str:
        rehearsal = self._rehearsal
        replicas = count_text(rehearsal.profile.ranks, "replica")
        times = count_text(count, "time")
        return f"rehearsing {replicas} of {script_name(rehearsal.script)}, {times}"

    def _count_iterations(self) -> int:
        return sum(map(_read_count, self._folders))

    def _keep(self, contestant: Contestant, folder: Path) -> bool:
        """Return whether an earlier rehearsal has left a curve; delete an incomplete folder."""
        if not (folder / CURVE).exists():
            shutil.rmtree(folder, ignore_errors=True)
            return False
        self._add_curve(contestant, folder)
        self._progress.print_line(f"{contestant.label}, {folder.name}: kept, as it is complete")
        return True

    def _rehearse(self, contestant: Contestant, folder: Path, seed: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        Assignment(
            (*self._rehearsal.script, *contestant.arguments),
            reference_of(contestant.strategy),
            contestant.strategy.settings(),
            str(self._outcome.run_dir / "profile.json"),
            self._rehearsal.iterations,
            seed,
            str(folder.parent),
            str(folder),
        ).save(folder / JOB)
        begun = datetime.now(UTC)
        with (folder / LOG).open("wb") as log:
            command = [sys.executable, "-m", CHILD, str(folder / JOB)]
            process = subprocess.Popen(command, stdout=log, stderr=log, env=self._environ())
            self._running.append(process)
            if self._is_stopped:  # it has begun meanwhile
                process.terminate()
            code = process.wait()
            self._running.remove(process)
        if code and self._is_stopped:
            return
        what = f"{contestant.label}, seed {seed}"
        if code:
            problem = _last_lines(folder / LOG) or f"ended with status {code}"
            write_text(folder / PROBLEM, problem)
            self._outcome.failures.append(f"{what}: {problem}")
            self._progress.print_error(f"{what}: {problem}")
            return
        curve = self._add_curve(contestant, folder)
        took_s = (datetime.now(UTC) - begun).total_seconds()
        self._progress.print_line(
            f"{what}: {len(curve.losses):,} iterations in {curve.ends_s[-1]:.4g} s "
            "(simulated), "
            f"loss {loss_text(curve.losses[-1])}; the rehearsal took {took_s:.0f} s"
        )

    def _add_curve(self, contestant: Contestant, folder: Path) -> RehearsedCurve:
        curve = RehearsedCurve.from_dict(json.loads((folder / CURVE).read_text()))
        self._curves[contestant.label, folder.name] = curve
        return curve

    def _environ(self) -> dict[str, str]:
        """Return the environment of a process: as many threads as processors are left for it."""
        own = {name: value for name, value in os.environ.items() if name not in _LAUNCHER}
        if self._rehearsal.processes > 1:
            own["OMP_NUM_THREADS"] = str(max(1, processors() // self._rehearsal.processes))
        # Each replica is a thread with threads of OpenMP, which must not spin while it waits.
        return {"OMP_WAIT_POLICY": "PASSIVE", **own}


# Variables of a launcher or of a job, which would change what the script does.
_LAUNCHER = frozenset(
    {
        "OFFBEAT_CHECKPOINT",
        "OFFBEAT_JOB",
        "OFFBEAT_JOIN",
        "OFFBEAT_NODES",
        "OFFBEAT_SERVERS",
        "OFFBEAT_STRATEGY",
    }
)


def _read_count(folder: Path) -> int:
    try:
        return int((folder / COUNT).read_text())
    except (OSError, ValueError):
        return 0


def _last_lines(log: Path) -> str:
    """Return the error that ended a process: the last line of its log that is not indented."""
    lines = log.read_text(errors="replace").splitlines()
    start = next((i for i in reversed(range(len(lines))) if lines[i][:1].strip()), None)
    return "" if start is None else " ".join(lines[start : start + LOG_LINES])


# ---- run.json -------------------------------------------------------------------------------


def _describe(rehearsal: ScriptRehearsal) -> dict[str, Any]:
    profile = rehearsal.profile
    ranks = profile.world_size
    sizes = {"ranks": max(profile.topology)} if profile.topology else {}
    links = [
        {"name": link.name, "rate": f"{network_rate_bps(link, ranks) / 1e6:.4g}mbit"}
        for link in profile.links
    ]
    common = describe(
        rehearsal.script,
        rehearsal.contestants,
        rehearsal.seeds,
        rehearsal.command,
        rehearsal.target_loss,
    )
    return {
        **common,
        "cluster": {"hosts": ranks, "links": links, **sizes},
        "lab": "rehearsal",
        "note": f"{REHEARSED[0].upper()}{REHEARSED[1:]}.",
        "rehearsed": True,
        "iterations": rehearsal.iterations,
        "seed": rehearsal.seeds[0],
        "skip": 0,  # simulated iterations have no warm-up
    }


def _require_same(record: dict[str, Any], profile: Profile, run_dir: Path) -> None:
    """Raise ValueError unless an interrupted rehearsal has the same settings and profile."""
    before = read_record(run_dir, "rehearsal")
    loss = {"target_loss": record["target_loss"]}  # the curves do not depend on it
    require_same(record, before | loss, run_dir)
    known = Profile.load(run_dir / "profile.json")
    if json.dumps(known.to_dict()) != json.dumps(profile.to_dict()):
        raise ValueError(
            f"profile must be {run_dir / 'profile.json'}, from which the interrupted rehearsal was "
            "planned; repeat the command that began it and add --resume"
        )
