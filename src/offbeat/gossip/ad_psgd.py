"""Strategy AD-PSGD: gossip without momentum."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from offbeat.gossip.strategies import Gossip


@dataclass(frozen=True)
class ADPSGD(Gossip):
    """Asynchronous decentralized parallel SGD: after an exchange both partners hold the average.

    The settings are those of `Gossip`.

    Source: Lian et al., ICML 2018.
    """

    name: ClassVar[str] = "ad-psgd"
    momentum: ClassVar[bool] = False
    citation: ClassVar[str] = (
        "Lian et al., Asynchronous decentralized parallel stochastic gradient descent, ICML 2018"
    )
