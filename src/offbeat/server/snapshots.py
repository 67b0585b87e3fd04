"""Snapshots of a server's parameters and optimizer state: shards in the format of checkpoints."""

from __future__ import annotations

import os
import re
import shutil
import warnings
from pathlib import Path

from offbeat.core.checkpoint import shard
from offbeat.core.checkpoint.frozen import freeze
from offbeat.core.checkpoint.shard import Manifest
from offbeat.server.parameters import Store

KEEP = 2  # snapshots per server; servers resume from the newest clock that all of them have saved


class Snapshots:
    """Snapshots of one server, in a directory that is shared by all servers or local.

    A snapshot is due whenever the lowest clock passes a multiple of `every`. `base` is the clock of
    the snapshot from which this job has started. Clocks in names include it.
    """

    def __init__(self, directory: str | Path, server: int, every: int):
        self._directory, self._server, self._every = Path(directory), server, every
        self._last = 0
        self.base = 0

    def clocks(self) -> list[int]:
        """Return the clocks of this server's snapshots, in ascending order."""
        pattern = re.compile(rf"server{self._server}-(\d+)")
        names = os.listdir(self._directory) if self._directory.is_dir() else []  # noqa: PTH208
        return sorted(int(found[1]) for name in names if (found := pattern.fullmatch(name)))

    def readable_clocks(self) -> list[int]:
        """Return the clocks of this server's snapshots whose contents are as they were written. A
        damaged one is a warning.

        Reads all files, so call it once, before the job starts.
        """
        found = []
        for clock in self.clocks():
            try:
                shard.require_whole(self._path(clock))
            except (OSError, ValueError) as error:
                self._warn(
                    f"snapshot {self._path(clock)} is damaged ({error}), so the job resumes from "
                    "an earlier one; check the disk"
                )
            else:
                found.append(clock)
        return found

    def restore(self, store: Store, clock: int) -> None:
        """Load the snapshot of a clock, and remove newer ones, whose iterations are lost.

        Otherwise servers could resume a second time from snapshots of two different runs.

        Raises:
            ValueError: the snapshot is of another model or number of servers.
        """
        path = self._path(clock)
        if shard.read_manifest(path).strategy != store.layout.digest:
            raise ValueError(
                f"snapshot ({path}) must be of this model, optimizer and number of servers; give "
                "another directory, or the job that wrote it"
            )
        store.restore(shard.read(path))
        self.base = clock
        self._remove([newer for newer in self.clocks() if newer > clock])

    def set_aside(self) -> None:
        """Rename this server's snapshots with a warning, if no clock was saved by all servers: a
        job that begins from the start must not count them as its own."""
        clocks = self.clocks()
        for clock in clocks:
            self._path(clock).replace(self._path(clock).with_suffix(".unused"))
        if clocks:
            self._warn(
                f"the snapshots in {self._directory} (clock {', '.join(map(str, clocks))}) have no "
                "clock that all servers have saved, so training begins from the start; they are "
                f"kept as server{self._server}-*.unused"
            )

    def save_if_due(self, low: float, store: Store) -> None:
        """Save if `low` has passed a multiple of `every`. A failed write is a warning."""
        if low == float("inf") or int(low) // self._every <= self._last:
            return
        self._last = int(low) // self._every
        clock = self.base + int(low)
        try:
            self.save(clock, store)
        except Exception as error:  # the writer of torch raises errors of several kinds
            shutil.rmtree(self._draft(clock), ignore_errors=True)
            self._warn(
                f"snapshot {self._path(clock)} was not written: {error}; training goes on, and "
                f"older snapshots are as they were. The next attempt follows after {self._every} "
                "clocks; make room there"
            )

    def save(self, clock: int, store: Store) -> None:
        """Write a snapshot under a draft name, rename it, and remove all but the newest ones."""
        draft = self._draft(clock)
        about = Manifest(self._server, len(store.clocks()), clock, store.layout.digest, alike=False)
        shard.write(draft, freeze(store.snapshot(), {}), about)
        draft.replace(self._path(clock))
        shard.sync(self._directory)  # A power failure must not undo the new name.
        self._remove(self.clocks()[:-KEEP])

    def _remove(self, clocks: list[int]) -> None:
        for clock in clocks:
            shutil.rmtree(self._path(clock), ignore_errors=True)

    def _path(self, clock: int) -> Path:
        return self._directory / f"server{self._server}-{clock}"

    def _draft(self, clock: int) -> Path:
        return self._path(clock).with_suffix(".part")

    def _warn(self, words: str) -> None:
        warnings.warn(f"server {self._server}: {words}", RuntimeWarning, stacklevel=3)
