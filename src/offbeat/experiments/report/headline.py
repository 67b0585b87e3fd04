"""Headline of a comparison: the first strategy, its factor, and reservations.

`rank_rows` (summary.py) decides which strategy is first.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from offbeat.core import words
from offbeat.core.profile import Profile
from offbeat.core.units import parse_rate_bps
from offbeat.experiments.record.disturbed import describe_disturbances
from offbeat.experiments.record.run_directory import Run
from offbeat.experiments.report.losses import first_loss
from offbeat.experiments.report.summary import Interval, Row, rank_rows

APART = 0.02  # least reported difference of the numbers of iterations
OFF = 0.1  # least reported error of the predicted ratio
CEILING = 1.5  # largest ratio to DDP for which the ceiling is reported
SHOWN = 3  # reservations in the headline
REHEARSED = "rehearsed: losses real, time simulated"


@dataclass(frozen=True, slots=True)
class Headline:
    """Result of a comparison.

    Attributes:
        best: row of the winner; None if nothing was measured, or every strategy was disturbed.
        sentence: the result.
        reservations: sentences that change how the result is read, the most important first.
    """

    best: Row | None
    sentence: str
    reservations: tuple[str, ...] = ()


def headline(run: Run, rows: Sequence[Row]) -> Headline:
    """Return the headline of a run. `rows` are the result of `summarize`."""
    order = [row for row in rank_rows(rows) if row.iteration_s is not None]
    if not order:
        first = next(iter(run.failures()), "no strategy finished a repetition")
        return Headline(None, f"Nothing was measured: {first.rstrip('.')}.")
    best, names = order[0], display_names(rows)
    if len(rows) == 1:
        return Headline(best, _describe_single(best, names), _own_reservations(run, best, names))
    if all(row.disturbed for row in order):
        causes = [d for row in order for d in row.disturbed]
        cause = describe_disturbances(causes, "Every strategy", 1)
        sentence = f"Nothing compares. {cause} Run again on an idle machine."
        others = [replace(row, disturbed=()) for row in rows]
        found = [text for row in others for text in _trouble(run, row, names)]
        return Headline(None, sentence, tuple(found[:SHOWN]))
    base = _reference_row(order)
    sentence = _compare(run, order, base, names)
    rows = sorted(rows, key=lambda row: row.label != best.label)
    found = [text for row in rows for text in _trouble(run, row, names)]
    found += _reservations(best, base, names)
    return Headline(best, sentence, tuple(found[:SHOWN]))


def display_names(rows: Sequence[Row]) -> dict[str, str]:
    """Return a short name by label: the strategy, numbered if the label has settings too."""
    names, number = {}, 0
    for row in rows:
        name = typed_text(row).partition(":")[0]
        if name != row.label:
            number += 1
            name = f"{name} [{number}]"
        names[row.label] = name
    return names


def typed_text(row: Row) -> str:
    """Return the strategy with its settings as on the command line: 'deft:solver=exact'."""
    return re.sub(r"-(\w+=)", r":\1", row.label)


def _compare(run: Run, order: Sequence[Row], base: Row, names: dict[str, str]) -> str:
    """Return the first sentence that holds, for at least two strategies."""
    best = order[0]
    own, other = names[best.label], names[base.label]
    goal = best.goal
    if best.target_s is None or goal is None:
        return _compare_iterations(run, best, base, names)
    own_s = words.seconds(best.target_s)
    if all(row.target_s is None for row in order[1:]):
        return f"{own} is the only one to reach {goal}, in {own_s}."
    sooner = [row for row in order[1:] if row.target_s and row.target_s < best.target_s]
    if sooner:  # rows that cannot win, for a reason that is among the reservations
        others = " and ".join(names[row.label] for row in sooner)
        return f"{own} reaches {goal} in {own_s}. {others} took less time, but that does not count."
    if best.is_yardstick:
        return f"{own} reaches {goal} first, in {own_s}: nothing here is faster on this network."
    if base.target_s is None:
        count = words.count_text(base.iterations, "iteration")
        return f"{own} reaches {goal} in {own_s}; {other} does not in {count}."
    times = words.factor(base.target_s / best.target_s)
    other_s = words.seconds(base.target_s)
    second = order[1]
    if _has_overlap(best.target_spread_s, second.target_spread_s):
        if second is base:
            return f"{own} and {other} reach {goal} in about {own_s}: it is a draw."
        return (
            f"{own} and {names[second.label]} reach {goal} in about {own_s}, {other} in "
            f"{other_s}: {times} times sooner. Between the two it is a draw."
        )
    return f"{own} reaches {goal} in {own_s}, {other} in {other_s}: {times} times sooner."


def _compare_iterations(run: Run, best: Row, base: Row, names: dict[str, str]) -> str:
    if best is base or not best.iteration_s or not base.iteration_s:
        return f"{_iteration_text(best, names)}. {_why_no_target(run)}"
    times = words.factor(base.iteration_s / best.iteration_s)
    ranges = [row.spread_s if row.spread_of == "repetitions" else None for row in (best, base)]
    result = "it is a draw" if _has_overlap(*ranges) else f"{times} times less"
    return (
        f"{_iteration_text(best, names)}, {names[base.label]} {words.seconds(base.iteration_s)}: "
        f"{result}. {_why_no_target(run)}"
    )


def _iteration_text(row: Row, names: dict[str, str]) -> str:
    return f"{names[row.label]} takes {words.seconds(row.iteration_s)} per iteration"


def _why_no_target(run: Run) -> str:
    if run.target is not None:
        return f"No strategy reached {run.target['name']} {run.target['value']:g}."
    if run.emulated:
        return "Losses do not compare: layers sleep instead of computing."
    if not any(record.losses for _, _, record in run.records()):
        return "Losses do not compare: the script reports none."
    if run.target_loss is not None:
        return f"No strategy reached loss {words.loss(run.target_loss)}."
    return "Losses do not compare: none fell."


def _describe_single(row: Row, names: dict[str, str]) -> str:
    text = _iteration_text(row, names)
    if row.waits_share is not None:
        text += (
            f", {_estimate_sign(row)}{words.percent(row.waits_share)} of it waiting for the network"
        )
    return text + "."


def _own_reservations(run: Run, row: Row, names: dict[str, str]) -> tuple[str, ...]:
    found = [*_trouble(run, row, names)]
    if row.predicted_s is not None:
        found.append(f"Predicted: {words.seconds(row.predicted_s)}.")
    return tuple(found)


def _trouble(run: Run, row: Row, names: dict[str, str]) -> Iterator[str]:
    """Yield what makes the numbers of a row no measurement, or no success."""
    name = names[row.label]
    if row.iteration_s is None:
        yield f"{name} was not run." if row.not_run else f"{name} failed."
    elif row.cut:
        yield f"{name} stopped before its end."
    if row.disturbed:
        cause = describe_disturbances(row.disturbed, name, row.repetitions)
        yield f"{cause} It does not compare; run again."
    if row.diverged:
        yield f"The loss of {name} is not finite at the end: it does not learn."
    elif row.rising:
        [contestant] = [c for c in run.contestants if c.label == row.label]
        yield (
            f"The loss of {name} rose from {words.loss(first_loss(contestant))} to "
            f"{words.loss(row.final_loss)}: it does not learn."
        )


def _reservations(best: Row, base: Row, names: dict[str, str]) -> Iterator[str]:
    own, other = names[best.label], names[base.label]
    if best is base:
        return
    if best.waits_share is not None and base.waits_share is not None:
        shares = [f"{_estimate_sign(row)}{words.percent(row.waits_share)}" for row in (base, best)]
        yield f"{other} waits for the network {shares[0]} of the time, {own} {shares[1]}."
    if best.updates_per_s and best.updates_per_s != best.iterations_per_s:
        other_updates = words.digits(base.updates_per_s) if base.updates_per_s else words.NONE
        yield (
            f"Not every iteration of {own} updates: {words.digits(best.updates_per_s)} updates per "
            f"second, {other} {other_updates}."
        )
    compute_s = base.compute_s
    if compute_s and base.iteration_s and base.iteration_s / compute_s < CEILING:
        most = words.factor(base.iteration_s / compute_s)
        yield f"At most {most} times is possible: computing alone takes {words.seconds(compute_s)}."
    counts = best.target_iterations, base.target_iterations
    if counts[0] and counts[1] and abs(counts[0] / counts[1] - 1) > APART:
        yield f"It needs {counts[0]:g} iterations, {other} {counts[1]:g}."
    yield from _describe_prediction(best, base)


def _describe_prediction(best: Row, base: Row) -> Iterator[str]:
    """Yield the predicted ratio, or its error if that is large."""
    if not (best.predicted_s and base.predicted_s and best.iteration_s and base.iteration_s):
        return
    predicted, measured = base.predicted_s / best.predicted_s, base.iteration_s / best.iteration_s
    off = predicted / measured - 1
    if abs(off) > OFF:
        times = words.factor(predicted)
        yield f"The prediction was off by {words.percent(abs(off))}: {times} times."
        return
    if best.target_s and base.target_s and best.target_iterations and base.target_iterations:
        predicted *= base.target_iterations / best.target_iterations
    yield f"Predicted: {words.factor(predicted)} times."


def conditions(run: Run, rows: Sequence[Row]) -> str:
    """Return how the numbers came about: hosts, compute, links, what is real, repetitions."""
    pace = max((row.pace for row in rows), default=0.0)
    hosts = run.cluster.get("hosts")
    texts = [f"{c.label} with {' '.join(c.arguments)}" for c in run.contestants if c.arguments]
    if run.rehearsed and isinstance(hosts, int):
        texts.append(f"{words.count_text(hosts, 'rank')}, {shaped_rate(run)}")
        texts.append(REHEARSED)
    elif isinstance(hosts, int):
        how = ", as layers sleep" if run.emulated else " (compute emulated)" if pace else ""
        rate = f", {shaped}" if (shaped := shaped_rate(run)) else ""
        texts.append(f"{host_text(run)} on this machine{how}{rate}")
    if pace and not run.emulated:
        texts.append("messages and losses are real")
    counts = sorted({row.repetitions for row in rows if row.iteration_s is not None})
    if counts == [1]:
        repeated = "1 repetition: a draw cannot be told"
    else:
        repeated = f"median of {' or '.join(map(str, counts))} repetitions"
        repeated += f", seeds {', '.join(map(str, run.seeds))}" if len(set(run.seeds)) > 1 else ""
    same = [row.label for row in rows if row.same_losses]
    if same:
        repeated += f"; {', '.join(same)} ignored OFFBEAT_SEED, so the range is not over seeds"
    return "; ".join(texts) + ". " * bool(texts) + (words.sentence(repeated) if counts else "")


def shaped_rate(run: Run) -> str:
    """Return the rate of all links of the lab, such as '25 Mbit/s', and the one inside hosts; empty
    if they differ."""
    rates = {link.get("rate") for link in run.cluster.get("links", ())}
    if len(rates) != 1 or run.lab == "none":
        return ""
    text, inside = words.rate(parse_rate_bps(rates.pop())), run.cluster.get("inside")
    return text if inside is None else f"{text}, {words.rate(parse_rate_bps(inside))} inside"


def host_text(run: Run) -> str:
    """Return the number of hosts, and of their ranks if they have several, such as '2 hosts of 2
    ranks'."""
    text = words.count_text(int(run.cluster["hosts"]), "host")
    return text if run.profile is None else text + _rank_text(run.profile.topology)


def replica_text(profile: Profile) -> str:
    """Return the number of ranks, and of nodes if replicas have several ranks, such as '2 nodes of
    2 ranks'."""
    sizes = profile.topology
    if not sizes:
        return words.count_text(profile.world_size, "rank")
    return words.count_text(len(sizes), "node") + _rank_text(sizes)


def _rank_text(sizes: Sequence[int]) -> str:
    return f" of {' or '.join(map(str, sorted({*sizes})))} ranks" if sizes else ""


def _estimate_sign(row: Row) -> str:
    """Return a sign before a share that is estimated."""
    return "≈ " if row.waits_estimated else ""


def _reference_row(order: Sequence[Row]) -> Row:
    """Return the row to compare with: the fastest DDP, else the slowest row."""
    return next((row for row in order if row.is_yardstick), order[-1])


def _has_overlap(one: Interval | None, two: Interval | None) -> bool:
    return one is not None and two is not None and one[0] <= two[1] and two[0] <= one[1]
