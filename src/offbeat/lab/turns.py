"""Turns: mutual exclusion of the computing ranks of one machine during a measurement."""

from __future__ import annotations

import fcntl
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from offbeat.core.observers import Observer

if TYPE_CHECKING:
    from offbeat.core.plan.types import Point
    from offbeat.core.runtime.iteration import Iteration

# after this time a rank continues without turns, as the lock's holder may wait for it
LONGEST_S = 60.0
POLL_S = 0.0005


class Turns(Observer):
    """Exclusive forward and backward of one rank at a time, and one update at a time.

    The lock is on a file, so the kernel releases it if the rank dies. As a context, it is one more
    turn.
    """

    every_bucket = True  # the last gradient ends a turn

    def __init__(self, path: str | Path) -> None:
        self._file = Path(path).open("a")  # noqa: SIM115 - open until the process ends
        self.holds = self._given_up = False

    def iteration_begins(self, iteration: Iteration) -> None:
        self.__enter__()

    def reached(self, iteration: Iteration, point: Point, bucket: int = -1) -> None:
        if point == "step":
            self.__enter__()
        elif point == "end" or (point == "grad" and bucket + 1 == len(iteration.marks.ready)):
            self.__exit__()

    def close(self) -> None:
        """Release the lock permanently. Further turns do not wait."""
        self._file.close()
        self.holds, self._given_up = False, True

    def __enter__(self) -> None:
        if self.holds or self._given_up:
            return
        begin_s = time.perf_counter()
        while time.perf_counter() - begin_s < LONGEST_S:
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(POLL_S)
            else:
                self.holds = True
                return
        self._given_up = True
        warnings.warn(
            f"this rank has waited {LONGEST_S:g} s for its turn to compute while another one had "
            "it; from here on times are measured with several ranks at once and may be too long. "
            "Let no rank wait for another one within forward or backward, or use --pace none",
            stacklevel=2,
        )

    def __exit__(self, *_: object) -> None:
        if self.holds:
            fcntl.flock(self._file, fcntl.LOCK_UN)
            self.holds = False
