"""Progress display of a comparison, on a terminal or as plain lines."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.live import Live
from rich.text import Text

from offbeat.core.console import INDENT, PREFIX

LONGEST_LINE = 200  # characters of a script's line that are kept for display

# Seconds between plain lines: the first interval and the longest one. Intervals double.
FIRST_WORD_S, RAREST_WORD_S = 10.0, 600.0

OnLine = Callable[[str], None]
Count = Callable[[], int]


class Progress:
    """Display of the current step: one live line on a terminal, else plain lines.

    Args:
        stderr: write to stderr instead of stdout.
        first_s: seconds until the first plain line of a step. Later intervals double.
    """

    def __init__(self, *, stderr: bool = False, first_s: float = FIRST_WORD_S) -> None:
        self._console, self._first_s = Console(stderr=stderr), first_s
        self._what, self._line, self._start_s = "", "", 0.0
        self._count: Count | None = None
        self._is_own = False  # whether the last line of the log is the library's own

    @contextmanager
    def step(self, what: str, count: Count | None = None) -> Iterator[OnLine]:
        """Display a step while the body runs.

        Args:
            what: name of the step.
            count: returns the number of finished iterations; None if unknown.

        Yields:
            Callable that displays a line of rank 0's log.
        """
        self._what, self._line, self._start_s = what, "", time.monotonic()
        self._count = count
        if not self._console.is_terminal:
            self.print_line(f"{what} ...")
            over = threading.Event()
            words = threading.Thread(target=self._print_periodically, args=(over,), daemon=True)
            words.start()
            try:
                yield self._show_line
            finally:
                over.set()
                words.join()
            return
        with Live(self, console=self._console, refresh_per_second=4, transient=True):
            yield self._show_line

    def print_line(self, text: str) -> None:
        """Print a line that stays on the screen."""
        print(text, file=self._console.file, flush=True)

    def print_error(self, text: str) -> None:
        """Print an error to stderr."""
        print(f"offbeat: {text}", file=sys.stderr, flush=True)

    def __rich__(self) -> Text:
        text = f"{self._what}  {self._progress_text()}  {self._line}"
        return Text(text, no_wrap=True, overflow="ellipsis")

    def _progress_text(self) -> str:
        elapsed = f"{time.monotonic() - self._start_s:.0f} s"
        iterations = self._count() if self._count is not None else 0
        return f"{iterations:,} iterations, {elapsed}" if iterations else elapsed

    def _print_periodically(self, over: threading.Event) -> None:
        """Print plain lines at doubling intervals, so that the log of a long run stays short."""
        wait_s = self._first_s
        while not over.wait(wait_s):
            self.print_line(f"{self._what}: {self._progress_text()}")
            wait_s = min(2 * wait_s, RAREST_WORD_S)

    def _show_line(self, line: str) -> None:
        is_continued = self._is_own and line.startswith(INDENT)
        self._is_own = line.startswith(PREFIX) or is_continued
        if self._is_own:
            self.print_line(line)
        self._line = line[:LONGEST_LINE]
