"""Gossip thread of a worker: exchanges with neighbours, and tree reductions over all workers.

Each end of an edge requests exchanges as a Poisson process in the common time of the job, at half
the rate of the edge. `consolidate` uses tree reductions, and so does the agreement on the unit of
time. The gossip thread performs the agreement by itself, so gradients do not wait for it.
"""

from __future__ import annotations

import random
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import networkx as nx
import torch
from torch import Tensor

from offbeat.core.buckets.checksum import checksum
from offbeat.core.buckets.flat import memory_of
from offbeat.frames.connection import NOTHING
from offbeat.frames.frames import Frame, Header, WireError, pack
from offbeat.gossip.agreement import Agreement, planned_rates
from offbeat.gossip.agreement_rounds import AgreementRounds
from offbeat.gossip.anchors import NEVER
from offbeat.gossip.chunks import CHUNK_BYTES, Wire
from offbeat.gossip.clock import Clock
from offbeat.gossip.exchange import Counts, ExchangeRecord, Exchanges
from offbeat.gossip.joining import Address, Place, assign_id
from offbeat.gossip.pairing import Action, Begin, Pairing, Requests
from offbeat.gossip.peers import Peers
from offbeat.gossip.protocol import SIGNALS, Kind, finite, ids_text
from offbeat.gossip.state import Mixing
from offbeat.gossip.state import State as Shared
from offbeat.gossip.tree_reduction import TreeReduction
from offbeat.gossip.tree_reductions import AWAY, USER, TreeReductions
from offbeat.gossip.view import Known, State, View

OnPartition = Literal["raise", "continue"]

DRAIN_S = 1.0  # longest time to send queued frames after a failure
NOTHING_ELSE = torch.empty(0, dtype=torch.uint8, device="cpu")
ANOTHER_MODEL = "the model is another one; build it from the same configuration"


@dataclass(frozen=True)
class Settings:
    """Settings of a gossip job, equal on all workers.

    Attributes:
        graph: initial graph.
        rate: planned exchanges per worker and unit of time.
        momentum: whether there is a second copy x~ (A2CiD2).
        silent_s: seconds after which an unreachable worker is removed.
        timeout_s: longest wait of the training thread in seconds.
        on_partition: action if the graph is partitioned.
        layout: digest of the model.
        strategy: strategy as text.
        seed: seed of the random requests.
    """

    graph: nx.Graph
    rate: float = 1.0
    momentum: bool = True
    silent_s: float = 10.0
    timeout_s: float = 120.0
    on_partition: OnPartition = "raise"
    layout: str = ""
    strategy: str = ""
    seed: int = 0


