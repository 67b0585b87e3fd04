"""The folder of a job's checkpoints: which there are, and how one takes the place of another.

A checkpoint is written beside the others under a name that nobody loads. Only when every rank has
its shard on the disk it gets its own name, in one move; only when it has it on every host do older
ones go. Hosts may have one folder together, or each its own.
"""

from __future__ import annotations

import re
import shutil
from contextlib import suppress
from pathlib import Path

from offbeat.core.checkpoint import shard
from offbeat.core.checkpoint.shard import Manifest

NAME = re.compile(r"(\d{6})-iteration-(\d+)")
UNFINISHED = ".unfinished-"


class Folder:
    """`path`, or the one checkpoint in it that `path` is."""

    def __init__(self, path: str | Path):
        given = Path(path).absolute()
        self.only = given.name if NAME.fullmatch(given.name) else None
        self.path = given.parent if self.only else given

    def names(self) -> list[str]:
        """Checkpoints, the newest first, whole or not."""
        if self.only is not None:
            return [self.only]
        found = [p.name for p in self.path.iterdir()] if self.path.is_dir() else []
        return sorted((name for name in found if NAME.fullmatch(name)), reverse=True)

    def whole(self, worker: int) -> dict[str, Manifest]:
        """Checkpoints in which this worker's shard is whole, the newest first."""
        found: dict[str, Manifest] = {}
        for name in self.names():
            try:
                found[name] = shard.look_up(self.shard(name, worker))
            except (OSError, ValueError, TypeError):  # not there, cut, or of another time
                continue
        return found

    def next_number(self) -> int:
        """Above all there are."""
        names = self.names()
        return 1 + (int(names[0][:6]) if names else 0)

    def shard(self, name: str, worker: int) -> Path:
        """Where a worker's part of a checkpoint is."""
        return self.path / name / f"rank-{worker}"

    def unfinished_path(self, name: str, worker: int) -> Path:
        """Where it is while it is written."""
        return self.path / f"{UNFINISHED}{name}" / f"rank-{worker}"

    def drop(self, name: str, worker: int) -> None:
        """It will not be finished."""
        part = self.unfinished_path(name, worker)
        shutil.rmtree(part, ignore_errors=True)
        with suppress(OSError):  # others have theirs in it
            part.parent.rmdir()

    def finish(self, name: str, worker: int) -> None:
        """Give a checkpoint its name, unless another rank of this host has done so."""
        try:
            (self.path / f"{UNFINISHED}{name}").rename(self.path / name)
        except OSError:
            if not self.shard(name, worker).is_dir():
                raise
        shard.sync(self.path)

    def prune(self, keep: int) -> None:
        """Leave the newest ones, and nothing that was never finished."""
        for name in self.names()[keep:]:
            shutil.rmtree(self.path / name, ignore_errors=True)
        for left in self.path.glob(f"{UNFINISHED}*"):
            shutil.rmtree(left, ignore_errors=True)
