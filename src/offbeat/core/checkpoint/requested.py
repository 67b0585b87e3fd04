"""Checkpoints that the launcher requests for a script without calls of `save` and `load`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from offbeat.core.checkpoint.checkpoints import load, save

if TYPE_CHECKING:
    from offbeat.core.runtime.launch_request import LaunchRequest
    from offbeat.core.runtime.prepared import Model, Optimizer


def enable_checkpoints(job: LaunchRequest, model: Model, optimizer: Optimizer) -> None:
    """Load the newest checkpoint if the job resumes, and save every `checkpoint_every` iterations.

    Every rank must call it.
    """
    path, every, session = job.checkpoint, job.checkpoint_every, model._session
    if path is None:
        return
    if job.resume:
        try:
            found = load(path, model, optimizer)
            words = f"goes on from {found.path}, iteration {found.iteration}"
        except FileNotFoundError:
            words = f"begins anew, as {path} has no checkpoint"
        if session.worker == 0:
            print(f"offbeat: {words}", file=sys.stderr, flush=True)
    if every is None:
        return

    def act() -> None:
        if session.iteration % every == 0 and not session.observing:
            save(path, model, optimizer)

    optimizer.after_step(act)
