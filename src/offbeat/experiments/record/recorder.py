"""Recorder of one rank: measured trace, losses, votes and traffic for the report."""

from __future__ import annotations

import json
import time
import warnings
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from offbeat.core.derive.windows import Windows
from offbeat.core.files import write_or_warn, write_text
from offbeat.core.measuring.loss import LossTap
from offbeat.core.measuring.replica_sample import Sample
from offbeat.core.measuring.reported import set_receiver
from offbeat.core.plan import BUILT_IN, Plan, Transfer
from offbeat.core.runtime.iteration import BackwardSplit, Iteration, MomentTimes, Timestamps
from offbeat.core.sim.trace import COMPUTE, Span, spans_to_dict
from offbeat.core.transport.device import Device, Mark
from offbeat.experiments.record.record_file import RecordWriter, path_of

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
    """One entry per iteration with a vote. Bytes exclude the messages of the votes."""

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
        sent = [m for m in done.messages if not m.passed]
        self._sent.append(sum(x.nbytes for m in sent for x in m.tensors))
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


class Recorder:
    """Recorder that appends the measurements of one rank to `directory`/rank{r}.jsonl in blocks.

    `write` closes the record. The memory of the recorder does not grow with the iterations.
    """

    def __init__(self, directory: str | Path, rank: int, device: Device):
        self._blocks = RecordWriter(path_of(directory, rank))
        self._rank, self._device = rank, device
        self.origin_s: float = time.perf_counter()
        self._first, self._failed = 0, False
        self._written_s, self._window_due = time.monotonic(), 0
        self._ends: list[Mark] = []  # since the last block, as are losses, warnings and decisions
        self._losses: list[tuple[int, Tensor]] = []
        self._without_update: list[int] = []
        self._spans: deque[list[Span]] = deque(maxlen=WINDOW_PERIODS)
        self._splits = SplitSums()
        self.plan: Plan | None = None
        self.observed: int = 0
        self.strategy: str = ""
        self.warnings: list[str] = []
        self.decisions: list[dict[str, Any]] = []
        self.notes: dict[str, Any] = {}
        self.pace: dict[str, float] | None = None
        self.sample: Sample | None = None
        self._votes = VoteLog()
        self._tap = LossTap()
        self._reached = 0
        self._metrics: dict[str, list[tuple[int, float]]] = defaultdict(list)
        self._receive = self._add_metric
        set_receiver(self._receive)

    def start(self, strategy: str, plan: Plan | None, observed: int) -> None:
        """Begin the iterations of the strategy, after `observed` profiled iterations."""
        self.strategy, self.plan, self.observed = strategy, plan, observed
        window = WINDOW_PERIODS * (plan.period if plan else 1)
        self._spans = deque(maxlen=max(2, window))
        if plan is not None and self._rank == 0:
            path = self._blocks.path.with_name("plan.json")
            write_or_warn(partial(_write_plan, plan), str(path), "plan", needed=False)

    def on_step_begin(self, iteration: int) -> None:
        """Take the loss of an iteration, at the beginning of `optimizer.step()`."""
        self._reached = iteration
        loss = self._tap.take()
        if loss is not None:
            self._losses.append((iteration, loss))

    def _add_metric(self, name: str, value: float) -> None:
        """Record a metric that the script reports, with the iteration of the last step."""
        self._metrics[name].append((self._reached, value))

    def on_step_end(self, iteration: int) -> None:
        """Sample the parameters, at the end of `optimizer.step()`."""
        if self.sample is not None:
            self.sample.take(iteration)

    def decide(self, iteration: int, what: str, warning: str | None) -> None:
        """Record a decision of the runtime, such as a new plan or a fallback."""
        self.decisions.append({"iteration": iteration, "what": what})
        if warning is not None:
            self.warnings.append(warning)

    def add_iteration(self, done: Iteration) -> None:
        """Record a finished iteration."""
        if self.plan is not None and not Windows(self.plan).applied_window(done.planned):
            self._without_update.append(done.number)
        if voting := self._vote_names:
            self._votes.add_iteration(done, voting)
        if done.split is not None:
            self._splits.add(done.number, done.split)
        self._ends.append(done.marks.end)
        self._spans.append(list(_spans(done, self.plan, self._rank, self._device, self.origin_s)))
        self._append_if_due()

    @property
    def _vote_names(self) -> Sequence[str]:
        return [] if self.plan is None else [vote.name for vote in self.plan.votes]

    def write(self, bytes_sent: dict[str, int]) -> None:
        """Write the last block and mark the record as closed."""
        self._add_block({"bytes": bytes_sent, "pace": self.pace, **self._fields(), "closed": True})
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
            "sample": self.sample.record() if self.sample else None,
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
            "uneven": bool(self._vote_names),
            "ends_s": ends,
            "losses": [[i, _round_loss(float(loss))] for i, loss in self._losses if i < done],
            "without_update": self._without_update,
            "warnings": self.warnings,
            "decisions": self.decisions,
            "checks": [],
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


