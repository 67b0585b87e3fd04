"""HTML page of the report: data for the template, and its rendering."""

from __future__ import annotations

import base64
import hashlib
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any
from urllib.parse import quote

import jinja2
from markupsafe import Markup

from offbeat.core import words
from offbeat.core.plan import Payload, Plan
from offbeat.core.sim import predict
from offbeat.experiments.record.disturbed import describe_disturbances
from offbeat.experiments.record.run_directory import Contestant, Run, count_skipped
from offbeat.experiments.report import boxes, curves, drawing, values
from offbeat.experiments.report.bars import Bar, bars_of
from offbeat.experiments.report.breakdown import explain_error
from offbeat.experiments.report.chart import Chart, as_html
from offbeat.experiments.report.curves import Ordered
from offbeat.experiments.report.decisions import decisions, group_by_text
from offbeat.experiments.report.headline import (
    REHEARSED,
    conditions,
    headline,
    host_text,
    replica_text,
    shaped_rate,
    typed_text,
)
from offbeat.experiments.report.pace_notes import describe_late_hosts, describe_pace
from offbeat.experiments.report.summary import Row, merges_gradients
from offbeat.experiments.report.table import details
from offbeat.experiments.report.votes import describe_votes, votes_of
from offbeat.strategies import DDP

NO_PROGRESS = (
    "Iterations without an update are no progress: where gradients are merged, compare updates per "
    "second as well."
)
METRIC_NOTE = (
    "Mean over the ranks that report it and over repetitions, from the end of the first iteration "
    "on. Bands are the lowest to the highest repetition."
)
ORDINALS = {2: "2nd", 3: "3rd"}


@dataclass(frozen=True)
class Plot:
    """Section with the charts of a quantity.

    Attributes:
        name: name of the quantity.
        seconds: chart against time.
        iterations: chart against iterations.
        notes: sentences above the chart.
    """

    name: str
    seconds: Chart
    iterations: Chart
    notes: Sequence[str]


def render(
    run: Run,
    rows: Sequence[Row],
    traces: Mapping[str, Mapping[str, str]],
    own: Mapping[str, Any] | None = None,
) -> str:
    """Return the page of a comparison as HTML.

    Args:
        run: the comparison.
        rows: result of `summarize`.
        traces: names of linked trace files by label and source.
        own: variables in place of those of `view`; a job has other facts and texts.
    """
    environment = jinja2.Environment(
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: words.join_units(value) if type(value) is str else value,
    )
    environment.filters |= {
        name: getattr(words, name) for name in ("seconds", "size", "loss", "digits", "sentence")
    }
    # A name breaks before its settings, not within a word.
    environment.filters["name"] = lambda name: Markup("<wbr>(").join(name.split("("))
    environment.filters["chart"] = lambda chart: Markup(as_html(chart))
    script = asset("page.js")
    return environment.from_string(asset("page.html")).render(
        **view(run, rows, traces) | dict(own or {}),
        no_chart=Chart("", "s", ()),
        count=words.count_text,
        css=Markup(asset("boxes.css") + asset("page.css")),
        script=Markup(script),
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    )


def asset(name: str) -> str:
    return files("offbeat.experiments.report").joinpath(name).read_text(encoding="utf-8")


def view(run: Run, rows: Sequence[Row], traces: Mapping[str, Mapping[str, str]]) -> dict[str, Any]:
    """Return the variables of the template for a comparison."""
    found, order = headline(run, rows), curves.rank_contestants(run, rows)
    table = _table(run, order, bars_of(run, order), found.best)
    reservations = list(found.reservations)
    if (ddp := table["ddp"]) is not None:
        reservations.append(f"DDP would take {words.seconds(ddp.total_s)} (predicted).")
    timelines, length_s = _timelines(run, order)
    profile = run.profile
    return {
        "kind": "comparison" if len(run.contestants) > 1 else "run",
        "sentence": found.sentence,
        "reservations": " ".join(reservations),
        "eyebrow": _eyebrow(run, rows),
        "banners": _banners(run),
        "plots": _plots(run, order, curves.losses_of(order)),
        "distance": curves.distance_chart(order),
        "conditions": conditions(run, rows),
        "reassurance": [*describe_pace(run)],
        "measured": _measured_text(run),
        "facts": _facts(run),
        "tables": _cluster_tables({**run.cluster, **_link_facts(run)}),
        "failed": _failed_repetitions(run),
        "place": _place(run),
        "legs": profile is not None and profile.inside is not None,
        "replicas": "" if profile is None else replica_text(profile),
        "run": run,
        "command": shlex.join(run.command_line),
        "table": table,
        "goal": next((row.goal for row, *_ in order if row.goal is not None), None),
        "timelines": timelines,
        "length_s": length_s,
        "legend": Markup(boxes.legend("".join(one.html for one in timelines))),
        "axis": Markup(boxes.axis(length_s)) if timelines else "",
        "errors": _errors(run, order),
        "strategies": [_strategy(c, row, name, traces) for row, c, name in order],
        "profile": profile,
        "every_gradient": Payload("grad", range(len(profile.buckets) if profile else 0)),
        "started": _start_text(run),
        "problems": run.failures(),
        "warnings": group_by_text(run.records(), lambda record: record.warnings),
    }


