"""The command line."""

from offbeat.cli.main import app, main

__all__ = ["app", "main"]
