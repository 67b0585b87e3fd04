"""What is in force on one link: rates, delays and losses of its hosts and pairs of hosts.

Only the standard library, as the lab's own process reads it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any


@dataclass(frozen=True)
class PairPlan:
    """What is different between two hosts, in both directions; None: what the hosts say."""

    hosts: tuple[int, int]
    rate_bps: int | None = None
    latency_s: float | None = None
    loss: float | None = None


@dataclass(frozen=True)
class LinkPlan:
    """One link: rate in bit/s (None: unshaped), one-way latency and loss of each host, and pairs.

    Between two hosts the larger latency and loss count, unless their pair says otherwise.
    `switched`: hosts or pairs differ, or will, in what only a switch of our own can do.
    """

    name: str
    rates_bps: tuple[int | None, ...]
    latencies_s: tuple[float, ...]
    losses: tuple[float, ...]
    pairs: tuple[PairPlan, ...] = ()
    switched: bool = False

    @classmethod
    def from_message(cls, message: Mapping[str, Any]) -> "LinkPlan":
        """The plan out of plain data (JSON)."""
        pairs = [PairPlan(**{**pair, "hosts": tuple(pair["hosts"])}) for pair in message["pairs"]]
        rows = {name: tuple(message[name]) for name in ("rates_bps", "latencies_s", "losses")}
        return cls(**{**message, **rows, "pairs": tuple(pairs)})

    def to_message(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)

    @property
    def delayed(self) -> bool:
        """Whether anything is delayed or lost."""
        values = [value for pair in self.pairs for value in (pair.latency_s, pair.loss)]
        return any((*self.latencies_s, *self.losses, *values))

    @property
    def lossy(self) -> bool:
        """Whether anything gets lost."""
        return any((*self.losses, *(pair.loss for pair in self.pairs)))

    def pair(self, one: int, other: int) -> PairPlan:
        """What is different between two hosts."""
        return next(
            (pair for pair in self.pairs if set(pair.hosts) == {one, other}), PairPlan((one, other))
        )

    def latency_s(self, one: int, other: int) -> float:
        """One-way delay between two hosts."""
        own = self.pair(one, other).latency_s
        return max(self.latencies_s[one], self.latencies_s[other]) if own is None else own

    def loss(self, one: int, other: int) -> float:
        """Share of packets that get lost between two hosts."""
        own = self.pair(one, other).loss
        return max(self.losses[one], self.losses[other]) if own is None else own


@dataclass(frozen=True)
class ChangePlan:
    """New values (`rate_bps`, `latency_s`, `loss`, those that change) of one link, for some hosts
    (None: all) or a pair, `at_s` seconds after the start of the ranks."""

    at_s: float
    link: int
    values: Mapping[str, Any] = field(default_factory=dict)
    hosts: Sequence[int] | None = None
    pair: tuple[int, int] | None = None
    number: int = 0  # of the change that this is part of

    def applied(self, plan: LinkPlan) -> LinkPlan:
        """The plan of its link afterwards."""
        if self.pair is not None:
            old = plan.pair(*self.pair)
            others = tuple(pair for pair in plan.pairs if pair != old)
            return replace(plan, pairs=(*others, replace(old, **self.values)))
        hosts = range(len(plan.rates_bps)) if self.hosts is None else self.hosts
        names = {"rate_bps": "rates_bps", "latency_s": "latencies_s", "loss": "losses"}
        rows = {
            names[name]: tuple(
                value if host in hosts else old
                for host, old in enumerate(getattr(plan, names[name]))
            )
            for name, value in self.values.items()
        }
        return replace(plan, **rows)