def _eyebrow(run: Run, rows: Sequence[Row]) -> list[str]:
    """Return the conditions above the headline."""
    count = host_text(run) if isinstance(run.cluster.get("hosts"), int) else ""
    count = count or words.count_text(run.world_size, "rank")
    texts = [", ".join(filter(None, [count, shaped_rate(run)]))]
    if run.rehearsed:
        texts.append(REHEARSED)
    elif run.emulated:
        texts.append("layers sleep instead of computing")
    elif any(row.pace for row in rows):
        texts.append("compute is emulated, messages and losses are real")
    return texts


def _banners(run: Run) -> list[str]:
    """Return what changes how all numbers are read."""
    texts = []
    if run.emulated:
        texts.append(
            "Emulated compute: layers sleep for their measured time. Communication is real, "
            "compute and losses are not."
        )
    if run.profile_disturbed is not None:
        texts.append(describe_disturbances([run.profile_disturbed], "The profile", 1))
    if run.note:
        texts.append(run.note)
    return texts


def _start_text(run: Run) -> str:
    text = run.started.replace("T", " ").replace("Z", " UTC").replace("+00:00", " UTC")
    return re.sub(r"(\d\d:\d\d):\d\d(\.\d+)?", r"\1", text)


# --- comparison ----------------------------------------------------------------------------------


def _table(
    run: Run,
    order: Ordered,
    drawn: Sequence[tuple[Bar | None, Bar | None]],
    best: Row | None,
) -> dict[str, Any]:
    """Return the rows of the comparison with their bars, on one scale."""
    ddp = _predicted_ddp(run) if len(order) == 1 else None
    ends = [bar.total_s for pair in [*drawn, (ddp,)] for bar in pair if bar is not None]
    measured = [bar for bar, _ in drawn if bar is not None]
    rows = [row for row, *_ in order]
    return {
        "rows": [
            _table_row(run, row, contestant, name, row is best) | {"bars": pair}
            for (row, contestant, name), pair in zip(order, drawn, strict=True)
        ],
        "ddp": ddp,
        "most_s": max([*ends, 1e-9]),
        "updates": NO_PROGRESS if merges_gradients(rows) else "",
        "speedup": any(row.speedup is not None for row in rows),
        "losses": any(row.final_loss is not None or row.diverged for row in rows),
        "metrics": any(row.metrics for row in rows),
        "bound": any(row.bound_s is not None for row in rows),
        "predicted": any(row.predicted_s is not None for row in rows),
        "split": any(bar.split for bar in measured),
        "unsplit": any(not bar.split for bar in measured),
        "estimated": [n for (_, _, n), (bar, _) in zip(order, drawn, strict=True)
                      if bar is not None and bar.estimated],
    }  # fmt: skip


def _table_row(run: Run, row: Row, contestant: Contestant, name: str, best: bool) -> dict[str, Any]:
    marks = []
    if row.cut:
        cuts = [text for rep in contestant.complete for text in rep.cuts]
        marks.append(f"stopped after {words.count_text(row.iterations, 'iteration')}: {cuts[0]}")
    if row.disturbed:
        marks.append(describe_disturbances(row.disturbed, name, row.repetitions))
    if row.failed:
        marks.append(f"{row.failed} of {row.failed + row.repetitions} repetitions failed")
    why = "was not run" if row.not_run else row.problem
    if row.iteration_s is None and row.repetitions:
        why = why or "no whole period left"
    times = words.factor(row.speedup).removesuffix(".0") + "×" if row.speedup else words.NONE
    return {
        "row": row,
        "name": name,
        "about": _description(run, contestant, row),
        "best": best,
        "marks": marks,
        "why": why,
        "speedup": times,
        "error": words.error(row.predicted_error),
        "spread": " to ".join(map(words.seconds, row.spread_s)) if row.spread_s else "",
        "updates": words.digits(row.updates_per_s)
        if row.updates_per_s and row.updates_per_s != row.iterations_per_s
        else "",
    }


