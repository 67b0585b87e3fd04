"""Shards that step with changes of parameters: by a quorum of workers, or one corrected change."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from offbeat.server.layout import ShardSpec
from offbeat.server.parameters import ClockSum, Shard

WEIGHT = "weight"  # setting of a push: the weight of its change in a mean
KEEP = 0.2  # cosine from which a change remains as it is
TINY = 1e-12


class QuorumShard(Shard):
    """Parameters of one shard, stepped with the weighted mean of the changes of a quorum.

    The optimizer is that of the outer step; its gradient is the mean. A worker counts once, but
    several changes of it count in the mean.

    Args:
        quorum: workers whose changes a step needs; None: all. Of fewer present workers, all.
        grace_s: seconds to wait for further workers when the quorum is complete.
        now: clock in seconds.
    """

    def __init__(
        self,
        spec: ShardSpec,
        parameters: Tensor,
        optimizer: torch.optim.Optimizer,
        originals: Sequence[Tensor],
        workers: Iterable[int],
        *,
        quorum: int | None,
        grace_s: float,
        now: Callable[[], float] = time.monotonic,
    ):
        super().__init__(spec, parameters, optimizer, originals, workers)
        self.steps = 0
        self._quorum, self._grace_s, self._now = quorum, grace_s, now
        self._members: set[int] = set()
        self._sum = torch.zeros_like(parameters)
        self._weight = 0.0
        self._since_s: float | None = None  # when the quorum was complete

    def use_clock(self, now: Callable[[], float]) -> None:
        self._now = now

    @property
    def lowest_clock(self) -> float:
        """Number of outer steps; infinite without workers."""
        return self.steps if self.clocks else math.inf

    @property
    def wait_s(self) -> float:
        """Seconds until a step is due; infinite if none is."""
        if self._since_s is None:
            return math.inf
        return max(self._since_s + self._grace_s - self._now(), 0.0)

    def _advance_clock(self, rank: int, clock: int) -> None:
        super()._advance_clock(rank, clock)
        self._members.add(rank)  # also without a change, as no step waits for this worker then

    def _add_to_clock(self, clock: int, pushed: ClockSum) -> None:
        weight = float(pushed.settings[0][WEIGHT])
        self._sum.add_(pushed.gradient, alpha=weight)
        self._weight += weight

    def advance(self) -> bool:
        """Step if a step is due. Return whether the shard has stepped."""
        present = set(self.clocks)
        if not self._members:
            return False
        needed = len(present) if self._quorum is None else min(self._quorum, len(present))
        if self._since_s is None and len(self._members) >= needed:
            self._since_s = self._now()
        if not (self._members >= present or self.wait_s == 0):
            return False
        return self.flush()

    def flush(self) -> bool:
        """Step with the changes that have arrived. Return whether there are any."""
        if not self._members:
            return False
        if self._weight:
            mean = self._sum / self._weight
            self._step(ClockSum(mean, 1, [0] * len(self.pieces), 0, []), 1.0)
        self._sum.zero_()
        self._members, self._weight, self._since_s = set(), 0.0, None
        self.steps += 1
        return True

    def _step(self, done: ClockSum, rate: float) -> None:
        with torch.no_grad():
            for parameter, place in zip(self.pieces, self._places, strict=True):
                parameter.grad = done.gradient[place]
            self.optimizer.step()
            for parameter in self.pieces:
                parameter.grad = None

    def _apply_complete_clocks(self) -> None:
        """Called after a push or a skipped clock, and after the set of workers has changed."""
        self.advance()


class CorrectingShard(Shard):
    """Parameters of one shard, stepped with each change, corrected against the momentum (HeLoCo).

    Args:
        rate: learning rate of the outer step.
        momentum: factor of the momentum.
    """

    def __init__(
        self,
        spec: ShardSpec,
        parameters: Tensor,
        optimizer: torch.optim.Optimizer,
        originals: Sequence[Tensor],
        workers: Iterable[int],
        *,
        rate: float,
        momentum: float,
    ):
        super().__init__(spec, parameters, optimizer, originals, workers, "push")
        self._rate, self._factor = rate, momentum

    def _step(self, done: ClockSum, rate: float) -> None:
        with torch.no_grad():
            for parameter, place in zip(self.pieces, self._places, strict=True):
                state = self.optimizer.state[parameter]
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = torch.zeros_like(parameter)
                momentum = state["momentum_buffer"]
                change = correct_change(done.gradient[place], momentum)
                momentum.mul_(self._factor).add_(change, alpha=1 - self._factor)
                parameter.sub_(self._rate * (change + self._factor * momentum))


def correct_change(change: Tensor, momentum: Tensor) -> Tensor:
    """Return a change whose conflict with the momentum is reduced.

    Source: Al Asif et al., HeLoCo, 2026; thresholds and strengths are ours.
    """
    length, other = float(change.norm()), float(momentum.norm())
    if length < TINY or other < TINY:
        return change
    u, v = change / length, momentum / other
    cosine = float(u @ v)
    if cosine >= KEEP:
        return change
    confidence = length / (length + other)
    if cosine < 0:
        return change - min(-cosine * confidence, 1.0) * cosine * length * v
    share = min((1 - cosine) * confidence, 1.0)
    turned = (1 - share) * u + share * v
    return length * turned / max(float(turned.norm()), TINY)
