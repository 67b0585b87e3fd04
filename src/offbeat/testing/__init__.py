"""Tests for authors of strategies and of jobs: equations, the conformance suite, and what a
prepared model does."""

from offbeat.core.measuring import effort
from offbeat.testing.inspection import Inspection, SentMessage, inspect
from offbeat.testing.steps import log_steps

__all__ = ["Inspection", "SentMessage", "inspect", "log_steps", "quick"]


def quick() -> None:
    """Shorten the measurements of all later `offbeat.prepare` in this process to a fraction of a
    second. Profiles become inexact; nothing is left out."""
    effort.use(effort.QUICK)
