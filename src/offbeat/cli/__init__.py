"""Command line of offbeat."""

from offbeat.cli import check, doctor, graph, rehearse  # noqa: F401  # register their commands
from offbeat.cli.commands import app, main

__all__ = ["app", "main"]
