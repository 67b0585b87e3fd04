"""DreamDDP: partial synchronization with sets of layers whose averages fit under backward.

Algorithm 1   `pieces.partial`: what training computes.
Algorithm 2   `sets.algorithm_2`: the sets of layers; `sets.fill` is Section 3.4.
Planner       `DreamDDP.averages` below: candidates, the cheapest one, its plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from math import inf
from typing import ClassVar, Literal

from offbeat.core.derive import effects
from offbeat.core.plan import Apply, Plan
from offbeat.core.profile import Profile
from offbeat.core.sim import predict_plan
from offbeat.core.strategy.interface import Planned, Strategy, require_count
from offbeat.strategies.averaging import Layerwise
from offbeat.strategies.compressible import NONE, with_wires
from offbeat.strategies.dreamddp import candidates as ways
from offbeat.strategies.dreamddp.candidates import Candidate, Due, cycle_of, plan_of
from offbeat.strategies.dreamddp.late import Planning, costs, delayed_bound_s, forward_bound_s
from offbeat.strategies.dreamddp.sets import EXACT
from offbeat.strategies.equations import Equations, StatePolicy
from offbeat.strategies.outer_optimizer import is_real
from offbeat.strategies.pieces import Clip, delayed, layer_sets, partial
from offbeat.strategies.suggestions import periods

SLICES_GAIN = 0.02  # relative gain required of slices with `split="auto"`: they are more messages
PREDICTED_GAIN = 0.005  # relative gain required of later candidates if their prices are simulated
PREDICTED = 160  # iterations of a simulation with noise
MOST_PREDICTED = 300  # largest number of buckets for simulations with noise
SUGGESTED_DELAYS = (1, 2, 4)  # delays that advice compares
ROUNDING = 1e-9


@dataclass(frozen=True)
class DreamDDP(Layerwise):
    """Average sets of layers under backward, one set per iteration, chosen to fit there.

    By default the planner compares sets of any layers, of runs of neighbouring layers, a slice of
    the first or of all layers in every iteration, and all layers in one iteration as in local SGD.
    It uses the candidate with the shortest predicted period.

    `due` (extension of offbeat) sets the deadline of averages. `forward` has the same equations.
    `delayed` (`w += mean(snapshot) - snapshot`) trains with stale averages, needs two more copies
    of the parameters and sends whole buckets. The optimizer makes one step for all buckets, so
    clipping and GradScaler work. Both settings use the plan of `due="end"` if that is predicted to
    be faster. `gain` below 1 applies a share of the difference: when it arrives, training has
    already reduced it in the directions in which the loss is steep.

    `clip` bounds the norm of a worker's own gradients, as `clip_grad_norm_` does. Updates in
    backward come before that norm is known. Such updates use the norm of the previous iteration;
    the first iteration uses the norm of the buckets so far. With `average="before_update"` the norm
    of the current iteration is used.
    """

    solver: Literal["auto", "optimal", "balanced", "dfs"] = "auto"
    """Solver for the sets: `dfs` (Algorithm 2 of the paper) or `optimal`, sets of neighbouring
    layers, exactly; `balanced` (any layers); `auto`: both, runs of layers as one message, and all
    layers in one iteration."""
    fill: Literal["auto", True, False] = "auto"
    """Whether iterations average further layers of the output side that add no time; `auto`: unless
    jitter makes the plan slower, or a codec (`wire`) is set to reduce bytes."""
    split: Literal["auto", True, False] = "auto"
    """Whether layers are cut into one slice per iteration; `auto`: if that saves at least 2 %."""
    state: StatePolicy = field(default="local", kw_only=True)
    """Treatment of optimizer state at an average: keep it (`local`), average it too (`averaged`,
    more bytes), or clear it (`reset`)."""
    due: Due = "end"
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

    name: ClassVar[str] = "dreamddp"
    citation: ClassVar[str] = "Tang et al., DreamDDP, 2025, Algorithms 1 and 2, Section 3.4"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_count(
            "delay", self.delay, remedy="due='forward' lands averages without being stale"
        )
        for is_wrong, text in self._mistakes():
            if is_wrong:
                raise ValueError(text)

    def _mistakes(self) -> Iterator[tuple[bool, str]]:
        """Yield settings that cannot be combined: whether they are, and what to do instead."""
        late = self.due == "delayed"
        yield (
            self.clip is not None and not 0 < self.clip < inf,
            f"clip ({self.clip}) must be a norm above 0, or None for no clipping",
        )
        yield (
            not is_real(self.gain) or not 0 < self.gain <= 1,
            f"gain ({self.gain!r}) must lie above 0 and be at most 1; 1 corrects the whole "
            "difference",
        )
        for name, default in (("delay", 1), ("gain", 1)):
            value = getattr(self, name)
            yield (
                not late and value != default,
                f"{name} ({value:g}) counts only with due 'delayed'; due is {self.due!r}: leave "
                f"{name} out, or use due='delayed'",
            )
        yield (
            self.gain != 1 and self.outer is not None,
            f"gain ({self.gain:g}) counts only without outer; leave one of them out",
        )
        yield (
            late and self.delay >= self.period,
            f"delay ({self.delay}) must be below the period ({self.period}): a bucket's next "
            "snapshot takes the room of its last one; use a smaller delay or a longer period",
        )
        yield (
            late and self.state != "local",
            f"state ({self.state!r}) must be left out with due 'delayed', which averages "
            "parameters alone; or use due='forward'",
        )
        for name in ("fill", "split"):
            yield (
                self._averages_whole_layers and getattr(self, name) is True,
                f"{name} (True) must be left out with outer ({self.outer}) and due {self.due!r}, "
                "which average whole layers once per period",
            )
        yield (
            self.split is True and self.state == "reset",
            "split (True) must be left out with state 'reset': a slice has no optimizer state of "
            "its own to reset; use state='local' or 'averaged'",
        )
        yield (
            self.clip is not None and self.due == "forward" and self.average == "before_update",
            f"clip ({self.clip}) needs all gradients at once; with due 'forward' and average "
            "'before_update' each bucket is updated at its own forward; use due='end'",
        )

    @property
    def _averages_whole_layers(self) -> bool:
        return self.outer is not None or self.due == "delayed"

    # ---- the planner -------------------------------------------------------------------------

    def averages(self, profile: Profile) -> Plan:
        job = self._job(profile)
        plan = plan_of(job, self._cheapest(job))
        if self.due != "end" and plan.fact("staleness") is None:
            plan = replace(plan, facts=(*plan.facts, *costs()))
        return plan if self.clip is None else _with_clipping(plan, self.clip)

    def _cheapest(self, job: Planning) -> Candidate:
        """Return the candidate with the shortest predicted period.

        Candidates are priced in the order of their closed forms. A later one must save a share,
        because small differences of simulated periods may be noise.
        """
        best, best_s = None, inf
        for one in sorted(self._candidates(job), key=self._closed_s):
            if self._closed_s(one) >= best_s * (1 - EXACT):
                break  # the closed form is a lower bound of the price
            seconds = self._price(job, one) * self._handicap(one)
            if best is None or seconds < best_s * (1 - self._gain(job.profile)):
                best, best_s = one, seconds
        assert best is not None
        if self.fill is False or self.outer is not None or best.due == "delayed":
            return best
        if self.fill == "auto" and self.wire != NONE:
            return best
        full = ways.filled(job, best)
        costs_s = self._price(job, full) * self._handicap(best)
        return full if self.fill is True or costs_s <= best_s * (1 + ROUNDING) else best

    def _candidates(self, job: Planning) -> Iterator[Candidate]:
        """Yield candidates for both deadlines. Those that cannot save time are left out."""
        dues: tuple[Due, ...] = ("end", "forward") if self.due == "forward" else ("end",)
        noisy = _is_noisy(job.profile)  # then fewer messages may win against shorter closed forms
        for due in dues:
            found = ways.of_layers(job, due, self.solver)
            below = min(one.seconds for one in found) * (1 - EXACT)
            if self.solver == "auto":
                found += ways.all_at_once(job, due)
                found += ways.of_runs(job, due, inf if noisy else below)
            if self._may_split(job):
                found += ways.of_slices(job, due, inf if self.split is True else below)
            if due == "forward" and self.solver == "auto":
                found = [ways.improved(job, one) for one in found]
            yield from found
        if self.due == "delayed":
            yield from ways.of_delay(job, self.solver)

    def _price(self, job: Planning, one: Candidate) -> float:
        """Return the predicted seconds of a period.

        Without noise the closed form is the prediction, except for delayed averages.
        """
        exact = one.due != "delayed" and not _is_noisy(job.profile)
        if exact or (one.due != "delayed" and job.buckets > MOST_PREDICTED):
            return one.seconds
        iterations = -(-PREDICTED // job.period) * job.period if _is_noisy(job.profile) else None
        predicted = predict_plan(plan_of(job, one), job.profile, iterations=iterations)
        return predicted.iteration_s * job.period

    def _closed_s(self, one: Candidate) -> float:
        return one.seconds * self._handicap(one)

    def _gain(self, profile: Profile) -> float:
        return PREDICTED_GAIN if _is_random(profile) else EXACT

    def _handicap(self, one: Candidate) -> float:
        return 1 / (1 - SLICES_GAIN) if self.split == "auto" and one.is_sliced else 1.0

    def _may_split(self, job: Planning) -> bool:
        if self.outer is not None or self.split is False:
            return False
        few = job.buckets * job.period <= ways.MOST_SLICES
        return self.split is True or (self.solver == "auto" and self.state != "reset" and few)

    def _job(self, profile: Profile) -> Planning:
        delay = self.delay if self.due == "delayed" else 0
        return Planning(self.name, profile, self.period, self.when, self.state, delay, self.gain)

    # ---- what the rest of offbeat asks -------------------------------------------------------

    def equations(self, plan: Plan) -> Equations:
        early = any(effects.is_update(a) and a.at.point == "grad" for a in plan.applies)
        clip = None if self.clip is None else Clip(self.clip, plan.buckets if early else None)
        late = layer_sets(plan, "average")
        if any(late):
            return delayed(late, self.delay, self.when, clip, self.outer_equations, self.gain)
        return partial(layer_sets(plan), self.when, self.state, clip, self.outer_equations)

    def bound_s(self, profile: Profile) -> float:
        job = self._job(profile)
        if self.due == "forward":
            return forward_bound_s(job, cycle_of(job, "forward"))
        return delayed_bound_s(job) if self.due == "delayed" else super().bound_s(profile)

    @property
    def applies_late(self) -> bool:
        return self.due == "delayed"

    def at_step(self) -> Planned | None:
        if self.due == "forward":  # with either `average` each bucket is updated separately
            return replace(self, average="before_update", due="end")
        return super().at_step()

    @property
    def requires_early_updates(self) -> bool:
        return self.average == "after_update" and self.due != "delayed"

    @classmethod
    def suggestions(cls, profile: Profile, max_staleness: int) -> Iterable[Strategy]:
        every = [cls(p, due=due) for p in periods(max_staleness + 1) for due in ("end", "forward")]
        every += [
            cls(period, due="delayed", delay=delay)
            for delay in SUGGESTED_DELAYS
            for period in periods(max_staleness + 1 - delay)
            if delay < period
        ]
        return with_wires(every)


def _is_random(profile: Profile) -> bool:
    """Return whether compute or messages vary, so that predictions of periods do."""
    return bool(any(profile.jitters) or profile.default_link.jitter)


def _is_noisy(profile: Profile) -> bool:
    """Return whether compute varies, messages use processor time, or pauses delay messages."""
    link = profile.default_link
    uses_cpu = link.cpu_s_per_message or link.cpu_s_per_byte
    return bool(_is_random(profile) or link.after_pause or uses_cpu)


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
