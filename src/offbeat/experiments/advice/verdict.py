"""Verdict: how long each method takes for an amount of training, and what would help."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean
from typing import Any, NamedTuple

from offbeat.core import words
from offbeat.core.profile import Profile
from offbeat.core.strategy.interface import Strategy
from offbeat.core.strategy.plan_memory import Memory
from offbeat.core.strategy.registry import BASELINE, create
from offbeat.experiments.advice import methods as making
from offbeat.experiments.advice.methods import Method
from offbeat.experiments.advice.place import Place
from offbeat.experiments.advice.selection import AS_GOOD, CHANGES, MAX_STALENESS, Advice, advise

DEFAULT_BATCHES = 1000


@dataclass(frozen=True)
class Work:
    """Amount of training, as batches of one device.

    Attributes:
        batches: batches of one device in all; 0 if they depend on the method.
        text: description, such as "10 M samples".
        batches_by_label: batches to the loss of each method by its label, one number per seed.
            Methods that are missing have no verdict, except those with the same numbers as DDP,
            which need as many as DDP.
        target_loss: loss to reach; None for an amount of samples or batches.
    """

    batches: float
    text: str
    batches_by_label: Mapping[str, Sequence[float]] = field(default_factory=dict)
    target_loss: float | None = None

    @classmethod
    def of(
        cls, samples: float | None = None, batch: int | None = None, iterations: float | None = None
    ) -> Work:
        """Return the work of a number of samples, or of iterations of one device.

        Args:
            samples: samples in all.
            batch: samples per iteration of one device.
            iterations: iterations that one device would need.

        Raises:
            ValueError: a number is not above 0, samples lack the batch, or both are given.
        """
        for name, value in (("samples", samples), ("batch", batch), ("iterations", iterations)):
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"{name} ({value:g}) must be a number above 0")
        if samples is None:
            count = DEFAULT_BATCHES if iterations is None else iterations
            return cls(count, f"{count_text(count)} batches")
        if iterations is not None:
            raise ValueError(
                f"iterations ({iterations:g}) and samples ({samples:g}) are two amounts of "
                "training; give one"
            )
        if batch is None:
            raise ValueError(
                f"samples ({samples:g}) need the samples per iteration of one device; add --batch N"
            )
        return cls(samples / batch, f"{count_text(samples)} samples in batches of {batch}")

    @classmethod
    def to_loss(cls, loss: float, batches_by_label: Mapping[str, Sequence[float]]) -> Work:
        """Return the work of training to a loss with the batches of each method."""
        return cls(0.0, f"to loss {loss:.4g}", batches_by_label, loss)

    def batches_of(self, method: Method) -> tuple[float, ...] | None:
        """Return the batches of a method, one number per seed; None if they are not known."""
        if self.target_loss is None:
            return (self.batches,)
        known, label = self.batches_by_label, method.label
        found = known.get(label, known.get(BASELINE) if method.same_numbers else None)
        return None if found is None else tuple(found)


def count_text(value: float) -> str:
    """Return a count as '850', '12,000' or '10 M'."""
    for unit, scale in (("T", 1e12), ("G", 1e9), ("M", 1e6)):
        if value >= scale:
            return f"{value / scale:.4g} {unit}"
    return f"{value:,.0f}" if value >= 1 else f"{value:.3g}"


@dataclass(frozen=True)
class Row:
    """A method with the time that the work takes.

    Attributes:
        method: the method.
        batches: batches of one device that it needs, one number per seed; None if unknown, as are
            the times and the cost then.
        seconds: seconds of the work, mean over seeds.
        range_s: least and greatest seconds by the uncertainty of the iteration and the spread over
            seeds.
        memory: memory on a device.
        fits: whether its memory is at most that of a device; None without a given memory.
        sharded: whether it fits only if `fully_shard` divides each replica inside its machine.
        cost: price of all machines; None without a price.
        rate_bps: least rate at which compute takes `methods.SHARE` of the time; None
            if there is none, and for one machine.
    """

    method: Method
    batches: tuple[float, ...] | None
    seconds: float | None
    range_s: tuple[float, float] | None
    memory: Memory
    fits: bool | None
    sharded: bool
    cost: float | None
    rate_bps: float | None

    def to_dict(self) -> dict[str, Any]:
        """Return the row as JSON types."""
        method, memory = self.method, self.memory
        of_method = ("change", "changes", "staleness", "machines", "iteration_s", "sent_bytes")
        own = ("seconds", "range_s", "fits", "sharded", "cost", "rate_bps")
        return {
            "method": method.label,
            "strategy": None if method.strategy is None else str(method.strategy),
            **{name: getattr(method, name) for name in of_method},
            "iteration_range_s": [method.low_s, method.high_s],
            **{name: getattr(self, name) for name in own},
            "batches": None if self.batches is None else fmean(self.batches),
            "batches_by_seed": self.batches,
            "memory_bytes": {**asdict(memory), "total_bytes": memory.total_bytes},
        }


class Help(NamedTuple):
    """A change of the machines or their network, and the share of the time that it saves; negative
    if it takes longer."""

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
        place, own = self.place, ("worthwhile_bps", "last_machine", "critical_machines", "price")
        return {
            **{name: getattr(place, name) for name in ("machines", "devices", "rate_bps")},
            "estimated": place.estimated,
            "work": {name: getattr(self.work, name) for name in ("batches", "text", "target_loss")},
            "device_memory_bytes": self.device_memory,
            "best": self.best.method.label,
            "methods": [row.to_dict() for row in self.rows],
            "helps": [{"change": text, "saved": saved} for text, saved in self.helps],
            **{name: getattr(self, name) for name in own},
        }

    def row(self, label: str) -> Row | None:
        """Return the row of a label; None if there is none."""
        return next((row for row in self.rows if row.method.label == label), None)

    @property
    def rows_within_spread(self) -> tuple[Row, ...]:
        """Return the rows that may reach the loss as fast as the best one by the spread over
        seeds."""
        if self.work.target_loss is None:
            return ()
        most_s = max(self.best.batches or ()) * self.best.method.batch_s
        known = ((row, row.batches) for row in self.rows if row is not self.best)
        return tuple(
            row for row, each in known if each and min(each) * row.method.batch_s <= most_s
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
    """Return the predictions of all methods for some machines; see `decide`. With `everything`,
    those of all strategies with their default settings, too."""
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
    for method in making.default_methods(place) if everything else ():
        found.setdefault(method.label, method)
    return Predictions(place, advice, tuple(found.values()))


def decide(
    predicted: Predictions,
    work: Work,
    *,
    device_memory: float | None = None,
    price: float | None = None,
) -> Verdict:
    """Return the verdict for a model on some machines.

    Args:
        predicted: predictions for these machines; see `predict_methods`.
        work: amount of training.
        device_memory: bytes of a device.
        price: price of a machine and hour.

    Raises:
        ValueError: nothing fits into a device, or no method reaches the loss.
    """
    place, advice = predicted.place, predicted.advice
    rows = [_row(method, work, place, device_memory, price) for method in predicted.methods]
    rows.sort(key=_order)
    if not any(row.fits is not False and row.seconds is not None for row in rows) and device_memory:
        least_bytes = min(row.method.least_memory.total_bytes for row in rows)
        raise ValueError(
            f"device_memory ({device_memory / 1e9:.3g} GB) must be at least "
            f"{least_bytes / 1e9:.3g} GB, the memory of the method that needs least; use larger "
            "devices, or more of them"
        )
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
        last_machine=making.last_paying_machine(together.method, place),
        critical_machines=critical_machines(place.profile),
        device_memory=device_memory,
        price=price,
    )


def _row(method: Method, work: Work, place: Place, room: float | None, price: float | None) -> Row:
    """Return the row of a method; `room` is the memory of a device."""
    batches = work.batches_of(method)
    seconds = range_s = cost = None
    if batches is not None:
        low, mean, high = (
            count / (method.batches * place.devices)
            for count in (min(batches), fmean(batches), max(batches))
        )
        seconds = mean * method.iteration_s
        range_s = low * method.low_s, high * method.high_s
        cost = None if price is None else price * method.machines * seconds / 3600
    fits = None if room is None else method.least_memory.total_bytes <= room
    sharded = room is not None and bool(fits) and method.memory.total_bytes > room
    memory = method.least_memory if sharded else method.memory
    rate_bps = making.least_rate(method, place) if method.machines > 1 else None
    return Row(method, batches, seconds, range_s, memory, fits, sharded, cost, rate_bps)


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
    advised = [row for row in fitting if row.method.strategy == advice.chosen.strategy]
    options = [option.strategy for option in advice.options]
    others = [row for row in fitting if row.method.strategy in options]
    pool = (others if len({row.batches for row in rows}) > 1 else advised) or others
    pool += [r for r in fitting if r.method.strategy is None and r.method.change == CHANGES[0]]
    least = min(pool, key=lambda row: row.seconds or 0.0)
    as_good_s = (least.seconds or 0.0) * (1 + AS_GOOD)
    alone = (row for row in pool if row.method.machines == 1)
    return next((row for row in alone if (row.seconds or 0.0) <= as_good_s), least)


def _worthwhile_bps(one: Row, together: Row, place: Place) -> float | None:
    """Return the least rate at which all machines together are faster than one."""
    if one.batches is None or together.batches is None:
        return None
    more = fmean(together.batches) / fmean(one.batches)
    share = place.profile.slowest().compute_s / place.fastest_machine.compute_s
    return making.least_rate(together.method, place, share * more / place.batches)


def critical_machines(profile: Profile) -> float | None:
    """Return the number of machines at which the same loss needs twice the samples; None if the
    noise of gradients was not measured.

    N machines that average every gradient train with N batches at once and need `1 + N / N_crit`
    times the least number of samples. `N_crit` is the trace of the covariance of one batch's
    gradient divided by the squared norm of the gradient, which is `K noise_sq / gradient_sq` for a
    profile of K ranks (McCandlish et al., An empirical model of large-batch training, 2018,
    equations 2.8 and 5.1). It belongs to the measured iterations; later it is greater.
    """
    noise = profile.noise
    if noise is None or not noise.gradient_sq > 0:
        return None
    return profile.world_size * noise.noise_sq / noise.gradient_sq


def _helps(method: Method, place: Place, *, to_loss: bool) -> list[Help]:
    """Return changes of the place with the time that they save, the greatest saving first.

    The time to a loss is known for this number of machines alone.
    """
    now_s = method.iteration_s / place.machines
    twice_bps, more = 2 * place.rate_bps, place.machines + 1
    tried: list[tuple[str, Place | None]] = [
        (rate(twice_bps), place.at_rate(twice_bps)),
        (f"{more} machines", place.with_machines(more)),
        ("leaving out the slowest machine", place.without_slowest()),
        ("batches in proportion to the speeds", place.with_even_times()),
    ]
    if (connected := place.with_connections()) is not None:
        tried.append((f"{connected[0]} connections per link", connected[1]))
    found = [
        Help(text, 1 - method.seconds_at(there) / there.machines / now_s)
        for text, there in tried
        if there is not None and not (to_loss and there.machines != place.machines)
    ]
    return sorted(found, key=lambda help_: -help_.saved)


def rate(rate_bps: float, count: int = 2) -> str:
    """Return a rate as '150 Mbit/s', with `count` digits."""
    return words.rate(float(f"{rate_bps:.{count}g}"))
