"""Interpreter of plans: all workers of a job in one process, on NumPy arrays in float64.

It executes the same programs as the simulator and the runtime. `check` runs it on synthetic
numbers; tests compare the runtime with it. A message copies its payload at its release, and its
result is written at its wait. A runtime that works in place computes the same only if the payload
is not accessed in between. The interpreter raises `ConflictError` for such an access.
"""

from __future__ import annotations

import random
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from offbeat.core.codecs import codec, memory_of, way
from offbeat.core.codecs.codec import Exact
from offbeat.core.derive.coalesced import coalesce_steps
from offbeat.core.derive.drained import drained_plan
from offbeat.core.plan.cursor import Cursor
from offbeat.core.plan.program import Program, Step
from offbeat.core.plan.semantics import is_active, shard_slice
from offbeat.core.plan.types import (
    Apply,
    Plan,
    Transfer,
    Vote,
    Wire,
    groups_of,
)
from offbeat.core.rules import RULES, VOTES, VoteRule
from offbeat.core.verify.worker import (
    Array,
    ConflictError,
    InterpretedIteration,
    InterpretedMessage,
    InterpretedModel,
    Worker,
)

NOTHING: Array = np.empty(0)  # payload of a rank that only receives, or skips the message


Waits = Generator[ConflictError, None, None]


class _BlockedError(Exception):
    """Interruption of a wait that cannot end yet. `conflict` is its error if it never ends."""

    def __init__(self, conflict: ConflictError) -> None:
        super().__init__()
        self.conflict = conflict


