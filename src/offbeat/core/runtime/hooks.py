"""Backward hooks on every parameter: completion of buckets and end of a backward pass.

The events go to `Engine.on_bucket_ready` (engine.py), which executes the plan up to the bucket.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Protocol

from torch import Tensor, nn
from torch._C import _current_graph_task_id as current_graph_task_id
from torch.autograd import Variable
from torch.autograd.graph import Node, get_gradient_edge
from torch.utils.checkpoint import CheckpointFunction
from torch.utils.hooks import RemovableHandle

from offbeat.core.buckets.autograd_gradients import ShardGradients
from offbeat.core.buckets.gradients import Gradients


class BackwardListener(Protocol):
    """Receiver of the events of a backward pass."""

    def on_backward_begin(self) -> None:
        """Handle the first gradient of a backward pass."""

    def on_bucket_ready(self, b: int) -> None:
        """Handle the completion of the gradients of buckets 0..b."""

    def on_backward_end(self) -> None:
        """Handle the end of a backward pass. `backward()` has not returned yet."""

    def on_held_backward_end(self) -> None:
        """Handle the end of a backward pass that only accumulates: another one may follow."""

    def on_output_gradient(self) -> None:
        """Handle the gradient of a tensor that a forward has returned."""


ALL = 1 << 30  # more backward passes than any step has: messages wait for the step

NESTED = (
    "a backward pass ran within another backward pass, so a parameter received its gradient in "
    "several parts; use activation checkpointing with use_reentrant=False"
)


class BackwardPasses(ABC):
    """Counter of the backward passes of an iteration: one that ends it, and others that only
    accumulate.

    Attributes:
        accumulating: within `no_sync()`; backward passes only accumulate.
        held: backward passes of an iteration that only accumulate, before the pass that ends it.
        version: version of the gradients after the last held pass.
        seen: by parameter, 1 if it has received a gradient in this iteration.
        on_parameter: called with each parameter whose gradient is complete, if set.
    """

    accumulating = False
    held = version = 0
    on_parameter: Callable[[nn.Parameter], None] | None = None

    def __init__(self, listener: BackwardListener):
        self._listener = listener
        self.seen = bytearray()
        self.begin()

    def begin(self) -> None:
        """Reset all counters at the start of an iteration."""
        self._left = self.held
        self.reset_pass()

    @abstractmethod
    def reset_pass(self) -> None:
        """Reset the counters of a pass before another backward pass of the same iteration."""
        self._running = self._finished = False

    @property
    def added_passes(self) -> int:
        """Number of backward passes of this iteration that have only accumulated."""
        return self.held - self._left

    def forget(self) -> None:
        """Restart the iteration's counters after accumulated gradients were zeroed."""
        if self.held and not self._finished:
            self.begin()


