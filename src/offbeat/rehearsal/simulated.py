"""Simulated times of a rehearsal, for the plan that has run and the outcomes of its votes.

Only this module knows the files of a repetition.
"""

from __future__ import annotations

import json
from bisect import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import nan
from pathlib import Path
from typing import Any

from offbeat.core.files import replace_text
from offbeat.core.plan import Plan
from offbeat.core.profile import Profile
from offbeat.core.sim import Prediction, predict, simulate
from offbeat.core.sim.simulation import MAX_RANKS
from offbeat.core.sim.trace import Span, Trace, spans_to_dict
from offbeat.core.strategy.interface import Strategy, planned
from offbeat.core.strategy.registry import read_plan
from offbeat.experiments.compare import iterations_so_far
from offbeat.experiments.predictions import vote_outcomes
from offbeat.experiments.record.run_directory import RankRecord, load_repetition
from offbeat.jobs.record_lines import rank_files

PERIODS = 3  # last periods whose spans are kept
NO_ITERATION = (
    "no iteration was trained; the script must call offbeat.prepare(model, optimizer) and train"
)


@dataclass(frozen=True)
class Run:
    """Training of all ranks under one strategy, with simulated times.

    Attributes:
        ranks: record of each rank, with its measured times.
        losses: loss of each rank and iteration; NaN for an iteration without a backward.
        plan: plan that has run.
        votes: outcomes by vote and iteration.
        trace: simulated timeline, with the spans of the last iterations. A trace with a single row
            is that of every rank.
        prediction: predicted steady state of the plan, with its votes.
        sizes: ranks of each replica; empty for one rank each.
    """

    ranks: tuple[RankRecord, ...]
    losses: tuple[tuple[float, ...], ...]
    plan: Plan
    votes: Mapping[str, Sequence[bool]]
    trace: Trace
    prediction: Prediction
    sizes: tuple[int, ...] = ()

    @property
    def ends_s(self) -> tuple[float, ...]:
        """Return the end of each iteration on the slowest rank, in seconds from the start."""
        return tuple(max(ends) for ends in zip(*self.trace.ends_s, strict=False))

    def ends_of(self, rank: int) -> tuple[float, ...]:
        """Return the end of each iteration on one rank, in seconds from the start."""
        return self.trace.ends_s[min(self._replica_of(rank), len(self.trace.ends_s) - 1)]

    def spans_of(self, rank: int) -> list[Span]:
        """Return the spans of one rank; none for ranks whose spans the simulation leaves out."""
        replica = self._replica_of(rank)
        if len(self.trace.ends_s) == 1:
            shown = self.trace.spans if rank < MAX_RANKS else ()
        else:
            shown = [span for span in self.trace.spans if span.rank == replica]
        return [replace(span, rank=rank) for span in shown]

    def _replica_of(self, rank: int) -> int:
        """Return the replica of a rank, whose row of the trace is that of all its ranks."""
        return bisect(list(accumulate(self.sizes)), rank) if self.sizes else rank


def simulate_run(folder: Path, strategy: Strategy, profile: Profile, *, seed: int = 0) -> Run:
    """Return the training that the ranks have recorded in a folder, with its simulated times.

    Args:
        folder: folder of the records.
        strategy: strategy of the rehearsal.
        profile: profile of the job.
        seed: seed of the jitter.

    Raises:
        ValueError: no iteration was recorded.
    """
    counts = [iterations_so_far(path) for path in rank_files(folder).values()]
    if not counts or not min(counts):
        raise ValueError(NO_ITERATION)
    plan = read_plan(json.loads((folder / "plan.json").read_text()))
    there, votes = planned(strategy).participants(profile), vote_outcomes(folder)
    kept = min(PERIODS * plan.period, min(counts))
    trace = simulate(plan, there, iterations=min(counts), seed=seed, record=kept, votes=votes)
    prediction = predict(strategy, profile, seed=seed, votes=votes or None, ran=plan)
    ranks = load_repetition(folder, 0).ranks
    losses = tuple(_losses_of(rank, min(counts)) for rank in ranks)
    return Run(ranks, losses, plan, votes, trace, prediction, there.topology)


def _losses_of(record: RankRecord, iterations: int) -> tuple[float, ...]:
    found = [nan] * iterations
    for last, _, loss in record.losses:  # a mean over some iterations in a long record
        for i in range(max(0, last + 1 - record.losses_of), min(last + 1, iterations)):
            found[i] = loss
    return tuple(found)


def write_times(run: Run, folder: Path) -> None:
    """Replace the measured times in the records of a folder by the simulated ones."""
    for rank, path in rank_files(folder).items():
        ends_s = [round(end_s, 7) for end_s in run.ends_of(rank)]
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        lines = [line for line in lines if line["kind"] != "interval"]
        for line in lines:
            if line["kind"] == "iterations":
                first, stop = line["first"], line["first"] + len(line["ends_s"])
                line |= {"ends_s": ends_s[first:stop], "uneven": run.trace.uneven}
            elif line["kind"] == "spans":
                notes = {**_without_measurements(line["notes"]), **run.trace.notes}
                line |= {"spans": spans_to_dict(run.spans_of(rank)), "notes": notes}
        texts = [json.dumps(line, separators=(",", ":")) for line in lines]
        replace_text(path, "\n".join([*texts, ""]))


def discard_records(folder: Path) -> None:
    """Delete the records of a folder."""
    for path in rank_files(folder).values():
        path.unlink()


def _without_measurements(notes: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in notes.items() if name not in ("backward", "estimated")}
