"""Lines of a job on stderr: text, or JSON objects for programs that read the log."""

from __future__ import annotations

import json
import math
import shutil
import sys
import textwrap
import time
from typing import Any, Literal

from offbeat.core.words import NO_BREAK, join_units

Format = Literal["text", "json", "off"]
Level = Literal["info", "notice", "warning", "error"]
PREFIX = "offbeat: "
INDENT = " " * len(PREFIX)  # begin of the second and later lines of a message
WIDEST = 100  # columns of a line on a terminal
PLAIN = 80  # columns without a terminal


class Console:
    """Output on stderr. A process has one console, `console`.

    Rank 0 prints what concerns the job; another rank prints what only this rank can state, such
    as an error of its own.

    Attributes:
        format: "text", "json" (one object per line) or "off" (errors only, as text).
    """

    def __init__(self) -> None:
        self.format: Format = "text"

    def print(
        self, event: str, text: str, level: Level = "info", command: str = "", **fields: Any
    ) -> None:
        """Print one message.

        Args:
            event: kind of the message, for programs.
            text: message; each of its lines is wrapped separately.
            level: importance, for programs. Errors are printed with the format "off", too.
            command: command to copy, which is printed last and on one line.
            fields: numbers of the message, for programs.
        """
        if self.format == "off" and level != "error":
            return
        if self.format == "json":
            data = {"t": round(time.time(), 3), "level": level, "event": event}
            data |= {name: _as_json(value) for name, value in fields.items()}
            data |= {"command": command} if command else {}
            line = json.dumps({**data, "text": _as_one_line(text)})
        else:
            lines = [_wrap(part) for part in text.splitlines()]
            line = "\n".join([*lines, *([INDENT + command] if command else [])])
        print(line, file=sys.stderr, flush=True)


def _as_json(value: Any) -> Any:
    """Return None for a number that JSON cannot hold."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _as_one_line(text: str) -> str:
    """Return the lines of a text as one, separated by punctuation."""
    lines = text.splitlines()
    ended = [line if line.endswith((".", ":", ";", ",")) else f"{line};" for line in lines[:-1]]
    return " ".join([*ended, *lines[-1:]])


def _wrap(text: str) -> str:
    is_terminal = sys.stderr.isatty()
    columns = min(WIDEST, shutil.get_terminal_size().columns) if is_terminal else PLAIN
    wrapped = textwrap.fill(
        join_units(text),
        max(40, columns - 1),
        initial_indent=PREFIX,
        subsequent_indent=INDENT,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return wrapped.replace(NO_BREAK, " ")


console = Console()
