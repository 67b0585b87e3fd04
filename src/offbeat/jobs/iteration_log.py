"""Log of every iteration of a rank, as `offbeat compare` records it.

A line of the kind "iterations" continues the columns of the earlier ones: ends, losses, votes and
metrics. A line of the kind "spans" replaces the earlier one: the last periods, notes and sample.
`iteration_columns.py` reads them.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from offbeat.core.derive.windows import Windows
from offbeat.core.plan import INSIDE, base_link
from offbeat.core.runtime.iteration import BackwardSplit, Iteration
from offbeat.core.runtime.recording import Recorder
from offbeat.core.sim.trace import Span, spans_to_dict
from offbeat.core.transport.device import Device, Mark
from offbeat.jobs.iteration_spans import iteration_spans
from offbeat.jobs.replica_sample import Sample

LINE_ITERATIONS, LINE_S = 1000, 5.0  # a line ends at the first of these limits
WINDOW_PERIODS = 3  # number of last periods whose spans are kept


class SplitSums:
    """Sums over `BackwardSplit`s, and the last iterations whose split is estimated."""

    def __init__(self) -> None:
        self._measured = self._sent_s = self._waited_s = 0.0
        self._estimated = 0
        self._last: deque[int] = deque(maxlen=WINDOW_PERIODS)

    def add(self, iteration: int, split: BackwardSplit) -> None:
        """Add the split of one iteration."""
        if not split.measured:
            self._estimated += 1
            self._last.append(iteration)
            return
        self._measured += 1
        self._sent_s += split.sent_s
        self._waited_s += split.waited_s

    def notes(self) -> dict[str, Any]:
        """Return the notes of a trace: counts of iterations, and means over the measured ones."""
        if not self._measured and not self._estimated:
            return {}
        count = max(1.0, self._measured)
        return {
            "backward": {
                "measured": int(self._measured),
                "estimated": self._estimated,
                "sent_s": self._sent_s / count,
                "waited_s": self._waited_s / count,
            },
            "estimated": list(self._last),
        }


class VoteLog:
    """One entry per iteration with a vote. Bytes exclude the messages of the votes and those inside
    replicas."""

    def __init__(self) -> None:
        self._keys: dict[str, list[str]] = {}  # columns of each vote, as in its first entry
        self._reset()

    def _reset(self) -> None:
        self._iterations: list[int] = []
        self._sent: list[int] = []
        self._spared: list[int] = []
        self._votes: dict[str, list[dict[str, Any]]] = defaultdict(list)

    def add_iteration(self, done: Iteration, votes: Sequence[str]) -> None:
        """Add a finished iteration with these votes."""
        self._iterations.append(done.number)
        sent = [m for m in done.messages if m.was_sent and base_link(m.transfer.link) != INSIDE]
        payloads = (
            m.coded_bytes if m.transfer.wire is not None else sum(x.nbytes for x in m.tensors)
            for m in sent
        )
        self._sent.append(sum(payloads))
        self._spared.append(done.spared_bytes)
        for name in votes:
            numbers = {k: float(f"{x:.6g}") for k, x in done.shown.get(name, {}).items()}
            entry = {**numbers, "yes": done.voted.get(name)}
            self._keys.setdefault(name, [*entry])
            self._votes[name].append(entry)

    def pop_columns(self) -> dict[str, Any]:
        """Return the entries since the last call in JSON form, as columns of equal length.

        `yes` lists the ranks that voted yes in an iteration, None if unknown.
        """
        by_vote = {
            name: {key: [entry.get(key) for entry in entries] for key in self._keys[name]}
            for name, entries in self._votes.items()
        }
        columns = {
            "iterations": self._iterations,
            "sent_bytes": self._sent,
            "spared_bytes": self._spared,
            "by_vote": by_vote,
        }
        self._reset()
        return columns


class IterationLog:
    """Every iteration of a rank since the last line. Its memory does not grow with the iterations.

    Args:
        recorder: recorder of this rank, with plan, notes and origin of the times.
        write: function that appends a line, of kind and fields.
        rank: rank of this process.
        device: device of the timestamps.
    """

    def __init__(
        self, recorder: Recorder, write: Callable[..., None], rank: int, device: Device
    ) -> None:
        self._recorder, self._write, self._rank, self._device = recorder, write, rank, device
        self._strategy, self._observed = "", 0
        self._pending: deque[Iteration] = deque()  # iterations that the device has not completed
        self._first, self._window_due = 0, 0
        self._written_s = time.monotonic()
        self._ends: list[Mark] = []  # since the last line
        self._losses: list[tuple[int, Tensor]] = []
        self._metrics: dict[str, list[tuple[int, float]]] = defaultdict(list)
        self._without_update: list[int] = []
        self._votes, self._splits = VoteLog(), SplitSums()
        self._spans: deque[list[Span]] = deque(maxlen=WINDOW_PERIODS)
        self._sample: Sample | None = None
        self._reached = 0  # iteration of the last `optimizer.step()`

    def start(self, strategy: str, observed: int) -> None:
        """Begin the iterations of a strategy, after `observed` profiled iterations."""
        plan = self._recorder.plan
        self._strategy, self._observed = strategy, observed
        self._spans = deque(maxlen=max(2, WINDOW_PERIODS * (plan.period if plan else 1)))

    def begin_step(self, iteration: int, loss: Tensor | None) -> None:
        """Add the loss of an iteration."""
        self._reached = iteration
        if loss is not None:
            self._losses.append((iteration, loss))

    def end_step(self, iteration: int) -> None:
        """Sample the parameters."""
        if self._sample is not None:
            self._sample.take(iteration)

    def add_metric(self, name: str, value: float) -> None:
        """Add a metric that the script reports, with the iteration of the last step."""
        self._metrics[name].append((self._reached, value))

    def set_sample(self, create: Callable[[], Sample] | None) -> None:
        """Set the function that creates the sample; None: the storage has changed."""
        # Emulated layers compute nothing, so their replicas do not differ.
        emulated = self._recorder.notes.get("emulated")
        self._sample = None if create is None or emulated else create()

    def add(self, done: Iteration) -> None:
        """Add an iteration that has ended."""
        self._pending.append(done)
        while self._pending and self._pending[0].is_reached(self._device):
            self._record(self._pending.popleft())

    def complete(self) -> None:
        """Record all iterations that have ended. Waits until the device has reached their end."""
        while self._pending:
            self._record(self._pending.popleft())

    def _record(self, done: Iteration) -> None:
        plan = self._recorder.plan
        if plan is not None and not Windows(plan).applied_window(done.planned):
            self._without_update.append(done.number)
        if plan is not None and plan.votes:
            self._votes.add_iteration(done, [vote.name for vote in plan.votes])
        if done.split is not None:
            self._splits.add(done.number, done.split)
        self._ends.append(done.marks.end)
        origin_s = self._recorder.origin_s
        self._spans.append([*iteration_spans(done, plan, self._rank, self._device, origin_s)])
        now_s = time.monotonic()
        if len(self._ends) >= LINE_ITERATIONS or now_s - self._written_s >= LINE_S:
            self._written_s = now_s
            count = self._first + len(self._ends)
            if count >= self._window_due:  # spans are large: written each time that `count` doubles
                self._window_due = 2 * count
                self._write_spans()
            self._write_line()

    def end(self) -> None:
        """Write what is left; nothing on a rank that serves."""
        self.complete()
        if not self._first and not self._ends:
            return
        self._write_spans()
        self._write_line()

    def _write_spans(self) -> None:
        self._write(
            "spans",
            spans=spans_to_dict(span for spans in self._spans for span in spans),
            notes={**self._recorder.notes, **self._splits.notes()},
            sample=self._sample.record() if self._sample else None,
        )

    def _write_line(self) -> None:
        """Write the data since the last line, and discard them."""
        recorder, plan = self._recorder, self._recorder.plan
        ends = [round(self._device.seconds(end) - recorder.origin_s, 7) for end in self._ends]
        done = self._first + len(ends)
        self._write(
            "iterations",
            first=self._first,
            strategy=self._strategy,
            observed=self._observed,
            emulated=bool(recorder.notes.get("emulated")),
            period=plan.period if plan else 1,
            uneven=bool(plan and plan.votes) or recorder.is_uneven,
            ends_s=ends,
            losses=[[i, float(f"{float(loss):.9g}")] for i, loss in self._losses if i < done],
            without_update=self._without_update,
            votes=self._votes.pop_columns(),
            metrics={
                name: [[i, value] for i, value in values if i < done]
                for name, values in self._metrics.items()
            },
        )
        self._losses = [(i, loss) for i, loss in self._losses if i >= done]
        for values in self._metrics.values():
            values[:] = [entry for entry in values if entry[0] >= done]
        self._first, self._ends, self._without_update = done, [], []
