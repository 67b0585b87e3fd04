"""Verdict: how long each method takes for an amount of training, and what would help."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import fmean
from typing import Any

from offbeat.core import words
from offbeat.core.strategy.interface import Strategy
from offbeat.core.strategy.plan_memory import Memory
from offbeat.core.strategy.registry import BASELINE, create
from offbeat.experiments.advice import methods as making
from offbeat.experiments.advice import needs
from offbeat.experiments.advice.methods import Method
from offbeat.experiments.advice.options import CHANGES
from offbeat.experiments.advice.place import Place
from offbeat.experiments.advice.selection import AS_GOOD, MAX_STALENESS, Advice, advise
from offbeat.experiments.advice.work import Work


@dataclass(frozen=True)
class Row:
    """A method with the time that the work takes.

    Attributes:
        method: the method.
        batches: batches of one device that it needs, one number per seed; None if unknown, as are
            the times then.
        devices: number of devices of each machine.
        device_memory: bytes of a device; None if not given.
        price: price of a machine and hour; None if not given.
        rates_bps: least rate for each share of computing time; empty if not computed.
    """

    method: Method
    batches: tuple[float, ...] | None
    devices: int = 1
    device_memory: float | None = None
    price: float | None = None
    rates_bps: dict[float, float | None] = field(default_factory=dict)

    @property
    def least_memory(self) -> Memory:
        """Return the memory on a device, divided by `fully_shard` if the method allows it."""
        return self.method.sharded_memory or self.method.memory

    @property
    def fits(self) -> bool | None:
        """Return whether its memory is at most that of a device; None without a given memory."""
        room = self.device_memory
        return None if room is None else self.least_memory.total_bytes <= room

    @property
    def sharded(self) -> bool:
        """Return whether it fits only if `fully_shard` divides each replica inside its machine."""
        whole = self.method.memory.total_bytes
        return bool(self.fits) and whole > (self.device_memory or 0.0)

    @property
    def memory(self) -> Memory:
        """Return the memory on a device."""
        return self.least_memory if self.sharded else self.method.memory

    @property
    def seconds(self) -> float | None:
        """Return the seconds of the work, mean over seeds."""
        if self.batches is None:
            return None
        return self._seconds(fmean(self.batches), self.method.iteration_s)

    @property
    def range_s(self) -> tuple[float, float] | None:
        """Return the least and the greatest seconds of the work by the uncertainty of the
        iteration and the spread over seeds."""
        return self._range(self.method.low_s, self.method.high_s)

    @property
    def spread_s(self) -> tuple[float, float] | None:
        """Return the least and the greatest seconds of the work by the spread over seeds."""
        return self._range(self.method.iteration_s, self.method.iteration_s)

    @property
    def cost(self) -> float | None:
        """Return the price of all machines for the work."""
        if self.seconds is None or self.price is None:
            return None
        return self.price * self.method.machines * self.seconds / 3600

    def to_dict(self) -> dict[str, Any]:
        """Return the row as JSON types."""
        method, memory = self.method, self.memory
        return {
            "method": method.label,
            "strategy": None if method.strategy is None else str(method.strategy),
            "change": method.change,
            "changes": method.changes,
            "staleness": method.staleness,
            "machines": method.machines,
            "basis": method.basis,
            "iteration_s": method.iteration_s,
            "iteration_range_s": [method.low_s, method.high_s],
            "seconds": self.seconds,
            "range_s": self.range_s,
            "batches": None if self.batches is None else fmean(self.batches),
            "batches_by_seed": self.batches,
            "sent_bytes": method.sent_bytes,
            "memory_bytes": {**asdict(memory), "total_bytes": memory.total_bytes},
            "fits": self.fits,
            "sharded": self.sharded,
            "cost": self.cost,
            "rates_bps": {f"{share:g}": rate for share, rate in self.rates_bps.items()},
        }

    def _range(self, low_s: float, high_s: float) -> tuple[float, float] | None:
        if self.batches is None:
            return None
        return self._seconds(min(self.batches), low_s), self._seconds(max(self.batches), high_s)

    def _seconds(self, batches: float, iteration_s: float) -> float:
        return batches * iteration_s / (self.method.batches * self.devices)


@dataclass(frozen=True)
class Help:
    """A change of the machines or their network, and the time that it saves.

    Attributes:
        text: the change.
        saved: relative saving of time; negative if it takes longer.
    """

    text: str
    saved: float


@dataclass(frozen=True)
class Verdict:
    """Result of `decide`.

    Attributes:
        place: machines and network.
        work: amount of training.
        advice: strategies that were simulated, and the advised one.
        rows: methods, the fastest first; methods that do not fit or have no time come last.
        best: the method to take.
        helps: changes that were tried, the one that saves most first.
        worthwhile_bps: if one machine is best, the least rate at which all machines together are
            faster; None if one machine is not best, or if no rate is enough.
        together: the fastest method with several machines that fits, for which `helps` are.
        last_machine: number of machines beyond which a further one adds less than half a machine.
        critical_machines: number of machines at which twice the samples are needed; None if not
            measured.
        device_memory: bytes of a device; None if not given.
        price: price of a machine and hour; None if not given.
    """

    place: Place
    work: Work
    advice: Advice
    rows: tuple[Row, ...]
    best: Row
    helps: tuple[Help, ...]
    together: Row
    worthwhile_bps: float | None
    last_machine: int
    critical_machines: float | None
    device_memory: float | None = None
    price: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the verdict as JSON types, without the profile."""
        place = self.place
        return {
            "machines": place.machines,
            "devices": place.devices,
            "rate_bps": place.rate_bps,
            "estimated": place.estimated,
            "work": {
                "batches": self.work.batches,
                "text": self.work.text,
                "target_loss": self.work.target_loss,
            },
            "device_memory_bytes": self.device_memory,
            "price": self.price,
            "best": self.best.method.label,
            "methods": [row.to_dict() for row in self.rows],
            "helps": [{"change": one.text, "saved": one.saved} for one in self.helps],
            "worthwhile_bps": self.worthwhile_bps,
            "last_machine": self.last_machine,
            "critical_machines": self.critical_machines,
        }

    def row(self, label: str) -> Row | None:
        """Return the row of a label; None if there is none."""
        return next((row for row in self.rows if row.method.label == label), None)

    @property
    def rows_within_spread(self) -> tuple[Row, ...]:
        """Return the rows that may reach the loss as fast as the best one by the spread over
        seeds."""
        if self.work.target_loss is None or self.best.spread_s is None:
            return ()
        most_s = self.best.spread_s[1]
        return tuple(
            row
            for row in self.rows
            if row is not self.best and row.spread_s is not None and row.spread_s[0] <= most_s
        )


