"""Slow twin of offbeat.sim: one loop over time, in which every rank is a coroutine.

At every instant each rank runs until it computes or waits; then time passes until the next
computation or message ends. Messages under way advance at whatever speed holds until then.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import inf

from offbeat.plan import Moment, Plan, Transfer, base_link
from offbeat.profile import Profile

Event = tuple[str, int, int]  # point, bucket, iteration


class DeadlockError(Exception):
    """Nothing can happen any more, and some rank is not done."""


@dataclass
class Timeline:
    """Results; `ends_s[rank][iteration]`, and per message (start per rank, end)."""

    ends_s: list[list[float]]
    waited_s: list[list[float]]
    messages: dict[tuple[int, str, int], tuple[list[float], float]]


@dataclass(eq=False)
class Message:
    left_s: float
    released_s: dict[int, float] = field(default_factory=dict)
    end_s: float = inf


@dataclass
class Rank:
    """A worker's progress; `awaits` is the time or the message that it goes on at."""

    due: dict[Event, list[Message]] = field(default_factory=dict)
    released: dict[Event, list[Message]] = field(default_factory=dict)
    ends_s: list[float] = field(default_factory=list)
    waited_s: list[float] = field(default_factory=list)
    awaits: float | Message = 0.0


class World:
    """Ranks and the messages of every link, in issue order, at one time."""

    def __init__(
        self, plans: Sequence[Plan], profile: Profile, days: int, rates: dict[str, float]
    ) -> None:
        self.now_s = 0.0
        self.profile = profile
        self.ranks = [Rank() for _ in plans]
        self.lines: dict[str, dict[tuple[int, int], Message]] = {}
        for link in sorted({t.link for plan in plans for t in plan.transfers}):
            line = self.lines[link] = {}
            for i in range(days):
                for k, own in enumerate(zip(*(on_link(p, i, link) for p in plans), strict=True)):
                    seconds = profile.message_s(own[0].payload, link, own[0].verb)
                    line[i, k] = Message(seconds / rates.get(base_link(link), 1.0))
                    for rank, plan, t in zip(self.ranks, plans, own, strict=True):
                        rank.due.setdefault(event(t.before, i, plan), []).append(line[i, k])
                        rank.released.setdefault(event(t.after, i, plan), []).append(line[i, k])

    def under_way(self) -> dict[str, Message]:
        """The first message of every link that has not ended, if every rank has released it."""
        heads = {
            link: next((m for m in line.values() if m.end_s == inf), None)
            for link, line in self.lines.items()
        }
        return {link: m for link, m in heads.items() if m and len(m.released_s) == len(self.ranks)}

    def run(self, workers: list[Iterator[float | Message]]) -> None:
        while True:
            while any(self.step(*pair) for pair in zip(self.ranks, workers, strict=True)):
                pass
            running = self.under_way()
            speeds = {link: speed(self.profile, link, {*running} - {link}) for link in running}
            ends = {link: self.now_s + m.left_s / speeds[link] for link, m in running.items()}
            wakes = [r.awaits for r in self.ranks if isinstance(r.awaits, float)]
            next_s = min([*ends.values(), *wakes], default=inf)
            if next_s == inf:
                return
            for link, message in running.items():
                message.left_s -= (next_s - self.now_s) * speeds[link]
                if ends[link] == next_s:
                    message.end_s = next_s
            self.now_s = next_s

    def step(self, rank: Rank, worker: Iterator[float | Message]) -> bool:
        """Resume a rank, if what it awaits is there."""
        awaits = rank.awaits.end_s if isinstance(rank.awaits, Message) else rank.awaits
        if awaits > self.now_s:
            return False
        rank.awaits = next(worker, inf)
        return True

    def work(
        self, rank: int, plan: Plan, factors: Sequence[float], days: int
    ) -> Iterator[float | Message]:
        """One worker: yields the time at which it goes on, or the message that it needs."""
        me = self.ranks[rank]
        for i in range(days):
            waited = 0.0
            yield self.now_s + self.profile.other_s
            for what, value in day(plan, self.profile, i):
                if what == "compute":
                    yield self.now_s + value * factors[i]
                elif what == "wait":
                    begun = self.now_s
                    for message in me.due.get(value, []):
                        yield message
                    waited += self.now_s - begun
                else:
                    for message in me.released.get(value, []):
                        message.released_s[rank] = self.now_s
            me.ends_s.append(self.now_s)
            me.waited_s.append(waited)


