"""Background saving of a checkpoint: write, wait for all ranks, rename, and prune."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from offbeat.core.checkpoint import shard
from offbeat.core.checkpoint.folder import Folder
from offbeat.core.checkpoint.frozen import Frozen
from offbeat.core.checkpoint.shard import Manifest
from offbeat.core.console import console
from offbeat.core.transport import packed
from offbeat.core.transport.control import Control


class SaveGroup:
    """The ranks that save and load together. `control` is None for a worker that saves alone.

    The saving thread has its own process group, so that it does not delay other collectives.
    """

    def __init__(self, control: Control | None):
        self._control = control
        self.size: int = control.world_size if control is not None else 1
        self.has_members: bool = control is not None and control.has_members
        self._group, self._is_lost = None, False
        if control is not None and self.size > 1:
            self._group = _create_group(control)

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's value, by rank. Raise RuntimeError if a rank is missing."""
        return [value] if self._control is None else self._control.gather(value)

    def gather_in_thread(self, value: Any) -> list[Any]:
        """Return every rank's value, by rank, in the saving thread."""
        if self._is_lost:
            raise RuntimeError("an earlier checkpoint has lost the other ranks")
        return [value] if self._group is None else packed.gather(value, self._group)

    def share(self, value: Any) -> Any:
        """Return rank 0's value on every rank. It may hold tensors, numbers and containers.

        Raises:
            RuntimeError: on every rank, if the value holds objects of other types.
        """
        if self._control is None or self.size == 1:
            return value
        problem = None if self._control.rank else packed.unreadable(value)
        if (why := self.gather(problem)[0]) is not None:
            raise RuntimeError(f"rank 0 cannot give the others what it has read: {why}")
        with self._control.collective("sharing a checkpoint"):
            return packed.broadcast_state(value, 0, self._control.group)

    def close(self) -> None:
        """Destroy the process group. Every rank must call it."""
        if self._group is not None and dist.is_initialized():
            with suppress(ValueError):  # destroyed when the members of the job have changed
                dist.destroy_process_group(self._group)
        self._group = None

    def drop_group(self) -> None:
        """Drop the process group after a failure, so that other ranks do not wait in it."""
        self._group, self._is_lost = None, True

    @property
    def is_lost(self) -> bool:
        """Whether the process group was dropped, and all ranks may create another one."""
        return self._is_lost and not self.has_members  # changes of members create another one

    def create_group_again(self) -> None:
        """Replace the process group. Every rank must call it."""
        assert self._control is not None
        self.close()
        self._group, self._is_lost = _create_group(self._control), False


def _create_group(control: Control) -> dist.ProcessGroup:
    """Return a process group of all ranks. Raise RuntimeError with the ranks that are missing."""
    try:
        with control.waiting("in offbeat.save or offbeat.load"):
            return control.create_group()
    except RuntimeError as error:
        raise RuntimeError(
            f"rank {control.rank} waited {control.timeout_s:g} s in offbeat.save or offbeat.load "
            f"for the other ranks: {error}. Every rank must call it, not rank 0 alone, in the same "
            f"place of the loop. {control.report_failure()}"
        ) from error


class Saving:
    """A checkpoint that is being written, returned by `offbeat.save`.

    Attributes:
        path: directory of the checkpoint.
    """

    def __init__(self, path: Path, save: Callable[[], str | None]):
        self.path: Path = path
        self._error: str | None = None
        # The thread is not a daemon, so the process waits for it at exit.
        self._thread = threading.Thread(target=self._run, args=(save,), name="offbeat-saving")
        self._thread.start()

    def _run(self, save: Callable[[], str | None]) -> None:
        self._error = save()

    @property
    def done(self) -> bool:
        """Whether saving has ended, with or without success."""
        return not self._thread.is_alive()

    def wait(self) -> Path:
        """Wait until the checkpoint is on the disk of every rank.

        Returns:
            Directory of the checkpoint.

        Raises:
            RuntimeError: a rank could not save; names path and rank. The previous checkpoint is
                unchanged.
        """
        self._thread.join()
        if self._error is not None:
            raise RuntimeError(self._error)
        return self.path


def save_together(
    folder: Folder, name: str, frozen: Frozen, manifest: Manifest, company: SaveGroup, keep: int
) -> str | None:
    """Write this rank's shard of a checkpoint. When all ranks have written theirs, rename it and
    delete older ones.

    Returns:
        Why the checkpoint was not saved; None if it was.
    """
    worker = manifest.worker

    def failures_of(act: Callable[[], None]) -> list[str]:
        try:
            act()
            failure = None
        except Exception as error:
            failure = f"rank {worker}: {type(error).__name__}: {error}"
        return [words for words in company.gather_in_thread(failure) if words is not None]

    part = folder.unfinished_path(name, worker)
    try:
        failed = failures_of(lambda: shard.write(part, frozen, manifest))
        failed = failed or failures_of(lambda: folder.finish(name, worker))
        if not failed:
            with suppress(OSError):  # the next checkpoint tries again
                folder.prune(keep)
            return None
    except Exception as error:
        failed = [f"rank {worker} lost the others: {error}"]
        company.drop_group()
    folder.drop(name, worker)
    left = [one for one in folder.manifests(worker) if one != name]
    before = f"{folder.path / left[0]} is still whole" if left else "there is none before it"
    words = f"the checkpoint {folder.path / name} was not saved ({'; '.join(failed)}); {before}"
    console.print("checkpoint", words, "error", rank=worker)
    return words


class Saver:
    """Saves the checkpoints of one session, one at a time.

    Attributes:
        company: the ranks that save together.
        has_noted_batches: whether the notice about batches was printed.
    """

    def __init__(self, control: Control | None):
        self.company: SaveGroup = SaveGroup(control)
        self.has_noted_batches = False
        self._last: Saving | None = None

    def save(
        self, folder: Folder, frozen: Callable[[], Frozen], manifest: Manifest, keep: int
    ) -> Saving:
        """Wait for the previous checkpoint, and begin to save a new one."""
        self.settle()
        company = self.company
        own = folder.next_number(), manifest.iteration, company.is_lost
        numbers, iterations, lost = zip(*company.gather(own), strict=True)
        _require_alike(iterations)
        if any(lost):  # a rank was slower than the timeout, and all are here again
            company.create_group_again()
        name = f"{max(numbers):06d}-iteration-{manifest.iteration}"
        act = partial(save_together, folder, name, frozen(), manifest, company, keep)
        self._last = Saving(folder.path / name, act)
        return self._last

    def settle(self) -> None:
        """Wait until the last checkpoint has been saved. A failure has been printed already."""
        if self._last is not None:
            self._last._thread.join()

    def finish(self) -> None:
        """Wait until the last checkpoint has been saved, and destroy the process group."""
        self.settle()
        self.company.close()


def _require_alike(iterations: Sequence[int]) -> None:
    odd = next((rank for rank, count in enumerate(iterations) if count != iterations[0]), None)
    if odd is not None:
        raise ValueError(
            f"iteration of the checkpoint must be the same on all ranks: rank 0 has "
            f"{iterations[0]}, rank {odd} {iterations[odd]}; save on every rank in the same place "
            "of the loop"
        )
