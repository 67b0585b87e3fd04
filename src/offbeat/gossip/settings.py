"""Settings of a gossip job."""

from __future__ import annotations

from dataclasses import dataclass

import networkx as nx

from offbeat.gossip.partitions import OnPartition


@dataclass(frozen=True)
class Settings:
    """Settings of a gossip job, equal on all workers.

    Attributes:
        graph: initial graph.
        rate: planned exchanges per worker and unit of time.
        momentum: whether there is a second copy x~ (A2CiD2).
        silent_s: seconds after which an unreachable worker is removed.
        timeout_s: longest wait of the training thread in seconds.
        on_partition: action if the graph is partitioned.
        layout: digest of the model.
        strategy: strategy as text.
        seed: seed of the random requests.
    """

    graph: nx.Graph
    rate: float = 1.0
    momentum: bool = True
    silent_s: float = 10.0
    timeout_s: float = 120.0
    on_partition: OnPartition = "raise"
    layout: str = ""
    strategy: str = ""
    seed: int = 0
