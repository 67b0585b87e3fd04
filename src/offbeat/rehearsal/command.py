"""Rehearsal of a script: a comparison whose ranks are forks and whose times are simulated."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from offbeat.core.files import write_text
from offbeat.core.profile import Profile
from offbeat.core.start.launch_request import VARIABLE
from offbeat.core.strategy.registry import create, reference_of
from offbeat.experiments.compare import compare
from offbeat.experiments.comparison import Comparison, Contestant, Setup
from offbeat.experiments.launcher import Outcome
from offbeat.experiments.progress import Progress
from offbeat.experiments.record.run_directory import PROBLEM
from offbeat.experiments.report.headline import REHEARSED
from offbeat.lab import NoLab
from offbeat.lab.launch import Result
from offbeat.rehearsal.ranks import WAIT_S, cluster_of, environments_of
from offbeat.rehearsal.rehearse import (
    RehearsedCurve,
    curve_of,
    require_plan,
    require_whole_replicas,
)
from offbeat.rehearsal.simulated import discard_records, simulate_run, write_times

RANKS = "offbeat.rehearsal.ranks"
MEASURED = "measured"  # in run.json


def rehearse_script(
    script: tuple[str, ...],
    contestants: tuple[Contestant, ...],
    profile: Profile,
    run_dir: Path,
    progress: Progress | None = None,
    *,
    iterations: int | None = None,
    seeds: tuple[int, ...] = (0,),
    target_loss: float | None = None,
    measured: Profile | None = None,
    resume: bool = False,
) -> Outcome:
    """Rehearse a script under all contestants, and write the run directory with its report.

    Args:
        script: script or module with its arguments.
        contestants: strategies to rehearse.
        profile: profile of the job, with its number of ranks, network and jitter.
        run_dir: new folder, or with `resume` the folder of an interrupted rehearsal.
        progress: display of the progress.
        iterations: iterations after which the script is ended; None: at its own end.
        seeds: OFFBEAT_SEED of each repetition.
        target_loss: training loss to which the time is counted.
        measured: profile from which the one of the job was computed, to resume with; None: the
            profile of the job.
        resume: keep the complete repetitions in `run_dir`, and rehearse the missing ones.

    Raises:
        ValueError: the run directory is not empty, or with `resume` it is of another rehearsal; or
            a strategy has no plan or is a class of the script.
    """
    for contestant in contestants:
        reference_of(contestant.strategy)  # raises for a class of the script
        require_plan(contestant.strategy)
    require_whole_replicas(profile)
    profile = replace(profile, pace=0.0)
    facts = {
        "lab": "rehearsal",
        "note": f"{REHEARSED[0].upper()}{REHEARSED[1:]}.",
        "rehearsed": True,
        "iterations": iterations,
        "skip": 0,  # simulated iterations have no warm-up
        MEASURED: (measured or profile).to_dict(),
    }
    with closing(_Forks(iterations)) as forks:
        setup = Setup(
            script,
            cluster_of(profile),
            shaped=False,
            seed=seeds[0],
            wait_s=WAIT_S,
            job={"rehearsed": True},
            launch=forks,
        )
        comparison = Comparison(
            setup,
            contestants,
            repetitions=len(seeds),
            target_loss=target_loss,
            profile=profile,
            given_seeds=seeds,
            facts=facts,
        )
        return compare(comparison, run_dir, progress, resume=resume)


def rehearsed_curves(
    run_dir: Path, contestants: Sequence[Contestant], seeds: Sequence[int]
) -> dict[str, list[RehearsedCurve]]:
    """Return the curves of a rehearsal by label, one per complete repetition.

    Args:
        run_dir: folder of the rehearsal.
        contestants: its strategies.
        seeds: seed of each repetition.
    """
    path = run_dir / "profile.json"
    profile = Profile.load(path) if path.exists() else None  # interrupted before
    curves = dict[str, list[RehearsedCurve]]()
    for contestant in contestants:
        for repetition, seed in enumerate(seeds):
            folder, strategy = run_dir / contestant.label / f"rep{repetition}", contestant.strategy
            is_complete = (folder / "plan.json").exists() and not (folder / PROBLEM).exists()
            if profile is not None and is_complete:
                run = simulate_run(folder, strategy, profile, seed=seed)
                curves.setdefault(contestant.label, []).append(curve_of(run, strategy))
    return curves


def measured_profile(run_dir: Path) -> Profile:
    """Return the measured profile of an interrupted rehearsal.

    Raises:
        ValueError: the folder has none.
    """
    path = run_dir / "run.json"
    record = json.loads(path.read_text()) if path.is_file() else {}
    if MEASURED not in record:
        raise ValueError(f"--resume ({run_dir}) must be the folder of an interrupted rehearsal")
    return Profile.from_dict(record[MEASURED])


class _Forks:
    """Launches of a script in forked ranks, whose records then get the simulated times."""

    def __init__(self, iterations: int | None) -> None:
        self._iterations = iterations
        self._process: subprocess.Popen[str] | None = None

    def __call__(
        self, lab: NoLab, argv: Sequence[str], *, env: Mapping[str, str], log_dir: Path, **_: Any
    ) -> Result:
        """Launch the ranks of one repetition, as `offbeat.lab.launch` does."""
        begun_s, environments = time.monotonic(), environments_of(lab)
        logs = tuple(log_dir / f"rank{rank}.log" for rank in range(len(environments)))
        work = {
            "script": argv[1:],
            "environments": [{**one, **env} for one in environments],
            "logs": list(map(str, logs)),
            "iterations": self._iterations,
        }
        write_text(log_dir / PROBLEM, "the rehearsal was interrupted")
        problem: str | None = "interrupted"
        try:
            problem = self._fork_ranks(work) or _simulate_times(env)
        finally:
            if problem is None:
                (log_dir / PROBLEM).unlink()
            else:
                self.close()
                discard_records(log_dir)  # their times are not simulated
        return Result((), time.monotonic() - begun_s, logs, problem)

    def _fork_ranks(self, work: Mapping[str, Any]) -> str | None:
        """Return why the ranks have failed; None if they have not."""
        threads = work["environments"][0]["OMP_NUM_THREADS"]
        self._process = self._process or subprocess.Popen(
            [sys.executable, "-P", "-m", RANKS],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": threads},
            text=True,
            start_new_session=True,  # Ctrl-C ends the ranks from here
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(f"{json.dumps(work)}\n")
            self._process.stdin.flush()
            return json.loads(self._process.stdout.readline())
        except (BrokenPipeError, json.JSONDecodeError):
            return "the process that forks the ranks has ended, as when memory is exhausted"

    def close(self) -> None:
        """End all ranks."""
        if self._process is not None:
            with self._process, suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process = None


def _simulate_times(env: Mapping[str, str]) -> str | None:
    """Replace the times of a repetition; return why it has none, None if it has."""
    job, seed = json.loads(Path(env[VARIABLE]).read_text()), int(env["OFFBEAT_SEED"])
    folder, strategy = Path(job["record_dir"]), create(job["strategy"], job["settings"])
    try:
        run = simulate_run(folder, strategy, Profile.load(job["profile"]), seed=seed)
    except ValueError as error:
        return str(error)
    write_times(run, folder)
    return None
