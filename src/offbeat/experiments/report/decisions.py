"""Decisions of the planner and of the runtime for a contestant, as text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from offbeat.core import words
from offbeat.core.plan import Fact, Phases
from offbeat.experiments.record.run_directory import Contestant, RankRecord, Repetition
from offbeat.experiments.report import values

LONGEST = 300  # characters of a value

Row = tuple[str, str, str]  # name, value, meaning
Record = tuple[Contestant, Repetition, RankRecord]


def decisions(contestant: Contestant) -> dict[str, Any] | None:
    """Return the decisions of a contestant for the template; None without any.

    `facts` are rows and `tables` are tables of the plan's facts; `later` are decisions during the
    run.
    """
    plan = contestant.plan
    shown = [] if plan is None else list(_facts(plan.facts))
    records = [(contestant, rep, record) for rep in contestant.repetitions for record in rep.ranks]
    found = {
        "facts": [one for one in shown if isinstance(one, tuple)],
        "tables": [one for one in shown if isinstance(one, dict)],
        "later": group_by_text(records, _decision_texts),
    }
    return found if any(found.values()) else None


def _facts(facts: Iterable[Fact]) -> Iterator[Row | dict[str, Any]]:
    for fact in facts:
        yield from _rows_and_tables(fact.name, fact.value, fact.meaning)


def _rows_and_tables(name: str, value: Any, meaning: str = "") -> Iterator[Row | dict[str, Any]]:
    """Yield a scalar as a row, a list of records as a table, and each item of a record."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _rows_and_tables(str(key), inner)
    elif isinstance(value, list | tuple) and value and all(isinstance(v, Mapping) for v in value):
        table = values.record_table(_title(name), value, _value_text)
        yield {**table, "columns": [_title(key) for key in table["columns"]]}
    elif (words_ := _value_text(value)) not in (words.NONE, ""):
        yield _title(name), words_, meaning


def _title(key: Any) -> str:
    return str(key).replace("_", " ")


def _value_text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return words.digits(value, 4)
    text = values.as_text(value)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]} ..."


def _decision_texts(record: RankRecord) -> list[str]:
    return [f"iteration {iteration}: {text}" for iteration, text in record.decisions]


def group_by_text(
    records: Iterable[Record], texts: Callable[[RankRecord], Iterable[str]]
) -> list[tuple[str, str]]:
    """Return (text, 'ddp, repetitions 0-1, rank 2; ...') in the order of the records."""
    found: dict[str, dict[str, dict[int, set[int]]]] = {}
    for contestant, rep, record in records:
        for text in texts(record):
            places = found.setdefault(text, {}).setdefault(contestant.label, {})
            places.setdefault(rep.index, set()).add(record.rank)
    return [(text, "; ".join(_places(places))) for text, places in found.items()]


def _places(by_label: Mapping[str, Mapping[int, set[int]]]) -> Iterable[str]:
    for label, reps in by_label.items():
        everywhere = set.union(*reps.values())
        if all(ranks == everywhere for ranks in reps.values()):
            yield f"{label}, {_noun_list('repetition', reps)}, {_noun_list('rank', everywhere)}"
            continue
        for index, ranks in reps.items():
            yield f"{label}, repetition {index}, {_noun_list('rank', ranks)}"


def _noun_list(noun: str, numbers: Iterable[int]) -> str:
    numbers = set(numbers)
    return f"{noun}{'s' if len(numbers) > 1 else ''} {Phases(numbers)}"