class BackwardHooks(BackwardPasses):
    """Observer of backward passes by a hook on every parameter.

    Bucket b is ready when the gradients of buckets 0..b are complete. Therefore a message of
    several buckets is always complete, in whatever order autograd computes the gradients.

    Args:
        gradients: gradients to observe.
        listener: receiver of the events.
        lasting: whether the hooks stay for the whole training. torch cannot remove a
            post-accumulate hook without a trace: every backward still takes the interpreter's lock
            for each parameter that has had one. So hooks of a few iterations are on the nodes that
            accumulate gradients, which autograd replaces when nothing refers to them.

    Attributes:
        lasting: as given; always true for shards, for which FSDP itself calls the hooks.
    """

    def __init__(
        self,
        gradients: Gradients | ShardGradients,
        listener: BackwardListener,
        *,
        lasting: bool = True,
    ):
        self._gradients = gradients
        self._sizes = [len(bucket.parameters) for bucket in gradients.flat.buckets]
        self._expected: Sequence[int] = range(len(self._sizes))
        self._reported = bytearray(b"\x01" * len(self._sizes))  # by bucket
        super().__init__(listener)
        self.lasting = lasting or gradients.flat.is_sharded
        self._nodes: list[Node] = []
        self._handles = [self._register(i, p) for i, p in enumerate(gradients.parameters)]

    def _register(self, index: int, p: nn.Parameter) -> RemovableHandle:
        on_gradient = self._hook(index)
        if self.lasting:
            return register_lasting(p, on_gradient)
        with require_gradient(p):
            node = get_gradient_edge(p).node
        self._nodes.append(node)
        return node.register_hook(lambda *_: on_gradient(p))

    def expect(self, buckets: Sequence[int]) -> None:
        """Set the buckets that are reported to the listener, each when all buckets up to it are
        ready. By default these are all buckets."""
        if buckets != self._expected:
            self._expected = buckets
            self._reported = bytearray(b in buckets for b in range(len(self._sizes)))

    def watch(self, output: object) -> None:
        """Do nothing. The first gradient shows the start of a backward; `Sentinels` needs this
        call."""

    def begin(self) -> None:
        self.seen = bytearray(len(self._gradients.parameters))
        super().begin()

    def reset_pass(self) -> None:
        super().reset_pass()
        self._ready = bytearray(len(self.seen))
        self._missing = list(self._sizes)
        self._next = 0  # buckets before this one are ready
        self._queued = False

    @property
    def is_broken(self) -> bool:
        """Whether a backward pass has begun and was ended by an exception."""
        return self._queued and not self._finished and current_graph_task_id() < 0

    def remove(self) -> None:
        """Remove the hooks from the parameters."""
        for handle in self._handles:
            handle.remove()
        self._nodes = []

    def _hook(self, index: int) -> Callable[[Tensor], None]:  # noqa: C901
        gradients, bucket = self._gradients, self._gradients.bucket_of[index]

        def gradient_ready(p: Tensor) -> None:  # noqa: C901
            if not p.requires_grad:  # frozen since its forward: torch calls the hook nevertheless
                return
            if not self._running:
                if self._finished and is_nested_backward():
                    raise RuntimeError(NESTED)
                self._listener.on_backward_begin()
                self._running = True
            if p.grad is not gradients.views[index]:
                gradients.take(index, p)  # type: ignore[arg-type]
            self.seen[index] = 1
            if self.accumulating or self._left:
                if not self._queued:
                    self._queued = True
                    Variable._execution_engine.queue_callback(self._on_held_backward_end)  # type: ignore[attr-defined]
                return
            if self._ready[index]:
                raise RuntimeError(NESTED)
            if not self._queued:
                self._queued = True
                # Runs at the end of this backward pass, before backward() returns. DDP and FSDP
                # of torch use the same callback.
                Variable._execution_engine.queue_callback(self._listener.on_backward_end)  # type: ignore[attr-defined]
            self._ready[index] = 1
            if self.on_parameter is not None:
                self.on_parameter(p)  # type: ignore[arg-type]
            self._missing[bucket] -= 1
            if bucket == self._next and not self._missing[bucket]:
                self._advance()

        return gradient_ready

    def _on_held_backward_end(self) -> None:
        self._left -= not self.accumulating
        self._running = self._queued = False
        self.version = self._gradients.flat.grad_version()
        self._listener.on_held_backward_end()

    def finish(self) -> None:
        """Report the remaining buckets as ready: their missing gradients will not come."""
        self._missing = [0] * len(self._missing)
        self._advance()
        self._running, self._finished = False, True

    def _advance(self) -> None:
        missing = self._missing
        while (b := self._next) < len(missing) and not missing[b]:
            self._next = b + 1
            self._gradients.mark_fresh(b)
            if self._reported[b]:
                self._listener.on_bucket_ready(b)


@contextmanager
def require_gradient(p: Tensor) -> Iterator[None]:
    """Let a parameter require gradients within the context: torch refuses hooks on one that the
    script has frozen."""
    trains = p.requires_grad
    p.requires_grad_(True)
    try:
        yield
    finally:
        p.requires_grad_(trains)


def register_lasting(p: Tensor, act: Callable[[Tensor], None]) -> RemovableHandle:
    """Register a hook that runs after each gradient of a parameter, which may be frozen now."""
    with require_gradient(p):
        return p.register_post_accumulate_grad_hook(act)


def is_nested_backward() -> bool:
    """Return whether a backward pass runs within another backward pass."""
    return any(code is CheckpointFunction.backward.__code__ for code in calling_code())


def calling_code() -> Iterator[CodeType]:
    """Yield the code of all calls in progress, the innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame.f_code
        frame = frame.f_back
