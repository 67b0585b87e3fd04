"""Summary of a comparison: one row of numbers per contestant."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, median, quantiles
from typing import Literal

from offbeat.core import words
from offbeat.core.plan import INSIDE, base_link
from offbeat.core.sim.trace import COMPUTE
from offbeat.core.transport.topology import Topology
from offbeat.experiments.record.disturbed import Disturbance
from offbeat.experiments.record.run_directory import Contestant, Repetition, Run, count_skipped
from offbeat.experiments.report.breakdown import Split, split_of
from offbeat.experiments.report.losses import (
    Curve,
    final_loss,
    has_risen,
    is_diverged,
    is_same_in_repetitions,
    is_still_falling,
    rank_mean,
    spread_of_final_losses,
    target_loss,
)
from offbeat.experiments.report.metrics import final_metrics, metric_curve, reach, rises
from offbeat.experiments.report.votes import votes_of

YARDSTICK = "ddp"

Interval = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Row:
    """Numbers of one contestant. An unknown number is None.

    Attributes:
        label: label of the contestant.
        strategy: strategy with its settings.
        repetitions: number of counted repetitions.
        failed: number of repetitions that began and are not counted.
        iteration_s: measured seconds per iteration, median over repetitions.
        spread_s: lowest and highest repetition, or quartiles over periods of a single repetition.
        spread_of: which of the two `spread_s` is.
        iterations_per_s: measured iterations per second.
        updates_per_s: measured updates per second; fewer than iterations if gradients are merged.
        predicted_s: predicted seconds per iteration.
        predicted_error: predicted / measured - 1.
        bound_s: lower bound of the seconds per iteration.
        exposed_s: predicted seconds of communication per iteration that compute does not hide.
        sent_bytes: measured payload bytes per iteration and replica on links between replicas,
            median over repetitions, as are the next two.
        lssr: share of synchronizations that votes omitted: local / (local + synchronous).
        spared_bytes: bytes per rank that votes omitted over the whole run.
        final_loss: mean loss at the end; None if not finite.
        target_loss: loss to which the time is measured.
        target_s: seconds (of `counted_seconds`) until the smoothed loss reached `target_loss`,
            median over repetitions; None if not reached or if the final loss is not finite.
        target_spread_s: lowest and highest `target_s` of a repetition.
        target_iterations: iterations until the target, median over repetitions.
        speedup: seconds per iteration of the fastest DDP over those of this contestant.
        emulated: whether layers slept instead of computing. Displayed with each measured number.
        pace: hosts computed at 1/pace of a core; 0 at full speed. Displayed like `emulated`.
        cut: whether the counted repetitions were cut short.
        falling: whether the loss was still falling at the end.
        rising: whether the loss ended above its beginning.
        diverged: whether the loss was not finite at the end.
        final_spread: lowest and highest final loss of a repetition.
        seeds: seed of each counted repetition.
        same_losses: whether repetitions began with equal losses, which shows that the script
            ignores its seed.
        device_s: predicted seconds per iteration on the user's device.
        split: breakdown of the prediction's error.
        disturbed: disturbances of counted repetitions.
        repeated: number of counted repetitions that replace a disturbed one.
        is_yardstick: whether the strategy is DDP.
        iterations: iterations of a counted repetition, median.
        metrics: last value of each metric that the script reported, mean over repetitions.
        target_metric: name of the metric that replaces the loss as the target; None for the loss.
        target_value: value of `target_metric` to which `target_s` is measured.
        problem: first problem of a strategy without a counted repetition; empty if it was not run.
    """

    label: str
    strategy: str
    repetitions: int
    failed: int
    iteration_s: float | None = None
    spread_s: Interval | None = None
    spread_of: Literal["repetitions", "periods"] | None = None
    iterations_per_s: float | None = None
    updates_per_s: float | None = None
    predicted_s: float | None = None
    predicted_error: float | None = None
    bound_s: float | None = None
    exposed_s: float | None = None
    sent_bytes: float | None = None
    lssr: float | None = None
    spared_bytes: float | None = None
    final_loss: float | None = None
    target_loss: float | None = None
    target_s: float | None = None
    target_spread_s: Interval | None = None
    target_iterations: float | None = None
    speedup: float | None = None
    emulated: bool = False
    pace: float = 0.0
    cut: bool = False
    falling: bool = False
    rising: bool = False
    diverged: bool = False
    final_spread: Interval | None = None
    seeds: tuple[int, ...] = ()
    same_losses: bool = False
    device_s: float | None = None
    split: Split | None = None
    disturbed: tuple[Disturbance, ...] = ()
    repeated: int = 0
    is_yardstick: bool = False
    iterations: int = 0
    problem: str = ""
    metrics: Mapping[str, float] = field(default_factory=dict)
    target_metric: str | None = None
    target_value: float | None = None

    @property
    def goal(self) -> str | None:
        """Target in words, such as "loss 2.97" or "accuracy 0.97"; None without one."""
        if self.target_metric is not None and self.target_value is not None:
            return f"{self.target_metric} {self.target_value:g}"
        return None if self.target_loss is None else f"loss {words.loss(self.target_loss)}"

    @property
    def not_run(self) -> bool:
        """Whether the run ended before the strategy began."""
        return self.iteration_s is None and not self.problem

    @property
    def can_win(self) -> bool:
        """Whether the row is a valid measurement of a strategy whose loss did not rise."""
        return self.iteration_s is not None and not (self.disturbed or self.rising or self.diverged)

    @property
    def waits_share(self) -> float | None:
        """Share of an iteration in which a host waits for its messages; None if unknown."""
        parts = None if self.split is None else self.split.measured
        return parts.messages_s / parts.total_s if parts is not None and parts.total_s else None

    @property
    def waits_estimated(self) -> bool:
        """Whether `waits_share` and `compute_s` are estimates."""
        return self.split is not None and self.split.estimated

    @property
    def compute_s(self) -> float | None:
        """Measured seconds of compute per iteration; None if unknown."""
        return None if self.split is None else self.split.measured.compute_s


def merges_gradients(rows: Sequence[Row]) -> bool:
    """Whether a contestant has iterations without an update."""
    return any(row.updates_per_s != row.iterations_per_s for row in rows)


def summarize(run: Run) -> list[Row]:
    """Return a row per contestant, in the order of the run."""
    target = target_loss(run)
    rows = [_row(run, contestant, target) for contestant in run.contestants]
    yardsticks = [row.iteration_s for row in rows if row.is_yardstick and row.iteration_s]
    if not yardsticks:
        return rows
    return [
        row if row.iteration_s is None else replace(row, speedup=min(yardsticks) / row.iteration_s)
        for row in rows
    ]


def repetition_rows(run: Run) -> list[tuple[int, Row]]:
    """Return a row per contestant and repetition, each with the number of the repetition."""
    target = target_loss(run)
    return [
        (rep.index, _row(run, replace(contestant, repetitions=(rep,)), target))
        for contestant in run.contestants
        for rep in contestant.repetitions
    ]


def rank_rows(rows: Sequence[Row]) -> list[Row]:
    """Sort rows by seconds to the target, then by seconds per iteration.

    The first row can win, if any row can. Rows without a measurement come last.
    """
    order = sorted(rows, key=lambda row: (_or_inf(row.target_s), _or_inf(row.iteration_s)))
    first = next((row for row in order if row.can_win), None)
    return order if first is None else [first, *(row for row in order if row is not first)]


def iteration_s(run: Run, rep: Repetition) -> float | None:
    """Return seconds per iteration of a repetition; None without a whole measured period."""
    try:
        return rep.trace.iteration_s(count_skipped(run, rep))
    except ValueError:
        return None


def counted_seconds(rep: Repetition) -> Callable[[int, float], float]:
    """Return a function of an iteration and its seconds from the trace's origin. It returns the
    seconds since `Repetition.zero_s`."""
    trace, zero_s = rep.trace, rep.zero_s
    if zero_s is None:
        zero_s = min(trace.starts_s, default=0.0) + sum(trace.iteration_seconds()[:1])
    return lambda _, seconds: max(0.0, seconds - zero_s)


def counted_curve(rep: Repetition) -> Curve:
    """Return the mean losses of a repetition at the seconds of `counted_seconds`."""
    return shift_curve(rep, rank_mean(rep))


def shift_curve(rep: Repetition, curve: Curve) -> Curve:
    """Return a curve at the seconds of `counted_seconds`."""
    seconds_of = counted_seconds(rep)
    return replace(curve, seconds=tuple(map(seconds_of, curve.iterations, curve.seconds)))


def paces(run: Run, rep: Repetition) -> tuple[float, float] | None:
    """Return (iterations, updates) per second of a repetition, without skipped iterations."""
    trace, start = rep.trace, count_skipped(run, rep)
    seconds, first = sum(trace.iteration_seconds()[start:]), trace.first + start
    if not seconds:
        return None
    stop = trace.first + trace.iterations
    without = {i for record in rep.ranks for i in record.without_update if first <= i < stop}
    return (stop - first) / seconds, (stop - first - len(without)) / seconds


def sent_bytes(run: Run, rep: Repetition) -> float | None:
    """Return payload bytes per iteration and replica on links between replicas.

    With votes, the mean is over all iterations with votes. Otherwise it is over the recorded whole
    periods after the skipped iterations, or over the whole run if no messages were recorded.
    """
    nodes = Topology.from_record(rep.trace.notes)
    per_replica = 1.0 if nodes is None else nodes.ranks / nodes.replicas
    voted = votes_of(rep)
    if voted is not None:
        parts = per_replica if nodes is not None and nodes.sharded else 1
        return parts * voted.sent_bytes / len(voted.iterations)
    by_rank = _bytes_of_periods(run, rep)
    if by_rank is None:
        known = [record.sent_bytes for record in rep.ranks if record.sent_bytes]
        if not known or not rep.trace.iterations:
            return None
        totals = [sum(n for name, n in sent.items() if base_link(name) != INSIDE) for sent in known]
        by_rank = fmean(totals) / rep.trace.iterations
    return per_replica * by_rank


def _row(run: Run, contestant: Contestant, target: float | None) -> Row:
    reps = contestant.complete
    measured = [pace for rep in reps if (pace := paces(run, rep)) is not None]
    voted = [votes for rep in reps if (votes := votes_of(rep)) is not None]
    row = Row(
        label=contestant.label,
        strategy=contestant.text,
        repetitions=len(reps),
        failed=sum(rep.has_begun for rep in contestant.repetitions) - len(reps),
        iterations_per_s=_median(pace[0] for pace in measured),
        updates_per_s=_median(pace[1] for pace in measured),
        sent_bytes=_median(sent_bytes(run, rep) for rep in reps),
        lssr=_median(v.lssr for v in voted),
        spared_bytes=_median(v.spared_bytes for v in voted),
        final_loss=final_loss(contestant),
        target_loss=target,
        emulated=run.emulated,
        pace=run.profile.pace if run.profile else 0.0,
        cut=contestant.cut,
        device_s=run.device["seconds"].get(contestant.label) if run.device else None,
        disturbed=tuple(d for rep in reps if (d := rep.disturbance) is not None),
        repeated=sum(rep.repeated for rep in reps),
        falling=not run.emulated and is_still_falling(contestant),
        rising=not run.emulated and has_risen(contestant),
        diverged=not run.emulated and is_diverged(contestant),
        final_spread=spread_of_final_losses(contestant),
        seeds=tuple(run.seeds[rep.index] for rep in reps if rep.index < len(run.seeds)),
        same_losses=not run.emulated and is_same_in_repetitions(contestant),
        is_yardstick=contestant.strategy == YARDSTICK,
        iterations=round(_median(rep.trace.iterations for rep in reps) or 0),
        problem="" if reps else _first_problem(contestant),
        metrics=final_metrics(contestant),
    )
    row = _with_times(row, run, reps)
    row = _with_prediction(row, run, contestant)
    if run.target is not None:
        name, value = run.target["name"], run.target["value"]
        row = replace(row, target_metric=name, target_value=value)
        rising = rises(run.contestants, name, value)
        curves = [shift_curve(rep, metric_curve(rep, name)) for rep in reps]
        return _with_target_times(row, [reach(one, value, rising=rising) for one in curves])
    diverged = row.final_loss is None
    return row if target is None or diverged else _with_target(row, reps, target)


def _first_problem(contestant: Contestant) -> str:
    """Return the first problem of a strategy without a counted repetition; empty if not run."""
    begun = [rep for rep in contestant.repetitions if rep.has_begun]
    repetitions = [text for rep in begun for text in (*rep.cuts, *rep.problems)]
    return next(iter([*contestant.problems, *repetitions]), "")


def _with_times(row: Row, run: Run, reps: Sequence[Repetition]) -> Row:
    times = [s for rep in reps if (s := iteration_s(run, rep)) is not None]
    if not times:
        return row
    if len(times) > 1:
        return replace(
            row,
            iteration_s=median(times),
            spread_s=(min(times), max(times)),
            spread_of="repetitions",
        )
    periods = [s for rep in reps for s in rep.trace.period_seconds(count_skipped(run, rep))]
    if len(periods) < 2:
        return replace(row, iteration_s=times[0])
    low, _, high = quantiles(periods, n=4, method="inclusive")
    return replace(row, iteration_s=times[0], spread_s=(low, high), spread_of="periods")


def _with_prediction(row: Row, run: Run, contestant: Contestant) -> Row:
    trace = contestant.predicted
    if trace is None:
        return row
    notes = trace.notes
    predicted = notes.get("iteration_s") or trace.iteration_s()
    if run.rehearsed:  # its times are the prediction
        split = split_of(run, contestant, predicted, row.iteration_s)
        return replace(row, bound_s=notes.get("bound_s"), split=split)
    return replace(
        row,
        predicted_s=predicted,
        predicted_error=predicted / row.iteration_s - 1 if row.iteration_s else None,
        bound_s=notes.get("bound_s"),
        exposed_s=notes.get("exposed_s"),
        split=split_of(run, contestant, predicted, row.iteration_s),
    )


def _with_target(row: Row, reps: Sequence[Repetition], target: float) -> Row:
    return _with_target_times(row, [counted_curve(rep).smooth().reach(target) for rep in reps])


def _with_target_times(row: Row, found: Sequence[tuple[int, float] | None]) -> Row:
    """Return the row with (iteration, seconds) of the target in each repetition; None: never."""
    reached = [entry or (math.inf, math.inf) for entry in found]
    if not reached:
        return row
    times = [seconds for _, seconds in reached]
    if math.isinf(median(times)):
        return row
    spread = (min(times), max(times)) if len(times) > 1 and max(times) < math.inf else None
    return replace(
        row,
        target_s=median(times),
        target_spread_s=spread,
        target_iterations=median([iteration + 1 for iteration, _ in reached]),
    )


def _bytes_of_periods(run: Run, rep: Repetition) -> float | None:
    """Return bytes per iteration and rank on links between replicas, from the recorded spans; None
    without a whole period."""
    trace, after = rep.trace, count_skipped(run, rep) + rep.trace.first
    seen = {span.iteration for span in trace.spans if span.iteration >= after}
    whole = len(seen) // trace.period * trace.period
    counted = set(sorted(seen)[:whole])
    lanes = {span.lane for span in trace.spans} - {COMPUTE}
    lanes = {lane for lane in lanes if base_link(lane) != INSIDE}
    total = sum(s.bytes for s in trace.spans if s.lane in lanes and s.iteration in counted)
    return total / whole / len(rep.ranks) if total else None


def _median(values: Iterable[float | None]) -> float | None:
    """Return the median of the known values; None without one."""
    return median(known) if (known := [value for value in values if value is not None]) else None


def _or_inf(value: float | None) -> float:
    return math.inf if value is None else value
