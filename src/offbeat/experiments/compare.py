"""Comparison of strategies: launches of all contestants in turns, predictions and the report."""

from __future__ import annotations

import errno
import json
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from offbeat.core.files import write_text
from offbeat.core.measuring.processors import processors
from offbeat.core.plan import Plan
from offbeat.core.profile import Profile
from offbeat.core.sim.prediction import RANDOM_ITERATIONS
from offbeat.core.sim.trace import whole_periods
from offbeat.core.start.launch_request import STRATEGY_VARIABLE
from offbeat.core.start.strategy_choice import NamedStrategy
from offbeat.core.strategy.interface import Planned
from offbeat.core.words import count_text, duration
from offbeat.experiments import report
from offbeat.experiments.comparison import Comparison, Contestant, Setup
from offbeat.experiments.launcher import AGAIN, MUST_PREPARE, Launcher, Outcome
from offbeat.experiments.new_run import (
    SKIP,
    changed_limits,
    contestant_entries,
    describe_run,
    read_record,
    require_same,
    require_same_profile,
    require_unused_directory,
    write_json,
)
from offbeat.experiments.predictions import device_record, predict, vote_outcomes
from offbeat.experiments.profile_for_network import ConvertedProfile, compute_for
from offbeat.experiments.progress import Progress
from offbeat.experiments.record.run_directory import (
    BEFORE,
    PROBLEM,
    PROFILING,
    Repetition,
    load_repetition,
)
from offbeat.experiments.script import script_name
from offbeat.jobs.record_lines import last_lines, rank_file, rank_files
from offbeat.lab import Lab, LabError, NoLab


