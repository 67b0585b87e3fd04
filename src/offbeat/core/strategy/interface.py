"""What a strategy is: frozen settings, a pure planner, and a citation."""

from __future__ import annotations

import dataclasses
import difflib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args, get_origin, get_type_hints

from offbeat.core.derive.broadcast import with_broadcast
from offbeat.core.plan import Kind, Payload, Plan
from offbeat.core.profile import Profile

if TYPE_CHECKING:
    from offbeat.core.runtime.prepared import Session
    from offbeat.core.runtime.training_job import TrainingJob
    from offbeat.core.sim.prediction import Conditions, Prediction
    from offbeat.core.verify.equations import Equations

PLAN_SESSION = "offbeat.core.runtime.plan_session"  # named as text: the runtime imports this file
PREDICTION = "offbeat.core.sim.prediction"
StatePolicy = Literal["local", "averaged", "reset"]
"""What becomes of optimizer state when parameters are averaged."""


@dataclasses.dataclass(frozen=True)
class Needs:
    """What a strategy needs from a job, and what it allows.

    Attributes:
        profile: a profile is given or measured first, and the strategy makes a plan from it.
        servers: the last ranks of the job serve parameters.
        allows_joining: further processes may join the running job.
        survives_ranks: the launcher lets the other ranks go on when a rank fails.
        one_optimizer: `prepare` refuses a list of optimizers.
        no_checkpoint: why `offbeat.save` is refused, with the remedy; None if it is allowed.
    """

    profile: bool = True
    servers: bool = False
    allows_joining: bool = False
    survives_ranks: bool = False
    one_optimizer: bool = False
    no_checkpoint: str | None = None


@dataclasses.dataclass(frozen=True)
class Strategy(ABC):
    """Settings of one method. Subclasses are frozen dataclasses; `schedule` must be pure.

    A strategy with a plan defines `schedule` and `bound_s`. A strategy without a plan defines
    `needs`, `open`, `predict` and `bound_s`.

    Attributes:
        name: name of the method on the command line.
        citation: source of the method.
        synchronous: whether the method computes what DDP computes.
        needs: what the method needs from a job.
    """

    name: ClassVar[str]
    citation: ClassVar[str]
    synchronous: ClassVar[bool] = True
    needs: ClassVar[Needs] = Needs()

    def __post_init__(self) -> None:
        for name, allowed in _choices(type(self)).items():
            require_choice(name, getattr(self, name), allowed)

    def plan(self, profile: Profile) -> Plan:
        """Plan of the whole job, with its bound; equal inputs give equal plans."""
        facts = self.costed(profile)
        plan = dataclasses.replace(self.schedule(facts), bound_s=self.bound_s(facts))
        plan = self.encoded(plan, profile)
        if self.synchronous and profile.broadcast_bytes and profile.world_size > 1:
            plan = with_broadcast(plan, profile.default_link.name)
        return plan

    def costed(self, profile: Profile) -> Profile:
        """The profile by which `schedule` and `bound_s` go: with what messages take."""
        return profile

    def least_buckets(self, ranks: int) -> int:
        """Buckets that a plan for so many ranks needs at least."""
        return 1

    def encoded(self, plan: Plan, profile: Profile) -> Plan:
        """The plan with what its messages become on the link."""
        return plan

    @abstractmethod
    def schedule(self, profile: Profile) -> Plan:
        """The plan without its bound."""

    @abstractmethod
    def bound_s(self, profile: Profile) -> float:
        """Lower bound on seconds per iteration of every schedule of this method's family."""

    def equations(self, plan: Plan) -> Equations:
        """What this plan of the strategy must compute, for the conformance suite."""
        raise NotImplementedError(
            f"{type(self).__name__} has no equations: define `equations(plan)`, for instance with "
            "one of offbeat.testing.equations; comparing it with its own plan would prove nothing"
        )

    def at_step(self) -> Strategy | None:
        """The same method with its updates in `optimizer.step()`, for scripts that clip or unscale
        gradients before it; None if there is none, or none is needed."""
        return None

    def monitor(self) -> Monitor | None:
        """What watches training under this method; None: nothing need be watched."""
        return None

    def settings(self) -> dict[str, Any]:
        """Settings as JSON-ready values."""
        return dataclasses.asdict(self)

    def open(self, job: TrainingJob) -> Session:
        """Return the session that trains by this strategy; by default, by its plan. On a rank that
        serves, serve until all workers have left, and raise SystemExit(0)."""
        return import_module(PLAN_SESSION).open_plan_session(self, job)

    def predict(
        self, profile: Profile, conditions: Conditions, ran: Plan | None = None
    ) -> Prediction:
        """Return the prediction of the timeline. `ran` is the plan that a run has executed, if it
        differs from the strategy's own."""
        plan = self.plan(profile) if ran is None else ran
        return import_module(PREDICTION).predict_under(plan, profile, conditions, str(self))

    def vote_names(self, profile: Profile) -> Sequence[str]:
        """Return the names of the votes that ranks take while training."""
        return [vote.name for vote in self.plan(profile).votes]

    def __str__(self) -> str:
        changed = [
            f"{f.name}={getattr(self, f.name)}"
            for f in dataclasses.fields(self)
            if getattr(self, f.name) != f.default
        ]
        return f"{self.name}({', '.join(changed)})" if changed else self.name