@dataclass
class Interpreter:
    """Executor of a plan for all workers of a job.

    Attributes:
        plan: plan to execute.
        model: model to train.
        ranks: number of workers.
        votes: vote rules by name.
        exact: whether codecs are replaced by a lossless one.
        flushing: ranks that complete the waits of the next forward right after every iteration,
            as an evaluation or a checkpoint does.
        drains: iterations before which all workers apply their accumulated gradients and restart
            the plan.
        resumes: iterations before which all workers continue with a new cursor, as after a load of
            a checkpoint.
        decisions: outcome of each vote, by (vote, iteration).
    """

    plan: Plan
    model: InterpretedModel
    ranks: int
    votes: Mapping[str, VoteRule] = field(default_factory=lambda: VOTES)
    exact: bool = False
    flushing: Collection[int] = ()
    drains: Collection[int] = ()
    resumes: Collection[int] = ()

    def __post_init__(self) -> None:
        shared = Program(self.plan) if self.plan.uniform else None
        self.workers = [
            Worker(rank, self.model, shared or Program(self.plan, rank))
            for rank in range(self.ranks)
        ]
        self._coalesced: dict[tuple[Program, tuple[int, ...]], tuple[Step, ...]] = {}
        self._messages: dict[tuple[int, int, int], InterpretedMessage] = {}
        self._numbered: list[InterpretedMessage] = []  # type: ignore[assignment]
        self._numbers: dict[int, int] = {}
        self._queues: dict[tuple[str, int], deque[InterpretedMessage]] = defaultdict(deque)
        self.ballots: dict[tuple[str, int], dict[int, bool]] = defaultdict(dict)
        self.decisions: dict[tuple[str, int], bool] = {}
        self.progress = 0
        self._group_numbers: dict[tuple[int, ...], int] = {}
        self._drained: dict[int, Plan | None] = {}  # by the number of the next iteration
        self._groups = {
            link: {rank: group for group in groups_of(link, self.plan.groups) for rank in group}
            for link in self.plan.links
        }
        for worker in self.workers:
            worker.messages_by_number = self._numbered
            worker.cursor = self._cursor(worker, worker.program)

    def run(
        self,
        iterations: int,
        *,
        seed: int | None = None,
        after: Callable[[Worker, int], None] = lambda *_: None,
    ) -> None:
        """Run all workers.

        Args:
            iterations: number of iterations.
            seed: seed of a random order in which the workers advance; None for a fixed order.
            after: function of (worker, iteration), called when a worker ends an iteration.

        Raises:
            ConflictError: no worker can proceed, or a rule accesses elements that are in use.
        """
        rng = None if seed is None else random.Random(seed)
        lives = {w: self._iterate(w, iterations, after, eager=rng is None) for w in self.workers}
        blocked: dict[Worker, int] = {}  # value of `_progress` at the last try; -1: not blocked
        while lives:
            worker = next(iter(lives)) if rng is None else rng.choice(list(lives))
            life = lives.pop(worker)
            state = next(life, "over")
            if state == "over":
                self.progress += 1
                continue
            lives[worker] = life  # to the end, so that every worker gets its turn
            blocked[worker] = self.progress if isinstance(state, ConflictError) else -1
            if all(blocked.get(w) == self.progress for w in lives):
                assert isinstance(state, ConflictError)
                raise state

    # ---- worker ----------------------------------------------------------------------------

    def _iterate(
        self, w: Worker, iterations: int, after: Callable[[Worker, int], None], *, eager: bool
    ) -> Generator[ConflictError | str, None, None]:
        forwards = self.plan.buckets
        for i in range(iterations):
            if i in self.drains:
                yield from self._drain(w, i)
            if i in self.resumes:
                yield from self._resume(w)
            cursor, done = w.cursor, 0
            for step in self._begin(w, cursor, i).steps:
                w.compute(i, done, _compute_stop(step, forwards))
                done = _compute_stop(step, forwards)
                while True:
                    try:
                        cursor.walk(step.position)
                        break
                    except _BlockedError as blocked:
                        yield blocked.conflict
                self.progress += 1
                if not eager:
                    yield "moved"
            w.compute(i, done, 2 * forwards + 2)
            cursor.end()
            after(w, i)
            if w.rank in self.flushing:
                yield from _retry(cursor.flush)

    def _cursor(self, w: Worker, program: Program) -> Cursor[InterpretedIteration]:
        return Cursor(program, _ArrayActions(self, w, program), observers=w.step_observers)

    def _begin(
        self, w: Worker, cursor: Cursor[InterpretedIteration], number: int
    ) -> InterpretedIteration:
        """Begin an iteration of a cursor, with its messages enqueued."""

        def create(planned: int) -> InterpretedIteration:
            messages = self._enqueue(w, cursor.program, planned)
            steps = self.steps(cursor.program, planned)
            return InterpretedIteration(number, messages, planned=planned, steps=steps)

        w.begun += 1
        return cursor.begin(create)

    def steps(self, program: Program, planned: int) -> tuple[Step, ...]:
        """Return the coalesced steps of an iteration."""
        key = (program, program.key(planned))
        if key not in self._coalesced:
            self._coalesced[key] = coalesce_steps(program.steps(planned), self.plan.buckets)
        return self._coalesced[key]

    def _drain(self, w: Worker, number: int) -> Waits:
        """Apply accumulated gradients, discard averages that are not applied, restart the plan."""
        yield from _retry(w.cursor.flush)
        yield from _retry(w.cursor.receive_all)
        planned = w.cursor.planned
        if planned not in self._drained:  # all workers share the plan and its transfers
            self._drained[planned] = drained_plan(self.plan, planned)
        plan = self._drained[planned]
        if plan is not None:
            program = Program(plan, w.rank)
            cursor = self._cursor(w, program)
            self._begin(w, cursor, number)
            yield from _retry(lambda: cursor.walk(program.end))
        w.restart()

    def _resume(self, w: Worker) -> Waits:
        """Continue with a new cursor, for which the messages of earlier iterations have arrived."""
        before = w.cursor
        yield from _retry(before.recent)
        for iteration in before.recent():
            for index in iteration.outstanding:
                while not (message := iteration.messages[index]).done:
                    yield self.deadlock(w, message)
        w.cursor = self._cursor(w, w.program)
        w.cursor.resume(before.planned, [replace(one) for one in before.recent()])

    def _enqueue(self, w: Worker, program: Program, planned: int) -> list[InterpretedMessage]:
        messages = []
        for t in program.transfers(planned):
            group = self._groups[t.link].get(w.rank)
            ranks = t.ranks or group or tuple(range(self.ranks))
            message = self._messages.setdefault(
                (id(t), w.begun, ranks[0]), InterpretedMessage(t, planned, ranks)
            )
            messages.append(message)
            self._queues[t.link, w.rank].append(message)
            if t.only_receives(w.rank):
                self.give(message, w.rank, NOTHING)
        return messages

    def give(
        self, message: InterpretedMessage, rank: int, payload: Array, *, passed: bool = False
    ) -> None:
        """Send a rank's payload of a message, or pass the message."""
        if passed:
            message.passed.add(rank)
        message.given[rank] = payload
        self._complete_messages(message)

    def take_payload(self, w: Worker, message: InterpretedMessage) -> Array:
        t, payload = message.transfer, message.transfer.payload
        span, copy = w.slice_of(payload), w.physical(payload.buffer, payload.age)
        array = w.view(payload.buffer, span, payload.age)
        w.require_gradients(payload.buffer, copy, span)
        if payload.buffer == "grad" and t.verb in ("all_reduce", "reduce_scatter") and t.in_place:
            group = self._group_numbers.setdefault(message.ranks, len(self._group_numbers) + 1)
            if np.count_nonzero(w.averaged[copy][span] == group):
                raise ConflictError(f"{payload} is moved twice: {t.id} averages it again", t)
            w.averaged[copy][span] = group
        message.regions[w.rank] = payload.buffer, copy
        if t.in_place:
            w.flying[payload.buffer][copy][span] = self._message_number(message)
        given = array.copy()
        if t.wire is not None and t.wire.anchor is not None and not t.sends_delta:
            anchor = w.physical(t.wire.anchor, 0)
            given -= w.view(t.wire.anchor, span)
            w.flying[t.wire.anchor][anchor][span] = self._message_number(message)
        return given

    def _message_number(self, message: InterpretedMessage) -> int:
        """Return the number of a message, counted from 1, for the marks in `Worker.flying`."""
        if id(message) not in self._numbers:
            if not self._numbered:
                self._numbered.append(message)
            self._numbered.append(message)
            self._numbers[id(message)] = len(self._numbered) - 1
        return self._numbers[id(message)]

    def _complete_messages(self, message: InterpretedMessage) -> None:
        """Complete a message if it is first in the queues of all its ranks, then those behind
        it."""
        queues = [self._queues[message.transfer.link, rank] for rank in message.ranks]
        if not message.ready or any(not q or q[0] is not message for q in queues):
            return
        if not message.passed:
            wire = message.transfer.wire
            message.result = _result(message) if wire is None else self._decode(message, wire)
        message.given.clear()
        message.done = True
        self.progress += 1
        for queue in queues:
            queue.popleft()
        for queue in queues:
            if queue:
                self._complete_messages(queue[0])

    def _decode(self, message: InterpretedMessage, wire: Wire) -> Array:
        """Return the average that results from encoding and decoding a message.

        Codec errors and the anchor of a send are updated in the order of the link.
        """
        t = message.transfer
        givers = message.ranks[: 1 if t.verb == "send" else None]
        workers = [self.workers[rank] for rank in givers]
        given, errors = [message.given[rank] for rank in givers], []
        if wire.error is not None:
            errors = [w.buffers[wire.error][0][w.slice_of(t.payload)] for w in workers]
            given = [x + e for x, e in zip(given, errors, strict=True)]
        there: list[Array] = []  # sender's copy of the receiver's parameters
        if t.sends_delta:
            assert wire.anchor is not None
            there = [workers[0].buffers[wire.anchor][0][workers[0].slice_of(t.payload)]]
            given = [given[0] - there[0]]
        settings = dict(wire.args)
        used = Exact() if self.exact else codec(wire.name, settings)
        memories = None
        if errors or used.linear:
            memories = [w.memory.setdefault(memory_of(t), {}) for w in workers]
        via = "gather" if self.exact else way(wire.name, settings)
        mean, lost = used.average(given, via, message.iteration, memories)
        for error, own in zip(errors, lost, strict=False):
            error[...] = own
        for array in there:
            array += mean
        return mean

    def deadlock(self, w: Worker, message: InterpretedMessage) -> ConflictError:
        """Return the error of a message that can never complete, with the rule that blocks it."""
        t = message.transfer
        for rank in message.ranks:
            head = next(iter(self._queues[t.link, rank]), message)
            if head is not message:
                h = head.transfer
                return ConflictError(
                    f"{t.id} can never meet its deadline {t.before}: {h.id} of iteration "
                    f"{head.iteration} goes first on {t.link} and is released only after {h.after}",
                    h,
                    t,
                )
        return ConflictError(
            f"{t.id} can never meet its deadline {t.before}: it is released only after {t.after}",
            t,
        )