def compare(  # noqa: C901
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
    kind = "rehearsal" if comparison.is_rehearsal else "comparison"
    before = read_record(run_dir, kind) if resume else {}
    if not resume:
        require_unused_directory(run_dir)
    path = comparison.profile
    given = None if path is None else given_profile(comparison.setup, path)
    with comparison.setup.lab() as lab:
        outcome = Outcome(run_dir)
        run = _ComparisonRun(comparison, lab, outcome, progress)
        record = run.record = describe_run(comparison, lab) | {"probed": run.probe_links()}
        if given is not None and not comparison.is_rehearsal:
            record["profile"] = given.record()
        known = run_dir / "profile.json"
        if resume:
            if comparison.is_rehearsal:  # losses do not depend on the target
                before["target_loss"] = record["target_loss"]
            require_same(record, before, run_dir)
            outcome.notes += changed_limits(record, before)
            record["started"] = before["started"]
            outcome.changed = list(before.get("changed", ()))
            if known.exists():
                require_same_profile(given, known)
                record["profile"] = before.get("profile")
        run_dir.mkdir(parents=True, exist_ok=True)
        run.write_record()
        for note in outcome.notes:
            progress.print_error(f"note: {note}")
        if record["note"]:
            progress.print_line(record["note"])
        progress.print_line(f"what the script prints goes to {logs_of(comparison, run_dir)}")
        try:
            if given is not None and not comparison.is_rehearsal:
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
    if outcome.measured or any(map(rank_files, run_dir.glob("*/rep*"))):
        record |= {"contestants": contestant_entries(outcome.contestants), "notes": outcome.notes}
        record["changed"] = outcome.changed
        record["device"] = outcome.device
        write_json(run_dir / "run.json", record)
        outcome.report = report.write(run_dir)
    else:
        write_json(run_dir / "run.json", record)


def _file_error(error: OSError) -> str:
    """Return a message that names the file and the remedy."""
    what = f"{error.filename or 'a file of the run'} cannot be written: {error.strerror or error}"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"{what}; make room on that disk, or give --out a folder on another one"
    return f"{what}; check the path and its permissions"


def given_profile(setup: Setup, path: Path | Profile) -> ConvertedProfile:
    """Read a profile and convert it to the cluster of a setup; see `compute_for`."""
    if isinstance(path, Profile):
        return ConvertedProfile(path, file="of the rehearsal")
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


# --- steps of a comparison ---


class _ComparisonRun(Launcher):
    """Steps of a comparison in a running lab."""

    def __init__(
        self, comparison: Comparison, lab: Lab | NoLab, outcome: Outcome, progress: Progress
    ) -> None:
        super().__init__(comparison.setup, lab, outcome, progress)
        self.comparison, self.run_dir = comparison, outcome.run_dir
        self._predicted_s: dict[str, float] = {}  # per iteration, by label
        self.record: dict[str, Any] = {}  # content of run.json

    def write_record(self) -> None:
        """Write run.json, which a report during the run and a resumed run read."""
        if self.outcome.contestants:
            self.record["contestants"] = contestant_entries(self.outcome.contestants)
        self.record["changed"] = self.outcome.changed
        write_json(self.run_dir / "run.json", self.record)

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
        self.write_record()
        self._note_unused_strategy()
        ready = [c for c in outcome.contestants if self._predict(c, profile)]
        if comparison.device is not None:
            outcome.device = device_record(ready, comparison.device, profile, self.setup.servers)
        turns = [(c, repetition) for repetition in range(comparison.repetitions) for c in ready]
        for number, (contestant, repetition) in enumerate(turns):
            begin_s = time.monotonic()
            self._run_repetition(contestant, repetition)
            if outcome.changed:
                self.write_record()
            runs = [turn[0] for turn in turns]
            if number == 0 and (
                text := remaining_text(runs, self._predicted_s, time.monotonic() - begin_s)
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
        setup, folder = self.setup, self.run_dir / label
        ranks = None if isinstance(strategy, Planned) else setup.ranks
        try:
            seconds = predict(strategy, profile, folder, servers=setup.servers, ranks=ranks)
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
        again = f"; {AGAIN}" if self.comparison.repeat_disturbed else ""
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
                count=partial(iterations_so_far, rank_file(directory, 0)),
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
        if problem is None and not rank_files(directory):
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

        They replace the expected plan and its prediction in the run directory. A short job with
        servers is predicted anew for as many iterations as have run: its workers begin in step, so
        its iterations have other times than those of a long job.
        """
        directory, strategy = self.run_dir / contestant.label, contestant.strategy
        if strategy.needs.servers:
            folders = enumerate(sorted(directory.glob("rep*")))
            found = (load_repetition(folder, number).ranks for number, folder in folders)
            iterations = max((ranks[0].trace.iterations for ranks in found if ranks), default=0)
            if SKIP < iterations <= RANDOM_ITERATIONS:
                seconds = predict(
                    strategy,
                    profile,
                    directory,
                    servers=self.setup.servers,
                    ranks=self.setup.ranks,
                    iterations=iterations,
                )
                self.progress.print_line(
                    f"{contestant.label}: predicted {seconds:.4g} s per iteration of the "
                    f"{iterations} that have run"
                )
            return
        if not isinstance(strategy, Planned):
            return
        executed = next(iter(sorted(directory.glob("rep*/plan.json"))), None)
        if executed is None:
            return
        plan = Plan.from_dict(json.loads(executed.read_text()))
        votes = vote_outcomes(executed.parent)
        planned = directory / "plan.json"
        if not planned.exists():
            seconds = predict(strategy, profile, directory, plan, votes)
            self.progress.print_line(f"{contestant.label}: predicted {seconds:.4g} s per iteration")
            return
        expected = Plan.from_dict(json.loads(planned.read_text()))
        if votes or plan.digest != expected.digest:
            predict(strategy, profile, directory, plan, votes)


def remaining_text(
    runs: Sequence[Contestant], predicted_s: Mapping[str, float], first_s: float
) -> str:
    """Return how long the runs after the first one take; empty below a minute, and if arguments of
    a contestant may change its number of iterations.

    Args:
        runs: contestant of each run, in order.
        predicted_s: predicted seconds per iteration by label; unknown for some.
        first_s: seconds of the first run.
    """
    one_s = predicted_s.get(runs[0].label, 1.0)
    rest_s = sum(first_s * predicted_s.get(run.label, one_s) / one_s for run in runs[1:])
    if rest_s < 60 or any(run.arguments for run in runs):
        return ""
    return f"about {duration(rest_s)} for the other {count_text(len(runs) - 1, 'run')}"


def _named_path(run_dir: Path) -> Path:
    """Return the file of the strategy that the script names."""
    measured = run_dir / PROFILING / "strategy.json"
    return measured if measured.exists() else run_dir / "reading" / "strategy.json"


def iterations_so_far(path: Path) -> int:
    """Return the number of iterations in a record that may still grow; 0 without a file."""
    own = (line for line in last_lines(path) if line["kind"] == "iterations")
    return next((line["first"] + len(line["ends_s"]) for line in own), 0)


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
