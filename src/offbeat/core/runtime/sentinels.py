"""Sentinels: when buckets are ready and backward is over, told by few hooks.

A hook on every parameter costs some microseconds each. Where gradients begin as None, one hook for
each bucket that somebody waits for does as well: what is not None is complete.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor, nn
from torch._C import _current_graph_task_id as current_graph_task_id
from torch.autograd import Variable
from torch.utils.hooks import RemovableHandle

from offbeat.core.buckets.autograd_gradients import HandedOver
from offbeat.core.runtime.hooks import NESTED, BackwardListener, is_nested_backward
from offbeat.core.runtime.outputs import tensors_of

NO_TASK = -1


class Sentinels:
    """Follows backward passes for gradients that nobody but the optimizer uses.

    A hook on what the forward returned tells that a pass begins, and asks autograd to say when it
    ends. A bucket that must be noticed before has a sentinel: a hook on one of its parameters that
    is still missing. When that has its gradient and others have not, the sentinel moves to one of
    those. So it is the last one in the end, whatever order autograd takes, and stays there.

    The interface is that of `BackwardHooks`.
    """

    def __init__(self, gradients: HandedOver, listener: BackwardListener):
        self._gradients, self._listener = gradients, listener
        self._parameters = gradients.parameters
        stops = [*gradients.starts[1:], len(self._parameters)]
        self._stops, self._last = stops, [stop - 1 for stop in stops]
        self.accumulating = False
        self.held = 0  # backward passes of an iteration that only add up, before the one that ends
        self.version = 0  # of the gradients after the last one of these
        self.seen = bytearray()
        self.on_parameter: Callable[[nn.Parameter], None] | None = None
        self._expected: Sequence[int] = ()
        self._everywhere: list[RemovableHandle] = []
        self._posts: dict[int, tuple[int, RemovableHandle]] = {}  # by bucket: where its sentinel is
        self._task, self._blind, self._noticed = NO_TASK, False, False
        self._before: list[tuple[Tensor | None, int]] | None = None
        self._usual = 0  # a parameter that got a gradient last time
        self.begin()

    # ---- iterations -------------------------------------------------------------------------

    def begin(self) -> None:
        """A new iteration."""
        self._left = self.held
        if self.is_broken:
            self._task = NO_TASK
        self.reset_pass()

    def reset_pass(self) -> None:
        """Another backward pass of the same iteration."""
        self._next = self._complete = 0  # of those expected; of the parameters
        self._running = self._finished = False

    @property
    def added_passes(self) -> int:
        """Backward passes of this iteration that have only added up."""
        return self.held - self._left

    @property
    def is_broken(self) -> bool:
        """Whether a backward pass has begun, and will not end."""
        return self._task != NO_TASK and current_graph_task_id() == NO_TASK

    def forget(self) -> None:
        """Gradients that were added up so far are zeroed."""
        if self.held and not self._finished:
            self.begin()

    def expect(self, buckets: Sequence[int]) -> None:
        """Buckets of which must be known in this iteration when they and those before are ready."""
        if buckets == self._expected:
            return
        self._expected = buckets
        for b in set(self._posts).difference(buckets):
            self._posts.pop(b)[1].remove()
        for b in buckets:
            self._place_sentinel(b, self._last[b])

    def watch(self, output: object) -> None:
        """A forward has returned this: backward begins there. Without tensors in it every parameter
        has a hook until a forward returns some."""
        found = False
        for tensor in tensors_of(output):
            if tensor.grad_fn is not None:
                found = True
                tensor.register_hook(self._on_output_gradient)
        if found == bool(self._everywhere):
            self._watch_parameters(not found)

    def _watch_parameters(self, watching: bool) -> None:
        """Put a hook at every parameter, or remove these hooks."""
        for handle in self._everywhere:
            handle.remove()
        parameters = self._parameters if watching else []
        self._everywhere = [
            p.register_post_accumulate_grad_hook(self._on_parameter_gradient) for p in parameters
        ]

    def remove(self) -> None:
        """Let the parameters go."""
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
        """A pass begins, before its first gradient unless `blind`."""
        self._task, self._blind, self._noticed = current_graph_task_id(), blind, False
        self._before = None if blind else self._previous_gradients()
        if self._before and any(g is not None and g._is_view() for g, _ in self._before):
            self._blind = True  # views of one tensor have one version counter
        Variable._execution_engine.queue_callback(self._on_pass_end)  # type: ignore[attr-defined]

    def _previous_gradients(self) -> list[tuple[Tensor | None, int]] | None:
        """Gradients that are there already, with their versions; None if there are none."""
        if self._gradients.empty:  # look all the same at those that must not seem complete
            stop = self._stops[self._expected[-1]] if self._expected else 0
            if all(p.grad is None for p in self._parameters[:stop]):
                return None
        grads = [p.grad for p in self._parameters]
        return [(g, 0 if g is None else g._version) for g in grads]

    def _has_gradient(self, index: int) -> bool:
        """Whether this pass has left a gradient at a parameter: new ones are other tensors, or have
        been written to."""
        gradient = self._parameters[index].grad
        if gradient is None or self._before is None:
            return gradient is not None
        before, version = self._before[index]
        return gradient is not before or gradient._version != version

    def _on_pass_end(self) -> None:
        """The pass is over; `backward()` has not returned yet."""
        self._task = NO_TASK
        if not (self._noticed or self._has_any_gradient()):  # torch.autograd.grad
            return
        if not self._running:
            self._listener.on_backward_begin()
            self._running = True
        self._gradients.empty = False
        if self.accumulating:
            return
        if self._left:
            self._left -= 1
            return
        self._listener.on_backward_end()

    def _has_any_gradient(self) -> bool:
        if self._has_gradient(self._usual):
            return True
        found = next((i for i in range(len(self._parameters)) if self._has_gradient(i)), None)
        if found is not None:
            self._usual = found
        return found is not None

    def finish(self) -> None:
        """Buckets that got no gradient, or not all, are as ready as they will be."""
        while self._next < len(self._expected):
            self._report_ready()
        self._running, self._finished = False, True

    # ---- sentinels --------------------------------------------------------------------------

    def _place_sentinel(self, b: int, index: int) -> None:
        """Put the sentinel of a bucket at a parameter."""
        if b in self._posts:
            if self._posts[b][0] == index:
                return
            self._posts[b][1].remove()
        handle = self._parameters[index].register_post_accumulate_grad_hook(
            self._on_parameter_gradient
        )
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
        """The first of these parameters that has no gradient of this pass."""
        if self._before is None:
            parameters = self._parameters
            return next((i for i in indices if parameters[i].grad is None), None)
        return next((i for i in indices if not self._has_gradient(i)), None)

    def _report_ready(self) -> None:
        b = self._expected[self._next]
        self._next += 1
        self._listener.on_bucket_ready(b)
