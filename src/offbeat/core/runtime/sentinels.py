"""Sentinels: backward hooks on a few parameters that detect ready buckets and the end of backward.

A hook on every parameter costs a few microseconds per parameter. If gradients begin as None, one
hook per expected bucket is enough, because a gradient that is not None is complete.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch._C import _current_graph_task_id as current_graph_task_id
from torch.autograd import Variable
from torch.utils.hooks import RemovableHandle

from offbeat.core.buckets.autograd_gradients import AutogradGradients
from offbeat.core.runtime.hooks import (
    NESTED,
    BackwardListener,
    BackwardPasses,
    is_nested_backward,
    register_lasting,
)
from offbeat.core.runtime.outputs import tensors_of

NO_TASK = -1


class Sentinels(BackwardPasses):
    """Observer of backward passes whose gradients only the optimizer reads.

    A hook on the outputs of the forward detects the start of a pass and queues a callback at its
    end. Each expected bucket has a sentinel: a hook on one of its parameters without gradient. When
    this parameter receives its gradient and others of the bucket are missing, the sentinel moves to
    one of those. It ends at the parameter that is last in autograd's order, and stays there.
    """

    def __init__(self, gradients: AutogradGradients, listener: BackwardListener):
        self._gradients = gradients
        self._parameters = gradients.parameters
        stops = [*gradients.starts[1:], len(self._parameters)]
        self._stops, self._last = stops, [stop - 1 for stop in stops]
        self._expected: Sequence[int] = ()
        self._everywhere: list[RemovableHandle] = []
        self._posts: dict[int, tuple[int, RemovableHandle]] = {}  # sentinel by bucket
        self._task, self._blind, self._noticed = NO_TASK, False, False
        self._before: list[tuple[Tensor | None, int]] | None = None
        self._usual = 0  # a parameter that had a gradient in the last pass
        super().__init__(listener)

    # ---- iterations -------------------------------------------------------------------------

    def begin(self) -> None:
        if self.is_broken:
            self._task = NO_TASK
        super().begin()

    def reset_pass(self) -> None:
        super().reset_pass()
        self._next = self._complete = 0  # index into `_expected`; complete parameters

    @property
    def is_broken(self) -> bool:
        """Whether a backward pass has begun and was ended by an exception."""
        return self._task != NO_TASK and current_graph_task_id() == NO_TASK

    def expect(self, buckets: Sequence[int]) -> None:
        """Set the buckets that this iteration reports to the listener, each when all buckets up to
        it are ready."""
        if buckets == self._expected:
            return
        self._expected = buckets
        for b in set(self._posts).difference(buckets):
            self._posts.pop(b)[1].remove()
        for b in buckets:
            self._place_sentinel(b, self._last[b])

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
        self._everywhere = [register_lasting(p, self._on_parameter_gradient) for p in parameters]

    def remove(self) -> None:
        """Remove the hooks from the parameters."""
        for _, handle in self._posts.values():
            handle.remove()
        self._posts, self._expected = {}, ()
        self._watch_parameters(False)

    # ---- a pass -----------------------------------------------------------------------------

    def _on_output_gradient(self, _: Tensor) -> None:
        self._listener.on_output_gradient()
        if current_graph_task_id() != self._task:
            self._on_pass_begin(blind=False)

    def _on_pass_begin(self, *, blind: bool) -> None:
        """Handle the start of a pass, before its first gradient unless `blind`."""
        self._task, self._blind, self._noticed = current_graph_task_id(), blind, False
        self._before = None if blind else self._previous_gradients()
        if self._before and any(g is not None and g._is_view() for g, _ in self._before):
            self._blind = True  # views of one tensor have one version counter
        Variable._execution_engine.queue_callback(self._on_pass_end)  # type: ignore[attr-defined]

    def _previous_gradients(self) -> list[tuple[Tensor | None, int]] | None:
        """Return the gradients that exist before the pass, with their versions; None if there are
        none."""
        if self._gradients.empty:  # check anyway: a gradient set by hand would seem complete
            stop = self._stops[self._expected[-1]] if self._expected else 0
            if all(p.grad is None for p in self._parameters[:stop]):
                return None
        grads = [p.grad for p in self._parameters]
        return [(g, 0 if g is None else g._version) for g in grads]

    def _has_gradient(self, index: int) -> bool:
        """Return whether this pass has left a gradient at a parameter: a new tensor, or one with
        another version."""
        gradient = self._parameters[index].grad
        if gradient is None or self._before is None:
            return gradient is not None
        before, version = self._before[index]
        return gradient is not before or gradient._version != version

    def _on_pass_end(self) -> None:
        """Handle the end of a pass. `backward()` has not returned yet."""
        self._task = NO_TASK
        if not (self._noticed or self._has_any_gradient()):  # torch.autograd.grad leaves none
            return
        if not self._running:
            self._listener.on_backward_begin()
            self._running = True
        self._gradients.empty = False
        if self.accumulating or self._left:
            self._left -= not self.accumulating
            self._running = False
            self._listener.on_held_backward_end()
            return
        self._listener.on_backward_end()

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
        self._running, self._finished = False, True

    # ---- sentinels --------------------------------------------------------------------------

    def _place_sentinel(self, b: int, index: int) -> None:
        """Move the sentinel of a bucket to a parameter."""
        if b in self._posts:
            if self._posts[b][0] == index:
                return
            self._posts[b][1].remove()
        handle = register_lasting(self._parameters[index], self._on_parameter_gradient)
        self._posts[b], self._last[b] = (index, handle), index

    def _on_parameter_gradient(self, _: Tensor) -> None:
        if current_graph_task_id() != self._task:
            if is_nested_backward():
                raise RuntimeError(NESTED)
            self._on_pass_begin(blind=True)
        self._noticed = True
        if not self._running:
            self._listener.on_backward_begin()
            self._running = True
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
