"""Pairing of two workers for an exchange, as a state machine without sockets and without a clock.

An idle worker sends a request to the neighbour that is first in its queue. The neighbour accepts if
it is idle. If it exchanges, it answers BUSY and queues a request of its own to the sender. Of the
two, exactly one therefore has to send the next request. Requests are served in order, and a busy
pair cannot block its neighbours.

A neighbour that waits for an answer itself holds the request if its own id is the smaller one, and
answers when it has its own answer; otherwise it answers BUSY. If every such neighbour answered
BUSY, three workers that ask around a triangle would refuse each other for ever.

No deadlock is possible: a worker that waits for a held request waits for a smaller id, so a chain
of waiting workers is finite and ends at one that answers at once. If two workers have sent requests
to each other, they resolve this without another message: the request of the smaller id is valid,
and the worker with the larger id drops its own request and accepts. An exchange that has begun
depends on its two partners only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from random import Random

from offbeat.gossip.protocol import Kind


@dataclass(frozen=True)
class Send:
    """Action: send a signal (ASK, YES or BUSY) to a neighbour."""

    to: int
    word: Kind


@dataclass(frozen=True)
class Begin:
    """Action: begin an exchange with `partner`. It ends with `end_exchange`.

    Attributes:
        partner: neighbour that takes part in the exchange.
        accepted: whether the partner has sent the request.
    """

    partner: int
    accepted: bool


Action = Send | Begin


@dataclass
class Pairing:
    """Pairing state of one worker. Methods return the actions to perform, in order.

    Attributes:
        me: id of this worker.
        neighbours: ids of connected neighbours.
        duties: neighbours to which this worker has to send a request, in order.
        waiting: neighbours that have to send a request to this worker.
        asked: receiver of the request that is not yet answered.
        held: neighbours whose requests are answered when that one is, in order.
        partner: neighbour of the exchange in progress.
        paused: whether this worker neither begins nor accepts exchanges.
    """

    me: int
    neighbours: set[int]
    duties: list[int] = field(default_factory=list)
    waiting: set[int] = field(default_factory=set)
    asked: int | None = None
    held: list[int] = field(default_factory=list)
    partner: int | None = None
    paused: bool = False

    @property
    def is_idle(self) -> bool:
        """Return whether this worker neither awaits an answer nor exchanges."""
        return self.asked is None and self.partner is None

    def request(self, peer: int) -> list[Action]:
        """Queue an exchange with a neighbour, unless one is queued, requested or in progress."""
        known = *self.waiting, *self.held, self.asked, self.partner
        if peer in self.neighbours and peer not in known:
            self._queue_request(peer)
        return self._send_next_request()

    def receive(self, peer: int, word: Kind) -> list[Action]:
        """Process a signal of a neighbour.

        Raises:
            ValueError: the signal is an answer, but this worker has not sent a request to `peer`.
        """
        if word is Kind.ASK:
            return self._on_request(peer)
        if self.asked != peer:
            raise ValueError(f"{word.name} of {peer} answers nothing")
        self.asked = None
        if word is Kind.BUSY:
            self.waiting.add(peer)
            return [*self._answer_held(), *self._send_next_request()]
        return [self._begin(peer, accepted=False), *self._answer_held()]

    def end_exchange(self) -> list[Action]:
        """End the exchange in progress, whether complete or not."""
        self.partner = None
        return self._send_next_request()

    def add_neighbour(self, peer: int) -> None:
        """Add a connected neighbour."""
        self.neighbours.add(peer)

    def remove_neighbour(self, peer: int) -> list[Action]:
        """Remove a disconnected neighbour and all signals and exchanges with it."""
        self.neighbours.discard(peer)
        self._clear_requests(peer)
        self.asked = None if self.asked == peer else self.asked
        self.partner = None if self.partner == peer else self.partner
        held = [] if self.asked is not None else self._answer_held()
        return [*held, *self._send_next_request()]

    def pause(self, *, paused: bool) -> list[Action]:
        """Stop beginning and accepting exchanges, or continue."""
        self.paused = paused
        return self._send_next_request()

    def _on_request(self, peer: int) -> list[Action]:
        if self.asked == peer and self.me < peer:
            return []  # the request of the smaller id is valid; the peer accepts it
        if self.asked == peer or (self.is_idle and not self.paused):
            self.asked = None
            begin = self._begin(peer, accepted=True)
            return [Send(peer, Kind.YES), begin, *self._answer_held()]
        self.waiting.discard(peer)
        if self.asked is not None and self.me < peer:
            self.held.append(peer)
            return []
        self._queue_request(peer)
        return [Send(peer, Kind.BUSY)]

    def _answer_held(self) -> list[Action]:
        """Answer the requests that have waited for the answer to this worker's own."""
        held, self.held = self.held, []
        return [action for peer in held for action in self._on_request(peer)]

    def _begin(self, peer: int, *, accepted: bool) -> Begin:
        self.partner = peer
        self._clear_requests(peer)
        return Begin(peer, accepted)

    def _queue_request(self, peer: int) -> None:
        if peer not in self.duties:
            self.duties.append(peer)

    def _clear_requests(self, peer: int) -> None:
        self.waiting.discard(peer)
        for queue in (self.duties, self.held):
            if peer in queue:
                queue.remove(peer)

    def _send_next_request(self) -> list[Action]:
        """Request the first queued exchange if this worker is idle."""
        if not self.is_idle or self.paused or not self.duties:
            return []
        self.asked = self.duties.pop(0)
        return [Send(self.asked, Kind.ASK)]


class Requests:
    """Random requests of worker `me`: a Poisson process at half of the rates of its edges, as the
    other ends request the other half.

    Attributes:
        rates: exchanges per unit of time, by neighbour.
    """

    def __init__(self, me: int, rates: Mapping[int, float], seed: int) -> None:
        self.rates, self._random = rates, Random(f"{seed} {me}")

    def wait(self) -> float:
        """Return the units of time until the next request; infinite without neighbours."""
        total = sum(self.rates.values()) / 2
        return self._random.expovariate(total) if total else math.inf

    def choose(self) -> int:
        """Return the receiver of the next request."""
        return self._random.choices([*self.rates], [*self.rates.values()])[0]
