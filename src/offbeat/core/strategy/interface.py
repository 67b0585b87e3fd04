"""Interface of strategies: frozen settings and a citation; with a plan, a pure planner."""

from __future__ import annotations

import dataclasses
import difflib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args, get_origin, get_type_hints

from offbeat.core.derive.broadcast import with_broadcast
from offbeat.core.parts import part
from offbeat.core.plan import Buffer, Kind, Payload, Plan
from offbeat.core.profile import Profile
from offbeat.core.strategy.plan_memory import Memory, held_memory, largest_staged_bytes

if TYPE_CHECKING:
    from offbeat.core.runtime.session import Session
    from offbeat.core.runtime.training_job import TrainingJob
    from offbeat.core.sim.prediction import Conditions, Prediction
    from offbeat.strategies.equations import Equations


@dataclasses.dataclass(frozen=True)
class Needs:
    """Requirements of a strategy on a job, and features that it supports.

    Attributes:
        measures: if a strategy with a plan gets no profile, one is measured in the first
            iterations; otherwise the job runs without one.
        servers: the last ranks of the job serve parameters.
        allows_joining: further processes may join the running job.
        survives_ranks: the launcher lets the other ranks continue when a rank fails.
        one_optimizer: `prepare` refuses a list of optimizers.
        sparse_gradients: optimizers receive sparse gradients of sparse embeddings.
        script: the class exists only in the training script, so other processes can neither
            import it nor make its plan.
        no_checkpoint: reason why `offbeat.save` is refused, and the remedy; None if it is
            supported.
        nodes: a session of its own runs where replicas have several ranks; sessions of plans do.
    """

    measures: bool = True
    servers: bool = False
    allows_joining: bool = False
    survives_ranks: bool = False
    one_optimizer: bool = False
    sparse_gradients: bool = False
    script: bool = False
    no_checkpoint: str | None = None
    nodes: bool = False


@dataclasses.dataclass(frozen=True)
class Strategy(ABC):
    """Settings of one method. Subclasses are frozen dataclasses.

    Methods with a plan are subclasses of `Planned`. Any other method is a direct subclass, with a
    session and a prediction of its own.

    Attributes:
        name: name of the method on the command line.
        citation: source of the method.
        synchronous: whether the method computes the same as torch's DDP.
        needs: requirements on a job.
        unadvised: reason why `suggestions` has no settings; empty if it has some.
    """

    name: ClassVar[str]
    citation: ClassVar[str]
    synchronous: ClassVar[bool] = True
    needs: ClassVar[Needs] = Needs()
    unadvised: ClassVar[str] = ""

    def __post_init__(self) -> None:
        for name, allowed in _choices(type(self)).items():
            require_choice(name, getattr(self, name), allowed)

    # ---- what a method must define -----------------------------------------------------------

    @abstractmethod
    def bound_s(self, profile: Profile) -> float:
        """Return a lower bound on the seconds per iteration of this method.

        Args:
            profile: profile of the job, with the costs of the messages that the method sends.
        """

    @abstractmethod
    def open(self, job: TrainingJob) -> Session:
        """Return the session that trains by this strategy.

        Args:
            job: objects of this rank.

        Raises:
            SystemExit: on a rank that serves, with status 0, after all workers have left.
        """

    @abstractmethod
    def predict(
        self, profile: Profile, conditions: Conditions, ran: Plan | None = None
    ) -> Prediction:
        """Return the prediction of the timeline.

        Args:
            profile: profile of the job.
            conditions: conditions of the network and the hosts.
            ran: plan that a run has executed; None: the strategy's own plan, if it makes one.
        """

    # ---- what advice, reports and launchers ask ----------------------------------------------

    @classmethod
    def suggestions(cls, profile: Profile, max_staleness: int) -> Iterable[Strategy]:
        """Return the settings among which advice chooses for a profile.

        By default there are none, and advice only lists the default settings; `unadvised` states
        the reason.

        Args:
            profile: profile of the job.
            max_staleness: largest number of iterations until a gradient has reached all ranks.
        """
        return ()

    @property
    def applies_late(self) -> bool:
        """Return whether gradients or averages are applied in a later iteration than in the one
        that sends them."""
        return False

    @property
    def is_lossy(self) -> bool:
        """Return whether messages carry codes instead of numbers."""
        return False

    def describe_change(self, plan: Plan | None) -> str | None:
        """Return a phrase for what the method changes against DDP; None if advice derives it.

        Args:
            plan: plan of this strategy; None without one.
        """
        return None

    def costed(self, profile: Profile) -> Profile:
        """Return the profile for `schedule` and `bound_s`, with the costs of the messages that the
        strategy sends.

        Args:
            profile: profile of the job, with the costs of uncompressed messages.
        """
        return profile

    def least_buckets(self, ranks: int) -> int:
        """Return the smallest number of buckets with which the strategy can train.

        Args:
            ranks: number of ranks.
        """
        return 1

    def extra_buffers(self, profile: Profile, plan: Plan | None) -> Sequence[Buffer]:
        """Return the buffers that a rank holds in addition to parameters, gradients and optimizer
        state; by default those of the plan.

        Args:
            profile: profile of the job.
            plan: plan of this strategy; None without one.
        """
        return () if plan is None else plan.buffers

    def memory(self, profile: Profile, plan: Plan | None = None) -> Memory:
        """Return the memory that training takes on a rank.

        Args:
            profile: profile of the job.
            plan: plan of this strategy; None without one.
        """
        staged = 0 if plan is None else largest_staged_bytes(plan, profile)
        return held_memory(profile, self.extra_buffers(profile, plan), staged)

    def vote_names(self, profile: Profile) -> Sequence[str]:
        """Return the names of the votes during training.

        Args:
            profile: profile of the job.
        """
        return ()

    def settings(self) -> dict[str, Any]:
        """Return the settings as JSON-ready values, by name."""
        values = dataclasses.asdict(self)
        return {field.name: values[field.name] for field in setting_fields(type(self))}

    def __str__(self) -> str:
        changed = [f"{name}={value}" for name, value in changed_settings(self).items()]
        return f"{self.name}({', '.join(changed)})" if changed else self.name


