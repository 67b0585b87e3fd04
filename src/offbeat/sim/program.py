"""Programs: a plan as the steps that one rank takes in one iteration."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from offbeat.plan import Moment, Plan, Transfer, format_phases
from offbeat.profile import Profile

Place = tuple[str, int]  # a moment without its lag; the whole model is its last moment's bucket


class Slot(NamedTuple):
    """A message: the `position`-th on `link` of the iteration `lag` iterations ago."""

    link: str
    lag: int
    position: int


class Step(NamedTuple):
    """Compute for `seconds`, wait for the messages in `due`, then release those in `released`.

    `work` is (kind, bucket) of the compute; None where the work of several buckets is one step.
    """

    seconds: float
    due: tuple[Slot, ...] = ()
    released: tuple[Slot, ...] = ()
    work: tuple[str, int] | None = None


class _Stage(NamedTuple):
    """A step before its messages are known: only the place at which it waits or releases."""

    seconds: float = 0.0
    due: Place | None = None
    released: Place | None = None
    work: tuple[str, int] | None = None


class Program:
    """The steps of every iteration of a plan. ValueError if the plan does not fit the profile.

    `queues[link, phase]` are the transfers that one iteration issues on one link, in order.
    """

    def __init__(self, plan: Plan, profile: Profile) -> None:
        _fit(plan, profile)
        self.plan = plan
        self.profile = profile
        self.queues = {
            (link, phase): queue(plan, link, phase) for link in plan.links for phase in plan.phases
        }
        self._stages = {
            applies: tuple(_stages(plan, profile, applies=applies)) for applies in (False, True)
        }
        moments = [m for t in plan.transfers for m in (t.after, t.before)]
        self.lag = max((lag_of(moment, plan) for moment in moments), default=0)
        self._cache: dict[tuple[tuple[int, ...], bool, bool], tuple[Step, ...]] = {}

    def steps(self, iteration: int, *, detailed: bool = False) -> tuple[Step, ...]:
        """Steps of one iteration; `detailed` keeps the work of every bucket apart."""
        past = range(iteration, max(iteration - self.lag, 0) - 1, -1)
        key = (tuple(map(self.plan.phase, past)), _applies(self.plan, iteration), detailed)
        if key not in self._cache:
            steps = self._bind(*key[:2])
            self._cache[key] = tuple(_detailed(steps) if detailed else _fused(steps))
        return self._cache[key]

    def _bind(self, phases: tuple[int, ...], applies: bool) -> list[Step]:
        """All stages with their messages; `phases[lag]` is the phase of `lag` iterations ago."""
        due: dict[Place | None, list[Slot]] = {}
        released: dict[Place | None, list[Slot]] = {}
        for lag, phase in enumerate(phases):
            for link in self.plan.links:
                for position, t in enumerate(self.queues[link, phase]):
                    slot = Slot(link, lag, position)
                    for moment, table in ((t.before, due), (t.after, released)):
                        if lag_of(moment, self.plan) == lag:
                            table.setdefault(_place(moment, self.plan), []).append(slot)
        return [
            Step(s.seconds, _last(due.get(s.due, [])), tuple(released.get(s.released, [])), s.work)
            for s in self._stages[applies]
        ]


def queue(plan: Plan, link: str, iteration: int) -> list[Transfer]:
    """Transfers of one iteration on one link, in issue order."""
    return [t for t in plan.at(iteration) if t.link == link]


def lag_of(moment: Moment, plan: Plan) -> int:
    """Iterations from a transfer's own to the one in which a moment of it comes."""
    return moment.lag + (moment.point == "updated" and plan.updates == "on_arrival")


def message_bytes(t: Transfer, profile: Profile) -> int:
    """Payload of a message; half of it for a reduce_scatter or all_gather, so that a pair of them
    counts as one all-reduce."""
    size = profile.bytes_of(t.payload)
    return size if t.verb == "mean" else size // 2


