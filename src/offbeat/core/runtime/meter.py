"""The meter: counts while a model trains, and tells a log every few iterations."""

from __future__ import annotations

import time
import warnings
from collections import deque
from collections.abc import Sequence
from statistics import fmean

import numpy as np
import torch
from torch import Tensor
from torch.distributed.distributed_c10d import Store

from offbeat.core.measuring.loss import LossTap
from offbeat.core.measuring.replica_sample import Chosen
from offbeat.core.runtime.iteration import Iteration, Timestamps
from offbeat.core.runtime.metrics import BYTES, DIVERGENCE, EXPOSED, LOSS, SECONDS, Log, Metrics
from offbeat.core.runtime.prepared import Session
from offbeat.core.transport.device import Device

SLOTS = 8  # samples of a rank that the store keeps: ranks may be so many samples apart


class SampleBoard:
    """Where every rank leaves its samples for the others: the job's store, which lives in rank 0.

    Nobody waits for anybody. A store that is gone is no failure of the training.
    """

    def __init__(self, store: Store, rank: int, ranks: Sequence[int]):
        """`store`: of this session, the same on all ranks, and another one for the next."""
        self._store, self._rank, self._ranks = store, rank, ranks
        self._lost = False

    def post(self, number: int, sample: Tensor) -> None:
        """Leave this rank's sample of this number."""
        if not self._lost:
            label = np.array([number], dtype="<f8")
            content = np.concatenate([label, sample.double().cpu().numpy()]).tobytes()
            try:
                self._store.set(self._key(number, self._rank), content)  # type: ignore[arg-type]
            except RuntimeError:
                self._lost = True

    def read(self, number: int) -> np.ndarray | None:
        """Everybody's sample of this number, a row per rank; None unless all are there."""
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


class Meter:
    """Told of every step; `metrics` is None on a rank that logs nothing and only leaves samples."""

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
        self._chosen = Chosen(parameters) if board is not None else None
        self._steps, self._warned = 0, False
        self._samples: deque[int] = deque(maxlen=SLOTS)  # those that were not reported
        self._tap: LossTap | None = None
        if metrics is not None:
            self._tap = LossTap()
            self._losses: list[Tensor] = []
            self._marks: list[Timestamps] = []
            self._since_s, self._sent = time.perf_counter(), session.traffic()
            session.listen(self._on_iteration)

    def on_step_end(self) -> None:
        """`optimizer.step()` is over."""
        self._steps += 1
        if self._board is not None and self._steps % self._sample_every == 0:
            self._sample(self._board)
        if self._metrics is None or self._tap is None:
            return
        if (loss := self._tap.take()) is not None:
            self._losses.append(loss)
        if self._steps % self._metrics.every == 0:
            self._log(self._metrics)

    def _log(self, metrics: Metrics) -> None:
        """Pass the numbers to the log. Warn once if the log cannot write them."""
        numbers = self._collect_metrics(metrics.every)
        try:
            metrics.log(numbers, self._steps)
        except OSError as error:
            if not self._warned:
                self._warned = True
                path = error.filename or getattr(metrics.log, "path", None)
                warnings.warn(
                    f"metrics ({_log_name(metrics.log)}) cannot be written"
                    f"{f' to {path}' if path else ''} after iteration {self._steps}: "
                    f"{error.strerror or error}; training goes on without them. Make room there",
                    RuntimeWarning,
                    stacklevel=4,
                )

    def close(self) -> None:
        """Watch no losses any more."""
        if self._tap is not None:
            self._tap.close()
            self._tap = None

    def _on_iteration(self, done: Iteration) -> None:
        self._marks.append(done.marks)

    def _sample(self, board: SampleBoard) -> None:
        assert self._chosen is not None
        number = self._steps // self._sample_every
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
        """Gamma of the newest sample that every rank has left since the last one."""
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
    """Mean squared distance of the rows from their mean."""
    return float(((replicas - replicas.mean(0)) ** 2).sum(1).mean())


def exposed_communication_s(marks: Timestamps, device: Device) -> float:
    """Seconds of an iteration in which compute waited for messages, as in its trace."""
    pairs = [(marks.backward_end, marks.waited), (marks.stepped, marks.end)]
    pairs += [(acted.begin, acted.waited) for acted in marks.acted]
    return sum(
        device.seconds(end) - device.seconds(begin) for begin, end in pairs if begin is not None
    )
