"""Worker of an interpreted plan: the storage of one rank as arrays, which refuses early use.

The storage marks the elements that messages in flight, forward and backward still need. If a rule
read or wrote them, its result would depend on the timing of messages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from offbeat.core.derive import effects
from offbeat.core.plan.cursor import Cursor, Progress, StepObserver
from offbeat.core.plan.program import Program
from offbeat.core.plan.types import Apply, Payload, Transfer, Vote, moment_of

Array = NDArray[np.float64]


class ConflictError(Exception):
    """Error of a plan that cannot be executed, or that has a result that depends on message timing.

    Attributes:
        rules: rules of the plan that cause the conflict.
    """

    def __init__(self, message: str, *rules: Transfer | Apply | Vote) -> None:
        super().__init__(message)
        self.rules = rules


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


class InterpretedMessage:
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
class InterpretedIteration(Progress):
    """One iteration of one worker; `number` counts all its iterations, `planned` those of the
    plan."""

    number: int
    messages: list[InterpretedMessage]


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
        step_observers: functions that receive each step of the worker.
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
        self.step_observers: list[StepObserver] = []
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

    messages_by_number: Sequence[InterpretedMessage] = ()
    cursor: Cursor[InterpretedIteration]
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


def _actor_name(acting: Any) -> str:
    return acting if isinstance(acting, str) else getattr(acting, "id", None) or acting.name


def _rules(*acting: Any) -> list[Any]:
    return [rule for rule in acting if rule is not None and not isinstance(rule, str)]
