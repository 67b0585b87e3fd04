"""A shard: parameters, their optimizer, and the clocks of the workers that push to it."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from offbeat.core.buckets.coupling import trial_copy
from offbeat.server.layout import ShardSpec
from offbeat.server.optimizers import Settings, adopt, piece_state

Rule = Literal["clock", "push"]


@dataclass(slots=True)
class Sum:
    """What one clock has collected: the sum of gradients, of how many workers, and how many of
    them lack each piece; the settings are the lowest rank's."""

    gradient: Tensor
    count: int
    absent: list[int]
    rank: int
    settings: Settings


class Shard:
    """Applies what workers push. Rule "clock": the mean of a clock, once every worker has reached
    it; "push": each push at once, with the learning rate divided by the number of `workers`.

    A worker's clock is the number of its next push. Every method happens whole or not at all.
    """

    def __init__(
        self,
        spec: ShardSpec,
        parameters: Tensor,
        optimizer: torch.optim.Optimizer,
        originals: Sequence[Tensor],
        rule: Rule,
        workers: Iterable[int],
    ):
        self.spec, self.parameters = spec, parameters
        self.clocks = dict.fromkeys(workers, 0)
        self.taken: dict[int, int] = {}  # the same of every worker that ever pushed
        self._rule: Rule = rule
        self._workers = len(self.clocks)
        self._open: dict[int, Sum] = {}
        self._places = [slice(p.at, p.at + p.stop - p.start) for p in spec.pieces]
        self.pieces = [nn.Parameter(parameters[place]) for place in self._places]
        self._groups = sorted({piece.group for piece in spec.pieces})
        pairs = list(zip(spec.pieces, self.pieces, strict=True))
        self.optimizer = trial_copy(
            optimizer,
            [
                {**optimizer.param_groups[g], "params": [p for s, p in pairs if s.group == g]}
                for g in self._groups
            ],
        )
        for piece, mine in pairs:
            state = optimizer.state.get(originals[piece.parameter], {})
            if state:
                self.optimizer.state[mine] = piece_state(state, originals[piece.parameter], piece)

    @property
    def low(self) -> float:
        """The least clock of those who count; infinite if nobody is left."""
        return min(self.clocks.values(), default=math.inf)

    def join(self, rank: int, clock: int) -> None:
        """Count this worker from now on, from this clock or the one that it has reached."""
        self.clocks[rank] = max(clock, self.clocks.get(rank, 0))
        self._settle()

    def leave(self, rank: int) -> None:
        """Count this worker no more; what it has pushed stays."""
        if self.clocks.pop(rank, None) is not None:
            self._settle()

    def skip(self, rank: int, clock: int) -> bool:
        """The worker has nothing for this clock. False if it has said more already."""
        if clock < self.clocks[rank]:
            return False
        self._reached(rank, clock)
        self._settle()
        return True

    def push(
        self,
        rank: int,
        clock: int,
        gradient: Tensor,
        settings: Settings,
        absent: Collection[int] = (),
    ) -> bool:
        """Take a worker's gradient for a clock, and keep its memory. False, and nothing happens,
        if it has been taken before. `absent`: parameters that have none."""
        if clock < self.clocks[rank]:
            return False
        missing = [int(piece.parameter in absent) for piece in self.spec.pieces]
        mine = Sum(gradient, 1, missing, rank, settings)
        self._reached(rank, clock)
        if self._rule == "push":
            self._step(mine, 1 / self._workers)
        else:
            self._collect(clock, mine)
            self._settle()
        return True

    def _reached(self, rank: int, clock: int) -> None:
        self.clocks[rank] = self.taken[rank] = clock + 1

    def _collect(self, clock: int, mine: Sum) -> None:
        all_ = self._open.setdefault(clock, mine)
        if all_ is mine:
            return
        all_.gradient += mine.gradient
        all_.count += mine.count
        all_.absent = [a + b for a, b in zip(all_.absent, mine.absent, strict=True)]
        if mine.rank < all_.rank:
            all_.rank, all_.settings = mine.rank, mine.settings

    def _settle(self) -> None:
        """Apply, in their order, the clocks that everyone has left behind."""
        for clock in sorted(clock for clock in self._open if clock < self.low):
            done = self._open.pop(clock)
            done.gradient /= done.count
            self._step(done, 1.0)

    def _step(self, done: Sum, rate: float) -> None:
        adopt(self.optimizer, self._groups, done.settings, rate)
        for mine, place, absent in zip(self.pieces, self._places, done.absent, strict=True):
            # Without a gradient weight decay and momentum leave a parameter alone.
            mine.grad = None if absent == done.count else done.gradient[place]
        with torch.no_grad():
            self.optimizer.step()
        for mine in self.pieces:
            mine.grad = None
