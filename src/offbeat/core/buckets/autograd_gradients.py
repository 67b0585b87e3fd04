"""Gradients in autograd's own tensors, for plans that neither send nor change gradients."""

from __future__ import annotations

from collections.abc import Iterator
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
        self.parameters, self.starts = flat.parameters, flat.starts
        self.empty = False  # whether `zero_grad` has set all gradients to None
        for p in self.parameters:
            if (
                p.grad is not None and not flat.is_sharded
            ):  # `data` has a version counter of its own
                p.grad = p.grad.data
        self._used: list[tuple[nn.Parameter, Tensor | None, int]] = []  # applied in backward

    def _do_nothing(self, *_: object) -> None:
        """Methods of `Gradients` without an effect here: the storage holds no gradients, `p.grad`
        of an unused parameter is None already, and updates are never delayed."""

    begin_plan = open = drop_views = restore = _do_nothing
    take_manual_gradients = mark_fresh = _do_nothing
    drop_unused = on_backward_end = undo_backward_end = _do_nothing
    show = show_zero = conceal = apply_later = mark_applied = _do_nothing

    def flags(self) -> dict[str, Any]:
        """Return an empty dict: no state is kept between iterations."""
        return {}

    def on_iteration_begin(self) -> None:
        """Forget the gradients that were applied in an earlier backward."""
        self._used = []

    def added_iterations(self, b: int, copy: int) -> int:
        """Return 1. Sums over iterations exist only if the script itself adds gradients up."""
        return 1

    def is_shown(self, copy: int) -> bool:
        """Return True: `p.grad` is the only place of a gradient."""
        return True

    def mark_applied_in_backward(self, run: range) -> None:
        """Record gradients that were applied in backward: later changes have no effect."""
        for index in self.flat.indices(run):
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

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Set gradients to None, or zero them in place."""
        self._used, self.empty = [], set_to_none
        for p in self.parameters:
            p.grad = None if set_to_none or p.grad is None else p.grad.detach().zero_()

    def zero(self) -> None:
        """Set every gradient to None."""
        self.zero_grad()

    def gradient_tensors(self, run: range, copy: int) -> Iterator[Tensor]:
        """Return the gradients of a run of buckets, one tensor per parameter."""
        return (g for i in self.flat.indices(run) if (g := self.parameters[i].grad) is not None)


class ShardGradients(AutogradGradients):
    """Gradients in FSDP's own tensors: FSDP reduces them to shards inside the node, and only the
    user's optimizer uses them."""

    def __init__(self, flat: Flat):
        super().__init__(flat)
        self.bucket_of = flat.bucket_of
        self.views: list[None] = [None] * len(flat.parameters)

    def take(self, index: int, p: nn.Parameter) -> None:
        """Do nothing: the gradient stays in FSDP's tensor."""
