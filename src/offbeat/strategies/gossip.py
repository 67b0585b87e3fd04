"""Gossip: what strategies without a plan, without servers and without waiting have in common."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from offbeat.plan import Plan
from offbeat.profile import Profile
from offbeat.strategies.base import Strategy

if TYPE_CHECKING:
    from offbeat.sim.outcomes import Votes
    from offbeat.sim.prediction import Prediction
    from offbeat.sim.ranks import Ranks


@dataclass(frozen=True)
class Gossip(Strategy):
    """Neighbours in a graph average their parameters in pairs while everybody computes.

    `topology`: see `offbeat graph`. `rate`: exchanges per gradient of a worker, in the mean.
    `weights`: whether a gradient sees one point ("snapshot"), or exchanges change the parameters
    between its forward and backward ("live"). `wire`: "bf16" sends half the bytes of float32; the
    mean is kept, but workers do not agree better than to that precision. A neighbour that cannot be
    reached for `silent_s` seconds is given up. If the graph falls apart by that, training fails, or
    the larger part goes on alone (`on_partition="continue"`).
    """

    topology: str = "ring"
    rate: float = 1.0
    weights: Literal["snapshot", "live"] = "snapshot"
    wire: Literal["none", "bf16"] = "none"
    silent_s: float = 10.0
    on_partition: Literal["raise", "continue"] = "raise"

    planned: ClassVar[bool] = False
    synchronous: ClassVar[bool] = False
    momentum: ClassVar[bool]  # whether there is an x~
    exchange: ClassVar[str] = "after_mixing"

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("rate", "silent_s"):
            value = getattr(self, name)
            if (
                isinstance(value, bool)
                or not isinstance(value, (int, float))
                or not (0 < value < math.inf)
            ):
                raise ValueError(f"{name} ({value!r}) must be a finite number above 0")
        if not isinstance(self.topology, str) or not self.topology:
            raise ValueError(
                f"topology ({self.topology!r}) must be the name of one, or edges as in '0-1,1-2'"
            )

    def schedule(self, profile: Profile) -> Plan:
        raise ValueError(
            f"{self.name} has no plan: its workers exchange in pairs when it suits them; `offbeat "
            "graph` tells how fast they agree"
        )

    def bound_s(self, profile: Profile) -> float:
        """`F + B` and the update with what the loop does around them, of the slowest rank: nobody
        waits for anybody, so that is also what an iteration takes."""
        slowest = profile.slowest()
        return slowest.other_s + slowest.forward_s + slowest.backward_s + slowest.update_s

    def predict(
        self,
        profile: Profile,
        *,
        servers: int = 0,
        iterations: int | None = None,
        seed: int = 0,
        ranks: Ranks | None = None,
        votes: Votes | None = None,
    ) -> Prediction:
        """Prediction of the timeline; `offbeat graph` predicts how workers agree."""
        from offbeat.sim.apart import predict_apart

        return predict_apart(self, profile, iterations=iterations, seed=seed, ranks=ranks)
