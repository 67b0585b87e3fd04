"""HTML page of the report: data for the template, and its rendering."""

from __future__ import annotations

import base64
import hashlib
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.resources import files
from typing import Any
from urllib.parse import quote

import jinja2
from markupsafe import Markup

from offbeat.core.plan import Payload
from offbeat.experiments.record.run_directory import Contestant, Run, count_skipped
from offbeat.experiments.report import curves, divergence, gossip, words
from offbeat.experiments.report.breakdown import describe_split
from offbeat.experiments.report.decisions import decisions, group_by_text
from offbeat.experiments.report.headline import headline
from offbeat.experiments.report.pace_notes import describe_pace
from offbeat.experiments.report.summary import (
    Row,
    disturbances,
    measurement_text,
    merges_gradients,
    rank_rows,
)
from offbeat.experiments.report.timeline import (
    Window,
    lane_name,
    lanes_of,
    measured_window,
    pack,
    predicted_window,
    shrink,
)
from offbeat.experiments.report.votes import describe_votes, votes_of

Pair = tuple[Window | None, Window | None]  # predicted, measured

SCRIPTS = ("page.js", "legend.js", "timeline.js", "gossip.js", "losses.js", "sideways.js")


def render(run: Run, rows: Sequence[Row], traces: Mapping[str, Mapping[str, str]]) -> str:
    """Return the page as HTML. `traces[label][source]` are names of linked trace files."""
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {
        "seconds": words.seconds,
        "size": words.size,
        "share": words.share,
        "ratio": words.ratio,
        "loss": words.loss,
        "digits": words.digits,
    }
    script = "\n".join(asset(name) for name in SCRIPTS)
    return environment.from_string(asset("page.html")).render(
        **view(run, rows, traces),
        count=words.count,
        paces=words.paces,
        uneven=words.unevenness,
        css=Markup(asset("page.css")),
        script=Markup(script),
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    )


def view(run: Run, rows: Sequence[Row], traces: Mapping[str, Mapping[str, str]]) -> dict[str, Any]:
    """Return the variables of the template."""
    windows = [_windows(run, contestant) for contestant in run.contestants]
    shown, left_out = shrink([w for pair in windows for w in pair])
    pairs = list(zip(shown[::2], shown[1::2], strict=True))
    data = {
        "timelines": [_timeline(run, pair) for pair in pairs],
        "curves": [curves.draw(c, row) for c, row in zip(run.contestants, rows, strict=True)],
        "divergence": [divergence.draw(contestant) for contestant in run.contestants],
        "gossip": [gossip.draw(contestant) for contestant in run.contestants],
        "labels": [contestant.label for contestant in run.contestants],
        "target": next((row.target_loss for row in rows if row.target_loss is not None), None),
        "buckets": [bucket.name for bucket in run.profile.buckets] if run.profile else [],
    }
    found = headline(run, rows)
    return {
        "run": run,
        "best": found.best,
        "sentence": _join_units(found.sentence),
        "reservations": _join_units(" ".join(found.reservations)),
        "command": shlex.join(run.command_line),
        "banners": [*banners(run), *disturbances(run, rows)],
        "table": _table(run, rows),
        "strategies": _strategies(run, rows, pairs, traces),
        "left_out": left_out,
        "data": Markup(words.script_safe(words.dumps(data))),
        "any_curves": any(data["curves"]),
        "thinned": _describe_thinning(run),
        "any_divergence": any(data["divergence"]),
        "gossip": _gossip_panels(run, data["gossip"]),
        "target": data["target"],
        "profile": run.profile,
        "every_gradient": Payload("grad", range(len(data["buckets"]))),
        "cluster": {k: v for k, v in run.cluster.items() if not isinstance(v, (list, dict))},
        "cluster_tables": _cluster_tables({**run.cluster, **_link_facts(run)}),
        "started": run.started.replace("T", " ").replace("Z", " UTC").replace("+00:00", " UTC"),
        "failed": _failed_repetitions(run),
        "problems": run.failures(),
        "warnings": group_by_text(run.records(), lambda record: record.warnings),
        "checks": group_by_text(run.records(), lambda record: record.checks),
    }


def banners(run: Run) -> list[str]:
    """Return the reservations to display above all numbers."""
    texts = []
    if run.emulated:
        texts.append(
            "Emulated compute: layers sleep for their measured time. Communication is real, "
            "compute and losses are not."
        )
    texts += describe_pace(run)
    if cut := [contestant.label for contestant in run.contestants if contestant.cut]:
        texts.append(
            f"Cut short: {', '.join(cut)}. No repetition came to its end; the numbers are of the "
            "iterations until then."
        )
    if run.note:
        texts.append(run.note)
    elif run.lab == "none":
        texts.append("No lab: the links were not shaped, they are whatever this machine has.")
    return texts


