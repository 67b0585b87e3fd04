"""Counts: what a worker has exchanged so far, and when the last exchanges were."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

MOST = 2048  # exchanges of which it is kept when they were; all are counted


class Exchanged(NamedTuple):
    """One exchange that is over; `number` counts those of an edge, the same at both ends."""

    partner: int
    number: int
    begin_s: float  # on this worker's clock
    end_s: float
    bytes: int  # in each direction


def _last() -> deque[Exchanged]:
    return deque(maxlen=MOST)


@dataclass
class Counts:
    """What has happened so far."""

    exchanges: dict[int, int] = field(default_factory=dict)  # by partner
    broken: int = 0
    exchange_s: float = 0.0  # from the beginning to the end of exchanges
    last: deque[Exchanged] = field(default_factory=_last)

    def add(self, one: Exchanged) -> None:
        """An exchange is over."""
        self.exchanges[one.partner] = self.exchanges.get(one.partner, 0) + 1
        self.exchange_s += one.end_s - one.begin_s
        self.last.append(one)

    def since(self, origin_s: float) -> list[Exchanged]:
        """The last exchanges, in seconds from an origin."""
        return [
            one._replace(begin_s=one.begin_s - origin_s, end_s=one.end_s - origin_s)
            for one in self.last
        ]