@dataclass(frozen=True)
class Predictions:
    """Predictions for some machines, from which a verdict follows.

    Attributes:
        place: machines, network and the model's profile.
        advice: strategies that were simulated, and the advised one.
        methods: methods to show.
    """

    place: Place
    advice: Advice
    methods: tuple[Method, ...]

    @property
    def learnt_differently(self) -> tuple[Strategy, ...]:
        """Return DDP, and the strategies whose losses differ from those of DDP."""
        others = (m.strategy for m in self.methods if m.strategy and not m.same_numbers)
        return (create(BASELINE), *others)


def predict_methods(
    place: Place, *, max_staleness: int = MAX_STALENESS, everything: bool = False
) -> Predictions:
    """Return the predictions of all methods for some machines; see `decide`."""
    advice = advise(place.profile, max_staleness=max_staleness)
    # Beside methods of other libraries: torch's DDP, the options to compare, and the fastest
    # options of each kind of change.
    shown = [*advice.compared, *(o for o in advice.options if str(o.strategy) == BASELINE)]
    for change in CHANGES:
        shown += [option for option in advice.options if option.change == change][:1]
    found = {method.label: method for method in making.outsiders(place)}
    for option in shown:
        method = making.of_option(option, place)
        found.setdefault(method.label, method)
    if everything:
        found = {method.label: method for method in making.default_methods(place)} | found
    return Predictions(place, advice, tuple(found.values()))


def decide(
    predicted: Predictions,
    work: Work,
    *,
    device_memory: float | None = None,
    price: float | None = None,
    shares: Sequence[float] = (0.9,),
) -> Verdict:
    """Return the verdict for a model on some machines.

    Args:
        predicted: predictions for these machines; see `predict_methods`.
        work: amount of training.
        device_memory: bytes of a device.
        price: price of a machine and hour.
        shares: shares of computing time for which the least rates are computed.

    Raises:
        ValueError: nothing fits into a device, or no method reaches the loss.
    """
    place, advice = predicted.place, predicted.advice
    rows = sorted(
        (
            Row(
                method,
                work.batches_of(method.label, BASELINE if method.same_numbers else None),
                place.devices,
                device_memory,
                price,
            )
            for method in predicted.methods
        ),
        key=_order,
    )
    rows = [_with_rates(row, place, shares) for row in rows]
    best = _best(rows, advice)
    together = best if best.method.machines > 1 else _best(rows, advice, together=True)
    return Verdict(
        place=place,
        work=work,
        advice=advice,
        rows=tuple(rows),
        best=best,
        helps=tuple(_helps(together.method, place, to_loss=work.target_loss is not None)),
        together=together,
        worthwhile_bps=None if best is together else _worthwhile_bps(best, together, place),
        last_machine=needs.last_paying_machine(together.method.seconds_at, place),
        critical_machines=needs.critical_machines(place.profile),
        device_memory=device_memory,
        price=price,
    )


