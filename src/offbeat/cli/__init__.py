"""Command line of offbeat."""

from offbeat.cli import (  # noqa: F401  # their commands
    check,
    commands,
    membership,
    planning,
    rehearse,
    reports,
)
from offbeat.cli.entry import app, main

__all__ = ["app", "main"]
