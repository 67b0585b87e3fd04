"""Guard against updates without effect: an optimizer must change the weights of its groups."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable

from torch import Tensor, nn
from torch.optim import Optimizer

from offbeat.core.buckets.checksum import checksum
from offbeat.core.buckets.shards import local_of

ATTEMPTS = 20  # updates; some optimizers write in every fourth or so


class UpdateCheck:
    """Compares weights before and after the first updates of an optimizer, until one changes them.

    It warns and does not raise: updates may be smaller than the resolution of the weights, as those
    of bfloat16 in a warm-up. Updates count if a gradient is not zero, and nor is the learning rate
    of its group.
    """

    def __init__(self, optimizer: Optimizer):
        self._optimizer = optimizer
        self._unmoved, self._first = 0, -1
        self._before: tuple[list[Tensor], int] | None = None
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
            self._before = stepped, checksum(*stepped)

    def end(self) -> None:
        """Compare the weights after the update. Warn if `ATTEMPTS` updates had no effect."""
        if self._before is None:
            return
        parameters, before = self._before
        self._unmoved += 1
        changed = checksum(*parameters) != before
        self.done = changed or self._unmoved == ATTEMPTS
        if self.done and not changed:
            warnings.warn(
                f"{type(self._optimizer).__name__}.step() has changed no weight in {ATTEMPTS} "
                "updates although gradients are not zero (does it keep views of parameters or "
                "gradients?); let it use p and p.grad of its param_groups in every step(), or use "
                "strategy DDP(), which moves neither. A learning rate of a warm-up may also be too "
                "small for the precision of the weights",
                stacklevel=2,
            )


def _has_gradient(p: Tensor) -> bool:
    if p.grad is None or not (gradient := local_of(p.grad.detach())).numel():
        return False
    return 0.0 < float(gradient.abs().max()) < math.inf
