"""Shortened plans: long stretches of equal iterations replaced by fewer iterations.

A stretch is a run of phases with equal rules. In a stretch without messages, one iteration replaces
all omitted iterations and takes as long as all of them; this is exact for any differences between
ranks. In a stretch with messages, its last iterations are a sample of the omitted ones; this is
exact if the timeline repeats within the sample.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

from offbeat.core.plan import Plan
from offbeat.core.plan.program import Program, move_bounds

LONG = 512  # a stretch of more iterations is shortened
SHOWN = 32  # iterations kept at the end of a stretch without messages
SAMPLE = 60  # iterations kept at the end of a stretch with messages; a multiple of likely cycles


@dataclass(frozen=True)
class ShortPlan:
    """Plan of which some phases represent several iterations of the original plan.

    Attributes:
        plan: shortened plan.
        original: plan before shortening.
        repeats: number of iterations that an idle phase represents, simulated as one iteration, by
            phase; 1 for other phases.
        weights: number of iterations that a phase of a sample represents, by phase; 1 for other
            phases.
        samples: phase after the end of each sample.
        pieces: start of each piece without omissions, as (phase of `plan`, phase of `original`).
    """

    plan: Plan
    original: Plan
    repeats: Mapping[int, int]
    weights: Mapping[int, float]
    samples: tuple[int, ...]
    pieces: tuple[tuple[int, int], ...]

    def number_of(self, iteration: int) -> int:
        """Return the iteration of the original plan for an iteration of the shortened plan."""
        phase = self.plan.phase(iteration)
        cycles = (iteration - phase) // self.plan.period
        here, there = self.pieces[bisect_right(self.pieces, phase, key=lambda piece: piece[0]) - 1]
        return there + phase - here + cycles * self.original.period

    def weight(self, iteration: int) -> float:
        """Return the number of iterations that one iteration represents as part of a sample."""
        return self.weights.get(self.plan.phase(iteration), 1.0) if self.weights else 1.0

    @property
    def gapless_start(self) -> int:
        """Return the first phase of the period after which no phase is omitted."""
        starts = [here for here, _ in self.pieces[1:] if here > self.plan.prologue]
        return max([self.plan.prologue, *starts])


def shorten(plan: Plan) -> ShortPlan:
    """Shorten every long stretch of a plan. A plan without a long stretch is returned unchanged."""
    program = Program(plan)
    bounds = program.bounds
    starts, pieces = {0: 0}, [(0, 0)]
    repeats: dict[int, int] = {}
    weights: dict[int, float] = {}
    samples = []
    for a, z in pairwise(bounds):
        here, length = starts[a], z - a
        head, skipped, kept = _split_stretch(plan, program, a, length)
        if skipped and kept == SHOWN:
            repeats[here + head] = skipped + 1
            pieces += [(here + head + 1, z - kept)]
            head += 1
        elif skipped:
            pieces += [(here + head, z - kept)]
            samples.append(here + head + kept)
            for phase in range(here + head, here + head + kept) if a >= plan.prologue else ():
                weights[phase] = 1 + skipped / kept
        starts[z] = here + head + kept
    if starts[bounds[-1]] == len(plan.phases):
        return ShortPlan(plan, plan, {}, {}, (), ((0, 0),))
    return ShortPlan(
        move_bounds(plan, starts), plan, repeats, weights, tuple(samples), tuple(pieces)
    )


def _split_stretch(plan: Plan, program: Program, start: int, length: int) -> tuple[int, int, int]:
    """Return the numbers of phases kept at a stretch's start, omitted, and kept at its end."""
    if length <= LONG + program.lag:
        return 0, 0, length
    if not any(start in rule.phases for rule in (*plan.transfers, *plan.votes)):
        # Messages of earlier iterations are due in the first iterations of the stretch.
        return program.lag, length - program.lag - SHOWN - 1, SHOWN
    skipped = (length - LONG) // SAMPLE * SAMPLE
    return length - skipped - SAMPLE, skipped, SAMPLE
