"""State of a job, read again and again from run.json, alive.json and rank0.jsonl.

Rank 0 writes these files. This module imports neither torch nor the runtime.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from offbeat.core.transport.failure_detector import interval_s
from offbeat.core.words import one_line
from offbeat.jobs.interval import Interval
from offbeat.jobs.membership_history import EVENT, MembershipHistory
from offbeat.jobs.record_folder import ALIVE_TIMEOUT_S, as_object, find_runs, read_object
from offbeat.jobs.record_lines import ALIVE_FILE, RUN_FILE, Place, follow, rank_file

HEARTBEAT_TIMEOUT_S = 5.0  # lower bound of `heartbeat_timeout_s`
SERIES_POINTS, EVENTS = 4000, 8  # newest intervals and events that are kept
LATE_SHARE, SAME_SHARE = 0.1, 0.02  # shares of an iteration, see `delaying_ranks`
ACTIVE = ("running", "waiting")  # states of a heartbeat; all others are final
FAILED = ("failed", "aborted", "reported")
LEFT = "left"  # end of the record of a member that has left


def heartbeat_timeout_s(ranks: int) -> float:
    """Return the age in seconds above which a heartbeat states that its rank is silent.

    Heartbeats of many ranks are rare, and the store of the job is read as rarely.
    """
    return max(HEARTBEAT_TIMEOUT_S, 2.5 * interval_s(ranks))


# --- reading -------------------------------------------------------------------------------------


def find_run(folder: Path) -> Path:
    """Return the folder of a run: `folder`, or the newest run in it.

    Raises:
        ValueError: there is no run, or rank 0 has written its files on another host.
    """
    found = [folder] if _is_written_here(folder) else filter(_is_written_here, find_runs(folder))
    if runs := list(found):
        return runs[-1]
    if any(folder.glob("rank*.jsonl")) or any(folder.glob("*/rank*.jsonl")):
        raise ValueError(
            f"folder ({folder}) must hold the lines of rank 0 (rank0.jsonl); run offbeat watch on "
            "the host of rank 0"
        )
    raise ValueError(
        f"folder ({folder}) must hold the record of a job; start the job with "
        f"OFFBEAT_RECORD={folder} to record it there, or wait until all its ranks are in prepare"
    )


def _is_written_here(folder: Path) -> bool:
    """Return whether rank 0 of a job writes into a folder."""
    return "id" in read_object(folder / RUN_FILE) or rank_file(folder, 0).exists()


def _write_time_s(folder: Path) -> float:
    """Return the time at which rank 0 last wrote a file, by the clock of the file system."""
    paths = (folder / RUN_FILE, folder / ALIVE_FILE, rank_file(folder, 0))
    return max((path.stat().st_mtime for path in paths if path.exists()), default=0.0)


def _as_interval(data: Any) -> Interval | None:
    """Return the interval of a line or of alive.json; None if it is incomplete."""
    try:
        interval = Interval.from_dict(data)
        return interval if interval.n > 0 and interval.mean_s >= 0 else None
    except (AttributeError, KeyError, TypeError, ValueError):
        return None


class JobFollower:
    """Reader of the files of rank 0. Each `read` adds new lines, and memory stays bounded.

    Args:
        folder: folder of the run.
        clock: monotonic seconds.

    Attributes:
        run: content of run.json; empty while it is missing.
        alive: content of alive.json that was last complete; empty while it is missing.
        series: seconds and number of iterations of the newest intervals.
        last: newest interval of rank 0's lines; None before the first.
        events: newest events.
        event_count: number of all events.
        end: last line of a job that has ended; None if it runs or was cut short.
        unchanged_s: seconds for which no file has changed, as seen by this reader.
        has_changed: whether rank 0 has certainly written a file within `ALIVE_TIMEOUT_S`.
    """

    def __init__(self, folder: Path, clock: Callable[[], float] = time.monotonic):
        self.folder, self._clock = folder, clock
        self.run: dict[str, Any] = {}
        self.alive: dict[str, Any] = {}
        self._alive_text = b""
        # Of each process that is or was rank 0: the position in its lines, and the time after
        # which they count.
        self._places: dict[int, tuple[Place, float | None]] = {0: (Place(), None)}
        self._last_t = -math.inf
        self._forget_lines()
        # Another host's clock may differ, so an old file is not taken for a silent rank, and a
        # file of the future not for an alive one: both are observed first.
        age_s = time.time() - _write_time_s(folder)
        self.has_changed = -1 <= age_s < ALIVE_TIMEOUT_S
        self._change_s = clock() - (age_s if self.has_changed else 0.0)
        self.read(first=True)

    def _forget_lines(self) -> None:
        self.series: deque[tuple[float, int]] = deque(maxlen=SERIES_POINTS)
        self.events: deque[dict[str, Any]] = deque(maxlen=EVENTS)
        self.event_count = 0
        self.last: Interval | None = None
        self.end: dict[str, Any] | None = None
        self.changes: deque[dict[str, Any]] = deque(maxlen=SERIES_POINTS)

    def read(self, *, first: bool = False) -> None:
        """Read what the files have gained."""
        changed = False
        try:
            text = (self.folder / ALIVE_FILE).read_bytes()
        except FileNotFoundError:
            text = b""
        if text != self._alive_text:
            changed, self._alive_text = True, text
            self.alive = as_object(text) or self.alive
        self._places.setdefault(self.writer, (Place(), None))
        for number, (before, from_t) in list(self._places.items()):
            lines, place = follow(rank_file(self.folder, number), before)
            changed |= place != before
            from_t = self._last_t if from_t is None else from_t
            if number == 0 and (place.inode != before.inode or place.offset < before.offset):
                self._forget_lines()
            self._places[number] = place, from_t
            for line in lines:
                t = line.get("t", math.inf)
                ends_job = number == self.writer and line.get("how") != LEFT
                if t > from_t and (line["kind"] != "end" or ends_job):
                    self._add(line)
                self._last_t = max(self._last_t, t) if t < math.inf else self._last_t
        self.run = read_object(self.folder / RUN_FILE) or self.run
        if changed and not first:
            self.has_changed, self._change_s = True, self._clock()
        self.unchanged_s = self._clock() - self._change_s

    def _add(self, line: dict[str, Any]) -> None:
        if line["kind"] == "interval" and (interval := _as_interval(line)) is not None:
            self.last = interval
            self.series.append((interval.s_sum, interval.n))
        elif line["kind"] == "event":
            if line.get("event") == EVENT:
                if any(line.get("epoch") == known.get("epoch") for known in self.changes):
                    return
                self.changes.append(line)
            self.events.append(line)
            self.event_count += 1
        elif line["kind"] == "end":
            self.end = line

    @property
    def writer(self) -> int:
        """Return the number of the process that is rank 0."""
        writer = self.alive.get("writer")
        return writer if isinstance(writer, int) else 0

    @property
    def members(self) -> MembershipHistory | None:
        """Return the changes of the members; None without any."""
        if not self.changes:
            return None
        first, start_t = self.run.get("world_size"), self.run.get("started")
        return MembershipHistory.of(
            int(first or 0), float(start_t or self.changes[0]["t"]), self.changes
        )

    @property
    def is_silent(self) -> bool:
        """Whether rank 0 writes no longer, although the job has not ended."""
        return self.end is None and self.unchanged_s >= ALIVE_TIMEOUT_S

    @property
    def is_certain(self) -> bool:
        """Whether this reader has seen that rank 0 writes, is silent, or has ended the job."""
        return self.end is not None or self.has_changed or self.is_silent


# --- views ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RankView:
    """Shown facts of a rank.

    Attributes:
        rank: rank.
        host: name of the host.
        pid: process on the host; None if unknown.
        age_s: seconds since the last heartbeat, as rank 0 has seen it.
        iteration: current iteration; -1 before the first.
        state: state of the heartbeat, such as "running".
        activity: current activity, or the reason why the rank has stopped.
        silent: whether heartbeats are missing.
        delays_others: see `delaying_ranks`.
        compute_s: seconds per iteration in forward, backward and updates; None if unknown.
        wait_s: seconds per iteration of waiting for messages.
        script_s: seconds per iteration between iterations.
        sent_bytes_per_s: bytes sent per second.
    """

    rank: int
    host: str
    pid: int | None
    age_s: float
    iteration: int
    state: str
    activity: str
    silent: bool
    delays_others: bool
    compute_s: float | None = None
    wait_s: float | None = None
    script_s: float | None = None
    sent_bytes_per_s: float | None = None


@dataclass(frozen=True)
class JobView:
    """Everything that a screen shows.

    Attributes:
        run: name of the run's folder.
        strategy: strategy with its settings.
        world_size: number of ranks.
        hosts: number of hosts; 0 if unknown.
        state: "running", "checking" while a sign of rank 0 is awaited, "silent" if a rank is,
            "failed" if a rank has failed, or how the job has ended: "ended", "raised", "signal".
        rank_0_silent_s: seconds for which a silent rank 0 has not written, as seen by this reader;
            else None.
        last_sign_t: time of alive.json in seconds since 1970, by rank 0's clock; None without it.
        iteration: iterations of rank 0.
        iteration_s: seconds per iteration; None before the first interval, as all that follow.
        predicted_s: prediction; None if nothing is predicted.
        mark: "~" if the prediction is of a disturbed profile.
        bound_s: lower bound of the strategy; None if unknown.
        wait_share: share of the time in which rank 0 waits for messages.
        script_share: share of the time between iterations of rank 0.
        loss: mean loss of the last interval.
        nonfinite_losses: number of losses of the last interval that are not finite.
        series_s: seconds per iteration of the newest intervals, oldest first.
        ranks: ranks in order; empty without alive.json.
        events: newest events, oldest first.
        end: last line of the job; None if it runs or was cut short.
        members: times in seconds since 1970, each with the number of members from then on; empty
            without changes.
        members_text: description of the changes of the members.
    """

    run: str
    strategy: str
    world_size: int
    hosts: int
    state: str
    rank_0_silent_s: float | None
    last_sign_t: float | None
    iteration: int
    iteration_s: float | None
    predicted_s: float | None
    mark: str
    bound_s: float | None
    wait_share: float | None
    script_share: float | None
    loss: float | None
    nonfinite_losses: int
    series_s: Sequence[float]
    ranks: Sequence[RankView]
    events: Sequence[Mapping[str, Any]]
    end: Mapping[str, Any] | None
    members: Sequence[tuple[float, int]] = ()
    members_text: str = ""

    @property
    def has_failed(self) -> bool:
        """Whether the job was stopped, or a rank has failed or is silent."""
        return self.state not in ("running", "checking", "ended")


def delaying_ranks(intervals: Sequence[Interval]) -> set[int]:
    """Return the ranks that begin their messages late, while the others wait for them.

    A collective ends on all ranks at the same time, so the messages of the rank that joins last
    take the least time. No clock is needed.
    """
    if len(intervals) < 2:
        return set()
    iteration_s = median(i.mean_s for i in intervals)
    least_s = min(i.message_s for i in intervals)
    others = [i for i in intervals if i.message_s > least_s + SAME_SHARE * iteration_s]
    if 2 * len(others) < len(intervals):
        return set()
    late_s = min(
        median(i.message_s for i in others) - least_s,
        median(i.wait_s / i.n for i in others),  # asynchronous workers do not wait for each other
    )
    if late_s < LATE_SHARE * iteration_s:
        return set()
    return {i.rank for i in intervals} - {i.rank for i in others}


def view(job: JobFollower) -> JobView:
    """Return what a screen shows now."""
    entries = [
        entry
        for entry in job.alive.get("ranks") or ()
        if isinstance(entry, dict) and isinstance(entry.get("rank"), int)
    ]
    entries.sort(key=lambda entry: entry["rank"])
    intervals = {entry["rank"]: _as_interval(entry.get("interval")) for entry in entries}
    late = delaying_ranks([i for i in intervals.values() if i is not None])
    silent_s = job.unchanged_s if job.is_silent else None
    timeout_s = heartbeat_timeout_s(len(entries))
    ranks = tuple(
        _rank_view(
            entry, intervals[rank], late, silent_s if rank == job.writer else None, timeout_s
        )
        for entry in entries
        for rank in [entry["rank"]]
    )
    if job.end is not None and job.end.get("how") == "ended":  # ranks leave without a heartbeat
        left: dict[str, Any] = {
            "state": LEFT,
            "activity": "has left",
            "silent": False,
            "delays_others": False,
        }
        ranks = tuple(replace(r, **left) if r.state in ACTIVE else r for r in ranks)
    # An interval of an old job lasts long, so alive.json may have a newer one than the lines.
    known = [i for i in (job.last, intervals.get(job.writer)) if i is not None]
    last = max(known, key=lambda i: i.t) if known else None
    loss = None if last is None else last.loss
    hosts = job.run.get("hosts") or [entry.get("host") for entry in entries]
    members = job.members
    world_size = int(job.run.get("world_size") or len(entries))
    return JobView(
        run=job.folder.resolve().name,
        strategy=str(job.alive.get("strategy") or job.run.get("strategy") or "unknown strategy"),
        world_size=world_size if members is None else len(members.members),
        hosts=len({str(host) for host in hosts}),
        state=_state(job, ranks),
        rank_0_silent_s=silent_s,
        last_sign_t=job.alive.get("t"),
        iteration=max(0 if last is None else last.stop, *(r.iteration for r in ranks[:1]), 0),
        iteration_s=None if last is None else last.mean_s,
        predicted_s=job.alive.get("predicted_s"),
        mark=job.alive.get("mark", ""),
        bound_s=job.alive.get("bound_s"),
        wait_share=None if last is None else _share(last.wait_s, last),
        script_share=None if last is None else _share(last.script_s, last),
        loss=None if loss is None or not loss.n else loss.mean,
        nonfinite_losses=0 if loss is None else loss.nonfinite,
        series_s=tuple(s / n for s, n in job.series),
        ranks=ranks,
        events=tuple(job.events),
        end=job.end,
        members=() if members is None else members.counts,
        members_text="" if members is None else members.describe(),
    )


def _state(job: JobFollower, ranks: Sequence[RankView]) -> str:
    if job.end is not None:
        return str(job.end.get("how", "ended"))
    if any(rank.state in FAILED for rank in ranks):
        return "failed"
    if job.is_silent or any(rank.silent for rank in ranks):
        return "silent"
    return "running" if job.has_changed else "checking"


def _rank_view(
    entry: Mapping[str, Any],
    interval: Interval | None,
    late: set[int],
    silent_s: float | None,
    timeout_s: float,
) -> RankView:
    """Return the view of an entry of alive.json.

    Args:
        entry: fields of the rank.
        interval: interval of the entry.
        late: result of `delaying_ranks`.
        silent_s: for a silent rank 0, seconds for which it has not written; else None.
        timeout_s: see `heartbeat_timeout_s`.
    """
    rank, state = entry["rank"], str(entry.get("state", "running"))
    age_s = float(entry.get("age_s") or 0.0) if silent_s is None else silent_s
    sums: dict[str, float] = {}
    if interval is not None:
        sent = sum(link.bytes for link in interval.links.values())
        sums = {
            "compute_s": interval.own_s / interval.n,
            "wait_s": interval.wait_s / interval.n,
            "script_s": interval.script_s / interval.n,
            "sent_bytes_per_s": sent / max(interval.s_sum, 1e-9),
        }
    return RankView(
        rank=rank,
        host=str(entry.get("host", "")),
        pid=entry.get("pid"),
        age_s=age_s,
        iteration=max(int(entry.get("iteration", -1)), -1 if interval is None else interval.stop),
        state=state,
        activity=one_line(entry.get("activity")),
        silent=state in ACTIVE and (silent_s is not None or age_s > timeout_s),
        delays_others=rank in late,
        **sums,
    )


def _share(seconds: float, interval: Interval) -> float:
    return seconds / interval.s_sum if interval.s_sum else 0.0
