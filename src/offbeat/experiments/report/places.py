"""Texts of the ranks, each once, with the contestants, repetitions and ranks that reported it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from offbeat.core.plan import Phases
from offbeat.experiments.record.run_directory import Contestant, RankRecord, Repetition

Record = tuple[Contestant, Repetition, RankRecord]


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
