"""DreamDDP: partial synchronization with sets of layers chosen to hide under backward."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain
from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from offbeat.core.derive import effects
from offbeat.core.plan import Apply, Plan
from offbeat.core.profile import Profile
from offbeat.core.sim import simulate
from offbeat.core.strategy.interface import StatePolicy, Strategy, periodic_bound_s, require_count
from offbeat.core.verify.equations import Clip, Equations, delayed, layer_sets, partial
from offbeat.strategies import dreamddp_due as later
from offbeat.strategies import solvers as solve
from offbeat.strategies.compressible import NONE, Wired
from offbeat.strategies.dreamddp_due import Candidate
from offbeat.strategies.local_sgd import EVERY_ITERATION, LocalSGD
from offbeat.strategies.outer_optimizer import OuterSGD, equations_of, outer_of, with_outer
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

Solver = Callable[[list[float], list[float], int], solve.Sets]

SLICES_GAIN = 0.02  # what slices must save before they are chosen unasked: they are more messages
MOST_STARTS = 600  # buckets that may begin a message where all are averaged at once
MOST_CUT = 60_000  # pieces in all ways to cut buckets into slices that are looked at
MOST_PIECES = 6_000  # of those that are looked at closely
MOST_SLICES = 4000  # of all buckets: with more, slices save little and take long to plan
SIMULATED_GAIN = 0.005  # what other sets must save where that is simulated with noise
FEW_ENDS = 8  # so many buckets at either end are tried one by one, more of them by doubling
LEAST_ITERATIONS = 24  # simulated per candidate, and at least four periods
MOST_SIMULATED = 10_000  # buckets times iterations; with more the closed form has to do
ROUNDING = 1e-9


@dataclass(frozen=True)
class DreamDDP(Wired):
    """Sets of layers are averaged under backward, one set per iteration, chosen to fit there.

    By default the solver takes the better one of contiguous and of any sets, or all layers in one
    iteration as in local SGD, whichever is predicted to be faster.

    `split` (ours) cuts buckets - the first and the last ready, or all - into slices: every
    iteration then has something to send early and little to send late. By itself it does so with
    the solver `auto` only.

    `due` (ours, beyond the paper): `forward` trains with the same equations; sets and order are
    searched together (`solver="auto"`). `delayed` (`w += mean(snapshot) - snapshot`) is stale,
    takes two more copies of the parameters, and sends whole buckets, without `fill` and `split`;
    the optimizer steps once for all, so clipping and GradScaler work. Both take the plan with
    `due="end"` where it is predicted to be faster.

    `clip` bounds the norm of a worker's own gradients, as `clip_grad_norm_` does. Updates in
    backward come before that norm is known: they go by the one of the last iteration, the first by
    that of the buckets so far. With `average="before_update"` it is this iteration's.
    """

    period: int = 5
    """Every layer is averaged at least once in so many iterations."""
    solver: Literal["auto", "best", "optimal", "balanced", "dfs", "brute-force"] = "auto"
    """How layers are put into sets: the better one of `optimal` (contiguous) and `balanced` (any)
    is `best`; `dfs` is the paper's Algorithm 2; `auto` also considers all layers in one
    iteration."""
    fill: Literal["auto", True, False] = "auto"
    """Whether iterations average further layers of the output side where that costs no time;
    `auto`: unless jitter makes it slower, or a codec (`wire`) is there to send less."""
    split: Literal["auto", True, False] = "auto"
    """Whether layers are cut into one slice per iteration; `auto`: where that saves at least 2
    %."""
    average: Average = "after_update"
    """Whether a layer is averaged after its own update in backward, or before it, which leaves the
    update to `optimizer.step()`."""
    state: StatePolicy = "local"
    """What becomes of optimizer state at an average: it stays `local`, is `averaged` too, or begins
    anew (`reset`)."""
    due: Literal["end", "forward", "delayed"] = "end"
    """What hides a message: the rest of backward (`end`), also the next forward up to the bucket's
    own (`forward`), or training that goes on for `delay` iterations more (`delayed`)."""
    delay: int = 1
    """Iterations that training goes on while an average travels (`due="delayed"`)."""
    clip: float | None = None
    """Largest norm of a worker's gradients; None: any."""
    outer: OuterSGD | None = None
    """An optimizer that steps on what every average has changed, as OuterSGD(0.8, 0.3) or
    `0.8/0.3`; two more copies of the parameters, and whole layers once per period (no `fill`, no
    `split`). None: the average itself."""

    name: ClassVar[str] = "dreamddp"
    synchronous: ClassVar[bool] = False
    citation: ClassVar[str] = "Tang et al., DreamDDP, 2025, Algorithms 1 and 2, Section 3.4"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_count("period", self.period, remedy=EVERY_ITERATION)
        object.__setattr__(self, "outer", outer_of(self.outer))
        for name in ("fill", "split"):
            if self.outer is not None and getattr(self, name) is True:
                raise ValueError(
                    f"{name} (True) must be left out with outer ({self.outer}), which steps whole "
                    "layers once per period; leave it out, or use outer=None"
                )
        if self.clip is not None and not 0 < self.clip < float("inf"):
            raise ValueError(f"clip ({self.clip}) must be a norm above 0, or None for no clipping")
        if self.split is True and self.state == "reset":
            raise ValueError(
                "split (True) must be left out with state 'reset': a slice has no optimizer state "
                "of its own to reset; use state='local' or 'averaged'"
            )
        require_count(
            "delay", self.delay, remedy="due='forward' lands averages without being stale"
        )
        if self.clip is not None and self.due == "forward" and self.average == "before_update":
            raise ValueError(
                f"clip ({self.clip}) needs all gradients at once; with due 'forward' and average "
                "'before_update' each bucket is updated at its own forward; use due='end'"
            )
        if self.due == "delayed":
            self._require_delayable()
        elif self.delay != 1:
            raise ValueError(
                f"delay ({self.delay}) counts only with due 'delayed'; due is {self.due!r}: leave "
                "delay out, or use due='delayed'"
            )

    def _require_delayable(self) -> None:
        if self.delay >= self.period:
            raise ValueError(
                f"delay ({self.delay}) must be below the period ({self.period}): a bucket's next "
                "snapshot takes the room of its last one; use a smaller delay or a longer period"
            )
        for name, only in (("state", "local"), ("fill", "auto"), ("split", "auto")):
            value = getattr(self, name)
            if value not in (only, False):
                raise ValueError(
                    f"{name} ({value!r}) must be left out with due 'delayed', which averages "
                    "snapshots of whole parameters, each once per period; or use due='forward'"
                )

    def schedule(self, profile: Profile) -> Plan:
        if self.fill == "auto" and self.wire != NONE:
            return replace(self, fill=False).schedule(profile)
        if self.outer is not None:
            plain = replace(self, outer=None, fill=False, split=False)
            return with_outer(plain.schedule(profile), self.outer, profile)
        if self.due == "forward":
            plan = self._due_at_forward(profile)
        elif self.due == "delayed":
            plan = self._delayed(profile)
        else:
            plan = self._plan_of(self._chosen(profile), profile)
        return plan if self.clip is None else _clipped(plan, self.clip)

    def _chosen(self, profile: Profile) -> Candidate:
        """What the paper's variant is predicted to do fastest."""
        layers = self._layer_sets(profile, [frozenset()])
        layers += self._at_once(profile, min(self._closed_s(one, profile) for one in layers))
        chosen_s, chosen = self._fastest(layers, profile)
        slices = self._layer_sets(profile, self._cuts(len(profile.buckets)))
        if slices:
            sliced_s, sliced = self._fastest(slices, profile)
            gain = SLICES_GAIN if self.split == "auto" else ROUNDING
            if sliced_s < chosen_s * (1 - gain):
                return sliced
        return chosen

    def at_step(self) -> Strategy | None:
        if self.due == "forward":  # both variants update a bucket at a time
            return replace(self, average="before_update", due="end")
        early = self.average == "after_update"
        return replace(self, average="before_update") if early else None

    def equations(self, plan: Plan) -> Equations:
        early = any(effects.is_update(a) and a.at.point == "grad" for a in plan.applies)
        clip = None if self.clip is None else Clip(self.clip, plan.buckets if early else None)
        outer = equations_of(self.outer)
        late = layer_sets(plan, "average")
        if any(late):
            return delayed(late, self.delay, self.average, clip, outer)
        return partial(layer_sets(plan), self.average, self.state, clip, outer)

    def bound_s(self, profile: Profile) -> float:
        if self.due == "forward":
            return later.forward_bound_s(self._setting(profile))
        if self.due == "delayed":
            return later.delayed_bound_s(self._setting(profile))
        return periodic_bound_s(profile, self.period, fused=True)

    def _setting(self, profile: Profile) -> later.Setting:
        return later.Setting(self.name, profile, self.period, self.average, self.state)

    def _due_at_forward(self, profile: Profile) -> Plan:
        """Sets of whole buckets in any case; slices where they save enough, as above."""
        setting, size = self._setting(profile), len(profile.buckets)
        chosen = self._chosen(profile)
        cuts = self._input_side(size) if self._cuts(size) else []
        found = [*later.forward_choices(setting, chosen, cuts, search=self.solver == "auto")]

        simulated = self._simulated(profile)
        gain = SIMULATED_GAIN if simulated else ROUNDING
        extended = self._plan_of(chosen, profile)
        if simulated:
            extended_s = later.steady_s(extended, profile) * self.period
        else:
            extended_s = self._closed_s(chosen, profile)
        known: dict[int, float] = {}  # by choice, all of which live as long

        def seconds(choice: later.Choice) -> float:
            """As the simulator has it, where it tells more than the closed form."""
            if not simulated:
                sent = chain(*choice.orders)
                return choice.closed_s + self._sending_s(choice.pieces, sent, profile)
            if id(choice) not in known:
                plan = later.forward_plan(setting, choice)
                known[id(choice)] = later.steady_s(plan, profile) * self.period
            return known[id(choice)]

        best = later.fastest(found, seconds, gain)
        plain = [c for c in found if all(piece.parts == 1 for piece in c.pieces)]
        if plain and self.split == "auto":
            other = later.fastest(plain, seconds, gain)
            faster = seconds(best) < seconds(other) * (1 - SLICES_GAIN)
            if not faster and seconds(other) <= extended_s * (1 + ROUNDING):
                best = other
        if self.fill:
            filled = later.with_fill(setting, best)
            if self.fill is True or seconds(filled) <= seconds(best) * (1 + ROUNDING):
                best = filled
        plan = later.forward_plan(setting, best)
        if simulated:
            return later.no_slower(plan, extended, profile)
        return plan if seconds(best) <= extended_s * (1 + ROUNDING) else later.extended(extended)

    def _input_side(self, size: int) -> list[frozenset[int]]:
        """Buckets to try in slices: the last ones, which the next forward needs first; all."""
        some = {2**n for n in range(size.bit_length())} | {size}
        most = max(MOST_SLICES - size, 0) // max(self.period - 1, 1)
        fitting = (last for last in sorted(some) if last <= min(size, most))
        return [frozenset(range(size - last, size)) for last in fitting]

    def _delayed(self, profile: Profile) -> Plan:
        """Runs of neighbours, or other sets of whole buckets where that is faster."""
        setting, size = self._setting(profile), len(profile.buckets)
        times = layer_times(profile, self.average, self.state)
        choice = Candidate(whole(size), _SOLVERS[self.solver](*times, self.period))
        if self.solver == "auto":
            at_once = self._at_once(profile, float("inf"))
            starts = [choice, *(c for c in at_once if not c.at_step)]
            small = size * self._periods() * self.period <= MOST_SIMULATED
            choice = later.delayed_choice(setting, self.delay, starts, simulated=small)
        plan = later.delayed_plan(setting, self.delay, choice)
        plain = replace(self, due="end", delay=1)
        return later.no_slower(plan, plain._plan_of(plain._chosen(profile), profile), profile)

    def _layer_sets(self, profile: Profile, cuts: Sequence[frozenset[int]]) -> list[Candidate]:
        """The cheapest sets of all the ways to cut buckets into slices, filled or not."""
        best: Candidate | None = None
        best_s, best_n, best_times = float("inf"), 0, ([], [])
        backward_s, whole_s = layer_times(profile, self.average, self.state)
        slice_s = piece_times(profile, self.state, self.period) if any(cuts) else []
        outside_s = [self._outside_s(profile) + s for s in self._sent_s(profile, cuts)]
        least_s = self._least_costs_s(cuts, backward_s, whole_s, slice_s)
        # Contiguous sets, which are found fast, tell which ways to look at first.
        rough: list[tuple[float, int, tuple[list[float], list[float]]]] = []
        left = MOST_CUT
        for n in sorted(range(len(cuts)), key=lambda n: (outside_s[n] + least_s[n], n)):
            left -= len(backward_s) + (self.period - 1) * len(cuts[n])
            if left < 0 and rough:
                continue
            times = cut_times(cuts[n], self.period, backward_s, whole_s, slice_s)
            rough_s = 0.0
            if len(cuts) > 1:
                rough_s = solve.period_cost(solve.optimal(*times, self.period), *times)
            rough.append((outside_s[n] + rough_s, n, times))
        left = MOST_PIECES
        for _, n, times in sorted(rough, key=lambda one: one[:2]):
            if outside_s[n] + least_s[n] > best_s * (1 + ROUNDING):
                continue
            left -= len(times[0])
            if left < 0 and best is not None:
                break
            sets = _SOLVERS[self.solver](*times, self.period)
            cost_s = solve.period_cost(sets, *times)
            if (outside_s[n] + cost_s, n) < (best_s, best_n):
                best_s, best_n = outside_s[n] + cost_s, n
                pieces = later.cut_into(cuts[n], self._setting(profile))
                best = Candidate(pieces, sets, ((),) * self.period, cost_s)
                best_times = times
        if best is None:
            return []
        fill = solve.fill_bubbles(best.sets, *best_times) if self.fill else best.fill
        filled = best._replace(fill=fill)
        return [filled, best] if self.fill == "auto" and filled != best else [filled]

    def _least_costs_s(
        self,
        cuts: Sequence[frozenset[int]],
        backward_s: Sequence[float],
        whole_s: Sequence[float],
        slice_s: Sequence[float],
    ) -> list[float]:
        """For each way to cut buckets into slices, a lower bound on the cost of all sets.

        An iteration that sends `c` seconds of the buckets from k on ends `ready_s[k] + c` after its
        backward has begun, or later. Over a period the c add up to all messages of these buckets.
        """
        ready_s = np.cumsum(backward_s)
        least_s = []
        for sliced in cuts:
            messages_s = np.array(whole_s)
            some = list(sliced)
            if some:
                messages_s[some] = self.period * np.array(slice_s)[some]
            later_s = messages_s[::-1].cumsum()[::-1]
            latest_s = (ready_s + later_s / self.period).max()
            least_s.append(self.period * float(max(ready_s[-1], latest_s)))
        return least_s

    def _sent_s(self, profile: Profile, cuts: Sequence[frozenset[int]]) -> list[float]:
        """For each way to cut buckets into slices, the processor time of all messages, each sent
        once."""
        link = profile.default_link
        whole_s = more_s = np.zeros(len(profile.buckets))
        for kind in kinds_of(self.state):
            sizes = np.array([bucket.payload_bytes(kind) for bucket in profile.buckets])
            per_message_s = link.cpu_s_per_message * (sizes > 0)
            whole_s = whole_s + per_message_s + link.cpu_s_per_byte * sizes
            more_s = more_s + (self.period - 1) * per_message_s
        total_s = float(whole_s.sum())
        return [total_s + float(more_s[list(sliced)].sum()) for sliced in cuts]

    def _at_once(self, profile: Profile, layers_s: float) -> Iterator[Candidate]:
        """All layers in the last iteration: in messages that end as early as possible, in one, or
        exactly as local SGD does. None where even the least that they can take is more than
        `layers_s`, what sets of layers take."""
        if self.solver != "auto":
            return
        times = layer_times(profile, self.average, self.state)
        ready_s, everything = list(accumulate(times[0])), range(len(times[0]))
        idle: solve.Sets = ((),) * (self.period - 1)
        none: solve.Sets = ((),) * self.period

        def candidate(groups: solve.Fusion) -> Candidate:
            pieces = [Piece(group) for group in groups]
            end_s = solve.fusion_finish(
                groups, ready_s, lambda group: Piece(group).seconds(profile, self.state)
            )
            cost_s = (self.period - 1) * ready_s[-1] + max(ready_s[-1], end_s)
            return Candidate(pieces, (*idle, tuple(range(len(pieces)))), none, cost_s)

        one = candidate((everything,))
        message_s = one.pieces[0].seconds(profile, self.state)
        ends_s = max(ready_s[-1] + times[1][-1], ready_s[0] + message_s)
        least_s = one._replace(cost_s=(self.period - 1) * ready_s[-1] + ends_s)
        if self._simulated(profile) or self._closed_s(least_s, profile) < layers_s:
            yield candidate(self._fused(profile, ready_s))
        yield one
        if self.average == "after_update":
            slowest = profile.slowest()
            local_s = self.period * (slowest.backward_s + slowest.update_s) + message_s
            yield one._replace(cost_s=local_s, at_step=True)

    def _fused(self, profile: Profile, ready_s: Sequence[float]) -> solve.Fusion:
        """Messages of neighbouring buckets that end as early as possible; of many buckets only some
        may begin a message, which costs at most the time of as many as lie between two of them."""
        link, size = profile.default_link.name, len(ready_s)
        starts = range(0, size, -(-size // MOST_STARTS))
        bounds = [*starts, size]

        def ending_s(first: int, stop: int) -> NDArray[np.float64]:
            found = [
                profile.messages_ending_s(link, kind, bounds[first], bounds[stop])
                for kind in kinds_of(self.state)
            ]
            return np.sum(found, axis=0)[:: starts.step]

        groups = solve.optimal_fusion([ready_s[bound - 1] for bound in bounds[1:]], ending_s)
        return tuple(range(bounds[group.start], bounds[group.stop]) for group in groups)

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
        self, candidates: Iterable[Candidate], profile: Profile
    ) -> tuple[float, Candidate]:
        """The candidate with the shortest period, and its seconds; the first of those as fast."""
        best_s, best = float("inf"), None
        for candidate in candidates:
            seconds = self._period_s(candidate, profile)
            if best is None or seconds < best_s * (1 - ROUNDING):
                best_s, best = seconds, candidate
        assert best is not None
        return best_s, best

    def _period_s(self, candidate: Candidate, profile: Profile) -> float:
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

    def _closed_s(self, candidate: Candidate, profile: Profile) -> float:
        """Seconds of one period of steady ranks that wait for the processor time of messages."""
        messages = chain(*candidate.sets, *candidate.fill)
        sending_s = self._sending_s(candidate.pieces, messages, profile)
        return self._outside_s(profile) + candidate.cost_s + sending_s

    def _outside_s(self, profile: Profile) -> float:
        """Seconds of a period outside of backward."""
        slowest = profile.slowest()
        outside_s = slowest.other_s + slowest.forward_s
        if self.average == "before_update":
            outside_s += slowest.update_s
        return self.period * outside_s

    def _sending_s(self, pieces: Sequence[Piece], sent: Iterable[int], profile: Profile) -> float:
        """Processor time of a period's messages."""
        link = profile.default_link
        if not (link.cpu_s_per_message or link.cpu_s_per_byte):
            return 0.0
        return sum(
            profile.sending_s(payload, link.name)
            for i in sent
            for payload in pieces[i].payloads(self.state)
        )

    def _plan_of(self, candidate: Candidate, profile: Profile) -> Plan:
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


def _clipped(plan: Plan, norm: float) -> Plan:
    """With the norm of a worker's own gradients bounded: before the step, or in backward by the
    norm of the iteration before."""
    applies = []
    for apply in plan.applies:
        if effects.is_update(apply):
            rule = "clip_early" if apply.at.point == "grad" else "clip"
            args = (("buffer", "grad"), ("norm", float(norm)))
            applies.append(Apply(rule, apply.buckets, apply.at, apply.phases, args=args))
        applies.append(apply)
    return replace(plan, applies=tuple(applies))


def cut_times(
    sliced: Collection[int],
    parts: int,
    backward_s: Sequence[float],
    whole_s: Sequence[float],
    slice_s: Sequence[float],
) -> tuple[list[float], list[float]]:
    """Backward and communication seconds of the pieces of all buckets: those in `sliced` in `parts`
    slices of `slice_s` each, which are ready together, the others whole."""
    if not sliced:
        return list(backward_s), list(whole_s)
    some, counts = list(sliced), np.ones(len(backward_s), dtype=np.intp)
    counts[some] = parts
    message_s = np.array(whole_s)
    message_s[some] = np.array(slice_s)[some]
    pieces_s = np.zeros(counts.sum())
    pieces_s[np.cumsum(counts) - counts] = backward_s  # the first slice has all of a bucket's
    return pieces_s.tolist(), np.repeat(message_s, counts).tolist()


_SOLVERS: dict[str, Solver] = {
    "auto": solve.best,
    "best": solve.best,
    "optimal": solve.optimal,
    "balanced": solve.balanced,
    "dfs": solve.dfs,
    "brute-force": solve.brute_force,
}
