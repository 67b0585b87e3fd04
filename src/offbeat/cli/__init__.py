"""The command line."""

from offbeat.cli.commands import app, main

__all__ = ["app", "main"]
