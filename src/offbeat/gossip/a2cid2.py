"""Strategy A2CiD2: gossip with a continuous local momentum."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from offbeat.gossip.strategies import Gossip


@dataclass(frozen=True)
class A2CiD2(Gossip):
    """Gossip with a second copy of the parameters: agreement about sqrt(n) times faster on a ring.

    An exchange moves the copy further than the parameters. Between two exchanges both mix at a rate
    that follows from the graph. The other settings are those of `Gossip`.

    Source: Nabli, Belilovsky, Oyallon, A2CiD2, NeurIPS 2023.
    """

    exchange: Literal["after_mixing", "before_mixing"] = "after_mixing"  # type: ignore[misc]
    """Whether parameters and copy mix before each exchange (`after_mixing`) or after it
    (`before_mixing`, Algorithm 1 of the paper, which reaches agreement more slowly)."""

    name: ClassVar[str] = "a2cid2"
    momentum: ClassVar[bool] = True
    citation: ClassVar[str] = (
        "Nabli, Belilovsky, Oyallon, A2CiD2: Accelerating asynchronous communication in "
        "decentralized deep learning, NeurIPS 2023"
    )
