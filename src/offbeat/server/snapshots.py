"""Snapshot files of a server's parameters and optimizer state, written atomically."""

from __future__ import annotations

import os
import re
import warnings
import zipfile
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from offbeat.core.checkpoint.shard import sync
from offbeat.server.parameters import Store

KEEP = 2  # files per server; servers resume from the newest clock that all of them have saved


class Snapshots:
    """Snapshot files of one server, in a directory that is shared by all servers or local.

    A snapshot is due whenever the lowest clock passes a multiple of `every`. `base` is the clock of
    the snapshot from which this job has started. Clocks in file names include it.
    """

    def __init__(self, directory: str | Path, server: int, every: int):
        self._directory, self._server, self._every = Path(directory), server, every
        self._last = 0
        self.base = 0

    def clocks(self) -> list[int]:
        """Return the clocks of this server's snapshot files, in ascending order."""
        pattern = re.compile(rf"server{self._server}-(\d+)\.pt")
        names = os.listdir(self._directory) if self._directory.is_dir() else []  # noqa: PTH208
        return sorted(int(found[1]) for name in names if (found := pattern.fullmatch(name)))

    def readable_clocks(self) -> list[int]:
        """Return the clocks of this server's snapshot files whose contents are as they were
        written. A damaged file is a warning.

        Reads all files, so call it once, before the job starts.
        """
        found = []
        for clock in self.clocks():
            problem = _find_damage(self._path(clock))
            if problem is None:
                found.append(clock)
                continue
            warnings.warn(
                f"server {self._server}: snapshot {self._path(clock)} is damaged ({problem}), so "
                "the job resumes from an earlier one; check the disk",
                RuntimeWarning,
                stacklevel=2,
            )
        return found

    def restore(self, store: Store, clock: int) -> None:
        """Load the snapshot of a clock, and remove newer ones, whose iterations are lost.

        Otherwise servers could resume a second time from snapshots of two different runs.

        Raises:
            ValueError: the snapshot is of another model or number of servers.
        """
        path = self._path(clock)
        saved: dict[str, Any] = torch.load(path, weights_only=True)
        if (saved["layout"], saved["server"]) != (store.layout.digest, store.server):
            raise ValueError(
                f"snapshot ({path}) must be of this model, optimizer and number of servers; give "
                "another directory, or the job that wrote it"
            )
        store.restore(saved)
        self.base = clock
        self._remove(newer for newer in self.clocks() if newer > clock)

    def set_aside(self) -> None:
        """Rename this server's snapshots with a warning, if no clock was saved by all servers: a
        job that begins from the start must not count them as its own."""
        clocks = self.clocks()
        for clock in clocks:
            self._path(clock).replace(self._path(clock).with_suffix(".unused"))
        if clocks:
            listed = ", ".join(map(str, clocks))
            warnings.warn(
                f"server {self._server}: the snapshots in {self._directory} (clock {listed}) have "
                "no clock that all servers have saved, so training begins from the start; they "
                f"are kept as server{self._server}-*.unused",
                RuntimeWarning,
                stacklevel=2,
            )

    def save_if_due(self, low: float, store: Store) -> None:
        """Save if `low` has passed a multiple of `every`. A failed write is a warning."""
        if low == float("inf") or int(low) // self._every <= self._last:
            return
        self._last = int(low) // self._every
        path = self._path(self.base + int(low))
        try:
            self.save(self.base + int(low), store)
        # torch.save raises RuntimeError if a write fails.
        except (OSError, RuntimeError) as error:
            with suppress(OSError):
                _draft_of(path).unlink(missing_ok=True)
            warnings.warn(
                f"server {self._server}: snapshot {path} was not written: {error}; training goes "
                f"on, and older snapshots are as they were. The next attempt follows after "
                f"{self._every} clocks; make room there",
                RuntimeWarning,
                stacklevel=2,
            )

    def save(self, clock: int, store: Store) -> None:
        """Write a snapshot under a draft name, rename it, and remove all but the newest files."""
        self._directory.mkdir(parents=True, exist_ok=True)
        path = self._path(clock)
        draft = _draft_of(path)
        with draft.open("wb") as file:
            torch.save(store.snapshot(), file)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
        sync(self._directory)  # A power failure must not undo the new name.
        self._remove(self.clocks()[:-KEEP])

    def _remove(self, clocks: Iterable[int]) -> None:
        for clock in clocks:
            self._path(clock).unlink(missing_ok=True)

    def _path(self, clock: int) -> Path:
        return self._directory / f"server{self._server}-{clock}.pt"


def _find_damage(path: Path) -> str | None:
    """Return how a file differs from the one that was written; None if it does not."""
    try:
        with zipfile.ZipFile(path) as file:  # compares checksums of all contents
            damaged = file.testzip()
    except (OSError, zipfile.BadZipFile, ValueError) as error:
        return str(error)
    return None if damaged is None else f"the checksum of {damaged} differs"


def _draft_of(path: Path) -> Path:
    """Return the path under which an unfinished snapshot is written."""
    return path.with_suffix(".part")
