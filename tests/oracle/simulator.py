"""Slow twin of offbeat.sim: one loop over time, in which every rank is a coroutine.

At every instant each rank runs until it computes or waits; then time passes until the next
computation, message or vote ends. Messages under way advance at whatever speed holds until then.
It knows the order of an iteration by itself.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf

from offbeat.core.codecs import way
from offbeat.plan import Apply, Moment, Plan, Transfer, Vote, base_link
from offbeat.profile import Link, Profile

Event = tuple[str, int, int]  # point, bucket, iteration
Key = tuple[int, int, str, int]  # rank, iteration, link, position


class DeadlockError(Exception):
    """Nothing can happen any more, and some rank is not done."""


@dataclass
class Timeline:
    """Results; `ends_s[rank][iteration]`, and per message (start as shown, end)."""

    ends_s: list[list[float]]
    waited_s: list[list[float]]
    messages: dict[Key, tuple[float, float]]


@dataclass(eq=False)
class Message:
    """Seconds of work for its ranks; of a vote with all of them `left_s` is what follows it."""

    ranks: tuple[int, ...]
    left_s: float
    passed: bool = False
    sent: bool = False  # from the first rank to the second, else both ways
    sending_s: float = 0.0  # what it takes from the compute of who sends it
    transfer_s: float = 0.0  # what it uses the rate of its link for
    additional_s: float = 0.0  # what it takes longer after a pause of its link
    seconds: float = 0.0  # all of its work
    released_s: dict[int, float] = field(default_factory=dict)
    begun_s: float = inf
    end_s: float = inf

    @property
    def lines(self) -> set[tuple[int, str]]:
        """What it uses of the lines of its ranks."""
        if self.sent:
            return {(self.ranks[0], "out"), (self.ranks[1], "in")}
        return {(rank, way) for rank in self.ranks for way in ("out", "in")}


@dataclass
class Rank:
    """A worker's progress; `awaits` is the time or the message that it goes on at."""

    due: dict[Event, list[Message]] = field(default_factory=lambda: defaultdict(list))
    applied: dict[Event, list[float]] = field(default_factory=lambda: defaultdict(list))
    released: dict[Event, list[Message]] = field(default_factory=lambda: defaultdict(list))
    received: dict[int, list[Message]] = field(default_factory=lambda: defaultdict(list))
    lines: dict[str, dict[tuple[int, int], Message]] = field(
        default_factory=lambda: defaultdict(dict)
    )
    ends_s: list[float] = field(default_factory=list)
    waited_s: list[float] = field(default_factory=list)
    awaits: float | Message = 0.0


