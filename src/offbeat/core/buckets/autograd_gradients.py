"""Gradients as autograd hands them over: for plans that send none and change none."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from offbeat.core.buckets.flat import Flat


class AutogradGradients:
    """The gradients of a model where only the user's optimizer uses them.

    `zero_grad` sets them to None, and autograd then gives its own tensors away, without zeroing or
    adding. A parameter without a gradient has none, as in a plain loop. The interface is that of
    `Gradients`; there is one copy, and nothing travels with it.
    """

    late = sent = False

    def __init__(self, flat: Flat):
        self.flat = flat
        self.parameters = flat.parameters
        self.bucket_of = [b for b, bucket in enumerate(flat.buckets) for _ in bucket.parameters]
        self.starts = [self.bucket_of.index(b) for b in range(len(flat.buckets))]
        self.empty = False  # nobody has a gradient, as far as we know
        for p in self.parameters:
            if p.grad is not None:  # with a version counter of its own from now on
                p.grad = p.grad.data
        self._used: list[tuple[nn.Parameter, Tensor | None, int]] = []  # by updates in backward

    def begin_plan(self) -> None:
        """A plan begins. What there is of gradients stays until it is zeroed."""

    open = begin_plan

    def drop_unused(self) -> None:
        """Who has none shows none."""

    def drop_views(self) -> None:
        """The storage is about to be left; it holds no gradients."""

    def flags(self) -> dict[str, Any]:
        """Nothing of them outlives an iteration."""
        return {}

    def restore(self, flags: Mapping[str, Any]) -> None:
        """The inverse of `flags`."""

    # ---- backward ---------------------------------------------------------------------------

    def take_manual_gradients(self, seen: bytearray) -> None:
        """The optimizer finds what the script has put there."""

    def on_iteration_begin(self) -> None:
        """What was applied in the backward of an earlier one is history."""
        self._used = []

    def on_backward_end(self, seen: bytearray) -> None:
        """Who had no gradient shows none."""

    undo_backward_end = on_backward_end

    def mark_fresh(self, b: int) -> None:
        """Bucket b holds this iteration's gradients."""

    # ---- the update -------------------------------------------------------------------------

    def added_iterations(self, b: int, copy: int) -> int:
        """One iteration's, or what the script itself has added up."""
        return 1

    def is_shown(self, copy: int) -> bool:
        """They are never anywhere else."""
        return True

    def show(self, run: range, copy: int) -> None:
        """They are shown already."""

    def show_zero(self) -> None:
        """There are always some to show."""

    def conceal(self) -> None:
        """There is nothing to hide: all of them are this iteration's."""

    def apply_later(self, runs: Iterable[range]) -> None:
        """No update is put off to another iteration."""

    def mark_applied(self, run: Iterable[int], copy: int) -> None:
        """Nothing is to be zeroed."""

    def mark_applied_in_backward(self, run: range) -> None:
        """These were applied in backward: who changes them now is too late."""
        for index in self.of(run):
            p = self.parameters[index]
            self._used.append((p, p.grad, -1 if p.grad is None else p.grad._version))

    def is_intact(self) -> bool:
        """Whether nobody has changed, replaced or taken away what was applied in backward."""
        return all(
            p.grad is grad and (grad is None or grad._version == version)
            for p, grad, version in self._used
        )

    def removed_gradients(self, run: range) -> list[Tensor]:
        """None that an update still needs."""
        return []

    # ---- between iterations -----------------------------------------------------------------

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients, or zero them where they are."""
        self._used, self.empty = [], set_to_none
        for p in self.parameters:
            p.grad = None if set_to_none or p.grad is None else p.grad.detach().zero_()

    def zero(self) -> None:
        """Forget every gradient."""
        self.zero_grad()

    def of(self, run: range) -> range:
        """Indices of the parameters of some buckets."""
        stop = self.starts[run.stop] if run.stop < len(self.starts) else len(self.parameters)
        return range(self.starts[run.start], stop)

    def gradient_tensors(self, run: range, copy: int) -> Iterator[Tensor]:
        """Every gradient of some buckets."""
        return (g for i in self.of(run) if (g := self.parameters[i].grad) is not None)
