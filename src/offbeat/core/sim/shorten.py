"""Shortening: long plans with fewer iterations, and what each of these stands for.

Between two changes of its rules a plan may have very many iterations that are all alike. Where
nothing moves in them, one iteration is run that takes as long as all those left out: exact, also
for ranks that differ. Where messages move, the last ones that are kept are a sample of those left
out: exact if the timeline repeats within the sample.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise

from offbeat.core.plan import Phases, Plan
from offbeat.core.plan.program import Program

LONG = 512  # a stretch of so many alike iterations is shortened
SHOWN = 32  # idle ones that are kept at its end
SAMPLE = 60  # ones with messages; a repetition of 1-6, 10, 12, 15, 20, 30 or 60 shows in them


@dataclass(frozen=True)
class Short:
    """A plan that takes the same time, phases of which stand for several iterations.

    `repeats`: an idle phase runs as so many iterations at once. `weights`: a phase counts as so
    many, as a sample. `samples`: where these stop. `pieces`: (phase here, phase of the original)
    from which on both go on one by one.
    """

    plan: Plan
    original: Plan
    repeats: Mapping[int, int]
    weights: Mapping[int, float]
    samples: tuple[int, ...]
    pieces: tuple[tuple[int, int], ...]

    def number(self, iteration: int) -> int:
        """The original's iteration that one of the short plan is."""
        phase = self.plan.phase(iteration)
        cycles = (iteration - phase) // self.plan.period
        here, there = self.pieces[bisect_right(self.pieces, phase, key=lambda piece: piece[0]) - 1]
        return there + phase - here + cycles * self.original.period

    def weight(self, iteration: int) -> float:
        """Iterations of which one is a sample."""
        return self.weights.get(self.plan.phase(iteration), 1.0) if self.weights else 1.0

    @property
    def gapless(self) -> int:
        """The first phase of the cycle from which on none is left out."""
        starts = [here for here, _ in self.pieces[1:] if here > self.plan.prologue]
        return max([self.plan.prologue, *starts])


def shorten(plan: Plan) -> Short:
    """The plan with every long stretch shortened; itself if there is none."""
    program = Program(plan)
    _, edges = program.shape()
    bounds = [edge for edge in edges if edge < len(plan.phases)] + [len(plan.phases)]
    starts, pieces = {0: 0}, [(0, 0)]
    repeats: dict[int, int] = {}
    weights: dict[int, float] = {}
    samples = []
    for a, z in pairwise(bounds):
        here, length = starts[a], z - a
        head, skipped, kept = _kept(plan, program, a, length)
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
        return Short(plan, plan, {}, {}, (), ((0, 0),))
    return Short(_cut(plan, starts), plan, repeats, weights, tuple(samples), tuple(pieces))


def _kept(plan: Plan, program: Program, start: int, length: int) -> tuple[int, int, int]:
    """Of a stretch: how many are kept at its beginning, left out, and kept at its end."""
    if length <= LONG + program.lag:
        return 0, 0, length
    if not any(start in rule.phases for rule in (*plan.transfers, *plan.votes)):
        # Earlier iterations' messages are still due in the first ones.
        return program.lag, length - program.lag - SHOWN - 1, SHOWN
    skipped = (length - LONG) // SAMPLE * SAMPLE
    return length - skipped - SAMPLE, skipped, SAMPLE


def _cut(plan: Plan, starts: Mapping[int, int]) -> Plan:
    def cut(phases: Phases) -> Phases:
        return Phases.of_runs(_runs(phases))

    def _runs(phases: Phases) -> Iterator[tuple[int, int]]:
        return ((starts[a], starts[z]) for a, z in phases.runs)

    prologue = starts[plan.prologue]
    return replace(
        plan,
        transfers=tuple(replace(t, phases=cut(t.phases)) for t in plan.transfers),
        applies=tuple(replace(a, phases=cut(a.phases)) for a in plan.applies),
        votes=tuple(replace(v, phases=cut(v.phases)) for v in plan.votes),
        prologue=prologue,
        period=starts[len(plan.phases)] - prologue,
    )
