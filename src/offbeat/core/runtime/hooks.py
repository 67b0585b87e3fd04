"""Backward hooks: which gradients are complete, and when a backward pass has ended."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from torch import Tensor, nn
from torch._C import _current_graph_task_id as current_graph_task_id
from torch.autograd import Variable
from torch.utils.checkpoint import CheckpointFunction

from offbeat.core.buckets.gradients import Gradients


class BackwardListener(Protocol):
    """Who is told."""

    def on_backward_begin(self) -> None:
        """The first gradient of a backward pass is there."""

    def on_bucket_ready(self, b: int) -> None:
        """The gradients of buckets 0..b are complete."""

    def on_backward_end(self) -> None:
        """The backward pass has ended; `backward()` has not returned yet."""

    def on_output_gradient(self) -> None:
        """Something that a forward returned has its gradient."""


ALL = 1 << 30  # more backward passes than a step has: everything waits for the step

NESTED = (
    "a backward pass ran within another one, whose gradients were handed on in parts; use "
    "activation checkpointing with use_reentrant=False"
)


class BackwardHooks:
    """Follows one backward pass per iteration, and those that only accumulate.

    Bucket b is ready when the gradients of buckets 0..b are complete, so a message of several
    buckets is never sent half-ready, whatever order autograd takes.
    """

    def __init__(self, gradients: Gradients, listener: BackwardListener):
        self._gradients, self._listener = gradients, listener
        self._sizes = [len(bucket.parameters) for bucket in gradients.flat.buckets]
        self.accumulating = False
        self.held = 0  # backward passes of an iteration that only add up, before the one that ends
        self.version = 0  # of the gradients after the last one of these
        self.on_parameter: Callable[[nn.Parameter], None] | None = None
        self.begin()
        self._handles = [
            p.register_post_accumulate_grad_hook(self._hook(i))
            for i, p in enumerate(gradients.parameters)
        ]

    def expect(self, buckets: Sequence[int]) -> None:
        """Every bucket is told of anyway."""

    def watch(self, output: object) -> None:
        """Where a backward begins is seen at the first gradient."""

    def begin(self) -> None:
        """A new iteration."""
        count = len(self._gradients.parameters)
        self.seen = bytearray(count)
        self._left = self.held
        self.reset_pass()

    def reset_pass(self) -> None:
        """Another backward pass of the same iteration."""
        self._ready = bytearray(len(self.seen))
        self._missing = list(self._sizes)
        self._next = 0  # buckets before this one are ready
        self._running = self._queued = self._finished = False

    @property
    def added_passes(self) -> int:
        """Backward passes of this iteration that have only added up."""
        return self.held - self._left

    @property
    def is_broken(self) -> bool:
        """Whether a backward pass has begun, and will not end."""
        return self._queued and not self._finished and current_graph_task_id() < 0

    def forget(self) -> None:
        """Gradients that were added up so far are zeroed."""
        if self.held and not self._finished:
            self.begin()

    def remove(self) -> None:
        """Let the parameters go."""
        for handle in self._handles:
            handle.remove()

    def _hook(self, index: int) -> Callable[[Tensor], None]:
        gradients, bucket = self._gradients, self._gradients.bucket_of[index]

        def gradient_ready(p: Tensor) -> None:
            if not self._running:
                if self._finished and is_nested_backward():
                    raise RuntimeError(NESTED)
                self._listener.on_backward_begin()
                self._running = True
            if p.grad is not gradients.views[index]:
                gradients.take(index, p)  # type: ignore[arg-type]
            self.seen[index] = 1
            if self.accumulating:
                return
            if self._left:
                if not self._queued:
                    self._queued = True
                    Variable._execution_engine.queue_callback(self._on_held_backward_end)  # type: ignore[attr-defined]
                return
            if self._ready[index]:
                raise RuntimeError(NESTED)
            if not self._queued:
                self._queued = True
                # Runs when this backward pass has ended, before backward() returns; what torch's
                # own DDP and FSDP use for the same purpose.
                Variable._execution_engine.queue_callback(self._listener.on_backward_end)  # type: ignore[attr-defined]
            self._ready[index] = 1
            if self.on_parameter is not None:
                self.on_parameter(p)  # type: ignore[arg-type]
            self._missing[bucket] -= 1
            if bucket == self._next and not self._missing[bucket]:
                self._advance()

        return gradient_ready

    def _on_held_backward_end(self) -> None:
        self._left -= 1
        self._queued = False
        self.version = self._gradients.flat.grad_version()

    def finish(self) -> None:
        """Buckets that got no gradient, or not all, are as ready as they will be."""
        self._missing = [0] * len(self._missing)
        self._advance()
        self._running, self._finished = False, True

    def _advance(self) -> None:
        missing = self._missing
        while (b := self._next) < len(missing) and not missing[b]:
            self._next = b + 1
            self._gradients.fresh(b)
            self._listener.on_bucket_ready(b)


def is_nested_backward() -> bool:
    """Whether a backward pass runs within another one that is not over."""
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code is CheckpointFunction.backward.__code__:
            return True
        frame = frame.f_back
    return False


class AfterBackward:
    """Calls `act` when a backward pass that reaches some of the parameters has ended, before
    `backward()` returns."""

    def __init__(self, parameters: Iterable[Tensor], act: Callable[[], None]):
        self._act, self._pass = act, -1
        self._handles = [
            p.register_post_accumulate_grad_hook(self._on_gradient) for p in parameters
        ]

    def remove(self) -> None:
        """Let the parameters go."""
        for handle in self._handles:
            handle.remove()

    def _on_gradient(self, _: Tensor) -> None:
        current = current_graph_task_id()
        if current != self._pass:
            self._pass = current
            Variable._execution_engine.queue_callback(self._act)  # type: ignore[attr-defined]
