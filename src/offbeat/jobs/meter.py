"""Meter: measures a training run and passes the metrics to a log."""

from __future__ import annotations

import time
import warnings
from collections import deque
from collections.abc import Sequence
from itertools import count
from statistics import fmean

import numpy as np
import torch
from torch import Tensor
from torch.distributed.distributed_c10d import Store

from offbeat.core.measuring.loss import LossTap
from offbeat.core.observers import Observer
from offbeat.core.runtime.iteration import Iteration, Timestamps
from offbeat.core.runtime.session import Session
from offbeat.core.runtime.training_job import TrainingJob
from offbeat.core.transport.device import Device
from offbeat.jobs.metrics import BYTES, DIVERGENCE, EXPOSED, LOSS, SECONDS, Log, Metrics
from offbeat.jobs.replica_sample import SampledElements

SLOTS = 8  # samples of a rank in the store; largest distance between ranks, in samples


class SampleBoard:
    """Samples of all ranks in the job's store, which rank 0 hosts.

    No rank waits for another rank. A lost store ends the sampling and not the training.
    """

    def __init__(self, store: Store, rank: int, ranks: Sequence[int]):
        """Create the board of a session.

        Args:
            store: store of this session, the same on all ranks. Each session needs its own store.
            rank: rank of this process.
            ranks: ranks that leave samples.
        """
        self._store, self._rank, self._ranks = store, rank, ranks
        self._lost = False

    def post(self, number: int, sample: Tensor) -> None:
        """Store the sample of this rank under a number."""
        if not self._lost:
            label = np.array([number], dtype="<f8")
            content = np.concatenate([label, sample.double().cpu().numpy()]).tobytes()
            try:
                self._store.set(self._key(number, self._rank), content)  # type: ignore[arg-type]
            except RuntimeError:
                self._lost = True

    def read(self, number: int) -> np.ndarray | None:
        """Return the samples of all ranks with this number, [ranks, values]; None until all are
        stored."""
        keys = [self._key(number, rank) for rank in self._ranks]
        try:
            if self._lost or not self._store.check(keys):
                return None
            rows = [np.frombuffer(self._store.get(key), dtype="<f8") for key in keys]
        except RuntimeError:
            self._lost = True
            return None
        return np.stack([row[1:] for row in rows]) if all(r[0] == number for r in rows) else None

    @staticmethod
    def _key(number: int, rank: int) -> str:
        return f"{number % SLOTS}/{rank}"


