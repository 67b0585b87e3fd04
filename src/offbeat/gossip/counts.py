"""Counts and times of the exchanges of a worker."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

MOST = 2048  # longest list of recent exchanges


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


def _new_records() -> deque[ExchangeRecord]:
    return deque(maxlen=MOST)


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
    last: deque[ExchangeRecord] = field(default_factory=_new_records)

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