class World:
    """Ranks and their messages, link by link in issue order, at one time."""

    def __init__(
        self,
        plan: Plan,
        profile: Profile,
        days: int,
        rates: Mapping[str, Sequence[float]],
        says: Mapping[tuple[str, int], bool],
    ) -> None:
        self.now_s = 0.0
        self.plan, self.profile, self.rates, self.says = plan, profile, rates, says
        self.ranks = [Rank() for _ in range(profile.world_size)]
        self.said: list[Message] = []
        for i in range(days):
            for t in plan.transfers:
                if plan.phase(i) in t.phases:
                    for ranks in parts(plan, t, len(self.ranks)):
                        self.add(t, i, ranks)
            for vote in plan.votes:
                if plan.phase(i) in vote.phases:
                    self.add_vote(vote, i)
            for apply in plan.applies:
                if plan.phase(i) in apply.phases and self.goes(apply, i):
                    self.add_apply(apply, i)

    def goes(self, rule: Transfer | Apply, i: int) -> bool:
        return rule.when is None or i < rule.ago or self.says[rule.when, i - rule.ago]

    def rate(self, link: str, ranks: Sequence[int]) -> float:
        rates = self.rates.get(base_link(link))
        return 1.0 if rates is None else min(rates[r] for r in ranks)

    def add(self, t: Transfer, i: int, ranks: tuple[int, ...]) -> None:
        seconds = message_s(t, self.plan, self.profile) / self.rate(t.link, ranks)
        passed = not self.goes(t, i)
        # A rank that is a group of its own sends nothing.
        alone = len(ranks) == 1 and ranks in self.plan.groups.get(base_link(t.link), ())
        free = passed or alone
        message = Message(ranks, 0.0 if free else seconds, passed, t.ranks is not None)
        if not free and seconds:
            message.transfer_s, message.additional_s = stages(t, self.plan, self.profile)
            message.transfer_s /= self.rate(t.link, ranks)
            message.seconds = seconds
        message.sending_s = 0.0 if free else sending_s(t, self.plan, self.profile)
        for r in ranks:
            line = self.ranks[r].lines[t.link]
            line[i, sum(1 for day, _ in line if day == i)] = message
            if t.ranks is None or r == t.ranks[0]:
                self.ranks[r].released[event(t.after, i, self.plan)].append(message)
            else:
                self.ranks[r].received[i].append(message)
            if (t.ranks is None or r == t.ranks[1]) and not passed:
                self.ranks[r].due[event(t.before, i, self.plan)].append(message)

    def add_vote(self, vote: Vote, i: int) -> None:
        everyone = tuple(range(len(self.ranks)))
        link = self.profile.links[0]
        seconds = max(link.latency_s, min((s for _, s in link.small), default=0.0))
        said = Message(everyone, seconds / self.rate(link.name, everyone))
        self.said.append(said)
        for rank in self.ranks:
            rank.released[event(vote.at, i, self.plan)].append(said)
            rank.due[event(vote.due, i, self.plan)].append(said)

    def add_apply(self, apply: Apply, i: int) -> None:
        closed = [d for d in range(i) if any(closes(a, d, self.plan) for a in self.plan.applies)]
        if apply.rule != "local" or apply.arg("age", 0) > len(closed):
            return
        whole = apply.at.point in ("step", "end") and len(apply.buckets) == self.plan.buckets
        apart = apply.at.bucket is None and apply.at.point in ("forward", "grad")
        for r in range(len(self.ranks)) if apply.ranks is None else apply.ranks:
            applied = self.ranks[r].applied
            for b in apply.buckets:
                at = Moment(apply.at.point, b, apply.at.lag) if apart else apply.at
                first = apart or b == apply.buckets[0]  # of one call of the optimizer
                seconds = self.profile.step_s if first and not whole else 0.0
                seconds += self.profile.bucket_update_s[b]
                applied[event(at, i, self.plan)].append(seconds)

    def under_way(self) -> list[tuple[str, Message]]:
        """What is first on the line of each of its ranks, and released by all of them."""
        heads = {
            (r, link): next((m for m in line.values() if m.end_s == inf), None)
            for r, rank in enumerate(self.ranks)
            for link, line in rank.lines.items()
        }
        return [
            (link, m)
            for (r, link), m in heads.items()
            if m is not None
            and r == m.ranks[0]
            and len(m.released_s) == len(m.ranks)
            and all(heads[other, link] is m for other in m.ranks)
        ]

    def run(self, workers: list[Iterator[float | Message]]) -> None:
        while True:
            while sum(self.step(*pair) for pair in zip(self.ranks, workers, strict=True)):
                pass  # each of them, as often as any moves
            running = self.under_way()
            for link, message in running:
                if message.begun_s == inf and self.has_paused(link, message):
                    message.left_s += message.additional_s
                    message.seconds += message.additional_s
                message.begun_s = min(message.begun_s, self.now_s)
            speeds = {id(m): self.speed(link, m, running) for link, m in running}
            for said in self.said:
                if len(said.released_s) == len(said.ranks) and said.end_s == inf:
                    running.append(("", said))
                    speeds[id(said)] = 1.0
            ends = {id(m): self.now_s + m.left_s / speeds[id(m)] for _, m in running}
            wakes = [r.awaits for r in self.ranks if isinstance(r.awaits, float)]
            next_s = min([*ends.values(), *wakes], default=inf)
            if next_s == inf:
                return
            for _, message in running:
                message.left_s -= (next_s - self.now_s) * speeds[id(message)]
                if ends[id(message)] == next_s:
                    message.end_s = next_s
            self.now_s = next_s

    def has_paused(self, link: str, message: Message) -> bool:
        """Whether no rank of a message that begins has carried one for long enough."""
        lines = [self.ranks[r].lines[link].values() for r in message.ranks]
        ends_s = (m.end_s for line in lines for m in line if m.end_s < inf and m.seconds)
        return self.now_s - max(ends_s, default=0.0) >= self.profile.link(link).pause_s

    def speed(self, link: str, m: Message, running: list[tuple[str, Message]]) -> float:
        """As at the rank, and in the direction there, where others slow it down most."""
        return min(
            shared(
                self.profile, link, m, {o: x for o, x in running if o != link and line in x.lines}
            )
            for line in m.lines
        )

    def step(self, rank: Rank, worker: Iterator[float | Message]) -> bool:
        """Resume a rank, if what it awaits is there."""
        awaits = rank.awaits.end_s if isinstance(rank.awaits, Message) else rank.awaits
        if awaits > self.now_s:
            return False
        rank.awaits = next(worker, inf)
        return True

    def work(self, r: int, factors: Sequence[float], days: int) -> Iterator[float | Message]:
        """One worker: yields the time at which it goes on, or the message that it needs."""
        me, buckets = self.ranks[r], self.profile.buckets
        for i in range(days):
            waited = 0.0
            for message in me.received[i]:
                message.released_s[r] = self.now_s
            yield self.now_s + self.profile.other_s
            for point, b in moments(len(buckets)):
                if point == "grad":
                    yield self.now_s + buckets[b].backward_s * factors[i]
                begun = self.now_s
                for message in me.due[point, b, i]:
                    yield message
                waited += self.now_s - begun
                for seconds in me.applied[point, b, i]:
                    yield self.now_s + seconds * factors[i]
                for message in me.released[point, b, i]:
                    message.released_s[r] = self.now_s
                sent = sum(message.sending_s for message in me.released[point, b, i])
                yield self.now_s + sent * factors[i]
                if point == "forward":
                    yield self.now_s + buckets[b].forward_s * factors[i]
            me.ends_s.append(self.now_s)
            me.waited_s.append(waited)


