"""Exchanges: one under way, and those of which it is not known whether the partner has all.

A chunk takes effect as soon as it has arrived. If the connection breaks before the last one has,
what has arrived is taken back. If it breaks between the last chunk and the partner's word that it
has all, this worker is in doubt: it keeps what it did, and both tell when they meet again what
arrived whole. Who had all takes it back if the other had not. Of a partner that never comes back it
is kept, as if the partner had gone a moment later.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from offbeat.gossip.chunks import Wire
from offbeat.gossip.state import Mixing, State

Buffers = tuple[list[Tensor], list[Tensor]]


@dataclass
class Exchange:
    """One exchange at label `t`: what was sent, and what has come so far."""

    partner: int
    number: int
    t: float
    mixing: Mixing
    mine: list[Tensor]
    theirs: list[Tensor]
    arrived: int = 0  # chunks
    confirmed: bool = False  # the partner has all
    began_s: float = 0.0


class Exchanges:
    """What worker exchanges, on a state; numbers are those of an edge, the same at both ends."""

    def __init__(self, state: State, wire: Wire):
        self._state, self.wire = state, wire
        self.now: Exchange | None = None
        self._doubts: dict[int, Exchange] = {}
        self._numbers: dict[int, int] = {}  # last one begun, by partner
        self._whole: dict[int, int] = {}  # last one that arrived whole
        self._spare: list[Buffers] = []

    def next_number(self, partner: int) -> int:
        """Of an exchange that this worker accepts."""
        return self._numbers.get(partner, 0) + 1

    def whole(self, partner: int) -> int:
        """The last one that arrived whole; 0: none."""
        return self._whole.get(partner, 0)

    def begin(self, partner: int, number: int, t: float, mixing: Mixing) -> Exchange:
        """x as it is at `t` is what is sent."""
        assert self.now is None
        mine, theirs = self._spare.pop() if self._spare else self._new()
        self._numbers[partner] = number
        self.now = Exchange(partner, number, t, mixing, mine, theirs)
        self._state.snapshot(t, mine)
        return self.now

    def arrived(self) -> bool:
        """The next chunk is in `theirs`: apply it. Whether it was the last one."""
        one = self.now
        assert one is not None
        self._state.apply(one.arrived, one.mine, one.theirs, one.t, one.mixing)
        one.arrived += 1
        if one.arrived < len(self.wire.chunks):
            return False
        self._whole[one.partner] = one.number
        return True

    def over(self) -> bool:
        """Whether both have all; then the next one can begin."""
        one = self.now
        assert one is not None
        if one.arrived < len(self.wire.chunks) or not one.confirmed:
            return False
        self._spare, self.now = [(one.mine, one.theirs)], None
        return True

    def broke(self, partner: int) -> bool:
        """The connection broke; whether an exchange did."""
        one = self.now
        if one is None or one.partner != partner:
            return False
        self.now = None
        if one.arrived < len(self.wire.chunks):
            self._undo(one)
        else:
            self._doubts[partner] = one
        return True

    def settle(self, partner: int, whole: int | None) -> None:
        """This was the last one that arrived whole at the partner; None: nobody can say."""
        one = self._doubts.pop(partner, None)
        if one is not None and whole not in (None, one.number):
            self._undo(one)

    def forget(self, partner: int) -> None:
        """The partner has begun anew, and knows of nothing."""
        for known in (self._doubts, self._numbers, self._whole):
            known.pop(partner, None)

    def doubtful(self) -> list[int]:
        """Partners that must say what arrived whole."""
        return list(self._doubts)

    def _undo(self, one: Exchange) -> None:
        for number in range(one.arrived):
            self._state.apply(number, one.mine, one.theirs, one.t, one.mixing, undo=True)

    def _new(self) -> Buffers:
        return self.wire.buffers(), self.wire.buffers()
