"""DreamDDP: partial synchronization with sets of layers whose averages fit under backward."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain
from math import inf
from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from offbeat.core.derive import effects
from offbeat.core.plan import Apply, Plan
from offbeat.core.profile import Profile
from offbeat.core.sim import simulate
from offbeat.core.strategy.interface import StatePolicy, Strategy, periodic_bound_s, require_count
from offbeat.core.strategy.suggestions import periods
from offbeat.strategies import dreamddp_cuts as cutting
from offbeat.strategies import dreamddp_due as later
from offbeat.strategies import solvers as solve
from offbeat.strategies.compressible import NONE, Wired, with_wires
from offbeat.strategies.dreamddp_due import Candidate
from offbeat.strategies.equations import Clip, Equations, delayed, layer_sets, partial
from offbeat.strategies.local_sgd import EVERY_ITERATION, LocalSGD, kinds_of
from offbeat.strategies.outer_optimizer import (
    OuterSGD,
    equations_of,
    is_real,
    outer_of,
    with_outer,
)
from offbeat.strategies.partial_sync import (
    Average,
    AverageSetting,
    Piece,
    average_of,
    layer_set_facts,
    layer_times,
    partial_plan,
    piece_times,
    whole_buckets,
)

Solver = Callable[[list[float], list[float], int], solve.Sets]

SLICES_GAIN = 0.02  # relative gain required of slices with `split="auto"`: slices are more messages
MOST_STARTS = 600  # largest number of buckets that may begin a message in an average of all
# Largest number of pieces, summed over the cuts whose costs are estimated (MOST_CUT) and over the
# cuts for which sets are computed (MOST_PIECES). A cut is a set of buckets in slices. Its pieces
# are these slices and all other buckets.
MOST_CUT = 60_000
MOST_PIECES = 6_000
SIMULATED_GAIN = 0.005  # relative gain required of other sets in a simulation with noise
LEAST_ITERATIONS = 24  # least number of iterations simulated per candidate; also at least 4 periods
# largest number of simulated buckets times iterations; above it, the closed form is used
MOST_SIMULATED = 10_000
ROUNDING = 1e-9
SUGGESTED_DELAYS = (1, 2, 4)  # delays that advice compares


@dataclass(frozen=True)
class DreamDDP(Wired):
    """Average sets of layers under backward, one set per iteration, chosen to fit there.

    By default the solver compares contiguous sets, arbitrary sets, and all layers in one iteration
    as in local SGD. It uses the candidate with the shortest predicted period.

    `split` (extension of offbeat) cuts buckets into slices: the first and the last ready ones, or
    all. Every iteration then has a message to send early and little to send late. `split="auto"`
    cuts buckets only with the solver `auto`.

    `due` (extension of offbeat) sets the deadline of averages. `forward` has the same equations;
    sets and order are searched together (`solver="auto"`). `delayed` (`w += mean(snapshot) -
    snapshot`) trains with stale averages. It needs two more copies of the parameters and sends
    whole buckets, without `fill` and `split`. The optimizer makes one step for all buckets, so
    clipping and GradScaler work. If the plan with `due="end"` is predicted to be faster, both
    settings use that plan. `gain` below 1 applies a share of the difference: when it arrives,
    training has already reduced it in the directions in which the loss is steep.

    `clip` bounds the norm of a worker's own gradients, as `clip_grad_norm_` does. Updates in
    backward come before that norm is known. Such updates use the norm of the previous iteration;
    the first iteration uses the norm of the buckets so far. With `average="before_update"` the norm
    of the current iteration is used.
    """

    period: int = 5
    """Every layer is averaged at least once in `period` iterations."""
    solver: Literal["auto", "best", "optimal", "balanced", "dfs", "brute-force"] = "auto"
    """Solver for the sets: `optimal` (contiguous sets), `balanced` (any sets), `best` (the better
    of both), `dfs` (Algorithm 2 of the paper), `brute-force`; `auto`: `best`, or all layers in one
    iteration."""
    fill: Literal["auto", True, False] = "auto"
    """Whether iterations average further layers of the output side that add no time; `auto`: unless
    jitter makes the plan slower, or a codec (`wire`) is set to reduce bytes."""
    split: Literal["auto", True, False] = "auto"
    """Whether layers are cut into one slice per iteration; `auto`: if that saves at least 2 %."""
    average: AverageSetting = "auto"
    """Time of a layer's average: after its own update in backward, or before the update, which then
    takes place in `optimizer.step()`; `auto`: `after_update`, but `before_update` if the model is
    sharded."""
    state: StatePolicy = "local"
    """Treatment of optimizer state at an average: keep it (`local`), average it too (`averaged`),
    or clear it (`reset`)."""
    due: Literal["end", "forward", "delayed"] = "end"
    """Deadline of a message, and so the compute that hides it: the rest of backward (`end`), also
    the next forward up to the bucket's own (`forward`), or `delay` further iterations
    (`delayed`)."""
    delay: int = 1
    """Number of iterations that train while an average is in flight (`due="delayed"`)."""
    gain: float = 1.0
    """Share of the difference from the average that a delayed average corrects, above 0 and at most
    1. A share of 0.5 avoids most of the loss that a long delay costs."""
    clip: float | None = None
    """Bound on the norm of a worker's gradients; None: no clipping."""
    outer: OuterSGD | None = None
    """Optimizer that applies the change of every average as a step, such as OuterSGD(0.8, 0.3) or
    `0.8/0.3`. It needs two more copies of the parameters and averages whole layers once per period
    (no `fill`, no `split`). None: parameters become the average."""

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
        if not is_real(self.gain) or not 0 < self.gain <= 1:
            raise ValueError(
                f"gain ({self.gain!r}) must lie above 0 and be at most 1; 1 corrects the whole "
                "difference"
            )
        if self.gain < 1 and (self.due != "delayed" or self.outer is not None):
            raise ValueError(
                f"gain ({self.gain:g}) counts only with due 'delayed' and without outer; leave it "
                "out, or use due='delayed' and outer=None"
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

    @classmethod
    def suggestions(cls, profile: Profile, max_staleness: int) -> Iterable[Strategy]:
        return with_wires(cls._suggested_settings(max_staleness))

    @classmethod
    def _suggested_settings(cls, max_staleness: int) -> Iterator[DreamDDP]:
        for period in periods(max_staleness + 1):
            yield cls(period)
            yield cls(period, due="forward")
        for delay in SUGGESTED_DELAYS:
            for period in periods(max_staleness + 1 - delay):
                if delay < period:
                    yield cls(period, due="delayed", delay=delay)

    @property
    def applies_late(self) -> bool:
        return self.due == "delayed"

    def schedule(self, profile: Profile) -> Plan:
        if self.fill == "auto" and self.wire != NONE:
            return replace(self, fill=False).schedule(profile)
        if self.outer is not None:
            plain = replace(self, outer=None, fill=False, split=False)
            return with_outer(plain.schedule(profile), self.outer, profile)
        if self.due == "forward":
            plan = self._forward_plan(profile)
        elif self.due == "delayed":
            plan = self._delayed_plan(profile)
        else:
            plan = self._plan_of(self._best_sets(profile), profile)
        return plan if self.clip is None else _with_clipping(plan, self.clip)

    def _best_sets(self, profile: Profile) -> Candidate:
        """Return the candidate of the paper's variant with the shortest predicted period."""
        layers = self._layer_sets(profile, [frozenset()])
        layers += self._full_sets(profile, min(self._formula_s(one, profile) for one in layers))

        def period_s(candidate: Candidate) -> float:
            return self._period_s(candidate, profile)

        chosen_s, chosen = later.fastest(layers, period_s)
        slices = self._layer_sets(profile, self._cuts(len(profile.buckets)))
        if slices:
            sliced_s, sliced = later.fastest(slices, period_s)
            gain = SLICES_GAIN if self.split == "auto" else ROUNDING
            if sliced_s < chosen_s * (1 - gain):
                return sliced
        return chosen

    def at_step(self) -> Strategy | None:
        if self.due == "forward":  # with either `average` each bucket is updated separately
            return replace(self, average="before_update", due="end")
        early = self._average == "after_update"
        return replace(self, average="before_update") if early else None

    @property
    def requires_early_updates(self) -> bool:
        return self.average == "after_update" and self.due != "delayed"

    @property
    def _average(self) -> Average:
        return average_of(self.average)

    def equations(self, plan: Plan) -> Equations:
        early = any(effects.is_update(a) and a.at.point == "grad" for a in plan.applies)
        clip = None if self.clip is None else Clip(self.clip, plan.buckets if early else None)
        outer = equations_of(self.outer)
        late = layer_sets(plan, "average")
        if any(late):
            return delayed(late, self.delay, self._average, clip, outer, self.gain)
        return partial(layer_sets(plan), self._average, self.state, clip, outer)

    def bound_s(self, profile: Profile) -> float:
        if self.due == "forward":
            return later.forward_plan_bound_s(self._setting(profile))
        if self.due == "delayed":
            return later.delayed_plan_bound_s(self._setting(profile))
        return periodic_bound_s(profile, self.period, fused=True)

    def _setting(self, profile: Profile) -> later.Setting:
        average = self._average
        return later.Setting(self.name, profile, self.period, average, self.state, self.gain)

    def _forward_plan(self, profile: Profile) -> Plan:
        """Return the plan with `due="forward"`: whole buckets, or slices if they save enough."""
        setting, size = self._setting(profile), len(profile.buckets)
        chosen = self._best_sets(profile)
        cuts = cutting.input_side_cuts(size, self.period) if self._cuts(size) else []
        choices = [*later.forward_choices(setting, chosen, cuts, search=self.solver == "auto")]

        simulated = self._needs_simulation(profile)
        gain = SIMULATED_GAIN if simulated else ROUNDING
        paper_plan = self._plan_of(chosen, profile)
        if simulated:
            paper_s = later.steady_s(paper_plan, profile) * self.period
        else:
            paper_s = self._formula_s(chosen, profile)
        # simulated seconds by id of the choice; all choices outlive the dict
        known: dict[int, float] = {}

        def seconds(choice: later.Choice) -> float:
            """Return the seconds of a period: simulated if candidates are simulated, otherwise in
            closed form."""
            if not simulated:
                sent = chain(*choice.orders)
                return choice.closed_s + self._cpu_s(choice.pieces, sent, profile)
            if id(choice) not in known:
                plan = later.forward_plan(setting, choice)
                known[id(choice)] = later.steady_s(plan, profile) * self.period
            return known[id(choice)]

        best_s, best = later.fastest(choices, seconds, gain)
        plain = [c for c in choices if all(piece.parts == 1 for piece in c.pieces)]
        if plain and self.split == "auto":
            other_s, other = later.fastest(plain, seconds, gain)
            faster = best_s < other_s * (1 - SLICES_GAIN)
            if not faster and other_s <= paper_s * (1 + ROUNDING):
                best_s, best = other_s, other
        if self.fill:
            filled = later.with_fill(setting, best)
            filled_s = seconds(filled)
            if self.fill is True or filled_s <= best_s * (1 + ROUNDING):
                best_s, best = filled_s, filled
        plan = later.forward_plan(setting, best)
        if simulated:
            return later.faster_plan(plan, paper_plan, profile)
        return plan if best_s <= paper_s * (1 + ROUNDING) else later.with_costs(paper_plan)

    def _delayed_plan(self, profile: Profile) -> Plan:
        """Return the plan with `due="delayed"`: runs of neighbouring buckets, or other sets of
        whole buckets if they are faster."""
        setting, size = self._setting(profile), len(profile.buckets)
        times = layer_times(profile, self._average, self.state)
        choice = Candidate(whole_buckets(size), _SOLVERS[self.solver](*times, self.period))
        if self.solver == "auto":
            at_once = self._full_sets(profile)
            starts = [choice, *(c for c in at_once if not c.at_step)]
            small = size * self._simulated_periods() * self.period <= MOST_SIMULATED
            choice = later.delayed_choice(setting, self.delay, starts, simulated=small)
        plan = later.delayed_plan(setting, self.delay, choice)
        plain = replace(self, due="end", delay=1, gain=1.0)
        return later.faster_plan(plan, plain._plan_of(plain._best_sets(profile), profile), profile)

    def _layer_sets(self, profile: Profile, cuts: Sequence[frozenset[int]]) -> list[Candidate]:
        """Return the cheapest sets over all cuts, filled and as they are; no candidate without
        cuts.

        A cut is a set of buckets in slices; the other buckets are whole.
        """
        best: Candidate | None = None
        best_s, best_n, best_times = float("inf"), 0, ([], [])
        backward_s, whole_s = layer_times(profile, self._average, self.state)
        slice_s = piece_times(profile, self.state, self.period) if any(cuts) else []
        outside_s = [
            self._outside_s(profile) + s
            for s in cutting.message_cpu_s(profile, cuts, self.period, self.state)
        ]
        least_s = cutting.least_costs_s(cuts, backward_s, whole_s, slice_s, self.period)
        # Contiguous sets are solved quickly, so their costs give the order in which cuts are
        # solved.
        rough: list[tuple[float, int, tuple[list[float], list[float]]]] = []
        left = MOST_CUT
        for n in sorted(range(len(cuts)), key=lambda n: (outside_s[n] + least_s[n], n)):
            left -= len(backward_s) + (self.period - 1) * len(cuts[n])
            if left < 0 and rough:
                continue
            times = cutting.cut_times(cuts[n], self.period, backward_s, whole_s, slice_s)
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

    def _full_sets(self, profile: Profile, layers_s: float = inf) -> Iterator[Candidate]:
        """Yield candidates that average all layers in the last iteration.

        The messages are fused to end as early as possible, are one message, or are sent as in local
        SGD. The fused candidate is omitted if its lower bound is above `layers_s`, the seconds of
        sets of layers.
        """
        if self.solver != "auto":
            return
        times = layer_times(profile, self._average, self.state)
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
        if self._needs_simulation(profile) or self._formula_s(least_s, profile) < layers_s:
            yield candidate(self._fuse_for_early_end(profile, ready_s))
        yield one
        if self._average == "after_update":
            slowest = profile.slowest()
            local_s = self.period * (slowest.backward_s + slowest.update_s) + message_s
            yield one._replace(cost_s=local_s, at_step=True)

    def _fuse_for_early_end(self, profile: Profile, ready_s: Sequence[float]) -> solve.Fusion:
        """Return the messages of neighbouring buckets that end as early as possible.

        With more than `MOST_STARTS` buckets, only every n-th bucket may begin a message. This costs
        at most the time of n buckets.
        """
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
        """Return the cuts to try; none without slices."""
        few = size * self.period <= cutting.MOST_SLICES
        unasked = self.solver == "auto" and self.state != "reset" and few
        if not (self.split is True or (self.split == "auto" and unasked)):
            return []
        return cutting.cuts_at_ends(size, self.period)

    def _period_s(self, candidate: Candidate, profile: Profile) -> float:
        """Return the predicted seconds of one period.

        Simulations use the same noise for all candidates, so that their periods can be compared.
        """
        if not self._needs_simulation(profile):
            return self._formula_s(candidate, profile)
        plan = self._plan_of(candidate, profile)
        periods = self._simulated_periods()
        trace = simulate(plan, profile, iterations=periods * self.period, record=0)
        return max(ends_s[-1] for ends_s in trace.ends_s) / periods

    def _needs_simulation(self, profile: Profile) -> bool:
        """Return whether candidates are simulated instead of computed in closed form.

        Simulation is used if compute varies, messages use processor time or pauses delay messages,
        up to `MOST_SIMULATED`.
        """
        link = profile.default_link
        uneven = any(profile.jitters) or link.jitter or link.after_pause
        uneven = uneven or link.cpu_s_per_message or link.cpu_s_per_byte
        iterations = self._simulated_periods() * self.period
        return bool(uneven) and iterations * len(profile.buckets) <= MOST_SIMULATED

    def _simulated_periods(self) -> int:
        return max(4, -(-LEAST_ITERATIONS // self.period))

    def _formula_s(self, candidate: Candidate, profile: Profile) -> float:
        """Return the seconds of one period without jitter, in which ranks wait for the processor
        time of messages."""
        messages = chain(*candidate.sets, *candidate.fill)
        sending_s = self._cpu_s(candidate.pieces, messages, profile)
        return self._outside_s(profile) + candidate.cost_s + sending_s

    def _outside_s(self, profile: Profile) -> float:
        """Return the seconds of a period outside of backward."""
        slowest = profile.slowest()
        outside_s = slowest.other_s + slowest.forward_s
        if self._average == "before_update":
            outside_s += slowest.update_s
        return self.period * outside_s

    def _cpu_s(self, pieces: Sequence[Piece], sent: Iterable[int], profile: Profile) -> float:
        """Return the processor seconds of a period's messages."""
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
            facts = layer_set_facts(candidate.sets, candidate.fill, candidate.pieces)
            return replace(local, strategy=self.name, facts=facts)
        return partial_plan(
            self.name,
            profile,
            candidate.sets,
            candidate.fill,
            self._average,
            self.state,
            candidate.pieces,
        )


def full_sets(planner: DreamDDP, profile: Profile) -> list[Candidate]:
    """Return the planner's candidates that average all layers in the last iteration."""
    return [*planner._full_sets(profile)]


def _with_clipping(plan: Plan, norm: float) -> Plan:
    """Return the plan with a bound on the norm of a worker's own gradients.

    Updates at the step use the norm of the current iteration, updates in backward that of the
    previous one.
    """
    applies = []
    for apply in plan.applies:
        if effects.is_update(apply):
            rule = "clip_early" if apply.at.point == "grad" else "clip"
            args = (("buffer", "grad"), ("norm", float(norm)))
            applies.append(Apply(rule, apply.buckets, apply.at, apply.phases, args=args))
        applies.append(apply)
    return replace(plan, applies=tuple(applies))


_SOLVERS: dict[str, Solver] = {
    "auto": solve.best,
    "best": solve.best,
    "optimal": solve.optimal,
    "balanced": solve.balanced,
    "dfs": solve.dfs,
    "brute-force": solve.brute_force,
}