class Planned(Strategy):
    """Base class of methods with a plan: `schedule` returns it, and must be pure.

    Subclasses define `schedule` and `bound_s`. The plan is what trains and what is predicted.
    """

    @abstractmethod
    def schedule(self, profile: Profile) -> Plan:
        """Return the plan without its bound.

        Args:
            profile: profile of the job, one replica for each participant of a message.
        """

    def plan(self, profile: Profile) -> Plan:
        """Return the plan of the whole job with its bound. Equal profiles give equal plans.

        Args:
            profile: compute times, links and message costs of the job.

        Raises:
            ValueError: replicas have several ranks, and the strategy cannot run between such
                replicas.
        """
        profile = self.participants(profile)
        if profile.topology:
            return part("two_levels")(self, profile)
        return self.plan_of_replicas(profile)

    def participants(self, profile: Profile) -> Profile:
        """Return the profile with one replica for each participant of a message. By default
        participants are the replicas of the job, whatever their number of ranks.

        Args:
            profile: profile of the job.
        """
        return profile

    def plan_of_replicas(self, profile: Profile) -> Plan:
        """Return the plan between replicas, without averages of gradients inside them.

        Args:
            profile: compute times, links and message costs of the job.
        """
        facts = self.costed(profile)
        plan = dataclasses.replace(self.schedule(facts), bound_s=self.bound_s(facts))
        plan = self.encoded(plan, profile)
        if self.synchronous and profile.broadcast_bytes and profile.ranks > 1:
            plan = with_broadcast(plan, profile.default_link.name)
        return plan

    def encoded(self, plan: Plan, profile: Profile) -> Plan:
        """Return the plan with the wire formats of its messages.

        Args:
            plan: plan that `schedule` has returned.
            profile: profile of the job.
        """
        return plan

    def equations(self, plan: Plan) -> Equations:
        """Return the equations that this strategy's plan must compute, for the conformance suite.

        Args:
            plan: plan of this strategy.

        Raises:
            NotImplementedError: the strategy defines no equations.
        """
        raise NotImplementedError(
            f"{type(self).__name__} has no equations: define `equations(plan)`, for instance with "
            "one of offbeat.testing.equations; comparing it with its own plan would prove nothing"
        )

    def at_step(self) -> Planned | None:
        """Return the variant of the method whose updates run in `optimizer.step()`, for scripts
        that clip or unscale gradients; None if there is none or none is needed."""
        return None

    @property
    def requires_early_updates(self) -> bool:
        """Whether a setting requires updates in backward. A job in which they are impossible is
        refused then; otherwise it runs `at_step()`."""
        return False

    def fallback(self) -> Planned | None:
        """Return the strategy that takes over if the loss is not finite, rises or stalls.

        With one, the loss and the noise of the gradients are watched during training, and a new
        estimate of the noise leads to a new plan. None: nothing is watched.
        """
        return None

    def open(self, job: TrainingJob) -> Session:
        return part("open_plan_session")(self, job)

    def predict(
        self, profile: Profile, conditions: Conditions, ran: Plan | None = None
    ) -> Prediction:
        plan = self.plan(profile) if ran is None else ran
        there = self.participants(profile)
        return part("predict_under")(plan, there, conditions, str(self))

    def vote_names(self, profile: Profile) -> Sequence[str]:
        return [vote.name for vote in self.plan(profile).votes]