@dataclasses.dataclass(frozen=True)
class Monitor:
    """The loss and the noise of the gradients are watched. A new estimate of the noise makes the
    plan anew; a loss that departs from going down brings the `fallback`."""

    fallback: Strategy


@cache
def _choices(cls: type[Strategy]) -> dict[str, tuple[Any, ...]]:
    """What settings with a fixed set of values may be."""
    hints = get_type_hints(cls)
    settings = {field.name: hints[field.name] for field in dataclasses.fields(cls)}
    return {name: get_args(hint) for name, hint in settings.items() if get_origin(hint) is Literal}


def require_choice(name: str, value: Any, allowed: Iterable[Any]) -> None:
    """ValueError unless `value` is one of `allowed`; suggests the nearest."""
    allowed = tuple(allowed)
    if value in allowed:
        return
    near = difflib.get_close_matches(str(value), [str(a) for a in allowed], n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ValueError(f"{name} ({value!r}) must be one of {', '.join(map(str, allowed))}{hint}")


def require_count(name: str, value: Any, *, least: int = 1, remedy: str = "") -> None:
    """ValueError unless `value` is an integer of at least `least`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        more = f"; {remedy}" if remedy else ""
        raise ValueError(f"{name} ({value!r}) must be an integer of at least {least}{more}")


def synchronous_bound_s(profile: Profile, *, fused: bool, period: float = 1) -> float:
    """`max(F + B, C)` with the update: no one-link schedule that averages every gradient in
    every iteration is faster. F and B are the slowest rank's; C is one message of all gradients
    if a plan may fuse, else one per bucket; it counts once per `period`."""
    profile = profile.slowest()
    compute = profile.other_s + profile.forward_s + profile.backward_s + profile.update_s
    return max(compute, _everything_s(profile, "grad", fused) / period)


def periodic_bound_s(profile: Profile, period: float, *, fused: bool) -> float:
    """`F + max(B, C / H)` with the update: every parameter averaged once per period on one
    link, never under a forward pass of the slowest rank (DreamDDP, Section 3.2). C as above."""
    profile = profile.slowest()
    hidden = profile.backward_s + profile.update_s
    share = _everything_s(profile, "param", fused) / period
    return profile.other_s + profile.forward_s + max(hidden, share)


def _everything_s(profile: Profile, kind: Kind, fused: bool) -> float:
    link = profile.default_link.name
    if fused:
        return profile.message_s(Payload(kind, range(len(profile.buckets))), link)
    return sum(profile.communication_s(link, kind))
