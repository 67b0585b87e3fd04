"""Members of a job over time, from the events of its record."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from offbeat.core.words import count_text, seconds

EVENT = "members"


@dataclass(frozen=True)
class Presence:
    """Time in which a process was a member.

    Attributes:
        number: number of the process in the record.
        begin_t: begin in seconds since 1970.
        end_t: end in seconds since 1970; None for a member until the last change.
        end: "left" or "failed"; empty for a member until the last change.
        joined: whether the process has joined a running job.
    """

    number: int
    begin_t: float
    end_t: float | None = None
    end: str = ""
    joined: bool = False


@dataclass(frozen=True)
class MembershipHistory:
    """Changes of the members of a job.

    Attributes:
        first: number of members at the start.
        start_t: start of the job in seconds since 1970.
        changes: events of the changes in order; that of the member with the longest time without
            progress if several members have recorded a change.
    """

    first: int
    start_t: float
    changes: Sequence[Mapping[str, Any]]

    @classmethod
    def of(
        cls, first: int, start_t: float, events: Iterable[Mapping[str, Any]]
    ) -> MembershipHistory:
        """Return the history of the events of some members."""
        found: dict[int, Mapping[str, Any]] = {}
        for event in events:
            if event.get("event") != EVENT or not isinstance(event.get("epoch"), int):
                continue
            before = found.get(event["epoch"])
            if before is None or event.get("s", 0.0) > before.get("s", 0.0):
                found[event["epoch"]] = event
        return cls(first, start_t, [found[epoch] for epoch in sorted(found)])

    @property
    def counts(self) -> list[tuple[float, int]]:
        """Return pairs of a time and the number of members from then on."""
        steps = [(float(e["t"]), len(e.get("members", ()))) for e in self.changes]
        return [(self.start_t, self.first), *steps]

    @property
    def members(self) -> list[int]:
        """Return the numbers of the present members."""
        if not self.changes:
            return list(range(self.first))
        return list(self.changes[-1].get("members", ()))

    @property
    def ended_members(self) -> dict[int, str]:
        """Return by process how it has ended: "left" or "failed"."""
        return {one.number: one.end for one in self.presences if one.end}

    @property
    def presences(self) -> list[Presence]:
        """Return the times of all processes, in the order of their numbers."""
        found = {n: Presence(n, self.start_t) for n in range(self.first)}
        for event in self.changes:
            t = float(event["t"])
            for end in ("left", "failed"):
                for number in event.get(end, ()):
                    if number in found:
                        one = found[number]
                        found[number] = Presence(number, one.begin_t, t, end, one.joined)
            for number in event.get("members", ()):
                found.setdefault(number, Presence(number, t, joined=True))
        return [found[number] for number in sorted(found)]

    @property
    def seconds(self) -> list[float]:
        """Return the seconds without progress of each change."""
        return [float(event.get("s", 0.0)) for event in self.changes]

    def describe(self) -> str:
        """Return the numbers of members and the time without progress in one line."""
        totals = [
            (sum(len(event.get(group, ())) for event in self.changes), group)
            for group in ("left", "failed", "joined")
        ]
        changed = ", ".join(f"{count} {group}" for count, group in totals if count)
        took = self.seconds
        text = f"{len(self.members)} now, {self.first} at the start"
        text += f"; {changed}" if changed else ""
        text += f"; {count_text(len(took), 'change')} took {seconds(sum(took))}"
        return text + (f", the longest {seconds(max(took))}" if len(took) > 1 else "")
