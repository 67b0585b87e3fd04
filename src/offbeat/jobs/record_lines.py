"""Record of a job: lines that each rank appends to its file, and their readers.

A line is one JSON object with `kind`, `schema` and `t`, the seconds since 1970. It is appended by
one write, so that a killed process leaves at most one torn line.
"""

from __future__ import annotations

import json
import os
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from offbeat.core.console import console
from offbeat.core.files import replace_text, require_schema
from offbeat.jobs.interval import Interval
from offbeat.jobs.iteration_columns import IterationColumns

T = TypeVar("T")

SCHEMA = 3
RUN_FILE, ALIVE_FILE = "run.json", "alive.json"
TAIL_BYTES = 1 << 17  # that are read for the last lines of a rank
RETRY_S = 600.0  # time between two attempts to write after an error
MOST_UNWRITTEN = 1000  # lines that are kept while the file cannot be written
WRITER_THREAD = "offbeat-record"


def rank_file(folder: Path, rank: int) -> Path:
    """Return the path of a rank's lines."""
    return folder / f"rank{rank}.jsonl"


def rank_files(folder: Path) -> dict[int, Path]:
    """Return the files with lines in a folder by rank, in order."""
    paths = {path.stem.removeprefix("rank"): path for path in folder.glob("rank*.jsonl")}
    return {int(rank): paths[rank] for rank in sorted(filter(str.isdecimal, paths), key=int)}


class LineWriter:
    """Writer of the lines of one rank. All methods may be called from any thread.

    If the file cannot be written, as on a full disk, a warning names file and remedy once. The
    newest `MOST_UNWRITTEN` lines are kept, and written again with a line after `RETRY_S` seconds.
    A fork of this process writes nothing.

    Args:
        folder: folder of the run, which is created.
        rank: rank of this process.
        clock: seconds since 1970.
        monotonic: seconds of a clock that is never set.
    """

    def __init__(
        self,
        folder: Path,
        rank: int,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ):
        self.folder, self._clock, self._monotonic = folder, clock, monotonic
        self._process_id = os.getpid()
        folder.mkdir(parents=True, exist_ok=True)
        self._path = rank_file(folder, rank)
        self._lock = threading.RLock()  # a signal handler may write during a write
        self._unwritten: deque[bytes] = deque(maxlen=MOST_UNWRITTEN)
        self._retry_s: float | None = None  # monotonic time of the next attempt after an error
        self._has_warned = False

    def line(self, kind: str, **fields: Any) -> None:
        """Append one line."""
        if self.is_inherited:  # a thread that does not exist here may hold the lock
            return
        with self._lock:
            self._unwritten.append(_encode(kind, self._clock(), fields))
            if self._may_write() or kind == "end":
                try:
                    _append(self._path, b"".join(self._unwritten))
                except OSError as error:
                    self._handle(error)
                else:
                    self._unwritten.clear()

    def replace(self, name: str, data: dict[str, Any]) -> None:
        """Replace a JSON file of the run."""
        if self.is_inherited:
            return
        with self._lock:
            if not self._may_write():
                return
            try:
                replace_text(self.folder / name, json.dumps({"schema": SCHEMA, **data}))
            except OSError as error:
                self._handle(error)

    @property
    def is_inherited(self) -> bool:
        """Whether this process is a fork of the process that has created this writer."""
        return os.getpid() != self._process_id

    def _may_write(self) -> bool:
        """Return whether an attempt is due. A removed folder is created again."""
        if self._retry_s is None:
            return True
        if self._monotonic() < self._retry_s:
            return False
        self._retry_s = None
        with suppress(OSError):  # the write reports it
            self.folder.mkdir(parents=True, exist_ok=True)
        return True

    def _handle(self, error: OSError) -> None:
        self._retry_s = self._monotonic() + RETRY_S
        self._warn(error)

    def _warn(self, error: OSError) -> None:
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"record ({self._path}) cannot be written: {error.strerror or error}; training "
                f"goes on, and the write is repeated every {RETRY_S:g} s. Make room there, or "
                "record in another folder",
                RuntimeWarning,
                stacklevel=4,
            )