def simulate(
    plan: Plan,
    profile: Profile,
    factors: Sequence[Sequence[float]],
    iterations: int,
    rates: Mapping[str, Sequence[float]] | None = None,
    says: Mapping[tuple[str, int], bool] | None = None,
) -> Timeline:
    """Timeline of a plan; `factors[rank][iteration]` multiplies compute times.

    `rates[link]` are the ranks' relative rates, `says[name, iteration]` the votes' outcomes.
    Raises DeadlockError.
    """
    days = horizon(plan, profile, iterations)
    world = World(plan, profile, days, rates or {}, says or {})
    world.run([world.work(r, factors[r], days) for r in range(profile.world_size)])
    if any(len(rank.ends_s) < iterations for rank in world.ranks):
        raise DeadlockError
    return Timeline(
        [rank.ends_s[:iterations] for rank in world.ranks],
        [rank.waited_s[:iterations] for rank in world.ranks],
        dict(read(world, iterations)),
    )


def horizon(plan: Plan, profile: Profile, iterations: int) -> int:
    """Iterations until the messages of the first ones are done, each rank waiting for the next."""
    lags = [t.before.lag for t in plan.transfers] + [v.due.lag for v in plan.votes]
    return iterations + (1 + max(lags, default=0)) * profile.world_size


def moments(size: int) -> Iterator[tuple[str, int]]:
    """The moments of an iteration. The compute of a forward follows, of a gradient precedes."""
    yield from (("forward", b) for b in range(size - 1, -1, -1))
    yield from (("grad", b) for b in range(size))
    yield from (("step", 0), ("end", 0))


def event(moment: Moment, i: int, plan: Plan) -> Event:
    bucket = moment.bucket
    if moment.point in ("step", "end"):
        bucket = 0
    elif bucket is None:
        bucket = plan.buckets - 1
    return moment.point, bucket, i + moment.lag


def parts(plan: Plan, t: Transfer, world_size: int) -> Sequence[tuple[int, ...]]:
    """Ranks of each of the messages that a transfer is in one iteration."""
    if t.ranks is not None:
        return [t.ranks]
    return plan.groups.get(base_link(t.link)) or [tuple(range(world_size))]


def message_s(t: Transfer, plan: Plan, profile: Profile) -> float:
    """Seconds of a message; its buffer counts like the parameters, gradients or state."""
    if t.wire is not None:
        return wired_s(t, plan, profile)[0]
    payload = replace(t.payload, buffer=plan.all_buffers[t.payload.buffer].kind)
    return profile.message_s(payload, t.link, t.verb)


