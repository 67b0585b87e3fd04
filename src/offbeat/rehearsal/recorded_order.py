"""Order of exchanges, pushes and pulls that a job without a plan has recorded."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from offbeat.core.runtime.event_log import Event, RecordedEvents, path_of
from offbeat.core.sim.trace import Trace
from offbeat.core.strategy.interface import Strategy
from offbeat.rehearsal.turns import Turns

RECORDED = "a record of the job: the folder of a run with order0.json"


@dataclass(frozen=True)
class RecordedOrder:
    """Logs of all ranks of a job.

    Attributes:
        folder: folder of the logs.
        strategy: strategy of the job with its settings.
        model: fingerprint of the model.
        ranks: number of ranks that train.
        servers: number of servers, which have the last ranks.
        iterations: iterations of every rank that trains.
        logs: log of each rank.
    """

    folder: Path
    strategy: str
    model: str
    ranks: int
    servers: int
    iterations: int
    logs: tuple[RecordedEvents, ...]

    @classmethod
    def load(cls, folder: str | Path) -> RecordedOrder:
        """Read the logs in the folder of a record.

        Raises:
            ValueError: a log is missing or cannot be repeated, or logs are of different jobs.
        """
        folder = Path(folder)
        if not path_of(folder, 0).exists():
            raise ValueError(
                f"order ({folder}) must be {RECORDED}; only jobs under gossip or with servers "
                "write it, if they keep a record (OFFBEAT_RECORD=runs)"
            )
        first = RecordedEvents(path_of(folder, 0))
        count = first.facts["ranks"] + first.facts["servers"]
        paths = [path_of(folder, rank) for rank in range(count)]
        missing = [path.name for path in paths if not path.exists()]
        if missing:
            raise ValueError(
                f"order ({folder}) must have a file of each of {count} ranks, without "
                f"{', '.join(missing)}: copy the files of all hosts into one folder; a rank that "
                "was killed has left none"
            )
        logs = (first, *map(RecordedEvents, paths[1:]))
        for rank, log in enumerate(logs):
            if log.facts["problem"]:
                raise ValueError(
                    f"order ({folder}) cannot be repeated: {log.facts['problem']} (rank {rank}); "
                    "record a job without this, or rehearse without order"
                )
            own, common = ({**one.facts, "rank": 0} for one in (log, first))
            if own != common:
                raise ValueError(
                    f"order ({folder}) must have files of one job; those of ranks 0 and {rank} "
                    "differ in strategy, model or number of ranks"
                )
        counts = [len(log.ends_s) for log in logs[: first.facts["ranks"]]]
        if len(set(counts)) > 1:
            listed = ", ".join(map(str, counts))
            raise ValueError(
                f"iterations ({listed}) of the ranks in order ({folder}) must be equal; record a "
                "job whose ranks end after the same iteration"
            )
        facts = first.facts
        return cls(
            folder,
            facts["strategy"],
            facts["model"],
            facts["ranks"],
            facts["servers"],
            counts[0],
            logs,
        )

    def require(self, strategy: Strategy, ranks: int, iterations: int | None) -> None:
        """Raise ValueError unless the order is that of a rehearsal.

        Args:
            strategy: strategy of the rehearsal.
            ranks: number of ranks of the rehearsal.
            iterations: number of iterations of each rank; None: unknown.
        """
        if str(strategy) != self.strategy:
            raise ValueError(
                f"strategy ({strategy}) must be that of order ({self.folder}), {self.strategy}; "
                "rehearse this strategy alone"
            )
        if ranks != self.ranks:
            raise ValueError(
                f"ranks ({ranks}) must be those of order ({self.folder}), {self.ranks}; set "
                f"ranks={self.ranks}"
            )
        if iterations is not None and iterations != self.iterations:
            raise ValueError(
                f"iterations ({iterations}) must be those of order ({self.folder}), "
                f"{self.iterations}; set iterations={self.iterations}"
            )

    @property
    def iteration_s(self) -> float:
        """Return the seconds per iteration of the recorded job, mean over its ranks."""
        ends_s = [log.ends_s[-1] for log in self.logs[: self.ranks] if log.ends_s]
        return sum(ends_s) / max(len(ends_s) * self.iterations, 1)

    def require_model(self, fingerprint: str) -> None:
        """Raise ValueError unless the model is that of the recorded job."""
        if fingerprint != self.model:
            raise ValueError(
                f"model (fingerprint {fingerprint}) must be that of order ({self.folder}), "
                f"{self.model}; build the model of the recorded job"
            )

    def trace(self) -> Trace:
        """Return the times of the iterations of the recorded job."""
        return Trace(
            source="measured",
            strategy=self.strategy,
            ends_s=tuple(log.ends_s for log in self.logs[: self.ranks]),
            starts_s=(0.0,) * self.ranks,
            spans=(),
            notes={"ranks": self.ranks},
            uneven=True,
        )


class _Queue:
    """Events of one rank that have not run. Later ones are read when they are needed."""

    def __init__(self, log: RecordedEvents) -> None:
        self._later, self._next = iter(log), deque[Event]()

    @property
    def head(self) -> Event | None:
        """Return the next event; None at the end."""
        return next(iter(self), None)

    def __iter__(self) -> Iterator[Event]:
        """Yield the events in their order, which stay in the queue."""
        yield from self._next
        for event in self._later:
            self._next.append(event)
            yield event

    def pop(self) -> None:
        """Remove the next event, which `head` has returned."""
        self._next.popleft()


class Queues:
    """Events of all ranks that have not run, in the recorded order of each rank.

    Events of kinds that are not `awaited` run as soon as they can, by `run`. A rank waits for its
    awaited ones, and acts on them itself.

    Args:
        order: recorded order.
        ranks: ranks of the queues.
        awaited: kinds of the events that a rank waits for, with their descriptions.
        run: runs an event of a rank if it can run; returns whether it did.
        turns: turns of the ranks.
    """

    def __init__(
        self,
        order: RecordedOrder,
        ranks: range,
        awaited: Mapping[str, str],
        run: Callable[[int, Event], bool],
        turns: Turns,
    ) -> None:
        self._order, self._awaited, self._run, self._turns = order, awaited, run, turns
        self._queues = {rank: _Queue(order.logs[rank]) for rank in ranks}

    def advance(self) -> None:
        """Run all events that can run before the next awaited events."""
        blocked = 0  # consecutive queues without an event that can run
        while blocked < len(self._queues):
            for rank, queue in self._queues.items():
                blocked += 1
                while (event := queue.head) is not None and self._can_pass(rank, event):
                    queue.pop()
                    blocked = 0

    def _can_pass(self, rank: int, event: Event) -> bool:
        return event[0] not in self._awaited and self._run(rank, event)

    def has_before_next(self, rank: int, kind: str) -> bool:
        """Return whether an event comes before the next awaited event of a rank."""
        for found, _ in self._queues[rank]:
            if found == kind or found in self._awaited:
                return found == kind
        return False

    def head(self, rank: int) -> Event | None:
        """Return the next event of a rank, after all events that can run; None at the end."""
        self.advance()
        return self._queues[rank].head

    def take(self, rank: int, kind: str) -> tuple[float, ...]:
        """Wait for an awaited event of a rank, and return its values. The rank must act at once.

        Raises:
            ValueError: the recorded job has another event, or has ended.
        """
        self._turns.wait_until(
            lambda: (event := self.head(rank)) is None or event[0] in self._awaited,
            lambda: f"events of other ranks before {self._awaited[kind]}",
        )
        event = self.head(rank)
        if event is None or event[0] != kind:
            found = "its end" if event is None else self._awaited[event[0]]
            raise ValueError(
                f"script must make the calls of the recorded job: rank {rank} has reached "
                f"{self._awaited[kind]}, and order ({self._order.folder}) has {found} there; "
                f"train {self._order.iterations} iterations with the recorded script"
            )
        self._queues[rank].pop()
        return event[1]
