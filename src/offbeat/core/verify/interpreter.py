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
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from offbeat.core.codecs import codec, way
from offbeat.core.codecs.codec import Exact
from offbeat.core.derive import effects
from offbeat.core.derive.coalesced import coalesce_steps
from offbeat.core.derive.drained import drained_plan
from offbeat.core.plan.cursor import Cursor, Progress
from offbeat.core.plan.program import Program, Step
from offbeat.core.plan.types import (
    Apply,
    Payload,
    Plan,
    Transfer,
    Vote,
    Wire,
    groups_of,
    moment_of,
)
from offbeat.core.rules import RULES, VOTES, Rule, VoteRule

Array = NDArray[np.float64]
NOTHING: Array = np.empty(0)  # payload of a rank that only receives, or skips the message


class ConflictError(Exception):
    """Error of a plan that cannot be executed, or that has a result that depends on message timing.

    Attributes:
        rules: rules of the plan that cause the conflict.
    """

    def __init__(self, message: str, *rules: Transfer | Apply | Vote) -> None:
        super().__init__(message)
        self.rules = rules


Waits = Generator[ConflictError, None, None]


class _BlockedError(Exception):
    """Interruption of a wait that cannot end yet. `conflict` is its error if it never ends."""

    def __init__(self, conflict: ConflictError) -> None:
        super().__init__()
        self.conflict = conflict


@dataclass
class InterpretedModel:
    """Model to train.

    Attributes:
        sizes: number of elements of each bucket.
        start: initial weights of all workers, `[sum(sizes)]`.
        gradient: function of (rank, iteration, run of buckets, weights) that returns the
            gradient. The last argument holds the weights that the forward has used.
        optimizer: function of (worker, run of buckets, weights, gradients) that changes the
            weights in place; None for `w -= g`.
        merges_by_mean: whether the setting `merge` of the rule `local` has an effect.
    """

    sizes: Sequence[int]
    start: Array
    gradient: Callable[[int, int, range, Array], Array]
    optimizer: Callable[[Worker, range, Array, Array], None] | None = None
    merges_by_mean: bool = True  # whether the setting `merge` of the rule `local` counts


class _Message:
    """One transfer in one iteration, shared by all its ranks.

    `given` maps a rank to its payload, `regions` to the buffer and the physical copy of the
    payload. `passed` holds the ranks that skip the message because of a vote.
    """

    def __init__(self, transfer: Transfer, iteration: int, ranks: tuple[int, ...]) -> None:
        self.transfer, self.iteration, self.ranks = transfer, iteration, ranks
        self.given: dict[int, Array] = {}
        self.regions: dict[int, tuple[str, int]] = {}
        self.passed: set[int] = set()
        self.result: Array | None = None
        self.done = False

    @property
    def ready(self) -> bool:
        return len(self.given) == len(self.ranks)


@dataclass(slots=True)
class _Iteration(Progress):
    """One iteration of one worker; `number` counts all its iterations, `planned` those of the
    plan."""

    number: int
    messages: list[_Message]


