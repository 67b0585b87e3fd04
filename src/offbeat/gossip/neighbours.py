"""Neighbours of a worker: who they are, connections that open and close, and what they know of the
graph, in the gossip thread."""

from __future__ import annotations

import random
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from offbeat.core.buckets.flat import memory_of
from offbeat.frames.connection import NOTHING
from offbeat.frames.frames import Frame, Header, WireError
from offbeat.gossip.agreement import Agreements, planned_rates
from offbeat.gossip.chunks import CHUNK_BYTES
from offbeat.gossip.exchanging import Exchanging
from offbeat.gossip.partitions import remaining_part
from offbeat.gossip.peers import Address, Peers
from offbeat.gossip.protocol import SIGNALS, Kind, finite
from offbeat.gossip.settings import Member
from offbeat.gossip.tree_reductions import TreeReductions
from offbeat.gossip.view import Known, State

ANOTHER_MODEL = "the model is another one; build it from the same configuration"


class Neighbours:
    """Neighbours of a worker: their connections and frames, and the spread of news.

    Args:
        member: this worker.
        peers: connections.
        exchanging: exchanges with the neighbours.
        reductions: reductions, which restart when the view changes.
        agreements: reports and agreements, which are spread with the view.
        addresses: known addresses, the own one included.
        around: first neighbours.

    Attributes:
        addresses: known addresses.
        never_came: first neighbours that have not connected yet.
        joining: joining workers that have not connected yet, with the time of their place.
    """

    def __init__(
        self,
        member: Member,
        peers: Peers,
        exchanging: Exchanging,
        reductions: TreeReductions,
        agreements: Agreements,
        addresses: Mapping[int, Address],
        around: Iterable[int],
    ):
        self._member, self._settings, self._view = member, member.settings, member.view
        self.peers, self.exchanging, self.reductions = peers, exchanging, reductions
        self._agreements, self.addresses = agreements, dict(addresses)
        self._life = random.SystemRandom().getrandbits(48)  # random id of this process
        self._lives: dict[int, int] = {}  # random ids of the neighbours' processes
        self.never_came = set(around)
        # disconnected neighbours, with the time of disconnection
        self._down_s = dict.fromkeys(self.never_came, time.monotonic())
        self.joining: dict[int, float] = {}

    # ---- connections ------------------------------------------------------------------------

    def hello(self, peer: int) -> dict[str, Any]:
        """Return the metadata of the HELLO to a neighbour."""
        return {
            "layout": self._settings.layout,
            "life": self._life,
            "door": self.addresses[self._view.me],
            "whole": self.exchanging.exchanges.completed_number(peer),
            **self.knowledge(),
        }

    def on_connect(self, peer: int, hello: dict[str, Any]) -> None:
        """Process the HELLO of a neighbour that has connected. Raise WireError if it is invalid."""
        if hello.get("layout") != self._settings.layout:
            raise WireError(ANOTHER_MODEL)
        try:
            (host, port), life = hello["door"], int(hello["life"])
            self.addresses[peer] = str(host), int(port)
        except (KeyError, TypeError, ValueError):
            raise WireError("HELLO must say where its door is, and who it is") from None
        self.peers.expect(peer, self.addresses[peer])
        before_life, self._lives[peer] = self._lives.get(peer), life
        exchanges, view = self.exchanging.exchanges, self._view
        if before_life != life:
            exchanges.forget_partner(peer)
        self.joining.pop(peer, None)
        self._down_s.pop(peer, None)
        expected = peer in self.never_came
        self.never_came.discard(peer)
        # Changes since the HELLO of this worker were sent only to neighbours connected at that
        # time.
        self.peers.send(peer, Kind.VIEW, meta=self.knowledge())
        exchanges.settle(peer, int(finite(hello.get("whole"))))
        before, gone = view.edges(), view.state(peer) > State.DOWN
        self.merge(hello)
        # The peer may have published the edge already, and its neighbours may have sent it to this
        # worker.
        again = self._member.has_joined or not expected
        self.publish(view.set_edge(peer, State.UP, self._member.clock.now(), again=again))
        if gone and not expected:
            same = "can be reached again" if life == before_life else "has joined"
            self._member.warn(f"worker {peer} {same}")
        if view.edges() != before:
            self.update_rates()
        self.exchanging.pairing.add_neighbour(peer)

    def on_disconnect(self, peer: int) -> None:
        """Process the disconnection of a neighbour."""
        self.exchanging.abort(peer)
        self._down_s[peer] = time.monotonic()
        if self._view.state(peer) is State.UP:
            self._set_edge(peer, State.DOWN)

    def _on_goodbye(self, peer: int) -> None:
        """Process that a neighbour leaves the job. Raise ConnectionResetError."""
        self.peers.stop_reconnecting(peer)
        self.exchanging.exchanges.release_anchors(peer)
        self._set_edge(peer, State.LEFT)
        self.update_rates()
        raise ConnectionResetError("it has left")  # the peer waits for the disconnection

    # ---- frames -----------------------------------------------------------------------------

    def body_buffer(self, peer: int, header: Header[Kind]) -> tuple[Any, memoryview]:
        """Return an object and its memory for the body of a frame. Raise WireError if the frame is
        not expected.
        """
        if header.kind is Kind.CHUNK:
            return None, self.exchanging.buffer(peer, header)
        if header.kind in (Kind.UP, Kind.DOWN):
            if header.body_bytes > CHUNK_BYTES:
                raise WireError(f"body ({header.body_bytes} bytes) is too large")
            body = torch.empty(header.body_bytes, dtype=torch.uint8, device="cpu")
            return body, memory_of(body)
        return None, NOTHING

    def on_frame(self, peer: int, frame: Frame[Kind]) -> None:
        """Process a frame. Raise WireError if it is invalid."""
        kind = frame.header.kind
        if kind in SIGNALS:
            self.exchanging.on_signal(peer, frame)
        elif kind is Kind.CHUNK:
            self.exchanging.on_chunk(peer)
        elif kind is Kind.WHOLE:
            self.exchanging.on_whole(peer, frame.header.clock)
        elif kind in (Kind.UP, Kind.DOWN):
            self.reductions.on_frame(peer, frame)
        elif kind is Kind.VIEW:
            self.on_view(frame.meta)
        elif kind is Kind.BYE:
            self._on_goodbye(peer)
        elif kind is not Kind.BEAT:
            raise WireError(f"{kind.name} is not expected now")

    # ---- news -------------------------------------------------------------------------------

    def on_view(self, meta: dict[str, Any]) -> None:
        """Process news of a neighbour."""
        before = self._view.edges()
        self.merge(meta)
        if self._view.edges() != before:
            self.update_rates()

    def publish(self, edges: Sequence[Known], agreed: Mapping[str, Any] | None = None) -> None:
        """Send changed edges, reports and agreements to the neighbours. Changed edges restart a
        reduction."""
        if edges or agreed:
            for peer in self.peers.reachable():
                self.peers.send(peer, Kind.VIEW, meta=self._news(edges, agreed or {}))
        if edges:
            self.reductions.restart()

    def knowledge(self) -> dict[str, Any]:
        """Return all that this worker knows of the job, as metadata of a frame."""
        return self._news(self._view.changed_edges(), self._agreements.known())

    def _news(self, edges: Sequence[Known], agreed: Mapping[str, Any]) -> dict[str, Any]:
        return {"known": list(edges), "held": self.reductions.held, **agreed}

    def merge(self, meta: dict[str, Any]) -> None:
        """Merge what a neighbour knows, and publish what is new."""
        view = self._view
        try:
            new = view.merge(meta.get("known", []))
        except (ValueError, TypeError) as error:
            raise WireError(str(error)) from None
        for peer in view.neighbours_of(view.me) if new else ():
            self.peers.expect(peer)
            broken = peer in self._down_s and peer not in self.never_came
            if broken and view.state(peer) is State.UP:
                # An outdated UP must not hide a local disconnection, because no worker would give
                # the edge up.
                new += view.set_edge(peer, State.DOWN, self._member.clock.now())
        self.publish(new, self._agreements.merge(meta))
        self.reductions.on_count(meta.get("held"))

    def _set_edge(self, peer: int, state: State) -> None:
        self.publish(self._view.set_edge(peer, state, self._member.clock.now()))

    # ---- lost neighbours --------------------------------------------------------------------

    def down_times(self) -> dict[int, float]:
        """Return the disconnected neighbours that may return, with the time of disconnection."""
        down = self._down_s.items()
        return {peer: at for peer, at in down if self._view.state(peer) is State.DOWN}

    def give_up_lost(self) -> None:
        """Remove edges that have been disconnected for more than `silent_s` seconds."""
        now, silent_s = time.monotonic(), self._settings.silent_s
        late = [peer for peer, at in self.down_times().items() if now - at > silent_s]
        for peer in late:
            self._member.warn(
                f"worker {peer} could not be reached for {silent_s:g} s; the others go on without "
                "it"
            )
            self.exchanging.exchanges.release_anchors(peer)
            self._set_edge(peer, State.GONE)
        if late:
            self.update_rates()

    def update_rates(self) -> None:
        """Update the exchange rates of this worker's edges after a change of the graph.

        The constants change only by agreement.
        """
        part, notice = remaining_part(self._view, self._settings.on_partition)
        if notice:
            self._member.warn(notice)
        if part is not None:
            self.publish(self._view.cut_off(part))
        me, rates = self._view.me, planned_rates(self._view.edges(), self._settings.rate)
        self.exchanging.set_rates({sum(e) - me: rate for e, rate in rates.items() if me in e})
