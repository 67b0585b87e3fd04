"""Backward hooks: they report complete buckets and the end of a backward pass.

A hook on every parameter costs a few microseconds per parameter and pass, 6 to 7 % of the step of a
model of 1,000 small parameters. Every gradient begins as None (`Gradients.begin_pass`), and a
gradient that is not None is complete. So one hook per reported bucket is enough.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from types import CodeType, FrameType
from typing import Protocol

from torch import Tensor, nn
from torch._C import _current_graph_task_id as current_graph_task_id
from torch.autograd import Variable
from torch.utils.checkpoint import CheckpointFunction

from offbeat.core.buckets.attached import GradientHook
from offbeat.core.buckets.flat import Flat
from offbeat.core.buckets.gradients import Gradients
from offbeat.core.buckets.shards import local_of
from offbeat.core.runtime.transforms import is_transformed


class BackwardListener(Protocol):
    """Receiver of the events of a backward pass."""

    gradients: Gradients

    def on_output_gradient(self) -> None:
        """Report the begin of a backward pass, at the outputs of a forward."""

    def on_backward_begin(self) -> None:
        """Report the first gradient of a backward pass."""

    def on_bucket_ready(self, b: int) -> None:
        """Report the completion of the gradients of buckets 0..b."""

    def on_backward_end(self) -> None:
        """Report the end of a backward pass. `backward()` has not returned yet."""

    def on_held_backward_end(self) -> None:
        """Report the end of a backward pass that only accumulates: another one may follow."""


ALL = 1 << 30  # more backward passes than any step has: messages wait for the step
NO_TASK = -1

NESTED = (
    "a backward pass ran within another backward pass, so a parameter received its gradient in "
    "several parts; use activation checkpointing with use_reentrant=False"
)


class Hooks:
    """Hooks on the parameters of a model and on the outputs of its forwards.

    A hook on the outputs detects the begin of a pass and queues a callback at its end. Bucket b is
    ready when the gradients of buckets 0..b are complete, in whatever order autograd computes them.
    So a message of several buckets is always complete. Each expected bucket has a sentinel: a hook
    on one of its parameters. When this parameter receives its gradient and others of the bucket are
    missing, the sentinel moves to one of those. It ends at the parameter that is last in autograd's
    order, and stays there.

    Args:
        flat: storage of the model.
        listener: receiver of the events.
        lasting: see `GradientHook`.

    Attributes:
        lasting: as given.
        accumulating: within `no_sync()`; backward passes only accumulate.
        held: backward passes of an iteration that only accumulate, before the pass that ends it.
        version: version of the gradients after the last pass that only accumulates.
    """

    def __init__(self, flat: Flat, listener: BackwardListener, *, lasting: bool = True):
        self._flat, self._listener = flat, listener
        self.lasting = lasting
        self.accumulating, self.held, self.version = False, 0, 0
        self._parameters = flat.parameters
        stops = [*flat.starts[1:], len(self._parameters)]
        self._stops, self._last = stops, [stop - 1 for stop in stops]
        self._expected: Sequence[int] = ()
        self._sentinels: dict[int, tuple[int, GradientHook]] = {}  # by bucket
        self._everywhere: list[GradientHook] = []
        self._task, self._blind, self._noticed = NO_TASK, False, False
        self._running = False  # whether this pass has begun for the listener
        self._before: list[tuple[Tensor | None, int]] | None = None
        self._usual = 0  # a parameter that had a gradient in the last pass
        self.begin()

    # ---- iterations -------------------------------------------------------------------------

    def begin(self) -> None:
        """Begin an iteration."""
        if self.is_broken:
            self._task = NO_TASK
        self._left = self.held
        self.reopen()

    def reopen(self) -> None:
        """Report all buckets again, after another backward pass of the same iteration."""
        self._next = self._complete = 0  # index into `_expected`; complete parameters

    def expect(self, buckets: Sequence[int]) -> None:
        """Set the buckets that this iteration reports to the listener."""
        if buckets == self._expected:
            return
        self._expected = buckets
        for b in set(self._sentinels).difference(buckets):
            self._sentinels.pop(b)[1].remove()
        for b in buckets:
            self._place_sentinel(b, self._last[b])

    @property
    def added_passes(self) -> int:
        """Number of backward passes of this iteration that have only accumulated."""
        return self.held - self._left

    @property
    def is_broken(self) -> bool:
        """Whether a backward pass has begun and was ended by an exception."""
        return self._task != NO_TASK and current_graph_task_id() == NO_TASK

    def watch(self, output: object) -> None:
        """Register hooks on the outputs of a forward, where backward begins.

        If the output has no tensors with a graph, every parameter gets a hook, until a forward
        returns such tensors.
        """
        has_graph = False
        for tensor in tensors_of(output):
            if tensor.grad_fn is not None:
                has_graph = True
                tensor.register_hook(self._on_output_gradient)
        if has_graph == bool(self._everywhere):
            self._watch_parameters(not has_graph)

    def _watch_parameters(self, watching: bool) -> None:
        """Register a hook on every parameter, or remove these hooks."""
        for handle in self._everywhere:
            handle.remove()
        parameters = self._parameters if watching else []
        self._everywhere = [self._register(p) for p in parameters]

    def _register(self, p: nn.Parameter) -> GradientHook:
        return GradientHook(p, self._on_parameter_gradient, lasting=self.lasting)

    def remove(self) -> None:
        """Remove the hooks from the parameters."""
        for _, handle in self._sentinels.values():
            handle.remove()
        self._sentinels, self._expected = {}, ()
        self._watch_parameters(False)

    # ---- a pass -----------------------------------------------------------------------------

    def _on_output_gradient(self, _: Tensor) -> None:
        self._listener.on_output_gradient()
        if current_graph_task_id() != self._task:
            self._on_pass_begin(blind=False)

    def _on_pass_begin(self, *, blind: bool) -> None:
        """Report the start of a pass, before its first gradient unless `blind`."""
        self._task, self._blind, self._noticed = current_graph_task_id(), blind, False
        self._running = False
        if not blind:
            self._listener.gradients.begin_pass()
            self._before = self._previous_gradients()
            if self._before and any(g is not None and g._is_view() for g, _ in self._before):
                self._blind = True  # views of one tensor have one version counter
        # Runs at the end of this backward pass, before backward() returns. DDP and FSDP of torch
        # use the same callback.
        Variable._execution_engine.queue_callback(self._on_pass_end)  # type: ignore[attr-defined]

    def _previous_gradients(self) -> list[tuple[Tensor | None, int]] | None:
        """Return the gradients that exist before the pass, with their versions; None if there are
        none."""
        grads = [p.grad for p in self._parameters]
        if all(grad is None for grad in grads):
            return None
        return [(grad, _version(grad)) for grad in grads]

    def _has_gradient(self, index: int) -> bool:
        """Return whether this pass has left a gradient at a parameter: a new tensor, or one with
        another version."""
        gradient = self._parameters[index].grad
        if gradient is None or self._before is None:
            return gradient is not None
        before, version = self._before[index]
        return gradient is not before or _version(gradient) != version

    def _on_pass_end(self) -> None:
        """Report the end of a pass. `backward()` has not returned yet."""
        self._task = NO_TASK
        if not (self._noticed or self._has_any_gradient()):  # torch.autograd.grad leaves none
            self._listener.gradients.cancel_pass()
            return
        self._begin_backward()
        if self.accumulating or self._left:
            self._left -= not self.accumulating
            self.version = self._listener.gradients.hold()
            self._listener.on_held_backward_end()
        else:
            self._listener.on_backward_end()

    def _begin_backward(self) -> None:
        if not self._running:
            self._listener.on_backward_begin()
            self._running = True

    def _has_any_gradient(self) -> bool:
        if self._has_gradient(self._usual):
            return True
        index = next((i for i in range(len(self._parameters)) if self._has_gradient(i)), None)
        if index is not None:
            self._usual = index
        return index is not None

    def finish(self) -> None:
        """Report the remaining buckets as ready: their missing gradients will not come."""
        while self._next < len(self._expected):
            self._report_ready()

    # ---- sentinels --------------------------------------------------------------------------

    def _place_sentinel(self, b: int, index: int) -> None:
        """Move the sentinel of a bucket to a parameter."""
        if b in self._sentinels:
            if self._sentinels[b][0] == index:
                return
            self._sentinels[b][1].remove()
        self._sentinels[b] = index, self._register(self._parameters[index])
        self._last[b] = index

    def _on_parameter_gradient(self, p: Tensor) -> None:
        if not p.requires_grad:  # frozen since its forward: torch calls the hook nevertheless
            return
        if current_graph_task_id() != self._task:
            if is_nested_backward():
                raise RuntimeError(NESTED)
            self._on_pass_begin(blind=True)
        self._noticed = True
        self._begin_backward()
        if not (self.accumulating or self._left or self._blind):
            self._advance()

    def _advance(self) -> None:
        while self._next < len(self._expected):
            b = self._expected[self._next]
            stop = self._stops[b]
            missing = self._first_missing(range(stop - 1, self._complete - 1, -1))
            if missing is not None:
                self._place_sentinel(b, missing)
                return
            self._complete = stop
            self._report_ready()

    def _first_missing(self, indices: range) -> int | None:
        """Return the first of these parameters that has no gradient of this pass; None if all have
        one. A parameter that the script has frozen gets none."""
        parameters = self._parameters
        if self._before is None:
            missing = (i for i in indices if parameters[i].grad is None)
        else:
            missing = (i for i in indices if not self._has_gradient(i))
        return next((i for i in missing if parameters[i].requires_grad), None)

    def _report_ready(self) -> None:
        b = self._expected[self._next]
        self._next += 1
        self._listener.on_bucket_ready(b)


def _version(gradient: Tensor | None) -> int:
    return 0 if gradient is None else local_of(gradient)._version


def is_nested_backward() -> bool:
    """Return whether a backward pass runs within another backward pass."""
    return any(code is CheckpointFunction.backward.__code__ for code in calling_code())


def calling_code() -> Iterator[CodeType]:
    """Yield the code of all calls in progress, the innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame.f_code
        frame = frame.f_back


def tensors_of(output: object) -> Iterator[Tensor]:
    """Yield all tensors in containers and dataclasses, nested ones included.

    For other objects yield the attributes that are tensors or lists of tensors. Tensors of
    transforms of torch.func are left out.
    """
    parts: Iterable[object]
    if isinstance(output, Tensor):
        if not is_transformed(output):
            yield output
        return
    if isinstance(output, Mapping):
        parts = output.values()
    elif isinstance(output, list | tuple):
        parts = output
    elif is_dataclass(output):
        parts = (getattr(output, field.name, None) for field in fields(output))
    else:
        attributes = getattr(output, "__dict__", {}).values()
        parts = (value for value in attributes if isinstance(value, Tensor | list | tuple))
    for part in parts:
        yield from tensors_of(part)
