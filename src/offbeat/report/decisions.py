"""What was decided for a contestant, before and during its run, in plain words."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from offbeat.report import words
from offbeat.report.places import grouped
from offbeat.report.run import Contestant, RankRecord

Fact = tuple[str, str, str]  # name, value, what it means


def decisions(contestant: Contestant) -> dict[str, Any] | None:
    """What the template shows: facts, the preserver's tries, what was decided while it ran.

    None if the plan's notes and the records name no decision. Fields that are missing or of
    another type, as other versions may write them, are left out.
    """
    plan = contestant.plan
    notes = {} if plan is None else {fact.name: fact.value for fact in plan.facts}
    preserver = _mapping(notes.get("preserver"))
    tries = preserver.get("tries")
    tries = tries if isinstance(tries, list) else []
    records = [(contestant, rep, record) for rep in contestant.repetitions for record in rep.ranks]
    found = {
        "facts": [fact for fact in _facts(notes, preserver) if fact[1] != words.NONE],
        "tries": [_try(tried) for tried in tries if isinstance(tried, Mapping)],
        "later": grouped(records, _said_by),
    }
    return found if any(found.values()) else None


def _facts(notes: Mapping[str, Any], preserver: Mapping[str, Any]) -> Iterable[Fact]:
    return (
        ("links", words.plain(notes.get("links")), ""),
        (
            "coverage rate",
            _number(notes.get("coverage_rate")),
            "time to send all gradients on the first link / forward and backward",
        ),
        ("merged per update", words.plain(notes.get("merges")), "iterations, over one cycle"),
        ("capacity", _factor(notes.get("capacity")), "the time of forward and of backward"),
        ("convergence", words.plain(preserver.get("decision")), ""),
    )


def _try(tried: Mapping[str, Any]) -> dict[str, str]:
    accepted = tried.get("accepted")
    verdict = "accepted" if accepted is True else "rejected" if accepted is False else words.NONE
    return {
        "capacity": _factor(tried.get("capacity")),
        "merges": words.plain(tried.get("merges")),
        "ratio": _number(tried.get("ratio"), 4),
        "verdict": verdict,
    }


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


def _number(value: Any, digits: int = 3) -> str:
    known = isinstance(value, int | float) and not isinstance(value, bool)
    return words.digits(value, digits) if known else words.NONE


def _factor(value: Any) -> str:
    text = _number(value)
    return text if text == words.NONE else f"{text}×"


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