class _ArrayActions:
    """Actions of one worker for one program, on NumPy arrays. A wait that cannot end yet raises
    `_BlockedError`."""

    def __init__(self, job: Interpreter, w: Worker, program: Program) -> None:
        self._job, self._w, self._program = job, w, program

    def steps(self, planned: int) -> tuple[Step, ...]:
        return self._job.steps(self._program, planned)

    def mark(self) -> None:
        return None

    def record_times(
        self, iteration: InterpretedIteration, position: int, begin: Any, waited: Any
    ) -> None:
        pass  # there is no time

    def apply(self, iteration: InterpretedIteration, apply: Apply) -> bool:
        active = self._is_active(apply, iteration)
        if active:
            self._w.acting = apply
            RULES[apply.rule](self._w, apply)
        return active

    def cast_votes(self, iteration: InterpretedIteration, votes: Sequence[Vote]) -> None:
        job, w = self._job, self._w
        for vote in votes:
            w.acting = vote
            say = job.votes[vote.rule](w, vote, vote.buckets or range(job.plan.buckets))
            job.ballots[vote.name, iteration.number][w.rank] = say
            job.progress += 1

    def decide(self, iteration: InterpretedIteration, vote: Vote) -> bool:
        job, key = self._job, (vote.name, iteration.number)
        ballots = job.ballots[key]
        if len(ballots) < job.ranks:
            raise _BlockedError(
                ConflictError(f"the vote {vote.name!r} waits for a rank that never votes", vote)
            )
        job.decisions[key] = any(ballots.values())
        self._w.decided.add(key)
        return job.decisions[key]

    def _is_active(self, rule: Transfer | Apply, iteration: InterpretedIteration) -> bool:
        """Return the outcome of the vote on which a rule depends; True if there is no vote."""

        def outcome(name: str, ago: int) -> bool:
            vote = name, iteration.number - ago
            if vote not in self._w.decided:
                raise ConflictError(
                    f"{rule.id} depends on the vote {name!r} before it is due", rule
                )
            return self._job.decisions[vote]

        return is_active(rule, iteration.planned, outcome)

    def release(self, iteration: InterpretedIteration, index: int) -> bool:
        message, w = iteration.messages[index], self._w
        w.acting = message.transfer
        active = self._is_active(message.transfer, iteration)
        payload = self._job.take_payload(w, message) if active else NOTHING
        self._job.give(message, w.rank, payload, passed=not active)
        return active

    def is_released(self, iteration: InterpretedIteration, index: int) -> bool:
        message = iteration.messages[index]
        return message.done or self._w.rank in message.given

    def pass_unsent_messages(self, iteration: InterpretedIteration) -> None:
        for index, message in enumerate(iteration.messages):
            if not self.is_released(iteration, index):
                self._job.give(message, self._w.rank, NOTHING, passed=True)

    def receive(self, iteration: InterpretedIteration, index: int) -> None:
        message, w = iteration.messages[index], self._w
        t = message.transfer
        if not self._is_active(t, iteration):
            return
        if not message.done:
            raise _BlockedError(self._job.deadlock(w, message))
        span = w.slice_of(t.payload)
        w.acting = t
        if t.in_place:
            buffer, copy = message.regions[w.rank]
            w.flying[buffer][copy][span] = 0
        elif t.into is None and w.rank in message.regions:
            buffer, copy = message.regions[w.rank]
        else:
            buffer, copy = t.target, w.physical(t.target, 0)
        newest = copy == w.physical(buffer, 0)
        w.require_free(buffer, copy, span, in_use=newest)
        result = message.result
        assert result is not None
        if t.verb == "exchange":
            result = result[1 - message.ranks.index(w.rank)]
        if t.verb == "reduce_scatter":
            own = shard_slice(result.size, len(message.ranks), message.ranks.index(w.rank))
            shard = result[own]
            result = np.full_like(result, np.nan)
            result[own] = shard
        if t.sends_delta:
            result = w.buffers[buffer][copy][span] + result
        elif t.wire is not None and t.wire.anchor is not None:
            anchor = w.physical(t.wire.anchor, 0)
            w.flying[t.wire.anchor][anchor][span] = 0
            result = w.buffers[t.wire.anchor][anchor][span] + result
            w.buffers[t.wire.anchor][anchor][span] = result
        w.buffers[buffer][copy][span] = result


def _result(message: InterpretedMessage) -> Array:
    t = message.transfer
    if t.verb in ("send", "broadcast"):
        return message.given[message.ranks[0]]
    arrays = [message.given[r] for r in message.ranks]
    if t.verb == "exchange":
        return np.stack(arrays)  # [2, elements]; each rank uses the row of the other
    if t.verb == "all_gather":
        result = np.empty_like(arrays[0])
        for k, array in enumerate(arrays):
            own = shard_slice(result.size, len(arrays), k)
            result[own] = array[own]
        return result
    return np.sum(arrays, axis=0) / len(arrays)


def _retry(call: Callable[[], object]) -> Waits:
    """Repeat a call of a cursor until none of its waits blocks."""
    while True:
        try:
            call()
            return
        except _BlockedError as blocked:
            yield blocked.conflict


def _compute_stop(step: Step, forwards: int) -> int:
    """Return the position up to which compute runs before a step, for `Worker.compute`."""
    return step.position if step.position < forwards else step.position + 1
