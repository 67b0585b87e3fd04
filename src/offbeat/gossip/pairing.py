"""Pairing: who exchanges with whom, decided between two workers; no sockets, no clock.

A wish is for an exchange with one neighbour. A worker that rests asks the neighbour whose turn it
is. The asked one accepts if it rests. Else it says that it is busy, and it is now its turn to ask,
when it rests. So exactly one of the two has the duty to ask, wishes are served in their order, and
a busy pair cannot keep the others out.

Why nobody waits for ever: only an asker waits for a word. The asked one answers at once, whatever
it is doing, unless it asks the asker itself. These two resolve it alike without another word: the
ask of the smaller id stands, the other one forgets its own and accepts. So a chain of waits is one
long. An exchange that has begun depends on its two partners alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum


class Word(Enum):
    """What is said between neighbours."""

    ASK = "ask"
    YES = "yes"
    BUSY = "busy"


@dataclass(frozen=True)
class Say:
    """Send this word to this neighbour."""

    to: int
    word: Word


@dataclass(frozen=True)
class Begin:
    """Exchange with this neighbour, from now on until `done`; `accepted`: it had asked."""

    partner: int
    accepted: bool


Act = Say | Begin


@dataclass
class Pairing:
    """One worker's side. Every method returns what is to be done, in order."""

    me: int
    neighbours: set[int]
    duties: list[int] = field(default_factory=list)  # whom to ask, in order
    waiting: set[int] = field(default_factory=set)  # whose turn it is to ask this worker
    asked: int | None = None
    partner: int | None = None
    paused: bool = False  # begins nothing and accepts nothing

    @property
    def resting(self) -> bool:
        """Neither asking nor exchanging."""
        return self.asked is None and self.partner is None

    def wish(self, peer: int) -> list[Act]:
        """An exchange with this neighbour is wanted; not heard if one waits or is under way."""
        if peer in self.neighbours and peer not in (*self.waiting, self.asked, self.partner):
            self._owe(peer)
        return self._rest()

    def hear(self, peer: int, word: Word) -> list[Act]:
        """A neighbour has said this. ValueError for an answer to no question."""
        if word is Word.ASK:
            return self._asked_by(peer)
        if self.asked != peer:
            raise ValueError(f"{word.value} of {peer} answers nothing")
        self.asked = None
        if word is Word.BUSY:
            self.waiting.add(peer)
            return self._rest()
        return [self._begin(peer, accepted=False)]

    def done(self) -> list[Act]:
        """The exchange is over, whichever way."""
        self.partner = None
        return self._rest()

    def join(self, peer: int) -> None:
        """A neighbour can be talked to."""
        self.neighbours.add(peer)

    def leave(self, peer: int) -> list[Act]:
        """A neighbour cannot be talked to any more; nothing that was said to it counts."""
        self.neighbours.discard(peer)
        self._settled(peer)
        self.asked = None if self.asked == peer else self.asked
        self.partner = None if self.partner == peer else self.partner
        return self._rest()

    def pause(self, *, paused: bool) -> list[Act]:
        """Begin nothing more; or begin again."""
        self.paused = paused
        return self._rest()

    def _asked_by(self, peer: int) -> list[Act]:
        if self.asked == peer and self.me < peer:
            return []  # the own ask stands, and the other one will see it
        if self.asked == peer or (self.resting and not self.paused):
            self.asked = None
            return [Say(peer, Word.YES), self._begin(peer, accepted=True)]
        self.waiting.discard(peer)
        self._owe(peer)
        return [Say(peer, Word.BUSY)]

    def _begin(self, peer: int, *, accepted: bool) -> Begin:
        self.partner = peer
        self._settled(peer)
        return Begin(peer, accepted)

    def _owe(self, peer: int) -> None:
        if peer not in self.duties:
            self.duties.append(peer)

    def _settled(self, peer: int) -> None:
        self.waiting.discard(peer)
        if peer in self.duties:
            self.duties.remove(peer)

    def _rest(self) -> list[Act]:
        """If there is nothing to do: ask whose turn it is."""
        if not self.resting or self.paused or not self.duties:
            return []
        self.asked = self.duties.pop(0)
        return [Say(self.asked, Word.ASK)]