class Worker:
    """Storage of one rank, and the context of its rules.

    Attributes:
        buffers: buffer name to its physical copies.
        moments: names of the buffers that are moments of the optimizer's state.
        newest: buffer name to the index of its newest copy.
        memory: values that rules and codecs keep between iterations.
        flying: for each element, the number of the message that has it in flight; 0 for none.
        used: for each element, whether forward or backward still needs it.
        averaged: for each gradient, the number of the group over which it is averaged; 0 for
            none.
        filled: for each copy of the gradients, whether backward has ever added to it.
        adds_up: whether the plan has accumulation windows.
        decided: (vote, iteration) of each vote whose outcome the rank has received.
        seen: weights that the last forward has used.
        added: for each gradient, the number of iterations added since it was last applied.
        acting: rule that accesses storage now, or "forward" or "backward".
        starts_window: whether the next backward is the first one of an accumulation window.
    """

    def __init__(self, rank: int, model: InterpretedModel, program: Program) -> None:
        self.rank, self.model, self.program = rank, model, program
        self.plan = plan = program.plan
        self.offsets = [0, *accumulate(model.sizes)]
        self.buffers: dict[str, list[Array]] = {}
        for buffer in plan.all_buffers.values():
            first = model.start if buffer.start == "param" else np.zeros_like(model.start)
            self.buffers[buffer.name] = [first.copy() for _ in range(buffer.copies)]
        self.moments = [name for name in self.buffers if moment_of(name) is not None]
        self.newest = dict.fromkeys(self.buffers, 0)
        self.memory: dict[Any, Any] = {}
        self.flying = {n: [np.zeros(a.size, int) for a in c] for n, c in self.buffers.items()}
        self.used = {name: np.zeros(model.start.size, bool) for name in ("param", "grad")}
        self.averaged = [np.zeros(model.start.size, int) for _ in self.buffers["grad"]]
        self.filled = [False] * len(self.buffers["grad"])
        self.adds_up = any(map(effects.is_window_end, plan.applies))
        self.decided: set[tuple[str, int]] = set()
        self.seen = model.start.copy()
        self.added = [np.zeros(model.start.size) for _ in self.buffers["grad"]]

    # ---- the context of rules ---------------------------------------------------------------

    def read(self, buffer: str, buckets: range, age: int = 0) -> list[Array]:
        span = self.span(buckets)
        self.require_gradients(buffer, self.physical(buffer, age), span)
        return [self.view(buffer, span, age)]

    def write(self, buffer: str, buckets: range, age: int = 0) -> list[Array]:
        return [self.view(buffer, self.span(buckets), age)]

    def parameters(self, buffer: str, buckets: range) -> list[Array]:
        return self.write(buffer, buckets)

    def squared_norm(self, buffer: str, buckets: range) -> float:
        return float(sum((a * a).sum() for a in self.read(buffer, buckets)))

    def scale(self, buffer: str, buckets: range, factor: float) -> None:
        for array in self.write(buffer, buckets):
            array *= factor

    def swap(self, a: str, b: str, buckets: range) -> None:
        for one, other in zip(self.write(a, buckets), self.write(b, buckets), strict=True):
            one[...], other[...] = other.copy(), one.copy()

    def rotate(self, buffer: str) -> None:
        copies = len(self.buffers[buffer])
        if self.used.get(buffer, np.zeros(1)).any():
            raise ConflictError(f"{buffer} is closed while backward adds to it", self.acting)
        self.newest[buffer] = (self.newest[buffer] - 1) % copies
        self.starts_window = True

    def local(self, apply: Apply) -> None:
        age = apply.arg("age", 0)
        span = self.span(apply.buckets)
        weights, gradients = self.view("param", span), self.view("grad", span, age)
        copy = self.physical("grad", age)
        added = self.added[copy][span]
        for name in ("state", *self.moments):
            self.view(name, span)
        if not np.count_nonzero(added):
            if not self.filled[copy]:
                return  # no window before the first one
            raise ConflictError(
                f"{apply.id} has no gradients to apply: they were used up since backward", apply
            )
        factor = apply.arg("scale", 1.0)
        if apply.arg("merge") == "mean" and self.model.merges_by_mean:
            factor = factor / np.maximum(added, 1)
        if self.model.optimizer is None:
            weights -= factor * gradients
        else:
            self.model.optimizer(self, apply.buckets, weights, factor * gradients)
        gradients[...] = added[...] = 0
        self.averaged[copy][span] = 0

    def reset(self, buckets: range) -> None:
        for name in ("state", *self.moments):
            self.view(name, self.span(buckets))[...] = 0

    def recall(self, name: str) -> Any:
        return self.memory.get(name)

    def keep(self, name: str, value: Any) -> None:
        self.memory[name] = value

    def show(self, name: str, numbers: Mapping[str, float]) -> None:
        pass  # the interpreter records no metrics

    # ---- storage ----------------------------------------------------------------------------

    def span(self, buckets: range) -> slice:
        return slice(self.offsets[buckets.start], self.offsets[buckets.stop])

    def slice_of(self, payload: Payload) -> slice:
        whole = self.span(payload.buckets)
        part = payload.slice_of(whole.stop - whole.start)
        return slice(whole.start + part.start, whole.start + part.stop)

    def physical(self, buffer: str, age: int) -> int:
        return (self.newest[buffer] + age) % len(self.buffers[buffer])

    def view(self, buffer: str, span: slice, age: int = 0) -> Array:
        """Return elements of a buffer for the acting rule.

        Raises:
            ConflictError: the elements are in flight, or compute still needs them.
        """
        copy = self.physical(buffer, age)
        self.require_free(buffer, copy, span, in_use=age == 0)
        return self.buffers[buffer][copy][span]

    acting: Any = None

    def require_gradients(self, buffer: str, copy: int, span: slice) -> None:
        """Raise if the acting rule reads gradients that the rule `local` has applied since
        backward.

        Applied gradients are zeros. A copy that backward has never filled is allowed.
        """
        if buffer != "grad" or not self.filled[copy]:
            return
        lost = np.flatnonzero(self.added[copy][span] == 0)
        if lost.size:
            where = self._location(buffer, span.start + int(lost[0]))
            raise ConflictError(
                f"{_actor_name(self.acting)} reads {where}, "
                "which the rule local has used up since backward; read it at an earlier moment "
                "than local, or keep its norm with the rule measure",
                *_rules(self.acting),
            )

    def require_free(self, buffer: str, copy: int, span: slice, *, in_use: bool = True) -> None:
        """Raise ConflictError if elements are in flight, or if compute still needs them
        (`in_use`)."""
        flying = self.flying[buffer][copy][span]
        if np.count_nonzero(flying):  # much faster than any()
            odd = int(np.flatnonzero(flying)[0])
            t = self.messages_by_number[int(flying[odd])].transfer
            raise ConflictError(
                f"{t.id} is in flight between its release {t.after} and its deadline {t.before} "
                f"while {_actor_name(self.acting)} uses {self._location(buffer, span.start + odd)}",
                *_rules(t, self.acting),
            )
        if in_use and buffer in self.used and np.count_nonzero(self.used[buffer][span]):
            odd = int(np.flatnonzero(self.used[buffer][span])[0])
            when = (
                "the forward has read it and backward still needs it"
                if buffer == "param"
                else "backward still adds to it"
            )
            where = self._location(buffer, span.start + odd)
            raise ConflictError(
                f"{_actor_name(self.acting)} touches {where} too early: {when}",
                *_rules(self.acting),
            )

    messages_by_number: Sequence[_Message] = ()
    cursor: Cursor[_Iteration]
    begun = 0  # iterations that this worker has begun, including drains

    def _location(self, buffer: str, element: int) -> str:
        bucket = next(b for b, stop in enumerate(self.offsets[1:]) if stop > element)
        return f"{buffer} of bucket {bucket}"

    def restart(self) -> None:
        """Restart the plan after a drain."""
        self.filled = [False] * len(self.filled)
        self.starts_window = True
        for name in effects.delayed_buffers(self.plan):
            first = self.buffers["param"][self.newest["param"]]
            for copy in self.buffers[name]:
                copy[...] = first if self.plan.all_buffers[name].start == "param" else 0
        self.cursor.restart()

    # ---- compute ----------------------------------------------------------------------------

    def compute(self, iteration: int, start: int, stop: int) -> None:
        """Run the compute of the positions from `start` up to, not including, `stop`.

        The forward of a bucket follows its moment; the gradient of a bucket precedes its moment.
        """
        n = self.plan.buckets
        low, high = n - min(stop, n), n - min(start, n)
        if high > low:
            self._forward(self.span(range(low, high)))
        if start < n < stop:
            self._begin_backward()
        low, high = max(start - n, 0), min(stop - n, n)
        if high > low:
            self._backward(iteration, range(low, high))

    def _forward(self, span: slice) -> None:
        self.acting = "forward"
        self.seen[span] = self.view("param", span)
        self.used["param"][span] = True

    def _begin_backward(self) -> None:
        """Reserve all gradients: from here on, backward may add to them in any order."""
        self.acting = "backward"
        everything, copy = slice(0, self.offsets[-1]), self.physical("grad", 0)
        self.require_free("grad", copy, everything)
        self._require_applied(copy)
        self.used["grad"][:] = True
        self.added[copy] += 1
        self.filled[copy] = True

    def _require_applied(self, copy: int) -> None:
        """Raise if backward would add to a gradient that belongs to an earlier window."""
        if self.adds_up and not self.starts_window:
            return
        self.starts_window = False
        left = self.buffers["grad"][copy]
        if left.any():
            where = self._location("grad", int(np.flatnonzero(left)[0]))
            raise ConflictError(
                f"backward adds to gradients of an earlier iteration in {where}: nothing has "
                "applied or cleared them; apply them in every iteration, or add them up with the "
                "rule close"
            )

    starts_window = True

    def _backward(self, iteration: int, run: range) -> None:
        self.acting = "backward"
        span = self.span(run)
        self.used["param"][span] = self.used["grad"][span] = False
        copy = self.physical("grad", 0)
        self.buffers["grad"][copy][span] += self.model.gradient(
            self.rank, iteration, run, self.seen[span]
        )
        self.averaged[copy][span] = 0


