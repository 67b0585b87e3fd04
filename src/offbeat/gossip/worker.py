"""Gossip: a worker's background thread, which exchanges with neighbours and meets all workers.

Exchanges are wished for as a Poisson process in the job's common time, half of an edge's rate at
each of its ends. Meetings are sums over all workers: `consolidate` needs them, and the agreement
on the unit of time, which this thread holds by itself so that no gradient waits for it.
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
from typing import Any, Literal

import networkx as nx
import torch
from torch import Tensor

from offbeat.core.buckets.checksum import checksum
from offbeat.core.buckets.flat import memory_of
from offbeat.frames.frames import Frame, Header, WireError, pack
from offbeat.gossip.agreement import Agreement, planned
from offbeat.gossip.anchors import NEVER
from offbeat.gossip.chunks import CHUNK_BYTES, Wire
from offbeat.gossip.clock import DRIFT, Clock
from offbeat.gossip.counts import Counts, Exchanged
from offbeat.gossip.exchange import Exchanges
from offbeat.gossip.joining import Address, Place
from offbeat.gossip.pairing import Act, Begin, Pairing, Word
from offbeat.gossip.peers import NOTHING, Listener, Peers
from offbeat.gossip.protocol import KINDS, WORDS, Kind, agreed, finite
from offbeat.gossip.state import Mixing
from offbeat.gossip.state import State as Shared
from offbeat.gossip.tree_reduction import Meeting
from offbeat.gossip.tree_reductions import OWN, USER, Meetings
from offbeat.gossip.view import Known, State, View

OnPartition = Literal["raise", "continue"]

GRADIENTS = 4  # of a worker, before its gradient time is believed
NOTICE, NOTICE_S = 2.0, 1.0  # units, seconds: constants change so long after their reason
DRAIN_S = 1.0  # of a thread that has failed
NOTHING_ELSE = torch.empty(0, dtype=torch.uint8, device="cpu")
ANOTHER_MODEL = "the model is another one; build it from the same configuration"


@dataclass(frozen=True)
class Settings:
    """What a job of gossip is: its graph and rate, what travels, who is given up when."""

    graph: nx.Graph
    rate: float = 1.0
    momentum: bool = True
    silent_s: float = 10.0
    timeout_s: float = 120.0
    on_partition: OnPartition = "raise"
    layout: str = ""  # digest of the model
    strategy: str = ""  # in words
    seed: int = 0


class Gossip(Listener):
    """Worker `me` of the graph. Its neighbours are at these addresses, it is at `door`.

    With a `place` it comes to a job that runs. `luggage` is what it gives to others that do so:
    all that they need to begin, mixed up to a label.
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
        self._first, self._agreed = edges, place.agreed if place else Agreement(edges)
        self._door, self._luggage = door.getsockname(), luggage
        self._addresses = {**addresses, me: self._door[:2]}
        self._joined = place is not None
        self._life = random.SystemRandom().getrandbits(48)  # of this process
        self._lives: dict[int, int] = {}  # of the neighbours'
        self._guests: dict[int, float] = {}  # who has been given a place, and when
        self._later: list[Callable[[], None]] = []  # meetings that wait for them
        self._pairing = Pairing(me, set())
        self._exchanges = Exchanges(shared, wire)
        around = sorted(place.near) if place else sorted(settings.graph.adj[me])
        near = {peer: addresses[peer] for peer in around}
        self._peers = Peers(me, secret, near, door, settings.silent_s, self, joins=self._joined)
        self._random = random.Random(f"{settings.seed} {me}")
        self._rates: dict[int, float] = {}  # exchanges per unit on the edge to a neighbour
        self._next: float | None = None  # label of the next wish
        self._accepted: dict[int, tuple[float, int, bool]] = {}  # label, number, whether coded
        self._down_s = dict.fromkeys(around, time.monotonic())  # since when they are not there
        self._never_came = set(around)
        self._meetings = Meetings(self.view, self._peers, place.held if place else None)
        self._gradient_s, self._gradients = 0.0, 0
        self._counted = (0, 0)  # own exchanges where counting began, and at the last pulse
        self._changed = threading.Condition()
        self._commands: deque[Callable[[], None]] = deque()
        self._said: deque[str] = deque()
        self._error: Exception | None = None
        self._ended = False
        if place:
            self.view.merge(place.known)
            shared.follow(place.course)
        else:
            self._choose()
            shared.tune(0.0, self._constants())
        self._thread = threading.Thread(target=self._run, name=f"offbeat-gossip-{me}", daemon=True)
        self._thread.start()

    # ---- what the worker calls --------------------------------------------------------------

    def connect(self) -> None:
        """Wait until all neighbours have come. RuntimeError naming those that have not. Who joins a
        job begins without those that may have died since it was given its place."""
        late = self._never_came
        if self._joined:
            with self._changed:
                self._changed.wait_for(
                    lambda: not late or self._error is not None, self._settings.silent_s
                )
            self.check()
            if late and self._peers.present():
                self._say(f"workers {_listed(late)} do not answer; it begins without them")
                return
        self._wait(lambda: not late, lambda: f"workers {_listed(late)} to connect")

    def gradient(self, seconds: float) -> None:
        """A gradient has taken so long."""
        self.check()
        self._gradients += 1
        weight = max(1 / self._gradients, 0.1)
        self._gradient_s += weight * (seconds - self._gradient_s)
        if self._gradients == GRADIENTS:
            self._peers.wake()

    def check(self) -> None:
        """RuntimeError if gossip has failed."""
        if self._error is not None:
            raise self._error

    def said(self) -> list[str]:
        """What the user should know, since the last call."""
        words = []
        while self._said:
            words.append(self._said.popleft())
        return words

    def meet(
        self, numbers: Sequence[Tensor], largest: float = 0.0
    ) -> tuple[list[Tensor], float, int]:
        """Wait for all workers: the sums of their numbers, the largest, and how many they are."""
        found: list[Meeting] = []
        brought = [*numbers, torch.ones(1, dtype=torch.float32, device="cpu")]
        self._do(lambda: self._begin_meeting(brought, largest, found.append))
        self._wait(lambda: bool(found), lambda: f"all workers to meet: {self._missing()}")
        *sums, workers = found[0].result
        return sums, found[0].largest, int(workers)

    def alike(self, means: Sequence[Tensor]) -> list[Tensor]:
        """Wait for all workers: these means, which each has from the last meeting, with the same
        bits at all of them. Who has other ones than the others takes theirs; if those that are
        there have several, the mean is taken once more."""
        while True:
            number, mine = self._meetings.held[USER] - 1, _words(checksum(*means))
            (said,), _, workers = self.meet([torch.cat([mine, mine * mine])])
            words, squares = said.view(2, -1)
            if bool((words * words != workers * squares).any()):
                sums, _, workers = self.meet(means)
                means = [total / workers for total in sums]
            elif torch.equal(words, workers * mine):
                return list(means)
            else:
                return self._again(number, means, words / workers)

    def _again(self, number: int, means: Sequence[Tensor], words: Tensor) -> list[Tensor]:
        """The means of a meeting, of which these are the words of the checksum."""
        found: list[list[Tensor]] = []

        def take(meeting: Meeting) -> bool:
            *sums, workers = meeting.result
            theirs = [total / int(workers) for total in sums]
            same = torch.equal(_words(checksum(*theirs)), words)
            found.extend([theirs] if same else [])
            return same

        like = [*means, torch.ones(1, dtype=torch.float32, device="cpu")]
        self._do(lambda: self._meetings.again(number, like, take))
        self._wait(lambda: bool(found), lambda: "the others' result of a meeting")
        return found[0]

    def _begin_meeting(
        self, brought: list[Tensor], largest: float, then: Callable[[Meeting], None]
    ) -> None:
        if self._guests:  # they bring theirs too, from the first one after their place on
            self._later.append(lambda: self._begin_meeting(brought, largest, then))
        else:
            self._meetings.begin(USER, brought, largest, then)

    @contextmanager
    def together(self) -> Iterator[None]:
        """A series of meetings that every worker holds whole: who was out of reach in between has
        the results, and who was never there is not waited for before the next series."""
        self._do(lambda: self._meetings.together(begin=True))
        try:
            yield
        finally:
            self._commands.append(lambda: self._meetings.together(begin=False))
            self._peers.wake()

    def pause(self) -> None:
        """Exchange no more; returns when none is under way."""
        self._do(lambda: self._act(self._pairing.pause(paused=True)))
        self._wait(
            lambda: self._pairing.paused and self._pairing.resting,
            lambda: f"the exchange with {self._pairing.partner} to end",
        )

    def rest(self, t: float) -> float:
        """Pause with all workers, and wait for them: the latest of their times. What is in doubt
        is kept if the partner has it too, or is dead; else it is taken back."""
        self.pause()
        whole = torch.zeros(len(self._first), 2, dtype=torch.float64, device="cpu")
        for number, edge in enumerate(self._first):
            if self.me in edge:  # 0: there is nobody who could say
                here = edge.index(self.me)
                whole[number, here] = 1 + self._exchanges.whole(edge[1 - here])
        (both,), latest, _ = self.meet([whole.reshape(-1)], t)
        settled = threading.Event()
        self._do(lambda: self._settle(both.reshape(-1, 2).tolist(), settled))
        self._wait(settled.is_set, lambda: "its own gossip")
        return latest

    def _settle(self, both: list[list[float]], settled: threading.Event) -> None:
        said = dict(zip(self._first, both, strict=True))
        for partner in self._exchanges.doubtful():
            edge = min(self.me, partner), max(self.me, partner)
            whole = int(said.get(edge, (0, 0))[edge.index(partner)]) - 1
            self._exchanges.settle(partner, None if whole < 0 else whole)
        settled.set()

    def resume(self) -> None:
        """Exchange again."""
        if self._pairing.paused:
            self._do(lambda: self._act(self._pairing.pause(paused=False)))

    def close(self) -> None:
        """Say goodbye to the neighbours."""
        if self._thread.is_alive():
            with self._changed:
                self._commands.append(self._leave)
            self._peers.wake()
            self._thread.join(self._settings.timeout_s)

    @property
    def bytes_sent(self) -> int:
        """To all neighbours."""
        return self._peers.bytes_sent

    def _do(self, command: Callable[[], None]) -> None:
        self.check()
        self._commands.append(command)
        self._peers.wake()

    def _wait(self, done: Callable[[], bool], what: Callable[[], str]) -> None:
        timeout_s = self._settings.timeout_s
        with self._changed:
            self._changed.wait_for(lambda: done() or self._error is not None, timeout_s)
        self.check()
        if not done():
            raise RuntimeError(
                f"worker {self.me} waited {timeout_s:g} s for {what()}; see their logs, or raise "
                "timeout_s"
            )

    def _missing(self) -> str:
        """Who has not brought numbers, as far as this worker can see."""
        if self._later:
            return f"workers {_listed(self._guests)}, which were given a place, have not come"
        behind = self._meetings.missing(USER)
        if behind is None:
            return f"the graph is broken, {_listed(self._down_s)} cannot be reached"
        return f"nothing from {_listed(behind)}, or from workers behind"

    # ---- the thread -------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._ended:
                self._peers.turn(self._wait_s())
                while self._commands:
                    self._commands.popleft()()
                self._wish()
                self._give_up()
                self._pulse()
                self._meetings.turn()
                with self._changed:
                    self._changed.notify_all()
        except Exception as error:
            self._error = error
            with suppress(Exception):  # what others should know
                self._peers.drain(DRAIN_S)
        finally:
            self._peers.close()
            with self._changed:
                self._changed.notify_all()

    def _wait_s(self) -> float:
        """Until this thread has something to do by itself."""
        pulse_at = None if self._meetings.under_way(OWN) else self._agreed.again_at
        labels = [label for label in (self._next, pulse_at) if label is not None]
        waits: list[float | None] = [self.clock.seconds_until(label) for label in labels]
        silent_s, now = self._settings.silent_s, time.monotonic()
        since = [*self._breaks().values(), *self._guests.values()]
        waits += [at + silent_s - now for at in since]
        waits.append(self._meetings.wait_s)
        return min([60.0, *(wait for wait in waits if wait is not None)])

    def _wish(self) -> None:
        total = sum(self._rates.values()) / 2
        if self.clock.unit_s is None or total == 0:
            self._next = None
            return
        now = self.clock.now()
        if self._next is None:
            self._next = now + self._random.expovariate(total)
        while self._next <= now:
            self._next += self._random.expovariate(total)
            peers, rates = zip(*self._rates.items(), strict=True)
            self._act(self._pairing.wish(self._random.choices(peers, rates)[0]))

    def _leave(self) -> None:
        for peer in self._peers.present():
            self._peers.send(peer, Kind.BYE)
        self._peers.finish(self._settings.silent_s)
        self._ended = True

    # ---- exchanges --------------------------------------------------------------------------

    def _act(self, acts: Sequence[Act]) -> None:
        for act in acts:
            if isinstance(act, Begin):
                if act.accepted:
                    t, number, coded = self._accepted.pop(act.partner)
                    self._begin(act.partner, number, t, self._shared.mixing_at(t), coded=coded)
                continue
            about: dict[str, Any] = {}
            if act.word is Word.ASK:
                about["meta"] = {
                    "t": self.clock.now(),
                    "anchored": self._exchanges.anchored(act.to),
                }
            elif act.word is Word.YES:
                t, about["clock"], coded = self._accepted[act.to]
                mixing = self._shared.mixing_at(t)
                alphas = {"alpha": mixing.alpha, "alpha_tilde": mixing.alpha_tilde}
                about["meta"] = {"t": t, "coded": coded, **alphas}
            self._peers.send(act.to, KINDS[act.word], **about)

    def _word(self, peer: int, frame: Frame[Kind]) -> None:
        word, meta = WORDS[frame.header.kind], frame.meta
        if word is Word.ASK:
            t = max(finite(meta.get("t")), self.clock.now())
            coded = meta.get("anchored") == self._exchanges.anchored(peer) != NEVER
            self._accepted[peer] = t, self._exchanges.next_number(peer), coded
        try:
            acts = self._pairing.hear(peer, word)
        except ValueError as error:
            raise WireError(str(error)) from None
        self._act(acts)
        if word is Word.YES:
            alphas = [finite(meta.get(name)) for name in ("alpha", "alpha_tilde")]
            mixing = Mixing(0.0, *alphas)  # eta is everybody's, by labels
            coded = meta.get("coded") is True
            if coded and self._exchanges.anchored(peer) == NEVER:
                raise WireError("an exchange of codes needs anchors")
            self._begin(peer, frame.header.clock, finite(meta.get("t")), mixing, coded=coded)

    def _begin(self, partner: int, number: int, t: float, mixing: Mixing, *, coded: bool) -> None:
        exchanges = self._exchanges
        exchanges.begin(partner, number, t, mixing, coded=coded).began_s = time.perf_counter()
        for chunk in range(len(exchanges.wire.chunks)):
            self._peers.send(partner, Kind.CHUNK, exchanges.sent(chunk), shard=chunk, clock=number)

    def _chunk(self, peer: int, frame: Frame[Kind]) -> None:
        if self._exchanges.arrived():
            assert self._exchanges.now is not None
            self._peers.send(peer, Kind.WHOLE, clock=self._exchanges.now.number)
            self._end()

    def _whole(self, peer: int, frame: Frame[Kind]) -> None:
        one = self._exchanges.now
        if one is None or one.partner != peer or one.number != frame.header.clock:
            raise WireError("WHOLE is not expected now")
        one.confirmed = True
        self._end()

    def _end(self) -> None:
        one = self._exchanges.now
        size = self._exchanges.bytes if one else 0
        if one is None or not self._exchanges.over():
            return
        ended_s = time.perf_counter()
        self.counts.add(Exchanged(one.partner, one.number, one.began_s, ended_s, size))
        self._act(self._pairing.done())

    # ---- neighbours -------------------------------------------------------------------------

    def hello(self, peer: int) -> dict[str, Any]:
        return {
            "layout": self._settings.layout,
            "life": self._life,
            "door": self._door[:2],
            "whole": self._exchanges.whole(peer),
            "known": self.view.known(),
            "held": self._meetings.told,
        }

    def came(self, peer: int, said: dict[str, Any]) -> None:
        if said.get("layout") != self._settings.layout:
            raise WireError(ANOTHER_MODEL)
        try:
            (host, port), life = said["door"], int(said["life"])
            self._addresses[peer] = str(host), int(port)
        except (KeyError, TypeError, ValueError):
            raise WireError("HELLO must say where its door is, and who it is") from None
        self._peers.expect(peer, self._addresses[peer])
        before_life, self._lives[peer] = self._lives.get(peer), life
        if before_life != life:
            self._exchanges.forget(peer)
        self._guests.pop(peer, None)
        self._down_s.pop(peer, None)
        expected = peer in self._never_came
        self._never_came.discard(peer)
        # What has changed since this worker's hello was told to those who were there.
        self._peers.send(peer, Kind.VIEW, meta=self._view_of(self.view.known()))
        self._exchanges.settle(peer, int(finite(said.get("whole"))))
        before, gone = self.view.edges(), self.view.state(peer) > State.DOWN
        self._merge(said)
        self._meetings.learn(peer, said.get("held"))
        # The partner may have told others already, and they this worker, before it could send.
        self._tell(
            self.view.change(peer, State.UP, self.clock.now(), again=self._joined or not expected)
        )
        if gone and not expected:
            same = "can be reached again" if life == before_life else "has joined"
            self._say(f"worker {peer} {same}")
        if self.view.edges() != before:
            self._choose()
        self._pairing.join(peer)

    def went(self, peer: int, why: str) -> None:
        self._accepted.pop(peer, None)
        self.counts.broken += self._exchanges.broke(peer)
        self._down_s[peer] = time.monotonic()
        self._act(self._pairing.leave(peer))
        if self.view.state(peer) is State.UP:
            self._tell(self.view.change(peer, State.DOWN, self.clock.now()))

    def room(self, peer: int, header: Header[Kind]) -> tuple[Any, memoryview]:
        if header.kind is Kind.CHUNK:
            one = self._exchanges.now
            expected = one and (one.partner, one.number, one.arrived)
            if one is None or expected != (peer, header.clock, header.shard):
                raise WireError(f"chunk {header.shard} is not expected now")
            return None, self._exchanges.room(header.shard)
        if header.kind in (Kind.UP, Kind.DOWN):
            if header.body_bytes > CHUNK_BYTES:
                raise WireError(f"body ({header.body_bytes} bytes) is too large")
            body = torch.empty(header.body_bytes, dtype=torch.uint8, device="cpu")
            return body, memory_of(body)
        return None, NOTHING

    def heard(self, peer: int, frame: Frame[Kind]) -> None:
        kind = frame.header.kind
        if kind in WORDS:
            self._word(peer, frame)
        elif kind is Kind.CHUNK:
            self._chunk(peer, frame)
        elif kind is Kind.WHOLE:
            self._whole(peer, frame)
        elif kind in (Kind.UP, Kind.DOWN):
            if self._meetings.missed(frame):
                self._bring()  # it does not count any more, but the result does
            self._meetings.hear(peer, frame)
        elif kind is Kind.VIEW:
            self._learn(peer, frame.meta)
        elif kind is Kind.MISSED:
            self._meetings.answer(peer, frame)
        elif kind is Kind.FORGOTTEN:
            self._meetings.forgotten(frame)
        elif kind is Kind.BYE:
            self._peers.forget(peer)
            self._exchanges.release(peer)
            self._tell(self.view.change(peer, State.LEFT, self.clock.now()))
            self._choose()
            raise ConnectionResetError("it has left")  # which it waits for
        elif kind is not Kind.BEAT:
            raise WireError(f"{kind.name} is not expected now")

    # ---- who is there -----------------------------------------------------------------------

    def _view_of(self, known: Sequence[Known]) -> dict[str, Any]:
        return {"known": list(known), "held": self._meetings.told}

    def _learn(self, peer: int, said: dict[str, Any]) -> None:
        """A neighbour has told what it knows of edges and meetings."""
        before = self.view.edges()
        self._merge(said)
        self._meetings.learn(peer, said.get("held"))
        if self.view.edges() != before:
            self._choose()

    def _merge(self, said: dict[str, Any]) -> None:
        try:
            new = self.view.merge(said.get("known", []))
        except (ValueError, TypeError) as error:
            raise WireError(str(error)) from None
        for peer in self.view.around(self.me) if new else ():
            self._peers.expect(peer)
            broken = peer in self._down_s and peer not in self._never_came
            if broken and self.view.state(peer) is State.UP:
                # Old news must not hide that it is broken here: nobody would give it up.
                new += self.view.change(peer, State.DOWN, self.clock.now())
        self._tell(new)

    def _tell(self, new: Sequence[Known]) -> None:
        """Neighbours shall know; meetings begin anew."""
        if not new:
            return
        for peer in self._peers.present():
            self._peers.send(peer, Kind.VIEW, meta=self._view_of(new))
        self._meetings.begin_anew()

    def _give_up(self) -> None:
        """Edges that have been broken for too long are gone."""
        now, silent_s = time.monotonic(), self._settings.silent_s
        late = [peer for peer, at in self._breaks().items() if now - at > silent_s]
        for guest, at in list(self._guests.items()):
            if now - at > silent_s:
                del self._guests[guest]
                self._say(f"worker {guest} was given a place, but has not come")
        while self._later and not self._guests:
            self._later.pop(0)()
        for peer in late:
            self._say(
                f"worker {peer} could not be reached for {self._settings.silent_s:g} s; the "
                "others go on without it"
            )
            self._exchanges.release(peer)
            self._tell(self.view.change(peer, State.GONE, self.clock.now()))
        if late:
            self._choose()

    def _breaks(self) -> dict[int, float]:
        """Since when neighbours are not there that may come back."""
        down = self._down_s.items()
        return {peer: at for peer, at in down if self.view.state(peer) is State.DOWN}

    def _choose(self) -> None:
        """The graph has changed: whom this worker wishes for. The constants are agreed on."""
        self._require_one_part()
        rates = planned(self.view.edges(), self._settings.rate).items()
        self._rates = {sum(edge) - self.me: rate for edge, rate in rates if self.me in edge}
        self._next = None

    def _constants(self) -> Mixing:
        settings = self._settings
        return self._agreed.constants(settings.rate, momentum=settings.momentum)

    def _require_one_part(self) -> None:
        """The graph hangs together; or the others are as good as dead; or the larger part goes on,
        if that is wanted."""
        parts = self.view.parts()
        if len(parts) == 1:
            return
        words = " and ".join(f"({_listed(part)})" for part in parts)
        mine = next(part for part in parts if self.me in part)
        fatal = self._settings.on_partition == "raise" or mine != parts[0]
        if fatal and not self.view.left() and not self.view.alone(mine):
            raise RuntimeError(
                f"the graph of gossip falls apart: {words} do not reach each other any more "
                f"(not heard of: {_listed(self.view.dead()) or 'nobody'}); use a topology with "
                "more edges, or on_partition='continue' to go on with the larger part"
            )
        around = self.view.around(self.me)
        is_done = all(self.view.state(peer) is State.LEFT for peer in around)
        if not is_done and self.view.has_lost_connection():
            self._say(f"the graph of gossip is in parts: {words}; ({_listed(mine)}) go on")
        self._tell(self.view.cut_off(mine))

    def _say(self, words: str) -> None:
        self._said.append(f"worker {self.me}: {words}")

    # ---- what all agree on ------------------------------------------------------------------

    def _pulse(self) -> None:
        """Bring this worker's gradient time and exchanges to the others: now and then, when edges
        have changed, and when somebody else does."""
        due = (
            self._agreed.again_at is None
            or self.clock.now() >= self._agreed.again_at
            or self.view.edges() != self._agreed.edges
            or self._meetings.called(OWN)
        )
        if due and self._gradients >= GRADIENTS and not self._meetings.under_way(OWN):
            self._bring()

    def _bring(self) -> None:
        self._counted = self._counted[0], sum(self.counts.exchanges.values())
        exchanges = self._counted[1] - self._counted[0]
        numbers = torch.tensor([self._gradient_s, exchanges, 1], dtype=torch.float64, device="cpu")
        self._meetings.begin(OWN, [numbers], 0.0, self._agree, self._note)

    def _note(self) -> dict[str, Any]:
        """What the root says to all: now, and the edges if they are not those agreed on."""
        edges = self.view.edges()
        return {
            "now_s": self.clock.common_s(),
            "edges": None if edges == self._agreed.edges else [list(edge) for edge in edges],
        }

    def _agree(self, meeting: Meeting) -> None:
        """All have brought theirs. The unit, what comes about of the rates, and the edges: whoever
        hears of it computes the same from the same, and it counts from the same label."""
        gradients_s, exchanges, workers = meeting.result[0].tolist()
        now_s, edges = agreed(meeting.note)
        unit_s, before_s = gradients_s / workers, self.clock.unit_s
        if before_s is None or abs(unit_s / before_s - 1) > DRIFT:
            self.clock.agree(unit_s, now_s)
        label, old, rate = self.clock.at(now_s), self._agreed, self._settings.rate
        self._agreed = old.renewed(label, exchanges / 2, edges or old.edges, rate)
        if self._agreed.counted_from != old.counted_from:
            self._counted = self._counted[1], self._counted[1]
        if (self._agreed.share, self._agreed.edges) != (old.share, old.edges):
            notice = max(NOTICE, NOTICE_S / unit_s)  # in which everybody hears of it
            self._shared.tune(label + notice, self._constants())
        self._next = None

    # ---- who comes ---------------------------------------------------------------------------

    def guest(self, frame: Frame[Kind]) -> tuple[bytes, memoryview | None]:
        if frame.header.kind is Kind.TIME:
            return pack(Kind.TIME, self.me, meta={"now_s": self.clock.common_s()}), None
        meets = self._pairing.paused or self._later or self._meetings.gathered
        if meets or self.clock.unit_s is None:
            return pack(Kind.LATER, self.me), None
        return self._welcome(frame.meta)

    def _welcome(self, asked: dict[str, Any]) -> tuple[bytes, memoryview]:
        """A place for a worker that joins; its neighbours hear of it."""
        if asked.get("layout") != self._settings.layout:
            raise WireError(ANOTHER_MODEL)
        if asked.get("strategy") != self._settings.strategy:
            raise WireError(
                f"its strategy ({asked.get('strategy')}) must be {self._settings.strategy}"
            )
        guest, around = self._seat(asked.get("id"))
        self._tell(self.view.announce(guest, around))
        if self.me in around:
            self._peers.expect(guest)
            self._guests[guest] = time.monotonic()
        body = self._luggage(self.clock.now())
        place = Place(
            guest,
            self._first,
            self.view.known(),
            {peer: self._addresses[peer] for peer in around},
            self._shared.course,
            self.clock.line,
            self._agreed,
            self._meetings.held,
        )
        head = pack(Kind.WELCOME, self.me, meta=place.pack(), body_bytes=len(body))
        return head, memory_of(body)

    def _seat(self, wanted: Any) -> tuple[int, list[int]]:
        """An id, and who its neighbours are: this worker, and those that one had that comes back,
        or else this worker's own."""
        members, workers = self.view.members(), self.view.workers
        if wanted is not None:
            if wanted not in workers or wanted in members:
                why = "there already" if wanted in members else f"none of {_listed(workers)}"
                raise WireError(f"worker {wanted!r} is {why}")
            known = set(members) & set(self._addresses)
            return wanted, sorted(known & set(self.view.around(wanted)) | {self.me})
        count = 1 + max(end for edge in self._first for end in edge)
        if self.me >= count:
            raise WireError(f"worker {self.me} has joined itself; ask one of 0 to {count - 1}")
        # No two workers give the same id, though they may not know of each other's guests.
        guest = workers[-1] + 1 + (self.me - workers[-1] - 1) % count
        return guest, sorted([self.me, *self._peers.present()])


def _words(checksum: int) -> Tensor:
    """Four numbers below 2^16: sums of their squares over a thousand workers are exact."""
    words = [checksum >> shift & 0xFFFF for shift in (0, 16, 32, 48)]
    return torch.tensor(words, dtype=torch.float64, device="cpu")


def _listed(workers: Any) -> str:
    return ", ".join(map(str, sorted(workers)))
