"""Eager updates: DiLoCo whose average is in flight for a whole period."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

from offbeat.core.plan import Apply, Buffer, Fact, Moment, Payload, Phases, Plan, local, transfer
from offbeat.core.profile import Profile
from offbeat.core.rules.vocabulary import Context, Setting, rule
from offbeat.core.strategy.interface import Planned, Strategy, require_count
from offbeat.strategies.averaging import EVERY_ITERATION
from offbeat.strategies.equations import Array, Equations, World
from offbeat.strategies.outer_optimizer import OuterSGD, outer_of

# The published lr of 0.7 and momentum of 0.9 diverge with short periods; see `Eager`.
STEADY = OuterSGD(0.5, 0.0)
PUBLISHED_PERIODS = (30, 50, 100, 500)  # of the papers on DiLoCo; advice compares them
STEP = Moment("step")
OWN, SENT, AVERAGE, VELOCITY = "own start", "sent", "average", "velocity"


@rule(
    reads=("param",),
    conserves=False,
    share=Setting("number", least=0.0, most=1.0),
    rate=Setting("number", 0.7),
    momentum=Setting("number", 0.9, contracts=True),
    nesterov=Setting("count", 1, least=0, most=1),
    start=Setting("buffer", OWN, kind="param"),
    sent=Setting("buffer", SENT, kind="param"),
    average=Setting("buffer", AVERAGE, kind="param", use="reads"),
    velocity=Setting("buffer", VELOCITY, kind="param"),
)
def eager(context: Context, apply: Apply) -> None:
    """Compute `d = start - w; g = share d + average - share sent; v = momentum v + g; start -= rate
    (g + momentum v); sent = d`.

    Without `nesterov`, `start -= rate v`. `d` is the change of this worker since its last outer
    step, `average` the mean of the changes `sent` of all workers one period earlier. `share` is
    1 / K for K workers. Running statistics are not changed.

    Source: Kale, Douillard and Donchev, Eager updates, 2025, Algorithm 2.
    """
    share, rate = apply.arg("share"), apply.arg("rate", 0.7)
    momentum = apply.arg("momentum", 0.9)
    buffers = {"start": OWN, "sent": SENT, "average": AVERAGE, "velocity": VELOCITY}
    names = ["param", *(apply.arg(setting, name) for setting, name in buffers.items())]
    columns = [context.parameters(name, apply.buckets) for name in names]
    for w, start, sent, average, velocity in zip(*columns, strict=True):
        change = start - w
        step = average - share * sent
        step += share * change
        velocity *= momentum
        velocity += step
        if apply.arg("nesterov", 1):
            step += momentum * velocity
        else:
            step[...] = velocity
        start -= rate * step
        sent[...] = change


@rule(
    writes=("param",),
    conserves=True,
    start=Setting("buffer", OWN, kind="param", use="reads"),
)
def restart_from(context: Context, apply: Apply) -> None:
    """Compute `w = start`. Running statistics are not changed."""
    starts = context.parameters(apply.arg("start", OWN), apply.buckets)
    for w, start in zip(context.parameters("param", apply.buckets), starts, strict=True):
        w[...] = start


@dataclass(frozen=True)
class Eager(Planned):
    """DiLoCo with eager updates: own change at once, the other workers' one period later.

    After `period` local steps a worker sends its change since its last outer step, and continues
    without waiting. The mean of all changes arrives one period later. Until then the worker's own
    change stands for its share of the mean:

        d_k(t) = start_k - w_k;  g_k(t) = d_k(t) / K + mean(d(t - 1)) - d_k(t - 1) / K
        v_k = momentum v_k + g_k;  start_k -= lr (g_k + momentum v_k);  w_k = start_k

    Reading of the first step: d(0) is zero, so that a worker applies only its share of its own
    change before the first mean arrives. `start_k` and `v_k` differ between workers by the changes
    in flight. Running statistics stay local.

    Stability: let a period of local steps reduce the distance to the minimum of a quadratic loss,
    along one direction, from x to (1 - c) x. Without outer momentum the workers converge along it
    if `lr c (1 - 1 / K) < 1`. Local steps approach the minimum if 0 < c < 2, so the default lr of
    1/2 converges there for every K. Momentum and a higher lr let late changes add up.
    """

    period: int = 50
    """Local steps between two outer steps, and iterations until an average arrives."""
    outer: OuterSGD = STEADY
    """Outer optimizer: OuterSGD(lr, momentum, nesterov), or text. The paper uses Nesterov momentum
    0.9 and long training. With short periods or near the end of training it may diverge."""

    name: ClassVar[str] = "eager"
    synchronous: ClassVar[bool] = False
    citation: ClassVar[str] = (
        "Kale, Douillard and Donchev, Eager updates for overlapped communication and computation "
        "in DiLoCo, arXiv 2502.12996, 2025"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        require_count("period", self.period, remedy=EVERY_ITERATION)
        object.__setattr__(self, "outer", outer_of(self.outer))
        if self.outer is None:
            raise ValueError("outer (None) must be an OuterSGD; without one use DreamDDP()")

    @classmethod
    def suggestions(cls, profile: Profile, max_staleness: int) -> Iterable[Strategy]:
        # A change is sent after up to `period` iterations and takes as many to arrive.
        return [cls(period) for period in PUBLISHED_PERIODS if 2 * period - 1 <= max_staleness]

    @property
    def applies_late(self) -> bool:
        return True

    def schedule(self, profile: Profile) -> Plan:
        everything, last = range(len(profile.buckets)), Phases([self.period - 1])
        message = transfer(
            SENT,
            everything,
            after=STEP,
            before=Moment("step", lag=self.period),
            phases=last,
            link=profile.default_link.name,
            into=AVERAGE,
        )
        settings: dict[str, Any] = {
            "share": 1 / profile.world_size,
            "rate": self.outer.lr,
            "momentum": self.outer.momentum,
            "nesterov": int(self.outer.nesterov),
        }
        size = profile.payload_bytes("param", everything)
        return Plan(
            self.name,
            len(everything),
            (message,),
            (
                local(len(everything), STEP, range(self.period)),
                Apply(eager.__name__, everything, STEP, last, args=tuple(settings.items())),
                Apply(restart_from.__name__, everything, STEP, last),
            ),
            buffers=(
                Buffer(OWN, start="param"),
                Buffer(SENT),
                Buffer(AVERAGE),
                Buffer(VELOCITY),
            ),
            period=self.period,
            facts=(
                Fact("staleness", self.period, "iterations from a change to its average"),
                Fact("memory_bytes", 4 * size, "further buffers on every rank"),
            ),
        )

    def equations(self, plan: Plan) -> Equations:
        [step] = [apply for apply in plan.applies if apply.rule == eager.__name__]
        share, outer, kept = step.arg("share"), self.outer, list[Any]()

        def outer_step(w: Array, start: Array, velocity: Array, before: Array) -> Array:
            change = start - w
            mean_before = before.mean(axis=0)
            gradient = share * change + (mean_before - share * before)
            velocity[...] = outer.momentum * velocity + gradient
            moved = gradient + outer.momentum * velocity if outer.nesterov else velocity
            start[...] = start - outer.lr * moved
            before[...] = change
            return start

        def advance(world: World, iteration: int) -> None:
            if not kept:
                kept.extend((world.keep(), 0 * world.keep(), 0 * world.keep()))
            world.gradients(iteration)
            world.step()
            if (iteration + 1) % self.period == 0:
                world.change(None, outer_step, *kept)
            world.end()

        return advance

    def bound_s(self, profile: Profile) -> float:
        """Return `max(F + B, C / period)`: the message of a period hides behind all of it."""
        everything = Payload("param", range(len(profile.buckets)))
        message_s = profile.message_s(everything, profile.default_link.name)
        return max(profile.slowest().compute_s, message_s / self.period)
