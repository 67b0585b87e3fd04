"""Turns: mutual exclusion of the computing ranks of one machine during a measurement."""

from __future__ import annotations

import fcntl
import time
import warnings
from pathlib import Path

from offbeat.core.runtime.compute import ComputeObserver

# after this time a rank continues without turns, as the lock's holder may wait for it
LONGEST_S = 60.0
POLL_S = 0.0005


class Turns(ComputeObserver):
    """Exclusive forward and backward of one rank at a time, and one update at a time.

    The lock is on a file, so the kernel releases it if the rank dies.
    """

    def __init__(self, path: str | Path) -> None:
        self._file = Path(path).open("a")  # noqa: SIM115 - open until the process ends
        self.holds = self._given_up = False

    def on_iteration_begin(self, iteration: int, begin_s: float) -> float:
        return self._acquire()

    def on_backward_end(self) -> None:
        self._release()

    def on_step_begin(self) -> None:
        self._acquire()

    def on_step_end(self) -> None:
        self._release()

    def close(self) -> None:
        """Release the lock permanently. Further turns do not wait."""
        self._file.close()
        self.holds, self._given_up = False, True

    def _acquire(self) -> float:
        if self.holds or self._given_up:
            return 0.0
        begin_s = time.perf_counter()
        while (waited_s := time.perf_counter() - begin_s) < LONGEST_S:
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(POLL_S)
            else:
                self.holds = True
                return waited_s
        self._given_up = True
        warnings.warn(
            f"this rank has waited {LONGEST_S:g} s for its turn to compute while another one had "
            "it; from here on times are measured with several ranks at once and may be too long. "
            "Let no rank wait for another one within forward or backward, or use --pace none",
            stacklevel=2,
        )
        return waited_s

    def _release(self) -> None:
        if self.holds:
            fcntl.flock(self._file, fcntl.LOCK_UN)
            self.holds = False
