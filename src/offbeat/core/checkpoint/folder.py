"""Folder of a job's checkpoints: names, completion and deletion of checkpoints.

A checkpoint is written under a temporary name, which `load` ignores. It is renamed in one move when
every rank has its shard on the disk. Older checkpoints are deleted when it has been renamed on
every host. Hosts may share one folder or have one each.
"""

from __future__ import annotations

import re
import shutil
from contextlib import suppress
from pathlib import Path

from offbeat.core.checkpoint import shard
from offbeat.core.checkpoint.shard import Manifest
from offbeat.core.files import SchemaError

NAME = re.compile(r"(\d{6,})-iteration-(\d+)")
UNFINISHED = ".unfinished-"


class Folder:
    """The folder of checkpoints `path`, or its parent if `path` is a checkpoint.

    `only` is the name of that checkpoint, otherwise None.
    """

    def __init__(self, path: str | Path):
        given = Path(path).absolute()
        self.only: str | None = given.name if NAME.fullmatch(given.name) else None
        self.path: Path = given.parent if self.only else given

    def names(self) -> list[str]:
        """Return the names of all checkpoints, also of incomplete ones, the newest first."""
        if self.only is not None:
            return [self.only]
        names = [p.name for p in self.path.iterdir()] if self.path.is_dir() else []
        return sorted(filter(NAME.fullmatch, names), key=_number, reverse=True)

    def manifests(self, worker: int) -> dict[str, Manifest]:
        """Return the manifests of checkpoints in which the worker's shard is complete, the newest
        first."""
        manifests: dict[str, Manifest] = {}
        for name in self.names():
            try:
                manifests[name] = shard.read_manifest(self.shard(name, worker))
            except (OSError, ValueError):  # missing, truncated, or of another schema
                continue
        return manifests

    def refusal(self, worker: int) -> str | None:
        """Return why this version cannot read the newest checkpoint with a shard of the worker;
        None if it can. An earlier checkpoint instead of it would lose training silently."""
        for name in self.names():
            try:
                shard.read_manifest(self.shard(name, worker))
            except SchemaError as error:
                return str(error)
            except (OSError, ValueError):  # missing or truncated
                continue
            return None
        return None

    def next_number(self) -> int:
        """Return a number greater than those of all checkpoints."""
        names = self.names()
        return 1 + (_number(names[0]) if names else 0)

    def shard(self, name: str, worker: int) -> Path:
        """Return the directory of a worker's shard of a checkpoint."""
        return self.path / name / f"rank-{worker}"

    def unfinished_path(self, name: str, worker: int) -> Path:
        """Return the directory in which a worker's shard is written."""
        return self.path / f"{UNFINISHED}{name}" / f"rank-{worker}"

    def drop(self, name: str, worker: int) -> None:
        """Delete a worker's shard that cannot be completed."""
        part = self.unfinished_path(name, worker)
        shutil.rmtree(part, ignore_errors=True)
        with suppress(OSError):  # shards of other workers may be left in it
            part.parent.rmdir()

    def finish(self, name: str, worker: int) -> None:
        """Rename a complete checkpoint, unless another rank of this host has renamed it."""
        try:
            (self.path / f"{UNFINISHED}{name}").rename(self.path / name)
        except OSError:
            if not self.shard(name, worker).is_dir():
                raise
        shard.sync(self.path)

    def prune(self, keep: int) -> None:
        """Delete all but the newest `keep` checkpoints, and all incomplete ones."""
        for name in self.names()[keep:]:
            shutil.rmtree(self.path / name, ignore_errors=True)
        for left in self.path.glob(f"{UNFINISHED}*"):
            shutil.rmtree(left, ignore_errors=True)


def _number(name: str) -> int:
    """Return the number of a checkpoint, which grows beyond six digits."""
    return int(name.partition("-")[0])
