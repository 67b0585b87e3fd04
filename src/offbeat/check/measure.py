"""Measurement of one link between the hosts of the job, in process groups as jobs open them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from statistics import median_low

import torch
import torch.distributed as dist

from offbeat.check.facts import Endpoint
from offbeat.check.meeting import Meeting
from offbeat.core.measuring.links import explore
from offbeat.core.measuring.timing import Budget, Probe
from offbeat.core.measuring.tournament import partners
from offbeat.core.profile.records import ring_steps
from offbeat.core.transport.collectives import averaging, sending
from offbeat.core.transport.device import device_of
from offbeat.core.transport.interfaces import LinkSpec, group_environment, unreachable
from offbeat.core.transport.rendezvous import run_limited

ALL_PAIRS = 16  # with more hosts only neighbours in the ring are measured
CONNECTIONS = (1, 2, 4)  # numbers of parallel connections that are compared
REACH_S = 3.0  # longest time to open a connection
MESSAGE_S = 6.0  # longest time of a message
STEP_S = 16.0  # longest time of a step, below that of the meeting
TRIPS = 10
# Sizes of a rate grow until a message takes LONG_S.
FIRST_BYTES, MOST_BYTES, LONG_S = 1 << 14, 1 << 28, 0.25
RING_S = 4.0  # time budget of all-reduces

LEAST_S = 1e-6

Row = tuple[str, int | tuple[int, int], float]  # field of the findings, key and value
Send = Callable[[torch.Tensor, int, int], None]  # from one place to another; both call it


@dataclass
class LinkFindings:
    """Results on one link. Keys are pairs of ranks (from, to).

    Attributes:
        endpoints: endpoint of every rank.
        hosts: the lowest rank of every host, in the order of the ring.
        unreachable: reasons of failed connections.
        failures: errors of measurements between ranks that reach each other.
        delay_s: lowest round trip in seconds.
        offset_s: clock of the second rank minus that of the first.
        rate_bps: bits per second of one connection in one direction, without other traffic of the
            two hosts.
        parallel_bps: bits per second from the first host to the second while no other host sends,
            by number of connections.
        at_once_bps: bits per second from each host to the next one in an all-reduce of all hosts,
            by the first host.
    """

    endpoints: list[Endpoint]
    hosts: list[int]
    unreachable: dict[tuple[int, int], str] = field(default_factory=dict)
    failures: dict[tuple[int, int], str] = field(default_factory=dict)
    delay_s: dict[tuple[int, int], float] = field(default_factory=dict)
    offset_s: dict[tuple[int, int], float] = field(default_factory=dict)
    rate_bps: dict[tuple[int, int], float] = field(default_factory=dict)
    parallel_bps: dict[int, float] = field(default_factory=dict)
    at_once_bps: dict[int, float] = field(default_factory=dict)

    def alone_bps(self) -> float:
        """Return the lowest rate of the pairs of the ring, each without other traffic.

        The pairs of one round may share a link. The first pair is measured again without other
        pairs; the rate is increased by the ratio of its two rates.
        """
        ring = [*zip(self.hosts, [*self.hosts[1:], self.hosts[0]], strict=True)]
        ratio = self.parallel_bps.get(1, 0.0) / self.rate_bps[ring[0]]
        return max(1.0, ratio) * min(self.rate_bps[pair] for pair in ring)

    def clock_offsets(self) -> dict[int, float]:
        """Return the clock of each measured host minus the median of all hosts, in seconds."""
        offsets, rest = {self.hosts[0]: 0.0}, dict(self.offset_s)
        while known := [pair for pair in rest if offsets.keys() & {*pair}]:
            for a, b in known:
                offset_s = rest.pop((a, b))
                if a in offsets:
                    offsets.setdefault(b, offsets[a] + offset_s)
                else:
                    offsets[a] = offsets[b] - offset_s
        middle_s = median_low(offsets.values())
        return {rank: offset_s - middle_s for rank, offset_s in offsets.items()}


def find_unreachable(meeting: Meeting, found: LinkFindings) -> None:
    """Connect to all other ranks at once. Every rank must call it."""
    others = {rank: (there.address, there.port) for rank, there in enumerate(found.endpoints)}
    own, _ = others.pop(meeting.rank)
    missed = unreachable(own, others, REACH_S)
    for rank, row in enumerate(meeting.gather([*missed.items()])):
        found.unreachable |= {(rank, peer): reason for peer, reason in row}


def measure(meeting: Meeting, found: LinkFindings) -> None:
    """Measure delays, clocks and rates, until a measurement fails. Every rank must call it.

    Of each host one rank takes part. No host is in two pairs at once.
    """
    own = _Host(meeting, found) if meeting.rank in found.hosts else None
    pairs = (partial(_Host.pair, places=places) for places in schedule(len(found.hosts)))
    for step in (_Host.open, *pairs, _Host.parallel, _Host.ring):
        rows, failure = list[Row](), None
        try:
            rows = [] if own is None else run_limited(partial(step, own), STEP_S)
        except (RuntimeError, TimeoutError) as error:
            failure = own and (own.peer, str(error).splitlines()[0].rpartition("] ")[2])
        for rank, (theirs, failed) in enumerate(meeting.gather((rows, failure))):
            for name, key, value in theirs:
                getattr(found, name)[tuple(key) if isinstance(key, list) else key] = value
            if failed is not None:
                found.failures[rank, failed[0]] = failed[1]
        if found.failures:
            break
    if dist.is_initialized():
        dist.destroy_process_group()


class _Host:
    """Measurement on the first rank of a host. Places are those in the ring of hosts.

    Attributes:
        peer: rank of the other host of the present step.
    """

    def __init__(self, meeting: Meeting, found: LinkFindings):
        self._hosts, self._interface = found.hosts, found.endpoints[meeting.rank].interface
        self._place, self._count = found.hosts.index(meeting.rank), len(found.hosts)
        self._store, self._trip_s = meeting.part(f"link{meeting.step}"), 0.0
        self.peer = self._hosts[(self._place + 1) % self._count]

    def open(self) -> list[Row]:
        """Open a group of all hosts."""
        with self._environment(1):
            dist.init_process_group(
                "gloo",
                store=self._store,
                rank=self._place,
                world_size=self._count,
                timeout=timedelta(seconds=MESSAGE_S),
            )
        assert dist.group.WORLD is not None
        self._everyone = dist.group.WORLD
        self._send = sending(self._everyone, MESSAGE_S)
        return []

    def pair(self, places: Sequence[tuple[int, int]]) -> list[Row]:
        """Measure delay, clock and both rates between this host and the one of its pair."""
        rows = list[Row]()
        for a, b in [pair for pair in places if self._place in pair]:
            self.peer = self._hosts[a + b - self._place]
            rows += self._measure_trips(a, b)
            for source, target in ((a, b), (b, a)):
                rate_bps = self._measure_rate(self._send, source, target)
                rows.append(("rate_bps", (self._hosts[source], self._hosts[target]), rate_bps))
        return rows

    def parallel(self) -> list[Row]:
        """Measure the rate from the first host to the second by several connections."""
        self.peer = self._hosts[0 if self._place else 1]
        best = dict.fromkeys(CONNECTIONS, 0.0)
        for count in (*CONNECTIONS, 1):  # a disturbance of the first one would look like a gain
            with self._environment(count):
                group = dist.new_group([0, 1], timedelta(seconds=MESSAGE_S), "gloo")
            if isinstance(group, dist.ProcessGroup) and self._place < 2:
                rate_bps = self._measure_rate(sending(group, MESSAGE_S, count), 0, 1)
                best[count] = max(best[count], rate_bps)
        return [("parallel_bps", *item) for item in best.items() if self._place == 0]

    def ring(self) -> list[Row]:
        """Measure the rate at which every host sends to the next one in an all-reduce."""
        self.peer = self._hosts[(self._place + 1) % self._count]
        probe = Probe(self._everyone, torch.zeros(1), device_of(torch.device("cpu")))
        budget = Budget(RING_S, math.inf)
        size, seconds = explore(probe, averaging(self._everyone), MOST_BYTES, budget)[-1]
        sent = size * ring_steps(self._count) / self._count
        return [("at_once_bps", self._hosts[0], 8 * sent / seconds)]

    def _environment(self, connections: int) -> AbstractContextManager[None]:
        return group_environment(LinkSpec("", self._interface, "gloo", connections), self._count)

    def _measure_trips(self, a: int, b: int) -> list[Row]:
        """Measure the lowest round trip, and by it the clock of the second host."""
        best, stamp = (math.inf, 0.0), torch.zeros(1, dtype=torch.float64)
        for _ in range(TRIPS):
            begin_s = time.time()
            self._send(stamp, a, b)
            stamp.fill_(time.time())  # its value on the second host arrives at the first one
            self._send(stamp, b, a)
            end_s = time.time()
            best = min(best, (end_s - begin_s, stamp.item() - (begin_s + end_s) / 2))
        stamp.fill_(best[0])
        self._send(stamp, a, b)
        self._trip_s, key = stamp.item(), (self._hosts[a], self._hosts[b])
        found = ("delay_s", key, best[0]), ("offset_s", key, best[1])
        return [*found] if self._place == a else []

    def _measure_rate(self, send: Send, source: int, target: int) -> float:
        """Return the bits per second of a message that is long enough, as its receiver sees them,
        without the delay of its start and of its way."""
        size, times = FIRST_BYTES, torch.zeros(1, dtype=torch.float64)
        while True:
            begin_s = time.perf_counter()
            send(torch.zeros(size, dtype=torch.uint8), source, target)
            times.fill_(time.perf_counter() - begin_s)
            self._send(times, target, source)
            seconds = max(times.item() - self._trip_s, LEAST_S)
            if seconds >= LONG_S or size >= MOST_BYTES:
                return 8 * size / seconds
            size *= 4


def schedule(hosts: int) -> list[list[tuple[int, int]]]:
    """Return the pairs of each round, as places in the ring of hosts.

    With more than `ALL_PAIRS` hosts these are the neighbours in the ring alone.
    """
    places = range(hosts)
    if hosts > ALL_PAIRS:
        ring = [(place, (place + 1) % hosts) for place in places]
        rounds = [ring[0 : hosts - hosts % 2 : 2], ring[1::2], ring[hosts - hosts % 2 :]]
        return [round_ for round_ in rounds if round_]
    rows = zip(*(partners(place, hosts) for place in places), strict=True)
    return [
        [(place, peer) for place, peer in enumerate(row) if peer is not None and place < peer]
        for row in rows
    ]
