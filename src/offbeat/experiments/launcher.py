"""Launches of a script in a running lab, and the measurement of its profile."""

from __future__ import annotations

import shutil
import sys
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from offbeat.core.profile import Profile
from offbeat.core.start.launch_request import SCHEMA as JOB_SCHEMA
from offbeat.core.strategy.registry import reference_of
from offbeat.experiments.comparison import Contestant, Setup
from offbeat.experiments.new_run import write_json
from offbeat.experiments.profile_for_network import with_network
from offbeat.experiments.progress import Count, Progress
from offbeat.experiments.record.disturbed import disturbance_of
from offbeat.experiments.record.run_directory import BEFORE, LOAD, load_in
from offbeat.experiments.script import script_name
from offbeat.jobs.machine_load import LoadSampler
from offbeat.lab import Lab, NoLab, launch
from offbeat.lab import probe_report as asked
from offbeat.strategies import BSP, Strategy

AGAIN = "it is measured once more (--keep-disturbed would keep it)"
MUST_PREPARE = "it must call offbeat.prepare(model, optimizer) and train some iterations"


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
            launcher = Launcher(setup, lab, outcome, progress)
            launcher.probe_links()
            outcome.measured = launcher.measure(path, outcome.run_dir)
    except KeyboardInterrupt:
        outcome.interrupted = True
    finally:
        if not outcome.failures:
            shutil.rmtree(outcome.run_dir)
    return outcome


class Launcher:
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
        if disturbance := disturbance_of(0, load_in(logs), {}):
            consequence = f"; {AGAIN}"
            if not again:
                consequence = "; predictions may be wrong, so measure again on an idle machine"
            self.progress.print_line(f"the profile was disturbed: {disturbance.text}{consequence}")
            if again:
                before = logs.with_name(BEFORE + logs.name)
                shutil.rmtree(before, ignore_errors=True)  # of an interrupted run
                logs.rename(before)
                return self.measure(path, logs, least_buckets=least_buckets)
            profile = replace(profile, foreign_share=disturbance.foreign or 0.0)
        profile.save(path)
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
        write_json(path, job)
        seed = setup.seed if seed is None else seed
        env = {"OFFBEAT_JOB": str(path.absolute()), "OFFBEAT_SEED": str(seed)}
        if setup.links:
            env["OFFBEAT_LINKS"] = ",".join(setup.links)
        with (
            self.progress.step(step, count) as on_line,
            LoadSampler() as sampler,
        ):
            result = (setup.launch or launch)(
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
        if setup.launch is None and (load := sampler.load()) is not None:
            write_json(directory / LOAD, load.record())
        changes = setup.cluster.changes
        return result.problem, [
            {"at_s": at_s, "change": changes[number].text} for at_s, number in result.changes
        ]


def _job(setup: Setup, strategy: Strategy | None, **rest: Any) -> dict[str, Any]:
    """Return the job file of the runtime; see `offbeat.core.start.launch_request`."""
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
        **setup.job,
    }
    return job | rest
