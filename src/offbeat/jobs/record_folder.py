"""Folders of records: runs in a folder, whether a run is being written, and their removal."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from offbeat.core.words import count_text, size
from offbeat.jobs.record_lines import ALIVE_FILE, RUN_FILE, last_lines, rank_files

ALIVE_TIMEOUT_S = 10.0  # rank 0 is silent if its files do not change for this time
IDLE_S = 3600.0  # a run without an end is removed only if nothing was written for this time
PAGE_FILE = "report.html"
OWN_FILES = (  # patterns of the files that offbeat writes into the folder of a run
    "run.json",
    "alive.json",
    "profile*.json",
    "plan*.json",
    "predicted.json",
    "rank*.jsonl",
    PAGE_FILE,
)


@dataclass(frozen=True)
class Removal:
    """Result of a removal of runs.

    Attributes:
        runs: names of the removed runs, oldest first.
        freed_bytes: size of the removed files.
    """

    runs: tuple[str, ...]
    freed_bytes: int


def describe_removal(removal: Removal) -> str:
    """Return a sentence about the removed runs."""
    runs = f"{count_text(len(removal.runs), 'run')} ({', '.join(removal.runs)})"
    return f"removed {runs} from the folder of records, {size(removal.freed_bytes)}"


def new_run(record: str | None, t: float) -> str:
    """Return an id of a run: day, UTC and four random digits, as in "1124-0612-3f9a".

    Args:
        record: folder of records, in which a folder for the run is created; None: no folder.
        t: seconds since 1970.
    """
    while True:
        run = f"{time.strftime('%m%d-%H%M', time.gmtime(t))}-{secrets.token_hex(2)}"
        if record is None:
            return run
        with suppress(FileExistsError):  # another job has drawn the same digits
            Path(record, run).mkdir(parents=True)
            return run


def is_run(folder: Path) -> bool:
    """Return whether a folder holds the record of a job; run.json of a comparison has no id."""
    return "id" in read_object(folder / RUN_FILE) or any(folder.glob("rank*.jsonl"))


def find_runs(folder: Path) -> list[Path]:
    """Return the runs in a folder, oldest first."""
    return sorted((path for path in folder.glob("*/") if is_run(path)), key=start_s)


def start_s(folder: Path) -> float:
    """Return the start of a run in seconds since 1970."""
    started = read_object(folder / RUN_FILE).get("started")
    if isinstance(started, int | float):
        return started
    heads = [_first_line(path).get("t") for path in folder.glob("rank*.jsonl")]
    return min((t for t in heads if isinstance(t, int | float)), default=0.0)


def previous_attempt(folder: Path, attempt: Mapping[str, Any]) -> str | None:
    """Return the name of the newest run in a folder that torchrun has restarted as this one.

    A static rendezvous has the job "none", so its attempts are those of one agent.

    Args:
        folder: folder of runs.
        attempt: `settings.torchrun_attempt` of the process that starts.
    """
    same = "agent" if attempt["job"] == "none" else "job"
    for run in reversed(find_runs(folder)):
        earlier = read_object(run / RUN_FILE).get("torchrun")
        if not isinstance(earlier, dict) or earlier.get(same) != attempt[same]:
            continue
        restarts = earlier.get("restarts")
        if isinstance(restarts, int) and restarts < attempt["restarts"]:
            return run.name
    return None


def is_alive(folder: Path, now: float) -> bool:
    """Return whether rank 0 has replaced alive.json within the last seconds."""
    try:
        age_s = now - (folder / ALIVE_FILE).stat().st_mtime
    except OSError:
        return False
    return abs(age_s) < ALIVE_TIMEOUT_S


def remove_older(folder: Path, days: float) -> Removal:
    """Remove the runs whose newest line is older than `days` and that do not run.

    Another process may remove files at the same time.
    """
    limit = time.time() - 86400 * days
    return _remove(
        [run for run in find_runs(folder) if not _may_run(run) and _newest_t(run) < limit]
    )


def remove_above(folder: Path, limit_bytes: int, kept: str) -> Removal:
    """Remove the oldest runs until all runs together have at most `limit_bytes`.

    Args:
        folder: folder of runs.
        limit_bytes: largest size of all runs.
        kept: name of the run that begins; it is not removed, nor is any run that may run.
    """
    runs = find_runs(folder)
    excess, removed = sum(map(_size, runs)) - limit_bytes, list[Path]()
    for run in runs:
        if excess <= 0:
            break
        if run.name != kept and not _may_run(run):
            removed.append(run)
            excess -= _size(run)
    return _remove(removed)


def _remove(runs: Sequence[Path]) -> Removal:
    """Remove the files that offbeat has written, and each folder that is empty then."""
    freed = 0
    for run in runs:
        for path in _own_files(run):
            size = _size_of(path)
            with suppress(FileNotFoundError):
                path.unlink()
                freed += size
        with suppress(OSError):  # it holds other files, or is gone
            run.rmdir()
    return Removal(tuple(run.name for run in runs), freed)


def _own_files(run: Path) -> Iterator[Path]:
    for pattern in OWN_FILES:
        yield from (path for path in run.glob(pattern) if path.is_file() or path.is_symlink())


def _size(run: Path) -> int:
    return sum(map(_size_of, _own_files(run)))


def _size_of(path: Path) -> int:
    """Return the bytes of a file; 0 if it is gone."""
    try:
        return path.lstat().st_size
    except FileNotFoundError:
        return 0


def _may_run(run: Path) -> bool:
    """Return whether a rank has written no end, and a file has changed within `IDLE_S`."""
    lines = _last_lines(run)
    if lines and all(line.get("kind") == "end" for line in lines):
        return False
    changed = 0.0
    for path in _own_files(run):
        with suppress(FileNotFoundError):
            if path.name != PAGE_FILE:  # written by `offbeat report`, not by the job
                changed = max(changed, path.lstat().st_mtime)
    return time.time() - changed < IDLE_S


def _newest_t(run: Path) -> float:
    times = [line.get("t") for line in _last_lines(run)]
    known = [t for t in times if isinstance(t, int | float)]
    return max(known, default=start_s(run))


def _last_lines(run: Path) -> list[dict[str, Any]]:
    """Return the last line of each rank; empty without one."""
    return [next(last_lines(path), {}) for path in rank_files(run).values()]


def _first_line(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            return as_object(file.readline())
    except FileNotFoundError:
        return {}


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; empty if there is none that can be read."""
    try:
        return as_object(path.read_bytes())
    except OSError:
        return {}


def as_object(text: bytes) -> dict[str, Any]:
    """Return the JSON object of a text; empty if it is none."""
    try:
        data = json.loads(text)
    except ValueError:
        return {}
    return data if isinstance(data, dict) else {}
