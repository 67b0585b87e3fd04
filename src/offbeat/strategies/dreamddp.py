"""DreamDDP: partial synchronization with sets of layers chosen to hide under backward."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain
from typing import ClassVar, Literal, NamedTuple

import numpy as np

from offbeat import solve
from offbeat.plan import Plan
from offbeat.profile import Profile
from offbeat.sim import simulate
from offbeat.strategies.base import StatePolicy, Strategy, periodic_bound_s, require_count
from offbeat.strategies.local_sgd import EVERY_ITERATION, LocalSGD
from offbeat.strategies.partial_sync import (
    Average,
    Piece,
    kinds_of,
    layer_times,
    partial_plan,
    piece_times,
    sets_facts,
    whole,
)
from offbeat.testing.equations import Equations, layer_sets, partial

Solver = Callable[[list[float], list[float], int], solve.Sets]

SLICES_GAIN = 0.02  # what slices must save before they are chosen unasked: they are more messages
MOST_SLICES = 4000  # of all buckets: with more, slices save little and take long to plan
FEW_ENDS = 8  # so many buckets at either end are tried one by one, more of them by doubling
LEAST_ITERATIONS = 24  # simulated per candidate, and at least four periods
MOST_SIMULATED = 10_000  # buckets times iterations; with more the closed form has to do
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
    synchronous: ClassVar[bool] = False
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
        layers = self._layer_sets(profile, [frozenset()])
        layers += self._at_once(profile, min(self._closed_s(one, profile) for one in layers))
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

    def _layer_sets(self, profile: Profile, cuts: Sequence[frozenset[int]]) -> list[_Candidate]:
        """The cheapest sets of all the ways to cut buckets into slices, filled or not."""
        best: _Candidate | None = None
        best_s = float("inf")
        backward_s, whole_s = layer_times(profile, self.average, self.state)
        slice_s = piece_times(profile, self.state, self.period) if any(cuts) else []
        for sliced in cuts:
            pieces, times = cut(sliced, self.period, backward_s, whole_s, slice_s)
            sets = _SOLVERS[self.solver](*times, self.period)
            cost_s = solve.period_cost(sets, *times)
            candidate = _Candidate(cost_s, pieces, sets, ((),) * self.period, times)
            seconds = self._closed_s(candidate, profile)
            if seconds < best_s:
                best_s, best = seconds, candidate
        if best is None:
            return []
        fill = solve.fill_bubbles(best.sets, *best.times) if self.fill else best.fill
        filled = best._replace(fill=fill)
        return [filled, best] if self.fill == "auto" and filled != best else [filled]

    def _at_once(self, profile: Profile, layers_s: float) -> Iterator[_Candidate]:
        """All layers in the last iteration: in messages that end as early as possible, in one, or
        exactly as local SGD does. None where even the least that they can take is more than
        `layers_s`, what sets of layers take."""
        if self.solver != "auto":
            return
        times = layer_times(profile, self.average, self.state)
        ready_s, everything = list(accumulate(times[0])), range(len(times[0]))
        idle: solve.Sets = ((),) * (self.period - 1)
        none: solve.Sets = ((),) * self.period

        def candidate(groups: solve.Fusion) -> _Candidate:
            pieces = [Piece(group) for group in groups]
            end_s = solve.fusion_finish(
                groups, ready_s, lambda group: Piece(group).seconds(profile, self.state)
            )
            cost_s = (self.period - 1) * ready_s[-1] + max(ready_s[-1], end_s)
            return _Candidate(cost_s, pieces, (*idle, tuple(range(len(pieces)))), none, times)

        one = candidate((everything,))
        message_s = one.pieces[0].seconds(profile, self.state)
        ends_s = max(ready_s[-1] + times[1][-1], ready_s[0] + message_s)
        least_s = one._replace(cost_s=(self.period - 1) * ready_s[-1] + ends_s)
        if self._simulated(profile) or self._closed_s(least_s, profile) < layers_s:
            link = profile.default_link.name
            fused = solve.optimal_fusion(
                ready_s,
                lambda first, stop: np.sum(
                    [
                        profile.messages_ending_s(link, kind, first, stop)
                        for kind in kinds_of(self.state)
                    ],
                    axis=0,
                ),
            )
            yield candidate(fused)
        yield one
        if self.average == "after_update":
            slowest = profile.slowest()
            local_s = self.period * (slowest.backward_s + slowest.update_s) + message_s
            yield one._replace(cost_s=local_s, at_step=True)

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
        """Predicted seconds of one period: simulated where that tells more than the cost of the
        sets, always with the same noise, so that candidates can be compared."""
        if not self._simulated(profile):
            return self._closed_s(candidate, profile)
        plan = self._plan_of(candidate, profile)
        periods = self._periods()
        trace = simulate(plan, profile, iterations=periods * self.period, record=0)
        return max(ends_s[-1] for ends_s in trace.ends_s) / periods

    def _simulated(self, profile: Profile) -> bool:
        """Whether candidates are simulated: where compute varies or messages take from it, unless
        that would take too long."""
        link = profile.default_link
        uneven = any(profile.jitters) or link.jitter
        uneven = uneven or link.cpu_s_per_message or link.cpu_s_per_byte
        iterations = self._periods() * self.period
        return bool(uneven) and iterations * len(profile.buckets) <= MOST_SIMULATED

    def _periods(self) -> int:
        return max(4, -(-LEAST_ITERATIONS // self.period))

    def _closed_s(self, candidate: _Candidate, profile: Profile) -> float:
        """Seconds of one period of steady ranks that wait for the processor time of messages."""
        slowest, link = profile.slowest(), profile.default_link
        outside_s = slowest.other_s + slowest.forward_s
        if self.average == "before_update":
            outside_s += slowest.update_s
        sending_s = 0.0
        if link.cpu_s_per_message or link.cpu_s_per_byte:
            sending_s = sum(
                profile.sending_s(payload, link.name)
                for i in chain(*candidate.sets, *candidate.fill)
                for payload in candidate.pieces[i].payloads(self.state)
            )
        return self.period * outside_s + candidate.cost_s + sending_s

    def _plan_of(self, candidate: _Candidate, profile: Profile) -> Plan:
        if candidate.at_step:
            local = LocalSGD(self.period, state=self.state).schedule(profile)
            facts = sets_facts(candidate.sets, candidate.fill, candidate.pieces)
            return replace(local, strategy=self.name, facts=facts)
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
    """Pieces, when they are averaged, and what a period costs without its forward passes.

    `at_step`: update and average as local SGD does, in one step of all and not bucket by bucket.
    """

    cost_s: float
    pieces: list[Piece]
    sets: solve.Sets
    fill: solve.Sets
    times: tuple[list[float], list[float]]
    at_step: bool = False


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
