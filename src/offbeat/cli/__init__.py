"""Command line of offbeat."""

from offbeat.cli import check, doctor, graph  # noqa: F401  # register their commands
from offbeat.cli.commands import app, main

__all__ = ["app", "main"]