def _applies(plan: Plan, iteration: int) -> bool:
    """Whether an iteration's updates have gradients to apply; on arrival the last iteration's."""
    of = iteration - (plan.updates == "on_arrival")
    return of >= 0 and (plan.closes is None or bool(plan.applied(of)))


def _fit(plan: Plan, profile: Profile) -> None:
    if plan.buckets != len(profile.buckets):
        raise ValueError(
            f"the plan has {plan.buckets} buckets, the profile {len(profile.buckets)}; "
            "plan again from this profile"
        )
    cycle = plan.phases[plan.prologue :]
    if plan.closes is not None and plan.closes.isdisjoint(cycle):
        raise ValueError(
            f"closes ({format_phases(plan.closes)}) must hold a phase of the period "
            f"({format_phases(cycle)}), or nothing is applied after the prologue"
        )
    for t in plan.transfers:
        profile.link(t.link)
        for moment in (t.after, t.before):
            if not 0 <= (moment.bucket or 0) < plan.buckets or moment.lag < 0:
                raise ValueError(
                    f"moment {moment} of {t.id} never fires: there are {plan.buckets} buckets\n"
                    f"{plan.text(mark=[t])}"
                )


def _place(moment: Moment, plan: Plan) -> Place:
    if moment.point in ("step", "end"):
        return moment.point, 0
    if moment.bucket is not None:
        return moment.point, moment.bucket
    # The forward of the model begins with its last bucket, everything else ends with its last:
    # in backward order, but for updates on arrival, which come in forward order.
    forward_order = moment.point == "updated" and plan.updates == "on_arrival"
    return moment.point, 0 if forward_order else plan.buckets - 1


def _stages(plan: Plan, profile: Profile, *, applies: bool) -> Iterator[_Stage]:
    """One iteration without `other_s`, which comes first and is the same on every rank."""
    update_s = profile.bucket_update_s if applies else (None,) * plan.buckets
    for b in reversed(range(plan.buckets)):
        yield _Stage(due=("forward", b), released=("forward", b))
        if plan.updates == "on_arrival":
            yield from _update(b, update_s[b])
        yield _Stage(profile.buckets[b].forward_s, work=("forward", b))
    for b in range(plan.buckets):
        backward_s = profile.buckets[b].backward_s
        yield _Stage(backward_s, due=("grad", b), released=("grad", b), work=("backward", b))
        if plan.updates == "in_backward":
            yield from _update(b, update_s[b])
    yield _Stage(due=("step", 0), released=("step", 0))
    if plan.updates == "at_step":
        for b in range(plan.buckets):
            yield from _update(b, update_s[b])
    yield _Stage(due=("end", 0), released=("end", 0))


def _update(b: int, seconds: float | None) -> Iterator[_Stage]:
    """What is due by an update is its input, so the update waits; its end releases. Without
    seconds there is nothing to apply, but the moment comes all the same."""
    yield _Stage(due=("updated", b))
    work = None if seconds is None else ("update", b)
    yield _Stage(seconds or 0.0, released=("updated", b), work=work)


def _last(slots: list[Slot]) -> tuple[Slot, ...]:
    """Per link the message that arrives last: links are first in, first out."""
    latest: dict[str, Slot] = {}
    for slot in slots:
        known = latest.get(slot.link, slot)
        latest[slot.link] = max(slot, known, key=lambda s: (-s.lag, s.position))
    return tuple(latest.values())


def _detailed(steps: list[Step]) -> Iterator[Step]:
    return (step for step in steps if step.work or step.due or step.released)


def _fused(steps: list[Step]) -> Iterator[Step]:
    """Neighbouring work as one step: fewer steps, the same times up to rounding."""
    seconds = 0.0
    for step in steps:
        seconds += step.seconds
        if step.due or step.released:
            yield Step(seconds, step.due, step.released)
            seconds = 0.0
    if seconds:
        yield Step(seconds)