def stages(t: Transfer, plan: Plan, profile: Profile) -> tuple[float, float]:
    """Seconds of a message's bytes, and what it takes longer after a pause of its link."""
    link, ranks = profile.link(t.link), profile.world_size
    if t.wire is not None:
        _, _, transfer_s, size = wired_s(t, plan, profile)
    else:
        kind = plan.all_buffers[t.payload.buffer].kind
        payload = replace(t.payload, buffer=kind)
        share = t.payload.width / t.payload.parts
        every = profile.transfer_s(link.name, kind)
        transfer_s = sum(every[b] for b in t.payload.buckets) * share * of_all_reduce(t, profile)
        size = profile.bytes_of(payload)
    return transfer_s, link.additional_s(size, t.verb, ranks)


def of_all_reduce(t: Transfer, profile: Profile) -> float:
    """Share of an all-reduce's bytes, by time, that a message sends."""
    ranks, link = profile.world_size, profile.link(t.link)
    if t.verb == "send":
        return max(ranks, 2) / (2 * max(ranks - 1, 1))
    return 1.0 if t.verb == "all_reduce" else half(link, t.verb)


def half(link: Link, verb: str) -> float:
    return link.bytes_per_s / link.halves[verb][1] if verb in link.halves else 0.5


def wired_s(t: Transfer, plan: Plan, profile: Profile) -> tuple[float, float, float, int]:
    """Seconds of a message as its largest half, 4 bytes and a place of 4 for each number; then
    what it takes from the compute of who sends it, the time of its bytes, and their number.

    Averages are gathered: every rank receives the codes of all; or scattered: every rank receives
    those of its shard from all, and then those of all shards' means. Running statistics travel as
    they are, behind the last parameters."""
    link, kind = profile.link(t.link), plan.all_buffers[t.payload.buffer].kind
    latency_s, transfer_s, size, plain = 0.0, 0.0, 0, 0
    for b in t.payload.buckets:
        bucket = profile.buckets[b]
        own = bucket.state_bytes if kind == "state" else bucket.size_bytes
        more = bucket.buffer_bytes if kind == "param" else 0
        given = bucket.communication_s.get(link.name)
        if own + more == 0 and (given is None or kind == "state"):
            continue
        if given is None or (own + more and not bucket.size_bytes):
            first, rest = link.latency_s, (own + more) / link.bytes_per_s
        else:
            first = min(link.latency_s, given)
            rest = (given - first) * ((own + more) / bucket.size_bytes if own + more else 1)
        latency_s, transfer_s = max(latency_s, first), transfer_s + rest
        size, plain = size + own, plain + more
    part, parts, width = t.payload.part, t.payload.parts, t.payload.width
    numbers = size * (part + width) // parts - size * part // parts
    whole, plain = size + plain, plain if part + width == parts else 0
    if not numbers + plain:
        return 0.0, 0.0, 0.0, 0
    entries = -(-numbers // 4)
    codes = max(entries // 2, 1) * 8 if entries else 0
    speed = next((s for s in profile.codecs if s.name == t.wire.name), None)
    ranks, cpu_s = profile.world_size, link.cpu_s_per_message
    free = not latency_s and not transfer_s  # measured to take no time

    def coding_s(messages: int, encoded: list[float], decoded: list[float]) -> float:
        """Passes, each over as many bytes of numbers."""
        if speed is None or not numbers:
            return 0.0
        seconds = messages * speed.s_per_message
        seconds += sum(speed.encode_s_per_pass + speed.encode_s_per_byte * x for x in encoded)
        return seconds + sum(speed.decode_s_per_pass + speed.decode_s_per_byte * x for x in decoded)

    def gathered_s(sent: int) -> float:
        return link.seconds(latency_s, transfer_s * sent / whole, sent, "all_gather", ranks)

    if t.verb == "send":
        sent, coded_s = codes + plain, coding_s(1, [numbers], [numbers])
        sent_s = link.seconds(latency_s, transfer_s * sent / whole, sent, "send", ranks)
        cpu_s = (cpu_s + link.cpu_s_per_byte * sent) / 2 if sent else 0.0
        busy_s = cpu_s + coding_s(1, [numbers], [])
        bytes_s = transfer_s * sent / whole * of_all_reduce(t, profile)
    else:
        if way(t.wire.name, dict(t.wire.args)) == "gather":
            rounds, coded_s = [ranks * (codes + plain)], coding_s(1, [numbers], [numbers * ranks])
        else:
            shard = numbers / ranks
            rounds = [codes, codes + ranks * plain]
            coded_s = coding_s(2, [numbers, shard], [numbers, numbers])
        sent, sent_s = sum(rounds) // 2, sum(map(gathered_s, filter(None, rounds)))
        busy_s = (cpu_s + link.cpu_s_per_byte * sent if sent else 0.0) + coded_s
        bytes_s = transfer_s * sum(rounds) / whole * half(link, "all_gather")
    takes_time = link.cpu_s_per_message or link.cpu_s_per_byte
    takes_s = (0.0 if free else sent_s) + coded_s
    return takes_s, busy_s if takes_time else 0.0, bytes_s, sent


def sending_s(t: Transfer, plan: Plan, profile: Profile) -> float:
    """Processor time of a message, by its link's two numbers; halves of an all-reduce and sends
    do half of its work."""
    if t.wire is not None:
        return wired_s(t, plan, profile)[1]
    link = profile.link(t.link)
    payload = replace(t.payload, buffer=plan.all_buffers[t.payload.buffer].kind)
    size = profile.bytes_of(payload)
    seconds = link.cpu_s_per_message + link.cpu_s_per_byte * size if size else 0.0
    return seconds if t.verb == "all_reduce" else seconds / 2


def closes(apply: Apply, i: int, plan: Plan) -> bool:
    return apply.rule == "close" and plan.phase(i) in apply.phases


def shared(profile: Profile, link: str, message: Message, others: dict[str, Message]) -> float:
    """Sends of one link share it evenly; else it is the links that lose. Where a round trip takes
    2 ms, messages of one link share only its rate, unless something else was measured: sends as
    far as they use it, and others wait for the transfer of each other message once."""
    same = {other for other in others if base_link(other) == base_link(link)}
    base, facts = base_link(link), profile.link(link)
    known = any(contention.links == (base, base) for contention in profile.contention)
    distant = facts.latency_s / 2 / max(profile.world_size - 1, 1) >= 0.002
    sends = message.sent and all(others[other].sent for other in same)
    if not sends and (known or not distant):
        return speed(profile, link, {*others})
    left = speed(profile, link, {*others} - same)
    if not distant:
        return left / (1 + len(same))
    if not sends:
        waits_s = sum(others[other].transfer_s for other in same)
        return left * message.seconds / (message.seconds + waits_s) if message.seconds else left
    loads = [
        m.transfer_s / m.seconds if m.seconds else 0.0
        for m in (message, *(others[o] for o in same))
    ]
    return left * min(1.0, 1 / sum(loads)) if sum(loads) and same else left


def speed(profile: Profile, link: str, others: set[str]) -> float:
    """Share of its speed that a link is left with while others carry messages."""
    share, same, together = 1.0, 1.0, 1
    for other in others:
        pair = base_link(link), base_link(other)
        loss = 2 / 3 if pair[0] == pair[1] else 1.0
        for contention in profile.contention:
            if contention.links == pair:
                loss = contention.speeds[0]
            elif contention.links == pair[::-1]:
                loss = contention.speeds[1]
        if pair[0] != pair[1]:
            share *= loss
            continue
        # Channels of a link share what two of them carry, if each would lose more to every other.
        together += 1
        same = max(loss ** (together - 1), 2 * loss / together)
    return share * same


def on_link(plan: Plan, iteration: int, link: str, rank: int) -> list[Transfer]:
    """A rank's transfers on a link in one iteration, in issue order."""
    return [
        t
        for t in plan.transfers
        if plan.phase(iteration) in t.phases
        and t.link == link
        and (t.ranks is None or rank in t.ranks)
    ]


def read(world: World, iterations: int) -> Iterator[tuple[Key, tuple[float, float]]]:
    for r, rank in enumerate(world.ranks):
        for link, line in rank.lines.items():
            free_s = 0.0
            for (i, k), message in line.items():
                if i < iterations and message.end_s < inf and not message.passed:
                    receives = message in rank.received[i]
                    start_s = message.begun_s if receives else max(message.released_s[r], free_s)
                    yield (r, i, link, k), (start_s, message.end_s)
                free_s = message.end_s
