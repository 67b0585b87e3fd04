"""Checkpoints for bit-exact continuation, saved in the background."""

from __future__ import annotations

from offbeat.core.checkpoint.checkpoints import Checkpoint, iteration, load, save
from offbeat.core.checkpoint.saving import Saving

__all__ = ["Checkpoint", "Saving", "iteration", "load", "save"]
