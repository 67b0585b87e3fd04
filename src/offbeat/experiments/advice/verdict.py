"""Verdict: how long each method takes for an amount of training, and what would help."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from statistics import fmean
from typing import Any

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
        fits: whether its memory is at most that of a device; None without a given memory.
        sharded: whether it fits only if `fully_shard` divides each replica inside its machine.
        price: price of a machine and hour; None if not given.
        rates_bps: least rate for each share of computing time; empty if not computed.
    """

    method: Method
    batches: tuple[float, ...] | None
    devices: int = 1
    fits: bool | None = None
    sharded: bool = False
    price: float | None = None
    rates_bps: dict[float, float | None] = field(default_factory=dict)

    @property
    def memory(self) -> Memory:
        """Return the memory on a device."""
        divided = self.method.sharded_memory
        return divided if self.sharded and divided is not None else self.method.memory

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
        if self.batches is None:
            return None
        low_s = self._seconds(min(self.batches), self.method.low_s)
        return low_s, self._seconds(max(self.batches), self.method.high_s)

    @property
    def spread_s(self) -> tuple[float, float] | None:
        """Return the least and the greatest seconds of the work by the spread over seeds."""
        if self.batches is None:
            return None
        low_s, high_s = (
            self._seconds(batches, self.method.iteration_s)
            for batches in (min(self.batches), max(self.batches))
        )
        return low_s, high_s

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
    return Predictions(place, advice, tuple(_methods(place, advice, everything=everything)))


def decide(
    place: Place,
    work: Work,
    *,
    predicted: Predictions | None = None,
    max_staleness: int = MAX_STALENESS,
    device_memory: float | None = None,
    price: float | None = None,
    shares: Sequence[float] = (0.9,),
    everything: bool = False,
    rate_text: Callable[[float], str] = str,
) -> Verdict:
    """Return the verdict for a model on some machines.

    Args:
        place: machines, network and the model's profile.
        work: amount of training.
        predicted: predictions for these machines; None: `predict_methods` with `max_staleness` and
            `everything`.
        max_staleness: largest staleness of an advised strategy, in iterations.
        device_memory: bytes of a device.
        price: price of a machine and hour.
        shares: shares of computing time for which the least rates are computed.
        everything: whether the default settings of all strategies are rows, too.
        rate_text: text of a rate, for the texts of `helps`.

    Raises:
        ValueError: a number is out of range, nothing fits into a device, or no method reaches the
            loss.
    """
    require_amounts(device_memory, price)
    if predicted is None:
        predicted = predict_methods(place, max_staleness=max_staleness, everything=everything)
    advice = predicted.advice
    to_row = partial(_row, place=place, work=work, device_memory=device_memory, price=price)
    rows = sorted(map(to_row, predicted.methods), key=_order)
    best = _best(rows, advice, device_memory)
    if shares:
        rows = [_with_rates(row, place, shares) for row in rows]
        best = next(row for row in rows if row.method.label == best.method.label)
    together = (
        best if best.method.machines > 1 else _best(rows, advice, device_memory, together=True)
    )
    seconds_at = together.method.seconds_at
    return Verdict(
        place=place,
        work=work,
        advice=advice,
        rows=tuple(rows),
        best=best,
        helps=tuple(
            _helps(together.method, place, rate_text, to_loss=work.target_loss is not None)
        ),
        together=together,
        worthwhile_bps=None if best is together else _worthwhile_bps(best, together, place),
        last_machine=needs.last_paying_machine(seconds_at, place),
        critical_machines=needs.critical_machines(place.profile),
        device_memory=device_memory,
        price=price,
    )


def require_amounts(device_memory: float | None, price: float | None) -> None:
    """Raise ValueError for bytes of a device or a price that are no number above 0."""
    for name, value in (("device_memory", device_memory), ("price", price)):
        if value is not None and not 0 < value < float("inf"):
            raise ValueError(f"{name} ({value:g}) must be a number above 0")


def _methods(place: Place, advice: Advice, *, everything: bool) -> list[Method]:
    """Return the methods of other libraries, torch's DDP, the options to compare and the fastest
    options of each kind of change."""
    shown = [*advice.compared, *(o for o in advice.options if str(o.strategy) == BASELINE)]
    for change in CHANGES:
        shown += [option for option in advice.options if option.change == change][:1]
    found = {method.label: method for method in making.outsiders(place)}
    for option in shown:
        method = making.of_option(option, place)
        found.setdefault(method.label, method)
    if everything:
        found = {method.label: method for method in making.default_methods(place)} | found
    return list(found.values())


