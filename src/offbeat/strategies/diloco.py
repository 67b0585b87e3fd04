"""DiLoCo and Streaming DiLoCo: local steps, and an outer optimizer that steps on averaged
changes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

from offbeat.core.plan import Moment, Plan
from offbeat.core.profile import Profile
from offbeat.core.sim import predict_plan
from offbeat.core.strategy.interface import Planned, require_count
from offbeat.strategies.averaging import Layerwise
from offbeat.strategies.dreamddp.late import (
    Planning,
    delayed_bound_s,
    delayed_plan,
    delayed_sets,
    even_sets,
    forward_bound_s,
    spread,
    with_idle_steps,
)
from offbeat.strategies.dreamddp.strategy import (
    Candidate,
    DreamDDP,
    Due,
    cycle_of,
    of_layers,
    of_runs,
    of_sets,
    plan_of,
)
from offbeat.strategies.equations import Equations
from offbeat.strategies.local_sgd import LocalSGD
from offbeat.strategies.outer_optimizer import OuterSGD, is_real, with_outer
from offbeat.strategies.pieces import Piece, delayed, layer_sets, partial
from offbeat.strategies.solvers.stages import cut


@dataclass(frozen=True)
class DiLoCo(Layerwise):
    """Train locally for `period` steps, average, and apply the average with an outer optimizer.

    All workers continue from the result of the outer step. `fragments` and `delay` select Streaming
    DiLoCo: fragments of the model are averaged in different iterations, while training continues.
    The planner of DreamDDP assigns buckets to fragments. With a delay or one fragment, updates and
    averages take place at the step.
    """

    period: int = 50
    """Local steps between two averages of a parameter."""
    outer: OuterSGD = field(default=OuterSGD(), kw_only=True)
    """Outer optimizer: OuterSGD(lr, momentum, nesterov), or text. `0.7/0.9` is the published
    setting; its results are worse if periods or training are short."""
    fragments: int | None = None
    """Number of parts of the model that are averaged at different times, evenly spread over the
    period. 1: all at once, after the step (DiLoCo); None: chosen by DreamDDP's planner."""
    delay: int = 0
    """Number of iterations that train while a fragment is in flight (tau)."""
    alpha: float | None = None
    """Share of a worker's own parameters that is kept when the average of a fragment arrives: 0:
    nothing; 0.5: the published setting; None: all changes since the fragment was sent (`w += new -
    sent`)."""
    due: Literal["end", "forward"] = "end"
    """Deadline of an average: the end of its iteration (`end`), or the next forward of each bucket
    (`forward`), with the same equations. If that is predicted to be faster, `forward` also sends in
    backward what `end` sends at the step, and has other fragments. With a delay both deadlines are
    at a forward."""

    name: ClassVar[str] = "diloco"
    unadvised: ClassVar[str] = "it is as fast as dreamddp with its period; only its losses differ"
    citation: ClassVar[str] = (
        "Douillard et al., DiLoCo, 2023, Algorithm 1; Douillard et al., Streaming DiLoCo with "
        "overlapping communication, 2025, Algorithm 2"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        require_count("delay", self.delay, least=0)
        if self.fragments is not None:
            require_count("fragments", self.fragments, remedy="None lets the planner choose")
        for is_wrong, text in (
            (self.outer is None, "outer (None) must be an OuterSGD; without one use DreamDDP()"),
            (
                self.delay >= self.period,
                f"delay ({self.delay}) must be below the period ({self.period}): a fragment "
                "travels once at a time; use a smaller delay or a longer period",
            ),
            (
                (self.fragments or 1) > self.period,
                f"fragments ({self.fragments}) must be at most the period ({self.period}), as "
                "each has an iteration of its own; use fewer, or None",
            ),
            (
                self.alpha is not None and not (is_real(self.alpha) and 0 <= self.alpha < 1),
                f"alpha ({self.alpha!r}) must be at least 0 and below 1: with 1 nothing would land",
            ),
            (
                self.alpha is not None and self.delay == 0,
                f"alpha ({self.alpha}) counts only with a delay; leave it out, or use delay=1",
            ),
        ):
            if is_wrong:
                raise ValueError(text)

    def schedule(self, profile: Profile) -> Plan:
        plan = with_outer(self.averages(profile), self.outer, profile, share=self.alpha)
        return replace(plan, strategy=self.name)

    def averages(self, profile: Profile) -> Plan:
        if (self.fragments or 0) > len(profile.buckets):
            raise ValueError(
                f"fragments ({self.fragments}) must be at most the model's buckets "
                f"({len(profile.buckets)}): a bucket is averaged whole; use fewer, or None"
            )
        found = [*self._plans(self._job(profile))]
        if len(found) == 1:
            return found[0]
        return min(found, key=lambda plan: predict_plan(plan, profile).iteration_s)

    def _plans(self, job: Planning) -> Iterator[Plan]:
        """Yield the plans to compare, those of `due="end"` first."""
        if self.delay:
            yield from self._delayed_plans(job)
        elif self.fragments is None:
            planner = DreamDDP(self.period, average=self.average, fill=False, split=False)
            yield replace(planner, due=self.due).averages(job.profile)
        elif self.fragments == 1:
            yield LocalSGD(self.period).averages(job.profile)
            if self.due == "forward":
                yield from self._late_plans_of_all(job)
        else:
            dense = replace(job, period=self.fragments)
            for due in self._dues:
                chosen = min(of_layers(dense, due, "auto"), key=lambda one: one.seconds)
                is_complete = all(chosen.sends)  # if few sets hide all messages, others are empty
                if is_complete:
                    yield self._spread_plan(job, chosen)
                if due == "forward" or not is_complete:
                    even = of_sets(dense, due, *even_sets(dense, self.fragments))
                    yield self._spread_plan(job, even)

    def _delayed_plans(self, job: Planning) -> Iterator[Plan]:
        found = [*delayed_sets(job)]
        if self.fragments is not None:
            pieces = [Piece(run) for run in cut(job.bucket_s(), self.fragments)]
            found = [(pieces, spread([(n,) for n in range(len(pieces))], job.period))]
            if self.due == "forward":
                found.append(even_sets(job, self.fragments))
        for early in (False, True)[: len(self._dues)]:
            for pieces, sets in found:
                yield with_idle_steps(delayed_plan(job, pieces, sets, in_backward=early))

    def _late_plans_of_all(self, job: Planning) -> Iterator[Plan]:
        """Yield plans of one fragment that is due at the next forward.

        It leaves after the step, in one message per bucket in the order of that forward; or in
        backward, in runs of neighbouring buckets or in whole ones.
        """
        plan = LocalSGD(self.period).averages(job.profile)
        [whole] = plan.transfers
        messages = [
            replace(
                whole,
                payload=replace(whole.payload, buckets=range(b, b + 1)),
                before=Moment("forward", b, 1),
            )
            for b in reversed(range(job.buckets))
        ]
        yield replace(plan, transfers=tuple(messages))
        if job.average == "after_update":
            once = replace(job, period=1)
            yield self._spread_plan(job, of_sets(once, "forward", *even_sets(once, 1)))
            for chosen in of_runs(once, "forward", float("inf")):
                yield self._spread_plan(job, chosen)

    def _spread_plan(self, job: Planning, chosen: Candidate) -> Plan:
        """Return the plan of fragments that are spread over the period."""
        none = ((),) * self.period
        chosen = chosen._replace(sends=spread(chosen.sends, self.period), fill=none)
        return with_idle_steps(plan_of(job, chosen))

    @property
    def _dues(self) -> tuple[Due, ...]:
        return ("end", "forward") if self.due == "forward" else ("end",)

    def _job(self, profile: Profile) -> Planning:
        return Planning(self.name, profile, self.period, self.when, "local", self.delay)

    def at_step(self) -> Planned | None:
        early = self.when == "after_update"
        if self.due == "forward" and self.fragments != 1 and not self.delay:
            return replace(self, average="before_update", due="end")
        if self.due == "forward":  # with one fragment `average` makes no difference
            variant = {"due": "end"} if self.delay else {"average": "before_update"}
            return replace(self, **variant) if early else None
        together = self.fragments == 1 or self.delay > 0
        return None if together else super().at_step()

    @property
    def requires_early_updates(self) -> bool:
        return super().requires_early_updates and self.fragments != 1 and not self.delay

    @property
    def applies_late(self) -> bool:
        return self.delay > 0

    def equations(self, plan: Plan) -> Equations:
        outer = self.outer_equations
        assert outer is not None
        outer.alpha = self.alpha
        if self.delay:
            return delayed(layer_sets(plan, "average"), self.delay, self.when, None, outer)
        average = "after_update" if self.fragments == 1 else self.when
        return partial(layer_sets(plan), average, outer=outer)

    def bound_s(self, profile: Profile) -> float:
        job = self._job(profile)
        if self.delay:
            return delayed_bound_s(job)
        if self.due == "forward":
            return forward_bound_s(job, cycle_of(job, "forward"))
        return super().bound_s(profile)
