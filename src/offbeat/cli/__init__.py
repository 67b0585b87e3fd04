"""The command line."""

from offbeat.cli import graph, timetable  # noqa: F401 - commands in files of their own
from offbeat.cli.commands import app, main

__all__ = ["app", "main"]
