"""Recorder of one rank: measured trace, losses, votes and traffic for the report."""

from __future__ import annotations

import json
import time
import warnings
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from offbeat.core.derive.windows import Windows
from offbeat.core.files import write_or_warn, write_text
from offbeat.core.measuring.loss import LossTap
from offbeat.core.plan import INSIDE, Plan, base_link
from offbeat.core.profile import Profile
from offbeat.core.runtime.iteration import BackwardSplit, Iteration
from offbeat.core.runtime.recording import Recorder
from offbeat.core.sim.trace import Span, spans_to_dict
from offbeat.core.transport.device import Device, Mark
from offbeat.experiments.record.record_file import RecordWriter, path_of
from offbeat.jobs.iteration_spans import iteration_spans
from offbeat.jobs.replica_sample import Sample
from offbeat.jobs.reported import set_receiver

BLOCK_ITERATIONS, BLOCK_S = 1000, 5.0  # a block ends at the first of these limits
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


class RunRecorder(Recorder):
    """Recorder that appends the measurements of one rank to `directory`/rank{r}.jsonl in blocks.

    `write` closes the record. The memory of the recorder does not grow with the iterations.
    """

    every_bucket = True  # the trace has the time at which each bucket is ready

    def __init__(self, directory: str | Path, rank: int, device: Device):
        super().__init__()
        self._blocks = RecordWriter(path_of(directory, rank))
        self._rank, self._device = rank, device
        self._first, self._failed = 0, False
        self._pending: deque[Iteration] = deque()  # iterations that the device has not completed
        self._written_s, self._window_due = time.monotonic(), 0
        self._ends: list[Mark] = []  # since the last block, as are losses, warnings and decisions
        self._losses: list[tuple[int, Tensor]] = []
        self._without_update: list[int] = []
        self._spans: deque[list[Span]] = deque(maxlen=WINDOW_PERIODS)
        self._splits = SplitSums()
        self.observed: int = 0
        self.strategy: str = ""
        self.decisions: list[dict[str, Any]] = []
        self._sample: Sample | None = None
        self._votes = VoteLog()
        self._tap = LossTap()
        self._reached = 0
        self._metrics: dict[str, list[tuple[int, float]]] = defaultdict(list)
        self._receive = self._add_metric
        set_receiver(self._receive)

    def start(
        self, strategy: str, plan: Plan | None, observed: int, profile: Profile | None = None
    ) -> None:
        self._record_pending()
        self.strategy, self.plan, self.observed = strategy, plan, observed
        window = WINDOW_PERIODS * (plan.period if plan else 1)
        self._spans = deque(maxlen=max(2, window))
        if plan is not None:
            self._save_plan(plan)

    def set_plan(self, plan: Plan, profile: Profile | None = None) -> None:
        self._record_pending()
        super().set_plan(plan, profile)
        # After `start`: a variant that the first iteration of the script requires.
        if self.strategy and self._reached <= self.observed:
            self._save_plan(plan)

    def _save_plan(self, plan: Plan) -> None:
        """On rank 0, write the plan, of which the prediction of the run is made."""
        if self._rank == 0:
            path = self._blocks.path.with_name("plan.json")
            write_or_warn(partial(_write_plan, plan), str(path), "plan", needed=False)

    def on_step_begin(self, iteration: int) -> None:
        self._reached = iteration
        loss = self._tap.take()
        if loss is not None:
            self._losses.append((iteration, loss))

    def _add_metric(self, name: str, value: float) -> None:
        """Record a metric that the script reports, with the iteration of the last step."""
        self._metrics[name].append((self._reached, value))

    def on_step_end(self, iteration: int) -> None:
        if self._sample is not None:
            self._sample.take(iteration)

    def set_sample(self, create: Callable[[], Sample] | None) -> None:
        # Emulated layers compute nothing, so their replicas do not differ.
        if create is None or self.notes.get("emulated"):
            self._sample = None
        else:
            self._sample = create()

    def decide(self, iteration: int, what: str, warning: str | None) -> None:
        self.decisions.append({"iteration": iteration, "what": what})
        if warning is not None:
            self.warnings.append(warning)

    def ended(self, iteration: Iteration) -> None:
        self._pending.append(iteration)
        while self._pending and self._pending[0].is_reached(self._device):
            self._record_iteration(self._pending.popleft())

    def _record_pending(self) -> None:
        """Record all iterations that have ended. Waits until the device has reached their end."""
        while self._pending:
            self._record_iteration(self._pending.popleft())

    def _record_iteration(self, done: Iteration) -> None:
        if self.plan is not None and not Windows(self.plan).applied_window(done.planned):
            self._without_update.append(done.number)
        if voting := self._vote_names:
            self._votes.add_iteration(done, voting)
        if done.split is not None:
            self._splits.add(done.number, done.split)
        self._ends.append(done.marks.end)
        spans = iteration_spans(done, self.plan, self._rank, self._device, self.origin_s)
        self._spans.append([*spans])
        self._append_if_due()

    @property
    def _vote_names(self) -> Sequence[str]:
        return [] if self.plan is None else [vote.name for vote in self.plan.votes]

    def write(self, bytes_sent: Mapping[str, int]) -> None:
        self._record_pending()
        last = {"bytes": dict(bytes_sent), "pace": self.pace, "closed": True}
        self._add_block({**self._fields(), **last})
        self._tap.close()

    def _append_if_due(self) -> None:
        now_s = time.monotonic()
        if len(self._ends) < BLOCK_ITERATIONS and now_s - self._written_s < BLOCK_S:
            return
        self._written_s = now_s
        if self._first + len(self._ends) >= self._window_due:
            self._window_due = 2 * (self._first + len(self._ends))
            self._add_block(self._fields())
        else:
            self._add_block({})

    def _fields(self) -> dict[str, Any]:
        """Return the fields that replace their earlier values.

        They are large, so they are written only each time that the run has doubled in length.
        """
        spans = (span for spans in self._spans for span in spans)
        return {
            "spans": spans_to_dict(spans),
            "notes": {**self.notes, **self._splits.notes()},
            "sample": self._sample.record() if self._sample else None,
        }

    def _add_block(self, more: Mapping[str, Any]) -> None:
        """Append a block of the data since the last block, and discard this data."""
        ends = [round(self._device.seconds(end) - self.origin_s, 7) for end in self._ends]
        done = self._first + len(ends)
        block = {
            "first": self._first,
            "rank": self._rank,
            "strategy": self.strategy,
            "observed": self.observed,
            "emulated": bool(self.notes.get("emulated")),
            "period": self.plan.period if self.plan else 1,
            "uneven": bool(self._vote_names) or self.is_uneven,
            "ends_s": ends,
            "losses": [[i, _round_loss(float(loss))] for i, loss in self._losses if i < done],
            "without_update": self._without_update,
            "warnings": self.warnings,
            "decisions": self.decisions,
            "votes": self._votes.pop_columns(),
            **more,
        }
        if self._metrics:
            block["metrics"] = {
                name: [[i, value] for i, value in values if i < done]
                for name, values in self._metrics.items()
            }
            for values in self._metrics.values():
                values[:] = [entry for entry in values if entry[0] >= done]
        self._first = done
        self._losses = [(i, loss) for i, loss in self._losses if i >= done]
        self._ends, self._without_update = [], []
        self.warnings, self.decisions = [], []
        try:
            self._blocks.append(block)
        except OSError as error:
            if not self._failed:
                warnings.warn(
                    f"record ({self._blocks.path}) cannot be written from iteration "
                    f"{block['first']} on: {error.strerror or error}; training goes on, and the "
                    "write is repeated with each block. Make room there, or give another --out",
                    stacklevel=2,
                )
            self._failed = True


def _write_plan(plan: Plan, path: str) -> None:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(plan.to_dict()))


def _round_loss(loss: float) -> float:
    """Round to the precision of float32."""
    return float(f"{loss:.9g}")
