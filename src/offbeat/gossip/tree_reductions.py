"""Meetings: one after the other on each channel, over the neighbours there are."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from offbeat.frames.frames import Frame, WireError
from offbeat.gossip.peers import Peers
from offbeat.gossip.protocol import Kind, finite
from offbeat.gossip.tree_reduction import Meeting, Out
from offbeat.gossip.view import Place, View

USER, OWN = 1, 0  # channels: what the worker waits for, and what gossip agrees on by itself
RESULT = -1  # in place of a tree's digest: this is the outcome, whatever the tree
QUIET_S = 0.05  # without news of the graph, before a meeting that began anew sends anything
KEPT = 4  # results on the worker's channel that others may still ask for: those of a consolidation


@dataclass
class _Round:
    """A meeting under way, and what to do with its result."""

    meeting: Meeting
    then: Callable[[Meeting], None]


@dataclass
class _Again:
    """A result that this worker has, but others have another one: what they tell it."""

    number: int
    numbers: Sequence[Tensor]
    then: Callable[[Meeting], bool]  # whether it is the one
    told: dict[int, Meeting] = field(default_factory=dict)  # by neighbour


class Meetings:
    """Every member begins as many meetings on a channel as the others, in the same order.

    When the view changes, meetings under way begin anew in its tree. Who has the result already
    does not take part again, but tells it. So there is one result: another one would need the
    numbers of everybody who is left. Members that leave by themselves must not do so before all
    have it.

    Only those that were out of reach of each other can come to different results: who has one and
    stands still counts as dead, and the others make another one without it. So whoever needs the
    same bits compares them afterwards, and takes the others' result `again`.

    The others do not wait for a worker that seems to be dead. If it lives and comes back, it asks
    for the results that it has missed. If it was not `together` with the others at all, it goes on
    where their series of meetings began."""

    def __init__(self, view: View, peers: Peers, held: Mapping[int, int] | None = None):
        self._view, self._peers = view, peers
        self._rounds: dict[int, _Round] = {}  # by channel
        self.held = {USER: 0, OWN: 0, **(held or {})}  # so far
        self._results: dict[int, dict[int, Meeting]] = {USER: {}, OWN: {}}  # of the last ones
        self._ahead: dict[int, int] = {}  # by neighbour: how many of the worker's it has held
        self._first: int | None = None  # of a series, from its begin to its end
        self._again: _Again | None = None
        # What is sent only when the view has been the same for a moment: news come in bursts.
        self._later: list[tuple[int, int, Out]] = []
        self._quiet_at: float | None = None
        self._early: list[tuple[int, Frame[Kind]]] = []  # of those that are still to begin here

    def under_way(self, channel: int) -> bool:
        """Whether there is one."""
        return channel in self._rounds

    def called(self, channel: int) -> bool:
        """Whether a neighbour has begun one that this worker has not."""
        return any(frame.header.clock % 2 == channel for _, frame in self._early)

    def begin(
        self,
        channel: int,
        numbers: Sequence[Tensor],
        largest: float,
        then: Callable[[Meeting], None],
        note: Callable[[], Any] | None = None,
    ) -> None:
        """Bring these numbers; `then` gets the meeting when it is over."""
        self._rounds[channel] = now = _Round(Meeting(numbers, largest, note), then)
        place = self._view.place()
        if place is not None:
            self._send(channel, now.meeting.start(place))
        early, self._early = self._early, []
        for peer, frame in early:
            self.hear(peer, frame)
        self._close()
        self._ask()

    def together(self, begin: bool) -> None:
        """A series of the worker's meetings begins, or is over: all hold it whole."""
        self._first = self.held[USER] if begin else None

    def begin_anew(self) -> None:
        """The view has changed."""
        place = self._view.place()
        self._later.clear()
        self._quiet_at = time.monotonic() + QUIET_S if self._rounds else None
        for channel, now in self._rounds.items():
            if place is not None:
                self._send(channel, now.meeting.start(place))
        self._tell_results()
        self._close()

    @property
    def wait_s(self) -> float | None:
        """Seconds until there is something to send; None: there is not."""
        return None if self._quiet_at is None else self._quiet_at - time.monotonic()

    def turn(self) -> None:
        """Send what had to wait, if it is time."""
        if self._quiet_at is not None and time.monotonic() >= self._quiet_at:
            later, self._later, self._quiet_at = self._later, [], None
            for channel, digest, out in later:
                self._put(channel, self.held[channel], out, digest)

    def missed(self, frame: Frame[Kind]) -> bool:
        """Whether this is the result of a meeting of gossip's own that went on without this
        worker."""
        held, channel = divmod(frame.header.clock, 2)
        result = frame.header.kind is Kind.DOWN and frame.meta.get("digest") == RESULT
        if channel != OWN or not result or OWN in self._rounds or held < self.held[OWN]:
            return False
        self.held[OWN] = held
        return True

    @property
    def gathered(self) -> bool:
        """Whether the worker meets the others, or is in a series of meetings."""
        return USER in self._rounds or self._first is not None

    # ---- who was out of reach ---------------------------------------------------------------

    @property
    def told(self) -> list[int]:
        """For neighbours: how many of the worker's meetings were held, and before the series."""
        return [self.held[USER], self.held[USER] if self._first is None else self._first]

    def learn(self, peer: int, told: Any) -> None:
        """A neighbour has said how many it has held. WireError if that cannot be."""
        if not (isinstance(told, list) and [type(n) for n in told] == [int, int]):
            raise WireError("held must be two counts")
        held, first = told
        if not self.gathered and first > self.held[USER]:
            self.held[USER] = first  # it went on without this worker
        self._ahead[peer] = held
        self._ask()
        self._ask_again(peer)

    def answer(self, peer: int, frame: Frame[Kind]) -> None:
        """A neighbour asks for a result."""
        number, channel = divmod(frame.header.clock, 2)
        meeting = self._results[channel].get(number)
        if meeting is None and number < self.held[channel]:
            self._peers.send(peer, Kind.FORGOTTEN, clock=frame.header.clock)
        for out in meeting.outcome([peer]) if meeting else ():
            self._put(channel, number, out, RESULT)

    def again(
        self, number: int, numbers: Sequence[Tensor], then: Callable[[Meeting], bool]
    ) -> None:
        """What neighbours have as the result of an earlier meeting of the worker's, of numbers like
        these, until `then` says that it is the one."""
        self._again = _Again(number, numbers, then)
        for peer in self._peers.present():
            self._ask_again(peer)

    def _ask_again(self, peer: int) -> None:
        if self._again is not None:
            self._again.told[peer] = meeting = Meeting(self._again.numbers, 0.0)
            list(meeting.start(Place(peer, (), RESULT, 2)))
            self._peers.send(peer, Kind.MISSED, clock=2 * self._again.number + USER)

    def _take_again(self, again: _Again, peer: int, frame: Frame[Kind]) -> None:
        meeting = again.told.get(peer)
        if meeting is None or frame.header.shard != meeting.results or meeting.done:
            return
        try:
            body = meeting.numbers(frame.header.shard, frame.body)
        except ValueError as error:
            raise WireError(str(error)) from None
        list(meeting.down(frame.header.shard, body, finite(frame.meta.get("largest"))))
        if meeting.done and again.then(meeting):
            self._results[USER][again.number] = meeting
            self._again = None

    def forgotten(self, frame: Frame[Kind]) -> None:
        """There is no result any more. RuntimeError if this worker waits for it."""
        number, channel = divmod(frame.header.clock, 2)
        again = self._again is not None and (number, channel) == (self._again.number, USER)
        if again or (channel in self._rounds and number == self.held[channel]):
            raise RuntimeError(
                "the others have taken this worker for dead, and have consolidated without it more "
                "than once; begin it anew with `offbeat join`, or raise silent_s"
            )

    def _ask(self) -> None:
        """Neighbours that have held the present meeting, for its result."""
        if USER not in self._rounds:
            return
        number = self.held[USER]
        ahead = [peer for peer, held in self._ahead.items() if held > number]
        for peer in ahead:
            self._peers.send(peer, Kind.MISSED, clock=2 * number + USER)
        place = self._view.place()
        if ahead and place is not None and place.members == 1:
            raise RuntimeError(
                "the others have taken this worker for dead, have consolidated without it and have "
                "left; raise silent_s"
            )

    def hear(self, peer: int, frame: Frame[Kind]) -> None:
        """A neighbour's chunk has arrived. WireError if it cannot be."""
        held, channel = divmod(frame.header.clock, 2)
        now, told = self._rounds.get(channel), frame.meta.get("digest")
        again = self._again
        if again is not None and (held, channel, told) == (again.number, USER, RESULT):
            self._take_again(again, peer, frame)
        if held < self.held[channel]:
            return
        if now is None or held > self.held[channel]:
            if frame.header.kind is Kind.UP:
                self._early.append((peer, frame))
                if channel == USER and held > self._ahead.get(peer, 0):
                    self._ahead[peer] = held
                    self._ask()
            return
        meeting, place = now.meeting, now.meeting.place
        if place is None:
            return  # whoever knows more will say it again when the view has changed
        elsewhere = told != place.digest
        if frame.header.kind is Kind.DOWN:
            if frame.header.shard != meeting.results:
                return  # known already, or what came before it was not heard
            if elsewhere and frame.header.shard == 0:
                meeting.detach()
        elif elsewhere:
            return  # of another tree: it will be sent again
        self._take(channel, peer, frame)
        done = meeting.done
        self._close()
        if done and elsewhere:  # those before this worker in its tree wait for it
            self._tell_results()

    def missing(self, channel: int) -> list[int] | None:
        """Who has not brought numbers, or has not told the result; None if the graph is broken."""
        now = self._rounds.get(channel)
        place = now.meeting.place if now is not None else None
        if now is None or place is None or self._view.place() is None:
            return None
        behind = now.meeting.waiting()
        return behind or [worker for worker in [place.parent] if worker is not None]

    def _take(self, channel: int, peer: int, frame: Frame[Kind]) -> None:
        meeting = self._rounds[channel].meeting
        chunk, largest = frame.header.shard, finite(frame.meta.get("largest"))
        try:
            body = meeting.numbers(chunk, frame.body)
            if frame.header.kind is Kind.UP:
                self._send(channel, meeting.up(peer, chunk, body, largest))
            else:
                self._send(channel, meeting.down(chunk, body, largest, frame.meta.get("note")))
        except ValueError as error:
            raise WireError(str(error)) from None

    def _send(self, channel: int, outs: Iterable[Out]) -> None:
        meeting = self._rounds[channel].meeting
        for out in outs:
            assert meeting.place is not None
            if self._quiet_at is None:
                self._put(channel, self.held[channel], out, meeting.place.digest)
            else:
                self._later.append((channel, meeting.place.digest, out))

    def _hurry(self, channel: int) -> None:
        """Send what a meeting that is over has left: nobody else would."""
        for other, digest, out in self._later:
            if other == channel:
                self._put(channel, self.held[channel], out, digest)
        self._later = [waiting for waiting in self._later if waiting[0] != channel]

    def _tell_results(self) -> None:
        for channel, results in self._results.items():
            last = self.held[channel] - 1
            for out in results[last].outcome(self._peers.present()) if last in results else ():
                self._put(channel, last, out, RESULT)

    def _put(self, channel: int, number: int, out: Out, digest: int) -> None:
        self._peers.send(
            out.to,
            Kind.UP if out.up else Kind.DOWN,
            out.body,
            shard=out.chunk,
            clock=2 * number + channel,
            meta={"digest": digest, "largest": out.largest, "note": out.note},
        )

    def _close(self) -> None:
        for channel, now in list(self._rounds.items()):
            if now.meeting.done:
                self._hurry(channel)
                del self._rounds[channel]
                results, number = self._results[channel], self.held[channel]
                results[number] = now.meeting
                results.pop(number - (KEPT if channel == USER else 1), None)
                self.held[channel] += 1
                now.then(now.meeting)
