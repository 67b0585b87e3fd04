"""Profiles and losses that `offbeat advise` needs, and the strategies of `compare --strategies
advised`."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offbeat.cli import texts
from offbeat.cli.options import Where
from offbeat.cli.output import FAILED, INTERRUPTED, exit_code
from offbeat.core.profile import Profile
from offbeat.core.strategy.interface import require_choice
from offbeat.core.strategy.parsing import pairs, parse_value, text_of
from offbeat.experiments.advice.question import Answer, Question, answer
from offbeat.experiments.advice.selection import advise
from offbeat.experiments.advice.verdict import predict_methods

if TYPE_CHECKING:
    from offbeat.experiments.comparison import Contestant, Setup
    from offbeat.experiments.launcher import Outcome


def answer_with_losses(
    question: Question,
    profile: Profile,
    file: Path | None,
    settings: Mapping[str, Any],
    resumed: Path | None,
) -> tuple[Answer | None, int]:
    """Rehearse the methods of a question and return the answer, and the exit code without one.

    `settings` are further arguments of `rehearse_script`, `resumed` the folder of an interrupted
    rehearsal.
    """
    from offbeat.experiments.new_run import default_run_dir
    from offbeat.experiments.progress import Progress
    from offbeat.experiments.script import script_name
    from offbeat.rehearsal.methods import rehearse_methods

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
    found = answer(question, profile, file, predicted, losses.work)
    notes = tuple(losses.notes(predicted))
    return replace(found, notes=notes, rehearsal=losses.record()), 0


def profile_here(
    script: Sequence[str], given: Path | None, resume: Path | None, *, stderr: bool
) -> tuple[Profile | None, int]:
    """Return the given profile, that of an interrupted rehearsal, or the newly measured one of a
    script on one device; without one the exit code."""
    if given is None and resume is not None:
        from offbeat.rehearsal.command import measured_profile

        return measured_profile(resume), 0
    if given is not None:
        return texts.load_profile(given), 0
    setup = Where(hosts=1, lab="none", pace="none").setup(*script)
    with open_profile(setup, None, stderr=stderr) as (path, outcome):
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
