"""A2CiD2: gossip with a continuous local momentum."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from offbeat.gossip.strategies import Gossip


@dataclass(frozen=True)
class A2CiD2(Gossip):
    """Gossip that agrees about sqrt(n) times faster on a ring, by a second copy of the parameters.

    Gossip moves the copy further than the parameters; in between the two mix, at a rate that
    follows from the graph. The other settings are Gossip's.
    """

    exchange: Literal["after_mixing", "before_mixing"] = "after_mixing"  # type: ignore[misc]
    """Whether both mix before they exchange; `before_mixing` is the paper's Algorithm 1, which
    agrees more slowly."""

    name: ClassVar[str] = "a2cid2"
    momentum: ClassVar[bool] = True
    citation: ClassVar[str] = (
        "Nabli, Belilovsky, Oyallon, A2CiD2: Accelerating asynchronous communication in "
        "decentralized deep learning, NeurIPS 2023"
    )
