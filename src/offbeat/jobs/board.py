"""Board: the newest interval of every rank, in the job's store. Only rank 0 reads it."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from typing import Any

from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import PrefixStore

from offbeat.core.transport.control import Control
from offbeat.jobs.interval import Interval

ROUND_S = 2.0  # time between two reads of rank 0
CLOSE_S = 2.0  # longest wait for the thread at the end of a job
THREAD_NAME = "offbeat-board"


class Board:
    """Thread that publishes the intervals of this rank, and on rank 0 reads those of all ranks.

    Training never waits for the store: a lost store ends the thread and not the training.

    Args:
        control: agreement between the ranks of the job.
        on_round: on rank 0, called every `ROUND_S` seconds, and once at the end, with the newest
            interval of each rank that has published one; None on other ranks.
    """

    def __init__(self, control: Control, on_round: Callable[[Mapping[int, Interval]], None] | None):
        self._rank, self._ranks = control.rank, range(control.world_size)
        self._store: Any = None
        if control.world_size > 1:
            store: Any = distributed_c10d._get_default_store()
            # A blocking wait of another thread occupies the connection of a store.
            clone = store.clone() if hasattr(store, "clone") else store
            self._store = PrefixStore(f"offbeat/intervals/{control.met}", clone)
        self._on_round = on_round
        self._newest: dict[int, Interval] = {}
        self._known: set[int] = set()  # ranks that have published
        self._unsent: Interval | None = None
        self._wake, self._stopped = threading.Event(), False
        self._thread = threading.Thread(target=self._run, name=THREAD_NAME, daemon=True)
        self._thread.start()

    def post(self, interval: Interval) -> None:
        """Publish the newest interval of this rank. Returns at once."""
        self._unsent = interval
        if self._on_round is None:
            self._wake.set()

    def close(self) -> None:
        """End the thread after a last round."""
        self._stopped = True
        self._wake.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(CLOSE_S)

    def _run(self) -> None:
        try:
            while True:
                self._wake.wait(None if self._on_round is None else ROUND_S)
                self._wake.clear()
                stopped = self._stopped
                self._exchange()
                if self._on_round is not None:
                    self._on_round(dict(self._newest))
                if stopped:
                    return
        except RuntimeError:  # the store is lost, and the heartbeat reports it
            return

    def _exchange(self) -> None:
        unsent, self._unsent = self._unsent, None
        if unsent is not None:
            self._newest[self._rank] = unsent
            if self._store is not None and self._on_round is None:
                self._store.set(str(self._rank), json.dumps(unsent.to_dict()))
        if self._on_round is not None and self._store is not None:
            self._read()

    def _read(self) -> None:
        # Reading a missing key blocks, so check each key until it exists.
        unknown = (r for r in self._ranks if r != self._rank and r not in self._known)
        self._known.update(r for r in unknown if self._store.check([str(r)]))
        known = sorted(self._known)
        for rank, text in zip(known, self._store.multi_get([str(r) for r in known]), strict=True):
            self._newest[rank] = Interval.from_dict(json.loads(text))
