"""Board: the newest interval of every rank, in the job's store. Only rank 0 reads it."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import PrefixStore

from offbeat.core.transport.control import Control
from offbeat.jobs.interval import Interval
from offbeat.jobs.meter import SampleBoard, gamma
from offbeat.jobs.replica_sample import SampledElements

ROUND_S = 2.0  # time between two reads of rank 0
CLOSE_S = 2.0  # longest wait for the thread at the end of a job
THREAD_NAME = "offbeat-board"


OnRound = Callable[[Mapping[int, Interval], float | None], None]


class Board:
    """Publishes the intervals of this rank, and on rank 0 reads those of all ranks.

    Training never waits for the store: requests run in a thread, which a lost store ends. Rank 0
    has the thread for the whole job. Other ranks have it while they publish.

    Args:
        control: agreement between the ranks of the job.
        on_round: on rank 0, called every `ROUND_S` seconds, and once at the end, with the newest
            interval of each rank that has published one, and `divergence`; None on other ranks.
        name: part of the keys, which must differ from those of other boards in the same store and
            be the same on all ranks; None to count the meetings of the ranks.

    Attributes:
        divergence: on rank 0, mean squared distance of the replicas from their mean by the newest
            sample that all ranks have published; None without one.
    """

    def __init__(self, control: Control, on_round: OnRound | None, name: str | None = None):
        self._rank, self._ranks = control.rank, range(control.world_size)
        self.divergence: float | None = None
        self._prefix = f"offbeat/intervals/{name or control.met}"
        self._job_store = distributed_c10d._get_default_store() if control.world_size > 1 else None
        self._samples: SampleBoard | None = None
        self._unsent_sample: tuple[int, float, Tensor] | None = None
        self._sample: tuple[int, float] | None = None  # number and weight of the newest sample
        self._store: Any = None
        self._on_round = on_round
        self._newest: dict[int, Interval] = {}
        self._known: set[int] = set()  # ranks that have published
        self._unsent: Interval | None = None
        self._wake, self._stopped, self._lost = threading.Event(), False, False
        self._changing = threading.Lock()  # of `_thread`
        self._thread: threading.Thread | None = None
        if on_round is not None:
            self._start(self._run)

    def post(self, interval: Interval) -> None:
        """Publish the newest interval of this rank. Returns at once."""
        self._unsent = interval
        self._publish()

    def post_sample(self, number: int, elements: SampledElements) -> None:
        """Publish the current values of sampled parameters under a number. Returns at once."""
        self._unsent_sample = number, elements.weight, elements.numbers()
        self._publish()

    def close(self) -> None:
        """End the thread after a last round."""
        self._stopped = True
        self._wake.set()
        thread = self._thread
        if thread is not None and threading.current_thread() is not thread:
            thread.join(CLOSE_S)

    def _start(self, run: Callable[[], None]) -> None:
        self._thread = threading.Thread(target=run, name=THREAD_NAME, daemon=True)
        self._thread.start()

    def _publish(self) -> None:
        """On ranks that do not read, publish in a thread, unless one publishes already."""
        with self._changing:
            if self._on_round is None and self._thread is None and not self._lost:
                self._start(self._run_once)

    def _run_once(self) -> None:
        """Publish until there is nothing new."""
        while self._try_exchange():
            with self._changing:
                if self._unsent is None and self._unsent_sample is None:
                    self._thread = None
                    return

    def abandon(self) -> None:
        """End the thread without a last round, and return at once: the store may be lost."""
        self._stopped = self._lost = True
        self._wake.set()

    def _run(self) -> None:
        stopped = False
        while not stopped:
            self._wake.wait(ROUND_S)
            self._wake.clear()
            stopped = self._stopped
            if not self._try_exchange():
                return
            assert self._on_round is not None
            self._on_round(dict(self._newest), self.divergence)

    def _try_exchange(self) -> bool:
        """Return whether the store has responded. If it is lost, the heartbeat reports it."""
        try:
            if not self._lost:
                self._connect()
                self._exchange()
        except RuntimeError:
            self._lost = True
        return not self._lost

    def _connect(self) -> None:
        """Open a connection of the board's own. It waits as long as a lost store is missing."""
        if self._job_store is None or self._store is not None:
            return
        # A blocking wait of another thread occupies the connection of a store.
        store: Any = self._job_store
        clone = store.clone() if hasattr(store, "clone") else store
        self._store = PrefixStore(self._prefix, clone)
        samples = PrefixStore("samples", self._store)
        self._samples = SampleBoard(samples, self._rank, self._ranks)

    def _exchange(self) -> None:
        unsent, self._unsent = self._unsent, None
        if unsent is not None:
            self._newest[self._rank] = unsent
            if self._store is not None and self._on_round is None:
                self._store.set(str(self._rank), json.dumps(unsent.to_dict()))
        sample, self._unsent_sample = self._unsent_sample, None
        if self._samples is not None and sample is not None:
            self._sample = sample[0], sample[1]
            self._samples.post(sample[0], sample[2])
        if self._on_round is not None and self._store is not None:
            self._read()

    def _read(self) -> None:
        # Reading a missing key blocks, so check each key until it exists.
        unknown = (r for r in self._ranks if r != self._rank and r not in self._known)
        self._known.update(r for r in unknown if self._store.check([str(r)]))
        known = sorted(self._known)
        for rank, text in zip(known, self._store.multi_get([str(r) for r in known]), strict=True):
            self._newest[rank] = Interval.from_dict(json.loads(text))
        if self._samples is not None and self._sample is not None:
            number, weight = self._sample
            rows = self._samples.read(number)
            if rows is not None:
                self.divergence, self._sample = weight * gamma(rows), None
