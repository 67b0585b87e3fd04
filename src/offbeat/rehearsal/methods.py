"""Rehearsal of the methods of a verdict on this machine, for times to a loss."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from offbeat.core.profile import Profile
from offbeat.core.strategy.interface import Planned
from offbeat.core.strategy.parsing import text_of
from offbeat.core.strategy.registry import BASELINE, create
from offbeat.core.words import count_text, seconds
from offbeat.experiments.advice.methods import ALONE
from offbeat.experiments.advice.verdict import Predictions, Work
from offbeat.experiments.comparison import Contestant
from offbeat.experiments.record.run_directory import load
from offbeat.experiments.report.losses import target_loss
from offbeat.rehearsal.command import rehearse_script, rehearsed_curves

if TYPE_CHECKING:
    from offbeat.experiments.launcher import Outcome
    from offbeat.experiments.progress import Progress
    from offbeat.rehearsal.rehearse import RehearsedCurve

ALONE_DIR = "one-machine"  # folder of the rehearsal of one machine, in the run directory
SAME_LOSS = 1e-6  # relative difference of equal losses
LESS_WORK = 0.75  # share of one machine's input elements below which a note warns
OTHER_TIME = 0.05  # relative difference of seconds per iteration from which a note states both


def target_at_equal_times(
    target: float, curves: Mapping[str, Sequence[RehearsedCurve]]
) -> tuple[float, tuple[str, ...]]:
    """Return a loss that all methods reach that had less time than the best one.

    All methods train the same number of iterations. If a method ends above the target before the
    fastest other method reaches it, then with more iterations it can be the first. So the target is
    raised to its lowest loss.

    Args:
        target: loss to reach.
        curves: curves by label of the method, one per seed.

    Returns:
        The target, and the labels of the methods for which it was raised.
    """
    raised = list[str]()
    while True:
        needed_s = {
            label: max(s if (s := one.seconds_to(target)) is not None else math.inf for one in each)
            for label, each in curves.items()
        }
        best_s = min(needed_s.values(), default=0.0)
        lowest = {
            label: max(math.inf if (low := one.lowest_loss()) is None else low for one in each)
            for label, each in curves.items()
            if needed_s[label] == math.inf and max(one.ends_s[-1] for one in each) < best_s
        }
        lowest = {label: loss for label, loss in lowest.items() if loss < math.inf}
        if not lowest:
            return target, tuple(raised)
        label = min(lowest, key=lambda label: lowest[label])
        target = lowest[label]
        raised.append(label)


@dataclass(frozen=True)
class Losses:
    """Rehearsed losses of the methods of a verdict.

    Attributes:
        target_loss: loss to reach; None if no loss has decreased.
        curves: curves by label of the method, one per seed.
        failures: messages of the failures.
        interrupted: whether Ctrl-C ended the rehearsal.
        run_dir: run directory.
        raised_for: labels of the methods for which the target was raised.
    """

    target_loss: float | None
    curves: Mapping[str, Sequence[RehearsedCurve]]
    failures: tuple[str, ...]
    interrupted: bool
    run_dir: Path
    raised_for: tuple[str, ...] = ()

    @property
    def work(self) -> Work:
        """Return the work of training to the loss, with the methods that have reached it with
        every seed."""
        assert self.target_loss is not None
        found = {}
        for label, curves in self.curves.items():
            counts = [curve.iterations_to(self.target_loss) for curve in curves]
            if all(counts):
                found[label] = [
                    float(count * curve.ranks)
                    for count, curve in zip(counts, curves, strict=True)
                    if count is not None
                ]
        return Work.to_loss(self.target_loss, found)

    def notes(self, predicted: Predictions) -> Iterator[str]:
        """Yield remarks about the rehearsal."""
        first = next(iter(self.curves.values()))
        count = len(first[0].losses)
        seeds = f" with each of {len(first)} seeds" if len(first) > 1 else " with one seed"
        yield (
            f"losses are those of a rehearsal of {count:,} iterations{seeds} on this machine; its "
            f"report is in {self.run_dir}"
        )
        yield from self._suspicions()
        if self.raised_for:
            yield (
                f"the loss is what {' and '.join(self.raised_for)} reached in all iterations, in "
                "less time than the others; --iterations or a longer script compare lower losses"
            )
        known = self.work.batches_by_label
        if late := [label for label in self.curves if label not in known]:
            yield f"loss {self.target_loss:.4g} was not reached by {', '.join(late)}"
        same = {BASELINE, *(m.label for m in predicted.methods if m.same_numbers)}
        missing = [m.label for m in predicted.methods if m.label not in {*self.curves, *same}]
        if missing:
            yield f"without a rehearsal: {'; '.join(missing)}"
        for method in predicted.methods:
            for curve in self.curves.get(method.label, ())[:1]:
                if abs(curve.iteration_s / method.iteration_s - 1) > OTHER_TIME:
                    yield (
                        f"{method.label} took {seconds(curve.iteration_s)} per iteration in the "
                        f"rehearsal, and {seconds(method.iteration_s)} is predicted for its plan "
                        "without changes by the script and votes"
                    )
        yield from self.failures

    def _suspicions(self) -> Iterator[str]:
        """Yield remarks about seeds and ranks that the script ignores, and divided batches."""
        known = self.curves.get(BASELINE, ())
        if len(known) > 1 and len({curve.losses for curve in known}) == 1:
            yield (
                "all seeds have equal losses, so the range has no spread over seeds: the script "
                "must use OFFBEAT_SEED"
            )
        for one, alone in zip(known, self.curves.get(ALONE, ()), strict=False):
            count = min(len(one.losses), len(alone.losses))
            if np.allclose(one.losses[:count], alone.losses[:count], rtol=SAME_LOSS, atol=0):
                yield (
                    "all machines together have the losses of one machine, so every rank trains "
                    "with the same batches: the script must divide the data by RANK"
                )
                return
            if one.input_elements < LESS_WORK * alone.input_elements:
                yield (
                    f"a rank trains on {one.input_elements:,.0f} input elements per iteration with "
                    f"{count_text(one.ranks, 'rank')} and on {alone.input_elements:,.0f} with "
                    f"{alone.ranks}: the script divides its batch by WORLD_SIZE, but the predicted "
                    "times are those of the whole batch on every rank. Give each rank the same "
                    "batch for every number of ranks"
                )
                return

    def record(self) -> dict[str, Any]:
        """Return the JSON form."""
        assert self.target_loss is not None
        return {
            "run_dir": str(self.run_dir),
            "target_loss": self.target_loss,
            "iterations": {
                label: [curve.iterations_to(self.target_loss) for curve in curves]
                for label, curves in self.curves.items()
            },
            "failures": list(self.failures),
        }


def rehearse_methods(
    predicted: Predictions,
    script: tuple[str, ...],
    settings: Mapping[str, Any],
    measured: Profile,
    run_dir: Path,
    progress: Progress,
    *,
    resume: bool,
) -> Losses:
    """Rehearse the methods of a verdict: DDP, the strategies that learn differently, and one
    machine with as many batches as all machines have together.

    Args:
        predicted: predictions for the machines.
        script: script or module with its arguments.
        settings: further arguments of `rehearse_script`.
        measured: profile from which the one of the machines was computed.
        run_dir: new folder, or with `resume` the folder of an interrupted rehearsal.
        progress: display of the progress.
        resume: keep the complete curves in `run_dir`.

    Raises:
        ValueError: see `rehearse_script`.
    """
    place = predicted.place

    def rehearse(
        contestants: tuple[Contestant, ...],
        profile: Profile,
        folder: Path,
        *,
        resume: bool,
        **more: Any,
    ) -> tuple[Outcome, Mapping[str, Sequence[RehearsedCurve]]]:
        how = {**settings, **more, "measured": measured, "resume": resume}
        outcome = rehearse_script(script, contestants, profile, folder, progress, **how)
        return outcome, rehearsed_curves(folder, contestants, settings["seeds"])

    planned = [one for one in predicted.learnt_differently if isinstance(one, Planned)]
    contestants = tuple(map(Contestant.of, planned))
    first, known = rehearse(contestants, place.profile, run_dir, resume=resume)
    curves = {text_of(c.strategy): known.get(c.label, []) for c in contestants}
    outcomes = [first]
    if not first.interrupted:
        progress.print_line("one machine:")
        alone = (Contestant(ALONE_DIR, create(BASELINE)),)
        alone_dir, iterations = run_dir / ALONE_DIR, settings["iterations"]
        second, known = rehearse(
            alone,
            place.one_machine,
            alone_dir,
            resume=(alone_dir / "run.json").exists(),
            iterations=iterations and iterations * place.machines,
        )
        outcomes.append(second)
        curves[ALONE] = known.get(ALONE_DIR, [])
    complete = len(settings["seeds"])
    curves = {label: known for label, known in curves.items() if len(known) == complete}
    target = target_loss(load(run_dir)) if first.report else None
    raised: tuple[str, ...] = ()
    if target is not None and settings.get("target_loss") is None:
        target, raised = target_at_equal_times(target, curves)
    return Losses(
        target,
        curves,
        tuple(failure for outcome in outcomes for failure in outcome.failures),
        any(outcome.interrupted for outcome in outcomes),
        run_dir,
        raised,
    )
