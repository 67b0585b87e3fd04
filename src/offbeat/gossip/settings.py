"""Settings of a gossip job, and what the parts of a worker share."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import networkx as nx

from offbeat.gossip.clock import Clock
from offbeat.gossip.exchange import Counts
from offbeat.gossip.partitions import OnPartition
from offbeat.gossip.state import State
from offbeat.gossip.view import View


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


@dataclass
class Member:
    """What the parts of a worker share.

    Attributes:
        settings: settings of the job.
        clock: common clock.
        shared: parameters, shared with the training thread.
        view: edges of the graph.
        has_joined: whether this worker has joined a running job.
        consolidates: whether workers that want to join must wait.
        counts: exchanges so far.
        notices: notices for the user.
    """

    settings: Settings
    clock: Clock
    shared: State
    view: View
    has_joined: bool = False
    consolidates: bool = False
    counts: Counts = field(default_factory=Counts)
    notices: deque[str] = field(default_factory=deque)

    def warn(self, words: str) -> None:
        """Add a notice for the user."""
        self.notices.append(f"worker {self.view.me}: {words}")
