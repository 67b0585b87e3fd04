"""Exchanges: one under way, and those of which it is not known whether the partner has all.

A chunk takes effect as soon as it has arrived. If the connection breaks before the last one has,
what has arrived is taken back. If it breaks between the last chunk and the partner's word that it
has all, this worker is in doubt: it keeps what it did, and both tell when they meet again what
arrived whole. Who had all takes it back if the other had not. Of a partner that never comes back it
is kept, as if the partner had gone a moment later.

With a codec, anchors that an exchange has left hold at both ends if both have the number of that
exchange. One that breaks takes its edge's anchors along, and the next one sends x itself: so both
begin anew.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from offbeat.core.buckets.flat import memory_of
from offbeat.gossip.anchors import NEVER, Anchors, Coded, decode, encode, followed
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
    coded: Coded | None = None


class Exchanges:
    """What worker exchanges, on a state; numbers are those of an edge, the same at both ends."""

    def __init__(self, state: State, wire: Wire):
        self._state, self.wire = state, wire
        self.now: Exchange | None = None
        self._doubts: dict[int, Exchange] = {}
        self._numbers: dict[int, int] = {}  # last one begun, by partner
        self._whole: dict[int, int] = {}  # last one that arrived whole
        self._spare: list[Buffers] = []
        self._anchors: dict[int, Anchors] = {}  # by partner
        self._codes: Buffers | None = None

    def next_number(self, partner: int) -> int:
        """Of an exchange that this worker accepts."""
        return self._numbers.get(partner, 0) + 1

    def whole(self, partner: int) -> int:
        """The last one that arrived whole; 0: none."""
        return self._whole.get(partner, 0)

    def anchored(self, partner: int) -> int:
        """The exchange that has left anchors; 0: there are none."""
        found = self._anchors.get(partner)
        return NEVER if found is None else found.number

    def begin(
        self, partner: int, number: int, t: float, mixing: Mixing, *, coded: bool = False
    ) -> Exchange:
        """x as it is at `t` is what is sent; `coded` if both ends have the same anchors."""
        assert self.now is None
        mine, theirs = self._spare.pop() if self._spare else self._new()
        self._numbers[partner] = number
        self.now = Exchange(partner, number, t, mixing, mine, theirs)
        self._state.snapshot(t, mine)
        if coded:
            self._codes = self._codes or (self.wire.codes(), self.wire.codes())
            self.now.coded = made = Coded(self._anchors[partner], *self._codes)
            for chunk, codes in enumerate(made.mine):
                encode(self.wire, chunk, mine, made.anchors.mine, codes)
        return self.now

    def sent(self, chunk: int) -> memoryview:
        """What to send of a chunk."""
        assert self.now is not None
        coded = self.now.coded
        return memory_of(coded.mine[chunk]) if coded else self.wire.memory(self.now.mine, chunk)

    def room(self, chunk: int) -> memoryview:
        """Where what comes of a chunk goes."""
        assert self.now is not None
        coded = self.now.coded
        return memory_of(coded.theirs[chunk]) if coded else self.wire.memory(self.now.theirs, chunk)

    @property
    def bytes(self) -> int:
        """Of the one under way, in each direction."""
        assert self.now is not None
        return self.wire.bytes if self.now.coded else self.wire.plain_bytes

    def arrived(self) -> bool:
        """The next chunk has come: apply it. Whether it was the last one."""
        one = self.now
        assert one is not None
        if one.coded:
            anchors, codes = one.coded.anchors.theirs, one.coded.theirs[one.arrived]
            decode(self.wire, one.arrived, one.theirs, anchors, codes)
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
        self._spare, self.now = self._left(one), None
        return True

    def _left(self, one: Exchange) -> list[Buffers]:
        """Keep its anchors; buffers that are free now."""
        before = self._anchors.pop(one.partner, None)
        if self.wire.codec is None or not followed(one.mine, one.theirs, one.mixing.alpha):
            return [(one.mine, one.theirs)]
        self._anchors[one.partner] = Anchors(one.number, one.mine, one.theirs)
        return self._spare if before is None else [(before.mine, before.theirs)]

    def broke(self, partner: int) -> bool:
        """The connection broke; whether an exchange did."""
        one = self.now
        if one is None or one.partner != partner:
            return False
        self.now = None
        self._anchors.pop(partner, None)
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

    def release(self, partner: int) -> None:
        """It will not exchange again for now: give back what its anchors take."""
        self._anchors.pop(partner, None)

    def forget(self, partner: int) -> None:
        """The partner has begun anew, and knows of nothing."""
        for known in (self._doubts, self._numbers, self._whole, self._anchors):
            known.pop(partner, None)

    def doubtful(self) -> list[int]:
        """Partners that must say what arrived whole."""
        return list(self._doubts)

    def _undo(self, one: Exchange) -> None:
        for number in range(one.arrived):
            self._state.apply(number, one.mine, one.theirs, one.t, one.mixing, undo=True)

    def _new(self) -> Buffers:
        return self.wire.buffers(), self.wire.buffers()