def _order(row: Row) -> tuple[bool, bool, float]:
    return row.fits is False, row.seconds is None, row.seconds or row.method.batch_s


def _best(rows: Sequence[Row], advice: Advice, *, together: bool = False) -> Row:
    """Return the row to take: the fastest that fits among the advised strategy, one machine alone
    and sharded methods.

    If the work counts batches to a loss, all strategies count. One machine is preferred if it is
    nearly as fast, as it costs less. If the advised strategy does not fit, the fastest method with
    offbeat that fits takes its place. With `together`, one machine does not count.
    """
    if all(row.seconds is None for row in rows):
        raise ValueError("no method has reached the loss; rehearse more iterations")
    fitting = [row for row in rows if row.fits is not False and row.seconds is not None]
    if together:
        several = [row for row in rows if row.method.machines > 1]
        fitting = [row for row in fitting if row.method.machines > 1] or several
    if not fitting:
        least_bytes = min(row.least_memory.total_bytes for row in rows)
        raise ValueError(
            f"device_memory ({(rows[0].device_memory or 0.0) / 1e9:.3g} GB) must be at least "
            f"{least_bytes / 1e9:.3g} GB, the memory of the method that needs least; use larger "
            "devices, or more of them"
        )
    advised = [row for row in fitting if row.method.strategy == advice.chosen.strategy]
    options = [option.strategy for option in advice.options]
    others = [row for row in fitting if row.method.strategy in options]
    pool = (others if len({row.batches for row in rows}) > 1 else advised) or others
    pool += [r for r in fitting if r.method.strategy is None and r.method.change == CHANGES[0]]
    least = min(pool, key=lambda row: row.seconds or 0.0)
    as_good_s = (least.seconds or 0.0) * (1 + AS_GOOD)
    alone = (row for row in pool if row.method.machines == 1)
    return next((row for row in alone if (row.seconds or 0.0) <= as_good_s), least)


# --- needs and help ------------------------------------------------------------------------------


def _with_rates(row: Row, place: Place, shares: Sequence[float]) -> Row:
    if row.method.machines == 1:
        return row
    return replace(row, rates_bps=needs.rates_of(row.method, place, shares))


def _helps(method: Method, place: Place, *, to_loss: bool) -> list[Help]:
    """Return changes of the place with the time that they save, the greatest saving first.

    The time to a loss is known for this number of machines alone.
    """
    now_s, seconds_at = method.iteration_s / place.machines, method.seconds_at
    twice_bps, more = 2 * place.rate_bps, place.machines + 1
    tried: list[tuple[str, Place | None]] = [
        (rate(twice_bps), place.at_rate(twice_bps)),
        (f"a {_ordinal(more)} machine", place.with_machines(more)),
        ("leaving out the slowest machine", place.without_slowest()),
        ("batches in proportion to the speeds", place.with_even_times()),
    ]
    if (connected := needs.more_connections(place)) is not None:
        count, there = connected
        tried.append((f"{count} connections per link", there))
    found = [
        Help(text, 1 - seconds_at(there) / there.machines / now_s)
        for text, there in tried
        if there is not None and not (to_loss and there.machines != place.machines)
    ]
    return sorted(found, key=lambda help_: -help_.saved)


def _worthwhile_bps(one: Row, together: Row, place: Place) -> float | None:
    """Return the least rate at which all machines together are faster than one."""
    if one.batches is None or together.batches is None:
        return None
    more = fmean(together.batches) / fmean(one.batches)
    share = place.profile.slowest().compute_s / place.fastest_machine.compute_s
    share *= more / place.batches
    return needs.rates_of(together.method, place, (share,))[share]


def rate(rate_bps: float, count: int = 2) -> str:
    """Return a rate as '150 Mbit/s', with `count` digits."""
    return words.rate(float(f"{rate_bps:.{count}g}"))


def _ordinal(number: int) -> str:
    names = ("second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth")
    if number < 10:
        return names[number - 2]
    ending = {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{'th' if number // 10 % 10 == 1 else ending}"
