"""Meetings: one after the other on each channel, over the neighbours there are."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from offbeat.gossip.kinds import Kind, finite
from offbeat.gossip.meeting import Meeting, Out
from offbeat.gossip.peers import Peers
from offbeat.gossip.view import View
from offbeat.transport.frames import Frame, WireError

USER, OWN = 1, 0  # channels: what the worker waits for, and what gossip agrees on by itself
RESULT = -1  # in place of a tree's digest: this is the outcome, whatever the tree


@dataclass
class _Round:
    """A meeting under way, and what to do with its result."""

    meeting: Meeting
    then: Callable[[Meeting], None]


class Meetings:
    """Every member begins as many meetings on a channel as the others, in the same order.

    When the view changes, meetings under way begin anew in its tree. Who has the result already
    does not take part again, but tells it. So there is one result: another one would need the
    numbers of everybody who is left. Members that leave by themselves must not do so before all
    have it."""

    def __init__(self, view: View, peers: Peers, held: Mapping[int, int] | None = None):
        self._view, self._peers = view, peers
        self._rounds: dict[int, _Round] = {}  # by channel
        self.held = {USER: 0, OWN: 0, **(held or {})}  # so far
        self._last: dict[int, Meeting] = {}  # the one before
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

    def begin_anew(self) -> None:
        """The view has changed."""
        place = self._view.place()
        for channel, now in self._rounds.items():
            if place is not None:
                self._send(channel, now.meeting.start(place))
        self._tell_results()
        self._close()

    def missed(self, frame: Frame[Kind]) -> int | None:
        """The channel, if this is the result of a meeting that went on without this worker."""
        held, channel = divmod(frame.header.clock, 2)
        result = frame.header.kind is Kind.DOWN and frame.meta.get("digest") == RESULT
        if not result or channel in self._rounds or held < self.held[channel]:
            return None
        self.held[channel] = held
        return channel

    def skip(self, channel: int) -> None:
        """Count a meeting that went on without this worker."""
        self.held[channel] += 1

    def hear(self, peer: int, frame: Frame[Kind]) -> None:
        """A neighbour's chunk has arrived. WireError if it cannot be."""
        held, channel = divmod(frame.header.clock, 2)
        now, told = self._rounds.get(channel), frame.meta.get("digest")
        if held < self.held[channel]:
            return
        if now is None or held > self.held[channel]:
            if frame.header.kind is Kind.UP:
                self._early.append((peer, frame))
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
            self._put(channel, self.held[channel], out, meeting.place.digest)

    def _tell_results(self) -> None:
        for channel, meeting in self._last.items():
            for out in meeting.outcome(self._peers.present()):
                self._put(channel, self.held[channel] - 1, out, RESULT)

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
                del self._rounds[channel]
                self.held[channel] += 1
                self._last[channel] = now.meeting
                now.then(now.meeting)