class BackgroundWriter(LineWriter):
    """Writer whose thread writes, so that no caller waits for a network drive that does not answer.

    If the drive does not answer for a long time, the newest `MOST_UNWRITTEN` writes are kept, and
    an event states the number of lost ones.
    """

    def __init__(self, folder: Path, rank: int, clock: Callable[[], float] = time.time):
        super().__init__(folder, rank, clock)
        self._writes: deque[Callable[[], None]] = deque()
        self._lost = 0
        self._is_busy = self._is_closed = False
        self._changed = threading.Condition(threading.RLock())
        threading.Thread(target=self._run, name=WRITER_THREAD, daemon=True).start()

    def line(self, kind: str, **fields: Any) -> None:
        self._add(partial(super().line, kind, **({"t": round(self._clock(), 3)} | fields)))

    def replace(self, name: str, data: dict[str, Any]) -> None:
        self._add(partial(super().replace, name, data))

    def flush(self, limit_s: float) -> bool:
        """Wait until everything is written, for at most `limit_s` seconds; return whether it is."""
        if self.is_inherited:
            return True
        with self._changed:
            return self._changed.wait_for(lambda: not (self._writes or self._is_busy), limit_s)

    def close(self) -> None:
        """End the thread after the last write. Later writes run on the thread of their caller."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def _add(self, write: Callable[[], None]) -> None:
        if self.is_inherited:
            return
        if self._is_closed:
            write()
            return
        with self._changed:
            if len(self._writes) >= MOST_UNWRITTEN:
                self._writes.popleft()
                self._lost += 1
            self._writes.append(write)
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._is_busy = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._writes or self._is_closed)
                if not self._writes:
                    return
                self._is_busy, write = True, self._writes.popleft()
                lost, self._lost = self._lost, 0
            try:
                if lost:
                    text = f"{lost} writes of this record are lost: the folder did not answer"
                    super().line("event", iteration=0, event="warning", text=text)
                write()
            except Warning as warning:  # the script has made warnings errors
                console.print("record", str(warning), "warning")


def _encode(kind: str, t: float, fields: dict[str, Any]) -> bytes:
    line = {"kind": kind, "schema": SCHEMA, "t": round(t, 3), **fields}
    return f"{json.dumps(line, separators=(',', ':'))}\n".encode()


def _append(path: Path, data: bytes) -> None:
    """Append in one write. A partial write is taken back and raises OSError."""
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        size = os.fstat(file).st_size
        if os.write(file, data) < len(data):
            os.ftruncate(file, size)
            raise OSError(28, os.strerror(28), str(path))
    finally:
        os.close(file)


@dataclass(frozen=True)
class Place:
    """Position in a file that grows: its inode, and the bytes that were read."""

    inode: int = -1
    offset: int = 0


def follow(path: Path, place: Place = Place()) -> tuple[list[dict[str, Any]], Place]:
    """Return the complete lines after a position, and the new position.

    A file that was replaced or has become shorter is read from its start. Lines that are no JSON
    object are left out. Without a file there are no lines.
    """
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            same = status.st_ino == place.inode and status.st_size >= place.offset
            begin = place.offset if same else 0
            file.seek(begin)
            data = file.read()
    except FileNotFoundError:
        return [], Place()
    whole = data.rfind(b"\n") + 1
    parsed = (_parse(line) for line in data[:whole].splitlines())
    return [line for line in parsed if line is not None], Place(status.st_ino, begin + whole)


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        data = json.loads(line)
    except ValueError:
        return None
    return data if isinstance(data, dict) and "kind" in data else None


@dataclass
class RankLines:
    """Lines of one rank by kind.

    Attributes:
        head: first line; empty if it is missing.
        intervals: intervals in order.
        events: events in order.
        metrics: metrics in order.
        spans: lines with the spans of some iterations, in order.
        iterations: every iteration, where these are recorded (`offbeat compare`).
        all_ranks: on rank 0, lines with the newest sums of all ranks.
        first: first iteration of the strategy, after the measurement of a profile.
        end: last line of a job that has ended; None if it was cut short.
        torn: whether the last line is incomplete.
        damaged: number of complete lines that cannot be read.
    """

    head: dict[str, Any] = field(default_factory=dict)
    intervals: list[Interval] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    metrics: list[dict[str, Any]] = field(default_factory=list)
    spans: list[dict[str, Any]] = field(default_factory=list)
    iterations: IterationColumns = field(default_factory=IterationColumns)
    all_ranks: list[dict[str, Any]] = field(default_factory=list)
    first: int = 0
    end: dict[str, Any] | None = None
    torn: bool = False
    damaged: int = 0

    def add(self, line: dict[str, Any]) -> None:
        """Add a line. Lines of an unknown kind are ignored."""
        kind = line["kind"]
        try:
            if kind == "head":
                self.head = line
            elif kind == "interval":
                self.intervals.append(Interval.from_dict(line))
            elif kind == "iterations":
                self.iterations.add(line)
            elif kind == "start":
                self.first = line["iteration"]
            elif kind == "end":
                self.end = line
            elif (lines := self._lists.get(kind)) is not None:
                lines.append(line)
        except (AttributeError, KeyError, TypeError, ValueError):
            self.damaged += 1

    @property
    def _lists(self) -> dict[str, list[dict[str, Any]]]:
        return {
            "event": self.events,
            "metric": self.metrics,
            "ranks": self.all_ranks,
            "spans": self.spans,
        }


@dataclass
class JobRecord:
    """Record of one attempt of a job, from one or several folders.

    Attributes:
        folders: folders with the same run.
        run: content of run.json; empty if it is missing.
        ranks: lines by rank.
        alive: content of alive.json; None if it is missing.
        problems: files that cannot be read, each with the reason.
    """

    folders: tuple[Path, ...]
    run: dict[str, Any]
    ranks: dict[int, RankLines]
    alive: dict[str, Any] | None = None
    problems: list[str] = field(default_factory=list)

    @property
    def world_size(self) -> int:
        """Number of ranks; of all processes if members have joined."""
        known = self.run.get("processes") or self.run.get("world_size")
        return int(known or max(self.ranks, default=-1) + 1)

    @property
    def missing(self) -> list[int]:
        """Ranks without lines."""
        return [rank for rank in range(self.world_size) if rank not in self.ranks]

    def json(self, name: str) -> dict[str, Any] | None:
        """Return the content of a JSON file of the run, such as plan.json; None without it."""
        for folder in self.folders:
            data = self._read_json(folder / name)
            if data is not None:
                return data
        return None

    def read_file(self, name: str, parse: Callable[[dict[str, Any]], T]) -> T | None:
        """Return a JSON file of the run as an object; None without it, or if it cannot be read."""
        data = self.json(name)
        try:
            return None if data is None else parse(data)
        except (KeyError, TypeError, ValueError) as error:
            self.problems.append(f"{name} cannot be read: {error}")
            return None

    def _read_json(self, path: Path) -> dict[str, Any] | None:
        try:
            data = json.loads(path.read_text())
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            self.problems.append(f"{path} cannot be read: {error}")
            return None
        return data if isinstance(data, dict) else None


def load(folders: Sequence[Path]) -> JobRecord:
    """Read the folders of one run, which hosts without a shared folder have written.

    Raises:
        ValueError: a folder holds no record, holds one of another schema, or the folders hold
            records of different runs.
    """
    record = JobRecord(tuple(folders), {}, {})
    ids = set()
    for folder in folders:
        files = rank_files(folder)
        if not files and not (folder / RUN_FILE).exists():
            raise ValueError(f"folder ({folder}) must hold the record of a job; it holds no lines")
        for rank, path in files.items():
            try:
                lines = record.ranks[rank] = read_rank(path)
            except OSError as error:
                record.problems.append(f"{path} cannot be read: {error.strerror or error}")
                continue
            ids |= {lines.head["id"]} if "id" in lines.head else set()
    record.run = record.json(RUN_FILE) or {}
    record.alive = record.json(ALIVE_FILE)
    ids |= {record.run["id"]} if "id" in record.run else set()
    if len(ids) > 1:
        raise ValueError(
            f"folders ({', '.join(map(str, folders))}) must be of one run, not of "
            f"{' and '.join(sorted(ids))}; report them one by one"
        )
    return record


def read_rank(path: Path) -> RankLines:
    """Read the lines of one rank. If its script has trained two models, one after the other, the
    lines are those of the later one.

    Raises:
        OSError: the file cannot be read.
        ValueError: a line has another schema.
    """
    lines = RankLines()
    with path.open("rb") as file:
        for text in file:
            if not text.endswith(b"\n"):
                lines.torn = True
            elif (line := _parse(text)) is None:
                lines.damaged += 1
            else:
                require_schema(line.get("schema"), SCHEMA, path)
                lines = RankLines() if line["kind"] == "head" else lines
                lines.add(line)
    return lines


def last_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the last complete lines of a file that may still grow, newest first: at least one, and
    those in the last `TAIL_BYTES`; nothing without a file."""
    try:
        with path.open("rb") as file:
            size, length, texts = os.fstat(file.fileno()).st_size, TAIL_BYTES, list[bytes]()
            while not texts:
                begin = max(0, size - length)
                file.seek(begin)
                texts = file.read(size - begin).split(b"\n")[1 if begin else 0 : -1]
                length *= 4
                if not begin:
                    break
    except FileNotFoundError:
        return
    yield from (line for line in map(_parse, reversed(texts)) if line is not None)