class Meter(Observer):
    """Measures iterations of a training run and logs them.

    Args:
        metrics: log and its period; None on a rank that logs nothing and only leaves samples.
        session: session to measure.
        device: device of the timestamps.
        board: samples of all ranks; None without samples.
        sample_every: iterations between two samples.
        parameters: parameters from which the samples are taken.
    """

    def __init__(
        self,
        metrics: Metrics | None,
        session: Session,
        device: Device,
        board: SampleBoard | None,
        sample_every: int,
        parameters: Sequence[Tensor],
    ):
        self._metrics, self._session, self._device = metrics, session, device
        self._board, self._sample_every = board, sample_every
        self._chosen = SampledElements(parameters) if board is not None else None
        self._iteration: int | None = None  # of the last call
        self._logged, self._warned = 0, False  # iteration of the last log
        self._samples: deque[int] = deque(maxlen=SLOTS)  # samples that no log contains
        self._tap: LossTap | None = None
        if metrics is not None:
            self._tap = LossTap()
            self._losses: list[Tensor] = []
            self._marks: list[Timestamps] = []
            self._since_s, self._sent = time.perf_counter(), session.traffic()

    def stepped(self, number: int) -> None:
        if self._iteration is None:  # a checkpoint may have been loaded before
            self._iteration = self._logged = number - 1
        before, self._iteration = self._iteration, number
        if self._board is not None:
            sample = number // self._sample_every
            if sample > before // self._sample_every:
                self._sample(self._board, sample)
        if self._metrics is None or self._tap is None:
            return
        if (loss := self._tap.take()) is not None:
            self._losses.append(loss)
        if number // self._metrics.every > before // self._metrics.every:
            self._log(self._metrics, number)

    def _log(self, metrics: Metrics, iteration: int) -> None:
        """Pass the metrics to the log. Warn once if the log cannot write them."""
        numbers = self._collect_metrics(iteration - self._logged)
        self._logged = iteration
        try:
            metrics.log(numbers, iteration)
        except OSError as error:
            if not self._warned:
                self._warned = True
                path = error.filename or getattr(metrics.log, "path", None)
                warnings.warn(
                    f"metrics ({_log_name(metrics.log)}) cannot be written"
                    f"{f' to {path}' if path else ''} after iteration {iteration}: "
                    f"{error.strerror or error}; training goes on without them. Make room there",
                    RuntimeWarning,
                    stacklevel=6,
                )

    def close(self) -> None:
        """Stop recording losses and iterations."""
        if self._tap is not None:
            self._tap.close()
            self._tap, self._marks = None, []

    def ended(self, iteration: Iteration) -> None:
        # The session still calls a closed meter. The waits of DDP's iterations are unknown.
        if self._tap is not None and iteration.split is None:
            self._marks.append(iteration.marks)

    def _sample(self, board: SampleBoard, number: int) -> None:
        assert self._chosen is not None
        board.post(number, self._chosen.numbers())
        self._samples.append(number)

    def _collect_metrics(self, iterations: int) -> dict[str, float]:
        now_s, sent = time.perf_counter(), self._session.traffic()
        numbers = {SECONDS: (now_s - self._since_s) / iterations}
        if self._marks:
            numbers[EXPOSED] = fmean(
                exposed_communication_s(marks, self._device) for marks in self._marks
            )
        for link, total in sent.items():
            numbers[f"{BYTES}/{link}"] = (total - self._sent.get(link, 0)) / iterations
        if self._losses:
            numbers[LOSS] = fmean(torch.stack(self._losses).double().tolist())
        if (divergence := self._divergence()) is not None:
            numbers[DIVERGENCE] = divergence
        self._since_s, self._sent = now_s, sent
        self._losses, self._marks = [], []
        return numbers

    def _divergence(self) -> float | None:
        """Return gamma of the newest sample that every rank has stored since the last log; None if
        there is none."""
        assert self._metrics is not None
        if self._board is None or self._chosen is None:
            return None
        for number in reversed(self._samples):
            rows = self._board.read(number)
            if rows is not None:
                while self._samples and self._samples[0] <= number:
                    self._samples.popleft()
                return self._chosen.weight * gamma(rows)
        return None


def _log_name(log: Log) -> str:
    """Return the name of a log: of a function with its file and line, or of a class."""
    code = getattr(log, "__code__", None)
    if code is None:
        return type(log).__name__
    return f"{log.__qualname__} in {code.co_filename}, line {code.co_firstlineno}"  # type: ignore[attr-defined]


def gamma(replicas: np.ndarray) -> float:
    """Return the mean squared distance of the rows of `replicas`, [ranks, values], from their
    mean."""
    return float(((replicas - replicas.mean(0)) ** 2).sum(1).mean())


def exposed_communication_s(marks: Timestamps, device: Device) -> float:
    """Return the seconds of an iteration in which compute waited for messages, as in its trace."""
    pairs = [(marks.backward_end, marks.waited), (marks.stepped, marks.end)]
    pairs += [(acted.begin, acted.waited) for acted in marks.acted]
    return sum(
        device.seconds(end) - device.seconds(begin) for begin, end in pairs if begin is not None
    )


_sessions = count()  # number of sessions with metrics; the same on all ranks


def open_meter(
    metrics: Metrics | None, session: Session, job: TrainingJob, samples: Sequence[int | None]
) -> Meter | None:
    """Return the meter of this rank; None if no rank logs.

    All ranks leave samples with the period of the first rank that logs. Ranks that hold different
    parts of the model leave none.

    Args:
        metrics: log of this rank; None for none.
        session: session of this rank.
        job: objects of this rank.
        samples: by rank, iterations between two samples; None for ranks without a log.
    """
    control, workers = job.cluster.control, job.ranks.workers
    often = next((every for every in samples if every is not None), None)
    if often is None:
        return None
    board = None
    if often and len(workers) > 1 and not job.cluster.topology.sharded:
        board = SampleBoard(control.store(f"metrics{next(_sessions)}"), control.rank, workers)
    trained = [p for p in job.model.parameters() if p.requires_grad]
    return Meter(metrics, session, job.cluster.device, board, often, trained)