@dataclass
class Interpreter:
    """Executor of a plan for all workers of a job.

    Attributes:
        plan: plan to execute.
        model: model to train.
        ranks: number of workers.
        votes: vote rules by name.
        rules: rules by name.
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
    rules: Mapping[str, Rule] = field(default_factory=lambda: RULES)
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
        self._messages: dict[tuple[int, int, int], _Message] = {}
        self._numbered: list[_Message] = []  # type: ignore[assignment]
        self._numbers: dict[int, int] = {}
        self._queues: dict[tuple[str, int], deque[_Message]] = defaultdict(deque)
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
            worker.cursor = Cursor(worker.program, _ArrayActions(self, worker, worker.program))

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
            cursor.end_backward()
            cursor.end()
            after(w, i)
            if w.rank in self.flushing:
                yield from _retry(cursor.flush)

    def _begin(self, w: Worker, cursor: Cursor[_Iteration], number: int) -> _Iteration:
        """Begin an iteration of a cursor, with its messages enqueued."""

        def create(planned: int) -> _Iteration:
            messages = self._enqueue(w, cursor.program, planned)
            steps = self.steps(cursor.program, planned)
            return _Iteration(number, messages, planned=planned, steps=steps)

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
        yield from _retry(w.cursor.pause)
        planned = w.cursor.planned
        if planned not in self._drained:  # all workers share the plan and its transfers
            self._drained[planned] = drained_plan(self.plan, planned)
        plan = self._drained[planned]
        if plan is not None:
            program = Program(plan, w.rank)
            cursor = Cursor(program, _ArrayActions(self, w, program))
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
        w.cursor = Cursor(w.program, _ArrayActions(self, w, w.program))
        w.cursor.resume(before.planned, [replace(one) for one in before.recent()])

    def _enqueue(self, w: Worker, program: Program, planned: int) -> list[_Message]:
        messages = []
        for t in program.transfers(planned):
            group = self._groups[t.link].get(w.rank)
            ranks = t.ranks or group or tuple(range(self.ranks))
            message = self._messages.setdefault(
                (id(t), w.begun, ranks[0]), _Message(t, planned, ranks)
            )
            messages.append(message)
            self._queues[t.link, w.rank].append(message)
            if t.only_receives(w.rank):
                self.give(message, w.rank, NOTHING)
        return messages

    def give(self, message: _Message, rank: int, payload: Array, *, passed: bool = False) -> None:
        """Send a rank's payload of a message, or pass the message."""
        if passed:
            message.passed.add(rank)
        message.given[rank] = payload
        self._complete_messages(message)

    def take_payload(self, w: Worker, message: _Message) -> Array:
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

    def _message_number(self, message: _Message) -> int:
        """Return the number of a message, counted from 1, for the marks in `Worker.flying`."""
        if id(message) not in self._numbers:
            if not self._numbered:
                self._numbered.append(message)
            self._numbered.append(message)
            self._numbers[id(message)] = len(self._numbered) - 1
        return self._numbers[id(message)]

    def _complete_messages(self, message: _Message) -> None:
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

    def _decode(self, message: _Message, wire: Wire) -> Array:
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

    def deadlock(self, w: Worker, message: _Message) -> ConflictError:
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

    def record_times(self, iteration: _Iteration, position: int, begin: Any, waited: Any) -> None:
        pass  # there is no time

    def apply(self, iteration: _Iteration, apply: Apply) -> None:
        if self._is_active(apply, iteration):
            self._w.acting = apply
            self._job.rules[apply.rule](self._w, apply)

    def cast_votes(self, iteration: _Iteration, votes: Sequence[Vote]) -> None:
        job, w = self._job, self._w
        for vote in votes:
            w.acting = vote
            say = job.votes[vote.rule](w, vote, vote.buckets or range(job.plan.buckets))
            job.ballots[vote.name, iteration.number][w.rank] = say
            job.progress += 1

    def decide(self, iteration: _Iteration, vote: Vote) -> None:
        job, key = self._job, (vote.name, iteration.number)
        ballots = job.ballots[key]
        if len(ballots) < job.ranks:
            raise _BlockedError(
                ConflictError(f"the vote {vote.name!r} waits for a rank that never votes", vote)
            )
        job.decisions[key] = any(ballots.values())
        self._w.decided.add(key)

    def _is_active(self, rule: Transfer | Apply, iteration: _Iteration) -> bool:
        """Return the outcome of the vote on which a rule depends; True if there is no vote."""
        if rule.when is None or iteration.planned < rule.ago:
            return True
        vote = rule.when, iteration.number - rule.ago
        if vote not in self._w.decided:
            raise ConflictError(
                f"{rule.id} depends on the vote {rule.when!r} before it is due", rule
            )
        return self._job.decisions[vote]

    def release(self, iteration: _Iteration, index: int) -> bool:
        message, w = iteration.messages[index], self._w
        w.acting = message.transfer
        active = self._is_active(message.transfer, iteration)
        payload = self._job.take_payload(w, message) if active else NOTHING
        self._job.give(message, w.rank, payload, passed=not active)
        return active

    def is_released(self, iteration: _Iteration, index: int) -> bool:
        message = iteration.messages[index]
        return message.done or self._w.rank in message.given

    def pass_unsent_messages(self, iteration: _Iteration) -> None:
        for index, message in enumerate(iteration.messages):
            if not self.is_released(iteration, index):
                self._job.give(message, self._w.rank, NOTHING, passed=True)

    def receive(self, iteration: _Iteration, index: int) -> None:
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
            own = _shard_slice(result.size, message.ranks, w.rank)
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


