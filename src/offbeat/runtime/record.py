"""Recording: the measured trace, losses and traffic of one rank, written for the report."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from offbeat.measuring.divergence import Sample
from offbeat.measuring.loss import LossTap
from offbeat.plan import BUILT_IN, Plan, Transfer
from offbeat.plan.windows import Windows
from offbeat.runtime.iteration import Acted, Iteration, Timestamps
from offbeat.runtime.vote_log import VoteLog
from offbeat.trace import COMPUTE, Span, Trace
from offbeat.transport.device import Device, Mark

SCHEMA = 1
WINDOW_PERIODS = 3  # spans are kept for the last periods only; ends for every iteration


class Recorder:
    """Collects what one rank did; `write` leaves it in `directory`/rank{r}.json."""

    def __init__(self, directory: str | Path, rank: int, device: Device):
        self._path = Path(directory) / f"rank{rank}.json"
        self._rank, self._device = rank, device
        self.origin_s = time.perf_counter()
        self._ends: list[Mark] = []
        self._losses: list[tuple[int, Tensor]] = []
        self._without_update: list[int] = []
        self._spans: deque[list[Span]] = deque(maxlen=WINDOW_PERIODS)
        self.plan: Plan | None = None
        self.observed = 0
        self.strategy = ""
        self.warnings: list[str] = []
        self.decisions: list[dict[str, Any]] = []
        self.notes: dict[str, Any] = {}
        self.pace: dict[str, float] | None = None
        self.sample: Sample | None = None
        self._votes_without_plan: Sequence[str] = ()
        self._votes = VoteLog()
        self._tap = LossTap()

    def start(
        self, strategy: str, plan: Plan | None, observed: int, votes: Sequence[str] = ()
    ) -> None:
        """The strategy's own iterations begin now; `observed` ones came before. `votes` are those
        of a strategy without a plan."""
        self.strategy, self.plan, self.observed = strategy, plan, observed
        self._votes_without_plan = votes
        window = WINDOW_PERIODS * (plan.period if plan else 1)
        self._spans = deque(maxlen=max(2, window))
        if plan is not None and self._rank == 0:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            (self._path.parent / "plan.json").write_text(json.dumps(plan.to_dict()))

    def stepped(self, iteration: int) -> None:
        """The user has called `optimizer.step()`: the loss of this iteration is known."""
        loss = self._tap.take()
        if loss is not None:
            self._losses.append((iteration, loss))

    def ended(self, iteration: int) -> None:
        """`optimizer.step()` is over."""
        if self.sample is not None:
            self.sample.take(iteration)

    def decide(self, iteration: int, what: str, warning: str | None) -> None:
        """The runtime has changed the plan, or fallen back."""
        self.decisions.append({"iteration": iteration, "what": what})
        if warning is not None:
            self.warnings.append(warning)

    def iteration(self, done: Iteration) -> None:
        """Take in one finished iteration."""
        if self.plan is not None and not Windows(self.plan).applied(done.planned):
            self._without_update.append(done.number)
        if voting := self._voting:
            self._votes.take(done, voting)
        self._ends.append(done.marks.end)
        self._spans.append(list(_spans(done, self.plan, self._rank, self._device, self.origin_s)))

    @property
    def _voting(self) -> Sequence[str]:
        plan = self.plan
        return self._votes_without_plan if plan is None else [vote.name for vote in plan.votes]

    def write(self, bytes_sent: dict[str, int]) -> None:
        """Write the record, in one move."""
        ends = [self._device.seconds(end) - self.origin_s for end in self._ends]
        trace = Trace(
            source="measured",
            strategy=self.strategy,
            ends_s=(tuple(ends),),
            starts_s=(0.0,),
            spans=tuple(span for spans in self._spans for span in spans),
            period=self.plan.period if self.plan else 1,
            uneven=bool(self._voting),
            notes=self.notes,
        )
        record = {
            "schema": SCHEMA,
            "rank": self._rank,
            "strategy": self.strategy,
            "observed": self.observed,
            "emulated": bool(self.notes.get("emulated")),
            "losses": [[i, ends[i], float(loss)] for i, loss in self._losses if i < len(ends)],
            "pace": self.pace,
            "sample": self.sample.record() if self.sample else None,
            "without_update": self._without_update,
            "bytes": bytes_sent,
            "trace": trace.to_dict(),
            "warnings": self.warnings,
            "decisions": self.decisions,
            "checks": [],
            "votes": self._votes.to_dict(),
        }
        self._path.parent.mkdir(parents=True, exist_ok=True)
        draft = self._path.with_suffix(".part")
        draft.write_text(json.dumps(record))
        draft.replace(self._path)
        self._tap.close()


def _spans(
    done: Iteration, plan: Plan | None, rank: int, device: Device, origin: float
) -> Iterator[Span]:
    def at(mark: Mark) -> float:
        return device.seconds(mark) - origin

    size = plan.buckets if plan is not None else len(done.marks.ready)
    buffers = plan.all_buffers if plan is not None else BUILT_IN
    for kind, start, end, bucket in _compute(done.marks, size, device):
        run = None if bucket is None else (bucket, bucket + 1)
        yield Span(rank, COMPUTE, kind, done.number, at(start), at(end), run)
    for message in done.messages:
        if message.end is None:  # it has failed, was passed over, or the run ended before it
            continue
        t = message.transfer
        run = (t.payload.buckets.start, t.payload.buckets.stop)
        half = t.verb in ("reduce_scatter", "all_gather")
        kind = t.verb if half else buffers[t.payload.buffer].kind
        start, end = at(message.start), at(message.end)
        size = sum(x.numel() * x.element_size() for x in message.tensors) // (2 if half else 1)
        carries = _carries(plan, done, t)
        yield Span(rank, t.link, kind, done.number, start, end, run, size, carries, t.ranks)


def _carries(plan: Plan | None, done: Iteration, t: Transfer) -> tuple[int, int] | None:
    """Iterations whose gradients a message holds, where they are added up over several."""
    windows = None if plan is None else Windows(plan)
    if windows is None or not windows.late or t.payload.buffer != "grad":
        return None
    window = windows.window(done.planned, t.payload.age)
    begun = done.number - done.planned
    return begun + window.start, begun + window.stop


def _compute(
    marks: Timestamps, buckets: int, device: Device
) -> Iterator[tuple[str, Mark, Mark, int | None]]:
    """(kind, start, end, bucket) of what the compute lane did, in order."""
    at, bucket = marks.begin, None
    forward = [acted for acted in marks.acted if acted.position < buckets]
    backward = {acted.position - buckets: acted for acted in marks.acted}
    if marks.forward is not None:
        early, later = _split(forward, marks, device)
        for acted in early:
            yield "other", at, acted.begin, None
            yield from _acted(acted, buckets - 1 - acted.position)
            at = acted.applied
        yield "other", at, marks.forward, None
        at = marks.forward
        for acted in later:
            yield "forward", at, acted.begin, bucket
            bucket = buckets - 1 - acted.position
            yield from _acted(acted, bucket)
            at = acted.applied
        yield "forward", at, marks.forward_end, bucket
        at = marks.forward_end
    for b, ready in enumerate(marks.ready):
        if ready is not None:
            yield "backward", at, ready, b
            at = ready
        if b in backward:
            yield from _acted(backward[b], b)
            at = backward[b].applied
    yield "backward", at, marks.backward_end, None
    yield "wait", marks.backward_end, marks.waited, None
    yield "other", marks.waited, marks.step, None
    yield "update", marks.step, marks.stepped, None
    yield "wait", marks.stepped, marks.end, None


def _split(
    forward: list[Acted], marks: Timestamps, device: Device
) -> tuple[list[Acted], list[Acted]]:
    """What was done before the model's forward began (for an evaluation, say), and during it."""
    if not forward:
        return [], []
    begin_s = device.seconds(marks.forward)
    early = [acted for acted in forward if device.seconds(acted.begin) < begin_s]
    return early, forward[len(early) :]


def _acted(acted: Acted, bucket: int) -> Iterator[tuple[str, Mark, Mark, int | None]]:
    yield "wait", acted.begin, acted.waited, bucket
    yield "update", acted.waited, acted.applied, bucket
