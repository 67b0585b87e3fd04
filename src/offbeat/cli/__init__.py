"""The command line."""

from offbeat.cli import graph  # noqa: F401 - a command in a file of its own
from offbeat.cli.commands import app, main

__all__ = ["app", "main"]
