"""Plans: what moves, released at which moment, due by which moment, repeated over a period.

A plan is pure data. It holds no tensors, no times and no addresses; `sim` interprets it in
virtual time and `runtime` on a real model.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, get_args

SCHEMA = 1

Point = Literal["forward", "grad", "step", "updated", "end"]
Kind = Literal["grad", "param", "state"]
Verb = Literal["mean", "reduce_scatter", "all_gather"]
Updates = Literal["at_step", "in_backward", "on_arrival"]
Merge = Literal["sum", "mean"]

POINTS: tuple[str, ...] = get_args(Point)
KINDS: tuple[str, ...] = get_args(Kind)
VERBS: tuple[str, ...] = get_args(Verb)
CHANNEL = "#"


@dataclass(frozen=True, slots=True)
class Moment:
    """A point of one worker's own iteration.

    forward(b): bucket b's forward begins; grad(b): its gradient is complete; step: the user
    called `optimizer.step()`; updated(b): its local update is done; end: `optimizer.step()`
    returns. `bucket=None` means the whole model, `lag` counts iterations after the transfer's own.
    With updates on arrival, `updated(b)` comes right after `forward(b)+1` and before its compute.
    """

    point: Point
    bucket: int | None = None
    lag: int = 0

    def __str__(self) -> str:
        where = "" if self.bucket is None else f"({self.bucket})"
        return f"{self.point}{where}" + (f"+{self.lag}" if self.lag else "")


@dataclass(frozen=True, slots=True)
class Payload:
    """What moves: one kind of tensor of a run of neighbouring buckets (backward order).

    grad: gradients; param: parameters and floating-point buffers; state: optimizer state.
    Of `parts` equal slices of them it holds `width` from `part` on, by default all. `age` counts
    generations of gradients: 0 is the one that this iteration adds to, 1 the one closed before.
    """

    kind: Kind
    buckets: range
    part: int = 0
    parts: int = 1
    width: int = 1
    age: int = 0

    def __str__(self) -> str:
        last = "" if self.width == 1 else f"-{self.part + self.width}"
        slice_ = "" if self.parts == 1 else f"/{self.part + 1}{last}of{self.parts}"
        age = f"-{self.age}" if self.age else ""
        return f"{self.kind}{age}[{self.buckets.start}:{self.buckets.stop}]{slice_}"

    def overlaps(self, other: Payload) -> bool:
        """Whether both hold some tensor element (or may, when cut from different runs)."""
        apart = (self.part + self.width) * other.parts <= other.part * self.parts or (
            other.part + other.width
        ) * self.parts <= self.part * other.parts
        return (
            self.kind == other.kind
            and self.age == other.age
            and self.buckets.start < other.buckets.stop
            and other.buckets.start < self.buckets.stop
            and not (apart and self.buckets == other.buckets)
        )

    def slice_of(self, size: int) -> slice:
        """Which of `size` elements laid end to end it holds."""
        return slice(size * self.part // self.parts, size * (self.part + self.width) // self.parts)


@dataclass(frozen=True, slots=True)
class Transfer:
    """One rule: `payload` is averaged over all ranks, on `link`, in the iterations of `phases`.

    The order of a plan's transfers is the order in which every rank issues them on a link; a
    link's name may end in `#n`, its n-th further channel. `verb`: averaged at once (mean), or in
    two halves: reduce_scatter leaves each rank one part of the mean, all_gather spreads the parts.
    """

    payload: Payload
    after: Moment
    before: Moment
    phases: frozenset[int]
    link: str
    verb: Verb = "mean"

    @property
    def id(self) -> str:
        """Name, unique among the transfers of one iteration, the same on every rank."""
        verb = "" if self.verb == "mean" else f"{self.verb} "
        return f"{verb}{self.payload}@{self.link}"


@dataclass(frozen=True)
class Plan:
    """Transfers of `prologue` iterations that happen once, then of `period` that repeat.

    Iteration t has phase t in the prologue, then prologue + (t - prologue) % period.
    `updates` says when a bucket's optimizer step happens: `at_step` inside `optimizer.step()`,
    `in_backward` as soon as the bucket's gradient exists, `on_arrival` right before the bucket's
    next forward, when its averaged gradient has landed.

    With `closes`, gradients are merged and late: what has been added up since the last close forms
    a generation when an iteration of these phases ends, and is applied (its `merge` over those
    iterations) at the step of the next such iteration; other iterations do not step.
    """

    strategy: str
    buckets: int
    transfers: tuple[Transfer, ...]
    period: int = 1
    prologue: int = 0
    updates: Updates = "at_step"
    closes: frozenset[int] | None = None
    merge: Merge = "sum"
    notes: Mapping[str, Any] = field(default_factory=dict)

    @property
    def phases(self) -> range:
        return range(self.prologue + self.period)

    def phase(self, iteration: int) -> int:
        """Phase of an iteration (counted from 0)."""
        if iteration < self.prologue:
            return iteration
        return self.prologue + (iteration - self.prologue) % self.period

    @cached_property
    def _by_phase(self) -> dict[int, tuple[Transfer, ...]]:
        table: dict[int, list[Transfer]] = {}
        for transfer in self.transfers:
            for phase in transfer.phases:
                table.setdefault(phase, []).append(transfer)
        return {phase: tuple(transfers) for phase, transfers in table.items()}

    def at(self, iteration: int) -> tuple[Transfer, ...]:
        """Transfers of one iteration, in issue order."""
        return self._by_phase.get(self.phase(iteration), ())

    def generation(self, iteration: int, age: int = 0) -> range:
        """Iterations whose gradients are merged with this one's, or `age` generations before;
        empty if there was none."""
        if self.closes is None:
            return range(max(iteration - age, 0), max(iteration - age + 1, 0))
        stop = iteration
        while not self.closing(stop):
            stop += 1
        start = self._after_last_close(iteration)
        for _ in range(age):
            start, stop = self._after_last_close(start - 1), start - 1
        return range(start, stop + 1)

    def _after_last_close(self, iteration: int) -> int:
        start = max(iteration, 0)
        while start > 0 and not self.closing(start - 1):
            start -= 1
        return start

    def closing(self, iteration: int) -> bool:
        """Whether the gradients added up so far are complete when this iteration ends."""
        return self.closes is None or self.phase(iteration) in self.closes

    def applied(self, iteration: int) -> range:
        """Iterations whose gradients this iteration's optimizer step applies; empty: no step."""
        if not self.closing(iteration):
            return range(iteration, iteration)
        return self.generation(iteration, age=0 if self.closes is None else 1)

    @property
    def links(self) -> tuple[str, ...]:
        """Names of the links that the plan uses, in order of first use."""
        return tuple(dict.fromkeys(transfer.link for transfer in self.transfers))

    @cached_property
    def digest(self) -> str:
        """Hash of everything that ranks must agree on (the notes are left out)."""
        data = self.to_dict()
        del data["notes"]
        text = json.dumps(data, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def __str__(self) -> str:
        return self.text()

    def text(self, mark: Iterable[Transfer] = ()) -> str:
        """One line per transfer; the transfers in `mark` get an arrow."""
        marked = set(mark)
        size, cycle = _count(self.buckets, "bucket"), _count(self.period, "iteration")
        head = f"{self.strategy}: {size}, period {cycle}"
        head += f" after a prologue of {self.prologue}" if self.prologue else ""
        head += f", updates {self.updates.replace('_', ' ')}"
        if self.closes is not None:
            head += f", generations ({self.merge}) close in {format_phases(self.closes)}"
        rows = [
            (
                str(t.payload) if t.verb == "mean" else f"{t.verb} {t.payload}",
                f"after {t.after}",
                f"before {t.before}",
                f"in {format_phases(t.phases)}",
                f"on {t.link}",
            )
            for t in self.transfers
        ]
        widths = [max((len(row[i]) for row in rows), default=0) for i in range(5)]
        lines = [head]
        for transfer, row in zip(self.transfers, rows, strict=True):
            cells = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
            lines.append(("-> " if transfer in marked else "   ") + cells.rstrip())
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form, with the schema version."""
        return {
            "schema": SCHEMA,
            "strategy": self.strategy,
            "buckets": self.buckets,
            "period": self.period,
            "prologue": self.prologue,
            "updates": self.updates,
            **_generations_to_dict(self),
            "transfers": [_transfer_to_dict(t) for t in self.transfers],
            "notes": dict(self.notes),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Plan:
        """Inverse of `to_dict`; ValueError on another schema or a malformed field."""
        if data.get("schema") != SCHEMA:
            raise ValueError(
                f"schema ({data.get('schema')!r}) of the plan must be {SCHEMA}; "
                "write the plan again with `offbeat plan`"
            )
        try:
            return cls(
                strategy=data["strategy"],
                buckets=int(data["buckets"]),
                transfers=tuple(_transfer_from_dict(t) for t in data["transfers"]),
                period=int(data["period"]),
                prologue=int(data["prologue"]),
                updates=_one_of("updates", data["updates"], get_args(Updates)),
                closes=parse_phases(data["closes"]) if "closes" in data else None,
                merge=_one_of("merge", data.get("merge", "sum"), get_args(Merge)),
                notes=data.get("notes", {}),
            )
        except KeyError as error:
            raise ValueError(f"the plan lacks the field {error.args[0]!r}") from None


def transfer(
    kind: Kind,
    buckets: range,
    *,
    after: Moment,
    before: Moment,
    phases: Iterable[int],
    link: str,
    part: int = 0,
    parts: int = 1,
    width: int = 1,
    age: int = 0,
    verb: Verb = "mean",
) -> Transfer:
    """A transfer from its fields, the short way to write one."""
    payload = Payload(kind, buckets, part, parts, width, age)
    return Transfer(payload, after, before, frozenset(phases), link, verb)


def channel(link: str, index: int) -> str:
    """Name of a link's index-th channel: the link itself, then `link#1`, `link#2`, ..."""
    return f"{link}{CHANNEL}{index}" if index else link


def base_link(name: str) -> str:
    """The link that a channel belongs to."""
    return name.partition(CHANNEL)[0]


def format_phases(phases: Iterable[int]) -> str:
    """Compact text of a set of phases: {0, 1, 2, 5} -> '0-2,5'."""
    runs: list[list[int]] = []
    for phase in sorted(phases):
        if runs and phase == runs[-1][1] + 1:
            runs[-1][1] = phase
        else:
            runs.append([phase, phase])
    return ",".join(f"{a}-{b}" if a != b else str(a) for a, b in runs) or "none"


def parse_phases(text: str) -> frozenset[int]:
    """Inverse of `format_phases`."""
    phases: set[int] = set()
    for run in text.split(",") if text != "none" else ():
        first, _, last = run.partition("-")
        phases.update(range(int(first), int(last or first) + 1))
    return frozenset(phases)


def _count(number: int, what: str) -> str:
    return f"{number} {what}" + ("s" if number != 1 else "")


def _generations_to_dict(plan: Plan) -> dict[str, Any]:
    if plan.closes is None:
        return {}
    return {"closes": format_phases(plan.closes), "merge": plan.merge}


def _transfer_to_dict(t: Transfer) -> dict[str, Any]:
    slice_: dict[str, int] = {}
    if t.payload.parts > 1:
        slice_ = {"part": t.payload.part, "parts": t.payload.parts}
    if t.payload.width > 1:
        slice_["width"] = t.payload.width
    if t.payload.age:
        slice_["age"] = t.payload.age
    return {
        "verb": t.verb,
        "kind": t.payload.kind,
        "buckets": [t.payload.buckets.start, t.payload.buckets.stop],
        **slice_,
        "after": str(t.after),
        "before": str(t.before),
        "phases": format_phases(t.phases),
        "link": t.link,
    }


def _transfer_from_dict(data: Mapping[str, Any]) -> Transfer:
    start, stop = data["buckets"]
    run = range(int(start), int(stop))
    kind = _one_of("kind", data["kind"], KINDS)
    return Transfer(
        payload=Payload(
            kind,
            run,
            *(
                int(data.get(f, d))
                for f, d in (("part", 0), ("parts", 1), ("width", 1), ("age", 0))
            ),
        ),
        after=parse_moment(data["after"]),
        before=parse_moment(data["before"]),
        phases=parse_phases(data["phases"]),
        link=data["link"],
        verb=_one_of("verb", data["verb"], VERBS),
    )


def parse_moment(text: str) -> Moment:
    """Inverse of `str(moment)`: 'grad(3)', 'end', 'forward(0)+1'."""
    place, _, lag = text.partition("+")
    point, _, bucket = place.rstrip(")").partition("(")
    return Moment(
        _one_of("moment", point, POINTS), int(bucket) if bucket else None, int(lag) if lag else 0
    )


def _one_of(name: str, value: Any, allowed: Iterable[str]) -> Any:
    allowed = tuple(allowed)
    if value not in allowed:
        raise ValueError(f"{name} ({value!r}) must be one of {', '.join(allowed)}")
    return value
