"""Console output of rank 0: lines of text, or JSON objects for programs that read the log."""

from __future__ import annotations

import json
import re
import shutil
import sys
import textwrap
import time
from typing import Any, Literal

Format = Literal["text", "json", "off"]
PREFIX = "offbeat: "
WIDEST = 100  # columns of a line on a terminal
PLAIN = 80  # columns without a terminal


class Console:
    """Output on stderr. A process has one console, `console`; ranks other than 0 do not use it.

    Attributes:
        format: "text", "json" (one object per line) or "off".
    """

    def __init__(self) -> None:
        self.format: Format = "text"

    def print(self, event: str, text: str, level: str = "info", **fields: Any) -> None:
        """Print one message.

        Args:
            event: kind of the message, for programs.
            text: message; each of its lines is wrapped separately.
            level: "info", "notice" or "warning", for programs.
            fields: numbers of the message, for programs.
        """
        if self.format == "off":
            return
        if self.format == "json":
            data = {"t": round(time.time(), 3), "level": level, "event": event, **fields}
            line = json.dumps({**data, "text": text})
        else:
            line = "\n".join(_wrap(part) for part in text.splitlines())
        print(line, file=sys.stderr, flush=True)


_UNIT = re.compile(r"(?<=\d) (?=(?:ms|s|µs|min|h|d|%|[kMGT]?B|Mbit/s|Gbit/s)\b|%)")
_NO_BREAK = "\0"  # a number and its unit stay on one line


def _wrap(text: str) -> str:
    is_terminal = sys.stderr.isatty()
    columns = min(WIDEST, shutil.get_terminal_size().columns) if is_terminal else PLAIN
    wrapped = textwrap.fill(
        _UNIT.sub(_NO_BREAK, text),
        max(40, columns - 1),
        initial_indent=PREFIX,
        subsequent_indent=" " * len(PREFIX),
        break_long_words=False,
        break_on_hyphens=False,
    )
    return wrapped.replace(_NO_BREAK, " ")


console = Console()