def _description(run: Run, contestant: Contestant, row: Row) -> str:
    """Return the settings, if a label has some, and what the plan sends when."""
    typed = typed_text(row)
    sent = "" if contestant.plan is None or run.profile is None else _sends(contestant.plan)
    return " · ".join(filter(None, ["" if typed == typed.partition(":")[0] else typed, sent]))


def _sends(plan: Plan) -> str:
    """Return a phrase such as 'gradients, every iteration'; empty for other plans."""
    buffers = {rule.payload.buffer for rule in plan.transfers if rule.when is None}
    if len(buffers) != 1 or any(rule.when for rule in plan.transfers):
        return ""
    noun = {"grad": "gradients", "param": "parameters"}.get(buffers.pop(), "")
    phases = {phase for rule in plan.transfers for phase in rule.phases}
    if not noun:
        return ""
    if plan.period == 1:
        return f"{noun}, every iteration"
    if len(phases) == 1:
        number = ORDINALS.get(plan.period, f"{plan.period}th")
        return f"all {noun}, every {number} iteration"
    return f"{noun} in parts, over {plan.period} iterations"


def _predicted_ddp(run: Run) -> Bar | None:
    """Return the predicted iteration of DDP, to compare a single strategy with."""
    if run.profile is None or any(c.strategy == "ddp" for c in run.contestants):
        return None
    try:
        found = predict(DDP(), run.profile)
    except ValueError:
        return None
    return Bar(found.iteration_s - found.exposed_s, found.exposed_s)


# --- timelines -----------------------------------------------------------------------------------


def _timelines(run: Run, order: Ordered) -> tuple[list[drawing.Drawn], float]:
    """Return the timelines of all strategies and the length of their window."""
    length_s = drawing.window_length_s(run)
    drawn = (drawing.draw(run, c, name, length_s) for _, c, name in order) if length_s else ()
    return [one for one in drawn if one is not None], length_s


def _place(run: Run) -> str:
    """Return what a lane belongs to."""
    return "rank" if run.profile and run.profile.topology else "host"


# --- was it predicted? ---------------------------------------------------------------------------


def _errors(run: Run, order: Ordered) -> dict[str, Any]:
    """Return predicted and measured parts of each strategy, and why a prediction was off."""
    known = [(row, c, name) for row, c, name in order if row.predicted_error is not None]
    worst = max((row.predicted_error or 0.0 for row, *_ in known), key=abs, default=0.0)
    unit = words.unit_for(s for row, *_ in known for s in (row.iteration_s, row.predicted_s))
    rows = []
    for row, contestant, name in known:
        pairs = [("–", "–")] * 3
        text = f"The error of the prediction is {words.error(row.predicted_error)}."
        if row.split is not None:
            before, after = row.split.predicted, row.split.measured
            about = "≈ " * row.split.estimated
            pairs = [
                (
                    unit.text(max(0.0, getattr(before, part))),
                    about + unit.text(max(0.0, getattr(after, part))),
                )
                for part in ("compute_s", "messages_s", "waiting_s")
            ]
            text = explain_error(
                row.split, row.iteration_s or 0.0, list(_causes(run, row, contestant)), _place(run)
            )
        pairs = [*pairs, (unit.text(row.predicted_s), unit.text(row.iteration_s))]
        rows.append({"name": name, "pairs": pairs, "text": text})
    return {"rows": rows, "worst": words.error(worst), "unit": unit.name}


def _causes(run: Run, row: Row, contestant: Contestant) -> Iterator[str]:
    """Yield known causes of an error: another rate of the link, and late hosts."""
    split, links = row.split, run.profile.all_links if run.profile else ()
    if split is not None and len(links) == 1 and split.measured.links_s and split.predicted.links_s:
        share = split.predicted.links_s / split.measured.links_s
        if abs(share - 1) > 0.1:
            rate_bps = 8 * links[0].bytes_per_s
            yield (
                f"The link carried {words.rate(float(f'{rate_bps * share:.2g}'))}, "
                f"{words.rate(float(f'{rate_bps:.2g}'))} were profiled."
            )
    yield from describe_late_hosts(contestant)


