"""DeFT: delayed and merged updates, so that messages always overlap with compute."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from offbeat.core.derive import effects
from offbeat.core.plan import Apply, Buffer, Fact, Merge, Moment, Phases, Plan, Transfer, local
from offbeat.core.profile import GradientNoise, Profile
from offbeat.core.strategy.interface import Planned, Strategy, require_count
from offbeat.strategies.compressible import Wired
from offbeat.strategies.deft_search import Choice, Search, Sized, ready_s_of
from offbeat.strategies.equations import Equations, World, synchronous
from offbeat.strategies.solvers import preserver
from offbeat.strategies.solvers import queues as deft
from offbeat.strategies.solvers.window_messages import Messages, NoWindowError
from offbeat.strategies.wfbp import WFBP, gradients_when_ready_s

RETRIES = 10


@dataclass(frozen=True)
class DeFT(Wired):
    """Send each gradient in a later forward or backward that has room for it (knapsacks).

    Gradients that have not been sent at the end of an iteration are merged with the next ones. An
    update is applied when all of its gradients have been averaged, at least one iteration late. The
    `preserver` estimates the ratio of losses. While that ratio is outside 1 +- `epsilon`, the
    preserver plans again with 10 % larger windows.

    An iteration without an update makes no progress. An update that merges k iterations is worth at
    most k single updates, because it uses k batches. The lower limit is one single update, as with
    Adam, whose step length does not depend on the gradient's size. Therefore schedules are compared
    by seconds per update, then by seconds per iteration. If WFBP is predicted to need no more
    seconds per update, WFBP's plan is used, whose updates are never late.
    """

    scale: Merge = "sum"
    """Merged update: `sum` or `mean` of the gradients of its iterations."""
    solver: Literal["exact", "greedy"] = "exact"
    """Solver that chooses the messages of a window: an `exact` knapsack or the paper's `greedy`
    one."""
    links: Literal["auto", "all", "first"] = "auto"
    """Links of the profile: `all`, the `first`, or as many as increase the updates (`auto`)."""
    partition_elements: int = 6_500_000
    """Largest number of 4-byte elements in a message."""
    most_merged: int = 4
    """Largest number of iterations that an update merges. If communication takes longer, iterations
    wait."""
    preserver: bool = True
    """Whether to estimate the effect of merging and lateness on the loss, and to plan again with
    larger windows if the effect is too large."""
    epsilon: float = 0.01
    """Accepted distance of the estimated ratio of losses from 1."""
    forward: int | None = None
    """Number of messages per forward, first in first out, instead of knapsacks; requires
    `backward`."""
    backward: int | None = None
    """Number of messages per backward, first in first out; requires `forward`."""

    name: ClassVar[str] = "deft"
    synchronous: ClassVar[bool] = False
    citation: ClassVar[str] = "Meng et al., DeFT, 2025, Algorithm 2, Sections III and IV-C"

    def __post_init__(self) -> None:
        super().__post_init__()
        remedy = f"{type(self).partition_elements:,} is the paper's"
        require_count("partition_elements", self.partition_elements, remedy=remedy)
        remedy = "1 updates in every iteration"
        require_count("most_merged", self.most_merged, remedy=remedy)
        number = isinstance(self.epsilon, (int, float)) and not isinstance(self.epsilon, bool)
        if not number or not 0 < self.epsilon < math.inf:
            raise ValueError(
                f"epsilon ({self.epsilon!r}) must be a number above 0; use preserver=False to "
                "accept every schedule"
            )
        self._check_counts()

    def _check_counts(self) -> None:
        if self.forward is None and self.backward is None:
            return
        if self.forward is None or self.backward is None:
            raise ValueError(
                f"forward ({self.forward}) and backward ({self.backward}) must be given together; "
                "give both, or neither for the knapsacks"
            )
        for name in ("forward", "backward"):
            require_count(name, getattr(self, name), least=0)
        if self.forward + self.backward == 0:
            raise ValueError(
                "forward (0) and backward (0) must not both be 0, or nothing is ever sent; "
                "use DeFT() to let knapsacks choose"
            )
        if self.links == "all":
            raise ValueError(
                "links ('all') must be left out with forward and backward: these count messages "
                "on the first link"
            )

    @classmethod
    def fixed(cls, forward: int, backward: int) -> DeFT:
        """Return DeFT with fixed numbers of messages, first in first out (an ablation).

        Args:
            forward: messages per forward.
            backward: messages per backward.
        """
        return cls(forward=forward, backward=backward)

    @classmethod
    def suggestions(cls, profile: Profile, max_staleness: int) -> Iterable[Strategy]:
        return (cls(),)

    @property
    def applies_late(self) -> bool:
        return True

    def schedule(self, profile: Profile) -> Plan:
        """Return DeFT's plan, or WFBP's plan with a warning if DeFT's is predicted to gain nothing.

        DeFT gains nothing if no window has room for a slice, or if late updates save no time. The
        `strategy` of WFBP's plan is "wfbp".
        """
        view = profile.slowest()
        if self.forward is not None and self.backward is not None:
            chosen = self._count_messages(view, self.forward, self.backward)
            skipped = _skip_note("it judges knapsacks, and here messages are counted")
            return _encode_schedule(self, chosen, _schedule_notes(chosen, skipped))
        synchronous_s = gradients_when_ready_s(view, WFBP().plan(view))
        try:
            chosen, preserved = self._best_choice(view, synchronous_s)
        except NoWindowError as error:
            return _synchronous_plan(profile, str(error))
        per_update_s = chosen.seconds / chosen.schedule.updates_per_iteration
        if per_update_s >= synchronous_s:
            return _synchronous_plan(
                profile,
                f"late updates save no time: {per_update_s:.4g} s per update (coverage rate "
                f"{chosen.coverage_rate:.3g}, merges {list(chosen.schedule.merges)}), and WFBP "
                f"{synchronous_s:.4g} s",
            )
        return _encode_schedule(self, chosen, _schedule_notes(chosen, preserved))

    def equations(self, plan: Plan) -> Equations:
        late = any(map(effects.is_window_end, plan.applies))
        return merged(closing(plan), self.scale) if late else synchronous()

    def bound_s(self, profile: Profile) -> float:
        """Return a lower bound: the compute of the slowest rank with one update per `most_merged`
        iterations, or the bytes of an update on all links together.

        With fixed numbers of messages, merging has no limit, so the bound is forward and backward
        only.
        """
        profile = profile.slowest()
        local_s = profile.other_s + profile.forward_s + profile.backward_s
        if self.forward is not None:
            return local_s
        per_update_s = [sum(profile.transfer_s(link.name)) for link in profile.links]
        if self.links == "first":
            per_update_s = per_update_s[:1]
        rate = sum(1 / seconds if seconds else math.inf for seconds in per_update_s)
        return max(local_s + profile.update_s / self.most_merged, 1 / rate / self.most_merged)

    def fallback(self) -> Planned | None:
        fallback = WFBP(wire=self.wire, error_feedback=self.error_feedback)
        return fallback if self.preserver else None

    def _count_messages(self, profile: Profile, forward: int, backward: int) -> Choice:
        links = [profile.default_link.name]
        messages = Messages(profile, links, self.partition_elements)
        pieces = messages.cut(math.inf, 0.0, 1.0)
        assert pieces is not None
        schedule = deft.fifo(forward, backward, ready_s_of(profile, pieces), profile.backward_s)
        why = f"{profile.default_link.name} alone: messages are counted on the first link"
        sized = Sized(pieces, ready_s_of(profile, pieces), messages.weights_s(pieces))
        return Choice(profile, links, sized, schedule, 1.0, why)

    def _best_choice(self, profile: Profile, synchronous_s: float) -> tuple[Choice, dict[str, Any]]:
        search = Search(self, profile, synchronous_s)
        if self.preserver and profile.noise is not None:
            return self._valid_choice(search, profile.noise)
        why = "the profile holds no gradient noise" if self.preserver else "it is switched off"
        return search.best(), _skip_note(why)

    def _valid_choice(self, search: Search, noise: GradientNoise) -> tuple[Choice, dict[str, Any]]:
        """Return the schedule that the Preserver accepts, and a record of all tries.

        Each try enlarges the windows of the previous one, until nothing is merged. Links and
        messages are the same in all tries. If no try is accepted, the one with the ratio nearest to
        1 is used.
        """
        chosen = search.best()
        tries: list[tuple[float, Choice]] = []
        while len(tries) <= RETRIES:
            if tries:
                chosen = search.enlarge_windows(chosen)
            tries.append((self._ratio(noise, chosen.schedule.merges), chosen))
            if self._accepts(tries[-1][0]) or max(chosen.schedule.merges) == 1:
                break
        ratio, chosen = min(tries, key=lambda t: abs(t[0] - 1))
        verdict = "within" if self._accepts(ratio) else f"the nearest to 1 of {len(tries)}, outside"
        records = [
            {
                "capacity": choice.capacity,
                "ratio": value if math.isfinite(value) else None,
                "merges": list(choice.schedule.merges),
                "accepted": self._accepts(value),
            }
            for value, choice in tries
        ]
        return chosen, {
            "tries": records,
            "decision": f"capacity {chosen.capacity:.2f}, ratio {ratio:.4f}: {verdict} 1 +- "
            f"{self.epsilon:g} (an upper bound of the noise: all of it along the gradient)",
        }

    def _ratio(self, noise: GradientNoise, merges: Sequence[int]) -> float:
        # The variance of g . n for noise n is at most |g|^2 times the trace of its covariance.
        sigma = math.sqrt(noise.gradient_sq * noise.noise_sq)
        scale = "mean" if noise.scale_free else self.scale
        walk = preserver.LossWalk(noise.loss, noise.step_size, sigma, scale=scale)
        return walk.worst_ratio(merges, noise.gradient_sq)

    def _accepts(self, ratio: float) -> bool:
        return abs(ratio - 1) <= self.epsilon


MEANINGS = {
    "merges": "iterations per update, over one cycle",
    "coverage_rate": "time to send all gradients on the first link / forward and backward",
    "capacity": "times forward and backward",
}


def _schedule_notes(chosen: Choice, preserved: dict[str, Any]) -> dict[str, Any]:
    return {
        "links": chosen.why,
        "merges": list(chosen.schedule.merges),
        "coverage_rate": chosen.coverage_rate,
        "capacity": chosen.capacity,
        "preserver": preserved,
    }


def _skip_note(why: str) -> dict[str, Any]:
    return {"tries": [], "decision": f"skipped: {why}"}


def _synchronous_plan(profile: Profile, why: str) -> Plan:
    """Return WFBP's plan, and warn with the reason to use it instead of DeFT's."""
    reason = f"{why}; WFBP runs instead of DeFT"
    warnings.warn(reason, stacklevel=3)
    facts = (Fact("instead_of", "deft", "the strategy that was asked for"), Fact("why", reason))
    return replace(WFBP().plan(profile), facts=facts)


def _encode_schedule(strategy: DeFT, choice: Choice, notes: dict[str, Any]) -> Plan:
    """Return the plan of a schedule.

    Messages of the closed accumulation window have age 1. Messages of the window that closes at the
    end of the iteration have age 0. Both are due when the next window closes.
    """
    prologue, cycle = choice.schedule.prologue, choice.schedule.cycle
    iterations = prologue + cycle
    due = _iterations_to_close(iterations, len(prologue))
    transfers: list[Transfer] = []
    for phase, iteration in enumerate(iterations):
        for piece, link in iteration.forward + iteration.current:
            transfers.append(
                Transfer(
                    payload=replace(choice.sized.pieces[piece], age=1),
                    after=Moment("forward"),
                    before=Moment("step", lag=due[phase]),
                    phases=Phases([phase]),
                    link=choice.links[link],
                )
            )
        for piece, link in iteration.future:
            payload = choice.sized.pieces[piece]
            transfers.append(
                Transfer(
                    payload=payload,
                    after=Moment("grad", payload.buckets[-1]),
                    before=Moment("step", lag=1 + due[phase + 1]),
                    phases=Phases([phase]),
                    link=choice.links[link],
                )
            )
    buckets = len(choice.profile.buckets)
    closes = Phases(phase for phase, iteration in enumerate(iterations) if iteration.closes)
    return Plan(
        strategy.name,
        buckets,
        tuple(transfers),
        (
            local(buckets, Moment("step"), closes, age=1, merge=strategy.scale),
            Apply("close", range(buckets), Moment("end"), closes),
        ),
        buffers=(Buffer("grad", "grad", copies=2),),
        period=len(cycle),
        prologue=len(prologue),
        facts=tuple(Fact(name, value, MEANINGS.get(name, "")) for name, value in notes.items()),
    )


def _iterations_to_close(iterations: Sequence[deft.Iteration], start: int) -> list[int]:
    """Return, for each iteration and the one after the last, the number of iterations until a
    window closes."""
    result = [next(n for n, iteration in enumerate(iterations[start:]) if iteration.closes)]
    for iteration in reversed(iterations):
        result.append(0 if iteration.closes else result[-1] + 1)
    return result[::-1]


def merged(closes: Callable[[int], bool], merge: Merge = "sum") -> Equations:
    """Return the equations of merged gradients with a late update.

    Gradients are added up until an iteration closes their window. When the next window closes,
    their mean over replicas is applied. No optimizer steps in between.

    Args:
        closes: function of an iteration that returns whether it closes a window.
        merge: "sum" or "mean" over the iterations of a window.
    """

    def advance(world: World, iteration: int) -> None:
        world.gradients(iteration)
        world.add_up()
        if not closes(iteration):
            return
        if world.recall(merge):
            world.average("grad")
            world.step()
            world.end()
        world.close()

    return advance


def closing(plan: Plan) -> Callable[[int], bool]:
    """Return a function of an iteration that returns whether it closes a window of the plan.

    Args:
        plan: plan with accumulation windows.
    """
    phases = {p for apply in plan.applies if effects.is_window_end(apply) for p in apply.phases}
    return lambda iteration: plan.phase(iteration) in phases
