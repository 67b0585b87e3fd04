"""Traces: timelines of simulated and real runs, with statistics and file formats."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any, Literal

from offbeat.core.files import write_text

SCHEMA = 1
COMPUTE = "compute"  # lane of forward, backward, update and waiting

Source = Literal["simulated", "measured"]


@dataclass(frozen=True, slots=True)
class Span:
    """Interval of activity on one lane of one rank.

    Attributes:
        rank: rank of the lane.
        lane: `compute` or the name of a link.
        kind: on compute: forward, backward, update, wait, other, or, in simulations, sending
            (processor time that messages take). On links: grad, param, state, or the verb
            (reduce_scatter, all_gather, send, exchange).
        iteration: iteration of the activity.
        start_s: start, in seconds from the trace's origin.
        end_s: end, in seconds from the trace's origin.
        buckets: range of buckets [first, stop); None for the whole model.
        bytes: payload bytes of a message.
        carries: iterations [first, stop) whose gradients a message holds; None for `iteration`.
        way: (source, target) of a send, which has a span on both ranks; None for collectives.
    """

    rank: int
    lane: str
    kind: str
    iteration: int
    start_s: float
    end_s: float
    buckets: tuple[int, int] | None = None
    bytes: int = 0
    carries: tuple[int, int] | None = None
    way: tuple[int, int] | None = None

    @property
    def name(self) -> str:
        run = "" if self.buckets is None else f"[{self.buckets[0]}:{self.buckets[1]}]"
        return self.kind + run


def shift_span(span: Span, iterations: int, seconds: float = 0.0) -> Span:
    """Return a span with its iterations and times moved.

    Args:
        span: span to move.
        iterations: iterations by which it becomes later.
        seconds: seconds by which it becomes later.
    """
    carries = span.carries
    return replace(
        span,
        iteration=span.iteration + iterations,
        carries=carries and (carries[0] + iterations, carries[1] + iterations),
        start_s=span.start_s + seconds,
        end_s=span.end_s + seconds,
    )


def whole_periods(skip: int, period: int, iterations: int) -> int:
    """Return `skip` rounded up to whole periods, or `skip` if no whole period would remain.

    The first averages of a plan differ from all later ones, because the plan begins with a trial.

    Args:
        skip: smallest number of first iterations to leave out.
        period: iterations of a period.
        iterations: number of all iterations.
    """
    whole = -(-skip // period) * period
    return whole if iterations - whole >= period else skip


@dataclass(frozen=True)
class Trace:
    """Timeline of a run.

    Attributes:
        source: "simulated" or "measured".
        strategy: name of the strategy.
        ends_s: end of iteration `first + i` on each rank, as `ends_s[rank][i]`.
        starts_s: start of iteration `first` on each rank.
        spans: spans of all or some of these iterations.
        first: number of the first iteration.
        period: iterations of a period of the plan.
        notes: further facts by name.
        uneven: whether iterations differ, because of votes or because workers do not wait for each
            other, so that the mean is the only valid statistic.
    """

    source: Source
    strategy: str
    ends_s: tuple[tuple[float, ...], ...]
    starts_s: tuple[float, ...]
    spans: tuple[Span, ...] = ()
    first: int = 0
    period: int = 1
    notes: Mapping[str, Any] = field(default_factory=dict)
    uneven: bool = False

    @property
    def world_size(self) -> int:
        """Return the number of ranks."""
        return len(self.ends_s)

    @property
    def iterations(self) -> int:
        """Return the number of iterations that every rank has completed."""
        return min(len(ends) for ends in self.ends_s)

    def iteration_seconds(self) -> list[float]:
        """Return the seconds of every iteration, measured at the slowest rank."""
        return _gaps(min(self.starts_s), [max(ends) for ends in zip(*self.ends_s, strict=False)])

    def period_seconds(self, skip: int = 0) -> list[float]:
        """Return the mean iteration time of every whole period, in seconds.

        Args:
            skip: number of first iterations to leave out.
        """
        seconds = self.iteration_seconds()[skip:]
        whole = len(seconds) // self.period * self.period
        return [fmean(seconds[i : i + self.period]) for i in range(0, whole, self.period)]

    def iteration_s(self, skip: int = 0) -> float:
        """Return the seconds per iteration: the median over whole periods, or the mean if `uneven`.

        Args:
            skip: number of first iterations to leave out.

        Raises:
            ValueError: no whole period remains.
        """
        periods = self.period_seconds(skip)
        if not periods:
            raise ValueError(
                f"the trace ({self.iterations} iterations) must have a whole period "
                f"({self.period}) after the first {skip}; run more iterations"
            )
        return fmean(periods) if self.uneven else median(periods)

    def to_dict(self) -> dict[str, Any]:
        """Return the trace as a JSON-compatible dict with the schema version."""
        data: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self)}
        data |= {"schema": SCHEMA, "notes": dict(self.notes)}
        data["spans"] = spans_to_dict(self.spans)
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Trace:
        """Return the trace that a result of `to_dict` describes.

        Args:
            data: trace as JSON types.

        Raises:
            ValueError: the schema differs.
        """
        if data.get("schema") != SCHEMA:
            raise ValueError(f"schema ({data.get('schema')!r}) of the trace must be {SCHEMA}")
        values = {key: value for key, value in data.items() if key != "schema"}
        values["spans"] = spans_from_dict(values["spans"])
        values["ends_s"] = tuple(tuple(ends) for ends in values["ends_s"])
        values["starts_s"] = tuple(values["starts_s"])
        return cls(**values)

    def save(self, path: str | Path) -> None:
        """Write the trace as JSON.

        Args:
            path: file to write.
        """
        write_text(path, json.dumps(self.to_dict()))

    @classmethod
    def load(cls, path: str | Path) -> Trace:
        """Read a trace from JSON.

        Args:
            path: file that `save` has written.

        Raises:
            ValueError: the file is not JSON, or its schema differs.
        """
        return cls.from_dict(json.loads(Path(path).read_text()))


def spans_to_dict(spans: Iterable[Span]) -> dict[str, Any]:
    """Return spans as a JSON-compatible dict: the field names, and one row of values per span."""
    names = [f.name for f in fields(Span)]
    return {"fields": names, "rows": [[getattr(span, name) for name in names] for span in spans]}


def spans_from_dict(data: Mapping[str, Any]) -> tuple[Span, ...]:
    """Return the spans that a result of `spans_to_dict` describes."""
    return tuple(_span(dict(zip(data["fields"], row, strict=True))) for row in data["rows"])


def _gaps(start: float, ends: list[float]) -> list[float]:
    return [end - begin for begin, end in zip([start, *ends], ends, strict=False)]


def _span(values: dict[str, Any]) -> Span:
    pairs: dict[str, Any] = {
        name: None if values.get(name) is None else tuple(values[name])
        for name in ("buckets", "carries", "way")
    }
    return Span(**(values | pairs))