class Gossip:
    """Gossip of worker `me`, with its own thread.

    Args:
        me: id of this worker.
        settings: settings of the job.
        shared: parameters, shared with the training thread.
        wire: chunks of the parameters.
        clock: common clock.
        secret: secret of the job.
        addresses: addresses of the neighbours.
        door: socket on which this worker accepts connections.
        place: place in a running job, for a joining worker; otherwise None.
        luggage: callable that returns the initial state for a joining worker, mixed up to a label.
    """

    def __init__(
        self,
        me: int,
        settings: Settings,
        shared: Shared,
        wire: Wire,
        clock: Clock,
        secret: bytes,
        addresses: Mapping[int, Address],
        door: socket.socket,
        *,
        place: Place | None = None,
        luggage: Callable[[float], Tensor] = lambda _: NOTHING_ELSE,
    ):
        self.me, self._settings, self.clock, self._shared = me, settings, clock, shared
        edges = sorted((min(edge), max(edge)) for edge in settings.graph.edges)
        self.view, self.counts = View(me, edges), Counts()
        self._consolidates = False
        self._first_edges = edges
        self._listen_address, self._initial_state = door.getsockname(), luggage
        self._addresses = {**addresses, me: self._listen_address[:2]}
        self._joined = place is not None
        self._life = random.SystemRandom().getrandbits(48)  # random id of this process
        self._lives: dict[int, int] = {}  # random ids of the neighbours' processes
        # joining workers that have not connected yet, with the time of their place
        self._joining: dict[int, float] = {}
        self._postponed: list[Callable[[], None]] = []  # reductions that wait for joining workers
        self._pairing = Pairing(me, set())
        self._exchanges = Exchanges(shared, wire)
        around = sorted(place.near) if place else sorted(settings.graph.adj[me])
        near = {peer: addresses[peer] for peer in around}
        self._peers = Peers(me, secret, near, door, settings.silent_s, self, joins=self._joined)
        self._requests = Requests(me, {}, settings.seed)
        self._next: float | None = None  # label of the next request
        # accepted exchanges: label, number, whether coded
        self._accepted: dict[int, tuple[float, int, bool]] = {}
        # disconnected neighbours, with the time of disconnection
        self._down_s = dict.fromkeys(around, time.monotonic())
        self._never_came = set(around)
        self._reductions = TreeReductions(self.view, self._peers, place.held if place else None)
        self._agreements = AgreementRounds(
            place.agreed if place else Agreement(edges),
            settings.rate,
            settings.momentum,
            clock,
            shared,
            self.view,
            self.counts,
            self._reductions,
            self._redraw_request,
        )
        self._changed = threading.Condition()
        self._commands: deque[Callable[[], None]] = deque()
        self._notices: deque[str] = deque()
        self._error: Exception | None = None
        self._ended = False
        if place:
            self.view.merge(place.known)
            shared.course.changes = place.course
        else:
            self._update_rates()
            shared.change_mixing(0.0, self._agreements.constants)
        self._thread = threading.Thread(target=self._run, name=f"offbeat-gossip-{me}", daemon=True)
        self._thread.start()

    # ---- training thread --------------------------------------------------------------------

    def connect(self) -> None:
        """Wait until all neighbours have connected.

        A joining worker waits for at most `silent_s` seconds, because neighbours may have failed
        since it received its place. It continues if at least one neighbour has connected.

        Raises:
            RuntimeError: neighbours are missing after `timeout_s` seconds; the message names them.
        """
        late = self._never_came
        if self._joined:
            with self._changed:
                self._changed.wait_for(
                    lambda: not late or self._error is not None, self._settings.silent_s
                )
            self.check()
            if late and self._peers.reachable():
                self._warn(f"workers {ids_text(late)} do not answer; it begins without them")
                return
        self._wait(lambda: not late, lambda: f"workers {ids_text(late)} to connect")

    def record_gradient(self, seconds: float) -> None:
        """Update the mean gradient time with the duration of a gradient."""
        self.check()
        if self._agreements.record_gradient(seconds):
            self._peers.wake()

    def check(self) -> None:
        """Raise the error of the gossip thread, if it has failed."""
        if self._error is not None:
            raise self._error

    def take_notices(self) -> list[str]:
        """Return and remove all notices for the user."""
        words = []
        while self._notices:
            words.append(self._notices.popleft())
        return words

    def all_reduce(
        self, numbers: Sequence[Tensor], largest: float = 0.0
    ) -> tuple[list[Tensor], float, int]:
        """Return the sums of the numbers of all workers, the maximum of `largest`, and the number
        of workers.

        Waits until all workers have called it.
        """
        found: list[TreeReduction] = []
        brought = [*numbers, torch.ones(1, dtype=torch.float32, device="cpu")]
        self._submit(lambda: self._begin_reduction(brought, largest, found.append))
        self._wait(lambda: bool(found), lambda: f"all workers to meet: {self._describe_missing()}")
        *sums, workers = found[0].result
        return sums, found[0].largest, int(workers)

    def agree_on_means(self, means: Sequence[Tensor]) -> list[Tensor]:
        """Return means with equal bits on all workers. Waits until all workers have called it.

        `means` are the results of the last reduction. If the workers hold several different means,
        these are averaged again.

        Raises:
            RuntimeError: the others have compared their means without this worker.
        """
        while True:
            own = _checksum_words(checksum(*means))
            (sums_of_words,), _, workers = self.all_reduce([torch.cat([own, own * own])])
            words, squares = sums_of_words.view(2, -1)
            if bool((words * words != workers * squares).any()):
                sums, _, workers = self.all_reduce(means)
                means = [total / workers for total in sums]
            elif torch.equal(words, workers * own):
                return list(means)
            else:
                raise RuntimeError(AWAY)

    def _begin_reduction(
        self, brought: list[Tensor], largest: float, then: Callable[[TreeReduction], None]
    ) -> None:
        """Begin a reduction, after all joining workers have connected or have been given up."""
        # joining workers take part in all reductions after their place was assigned
        if self._joining:
            self._postponed.append(lambda: self._begin_reduction(brought, largest, then))
        else:
            self._reductions.begin(USER, brought, largest, then)

    @contextmanager
    def consolidation(self) -> Iterator[None]:
        """Let workers that want to join wait until the end of several reductions."""
        self._consolidates = True
        try:
            yield
        finally:
            self._consolidates = False

    def pause(self) -> None:
        """Begin no more exchanges and wait for the end of the current one."""
        self._submit(lambda: self._perform(self._pairing.pause(paused=True)))
        self._wait(
            lambda: self._pairing.paused and self._pairing.is_idle,
            lambda: f"the exchange with {self._pairing.partner} to end",
        )

    def pause_all(self, t: float) -> float:
        """Pause all workers and wait for them. Return the latest of their labels.

        Settles exchanges in doubt: an exchange is kept if the partner has completed it or has
        failed; otherwise it is reverted.
        """
        self.pause()
        whole = torch.zeros(len(self._first_edges), 2, dtype=torch.float64, device="cpu")
        for number, edge in enumerate(self._first_edges):
            if self.me in edge:  # 0 marks a failed worker, which cannot report its last exchange
                here = edge.index(self.me)
                whole[number, here] = 1 + self._exchanges.completed_number(edge[1 - here])
        (both,), latest, _ = self.all_reduce([whole.reshape(-1)], t)
        settled = threading.Event()
        self._submit(lambda: self._settle_exchanges(both.reshape(-1, 2).tolist(), settled))
        self._wait(settled.is_set, lambda: "its own gossip")
        return latest

    def _settle_exchanges(self, both: list[list[float]], settled: threading.Event) -> None:
        completed = dict(zip(self._first_edges, both, strict=True))
        for partner in self._exchanges.partners_in_doubt():
            edge = min(self.me, partner), max(self.me, partner)
            whole = int(completed.get(edge, (0, 0))[edge.index(partner)]) - 1
            self._exchanges.settle(partner, None if whole < 0 else whole)
        settled.set()

    def resume(self) -> None:
        """Continue to exchange."""
        if self._pairing.paused:
            self._submit(lambda: self._perform(self._pairing.pause(paused=False)))

    def close(self) -> None:
        """Leave the job and notify the neighbours."""
        if self._thread.is_alive():
            with self._changed:
                self._commands.append(self._send_goodbye)
            self._peers.wake()
            self._thread.join(self._settings.timeout_s)

    @property
    def bytes_sent(self) -> int:
        """Return the bytes sent to all neighbours."""
        return self._peers.bytes_sent

    def _submit(self, command: Callable[[], None]) -> None:
        """Queue a command for the gossip thread."""
        self.check()
        self._commands.append(command)
        self._peers.wake()

    def _wait(self, done: Callable[[], bool], what: Callable[[], str]) -> None:
        """Wait until `done` returns true. Raise RuntimeError after `timeout_s`, with the text of
        `what`.
        """
        timeout_s = self._settings.timeout_s
        with self._changed:
            self._changed.wait_for(lambda: done() or self._error is not None, timeout_s)
        self.check()
        if not done():
            raise RuntimeError(
                f"worker {self.me} waited {timeout_s:g} s for {what()}; see their logs, or raise "
                "timeout_s"
            )

    def _describe_missing(self) -> str:
        """Return text on the workers that have not sent their numbers, as far as known on this
        worker.
        """
        if self._postponed:
            return f"workers {ids_text(self._joining)}, which were given a place, have not come"
        behind = self._reductions.missing_workers(USER)
        if behind is None:
            return f"the graph is broken, {ids_text(self._down_s)} cannot be reached"
        return f"nothing from {ids_text(behind)}, or from workers behind"

    # ---- gossip thread ----------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._ended:
                self._peers.process_events(self._wait_s())
                while self._commands:
                    self._commands.popleft()()
                self._request_exchanges()
                self._give_up_edges()
                self._agreements.begin_if_due()
                self._reductions.send_postponed()
                with self._changed:
                    self._changed.notify_all()
        except Exception as error:
            self._error = error
            with suppress(Exception):  # queued frames may contain news for other workers
                self._peers.drain(DRAIN_S)
        finally:
            self._peers.close()
            with self._changed:
                self._changed.notify_all()

    def _wait_s(self) -> float:
        """Return the seconds until the thread has work without a new frame."""
        labels = [label for label in (self._next, self._agreements.due_at) if label is not None]
        waits: list[float | None] = [self.clock.seconds_until(label) for label in labels]
        silent_s, now = self._settings.silent_s, time.monotonic()
        since = [*self._disconnection_times().values(), *self._joining.values()]
        waits += [at + silent_s - now for at in since]
        waits.append(self._reductions.wait_s)
        return min([60.0, *(wait for wait in waits if wait is not None)])

    def _request_exchanges(self) -> None:
        """Request all exchanges that are due."""
        if self.clock.unit_s is None:
            return
        now = self.clock.now()
        if self._next is None:
            self._next = now + self._requests.wait()
        while self._next <= now:
            self._next += self._requests.wait()
            self._perform(self._pairing.request(self._requests.choose()))

    def _redraw_request(self) -> None:
        """Draw the time of the next request anew."""
        self._next = None

    def _send_goodbye(self) -> None:
        for peer in self._peers.reachable():
            self._peers.send(peer, Kind.BYE)
        self._peers.finish(self._settings.silent_s)
        self._ended = True

    # ---- exchanges --------------------------------------------------------------------------

    def _perform(self, acts: Sequence[Action]) -> None:
        """Perform actions of the pairing."""
        for act in acts:
            if isinstance(act, Begin):
                if act.accepted:
                    t, number, coded = self._accepted.pop(act.partner)
                    self._exchange(
                        act.partner, number, t, self._shared.course.mixing_at(t), coded=coded
                    )
                continue
            about: dict[str, Any] = {}
            if act.word is Kind.ASK:
                about["meta"] = {
                    "t": self.clock.now(),
                    "anchored": self._exchanges.anchor_number(act.to),
                }
            elif act.word is Kind.YES:
                t, about["clock"], coded = self._accepted[act.to]
                mixing = self._shared.course.mixing_at(t)
                alphas = {"alpha": mixing.alpha, "alpha_tilde": mixing.alpha_tilde}
                about["meta"] = {"t": t, "coded": coded, **alphas}
            self._peers.send(act.to, act.word, **about)

    def _on_signal(self, peer: int, frame: Frame[Kind]) -> None:
        """Process a request of an exchange, or an answer to one."""
        word, meta = frame.header.kind, frame.meta
        if word is Kind.ASK:
            t = max(finite(meta.get("t")), self.clock.now())
            coded = meta.get("anchored") == self._exchanges.anchor_number(peer) != NEVER
            self._accepted[peer] = t, self._exchanges.next_number(peer), coded
        try:
            acts = self._pairing.receive(peer, word)
        except ValueError as error:
            raise WireError(str(error)) from None
        self._perform(acts)
        if word is Kind.YES:
            alphas = [finite(meta.get(name)) for name in ("alpha", "alpha_tilde")]
            # eta is common to all workers, so only the factors are sent
            mixing = Mixing(0.0, *alphas)
            coded = meta.get("coded") is True
            if coded and self._exchanges.anchor_number(peer) == NEVER:
                raise WireError("an exchange of codes needs anchors")
            self._exchange(peer, frame.header.clock, finite(meta.get("t")), mixing, coded=coded)

    def _exchange(
        self, partner: int, number: int, t: float, mixing: Mixing, *, coded: bool
    ) -> None:
        exchanges = self._exchanges
        one = exchanges.begin(partner, number, t, mixing, coded=coded)
        one.began_s = time.perf_counter()
        for chunk in range(len(exchanges.wire.chunks)):
            self._peers.send_later(
                partner,
                Kind.CHUNK,
                exchanges.data(chunk),
                partial(exchanges.note_sent, one, chunk),
                shard=chunk,
                clock=number,
            )

    def _on_chunk(self, peer: int, frame: Frame[Kind]) -> None:
        if self._exchanges.apply_chunk():
            assert self._exchanges.now is not None
            self._peers.send(peer, Kind.WHOLE, clock=self._exchanges.now.number)
            self._end_exchange()

    def _on_whole(self, peer: int, frame: Frame[Kind]) -> None:
        one = self._exchanges.now
        if one is None or one.partner != peer or one.number != frame.header.clock:
            raise WireError("WHOLE is not expected now")
        one.confirmed = True
        self._end_exchange()

    def _end_exchange(self) -> None:
        """End the current exchange if it is complete."""
        one = self._exchanges.now
        size = self._exchanges.bytes if one else 0
        if one is None or not self._exchanges.end_if_complete():
            return
        ended_s = time.perf_counter()
        self.counts.add(ExchangeRecord(one.partner, one.number, one.began_s, ended_s, size))
        self._perform(self._pairing.end_exchange())

    # ---- neighbours -------------------------------------------------------------------------

    def hello(self, peer: int) -> dict[str, Any]:
        """Return the metadata of the HELLO to a neighbour."""
        return {
            "layout": self._settings.layout,
            "life": self._life,
            "door": self._listen_address[:2],
            "whole": self._exchanges.completed_number(peer),
            "known": self.view.changed_edges(),
            "held": self._reductions.held[USER],
        }

    def on_connect(self, peer: int, hello: dict[str, Any]) -> None:
        """Process the HELLO of a neighbour that has connected. Raise WireError if it is invalid."""
        if hello.get("layout") != self._settings.layout:
            raise WireError(ANOTHER_MODEL)
        try:
            (host, port), life = hello["door"], int(hello["life"])
            self._addresses[peer] = str(host), int(port)
        except (KeyError, TypeError, ValueError):
            raise WireError("HELLO must say where its door is, and who it is") from None
        self._peers.expect(peer, self._addresses[peer])
        before_life, self._lives[peer] = self._lives.get(peer), life
        if before_life != life:
            self._exchanges.forget_partner(peer)
        self._joining.pop(peer, None)
        self._down_s.pop(peer, None)
        expected = peer in self._never_came
        self._never_came.discard(peer)
        # Changes since the HELLO of this worker were sent only to neighbours connected at that
        # time.
        self._peers.send(peer, Kind.VIEW, meta=self._view_of(self.view.changed_edges()))
        self._exchanges.settle(peer, int(finite(hello.get("whole"))))
        before, gone = self.view.edges(), self.view.state(peer) > State.DOWN
        self._merge_view(hello)
        self._reductions.on_count(hello.get("held"))
        # The peer may have published the edge already, and its neighbours may have sent it to this
        # worker.
        self._publish_edges(
            self.view.set_edge(peer, State.UP, self.clock.now(), again=self._joined or not expected)
        )
        if gone and not expected:
            same = "can be reached again" if life == before_life else "has joined"
            self._warn(f"worker {peer} {same}")
        if self.view.edges() != before:
            self._update_rates()
        self._pairing.add_neighbour(peer)

    def on_disconnect(self, peer: int, why: str) -> None:
        """Process the disconnection of a neighbour."""
        self._accepted.pop(peer, None)
        self.counts.broken += self._exchanges.abort(peer)
        self._down_s[peer] = time.monotonic()
        self._perform(self._pairing.remove_neighbour(peer))
        if self.view.state(peer) is State.UP:
            self._publish_edges(self.view.set_edge(peer, State.DOWN, self.clock.now()))

    def body_buffer(self, peer: int, header: Header[Kind]) -> tuple[Any, memoryview]:
        """Return an object and its memory for the body of a frame. Raise WireError if the frame is
        not expected.
        """
        if header.kind is Kind.CHUNK:
            one = self._exchanges.now
            expected = one and (one.partner, one.number, one.arrived)
            if one is None or expected != (peer, header.clock, header.shard):
                raise WireError(f"chunk {header.shard} is not expected now")
            return None, self._exchanges.buffer(header.shard)
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
            self._on_signal(peer, frame)
        elif kind is Kind.CHUNK:
            self._on_chunk(peer, frame)
        elif kind is Kind.WHOLE:
            self._on_whole(peer, frame)
        elif kind in (Kind.UP, Kind.DOWN):
            if self._reductions.take_missed_result(frame):
                self._agreements.begin()  # its numbers are not used any more, but the result is
            self._reductions.on_frame(peer, frame)
        elif kind is Kind.VIEW:
            self._on_view(peer, frame.meta)
        elif kind is Kind.BYE:
            self._peers.stop_reconnecting(peer)
            self._exchanges.release_anchors(peer)
            self._publish_edges(self.view.set_edge(peer, State.LEFT, self.clock.now()))
            self._update_rates()
            raise ConnectionResetError("it has left")  # the peer waits for the disconnection
        elif kind is not Kind.BEAT:
            raise WireError(f"{kind.name} is not expected now")

    # ---- membership -------------------------------------------------------------------------

    def _view_of(self, known: Sequence[Known]) -> dict[str, Any]:
        return {"known": list(known), "held": self._reductions.held[USER]}

    def _on_view(self, peer: int, meta: dict[str, Any]) -> None:
        """Process edges and the count of reductions of a neighbour."""
        before = self.view.edges()
        self._merge_view(meta)
        self._reductions.on_count(meta.get("held"))
        if self.view.edges() != before:
            self._update_rates()

    def _merge_view(self, meta: dict[str, Any]) -> None:
        """Merge received edges into the view and publish the new ones."""
        try:
            new = self.view.merge(meta.get("known", []))
        except (ValueError, TypeError) as error:
            raise WireError(str(error)) from None
        for peer in self.view.neighbours_of(self.me) if new else ():
            self._peers.expect(peer)
            broken = peer in self._down_s and peer not in self._never_came
            if broken and self.view.state(peer) is State.UP:
                # An outdated UP must not hide a local disconnection, because no worker would give
                # the edge up.
                new += self.view.set_edge(peer, State.DOWN, self.clock.now())
        self._publish_edges(new)

    def _publish_edges(self, new: Sequence[Known]) -> None:
        """Send changed edges to the neighbours and restart reductions."""
        if not new:
            return
        for peer in self._peers.reachable():
            self._peers.send(peer, Kind.VIEW, meta=self._view_of(new))
        self._reductions.restart()

    def _give_up_edges(self) -> None:
        """Remove edges that have been disconnected for more than `silent_s` seconds.

        Joining workers that have not connected within this time are given up as well. Postponed
        reductions begin once no joining worker is expected.
        """
        now, silent_s = time.monotonic(), self._settings.silent_s
        late = [peer for peer, at in self._disconnection_times().items() if now - at > silent_s]
        for worker, at in list(self._joining.items()):
            if now - at > silent_s:
                del self._joining[worker]
                self._warn(f"worker {worker} was given a place, but has not come")
        while self._postponed and not self._joining:
            self._postponed.pop(0)()
        for peer in late:
            self._warn(
                f"worker {peer} could not be reached for {self._settings.silent_s:g} s; the "
                "others go on without it"
            )
            self._exchanges.release_anchors(peer)
            self._publish_edges(self.view.set_edge(peer, State.GONE, self.clock.now()))
        if late:
            self._update_rates()

    def _disconnection_times(self) -> dict[int, float]:
        """Return the disconnected neighbours that may return, with the time of disconnection."""
        down = self._down_s.items()
        return {peer: at for peer, at in down if self.view.state(peer) is State.DOWN}

    def _update_rates(self) -> None:
        """Update the exchange rates of this worker's edges after a change of the graph.

        The constants change only by agreement.
        """
        self._require_one_part()
        rates = planned_rates(self.view.edges(), self._settings.rate).items()
        self._requests.rates = {sum(e) - self.me: rate for e, rate in rates if self.me in e}
        self._next = None

    def _require_one_part(self) -> None:
        """Raise RuntimeError if the graph is partitioned, with three exceptions.

        No error is raised if workers have left, if the members of all other parts have probably
        failed, or if `on_partition="continue"` and this worker is in the largest part.
        """
        parts = self.view.parts()
        if len(parts) == 1:
            return
        words = " and ".join(f"({ids_text(part)})" for part in parts)
        own_part = next(part for part in parts if self.me in part)
        fatal = self._settings.on_partition == "raise" or own_part != parts[0]
        if fatal and not self.view.has_leavers() and not self.view.is_surviving_majority(own_part):
            raise RuntimeError(
                f"the graph of gossip falls apart: {words} do not reach each other any more "
                f"(not heard of: {ids_text(self.view.dead_workers()) or 'nobody'}); use a "
                "topology with more edges, or on_partition='continue' to go on with the larger part"
            )
        around = self.view.neighbours_of(self.me)
        is_done = all(self.view.state(peer) is State.LEFT for peer in around)
        if not is_done and self.view.has_lost_connection():
            self._warn(f"the graph of gossip is in parts: {words}; ({ids_text(own_part)}) go on")
        self._publish_edges(self.view.cut_off(own_part))

    def _warn(self, words: str) -> None:
        self._notices.append(f"worker {self.me}: {words}")

    # ---- joining workers --------------------------------------------------------------------

    def answer_stranger(self, frame: Frame[Kind]) -> tuple[bytes, memoryview | None]:
        """Return the answer to a worker that is not a neighbour. Raise WireError to refuse it."""
        if frame.header.kind is Kind.TIME:
            return pack(Kind.TIME, self.me, meta={"now_s": self.clock.common_s()}), None
        meets = self._pairing.paused or self._postponed or self._consolidates
        if meets or self.clock.unit_s is None:
            return pack(Kind.LATER, self.me), None
        return self._accept_joining_worker(frame.meta)

    def _accept_joining_worker(self, request: dict[str, Any]) -> tuple[bytes, memoryview]:
        """Return the WELCOME frame for a joining worker, and publish its edges.

        Raises:
            WireError: model or strategy differ, or the requested id is not available.
        """
        if request.get("layout") != self._settings.layout:
            raise WireError(ANOTHER_MODEL)
        if request.get("strategy") != self._settings.strategy:
            raise WireError(
                f"its strategy ({request.get('strategy')}) must be {self._settings.strategy}"
            )
        worker, around = assign_id(
            self.me,
            request.get("id"),
            self.view,
            self._first_edges,
            set(self._addresses),
            self._peers.reachable(),
        )
        self._publish_edges(self.view.add_worker(worker, around))
        if self.me in around:
            self._peers.expect(worker)
            self._joining[worker] = time.monotonic()
        body = self._initial_state(self.clock.now())
        place = Place(
            worker,
            self._first_edges,
            self.view.changed_edges(),
            {peer: self._addresses[peer] for peer in around},
            self._shared.course.changes,
            self.clock.line,
            self._agreements.agreed,
            self._reductions.held,
        )
        head = pack(Kind.WELCOME, self.me, meta=place.pack(), body_bytes=len(body))
        return head, memory_of(body)


def _checksum_words(checksum: int) -> Tensor:
    """Return the checksum as four numbers below 2^16. Sums of their squares over a thousand workers
    are exact.
    """
    words = [checksum >> shift & 0xFFFF for shift in (0, 16, 32, 48)]
    return torch.tensor(words, dtype=torch.float64, device="cpu")
