"""Exchanges of a worker with its neighbours: requests, answers and chunks, in the gossip thread.

Each end of an edge requests exchanges as a Poisson process in the common time of the job, at half
the rate of the edge.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from offbeat.frames.frames import Frame, Header, WireError
from offbeat.gossip.anchors import NEVER
from offbeat.gossip.chunks import Wire
from offbeat.gossip.exchange import ExchangeRecord, Exchanges
from offbeat.gossip.pairing import Action, Begin, Pairing, Requests
from offbeat.gossip.peers import Peers
from offbeat.gossip.protocol import Kind, finite
from offbeat.gossip.settings import Member
from offbeat.gossip.state import Mixing


class Exchanging:
    """Requests, pairing and transfers of one worker.

    Args:
        member: this worker.
        wire: chunks of the parameters.
        peers: connections.

    Attributes:
        exchanges: exchanges of the worker.
        pairing: pairing with the neighbours.
        requests: random requests.
        next_at: label of the next request; None to draw it anew.
    """

    def __init__(self, member: Member, wire: Wire, peers: Peers):
        self._clock, self._course = member.clock, member.shared.course
        self._counts, self._peers = member.counts, peers
        self.exchanges = Exchanges(member.shared, wire)
        self.pairing = Pairing(member.view.me, set())
        self.requests = Requests(member.view.me, {}, member.settings.seed)
        self.next_at: float | None = None
        # accepted exchanges: label, number, whether coded
        self._accepted: dict[int, tuple[float, int, bool]] = {}

    # ---- requests ---------------------------------------------------------------------------

    def set_rates(self, rates: Mapping[int, float]) -> None:
        """Use other exchanges per unit of time, by neighbour."""
        self.requests.rates = rates
        self.redraw()

    def redraw(self) -> None:
        """Draw the time of the next request anew."""
        self.next_at = None

    def request_due(self) -> None:
        """Request all exchanges that are due."""
        if self._clock.unit_s is None:
            return
        now = self._clock.now()
        if self.next_at is None:
            self.next_at = now + self.requests.wait()
        while self.next_at <= now:
            self.next_at += self.requests.wait()
            self.perform(self.pairing.request(self.requests.choose()))

    def perform(self, actions: Sequence[Action]) -> None:
        """Perform actions of the pairing."""
        for act in actions:
            if isinstance(act, Begin):
                if act.accepted:
                    t, number, coded = self._accepted.pop(act.partner)
                    mixing = self._course.mixing_at(t)
                    self._begin(act.partner, number, t, mixing, coded=coded)
                continue
            about: dict[str, Any] = {}
            if act.word is Kind.ASK:
                anchored = self.exchanges.anchor_number(act.to)
                about["meta"] = {"t": self._clock.now(), "anchored": anchored}
            elif act.word is Kind.YES:
                t, about["clock"], coded = self._accepted[act.to]
                mixing = self._course.mixing_at(t)
                alphas = {"alpha": mixing.alpha, "alpha_tilde": mixing.alpha_tilde}
                about["meta"] = {"t": t, "coded": coded, **alphas}
            self._peers.send(act.to, act.word, **about)

    # ---- frames -----------------------------------------------------------------------------

    def on_signal(self, peer: int, frame: Frame[Kind]) -> None:
        """Process a request of an exchange, or an answer to one."""
        word, meta = frame.header.kind, frame.meta
        if word is Kind.ASK:
            t = max(finite(meta.get("t")), self._clock.now())
            coded = meta.get("anchored") == self.exchanges.anchor_number(peer) != NEVER
            self._accepted[peer] = t, self.exchanges.next_number(peer), coded
        try:
            actions = self.pairing.receive(peer, word)
        except ValueError as error:
            raise WireError(str(error)) from None
        self.perform(actions)
        if word is Kind.YES:
            alphas = [finite(meta.get(name)) for name in ("alpha", "alpha_tilde")]
            # eta is common to all workers, so only the factors are sent
            mixing = Mixing(0.0, *alphas)
            coded = meta.get("coded") is True
            if coded and self.exchanges.anchor_number(peer) == NEVER:
                raise WireError("an exchange of codes needs anchors")
            self._begin(peer, frame.header.clock, finite(meta.get("t")), mixing, coded=coded)

    def buffer(self, peer: int, header: Header[Kind]) -> memoryview:
        """Return the memory for a chunk. Raise WireError if it is not expected."""
        one = self.exchanges.now
        expected = one and (one.partner, one.number, one.arrived)
        if one is None or expected != (peer, header.clock, header.shard):
            raise WireError(f"chunk {header.shard} is not expected now")
        return self.exchanges.buffer(header.shard)

    def on_chunk(self, peer: int) -> None:
        """Apply a chunk that has arrived."""
        if self.exchanges.apply_chunk():
            assert self.exchanges.now is not None
            self._peers.send(peer, Kind.WHOLE, clock=self.exchanges.now.number)
            self._end_if_complete()

    def on_whole(self, peer: int, number: int) -> None:
        """Process the confirmation of the partner that it has all chunks."""
        one = self.exchanges.now
        if one is None or (one.partner, one.number) != (peer, number):
            raise WireError("WHOLE is not expected now")
        one.confirmed = True
        self._end_if_complete()

    def abort(self, peer: int) -> None:
        """Abort requests and exchange with a disconnected neighbour."""
        self._accepted.pop(peer, None)
        self._counts.broken += self.exchanges.abort(peer)
        self.perform(self.pairing.remove_neighbour(peer))

    def _begin(self, partner: int, number: int, t: float, mixing: Mixing, *, coded: bool) -> None:
        exchanges = self.exchanges
        one = exchanges.begin(partner, number, t, mixing, coded=coded)
        one.began_s = time.perf_counter()
        for chunk in range(len(exchanges.wire.chunks)):
            data, note = exchanges.data(chunk), partial(exchanges.note_sent, one, chunk)
            self._peers.send_later(partner, Kind.CHUNK, data, note, shard=chunk, clock=number)

    def _end_if_complete(self) -> None:
        one, exchanges = self.exchanges.now, self.exchanges
        size = exchanges.bytes if one else 0
        if one is not None and exchanges.end_if_complete():
            ended_s = time.perf_counter()
            self._counts.add(ExchangeRecord(one.partner, one.number, one.began_s, ended_s, size))
            self.perform(self.pairing.end_exchange())
