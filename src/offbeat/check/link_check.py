"""Measurement of one link between all hosts of the job."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import fmean, median_low
from typing import Any

from offbeat.check.connections import LIMIT_S, accept, connect
from offbeat.check.facts import Endpoint
from offbeat.check.meeting import Meeting
from offbeat.check.traffic import answer_trips, measure_trips, transfer
from offbeat.core.measuring.tournament import partners
from offbeat.core.transport.interfaces import unreachable

ALL_PAIRS = 16  # with more hosts only neighbours in the ring are measured
PAIR_S = 1.0  # seconds of a transfer of one pair in one direction
RING_S = 2.0
CONNECTIONS = (1, 2, 4)  # numbers of parallel connections that are compared


@dataclass
class LinkFindings:
    """Results on one link. Keys are ranks, or pairs of ranks (from, to).

    Attributes:
        endpoints: endpoint of every rank.
        hosts: the lowest rank of every host, in the order of the ring.
        unreachable: reasons of failed connections.
        failures: errors of measurements between ranks that reach each other.
        delay_s: lowest round trip in seconds.
        offset_s: clock of the second rank minus that of the first.
        rate_bps: bits per second of one connection in one direction, without other traffic of the
            two hosts.
        at_once_bps: bits per second from a rank to the next one while all ranks send.
        parallel_bps: bits per second between the first two hosts, by number of connections.
    """

    endpoints: list[Endpoint]
    hosts: list[int]
    unreachable: dict[tuple[int, int], str] = field(default_factory=dict)
    failures: dict[tuple[int, int], str] = field(default_factory=dict)
    delay_s: dict[tuple[int, int], float] = field(default_factory=dict)
    offset_s: dict[tuple[int, int], float] = field(default_factory=dict)
    rate_bps: dict[tuple[int, int], float] = field(default_factory=dict)
    at_once_bps: dict[int, float] = field(default_factory=dict)
    parallel_bps: dict[int, float] = field(default_factory=dict)

    def ring(self) -> list[tuple[int, int]]:
        """Return the pairs (from, to) of the ring of all hosts; none with a single host."""
        following = [*self.hosts[1:], *self.hosts[:1]]
        return [*zip(self.hosts, following, strict=True)] if len(self.hosts) > 1 else []

    def single_rate_bps(self) -> float:
        """Return the mean rate of the pairs of the ring, each without other traffic.

        The pairs of one round may share a link. The first pair is measured again without other
        pairs; the mean is increased by the ratio of its two rates, at most to the highest rate.
        """
        rates = [self.rate_bps.get(pair, 0.0) for pair in self.ring()]
        undisturbed = self.parallel_bps.get(1, 0.0)
        ratio = undisturbed / (rates[0] or 1.0)
        return min(fmean(rates) * max(1.0, ratio), max(undisturbed, *self.rate_bps.values()))

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

    def is_cut(self, a: int, b: int) -> bool:
        """Whether two ranks do not reach each other or a measurement between them has failed."""
        known = self.unreachable.keys() | self.failures.keys()
        return (a, b) in known or (b, a) in known


class LinkCheck:
    """Measurement of one link. Every rank must call the same methods in the same order.

    Args:
        meeting: exchange of values with all ranks.
        endpoints: endpoint of every rank.
        hosts: the lowest rank of every host. Only these ranks measure rates.
        listener: socket that listens on this rank's endpoint.
        secret: secret of the job.
    """

    def __init__(
        self,
        meeting: Meeting,
        endpoints: Sequence[Endpoint],
        hosts: Sequence[int],
        listener: socket.socket,
        secret: bytes,
    ):
        self.findings = LinkFindings([*endpoints], [*hosts])
        self._meeting, self._rank = meeting, meeting.rank
        self._listener, self._secret = listener, secret

    def check_reach(self) -> None:
        """Connect to all other ranks at once."""
        others = {
            rank: (endpoint.address, endpoint.port)
            for rank, endpoint in enumerate(self.findings.endpoints)
            if rank != self._rank
        }
        own = self.findings.endpoints[self._rank].address
        missed = unreachable(own, others, LIMIT_S)
        for rank, row in enumerate(self._meeting.gather([*missed.items()])):
            self.findings.unreachable |= {(rank, peer): reason for peer, reason in row}

    def measure_pairs(self) -> None:
        """Measure delay, clock and both rates of pairs of hosts, no host in two pairs at once."""
        for peer in self._peers():
            is_first = peer is not None and self._rank < peer
            self._attempt(self._measure_trips if is_first else self._answer_trips, peer)
            self._attempt(self._send if is_first else self._receive, peer)
            self._attempt(self._receive if is_first else self._send, peer)
        self._share()

    def measure_connections(self) -> None:
        """Measure rates from the first host to the second by several connections at once."""
        first, second = self.findings.hosts[:2]
        peer = {first: second, second: first}.get(self._rank)
        for count in CONNECTIONS:
            self._attempt(partial(self._measure_parallel, count), peer)
        self._share()

    def measure_ring(self) -> None:
        """Measure rates while every host sends to the next one, if all pairs of the ring work."""
        ring = self.findings.ring()
        if any(self.findings.is_cut(*pair) for pair in ring):
            return
        following = dict(ring).get(self._rank)
        self._attempt(self._measure_at_once, following)
        self._share()

    def _peers(self) -> Iterator[int | None]:
        """Yield the rank to measure in each round, or None. All ranks have the same rounds."""
        hosts = self.findings.hosts
        place = hosts.index(self._rank) if self._rank in hosts else None
        for round_ in schedule(len(hosts)):
            pairs = [pair for pair in round_ if place in pair]
            yield hosts[sum(pairs[0]) - place] if pairs and place is not None else None

    def _attempt(self, action: Callable[[int], None], peer: int | None) -> None:
        """Begin an action together with all ranks; store its error."""
        self._meeting.gather()
        if peer is None or self.findings.is_cut(self._rank, peer):
            return
        try:
            action(peer)
        except OSError as error:
            self.findings.failures[self._rank, peer] = error.strerror or str(error)

    def _open(self, peer: int) -> socket.socket:
        """Return a connection with a rank that calls this in the same step."""
        return self._accept(peer) if self._rank < peer else self._connect(peer)

    def _accept(self, peer: int) -> socket.socket:
        return accept(self._listener, self._secret, peer, self._meeting.step)

    def _connect(self, peer: int) -> socket.socket:
        own, there = (self.findings.endpoints[rank] for rank in (self._rank, peer))
        address = there.address, there.port
        return connect(own.address, address, self._secret, self._rank, self._meeting.step)

    def _measure_trips(self, peer: int) -> None:
        with self._open(peer) as s:
            key = self._rank, peer
            self.findings.delay_s[key], self.findings.offset_s[key] = measure_trips(s)

    def _answer_trips(self, peer: int) -> None:
        with self._open(peer) as s:
            answer_trips(s)

    def _send(self, peer: int) -> None:
        self.findings.rate_bps[self._rank, peer] = transfer([self._open(peer)], [], PAIR_S)

    def _receive(self, peer: int) -> None:
        transfer([], [self._open(peer)], PAIR_S)

    def _measure_parallel(self, count: int, peer: int) -> None:
        opened = [self._open(peer) for _ in range(count)]
        if self._rank < peer:
            self.findings.parallel_bps[count] = transfer(opened, [], PAIR_S)
        else:
            transfer([], opened, PAIR_S)

    def _measure_at_once(self, following: int) -> None:
        hosts = self.findings.hosts
        place = hosts.index(self._rank)
        # Every other host accepts first, so that the hosts do not wait in a circle.
        incoming = self._accept(hosts[place - 1]) if place % 2 == 0 else None
        outgoing = self._connect(following)
        incoming = self._accept(hosts[place - 1]) if incoming is None else incoming
        rate_bps = transfer([outgoing], [incoming], RING_S)
        self.findings.at_once_bps[self._rank] = rate_bps

    def _share(self) -> None:
        """Exchange the findings of all ranks."""
        own = self.findings
        pairs: tuple[dict[tuple[int, int], Any], ...]
        pairs = own.failures, own.delay_s, own.offset_s, own.rate_bps
        single = own.at_once_bps, own.parallel_bps
        rows = [[[*key, value] for key, value in table.items()] for table in pairs]
        everyone = self._meeting.gather([rows, [[*table.items()] for table in single]])
        for theirs, numbers in everyone:
            for table, row in zip(pairs, theirs, strict=True):
                table |= {(a, b): value for a, b, value in row}
            for table, row in zip(single, numbers, strict=True):
                table |= dict(row)


def schedule(hosts: int) -> list[list[tuple[int, int]]]:
    """Return the pairs of each round, as positions in the ring of hosts.

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
