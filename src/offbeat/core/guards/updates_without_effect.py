"""Guard against updates without effect: an optimizer must change the weights of its groups."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable

from torch import Tensor, nn
from torch.optim import Optimizer

from offbeat.core.buckets.checksum import checksum
from offbeat.core.buckets.coupling import reaches_stand_ins
from offbeat.core.buckets.shards import local_of

ATTEMPTS = 20  # updates; some optimizers write in every fourth or so


class UpdateCheck:
    """Compares weights before and after the first updates of an optimizer, until one changes them.

    Updates may be smaller than the resolution of the weights, as those of bfloat16 in a warm-up. So
    the optimizer has no effect for certain only if it has never written the weights, and if a copy
    does not change synthetic parameters at a larger rate. Updates count if a gradient is not zero,
    and nor is the learning rate of its group.
    """

    def __init__(self, optimizer: Optimizer):
        self._optimizer = optimizer
        self._unmoved, self._first, self._has_written = 0, -1, False
        self._before: tuple[list[Tensor], list[int], int] | None = None
        self.done = False

    def begin(self, first: int, parameters: Iterable[nn.Parameter]) -> None:
        """Record the weights before an update of `parameters`.

        `first` is the first bucket of the update. Only the buckets of the first counted update are
        checked.
        """
        self._before = None
        if self._first not in (-1, first):
            return
        groups = [g["params"] for g in self._optimizer.param_groups if g.get("lr") != 0]
        own = {id(p) for group in groups for p in group}
        stepped: list[Tensor] = [p for p in parameters if id(p) in own]
        if any(_has_gradient(p) for p in stepped):
            self._first = first
            self._before = stepped, versions_of(stepped), checksum(*stepped)

    def end(self) -> None:
        """Compare the weights after the update. Warns if `ATTEMPTS` updates had no effect, and it
        is unknown whether later ones will.

        Raises:
            ValueError: `ATTEMPTS` updates had no effect, and no later one will.
        """
        if self._before is None:
            return
        parameters, versions, before = self._before
        self._before = None
        self._has_written |= versions_of(parameters) != versions
        self._unmoved += 1
        self.done = checksum(*parameters) != before
        if self.done or self._unmoved < ATTEMPTS:
            return
        self.done, reaches = True, reaches_stand_ins(self._optimizer)
        if reaches:
            return
        found = (
            f"{type(self._optimizer).__name__}.step() has changed no weight in {ATTEMPTS} "
            "updates although gradients are not zero (does it keep views of parameters or "
            "gradients?); let it use p and p.grad of its param_groups in every step(), or use "
            "strategy DDP(), which moves neither"
        )
        if reaches is not None and not self._has_written:
            raise ValueError(found)
        warnings.warn(found, stacklevel=2)


def versions_of(tensors: Iterable[Tensor]) -> list[int]:
    """Return the counts of in-place writes of tensors."""
    return [tensor._version for tensor in tensors]


def _has_gradient(p: Tensor) -> bool:
    if p.grad is None or not (gradient := local_of(p.grad.detach())).numel():
        return False
    return 0.0 < float(gradient.abs().max()) < math.inf
