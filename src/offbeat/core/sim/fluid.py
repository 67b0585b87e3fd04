"""Fluid model of messages that share bandwidth, between any ranks, in order of time."""

from __future__ import annotations

from collections.abc import Iterable
from heapq import heappop, heappush
from itertools import permutations

from offbeat.core.plan import Plan, base_link
from offbeat.core.profile import Profile

Port = tuple[int, bool]  # a rank and a direction: True for sending, False for receiving


def coupled_links(plan: Plan, profile: Profile) -> frozenset[str]:
    """Return the plan's links and channels that slow down, or are slowed down by, another one."""
    sending = {t.link for t in plan.transfers if t.ranks is not None}
    pairs = (
        (a, b)
        for a, b in permutations(plan.links, 2)
        if profile.speed(a, (b,)) != 1.0 or ({a, b} <= sending and base_link(a) == base_link(b))
    )
    return frozenset(name for pair in pairs for name in pair)


class Flow:
    """Message whose remaining seconds pass at its current speed.

    Attributes:
        link: name of the link.
        base: name of the link without its channel.
        ranks: ranks that take part.
        seconds: seconds of the message on an idle link.
        transfer_s: part of `seconds` in which the message uses the rate of the link.
        additional_s: additional seconds after a pause of the link.
        sent: whether it is a send from the first rank to the second. A send uses one direction of
            each rank's connection to the link; any other message uses both.
        requested_s: time at which the receiver of a send was ready.
        use: `link` and `sent`, which determine its speed beside other flows on a near link.
        ports: ports that the message uses.
        missing: number of open conditions before the start: for each rank, that it has released the
            message and that its queue has reached it.
        unseen: number of ranks that have not yet queued the message.
        waiters: ranks that wait for the end.
        left_s: remaining seconds at speed 1, at time `since_s`.
        speed: current speed; 0 before the start.
        version: version of the planned end; agenda entries with an older version are void.
    """

    __slots__ = (
        "additional_s", "base", "end_s", "left_s", "link", "missing", "ports", "ranks",
        "requested_s", "seconds", "sent", "since_s", "speed", "start_s", "transfer_s", "unseen",
        "use", "version", "waiters",
    )  # fmt: skip

    def __init__(
        self,
        link: str,
        ranks: tuple[int, ...],
        seconds: float,
        transfer_s: float,
        *,
        sent: bool = False,
        start_s: float = 0.0,
    ) -> None:
        self.link, self.ranks, self.seconds, self.sent = link, ranks, seconds, sent
        self.base, self.use = base_link(link), (link, sent)
        self.transfer_s, self.additional_s = transfer_s, 0.0
        self.ports: list[Port]
        if sent:
            self.ports = [(ranks[0], True), (ranks[1], False)]
        else:
            self.ports = [(rank, out) for rank in ranks for out in (True, False)]
        self.missing = 2 * len(ranks)
        self.unseen = len(ranks)
        self.start_s, self.requested_s = start_s, 0.0
        self.end_s: float | None = None
        self.waiters: list[int] = []
        self.left_s = self.since_s = self.speed = 0.0
        self.version = 0

    @property
    def load(self) -> float:
        """Return the share of the link's rate that the message uses at speed 1."""
        return self.transfer_s / self.seconds if self.seconds else 0.0


