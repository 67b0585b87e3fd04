"""Fluid: messages between any ranks that slow each other down, in the order of time."""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heappop, heappush

from offbeat.core.plan import base_link
from offbeat.core.profile import Profile

Port = tuple[int, bool]  # a rank, and whether it is what it sends


class Flow:
    """A message: so many seconds of work, done at its current speed.

    It starts when its ranks have released it and their lines are free: `missing` counts what is
    left of that, two for each rank. One that is `sent` from the first rank to the second uses one
    direction of their lines, any other one both.
    """

    __slots__ = (
        "end_s", "left_s", "link", "missing", "ports", "ranks", "seconds", "sent", "since_s",
        "speed", "start_s", "unseen", "version", "waiters",
    )  # fmt: skip

    def __init__(
        self, link: str, ranks: tuple[int, ...], seconds: float, *, sent: bool = False
    ) -> None:
        self.link, self.ranks, self.seconds, self.sent = link, ranks, seconds, sent
        self.ports: list[Port] = [(rank, out) for rank in ranks for out in (True, False)]
        if sent:
            self.ports = [(ranks[0], True), (ranks[1], False)]
        self.missing = 2 * len(ranks)
        self.unseen = len(ranks)  # ranks that have not numbered it yet
        self.start_s = 0.0
        self.end_s: float | None = None
        self.waiters: list[int] = []
        self.left_s = self.since_s = self.speed = 0.0
        self.version = 0  # of its planned end


class Fluid:
    """Flows on coupled links. At each of its ranks a flow is slowed down by those on the other
    links there that use the same direction; it is as fast as where that slows it down most.
    Messages that are sent by channels of one link share it evenly, as each alone has all of it.

    No flow may be added that starts before the last end that `advance` has returned.
    """

    def __init__(self, profile: Profile) -> None:
        self._profile = profile
        self._agenda: list[tuple[float, int, int, Flow]] = []  # when, tie, version, flow
        self._ties = 0
        self._running: dict[Port, dict[str, Flow]] = {}  # by port and link
        self._speeds: dict[tuple[str, int, tuple[str, ...]], float] = {}

    def add(self, flow: Flow) -> None:
        """Begin a flow at its `start_s`."""
        self._note(flow.start_s, flow)

    def advance(self) -> tuple[Flow, float] | None:
        """The next flow that ends, and when; None if there is none."""
        while self._agenda:
            now_s, _, version, flow = heappop(self._agenda)
            if version != flow.version:
                continue
            if flow.speed == 0.0:
                self._begin(flow, now_s)
                continue
            for port in flow.ports:
                del self._running[port][flow.link]
            self._change(self._beside(flow), now_s)
            return flow, now_s
        return None

    def _begin(self, flow: Flow, now_s: float) -> None:
        flow.left_s, flow.since_s = flow.seconds, now_s
        for port in flow.ports:
            self._running.setdefault(port, {})[flow.link] = flow
        self._change([flow, *self._beside(flow)], now_s)

    def _beside(self, flow: Flow) -> Iterator[Flow]:
        """Flows that share a port with one, each once."""
        seen = {id(flow)}
        for port in flow.ports:
            for other in list(self._running[port].values()):
                if id(other) not in seen:
                    seen.add(id(other))
                    yield other

    def _change(self, flows: list[Flow] | Iterator[Flow], now_s: float) -> None:
        """Let time pass for flows, and set the speeds that they have from now on."""
        for flow in flows:
            speed = min(self._speed(flow, port) for port in flow.ports)
            if speed != flow.speed:
                left_s = flow.left_s - (now_s - flow.since_s) * flow.speed
                flow.left_s = max(left_s, 0.0)  # rounding must not let time run backwards
                flow.since_s, flow.speed = now_s, speed
                self._note(now_s + flow.left_s / speed, flow)

    def _speed(self, flow: Flow, port: Port) -> float:
        others = [other for other in self._running[port].values() if other is not flow]
        sharing = 1
        if flow.sent:
            alike = [o for o in others if base_link(o.link) == base_link(flow.link)]
            if all(other.sent for other in alike):
                sharing += len(alike)
                others = [other for other in others if other not in alike]
        key = flow.link, sharing, tuple(other.link for other in others)
        if key not in self._speeds:
            self._speeds[key] = self._profile.speed(flow.link, key[2]) / sharing
        return self._speeds[key]

    def _note(self, at_s: float, flow: Flow) -> None:
        self._ties += 1
        flow.version += 1
        heappush(self._agenda, (at_s, self._ties, flow.version, flow))
