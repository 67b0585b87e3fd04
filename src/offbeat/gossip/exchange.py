"""Exchange in progress, and exchanges whose completion at the partner is unknown.

A chunk is applied as soon as it arrives. If the connection breaks before the last chunk, the
applied chunks are reverted. If it breaks after the last chunk but before the confirmation of the
partner, the exchange is in doubt: its changes are kept. On reconnection both workers report their
last complete exchange. A worker with a complete exchange reverts it if the partner has not
completed it. If the partner never returns, the changes are kept, as if the partner had failed a
moment later.

With a codec, the anchors of an exchange are valid if both ends report the number of that exchange.
An interrupted exchange invalidates the anchors of its edge, and the next exchange sends x itself.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from offbeat.core.buckets.flat import memory_of
from offbeat.gossip.anchors import NEVER, Anchors, Coded, advance_anchors, decode, encode
from offbeat.gossip.chunks import Wire
from offbeat.gossip.state import Mixing, State

MOST = 2048  # largest number of recent exchanges that are kept
Buffers = tuple[list[Tensor], list[Tensor]]


@dataclass
class Exchange:
    """One exchange at label `t`.

    Attributes:
        partner: id of the other worker.
        number: number of the exchange on its edge, equal at both ends.
        t: label of the exchange.
        mixing: constants of the exchange.
        mine: buffers with x of this worker; chunks before `folded` hold differences.
        theirs: buffers with x of the partner, which become anchors; without a codec there are none.
        chunks: received chunks that are not folded, without a codec.
        arrived: number of applied chunks.
        sent: number of sent chunks.
        folded: number of chunks that were sent and applied, and whose difference is kept in the
            place of x, so that an exchange takes one copy of the parameters.
        confirmed: whether the partner has received all chunks.
        began_s: start in seconds of the clock of this worker.
        coded: codes, if codes are sent instead of numbers.
    """

    partner: int
    number: int
    t: float
    mixing: Mixing
    mine: list[Tensor]
    theirs: list[Tensor]
    chunks: dict[int, Tensor] = field(default_factory=dict)
    arrived: int = 0
    sent: int = 0
    folded: int = 0
    confirmed: bool = False
    began_s: float = 0.0
    coded: Coded | None = None

    def difference(self, wire: Wire, number: int) -> Tensor:
        """Return x of this worker minus x of the partner, of a received chunk."""
        mine = wire.view(self.mine, number)
        if number < self.folded:
            return mine
        other = self.chunks[number] if wire.codec is None else wire.view(self.theirs, number)
        return _number(mine) - _number(other)

    def fold(self, wire: Wire) -> None:
        """Replace x by the difference in the chunks that were sent and applied."""
        while wire.keeps_differences and self.folded < min(self.arrived, self.sent):
            wire.view(self.mine, self.folded).sub_(self.chunks.pop(self.folded))
            self.folded += 1


class Exchanges:
    """All exchanges of a worker. Exchanges are numbered by edge, equally at both ends.

    Attributes:
        wire: chunks of the parameters.
        now: exchange in progress, or None.
    """

    def __init__(self, state: State, wire: Wire):
        self._state, self.wire = state, wire
        self.now: Exchange | None = None
        self._doubts: dict[int, Exchange] = {}
        self._numbers: dict[int, int] = {}  # number of the last exchange begun, by partner
        self._whole: dict[int, int] = {}  # number of the last complete exchange, by partner
        self._spare: list[Buffers] = []
        self._anchors: dict[int, Anchors] = {}  # by partner
        self._codes: Buffers | None = None

    def next_number(self, partner: int) -> int:
        """Return the number of the next exchange with a partner."""
        return self._numbers.get(partner, 0) + 1

    def completed_number(self, partner: int) -> int:
        """Return the number of the last complete exchange with a partner, or 0."""
        return self._whole.get(partner, 0)

    def anchor_number(self, partner: int) -> int:
        """Return the number of the exchange that left the current anchors, or `NEVER`."""
        found = self._anchors.get(partner)
        return NEVER if found is None else found.number

    def begin(
        self, partner: int, number: int, t: float, mixing: Mixing, *, coded: bool = False
    ) -> Exchange:
        """Begin an exchange with a copy of x at label `t`. `coded` requires equal anchors at both
        ends.
        """
        assert self.now is None
        mine, theirs = self._spare.pop() if self._spare else self._new_buffers()
        self._numbers[partner] = number
        self.now = Exchange(partner, number, t, mixing, mine, theirs)
        self._state.snapshot(t, mine)
        if coded:
            self._codes = self._codes or (self.wire.codes(), self.wire.codes())
            self.now.coded = made = Coded(self._anchors[partner], *self._codes)
            for chunk, codes in enumerate(made.mine):
                encode(self.wire, chunk, mine, made.anchors.mine, codes)
        return self.now

    def data(self, chunk: int) -> memoryview:
        """Return the bytes of a chunk to send."""
        assert self.now is not None
        coded = self.now.coded
        return memory_of(coded.mine[chunk]) if coded else self.wire.memory(self.now.mine, chunk)

    def buffer(self, chunk: int) -> memoryview:
        """Return the memory for a chunk to receive."""
        assert self.now is not None
        coded = self.now.coded
        if coded:
            return memory_of(coded.theirs[chunk])
        if self.wire.codec is not None:
            return self.wire.memory(self.now.theirs, chunk)
        like = self.wire.view(self.now.mine, chunk)
        made = torch.empty(like.shape, dtype=like.dtype, device="cpu")
        self.now.chunks[chunk] = made
        return memory_of(made)

    def note_sent(self, one: Exchange, count: int) -> None:
        """Note that the first `count` chunks of an exchange are sent."""
        one.sent = count
        one.fold(self.wire)

    @property
    def bytes(self) -> int:
        """Return the bytes of the current exchange in each direction."""
        assert self.now is not None
        return self.wire.bytes if self.now.coded else self.wire.plain_bytes

    def apply_chunk(self) -> bool:
        """Apply the next received chunk. Return whether it was the last one."""
        one = self.now
        assert one is not None
        if one.coded:
            anchors, codes = one.coded.anchors.theirs, one.coded.theirs[one.arrived]
            decode(self.wire, one.arrived, one.theirs, anchors, codes)
        m = one.difference(self.wire, one.arrived)
        self._state.apply(one.arrived, m, one.t, one.mixing)
        one.arrived += 1
        one.fold(self.wire)
        if one.arrived < len(self.wire.chunks):
            return False
        self._whole[one.partner] = one.number
        return True

    def end_if_complete(self) -> bool:
        """End the current exchange if both workers have received all chunks. Return whether it
        ended.
        """
        one = self.now
        assert one is not None
        if one.arrived < len(self.wire.chunks) or not one.confirmed:
            return False
        self._spare, self.now = self._keep_anchors(one), None
        return True

    def _keep_anchors(self, one: Exchange) -> list[Buffers]:
        """Store the buffers of an exchange as anchors of its edge. Return the buffers that become
        free.
        """
        before = self._anchors.pop(one.partner, None)
        if self.wire.codec is None or not advance_anchors(one.mine, one.theirs, one.mixing.alpha):
            return [(one.mine, one.theirs)]
        self._anchors[one.partner] = Anchors(one.number, one.mine, one.theirs)
        return self._spare if before is None else [(before.mine, before.theirs)]

    def abort(self, partner: int) -> bool:
        """Abort the exchange with a disconnected partner. Return whether there was one."""
        one = self.now
        if one is None or one.partner != partner:
            return False
        self.now = None
        self._anchors.pop(partner, None)
        is_whole = one.arrived == len(self.wire.chunks)
        self._revert(one, 0 if is_whole else one.arrived)
        if is_whole:
            self._doubts[partner] = one
        return True

    def settle(self, partner: int, whole: int | None) -> None:
        """Revert the exchange in doubt unless it is the last complete exchange of the partner.

        Args:
            partner: id of the partner.
            whole: number of the last complete exchange of the partner; None if unknown. The
                exchange in doubt is then kept.
        """
        one = self._doubts.pop(partner, None)
        if one is not None and whole not in (None, one.number):
            self._revert(one, one.arrived)

    def release_anchors(self, partner: int) -> None:
        """Free the anchors of a partner that does not exchange for now."""
        self._anchors.pop(partner, None)

    def forget_partner(self, partner: int) -> None:
        """Delete all data of a partner that has restarted."""
        for known in (self._doubts, self._numbers, self._whole, self._anchors):
            known.pop(partner, None)

    def partners_in_doubt(self) -> list[int]:
        """Return the partners whose last complete exchange is needed."""
        return list(self._doubts)

    def _revert(self, one: Exchange, count: int) -> None:
        """Revert the first `count` chunks of an exchange."""
        for number in range(count):
            m = one.difference(self.wire, number)
            self._state.apply(number, m, one.t, one.mixing, reverts=True)

    def _new_buffers(self) -> Buffers:
        return self.wire.buffers(), [] if self.wire.codec is None else self.wire.buffers()


def _number(values: Tensor) -> Tensor:
    """Return values as numbers to subtract. Differences are exact up to one rounding, which is
    equal on both workers except for the sign.
    """
    return values if values.dtype.itemsize > 2 else values.float()


class ExchangeRecord(NamedTuple):
    """A completed exchange.

    Attributes:
        partner: id of the other worker.
        number: number of the exchange on its edge, equal at both ends.
        begin_s: start in seconds of the clock of this worker.
        end_s: end in seconds of the clock of this worker.
        bytes: bytes sent in each direction.
    """

    partner: int
    number: int
    begin_s: float
    end_s: float
    bytes: int


@dataclass
class Counts:
    """Counts and recent exchanges of a worker.

    Attributes:
        exchanges: completed exchanges by partner.
        broken: exchanges that a disconnection has interrupted.
        exchange_s: total duration of completed exchanges in seconds.
        last: the most recent `MOST` exchanges.
    """

    exchanges: dict[int, int] = field(default_factory=dict)
    broken: int = 0
    exchange_s: float = 0.0
    last: deque[ExchangeRecord] = field(default_factory=lambda: deque(maxlen=MOST))

    def add(self, one: ExchangeRecord) -> None:
        """Count a completed exchange."""
        self.exchanges[one.partner] = self.exchanges.get(one.partner, 0) + 1
        self.exchange_s += one.end_s - one.begin_s
        self.last.append(one)

    def last_exchanges(self, origin_s: float) -> list[ExchangeRecord]:
        """Return the recent exchanges, with times in seconds since `origin_s`."""
        return [
            one._replace(begin_s=one.begin_s - origin_s, end_s=one.end_s - origin_s)
            for one in self.last
        ]
