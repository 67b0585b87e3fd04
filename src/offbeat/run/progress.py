"""Progress: what a comparison is doing, said on a terminal or in plain lines."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.live import Live
from rich.text import Text

LONGEST_LINE = 200  # characters of a script's line that are kept for display

OWN_WORDS = "offbeat: "  # begin what the library says to the user of a script; it stays

OnLine = Callable[[str], None]


class Progress:
    """What a comparison is doing: one live line on a terminal, plain lines elsewhere."""

    def __init__(self, *, stderr: bool = False) -> None:
        self._console = Console(stderr=stderr)
        self._what, self._line, self._start_s = "", "", 0.0

    @contextmanager
    def step(self, what: str) -> Iterator[OnLine]:
        """Something that takes a while; yields what takes the lines of rank 0's log."""
        self._what, self._line, self._start_s = what, "", time.monotonic()
        if not self._console.is_terminal:
            self.say(f"{what} ...")
            yield self._show
            return
        with Live(self, console=self._console, refresh_per_second=4, transient=True):
            yield self._show

    def say(self, text: str) -> None:
        """One message that stays."""
        print(text, file=self._console.file, flush=True)

    def fail(self, text: str) -> None:
        """What went wrong, in words, as soon as it is known; on stderr."""
        print(f"offbeat: {text}", file=sys.stderr, flush=True)

    def __rich__(self) -> Text:
        elapsed_s = time.monotonic() - self._start_s
        text = f"{self._what}  {elapsed_s:.0f} s  {self._line}"
        return Text(text, no_wrap=True, overflow="ellipsis")

    def _show(self, line: str) -> None:
        if line.startswith(OWN_WORDS):
            self.say(line)
        self._line = line[:LONGEST_LINE]