# --- losses --------------------------------------------------------------------------------------


def _plots(run: Run, order: Ordered, losses: Mapping[str, curves.Losses]) -> list[Plot]:
    """Return the charts of the loss and of each metric, against seconds and iterations."""
    return [
        Plot(
            "Loss",
            curves.loss_chart(order, losses, "seconds"),
            curves.loss_chart(order, losses, "iterations"),
            [*curves.loss_notes(run, [row for row, *_ in order], losses), *_vote_notes(order)],
        ),
        *(
            Plot(name, chart, other, [METRIC_NOTE])
            for (name, chart), other in zip(
                curves.metric_charts(run, order, "seconds").items(),
                curves.metric_charts(run, order, "iterations").values(),
                strict=True,
            )
        ),
    ]


def _vote_notes(order: Ordered) -> Iterator[str]:
    """Yield a sentence about the votes of each strategy that has some."""
    for _, contestant, name in order:
        rep = next(iter(contestant.complete), None)
        if rep is not None and (votes := votes_of(rep)) is not None:
            yield f"{name}: {describe_votes(rep, votes)}"


# --- how it was run ------------------------------------------------------------------------------


def _facts(run: Run) -> dict[str, Any]:
    """Return the conditions of a comparison by name."""
    facts = {"repetitions": run.repetitions, "seed": run.seed, "lab": run.lab}
    facts |= {} if run.cpus is None else {"CPU cores of the machine": run.cpus}
    facts |= {k: v for k, v in run.cluster.items() if not isinstance(v, (list, dict))}
    return facts | dict(run.versions)


def _measured_text(run: Run) -> str:
    """Return which iterations are measured."""
    reps = [rep for contestant in run.contestants for rep in contestant.complete]
    skipped = sorted({count_skipped(run, rep) for rep in reps} or {run.skip})
    observed = max((rep.observed for rep in reps), default=0)
    text = "Times are medians over whole periods"
    if not any(skipped):
        return f"{text}."
    profiled = f", of which {observed} were profiled" * bool(observed)
    return f"{text} without the first {' or '.join(map(str, skipped))} iterations{profiled}."


def _strategy(
    contestant: Contestant, row: Row, name: str, traces: Mapping[str, Mapping[str, str]]
) -> dict[str, Any]:
    return {
        "name": name,
        "label": contestant.label,
        "text": contestant.text,
        "numbers": "; ".join(details(row)),
        "plan": None if contestant.plan is None else str(contestant.plan),
        "decisions": decisions(contestant),
        "traces": {
            source: f"{quote(contestant.label)}/{quote(file)}"
            for source, file in traces.get(contestant.label, {}).items()
        },
    }


def _link_facts(run: Run) -> dict[str, Any]:
    """Return tables of the probed links and of the network changes during the run."""
    columns = ("link", "hosts", "asked", "measured")
    return {
        "asked and measured": [{key: row.get(key) for key in columns} for row in run.probed],
        "changes during the run": [
            {**row, "at_s": f"{row.get('at_s', 0):.2f}"} for row in run.changed
        ],
    }


def _cluster_tables(cluster: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the cluster's lists of records (links, overrides) as tables."""
    lists = {name: _records(value) for name, value in cluster.items()}
    return [values.record_table(name, records) for name, records in lists.items() if records]


def _records(value: Any) -> list[Mapping[str, Any]]:
    if isinstance(value, Mapping):
        return [
            {"name": key, **(item if isinstance(item, Mapping) else {"value": item})}
            for key, item in value.items()
        ]
    if isinstance(value, list):
        return [item if isinstance(item, Mapping) else {"value": item} for item in value]
    return []


def _failed_repetitions(run: Run) -> list[dict[str, Any]]:
    """Return incomplete repetitions, with the last log lines of ranks without a record."""
    return [
        {
            "label": contestant.label,
            "index": rep.index,
            "problems": (*rep.problems, *rep.cuts),
            "counts": rep in contestant.complete,
            "logs": rep.log_tails,
        }
        for contestant in run.contestants
        for rep in contestant.repetitions
        if not rep.complete
    ]
