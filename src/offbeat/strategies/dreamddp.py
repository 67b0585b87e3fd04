"""DreamDDP: partial synchronization with sets of layers chosen to hide under backward."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import ClassVar, Literal, NamedTuple

from offbeat import solve
from offbeat.plan import Plan
from offbeat.profile import Profile
from offbeat.sim import Ranks, simulate
from offbeat.strategies.base import StatePolicy, Strategy, periodic_bound_s, require_count
from offbeat.strategies.local_sgd import EVERY_ITERATION
from offbeat.strategies.partial_sync import (
    Average,
    Piece,
    kinds_of,
    layer_times,
    partial_plan,
    whole,
)
from offbeat.testing.equations import Equations, layer_sets, partial

Solver = Callable[[list[float], list[float], int], solve.Sets]

SLICES_GAIN = 0.02  # what slices must save before they are chosen unasked: they are more messages
MOST_SLICES = 4000  # of all buckets: with more, slices save little and take long to plan
FEW_ENDS = 8  # so many buckets at either end are tried one by one, more of them by doubling
LEAST_ITERATIONS = 24  # simulated per candidate, and at least four periods
MOST_SIMULATED = 10_000  # buckets times iterations; beyond that jitter is left out of account
ROUNDING = 1e-9


@dataclass(frozen=True)
class DreamDDP(Strategy):
    """Layer-wise scheduled partial synchronization.

    `solver`: `best` (the better of `optimal` and `balanced`), `optimal` (contiguous sets),
    `balanced` (any sets), `dfs` (the paper's Algorithm 2), `brute-force`. The default, `auto`, is
    `best`, or all layers in one iteration as in local SGD, whichever is predicted to be faster.

    `fill` adds output-side layers to iterations where they cost no time. `split` (ours) cuts
    buckets - the first and the last ready, or all - into one slice per iteration where that is
    predicted to be faster: every iteration then has something to send early and little to send
    late. `auto` fills where the profile's jitter does not make it slower, and splits where that
    saves at least 2 % (with the solver `auto` only).

    `average` and `state` as in `PartialSync`.
    """

    period: int = 5
    solver: Literal["auto", "best", "optimal", "balanced", "dfs", "brute-force"] = "auto"
    fill: Literal["auto", True, False] = "auto"
    split: Literal["auto", True, False] = "auto"
    average: Average = "after_update"
    state: StatePolicy = "local"

    name: ClassVar[str] = "dreamddp"
    citation: ClassVar[str] = "Tang et al., DreamDDP, 2025, Algorithms 1 and 2, Section 3.4"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_count("period", self.period, remedy=EVERY_ITERATION)
        if self.split is True and self.state == "reset":
            raise ValueError(
                "split (True) must be left out with state 'reset': a slice has no optimizer state "
                "of its own to reset; use state='local' or 'averaged'"
            )

    def schedule(self, profile: Profile) -> Plan:
        layers = [*self._layer_sets(profile, [frozenset()]), *self._at_once(profile)]
        chosen_s, chosen = self._fastest(layers, profile)
        slices = self._layer_sets(profile, self._cuts(len(profile.buckets)))
        if slices:
            sliced_s, sliced = self._fastest(slices, profile)
            gain = SLICES_GAIN if self.split == "auto" else ROUNDING
            if sliced_s < chosen_s * (1 - gain):
                return self._plan_of(sliced, profile)
        return self._plan_of(chosen, profile)

    def equations(self, plan: Plan) -> Equations:
        return partial(layer_sets(plan), self.average, self.state)

    def bound_s(self, profile: Profile) -> float:
        return periodic_bound_s(profile, self.period, fused=True)

    def _layer_sets(self, profile: Profile, cuts: Iterable[frozenset[int]]) -> list[_Candidate]:
        """The cheapest sets of all the ways to cut buckets into slices, filled or not."""
        best: _Candidate | None = None
        backward_s, whole_s = layer_times(profile, self.average, self.state)
        slices = [Piece(piece.buckets, 0, self.period) for piece in whole(len(whole_s))]
        slice_s = [piece.seconds(profile, self.state) for piece in slices] if self.split else []
        for sliced in cuts:
            pieces, times = cut(sliced, self.period, backward_s, whole_s, slice_s)
            sets = _SOLVERS[self.solver](*times, self.period)
            cost_s = solve.period_cost(sets, *times)
            if best is None or cost_s < best.cost_s:
                best = _Candidate(cost_s, pieces, sets, ((),) * self.period, times)
        if best is None:
            return []
        fill = solve.fill_bubbles(best.sets, *best.times) if self.fill else best.fill
        filled = best._replace(fill=fill)
        return [filled, best] if self.fill == "auto" and filled != best else [filled]

    def _at_once(self, profile: Profile) -> Iterator[_Candidate]:
        """All layers in the last iteration, in messages that end as early as possible or in one:
        local SGD's schedule."""
        if self.solver != "auto":
            return
        times = layer_times(profile, self.average, self.state)
        ready_s, link = list(accumulate(times[0])), profile.default_link.name
        fused = solve.optimal_fusion(
            ready_s,
            lambda first, stop: sum(
                profile.messages_ending_s(link, kind, first, stop) for kind in kinds_of(self.state)
            ),
        )
        for groups in dict.fromkeys((fused, (range(len(ready_s)),))):
            pieces = [Piece(group) for group in groups]
            end_s = solve.fusion_finish(
                groups, ready_s, lambda group: Piece(group).seconds(profile, self.state)
            )
            cost_s = (self.period - 1) * ready_s[-1] + max(ready_s[-1], end_s)
            sets = (*((),) * (self.period - 1), tuple(range(len(pieces))))
            yield _Candidate(cost_s, pieces, sets, ((),) * self.period, times)

    def _cuts(self, size: int) -> list[frozenset[int]]:
        """Sets of buckets to try in slices: some of the first and of the last; all."""
        few = size * self.period <= MOST_SLICES
        unasked = self.solver == "auto" and self.state != "reset" and few
        if not (self.split is True or (self.split == "auto" and unasked)):
            return []
        most = min(self.period, size)
        ends = {*range(min(most, FEW_ENDS) + 1), *(2**n for n in range(most.bit_length())), most}
        some = [
            frozenset((*range(a), *range(size - z, size)))
            for a in sorted(ends)
            for z in sorted(ends)
        ]
        return list(dict.fromkeys([*some[1:], frozenset(range(size))]))

    def _fastest(
        self, candidates: Iterable[_Candidate], profile: Profile
    ) -> tuple[float, _Candidate]:
        """The candidate with the shortest period, and its seconds; the first of those as fast."""
        best_s, best = float("inf"), None
        for candidate in candidates:
            seconds = self._period_s(candidate, profile)
            if best is None or seconds < best_s * (1 - ROUNDING):
                best_s, best = seconds, candidate
        assert best is not None
        return best_s, best

    def _period_s(self, candidate: _Candidate, profile: Profile) -> float:
        """Predicted seconds of one period, the processor time of its messages included.

        Without jitter the cost of the sets says it exactly; with it the plan is simulated, always
        with the same noise, so that candidates can be compared.
        """
        link = profile.default_link.name
        sending_s = sum(
            profile.sending_s(payload, link)
            for i in chain(*candidate.sets, *candidate.fill)
            for payload in candidate.pieces[i].payloads(self.state)
        )
        periods = max(4, -(-LEAST_ITERATIONS // self.period))
        iterations = periods * self.period
        if not profile.jitter or iterations * len(profile.buckets) > MOST_SIMULATED:
            slowest = profile.slowest()
            outside_s = slowest.other_s + slowest.forward_s
            if self.average == "before_update":
                outside_s += slowest.update_s
            return self.period * outside_s + candidate.cost_s + sending_s
        plan, ranks = self._plan_of(candidate, profile), Ranks(jitter=profile.jitter)
        trace = simulate(plan, profile, iterations=iterations, ranks=ranks, record=0)
        return max(ends_s[-1] for ends_s in trace.ends_s) / periods + sending_s

    def _plan_of(self, candidate: _Candidate, profile: Profile) -> Plan:
        return partial_plan(
            self.name,
            profile,
            candidate.sets,
            candidate.fill,
            self.average,
            self.state,
            candidate.pieces,
        )


class _Candidate(NamedTuple):
    """Pieces, when they are averaged, and what a period costs without its forward passes."""

    cost_s: float
    pieces: list[Piece]
    sets: solve.Sets
    fill: solve.Sets
    times: tuple[list[float], list[float]]


def cut(
    sliced: Container[int],
    parts: int,
    backward_s: Sequence[float],
    whole_s: Sequence[float],
    slice_s: Sequence[float],
) -> tuple[list[Piece], tuple[list[float], list[float]]]:
    """The buckets in `sliced` in `parts` slices of `slice_s` each, the others whole: pieces, and
    their backward and communication seconds. A bucket's slices are ready together."""
    pieces: list[Piece] = []
    ready_s: list[float] = []
    sending_s: list[float] = []
    for one in whole(len(backward_s)):
        bucket = one.buckets[0]
        if bucket in sliced:
            pieces += [Piece(one.buckets, part, parts) for part in range(parts)]
            ready_s += [backward_s[bucket]] + [0.0] * (parts - 1)
            sending_s += [slice_s[bucket]] * parts
        else:
            pieces.append(one)
            ready_s.append(backward_s[bucket])
            sending_s.append(whole_s[bucket])
    return pieces, (ready_s, sending_s)


_SOLVERS: dict[str, Solver] = {
    "auto": solve.best,
    "best": solve.best,
    "optimal": solve.optimal,
    "balanced": solve.balanced,
    "dfs": solve.dfs,
    "brute-force": solve.brute_force,
}