def planned(strategy: Strategy) -> Planned:
    """Return a strategy that must have a plan.

    Args:
        strategy: any strategy.

    Raises:
        ValueError: it has none.
    """
    if isinstance(strategy, Planned):
        return strategy
    raise ValueError(
        f"strategy ({strategy}) has no plan: its workers go at their own pace; `offbeat simulate` "
        "predicts it"
    )


def setting_fields(cls: type[Strategy]) -> list[dataclasses.Field[Any]]:
    """Return the fields of a class that are settings, without constants of a subclass."""
    return [field for field in dataclasses.fields(cls) if field.init]


def changed_settings(strategy: Strategy) -> dict[str, Any]:
    """Return by name the settings that differ from their defaults."""
    values = {field: getattr(strategy, field.name) for field in setting_fields(type(strategy))}
    return {field.name: value for field, value in values.items() if value != field.default}


@cache
def _choices(cls: type[Strategy]) -> dict[str, tuple[Any, ...]]:
    """Return by setting the allowed values, for settings with a fixed set of values."""
    hints = get_type_hints(cls)
    settings = {field.name: hints[field.name] for field in dataclasses.fields(cls)}
    return {name: get_args(hint) for name, hint in settings.items() if get_origin(hint) is Literal}


def require_choice(name: str, value: Any, allowed: Iterable[Any]) -> None:
    """Raise ValueError unless `value` is one of `allowed`. The error suggests the nearest allowed
    value.

    Args:
        name: name of the setting, for the error.
        value: value to check.
        allowed: allowed values.

    Raises:
        ValueError: `value` is not allowed.
    """
    allowed = tuple(allowed)
    if value in allowed:
        return
    near = difflib.get_close_matches(str(value), [str(a) for a in allowed], n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ValueError(f"{name} ({value!r}) must be one of {', '.join(map(str, allowed))}{hint}")


def require_count(name: str, value: Any, *, least: int = 1, remedy: str = "") -> None:
    """Raise ValueError unless `value` is an integer of at least `least`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        more = f"; {remedy}" if remedy else ""
        raise ValueError(f"{name} ({value!r}) must be an integer of at least {least}{more}")


def synchronous_bound_s(profile: Profile, *, fused: bool, period: float = 1) -> float:
    """Return a lower bound, in seconds per iteration, of schedules that average every gradient.

    The bound is `max(F + B, C)`. F and B are the forward and backward of the slowest rank. F
    includes compute outside of forward and backward, B includes the update. C is the time of the
    messages of all gradients on one link.

    Args:
        profile: profile of the job.
        fused: whether plans may fuse buckets. If true, C is the time of one message of all buckets,
            otherwise of one message per bucket.
        period: iterations per average; C is divided by it.
    """
    profile = profile.slowest()
    return max(profile.compute_s, _everything_s(profile, "grad", fused) / period)


def periodic_bound_s(profile: Profile, period: float, *, fused: bool) -> float:
    """Return a lower bound, in seconds per iteration, of schedules that average each parameter
    once per period.

    The bound is `F + max(B, C / H)` on one link. No message overlaps a forward pass of the slowest
    rank. H is `period`; F, B and C are as in `synchronous_bound_s`, with C for parameters.

    Args:
        profile: profile of the job.
        period: iterations per average of a parameter.
        fused: whether plans may fuse buckets. If true, C is the time of one message of all buckets,
            otherwise of one message per bucket.

    Source: DreamDDP, section 3.2.
    """
    return backward_bound_s(profile, _everything_s(profile.slowest(), "param", fused) / period)


def backward_bound_s(profile: Profile, messages_s: float) -> float:
    """Return the lower bound `F + max(B, messages_s)` of an iteration whose messages overlap no
    forward pass of the slowest rank; F and B are as in `synchronous_bound_s`."""
    slowest = profile.slowest()
    hidden_s = slowest.backward_s + slowest.update_s
    return slowest.other_s + slowest.forward_s + max(hidden_s, messages_s)


def _everything_s(profile: Profile, kind: Kind, fused: bool) -> float:
    """Return the seconds of all buckets on the default link, as one message or as one message per
    bucket."""
    link = profile.default_link.name
    if fused:
        return profile.message_s(Payload(kind, range(len(profile.buckets))), link)
    return sum(profile.communication_s(link, kind))