class Fluid:
    """Flows on coupled links.

    At each of its ports a flow is slowed down by the flows on other links that use the same port.
    Its speed is the lowest of its ports' speeds. Sends on channels of one link share the link
    evenly, because each of them alone would use the whole link. On a distant link, a message uses
    the rate for a part of its time only. Sends there slow down only as far as their loads add up to
    more than 1: two equal sends of latency L and transfer T take max(L + T, 2 T). A collective
    consists of steps, and each of them waits behind a chunk of every other message, because the
    requests for chunks pass the same queues. So if contention was not measured, delays overlap and
    transfers do not: two collectives in flight together take L + T1 + T2. Rings whose requests and
    chunks share one queue are at most L / 2 faster (`tests/oracle/rings.py`).

    A flow must not start before the last end that `advance` has returned.
    """

    def __init__(self, profile: Profile) -> None:
        self._profile = profile
        self._agenda: list[tuple[float, int, int, Flow]] = []  # time, tie-break, version, flow
        self._ties = 0
        self._running: dict[Port, dict[str, Flow]] = {}  # flows by port and link
        self._speeds: dict[tuple[tuple[str, bool], ...], float] = {}  # by use, the flow's own first
        self._distant: dict[str, bool] = {}

    def add(self, flow: Flow) -> None:
        """Schedule the start of a flow at its `start_s`."""
        self._schedule(flow.start_s, flow)

    def advance(self) -> tuple[Flow, float] | None:
        """Advance to the next end of a flow; return the flow and its end, or None without flows."""
        while self._agenda:
            now_s, _, version, flow = heappop(self._agenda)
            if version != flow.version:
                continue
            if flow.speed == 0.0:
                self._start_flow(flow, now_s)
                continue
            for port in flow.ports:
                del self._running[port][flow.link]
            self._update_speeds(self._neighbours(flow), now_s)
            return flow, now_s
        return None

    def _start_flow(self, flow: Flow, now_s: float) -> None:
        flow.left_s, flow.since_s = flow.seconds, now_s
        for port in flow.ports:
            self._running.setdefault(port, {})[flow.link] = flow
        self._update_speeds([flow, *self._neighbours(flow)], now_s)

    def _neighbours(self, flow: Flow) -> list[Flow]:
        """Return each running flow that shares a port with `flow`, once."""
        found: dict[int, Flow] = {}
        for port in flow.ports:
            for other in self._running[port].values():
                if other is not flow:
                    found[id(other)] = other
        return [*found.values()]

    def _update_speeds(self, flows: Iterable[Flow], now_s: float) -> None:
        """Subtract the work done until `now_s`, and set the speeds that hold from `now_s`."""
        for flow in flows:
            speed = min([self._speed(flow, port) for port in flow.ports])
            if speed != flow.speed:
                left_s = flow.left_s - (now_s - flow.since_s) * flow.speed
                flow.left_s = max(left_s, 0.0)  # rounding must not make the end precede `now_s`
                flow.since_s, flow.speed = now_s, speed
                self._schedule(now_s + flow.left_s / speed, flow)

    def _speed(self, flow: Flow, port: Port) -> float:
        """Return the speed of a flow at a port. On a near link it depends on links and directions
        of the flows at the port alone."""
        running = self._running[port]
        if len(running) == 1:  # the flow itself
            return 1.0
        if flow.base not in self._distant:
            self._distant[flow.base] = self._profile.is_distant(flow.base)
        if self._distant[flow.base]:
            return self._speed_beside(flow, running.values())
        key = (flow.use, *[other.use for other in running.values()])
        if key not in self._speeds:
            self._speeds[key] = self._speed_beside(flow, running.values())
        return self._speeds[key]

    def _speed_beside(self, flow: Flow, running: Iterable[Flow]) -> float:
        others = [other for other in running if other is not flow]
        alike = [other for other in others if other.base == flow.base]
        sharing = 1.0
        if alike:
            sends = flow.sent and all(other.sent for other in alike)
            if sends or self._profile.shares_rate_only(flow.link):
                others = [other for other in others if other not in alike]
                if not self._distant[flow.base]:
                    sharing += len(alike)
                elif sends:
                    sharing = max(1.0, flow.load + sum(other.load for other in alike))
                elif flow.seconds:
                    sharing += sum(other.transfer_s for other in alike) / flow.seconds
        return self._profile.speed(flow.link, [other.link for other in others]) / sharing

    def _schedule(self, at_s: float, flow: Flow) -> None:
        self._ties += 1
        flow.version += 1
        heappush(self._agenda, (at_s, self._ties, flow.version, flow))
