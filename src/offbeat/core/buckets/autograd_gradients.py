"""Gradients in autograd's own tensors, for plans that neither send nor change gradients."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from offbeat.core.buckets.flat import Flat


class AutogradGradients:
    """The gradients of a model, where only the user's optimizer uses them.

    `zero_grad` sets the gradients to None. Autograd then assigns its own tensors to `p.grad`, so
    that nothing is zeroed or added. `p.grad` of an unused parameter is None, as in a loop without
    offbeat. The interface is that of `Gradients`, with one copy and no absence counts.
    """

    late = sent = False

    def __init__(self, flat: Flat):
        self.flat = flat
        self.parameters = flat.parameters
        self.bucket_of = [b for b, bucket in enumerate(flat.buckets) for _ in bucket.parameters]
        self.starts = [self.bucket_of.index(b) for b in range(len(flat.buckets))]
        self.empty = False  # whether `zero_grad` has set all gradients to None
        for p in self.parameters:
            if p.grad is not None:  # `data` has a version counter of its own
                p.grad = p.grad.data
        self._used: list[tuple[nn.Parameter, Tensor | None, int]] = []  # applied in backward

    def begin_plan(self) -> None:
        """Do nothing at the start of a plan: gradients stay until they are zeroed."""

    open = begin_plan

    def drop_unused(self) -> None:
        """Do nothing: `p.grad` of an unused parameter is None already."""

    def drop_views(self) -> None:
        """Do nothing: the storage holds no gradients."""

    def flags(self) -> dict[str, Any]:
        """Return an empty dict: no state is kept between iterations."""
        return {}

    def restore(self, flags: Mapping[str, Any]) -> None:
        """Do nothing, as the inverse of `flags`."""

    # ---- backward ---------------------------------------------------------------------------

    def take_manual_gradients(self, seen: bytearray) -> None:
        """Do nothing: the optimizer reads the gradients that the script has assigned."""

    def on_iteration_begin(self) -> None:
        """Forget the gradients that were applied in an earlier backward."""
        self._used = []

    def on_backward_end(self, seen: bytearray) -> None:
        """Do nothing: `p.grad` of an unused parameter is None already."""

    undo_backward_end = on_backward_end

    def mark_fresh(self, b: int) -> None:
        """Do nothing when bucket `b` is ready."""

    # ---- the update -------------------------------------------------------------------------

    def added_iterations(self, b: int, copy: int) -> int:
        """Return 1. Sums over iterations exist only if the script itself adds gradients up."""
        return 1

    def is_shown(self, copy: int) -> bool:
        """Return True: `p.grad` is the only place of a gradient."""
        return True

    def show(self, run: range, copy: int) -> None:
        """Do nothing: `p.grad` holds the gradients already."""

    def show_zero(self) -> None:
        """Do nothing: gradients are visible in every iteration."""

    def conceal(self) -> None:
        """Do nothing: all gradients are of this iteration, so none needs to be hidden."""

    def apply_later(self, runs: Iterable[range]) -> None:
        """Do nothing: updates are never delayed to another iteration."""

    def mark_applied(self, run: Iterable[int], copy: int) -> None:
        """Do nothing: gradients are not zeroed after an update."""

    def mark_applied_in_backward(self, run: range) -> None:
        """Record gradients that were applied in backward: later changes have no effect."""
        for index in self.of(run):
            p = self.parameters[index]
            self._used.append((p, p.grad, -1 if p.grad is None else p.grad._version))

    def is_intact(self) -> bool:
        """Whether the gradients applied in backward are unchanged and still assigned."""
        return all(
            p.grad is grad and (grad is None or grad._version == version)
            for p, grad, version in self._used
        )

    def removed_gradients(self, run: range) -> list[Tensor]:
        """Return an empty list: an update does not need gradients that were removed."""
        return []

    # ---- between iterations -----------------------------------------------------------------

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Set gradients to None, or zero them in place."""
        self._used, self.empty = [], set_to_none
        for p in self.parameters:
            p.grad = None if set_to_none or p.grad is None else p.grad.detach().zero_()

    def zero(self) -> None:
        """Set every gradient to None."""
        self.zero_grad()

    def of(self, run: range) -> range:
        """Return the indices of the parameters of a run of buckets."""
        stop = self.starts[run.stop] if run.stop < len(self.starts) else len(self.parameters)
        return range(self.starts[run.start], stop)

    def gradient_tensors(self, run: range, copy: int) -> Iterator[Tensor]:
        """Return the gradients of a run of buckets, one tensor per parameter."""
        return (g for i in self.of(run) if (g := self.parameters[i].grad) is not None)
