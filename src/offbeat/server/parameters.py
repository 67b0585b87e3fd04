"""Store of a parameter server: shards with parameters and optimizer, and the workers' clocks."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from offbeat.core.buckets.coupling import trial_copy
from offbeat.server.clocks import Clocks
from offbeat.server.layout import Layout, ShardSpec, in_order_of
from offbeat.server.optimizers import Settings, apply_settings, piece_state

Rule = Literal["clock", "push"]


@dataclass(slots=True)
class ClockSum:
    """Gradients that have been pushed for one clock.

    `gradient` is their sum, `count` the number of workers. `absent` has for each piece the number
    of workers without a gradient. `rank` is the lowest rank and `settings` are its settings.
    """

    gradient: Tensor
    count: int
    absent: list[int]
    rank: int
    settings: Settings


class Shard:
    """Parameters of one shard, updated with the gradients that workers push.

    With the rule "clock" the shard steps with the average gradient of a clock as soon as the clocks
    of all workers are greater. With "push" it steps with each push at once, with the learning rate
    divided by the number of `workers`. A worker's clock is the number of its next push.
    """

    def __init__(
        self,
        spec: ShardSpec,
        parameters: Tensor,
        optimizer: torch.optim.Optimizer,
        originals: Sequence[Tensor],
        workers: Iterable[int],
        rule: Rule,
    ):
        self.spec, self.parameters = spec, parameters
        self.clocks = Clocks(workers)
        self._rule: Rule = rule
        self._workers = len(self.clocks.present)
        self._open: dict[int, ClockSum] = {}
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
        for piece, parameter in pairs:
            state = optimizer.state.get(originals[piece.parameter], {})
            if state:
                self.optimizer.state[parameter] = piece_state(
                    state, originals[piece.parameter], piece
                )

    def join(self, rank: int, clock: int) -> None:
        """Add a worker with this clock. The clock of a known worker never decreases."""
        self.clocks.join(rank, clock)
        self._apply_complete_clocks()

    def leave(self, rank: int) -> None:
        """Remove a worker. Its pushed gradients still count."""
        if self.clocks.leave(rank):
            self._apply_complete_clocks()

    def skip(self, rank: int, clock: int) -> bool:
        """Pass a clock without gradient. Return False if the worker's clock is greater already."""
        if not self.clocks.advance(rank, clock):
            return False
        self._apply_complete_clocks()
        return True

    def push(
        self,
        rank: int,
        clock: int,
        gradient: Tensor,
        settings: Settings,
        absent: Collection[int] = (),
    ) -> bool:
        """Add a worker's gradient for a clock; the shard owns its memory from now on.

        Returns False, without effect, if the worker's clock is greater already. `absent` lists the
        numbers of the parameters without gradient.
        """
        if not self.clocks.advance(rank, clock):
            return False
        missing = [int(piece.parameter in absent) for piece in self.spec.pieces]
        pushed = ClockSum(gradient, 1, missing, rank, settings)
        if self._rule == "push":
            self._step(pushed, 1 / self._workers)
        else:
            self._add_to_clock(clock, pushed)
            self._apply_complete_clocks()
        return True

    def _add_to_clock(self, clock: int, pushed: ClockSum) -> None:
        total = self._open.setdefault(clock, pushed)
        if total is pushed:
            return
        total.gradient += pushed.gradient
        total.count += pushed.count
        total.absent = [a + b for a, b in zip(total.absent, pushed.absent, strict=True)]
        if pushed.rank < total.rank:
            total.rank, total.settings = pushed.rank, pushed.settings

    def _apply_complete_clocks(self) -> None:
        """Step once for each collected clock below every worker's clock, in ascending order."""
        for clock in sorted(clock for clock in self._open if clock < self.clocks.lowest):
            done = self._open.pop(clock)
            done.gradient /= done.count
            self._step(done, 1.0)

    def _step(self, done: ClockSum, rate: float) -> None:
        apply_settings(self.optimizer, self._groups, done.settings, rate)
        for parameter, place, absent in zip(self.pieces, self._places, done.absent, strict=True):
            # With gradient None the optimizer applies neither weight decay nor momentum.
            parameter.grad = None if absent == done.count else done.gradient[place]
        with torch.no_grad():
            self.optimizer.step()
        for parameter in self.pieces:
            parameter.grad = None


class Store:
    """Shards of one server. A worker's clock on the server is its lowest clock of all shards."""

    def __init__(
        self,
        layout: Layout,
        server: int,
        optimizer: torch.optim.Optimizer,
        rule: Rule,
        workers: Iterable[int],
    ):
        workers = list(workers)
        self.layout, self.server = layout, server
        self.optimizer = optimizer
        self.shards: dict[int, Shard] = {}
        for spec in layout.of(server):
            held = torch.empty(spec.stop - spec.start, dtype=spec.dtype, device="cpu")
            for piece in spec.pieces:
                p = layout.parameters[piece.parameter].detach()
                whole = in_order_of(p, p)
                count = piece.stop - piece.start
                held[piece.at : piece.at + count] = whole[piece.start : piece.stop]
            originals = layout.parameters
            self.shards[spec.number] = Shard(spec, held, optimizer, originals, workers, rule)

    def clocks(self) -> dict[int, int]:
        """Return the clock of each worker, by rank."""
        each = [shard.clocks.present for shard in self.shards.values()]
        return {rank: min(clocks[rank] for clocks in each) for rank in each[0]}

    @property
    def lowest_clock(self) -> float:
        """Lowest clock of all workers; infinite without workers."""
        return min(shard.clocks.lowest for shard in self.shards.values())

    def next_clocks(self, rank: int) -> dict[int, int]:
        """Return by shard number the clock after the worker's last push or skip."""
        return {
            number: shard.clocks.after_last_push.get(rank, 0)
            for number, shard in self.shards.items()
        }

    def welcome(self, rank: int, clock: int, fresh: bool) -> int:
        """Return the clock of the next push of a worker that reports `clock`.

        For a removed worker, or a new process of its rank (`fresh`), this is the maximum of
        `clock`, the lowest clock of all workers, and the clocks after the worker's last pushes.
        """
        if rank in self.clocks() and not fresh:
            return clock
        low = self.lowest_clock
        least = 0 if math.isinf(low) else int(low)
        return max([clock, least, *self.next_clocks(rank).values()])

    def join(self, rank: int, clock: int) -> None:
        """Add a worker with this clock to all shards."""
        for shard in self.shards.values():
            shard.join(rank, clock)

    def leave(self, rank: int) -> None:
        """Remove a worker from all shards."""
        for shard in self.shards.values():
            shard.leave(rank)

    def snapshot(self) -> dict[int, tuple[Tensor, dict[str, Any]]]:
        """Return parameters and optimizer state of all shards, by number."""
        return {
            n: (shard.parameters, shard.optimizer.state_dict()) for n, shard in self.shards.items()
        }

    def restore(self, saved: dict[int, tuple[Tensor, dict[str, Any]]]) -> None:
        """Load the result of `snapshot`. Clocks are not restored: they begin at 0."""
        for number, shard in self.shards.items():
            parameters, optimizer = saved[number]
            shard.parameters.copy_(parameters)
            shard.optimizer.load_state_dict(optimizer)