def _row(
    method: Method, *, place: Place, work: Work, device_memory: float | None, price: float | None
) -> Row:
    same = BASELINE if method.same_numbers else None
    batches = work.batches_of(method.label, same)
    if device_memory is None:
        return Row(method, batches, place.devices, price=price)
    whole = method.memory.total_bytes <= device_memory
    divided = method.sharded_memory
    sharded = not whole and divided is not None and divided.total_bytes <= device_memory
    return Row(method, batches, place.devices, whole or sharded, sharded, price)


def _order(row: Row) -> tuple[bool, bool, float]:
    return row.fits is False, row.seconds is None, row.seconds or row.method.batch_s


def _best(
    rows: Sequence[Row], advice: Advice, device_memory: float | None, *, together: bool = False
) -> Row:
    """Return the row to take: the fastest that fits among the advised strategy, one machine alone
    and sharded methods.

    If the work counts batches to a loss, all strategies count. One machine is preferred if it is
    nearly as fast, as it costs less. If the advised strategy does not fit, the fastest method with
    offbeat that fits takes its place. With `together`, one machine does not count.
    """
    fitting = [row for row in rows if row.fits is not False and row.seconds is not None]
    if together:
        fitting = [row for row in fitting if row.method.machines > 1] or [
            row for row in rows if row.method.machines > 1
        ]
    if not fitting and all(row.seconds is None for row in rows):
        raise ValueError("no method has reached the loss; rehearse more iterations")
    if not fitting:
        raise ValueError(
            f"device_memory ({(device_memory or 0.0) / 1e9:.3g} GB) must be at least "
            f"{min(map(_least_bytes, rows)) / 1e9:.3g} GB, the memory of the method that needs "
            "least; use larger devices, or more of them"
        )
    advised = [row for row in fitting if row.method.strategy == advice.chosen.strategy]
    options = [option.strategy for option in advice.options]
    others = [row for row in fitting if row.method.strategy in options]
    pool = (others if rows and _counts_to_loss(rows) else advised) or others
    pool = pool + [
        r for r in fitting if r.method.strategy is None and r.method.change == CHANGES[0]
    ]
    least = min(pool, key=lambda row: row.seconds or 0.0)
    alone = [row for row in pool if row.method.machines == 1]
    for row in alone:
        if (row.seconds or 0.0) <= (least.seconds or 0.0) * (1 + AS_GOOD):
            return row
    return least


def _least_bytes(row: Row) -> float:
    memories = (row.method.memory, row.method.sharded_memory)
    return min(memory.total_bytes for memory in memories if memory is not None)


def _counts_to_loss(rows: Sequence[Row]) -> bool:
    """Return whether methods need different numbers of batches, or some never reach the loss."""
    return len({row.batches for row in rows}) > 1


# --- needs and help ------------------------------------------------------------------------------


def _with_rates(row: Row, place: Place, shares: Sequence[float]) -> Row:
    if row.method.machines == 1:
        return row
    method = row.method
    found = needs.rates_of(
        method.seconds_at, place, shares, now_s=method.iteration_s, bound_at=method.bound_at
    )
    return replace(row, rates_bps=found)


def _helps(
    method: Method,
    place: Place,
    rate_text: Callable[[float], str],
    *,
    to_loss: bool,
) -> list[Help]:
    """Return changes of the place with the time that they save, the greatest saving first.

    The time to a loss is known for this number of machines alone.
    """
    now_s, seconds_at = method.iteration_s / place.machines, method.seconds_at
    twice_bps, more = 2 * place.rate_bps, place.machines + 1
    tried: list[tuple[str, Place | None]] = [
        (rate_text(twice_bps), place.at_rate(twice_bps)),
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
    method, more = together.method, fmean(together.batches) / fmean(one.batches)
    share = place.profile.slowest().compute_s / place.fastest_machine.compute_s
    share *= more / place.batches
    found = needs.rates_of(
        method.seconds_at, place, (share,), now_s=method.iteration_s, bound_at=method.bound_at
    )
    return found[share]


def _ordinal(number: int) -> str:
    words = {2: "second", 3: "third", 4: "fourth", 5: "fifth", 6: "sixth", 7: "seventh",
             8: "eighth", 9: "ninth"}  # fmt: skip
    if number in words:
        return words[number]
    ending = {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{'th' if number // 10 % 10 == 1 else ending}"
