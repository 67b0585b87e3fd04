"""The store: all shards of one server, and the clocks of its workers."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch

from offbeat.server.layout import Layout, in_order_of
from offbeat.server.parameters import Rule, Shard


class Store:
    """One server's shards; a worker's clock here is that of the shard where it is least."""

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
        """The clock of every worker that counts."""
        each = [shard.clocks for shard in self.shards.values()]
        return {rank: min(clocks[rank] for clocks in each) for rank in each[0]}

    @property
    def low(self) -> float:
        """The least clock; infinite if nobody is left."""
        return min(shard.low for shard in self.shards.values())

    def taken(self, rank: int) -> dict[int, int]:
        """By shard, the number of the push after the last one that it has of this worker."""
        return {number: shard.taken.get(rank, 0) for number, shard in self.shards.items()}

    def welcome(self, rank: int, clock: int, fresh: bool) -> int:
        """The clock from which a worker goes on that has come to `clock`. Who begins anew (another
        process, or one that was counted out) gets one that is open in all shards."""
        if rank in self.clocks() and not fresh:
            return clock
        low = self.low
        least = 0 if math.isinf(low) else int(low)
        return max([clock, least, *self.taken(rank).values()])

    def join(self, rank: int, clock: int) -> None:
        """Count this worker from now on."""
        for shard in self.shards.values():
            shard.join(rank, clock)

    def leave(self, rank: int) -> None:
        """Count this worker no more."""
        for shard in self.shards.values():
            shard.leave(rank)

    def snapshot(self) -> dict[str, Any]:
        """What a server must remember."""
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
        """The inverse; clocks begin at 0."""
        for number, shard in self.shards.items():
            shard.parameters.copy_(saved["shards"][number]["parameters"])
            shard.optimizer.load_state_dict(saved["shards"][number]["optimizer"])
