"""Checkpoints of scripts in a rehearsal: none is written, and none can be loaded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from offbeat.core.checkpoint.folder import Folder
from offbeat.core.checkpoint.frozen import Frozen
from offbeat.core.checkpoint.saving import SaveGroup, Saver, Saving
from offbeat.core.checkpoint.shard import Manifest


class DiscardingSaver(Saver):
    """Saver of a replica. `offbeat.save` writes nothing, and `offbeat.load` is refused."""

    def __init__(self) -> None:
        super().__init__(None)
        self.company = _RefusingGroup(None)
        self.has_noted_batches = True

    def save(
        self, folder: Folder, frozen: Callable[[], Frozen], manifest: Manifest, keep: int
    ) -> Saving:
        return Saving(folder.path / f"discarded-iteration-{manifest.iteration}", lambda: None)


class _RefusingGroup(SaveGroup):
    def gather(self, value: Any) -> list[Any]:
        raise ValueError(
            "a rehearsal begins with the first iteration: leave offbeat.load out, and unset "
            "OFFBEAT_CHECKPOINT"
        )

    share = gather
