"""Failure detector: statuses of all ranks, and the suspects that follow from them, without I/O.

It is imported without torch by reports of jobs.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

INTERVAL_S = 0.5  # lower bound of `interval_s`
MAX_EXCHANGES_PER_S = 128  # limit of the exchanges of all ranks with the store per second
# Limit of the interval, which precedes the other one. With 8192 ranks, an interval of 64 s would
# detect a failure only after 160 s, when waits of other ranks have ended.
MAX_INTERVAL_S = 8.0
# Bytes of one exchange that the host of the store receives, in TCP segments with their headers: a
# heartbeat with a status of 100 characters, a request for the digest, and an acknowledgement.
RECEIVED_BYTES = 480
STORE_TIMEOUT_S = 1.0  # a store request that takes longer marks the store as lost
HEARTBEAT_TIMEOUT_S = 2.0  # lower bound of `FailureDetector.timeout_s`
MAX_READS_PER_S = 256  # limit of the heartbeats that rank 0 reads per second
MAX_POLL_S = MAX_INTERVAL_S / 2  # limit of `FailureDetector.poll_s`, which precedes the other one
LATE_SHARE = 0.75  # `FailureDetector.late_s`, as a share of `timeout_s`

# States of a rank. RUNNING: the rank computes or runs user code. WAITING: the rank waits for other
# ranks. ABORTED: the rank has given up a wait. REPORTED: the rank has given up a wait and has
# published its suspects. LEFT: the rank has stopped without failure. FAILED: the rank has raised an
# exception that no other rank has caused.
RUNNING, WAITING, ABORTED = "running", "waiting", "aborted"
REPORTED, LEFT, FAILED = "reported", "left", "failed"
ACTIVE = (RUNNING, WAITING)  # states of a rank that still takes part in the job
IN_SCRIPT = "in its script"  # activity of a rank outside of forward, backward and consolidate

Status = list[Any]  # JSON form of a status: [iteration, state, activity, suspects]


def interval_s(world_size: int) -> float:
    """Return the seconds between two exchanges of a rank with the store."""
    return max(INTERVAL_S, min(world_size / MAX_EXCHANGES_PER_S, MAX_INTERVAL_S))


def traffic_bps(world_size: int) -> float:
    """Return the bit/s that the host of the store receives: at most 492 kbit/s at up to 1024 ranks,
    and 480 bit/s per rank above. It sends less."""
    return 8 * RECEIVED_BYTES * (world_size - 1) / interval_s(world_size)


@dataclass
class RankStatus:
    """Last heartbeat received from a rank, with local arrival times.

    Attributes:
        sequence: number of the heartbeat, counted by its sender; -1 before rank 0 has read one.
        iteration: current iteration of the sender; -1 before its first iteration.
        state: state of the sender, such as `RUNNING` or `FAILED`.
        activity: current activity of the sender ("in forward"), or the reason why it stopped.
        suspects: ranks that the sender suspects of having failed.
        received_s: local monotonic time at which the sender was last known to live.
        changed_s: local monotonic time of the last change of iteration, state or activity.
        is_late: whether rank 0 lists the sender as late.
    """

    sequence: int = -1
    iteration: int = -1
    state: str = RUNNING
    activity: str = "not seen yet"
    suspects: tuple[int, ...] = ()
    received_s: float = 0.0
    changed_s: float = 0.0
    is_late: bool = False

    def __str__(self) -> str:
        prefix = "" if self.iteration < 0 else f"iteration {self.iteration}, "
        return prefix + self.activity

    def update(self, now_s: float, sequence: int, status: Status) -> None:
        """Store a heartbeat that rank 0 has read at `now_s`. A new one is a sign of life."""
        if sequence != self.sequence:
            self.set(now_s, status)
            self.sequence, self.received_s = sequence, now_s

    def set(self, now_s: float, status: Status) -> None:
        """Store a status read at `now_s`."""
        iteration, state, activity, suspects = status
        self.suspects = tuple(suspects)
        if (iteration, state, activity) != (self.iteration, self.state, self.activity):
            self.iteration, self.state, self.activity = iteration, state, activity
            self.changed_s = now_s


class FailureDetector:
    """Detector of failed ranks and of a lost store. The detector performs no I/O.

    Attributes:
        rank: rank of this process, which is never a suspect.
        statuses: last received status of each rank, indexed by rank; includes this rank. Except on
            rank 0, iteration and activity of an active rank are those of the last table.
        interval_s: seconds between two heartbeats of a rank. Grows with the number of ranks.
        poll_s: seconds between two reads of rank 0, and of a rank that waits for failures.
        timeout_s: a rank without a new heartbeat for this time is suspect. At least two intervals,
            because a heartbeat is read up to one interval after it was published.
        late_s: age of a heartbeat from which rank 0 lists its sender as late.
        round: number of the last digest.
        digest_s: local monotonic time at which that digest was first read. On rank 0, the time at
            which it has read the heartbeats of that digest.
        failed_request_s: local monotonic time at which the failed store request began, or None.
    """

    def __init__(self, rank: int, world_size: int):
        self.rank = rank
        self.interval_s = interval_s(world_size)
        self.poll_s = max(self.interval_s / 4, min(world_size / MAX_READS_PER_S, MAX_POLL_S))
        self.timeout_s = max(HEARTBEAT_TIMEOUT_S + self.interval_s / 2, 2.5 * self.interval_s)
        self.late_s = LATE_SHARE * self.timeout_s
        self.round, self.digest_s = 0, time.monotonic()
        self.statuses = [
            RankStatus(received_s=self.digest_s, changed_s=self.digest_s) for _ in range(world_size)
        ]
        self.failed_request_s: float | None = None
        self._store_request_s: float | None = None  # start of the store request in progress

    def end_round(self, read_s: float) -> None:
        """Note that rank 0 has read all heartbeats.

        Args:
            read_s: local monotonic time at which the heartbeats were read.
        """
        for status in self.statuses:
            status.is_late = status.state in ACTIVE and read_s - status.received_s > self.late_s
        self.round, self.digest_s = self.round + 1, read_s

    def set_row(
        self,
        rank: int,
        read_s: float,
        ages_s: Sequence[float],
        is_late: bool,
        status: Status | None = None,
    ) -> None:
        """Store a row of a table that was read at `read_s`."""
        row = self.statuses[rank]
        if status is not None:
            row.set(read_s, status)
        row.received_s, row.changed_s = (read_s - age_s for age_s in ages_s)
        row.is_late = is_late

    def set_digest(self, read_s: float, number: int) -> None:
        """Store a digest that was first read at `read_s`."""
        for status in self.statuses:
            if status.state in ACTIVE and not status.is_late:
                status.received_s = read_s
        # Other threads compute ages relative to `digest_s`, so set it last.
        self.round, self.digest_s = number, read_s

    @contextmanager
    def track_store_request(self) -> Iterator[None]:
        """Measure the store request in the body. Mark the store as lost on a RuntimeError."""
        self._store_request_s = time.monotonic()
        try:
            yield
        except RuntimeError:
            self.failed_request_s = self._store_request_s
        self._store_request_s = None

    @property
    def store_lost_s(self) -> float | None:
        """Start of the store request that failed or is overdue; None while the store responds."""
        request_s = self._store_request_s
        if self.failed_request_s is None and request_s is not None:
            return request_s if time.monotonic() - request_s > STORE_TIMEOUT_S else None
        return self.failed_request_s

    @property
    def needs_abort(self) -> bool:
        """Whether this rank needs to stop waiting, because another rank has failed or aborted."""
        return bool(self._peers(ABORTED, REPORTED, FAILED))

    def store_readers(self) -> list[int]:
        """Return the live peers that still read the store. Empty if the store is lost."""
        if self.store_lost_s is not None:
            return []
        return [r for r in self._peers(*ACTIVE, ABORTED) if not self._is_silent(r)]

    def dead_peers(self) -> list[int]:
        """Return the peers that failed and those without a heartbeat for `timeout_s` seconds."""
        silent = [r for r in self._peers(*ACTIVE) if self._is_silent(r)]
        return sorted([*self._peers(FAILED), *silent])

    def failed_peers(self) -> list[int]:
        """Return dead peers, and peers that any rank suspects."""
        suspected = {rank for status in self.statuses for rank in status.suspects}
        return sorted({*self.dead_peers(), *suspected} - {self.rank})

    def suspects(self, waited_s: float) -> list[int]:
        """Return the ranks that block this rank, by the first rule that applies.

        1. The ranks that `failed_peers` returns, if any.
        2. If the store is lost and rank 0 was active: rank 0, because rank 0 hosts the store; no
           rank if rank 0 is this rank.
        3. The ranks that have left, if any.
        4. If the store responds: the running ranks whose iteration, state and activity have not
           changed for `max(timeout_s, waited_s / 2)` seconds.

        Args:
            waited_s: seconds for which this rank has waited.
        """
        if failed := self.failed_peers():
            return failed
        if self.has_unexplained_store_loss:
            return [0] if self.rank else []
        if left := self._peers(LEFT):
            return left
        if self.store_lost_s is not None:
            return []
        now_s, minimum_s = time.monotonic(), max(self.timeout_s, waited_s / 2)
        return [r for r in self._peers(RUNNING) if now_s - self.statuses[r].changed_s >= minimum_s]

    def describe_suspect(self, rank: int) -> str:
        """Return the reason to suspect a rank, to follow "Rank N": "has left after iteration 5"."""
        status, now_s = self.statuses[rank], time.monotonic()
        if status.state == FAILED:
            return status.activity
        if status.state == LEFT:
            return f"has left after iteration {status.iteration}"
        last = f"no heartbeat for {now_s - status.received_s:.0f} s; last heard: {status}"
        reporters = [r for r, s in enumerate(self.statuses) if rank in s.suspects]
        allowed_s = 2 * self.interval_s if reporters else self.timeout_s
        if status.state in ACTIVE and self._silence_s(rank) > allowed_s:
            return f"has died or stands still: {last}"
        if reporters and status.state != RUNNING:
            ranks = ", ".join(map(str, reporters))
            return f"is a suspect of rank {ranks}, but publishes heartbeats: {status}"
        if self.store_lost_s is not None:
            return f"cannot be reached, as its store does not respond: {last}"
        return f"keeps the others waiting: {status}, for {now_s - status.changed_s:.0f} s"

    def remedy(self, suspects: Sequence[int], timeout_s: float) -> str:
        """Return what to do, by the recorded states of the ranks that block this rank; an empty
        text if there are none.

        Args:
            suspects: result of `suspects`.
            timeout_s: timeout of the wait in seconds.
        """
        failed, left = (
            [r for r in suspects if self.statuses[r].state == state] for state in (FAILED, LEFT)
        )
        silent = [r for r in suspects if self.statuses[r].state in ACTIVE and self._is_silent(r)]
        if failed:
            return f"Mend the error of {_ranks(failed)}, and start the job again."
        if silent or self.has_unexplained_store_loss:
            lost = _ranks(silent or [0])
            return (
                f"Look for the cause in the log of {lost} and in the kernel's log of its host, "
                "where a lack of memory is stated; then start the job again."
            )
        if left:
            return (
                f"The loop of {_ranks(left)} has fewer iterations: wrap the loader with "
                "offbeat.join(loader), or give all ranks equally many batches."
            )
        return f"If it is only slow, raise timeout_s ({timeout_s:g} s)." if suspects else ""

    @property
    def has_unexplained_store_loss(self) -> bool:
        """Whether the store is lost although rank 0, which hosts it, has not stopped."""
        return self.store_lost_s is not None and self.statuses[0].state in ACTIVE

    def _silence_s(self, rank: int) -> float:
        """Return the seconds since the last heartbeat of a rank."""
        # A lost store or a silent rank 0 delivers no heartbeats, so count the silence of a rank
        # only until then.
        lost_s = self.store_lost_s
        end_s = self.digest_s if rank else time.monotonic()
        return (end_s if lost_s is None else min(end_s, lost_s)) - self.statuses[rank].received_s

    def _is_silent(self, rank: int) -> bool:
        """Return whether the heartbeat of a rank has timed out."""
        return self._silence_s(rank) > self.timeout_s

    def _peers(self, *states: str) -> list[int]:
        """Return all other ranks that are in one of the states."""
        return [r for r, s in enumerate(self.statuses) if s.state in states and r != self.rank]


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
