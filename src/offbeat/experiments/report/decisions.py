"""What was decided for a contestant, before and during its run, in plain words."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from offbeat.core.plan import Fact
from offbeat.experiments.record.run_directory import Contestant, RankRecord
from offbeat.experiments.report import words
from offbeat.experiments.report.places import grouped

LONGEST = 300  # characters of a value

Row = tuple[str, str, str]  # name, value, what it means


def decisions(contestant: Contestant) -> dict[str, Any] | None:
    """What the template shows: a plan's facts, as rows and as tables, and what was decided while it
    ran. None if there is nothing to show."""
    plan = contestant.plan
    shown = [] if plan is None else list(_facts(plan.facts))
    records = [(contestant, rep, record) for rep in contestant.repetitions for record in rep.ranks]
    found = {
        "facts": [one for one in shown if isinstance(one, tuple)],
        "tables": [one for one in shown if isinstance(one, dict)],
        "later": grouped(records, _said_by),
    }
    return found if any(found.values()) else None


def _facts(facts: Iterable[Fact]) -> Iterator[Row | dict[str, Any]]:
    for fact in facts:
        yield from _shown(fact.name, fact.value, fact.meaning)


def _shown(name: str, value: Any, meaning: str = "") -> Iterator[Row | dict[str, Any]]:
    """A value as a row, a list of records as a table, a record as what it holds."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _shown(str(key), inner)
    elif isinstance(value, list | tuple) and value and all(isinstance(v, Mapping) for v in value):
        columns = list(dict.fromkeys(key for record in value for key in record))
        rows = [[_words(record.get(key)) for key in columns] for record in value]
        yield {"name": _name(name), "columns": [_name(key) for key in columns], "rows": rows}
    elif (words_ := _words(value)) not in (words.NONE, ""):
        yield _name(name), words_, meaning


def _name(key: Any) -> str:
    return str(key).replace("_", " ")


def _words(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return words.digits(value, 4)
    text = words.plain(value)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]} ..."


def _said_by(record: RankRecord) -> list[str]:
    return [_later(decision) for decision in record.decisions]


def _later(decision: Any) -> str:
    """'iteration 40: planned again (links: net)'."""
    if not isinstance(decision, Mapping):
        return words.plain(decision)
    rest = {key: value for key, value in decision.items() if key not in ("iteration", "what")}
    when = f"iteration {decision['iteration']}: " if "iteration" in decision else ""
    detail = f" ({words.plain(rest)})" if rest else ""
    return f"{when}{words.plain(decision.get('what'))}{detail}"
