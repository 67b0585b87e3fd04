"""Saving in the background: write, agree that all have written, rename, agree, and prune."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from offbeat.core.checkpoint import shard
from offbeat.core.checkpoint.folder import Folder
from offbeat.core.checkpoint.frozen import Frozen
from offbeat.core.checkpoint.shard import Manifest
from offbeat.core.transport import packed
from offbeat.core.transport.control import Control, new_group


class CheckpointGroup:
    """The ranks that save and load together. Who does it alone has no `control`.

    A thread that saves has a process group of its own: it is in nobody's way.
    """

    def __init__(self, control: Control | None):
        self._control = control
        self.size = control.world_size if control is not None else 1
        self._group = None
        if control is not None and self.size > 1:
            self._group = _meet(control)

    def gather(self, value: Any) -> list[Any]:
        """Everyone's value, by rank. RuntimeError if somebody is missing."""
        return [value] if self._control is None else self._control.gather(value)

    def gather_aside(self, value: Any) -> list[Any]:
        """The same in the thread that saves."""
        return [value] if self._group is None else packed.gather(value, self._group)

    def share(self, value: Any) -> Any:
        """Rank 0's tensors, and numbers and containers of them. RuntimeError on every rank if there
        is anything else in it."""
        if self._control is None or self.size == 1:
            return value
        mine = None if self._control.rank else packed.unreadable(value)
        if (why := self.gather(mine)[0]) is not None:
            raise RuntimeError(f"rank 0 cannot give the others what it has read: {why}")
        with self._control.collective("sharing a checkpoint"):
            return packed.broadcast_state(value, 0, self._control.group)

    def close(self) -> None:
        """Every rank must call it."""
        if self._group is not None and dist.is_initialized():
            dist.destroy_process_group(self._group)
        self._group = None


def _meet(control: Control) -> dist.ProcessGroup:
    """A group of all ranks; RuntimeError naming those that did not come."""
    try:
        with control.waiting("in offbeat.save or offbeat.load"):
            return new_group("gloo", control.timeout_s)
    except RuntimeError as error:
        raise RuntimeError(
            f"rank {control.rank} waited {control.timeout_s:g} s in offbeat.save or offbeat.load "
            f"for the other ranks: {error}. Every rank must call it, not rank 0 alone, in the same "
            f"place of the loop. {control.report_failure()}"
        ) from error


class Saving:
    """A checkpoint on its way to the disk, as `offbeat.save` returns it."""

    def __init__(
        self,
        folder: Folder,
        name: str,
        frozen: Frozen,
        manifest: Manifest,
        company: CheckpointGroup,
        keep: int,
    ):
        self.path: Path = folder.path / name
        self._folder, self._name, self._company, self._keep = folder, name, company, keep
        self._worker = manifest.worker
        self._error: str | None = None
        # No daemon: a process that ends waits for it.
        self._thread = threading.Thread(
            target=self._save, args=(frozen, manifest), name="offbeat-saving"
        )
        self._thread.start()

    @property
    def done(self) -> bool:
        """Whether it is over, well or not."""
        return not self._thread.is_alive()

    def wait(self) -> Path:
        """Wait until it is on every rank's disk; its directory. RuntimeError, naming path and rank,
        if some rank could not save: then the one before is as good as it was."""
        self._thread.join()
        if self._error is not None:
            raise RuntimeError(self._error)
        return self.path

    def _save(self, frozen: Frozen, manifest: Manifest) -> None:
        folder, name = self._folder, self._name
        part = folder.unfinished_path(name, self._worker)
        try:
            written = self._together(lambda: shard.write(part, frozen, manifest))
            if written and self._together(lambda: folder.finish(name, self._worker)):
                folder.prune(self._keep)
                return
        except Exception as error:
            self._error = self._words([f"rank {self._worker} lost the others: {error}"])
        folder.drop(name, self._worker)
        print(f"offbeat: {self._error}", file=sys.stderr, flush=True)

    def _together(self, act: Callable[[], None]) -> bool:
        """Whether all could do their part."""
        try:
            act()
            mine = None
        except Exception as error:
            mine = f"rank {self._worker}: {type(error).__name__}: {error}"
        failed = [words for words in self._company.gather_aside(mine) if words is not None]
        if failed:
            self._error = self._words(failed)
        return not failed

    def _words(self, causes: list[str]) -> str:
        left = [name for name in self._folder.whole(self._worker) if name != self._name]
        before = f"{self._folder.path / left[0]} is" if left else "there is none before it"
        return (
            f"the checkpoint {self.path} was not saved ({'; '.join(causes)}); {before}"
            f"{' still whole' if left else ''}"
        )


class Saver:
    """One session's way to its checkpoints: one is saved at a time."""

    def __init__(self, control: Control | None):
        self.company = CheckpointGroup(control)
        self._last: Saving | None = None

    def save(
        self, folder: Folder, frozen: Callable[[], Frozen], manifest: Manifest, keep: int
    ) -> Saving:
        """Begin to save; the one before is over by then."""
        self.settle()
        numbers = self.company.gather((folder.next_number(), manifest.iteration))
        _require_alike([iteration for _, iteration in numbers])
        name = f"{max(n for n, _ in numbers):06d}-iteration-{manifest.iteration}"
        self._last = Saving(folder, name, frozen(), manifest, self.company, keep)
        return self._last

    def settle(self) -> None:
        """Wait for what is being saved; if that fails it has been said."""
        if self._last is not None:
            self._last._thread.join()

    def finish(self) -> None:
        """Wait for what is being saved, and leave the other ranks."""
        self.settle()
        self.company.close()


def _require_alike(iterations: list[int]) -> None:
    odd = next((rank for rank, mine in enumerate(iterations) if mine != iterations[0]), None)
    if odd is not None:
        raise ValueError(
            f"iteration of the checkpoint must be the same on all ranks: rank 0 has "
            f"{iterations[0]}, rank {odd} {iterations[odd]}; save on every rank in the same place "
            "of the loop"
        )
