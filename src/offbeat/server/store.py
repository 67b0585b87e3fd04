"""Store of a parameter server: all shards of one server and the clocks of its workers."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch

from offbeat.server.layout import Layout, in_order_of
from offbeat.server.parameters import Rule, Shard


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
            self.shards[spec.number] = Shard(
                spec, held, optimizer, layout.parameters, rule, workers
            )

    def clocks(self) -> dict[int, int]:
        """Return the clock of each worker, by rank."""
        each = [shard.clocks for shard in self.shards.values()]
        return {rank: min(clocks[rank] for clocks in each) for rank in each[0]}

    @property
    def lowest_clock(self) -> float:
        """Lowest clock of all workers; infinite without workers."""
        return min(shard.lowest_clock for shard in self.shards.values())

    def next_clocks(self, rank: int) -> dict[int, int]:
        """Return by shard number the clock after the worker's last push or skip."""
        return {number: shard.next_clocks.get(rank, 0) for number, shard in self.shards.items()}

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

    def snapshot(self) -> dict[str, Any]:
        """Return parameters and optimizer state of all shards, for a file."""
        return {
            "layout": self.layout.digest,
            "server": self.server,
            "shards": {
                number: {
                    "parameters": shard.parameters,
                    "optimizer": shard.optimizer.state_dict(),
                }
                for number, shard in self.shards.items()
            },
        }

    def restore(self, saved: dict[str, Any]) -> None:
        """Load the result of `snapshot`. Clocks are not restored: they begin at 0."""
        for number, shard in self.shards.items():
            shard.parameters.copy_(saved["shards"][number]["parameters"])
            shard.optimizer.load_state_dict(saved["shards"][number]["optimizer"])
