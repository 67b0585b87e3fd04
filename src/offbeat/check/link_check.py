"""Measurement of one link between all hosts of the job."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from statistics import fmean, median_low
from typing import Any

from offbeat.check.connections import LIMIT_S, accept, connect
from offbeat.check.facts import Endpoint
from offbeat.check.meeting import Meeting
from offbeat.check.traffic import (
    DRAIN_S,
    TRIPS_S,
    answer_trips,
    measure_trips,
    send_message,
    transfer,
)
from offbeat.core.measuring.tournament import partners
from offbeat.core.transport.interfaces import unreachable

ALL_PAIRS = 16  # with more hosts only neighbours in the ring are measured
PAIR_S = 1.0  # seconds of a transfer of one pair in one direction
RING_S = 2.0
CONNECTIONS = (1, 2, 4)  # numbers of parallel connections that are compared
# Longest time for all of them, seconds of a message by the rate of the pair, and seconds before it.
# TCP reduces its window after a pause of the round trip and .2 s.
PARALLEL_S, MESSAGE_S, PAUSE_S = 4.0, 0.2, 0.35
# Longest times in seconds of facts, reach and ring, and of a round of pairs, if all pairs work.
FIRST_S, ROUND_S = 6.0, 3.0
NO_TIME = "(no time left)"
LEAST_OPEN_S = 0.5  # a measurement is left out if less time is left to open its connections


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
        alone_bps: bits per second from the first host to the second while no other host sends.
        parallel_bps: bits per second of a message from the first host to the second after a pause,
            by number of connections.
        omitted: measurements that were left out, each with the reason.
    """

    endpoints: list[Endpoint]
    hosts: list[int]
    unreachable: dict[tuple[int, int], str] = field(default_factory=dict)
    failures: dict[tuple[int, int], str] = field(default_factory=dict)
    delay_s: dict[tuple[int, int], float] = field(default_factory=dict)
    offset_s: dict[tuple[int, int], float] = field(default_factory=dict)
    rate_bps: dict[tuple[int, int], float] = field(default_factory=dict)
    at_once_bps: dict[int, float] = field(default_factory=dict)
    alone_bps: dict[int, float] = field(default_factory=dict)
    parallel_bps: dict[int, float] = field(default_factory=dict)
    omitted: list[str] = field(default_factory=list)

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
        alone_bps = self.alone_bps.get(self.hosts[0], 0.0)
        ratio = alone_bps / (rates[0] or 1.0)
        return min(fmean(rates) * max(1.0, ratio), max(alone_bps, *self.rate_bps.values()))

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
        self._end_s = time.monotonic() + link_limit_s(len(hosts))  # that of rank 0 counts
        self._open_s = 0.0  # monotonic time until which connections may be opened

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
        omitted = rounds = 0
        for peer in self._peers():
            is_first = peer is not None and self._rank < peer
            trips = self._measure_trips if is_first else self._answer_trips
            first, second = (self._send, self._receive)[:: 1 if is_first else -1]
            begun = [
                self._attempt(trips, peer, TRIPS_S),
                self._attempt(first, peer, PAIR_S),
                self._attempt(second, peer, PAIR_S),
            ]
            rounds, omitted = rounds + 1, omitted + (not all(begun))
        self._share()
        if omitted:
            self.findings.omitted.append(f"pairs of {omitted} of {rounds} rounds {NO_TIME}")

    def measure_connections(self) -> None:
        """Measure messages from the first host to the second by several connections at once."""
        found = self.findings
        first, second = found.hosts[:2]
        action = {first: self._send_messages, second: self._receive_messages}.get(self._rank)
        peer = {first: second, second: first}.get(self._rank)
        self._attempt(action or self._receive_messages, peer, PARALLEL_S)
        self._share()
        if found.parallel_bps.keys() != {*CONNECTIONS} and not found.is_cut(first, second):
            found.omitted.append(f"parallel connections {NO_TIME}")

    def measure_ring(self) -> None:
        """Measure rates while every host sends to the next one, if all pairs of the ring work."""
        ring = self.findings.ring()
        if any(self.findings.is_cut(*pair) for pair in ring):
            self.findings.omitted.append("the ring of all hosts (a pair of it fails)")
            return
        following = dict(ring).get(self._rank)
        if not self._attempt(self._measure_at_once, following, RING_S):
            self.findings.omitted.append(f"the ring of all hosts {NO_TIME}")
        self._share()

    def _peers(self) -> Iterator[int | None]:
        """Yield the rank to measure in each round, or None. All ranks have the same rounds."""
        hosts = self.findings.hosts
        place = hosts.index(self._rank) if self._rank in hosts else None
        for round_ in schedule(len(hosts)):
            pairs = [pair for pair in round_ if place in pair]
            yield hosts[sum(pairs[0]) - place] if pairs and place is not None else None

    def _attempt(self, action: Callable[[int], None], peer: int | None, seconds: float) -> bool:
        """Begin an action together with all ranks; store its error.

        Args:
            action: called with `peer`, unless a measurement between the two ranks has failed.
            peer: the other rank; None: this rank does not take part.
            seconds: longest time of the action, without the time to open connections.

        Returns:
            Whether enough time was left, by rank 0's clock.
        """
        own = self.findings.failures
        failed = [[b, reason] for (a, b), reason in own.items() if a == self._rank]
        left_s = self._end_s - time.monotonic()
        everyone = self._meeting.gather([left_s, failed])
        for rank, (_, failures) in enumerate(everyone):
            own |= {(rank, b): reason for b, reason in failures}
        open_s = min(LIMIT_S, everyone[0][0] - seconds - DRAIN_S)
        if open_s < LEAST_OPEN_S:
            return False
        if peer is None or self.findings.is_cut(self._rank, peer):
            return True
        self._open_s = time.monotonic() + open_s
        try:
            action(peer)
        except OSError as error:
            own[self._rank, peer] = error.strerror or str(error)
        return True

    def _open(self, peer: int) -> socket.socket:
        """Return a connection with a rank that calls this in the same step."""
        return self._accept(peer) if self._rank < peer else self._connect(peer)

    def _accept(self, peer: int) -> socket.socket:
        return accept(self._listener, self._secret, peer, self._meeting.step, self._open_s)

    def _connect(self, peer: int) -> socket.socket:
        own, there = (self.findings.endpoints[rank] for rank in (self._rank, peer))
        address, step = (there.address, there.port), self._meeting.step
        return connect(own.address, address, self._secret, self._rank, step, self._open_s)

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

    def _send_messages(self, peer: int) -> None:
        """Send messages by several connections, each after a pause, as between two iterations."""
        found, measured = self.findings, dict[int, float]()
        size = int(found.rate_bps.get((self._rank, peer), 0.0) * MESSAGE_S / 8)
        with ExitStack() as stack:
            opened = [stack.enter_context(self._open(peer)) for _ in range(max(CONNECTIONS))]
            end_s = time.monotonic() + PARALLEL_S
            send_message(opened, size, end_s)  # TCP enlarges its windows
            found.alone_bps[self._rank] = send_message(opened[:1], size, end_s)
            for count in (*CONNECTIONS, 1):  # a disturbance of the first one would look like a gain
                time.sleep(PAUSE_S)
                if time.monotonic() + PAUSE_S > end_s:
                    return
                rate_bps = send_message(opened[:count], size, end_s)
                measured[count] = max(rate_bps, measured.get(count, 0.0))
        found.parallel_bps |= measured

    def _receive_messages(self, peer: int) -> None:
        with ExitStack() as stack:
            opened = [stack.enter_context(self._open(peer)) for _ in range(max(CONNECTIONS))]
            transfer([], opened, PARALLEL_S)

    def _measure_at_once(self, following: int) -> None:
        hosts = self.findings.hosts
        place = hosts.index(self._rank)
        previous = hosts[place - 1]
        with ExitStack() as stack:
            # Every other host accepts first, so that the hosts do not wait in a circle.
            accepts_first = place % 2 == 0
            incoming = stack.enter_context(self._accept(previous)) if accepts_first else None
            outgoing = stack.enter_context(self._connect(following))
            incoming = incoming or stack.enter_context(self._accept(previous))
            rate_bps = transfer([outgoing], [incoming], RING_S)
            self.findings.at_once_bps[self._rank] = rate_bps

    def _share(self) -> None:
        """Exchange the findings of all ranks."""
        own = self.findings
        pairs: tuple[dict[tuple[int, int], Any], ...]
        pairs = own.failures, own.delay_s, own.offset_s, own.rate_bps
        single = own.at_once_bps, own.alone_bps, own.parallel_bps
        rows = [[[*key, value] for key, value in table.items()] for table in pairs]
        everyone = self._meeting.gather([rows, [[*table.items()] for table in single]])
        for theirs, numbers in everyone:
            for table, row in zip(pairs, theirs, strict=True):
                table |= {(a, b): value for a, b, value in row}
            for table, row in zip(single, numbers, strict=True):
                table |= dict(row)


def link_limit_s(hosts: int) -> float:
    """Return the longest time of the check of a link after the meeting, in seconds."""
    return FIRST_S + PARALLEL_S + ROUND_S * len(schedule(hosts))


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
