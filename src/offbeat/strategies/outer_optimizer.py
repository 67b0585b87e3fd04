"""Outer optimizers: the update that turns an average into new parameters of all workers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, TypeVar

from offbeat.core.derive import effects
from offbeat.core.plan import Apply, Buffer, Fact, Payload, Phases, Plan
from offbeat.core.plan.types import Transfer
from offbeat.core.profile import Profile
from offbeat.strategies.equations import Array, World

PLAIN = "plain"
COMMON = "common"  # parameters of the outer optimizer; anchors of codecs are separate buffers
Rule = TypeVar("Rule", Transfer, Apply)


@dataclass(frozen=True)
class OuterSGD:
    """SGD with momentum whose gradient is the change of the average since the previous one.

    `lr=1, momentum=0` uses the average itself. The defaults were not worse than that in all
    measured cases; the published values, 0.7 and 0.9, require long periods and long training. As
    text: `0.8/0.3`, or without Nesterov momentum `0.8/0.3/plain`.

    Attributes:
        lr: learning rate, above 0.
        momentum: momentum, at least 0 and below 1.
        nesterov: whether the momentum is Nesterov's.
    """

    lr: float = 0.8
    momentum: float = 0.3
    nesterov: bool = True

    def __post_init__(self) -> None:
        if not is_real(self.lr) or not 0 < self.lr < float("inf"):
            raise ValueError(
                f"lr ({self.lr!r}) of outer must be a number above 0; 1 goes on from the average"
            )
        if not is_real(self.momentum) or not 0 <= self.momentum < 1:
            raise ValueError(
                f"momentum ({self.momentum!r}) of outer must be at least 0 and below 1: with 1 "
                "or more its steps never become smaller"
            )
        if not isinstance(self.nesterov, bool):
            raise ValueError(f"nesterov ({self.nesterov!r}) of outer must be True or False")

    FORM: ClassVar[str] = "LR/MOMENTUM with LR above 0 and MOMENTUM in [0, 1)"

    @classmethod
    def parse(cls, text: str) -> OuterSGD:
        """Return the optimizer of a text.

        Args:
            text: `LR/MOMENTUM` or `LR/MOMENTUM/plain`.

        Raises:
            ValueError: `text` has another form, or a value is out of range.
        """
        numbers, plain = text.removesuffix(f"/{PLAIN}"), text.endswith(f"/{PLAIN}")
        rate, _, momentum = numbers.partition("/")
        try:
            lr, beta = float(rate), float(momentum)
        except ValueError:
            raise ValueError(
                f"outer ({text!r}) must be LR/MOMENTUM or LR/MOMENTUM/{PLAIN}, such as 0.8/0.3"
            ) from None
        return cls(lr, beta, nesterov=not plain)

    def __str__(self) -> str:
        return f"{self.lr:g}/{self.momentum:g}" + ("" if self.nesterov else f"/{PLAIN}")


def outer_of(given: Any) -> OuterSGD | None:
    """Return the optimizer of a setting `outer`: an OuterSGD, its text, its fields as a mapping, or
    None."""
    if given is None or isinstance(given, OuterSGD):
        return given
    if isinstance(given, Mapping) and set(given) <= {field.name for field in fields(OuterSGD)}:
        return OuterSGD(**given)
    if isinstance(given, str):
        return OuterSGD.parse(given)
    raise ValueError(
        f"outer ({given!r}) must be an OuterSGD, such as OuterSGD(lr=0.8, momentum=0.3), or None"
    )


def equations_of(outer: OuterSGD | None) -> Outer | None:
    """Return the equations of the optimizer for verification; None without one."""
    return None if outer is None else Outer(outer.lr, outer.momentum, nesterov=outer.nesterov)


def with_outer(
    plan: Plan, outer: OuterSGD, profile: Profile, *, share: float | None = None
) -> Plan:
    """Return the plan with an outer step on every average of parameters or snapshots.

    An average of snapshots is applied as `w += new - snapshot`, or with `share` as `w = share w +
    (1 - share) new`.
    """
    delayed = effects.delayed_applies(plan)
    if delayed:
        plan = _with_prologue(plan)
        delayed = effects.delayed_applies(plan)
    settings = {"rate": outer.lr, "momentum": outer.momentum, "nesterov": int(outer.nesterov)}
    args = tuple({**settings, "anchor": COMMON}.items())
    steps = [
        Apply("outer", t.payload.buckets, t.before, t.phases, args=args)
        for t in plan.transfers
        if t.payload.buffer == "param"
    ]
    steps += [
        replace(apply, rule="outer", args=(*args, ("buffer", _average_buffer(apply, plan))))
        for apply in delayed
    ]
    sent = {t.target for t in plan.transfers}
    buffers = tuple(b for b in plan.buffers if share is None or b.name in sent)
    copies = 2 + len(buffers)
    size = profile.payload_bytes("param", range(plan.buckets))
    memory = Fact("memory_bytes", copies * size, "further buffers on every rank")
    return replace(
        plan,
        applies=(*steps, *_blended_applies(plan, share)),
        buffers=(*buffers, Buffer(COMMON, start="param"), Buffer("velocity")),
        facts=(*(fact for fact in plan.facts if fact.name != memory.name), memory),
    )


def _blended_applies(plan: Plan, share: float | None) -> list[Apply]:
    """Return the applies of the plan, with averages of snapshots blended into the parameters if
    `share` is given.

    A blend does not read the sent snapshot, so its copy is omitted.
    """
    if share is None:
        return list(plan.applies)
    applies, delayed, waiting = [], effects.delayed_applies(plan), effects.delayed_buffers(plan)
    unsent = set(waiting) - {t.target for t in plan.transfers}
    for apply in plan.applies:
        if apply in delayed:
            source = _average_buffer(apply, plan)
            args = {"share": float(share)} | ({} if source == "average" else {"source": source})
            applies.append(replace(apply, rule="blend", args=tuple(args.items())))
        elif not effects.writes_only(apply, unsent):
            applies.append(apply)
    return applies


def _average_buffer(delayed: Apply, plan: Plan) -> str:
    """Return the buffer that holds the average which `delayed` applies."""
    [average] = effects.reads(delayed) & {t.target for t in plan.transfers} - {"param"}
    return average


def _with_prologue(plan: Plan) -> Plan:
    """Return the plan with a prologue as long as a message takes, in which no average is
    applied."""
    delay, delayed = plan.fact("staleness"), effects.delayed_applies(plan)
    begins = Phases(range(delay))

    def shift_phases(rule: Rule) -> Rule:
        cycle = {delay + (phase - delay) % plan.period for phase in rule.phases}
        is_delayed = isinstance(rule, Apply) and rule in delayed
        early = set() if is_delayed else set(rule.phases) & set(begins)
        return replace(rule, phases=Phases(cycle | early))

    return replace(
        plan,
        transfers=tuple(map(shift_phases, plan.transfers)),
        applies=tuple(map(shift_phases, plan.applies)),
        prologue=delay,
    )


def is_real(value: Any) -> bool:
    """Return whether the value is an int or a float, but not a bool."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


