"""Log of the events of one rank whose order determines the weights of a job without a plan.

A job under gossip or with servers does not repeat its weights, because the times of its messages
determine which parameters meet. With the logs of all ranks a rehearsal repeats them.
"""

from __future__ import annotations

import json
import time
from array import array
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offbeat.core.files import replace_text, require_schema, write_or_warn

if TYPE_CHECKING:
    from offbeat.core.runtime.training_job import TrainingJob

SCHEMA = 1
MOST_EVENTS = 1 << 18  # events of a rank; a file then has about 8 MB

Event = tuple[str, tuple[float, ...]]
"""Kind of an event, one letter, and its values."""


class EventLog:
    """Events of one rank in the order in which they happen.

    Callers serialize `add` and `count`, because the order counts. The memory is bounded: after
    `most` events the log keeps no further ones.

    Args:
        path: file of the log.
        facts: facts that all logs of the job state: strategy, model, ranks and servers.
        most: largest number of events.

    Attributes:
        problem: reason why a rehearsal cannot repeat these events; empty if it can.
    """

    def __init__(self, path: Path, facts: Mapping[str, Any], most: int = MOST_EVENTS) -> None:
        self.problem = ""
        self._path, self._facts, self._most = path, facts, most
        self._kinds, self._values = bytearray(), array("d")
        self._widths: dict[str, int] = {}
        self._ends_s, self._began_s = array("d"), time.perf_counter()

    def add(self, kind: str, *values: float) -> None:
        """Add an event. All events of a kind have the same number of values."""
        if len(self._kinds) >= self._most:
            self.refuse(f"there were more than {self._most:,} events")
        elif not self.problem:
            self._kinds.append(ord(kind))
            self._values.extend(values)
            self._widths[kind] = len(values)

    def count(self, kind: str) -> None:
        """Add an event whose value is the number of its repetitions without another event."""
        if self._kinds and self._kinds[-1] == ord(kind):
            self._values[-1] += 1
        else:
            self.add(kind, 1)

    def end_iteration(self) -> None:
        """Record the time of the end of an iteration."""
        if len(self._ends_s) < self._most:
            self._ends_s.append(time.perf_counter() - self._began_s)

    def refuse(self, problem: str) -> None:
        """Record why no rehearsal can repeat the events. The first reason counts."""
        self.problem = self.problem or problem

    def save(self) -> None:
        """Write the file. A file that cannot be written causes a warning."""
        data = {
            "schema": SCHEMA,
            **self._facts,
            "problem": self.problem,
            "ends_s": [round(end_s, 7) for end_s in self._ends_s],
            "widths": self._widths,
            "kinds": self._kinds.decode(),
            "values": [int(x) if x.is_integer() else x for x in self._values],
        }
        text = json.dumps(data, separators=(",", ":"))
        loss = ", and a rehearsal cannot repeat this job"
        write = partial(replace_text, text=text)
        write_or_warn(write, str(self._path), "order", loss, needed=False)


def open_event_log(job: TrainingJob, strategy: str) -> EventLog | None:
    """Return the log of this rank; None if the job keeps no record.

    Args:
        job: objects of this rank.
        strategy: strategy with its settings.
    """
    folder = None if job.recorder is None else job.recorder.folder
    if folder is None:
        return None
    rank = job.cluster.control.rank
    facts = {
        "strategy": strategy,
        "model": job.observation.model,
        "rank": rank,
        "ranks": len(job.ranks.workers),
        "servers": len(job.ranks.servers),
    }
    return EventLog(path_of(folder, rank), facts)


def path_of(folder: Path, rank: int) -> Path:
    """Return the path of the log of a rank."""
    return folder / f"order{rank}.json"


class RecordedEvents:
    """Events of one rank, as `EventLog.save` has written them.

    Attributes:
        facts: all fields of the file but the events.
        ends_s: end of each iteration, in seconds from the start of the rank.
    """

    def __init__(self, path: Path) -> None:
        """Read a file.

        Raises:
            ValueError: the file is not a log of this version.
            OSError: the file cannot be read.
        """
        try:
            data = json.loads(path.read_text())
            self._kinds: str = data.pop("kinds")
            self._values: Sequence[float] = data.pop("values")
            self._widths: Mapping[str, int] = data.pop("widths")
            self.ends_s = tuple(map(float, data.pop("ends_s")))
            count = sum(self._widths[kind] for kind in self._kinds)
            if count != len(self._values):
                raise ValueError(f"it has {len(self._values)} of {count} values")
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"order ({path}) must be a file that a job has written; {error}"
            ) from None
        require_schema(data.pop("schema", None), SCHEMA, path)
        self.facts: dict[str, Any] = data

    def __iter__(self) -> Iterator[Event]:
        """Yield the events in their order."""
        at = 0
        for kind in self._kinds:
            stop = at + self._widths[kind]
            yield kind, tuple(self._values[at:stop])
            at = stop
