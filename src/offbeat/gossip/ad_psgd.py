"""AD-PSGD: plain gossip."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from offbeat.gossip.strategies import Gossip


@dataclass(frozen=True)
class ADPSGD(Gossip):
    """Asynchronous decentralized parallel SGD: an exchange leaves both partners at their mean.

    The settings are Gossip's.
    """

    name: ClassVar[str] = "ad-psgd"
    momentum: ClassVar[bool] = False
    citation: ClassVar[str] = (
        "Lian et al., Asynchronous decentralized parallel stochastic gradient descent, ICML 2018"
    )