def _describe_thinning(run: Run) -> str:
    """Return a sentence about thinned curves of long runs; empty if complete."""
    counts = [len(record.losses) for _, _, record in run.records()]
    if max(counts, default=0) <= curves.MOST_POINTS:
        return ""
    text = f"Long curves show {curves.MOST_POINTS} points"
    width = max(record.losses_of for _, _, record in run.records())
    return (
        f"{text}, each loss the mean of {width} iterations before smoothing."
        if width > 1
        else (f"{text}.")
    )


def _join_units(text: str) -> str:
    """Replace spaces between a number and its unit by no-break spaces."""
    return re.sub(r"(?<=\d) (?=(s|ms|µs|times)\b)", "\u00a0", text)


def asset(name: str) -> str:
    return files("offbeat.experiments.report").joinpath(name).read_text(encoding="utf-8")


def _windows(run: Run, contestant: Contestant) -> Pair:
    found = measured_window(run, contestant)
    return predicted_window(contestant), None if found is None else found[1]


def _timeline(run: Run, pair: Pair) -> dict[str, Any]:
    links = [link.name for link in run.profile.links] if run.profile else []
    lanes = lanes_of(pair, links)
    predicted, measured = (None if window is None else pack(window, lanes) for window in pair)
    return {"lanes": [*map(lane_name, lanes)], "predicted": predicted, "measured": measured}


def _table(run: Run, rows: Sequence[Row]) -> dict[str, Any]:
    """Return the table: rows, best first, with units and settings of the columns."""
    unit = words.unit_for(s for r in rows for s in (r.iteration_s, r.predicted_s, r.bound_s))
    ends = [r.spread_s[1] if r.spread_s else r.iteration_s for r in rows]
    series = {contestant.label: i for i, contestant in enumerate(run.contestants)}
    return {
        "rows": rank_rows(rows),
        "unit": unit,
        "finer": replace(unit, decimals=unit.decimals + 1),
        "most_s": max((s for s in ends if s), default=0.0),
        "series": series,
        "how": measurement_text(rows),
        "paces": words.NO_PROGRESS if merges_gradients(rows) else "",
        "votes": any(row.lssr is not None for row in rows),
        "falling": any(row.falling for row in rows),
        "split": any(row.split is not None for row in rows),
        "skipped": sorted({count_skipped(run, r) for c in run.contestants for r in c.complete}),
        "repetitions": max((r.repetitions for r in rows), default=0),
        "observed": max((rep.observed for _, rep, _ in run.records()), default=0),
    }


def _strategies(
    run: Run,
    rows: Sequence[Row],
    pairs: Sequence[Pair],
    traces: Mapping[str, Mapping[str, str]],
) -> list[dict[str, Any]]:
    """Return the data of each strategy's section, in the order of the table."""
    order = [row.label for row in rank_rows(rows)]
    items = [
        _strategy(i, contestant, rows[i], pairs[i], traces.get(contestant.label, {}))
        for i, contestant in enumerate(run.contestants)
    ]
    return sorted(items, key=lambda item: order.index(item["label"]))


def _strategy(
    index: int, contestant: Contestant, row: Row, pair: Pair, traces: Mapping[str, str]
) -> dict[str, Any]:
    measured = pair[1]
    return {
        "index": index,
        "label": contestant.label,
        "text": contestant.text,
        "row": row,
        "plan": None if contestant.plan is None else str(contestant.plan),
        "has_timeline": any(pair),
        "iterations": None if measured is None else _name_iterations(measured.iterations),
        "decisions": decisions(contestant),
        "votes": _describe_votes(contestant),
        "wrong": None if row.split is None else describe_split(row.split, contestant.label),
        "traces": {
            source: f"{quote(contestant.label)}/{quote(name)}" for source, name in traces.items()
        },
    }


def _gossip_panels(run: Run, drawn: Sequence[Any]) -> list[dict[str, Any]]:
    """Return the panels of each gossip strategy, with the number of workers left out."""
    return [
        {
            "index": index,
            "label": contestant.label,
            "panels": [panel for panel in ("predicted", "measured") if found[panel]],
            "left_out": max(p["all"] - len(p["workers"]) for p in found.values() if p),
        }
        for index, (contestant, found) in enumerate(zip(run.contestants, drawn, strict=True))
        if found
    ]


def _describe_votes(contestant: Contestant) -> str | None:
    rep = next(iter(contestant.complete), None)
    votes = None if rep is None else votes_of(rep)
    return None if rep is None or votes is None else describe_votes(rep, votes)


def _name_iterations(those: range) -> str:
    if len(those) == 1:
        return f"iteration {those.start}"
    return f"iterations {those.start} to {those.stop - 1}"


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
    return [words.record_table(name, records) for name, records in lists.items() if records]


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