def _spans(
    done: Iteration, plan: Plan | None, rank: int, device: Device, origin: float
) -> Iterator[Span]:
    def at(mark: Mark) -> float:
        return device.seconds(mark) - origin

    size = plan.buckets if plan is not None else len(done.marks.ready)
    buffers = plan.all_buffers if plan is not None else BUILT_IN
    split = done.split
    for kind, start, end, bucket in _compute_intervals(done.marks, size, device):
        run = None if bucket is None else (bucket, bucket + 1)
        if kind == "backward" and bucket is None and split is not None:
            begin_s, end_s = at(start), at(end)
            middle_s = max(begin_s, end_s - split.waited_s)
            yield Span(rank, COMPUTE, "backward", done.number, begin_s, middle_s)
            yield Span(rank, COMPUTE, "wait", done.number, middle_s, end_s)
            sent = (max(begin_s, end_s - split.sent_s), end_s)
            whole = (0, size) if size else None
            yield Span(rank, split.link, "grad", done.number, *sent, whole, split.sent_bytes)
            continue
        yield Span(rank, COMPUTE, kind, done.number, at(start), at(end), run)
    for message in done.messages:
        if message.end is None:  # failed, skipped, or unfinished at the end of the run
            continue
        t = message.transfer
        run = (t.payload.buckets.start, t.payload.buckets.stop)
        half = t.verb in ("reduce_scatter", "all_gather")
        kind = t.verb if half or t.verb == "broadcast" else buffers[t.payload.buffer].kind
        start, end = at(message.start), at(message.end)
        carries = _carried_iterations(plan, done, t)
        size = message.sent_bytes
        yield Span(rank, t.link, kind, done.number, start, end, run, size, carries, t.ranks)


def _carried_iterations(plan: Plan | None, done: Iteration, t: Transfer) -> tuple[int, int] | None:
    """Return the iterations [first, stop) whose gradients a message holds, if merged or late."""
    windows = None if plan is None else Windows(plan)
    if windows is None or not windows.late or t.payload.buffer != "grad":
        return None
    window = windows.window(done.planned, t.payload.age)
    begun = done.number - done.planned
    return begun + window.start, begun + window.stop


def _compute_intervals(
    marks: Timestamps, buckets: int, device: Device
) -> Iterator[tuple[str, Mark, Mark, int | None]]:
    """Yield (kind, start, end, bucket) of each interval of the compute lane, in order."""
    at, bucket = marks.begin, None
    forward = [acted for acted in marks.acted if acted.position < buckets]
    backward = {acted.position - buckets: acted for acted in marks.acted}
    if marks.forward is not None:
        early, later = _split_actions(forward, marks, device)
        for acted in early:
            yield "other", at, acted.begin, None
            yield from _action_spans(acted, buckets - 1 - acted.position)
            at = acted.applied
        yield "other", at, marks.forward, None
        at = marks.forward
        for acted in later:
            yield "forward", at, acted.begin, bucket
            bucket = buckets - 1 - acted.position
            yield from _action_spans(acted, bucket)
            at = acted.applied
        yield "forward", at, marks.forward_end, bucket
        at = marks.forward_end
    for b, ready in enumerate(marks.ready):
        if ready is not None:
            yield "backward", at, ready, b
            at = ready
        if b in backward:
            yield from _action_spans(backward[b], b)
            at = backward[b].applied
    yield "backward", at, marks.backward_end, None
    yield "wait", marks.backward_end, marks.waited, None
    yield "other", marks.waited, marks.step, None
    yield "update", marks.step, marks.stepped, None
    yield "wait", marks.stepped, marks.end, None


def _split_actions(
    forward: list[MomentTimes], marks: Timestamps, device: Device
) -> tuple[list[MomentTimes], list[MomentTimes]]:
    """Split updates in forward into those before the recorded forward and those within it."""
    if not forward:
        return [], []
    begin_s = device.seconds(marks.forward)
    early = [acted for acted in forward if device.seconds(acted.begin) < begin_s]
    return early, forward[len(early) :]


def _action_spans(acted: MomentTimes, bucket: int) -> Iterator[tuple[str, Mark, Mark, int | None]]:
    yield "wait", acted.begin, acted.waited, bucket
    yield "update", acted.waited, acted.applied, bucket
