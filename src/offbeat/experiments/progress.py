"""Progress: what a comparison is doing, said on a terminal or in plain lines."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.live import Live
from rich.text import Text

LONGEST_LINE = 200  # characters of a script's line that are kept for display

OWN_WORDS = "offbeat: "  # begin what the library says to the user of a script; it stays

FIRST_WORD_S, RAREST_WORD_S = 10.0, 600.0  # between lines where there is no terminal; they double

OnLine = Callable[[str], None]
Count = Callable[[], int]


def _unknown_count() -> int:
    return 0


class Progress:
    """What a comparison is doing: one live line on a terminal, now and then a plain one elsewhere.

    `first_s`: seconds to the first of these.
    """

    def __init__(self, *, stderr: bool = False, first_s: float = FIRST_WORD_S) -> None:
        self._console, self._first_s = Console(stderr=stderr), first_s
        self._what, self._line, self._start_s = "", "", 0.0
        self._count: Count = _unknown_count

    @contextmanager
    def step(self, what: str, count: Count = _unknown_count) -> Iterator[OnLine]:
        """Something that takes a while; yields what takes the lines of rank 0's log. `count` says
        how many iterations are over, 0 if that is not known."""
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
        """One message that stays."""
        print(text, file=self._console.file, flush=True)

    def print_error(self, text: str) -> None:
        """What went wrong, in words, as soon as it is known; on stderr."""
        print(f"offbeat: {text}", file=sys.stderr, flush=True)

    def __rich__(self) -> Text:
        text = f"{self._what}  {self._progress_text()}  {self._line}"
        return Text(text, no_wrap=True, overflow="ellipsis")

    def _progress_text(self) -> str:
        elapsed_s, iterations = time.monotonic() - self._start_s, self._count()
        return (
            f"{iterations:,} iterations, {elapsed_s:.0f} s" if iterations else f"{elapsed_s:.0f} s"
        )

    def _print_periodically(self, over: threading.Event) -> None:
        """A line after ever longer times: a log of a week should be read in a minute."""
        wait_s = self._first_s
        while not over.wait(wait_s):
            self.print_line(f"{self._what}: {self._progress_text()}")
            wait_s = min(2 * wait_s, RAREST_WORD_S)

    def _show_line(self, line: str) -> None:
        if line.startswith(OWN_WORDS):
            self.print_line(line)
        self._line = line[:LONGEST_LINE]
