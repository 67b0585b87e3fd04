"""Marks: when things happened in one iteration."""

from __future__ import annotations

from dataclasses import dataclass, field

from offbeat.runtime.agenda import Agenda
from offbeat.transport.device import Mark
from offbeat.transport.link import Flight


@dataclass(slots=True)
class Arrival:
    """One bucket's gradient awaited and applied, before its next forward."""

    bucket: int
    begin: Mark
    landed: Mark
    updated: Mark


@dataclass(slots=True)
class Marks:
    """When things happened in one iteration, as device marks; None or empty: not marked."""

    begin: Mark = None
    arrivals: list[Arrival] = field(default_factory=list)
    forward: Mark = None
    forward_end: Mark = None
    ready: list[Mark] = field(default_factory=list)
    updated: list[Mark] = field(default_factory=list)
    backward_end: Mark = None
    waited: Mark = None
    step: Mark = None
    stepped: Mark = None
    end: Mark = None


@dataclass(slots=True)
class Iteration:
    """What one iteration did: its number, its marks, its flights; `planned` is its number in the
    plan, which begins anew after `drain`."""

    number: int
    marks: Marks
    flights: list[Flight]
    planned: int = 0


@dataclass(slots=True)
class Planned(Iteration):
    """An iteration under way, or over with flights still out."""

    agenda: Agenda = field(kw_only=True)
    awaited: int = 0  # flights that have been waited for
    over: bool = False

    @property
    def complete(self) -> bool:
        return self.over and self.awaited == len(self.flights)