def _result(message: _Message) -> Array:
    t = message.transfer
    if t.verb in ("send", "broadcast"):
        return message.given[message.ranks[0]]
    arrays = [message.given[r] for r in message.ranks]
    if t.verb == "exchange":
        return np.stack(arrays)  # [2, elements]; each rank uses the row of the other
    if t.verb == "all_gather":
        result = np.empty_like(arrays[0])
        for rank, array in zip(message.ranks, arrays, strict=True):
            own = _shard_slice(result.size, message.ranks, rank)
            result[own] = array[own]
        return result
    return np.sum(arrays, axis=0) / len(arrays)


def _shard_slice(size: int, ranks: tuple[int, ...], rank: int) -> slice:
    """Return the shard of a rank: n elements are cut into K shards of ceil(n / K), the last ones
    shorter."""
    each, k = -(-size // len(ranks)), ranks.index(rank)
    return slice(min(size, k * each), min(size, (k + 1) * each))


def memory_of(t: Transfer) -> str:
    """Return the name under which a rank stores the codec state of a transfer."""
    return f"wire of {t.id}"


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


def _actor_name(acting: Any) -> str:
    return acting if isinstance(acting, str) else getattr(acting, "id", None) or acting.name


def _rules(*acting: Any) -> list[Any]:
    return [rule for rule in acting if rule is not None and not isinstance(rule, str)]