def simulate(
    plans: Sequence[Plan],
    profile: Profile,
    factors: Sequence[Sequence[float]],
    iterations: int,
    rates: dict[str, float] | None = None,
) -> Timeline:
    """Timeline of one plan per rank; `factors[rank][iteration]` multiplies compute times.

    `rates[link]` is the slowest rank's relative rate. Raises DeadlockError.
    """
    days = horizon(plans, iterations)
    world = World(plans, profile, days, rates or {})
    world.run([world.work(r, plan, factors[r], days) for r, plan in enumerate(plans)])
    if any(len(rank.ends_s) < iterations for rank in world.ranks):
        raise DeadlockError
    return Timeline(
        [rank.ends_s[:iterations] for rank in world.ranks],
        [rank.waited_s[:iterations] for rank in world.ranks],
        dict(read(world, iterations)),
    )


def horizon(plans: Sequence[Plan], iterations: int) -> int:
    """Iterations until the messages of the first ones are done, each rank waiting for the next."""
    moments = [m for plan in plans for t in plan.transfers for m in (t.after, t.before)]
    return iterations + (1 + max((m.lag for m in moments), default=0)) * len(plans)


def day(plan: Plan, profile: Profile, i: int) -> Iterator[tuple[str, object]]:
    """What one worker does in an iteration: compute, wait for an event's messages, release them."""
    size = plan.buckets
    for b in range(size - 1, -1, -1):
        yield from at("forward", b, i)
        if plan.updates == "on_arrival":
            yield from update(plan, profile, b, i - 1)
        yield "compute", profile.buckets[b].forward_s
    for b in range(size):
        yield "compute", profile.buckets[b].backward_s
        yield from at("grad", b, i)
        if plan.updates == "in_backward":
            yield from update(plan, profile, b, i)
    yield from at("step", 0, i)
    if plan.updates == "at_step":
        for b in range(size):
            yield from update(plan, profile, b, i)
    yield from at("end", 0, i)


def at(*name: object) -> Iterator[tuple[str, object]]:
    yield "wait", name
    yield "release", name


def update(plan: Plan, profile: Profile, b: int, of: int) -> Iterator[tuple[str, object]]:
    """The update by the gradients of an iteration, or by the generation that is due then."""
    yield "wait", ("updated", b, of)
    if of >= 0 and (plan.closes is None or len(closed(plan, of)) > 1):
        yield "compute", profile.bucket_update_s[b]
    yield "release", ("updated", b, of)


def closed(plan: Plan, iteration: int) -> list[int]:
    """If this iteration closes a generation, the iterations so far that did."""
    closes = plan.closes or set()
    if plan.phase(iteration) not in closes:
        return []
    return [i for i in range(iteration + 1) if plan.phase(i) in closes]


def event(moment: Moment, i: int, plan: Plan) -> Event:
    bucket = moment.bucket
    if moment.point in ("step", "end"):
        bucket = 0
    elif bucket is None and moment.point == "updated" and plan.updates == "on_arrival":
        bucket = 0  # the last that is updated
    elif bucket is None:
        bucket = plan.buckets - 1
    return moment.point, bucket, i + moment.lag


def speed(profile: Profile, link: str, others: set[str]) -> float:
    """Share of its speed that a link is left with while others carry messages."""
    share = 1.0
    for other in others:
        pair = base_link(link), base_link(other)
        loss = 2 / 3 if pair[0] == pair[1] else 1.0
        for contention in profile.contention:
            if contention.links == pair:
                loss = contention.speeds[0]
            elif contention.links == pair[::-1]:
                loss = contention.speeds[1]
        share *= loss
    return share


def on_link(plan: Plan, iteration: int, link: str) -> list[Transfer]:
    return [t for t in plan.transfers if plan.phase(iteration) in t.phases and t.link == link]


def read(
    world: World, iterations: int
) -> Iterator[tuple[tuple[int, str, int], tuple[list[float], float]]]:
    for link, line in world.lines.items():
        free_s = 0.0
        for (i, k), message in line.items():
            if i < iterations and message.end_s < inf:
                releases = [message.released_s[rank] for rank in range(len(world.ranks))]
                yield (i, link, k), ([max(at_s, free_s) for at_s in releases], message.end_s)
            free_s = message.end_s
