"""Command line of offbeat."""

from offbeat.cli import check, doctor, graph, membership, rehearse  # noqa: F401  # their commands
from offbeat.cli.commands import app, main

__all__ = ["app", "main"]
