"""Forked ranks end together: whatever a rank, a function of the caller or the progress does."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cases import rehearsed
from torch import nn

import offbeat

RANKS = 3


def rehearse(folder: Path, in_rank_1: Callable[[], None], **more: Any) -> None:
    """Rank 1 does something before its second batch. Each rank leaves its process id."""

    def loss(model: nn.Module, batch: Any) -> Any:
        (folder / f"{os.getpid()}").touch()
        if int(os.environ["RANK"]) == 1:
            in_rank_1()
        return model(*batch)

    offbeat.rehearse(
        rehearsed.make_model,
        rehearsed.make_optimizer,
        rehearsed.batches,
        "wfbp",
        rehearsed.profile_of(RANKS),
        iterations=2,
        loss=loss,
        **more,
    )


def require_ended(folder: Path) -> None:
    processes = [int(path.name) for path in folder.iterdir()]
    assert processes
    for process in processes:
        with pytest.raises(ProcessLookupError):
            os.kill(process, 0)


class OddError(ValueError):
    def __init__(self, name: str, value: int) -> None:  # cannot be pickled
        super().__init__(f"{name} ({value})")


@pytest.mark.parametrize("error", [LookupError("k"), OddError("k", 1)])
def test_an_error_in_a_rank(tmp_path, error):
    """It is raised here; only its text if it cannot be pickled."""

    def fail() -> None:
        raise error

    kind = LookupError if isinstance(error, LookupError) else RuntimeError
    with pytest.raises(kind) as raised:
        rehearse(tmp_path, fail)
    text = " ".join([str(raised.value), *getattr(raised.value, "__notes__", ())])
    assert "rank 1" in text
    assert str(error) in text
    require_ended(tmp_path)


def test_a_rank_that_is_killed(tmp_path):
    with pytest.raises(RuntimeError, match="rank 1"):
        rehearse(tmp_path, lambda: os.kill(os.getpid(), signal.SIGKILL))
    require_ended(tmp_path)


def test_an_error_of_the_progress(tmp_path):
    def fail(*_: object) -> None:
        raise LookupError("of the progress")

    with pytest.raises(LookupError):
        rehearse(tmp_path, lambda: None, progress=fail)
    require_ended(tmp_path)