@dataclass
class Outer:
    """SGD with momentum on `d = w~ - mean_k(w_k)`, the change since the common parameters w~.

    `v = momentum v + d; w~ = w~ - lr (d + momentum v)`, without Nesterov `w~ = w~ - lr v`. Workers
    continue from w~. If the average is of older parameters s_k, workers continue from `w_k = w~ +
    w_k - s_k`, or with `alpha` from `w_k = alpha w_k + (1 - alpha) w~`.

    Attributes:
        lr: learning rate.
        momentum: momentum.
        nesterov: whether to use Nesterov momentum, as torch defines it.
        alpha: share of the local parameters that remains; None for none.

    Source: Douillard et al., DiLoCo, 2023, Algorithm 1; Douillard et al., Streaming DiLoCo, 2025.
    """

    lr: float
    momentum: float
    nesterov: bool = True
    alpha: float | None = None

    def __post_init__(self) -> None:
        self._common: Any = None
        self._velocity: Any = None

    def start(self, world: World) -> None:
        """Store the initial parameters of the replicas as the common parameters, at the first
        call.

        Args:
            world: replicas.
        """
        if self._common is None:
            self._common, self._velocity = world.keep(), 0 * world.keep()

    def __call__(self, world: World, piece: Payload | None) -> None:
        """Step on the average that the replicas hold."""
        world.change(piece, self._outer_step, self._common, self._velocity)

    def land(self, world: World, piece: Payload, kept: Any) -> None:
        """Step on the average of snapshots, and merge the result with the weights.

        Args:
            world: replicas.
            piece: part of the model.
            kept: snapshots of the weights of all replicas.
        """

        def add_outer_step(w: Array, snapshot: Array, common: Array, velocity: Array) -> Array:
            new = self._outer_step(snapshot, common, velocity)
            if self.alpha is None:
                return new + w - snapshot
            return self.alpha * w + (1 - self.alpha) * new

        world.change(piece, add_outer_step, kept, self._common, self._velocity)

    def _outer_step(self, w: Array, common: Array, velocity: Array) -> Array:
        d = common - w.mean(axis=0)
        velocity[...] = self.momentum * velocity + d
        common -= self.lr * (d + self.momentum * velocity if self.nesterov else velocity)
        return common
