"""The command line."""

from offbeat.cli import graph  # noqa: F401  # registers its command
from offbeat.cli.commands import app, main

__all__ = ["app", "main"]
