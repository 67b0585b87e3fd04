"""Edges and share of the planned exchange rates on which all workers have agreed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import networkx as nx

from offbeat.gossip.clock import DRIFT
from offbeat.gossip.graphs import constants, edge_rates
from offbeat.gossip.state import AVERAGING, Mixing
from offbeat.gossip.view import Edge

PERIOD = 50.0  # units of time between two agreements
MIN_EXCHANGES = 200  # least number of planned exchanges before the measured rate is used


@dataclass(frozen=True)
class Agreement:
    """State that is equal on all workers between two agreements. Times are labels of `Clock`.

    Attributes:
        edges: edges of the graph on which workers exchange.
        share: measured exchanges divided by planned exchanges.
        counted_from: label from which exchanges are counted.
        again_at: label of the next agreement; None for an immediate one.
    """

    edges: list[Edge]
    share: float = 1.0
    counted_from: float = 0.0
    again_at: float | None = None

    def constants(self, rate: float, *, momentum: bool) -> Mixing:
        """Return the constants of A2CiD2 for the measured rates, or those of AD-PSGD without
        momentum.
        """
        if not (self.edges and momentum):
            return AVERAGING
        rates = {edge: one * self.share for edge, one in planned_rates(self.edges, rate).items()}
        found = constants(rates, sorted({end for edge in rates for end in edge}))
        return Mixing(found.eta, found.alpha, found.alpha_tilde)

    def renew(self, label: float, exchanges: float, edges: list[Edge], rate: float) -> Agreement:
        """Return the next agreement.

        The share changes only after at least `MIN_EXCHANGES` planned exchanges, and if the measured
        share differs by more than `DRIFT`.

        Args:
            label: label of the new agreement.
            exchanges: exchanges of all workers since `counted_from`.
            edges: current edges of the graph.
            rate: planned exchanges per worker and unit of time.
        """
        due = sum(planned_rates(self.edges, rate).values()) * (label - self.counted_from)
        first, enough = self.again_at is None, due >= MIN_EXCHANGES
        share = self.share
        if enough and not first:
            found = max(exchanges / due, 1 / MIN_EXCHANGES)
            share = found if abs(found / share - 1) > DRIFT else share
        anew = first or enough or edges != self.edges
        since = label if anew else self.counted_from
        return replace(self, edges=edges, share=share, counted_from=since, again_at=label + PERIOD)


def planned_rates(edges: Sequence[Edge], rate: float) -> dict[Edge, float]:
    """Return the planned exchanges of each edge per unit of time."""
    return edge_rates(nx.Graph(edges), rate) if edges else {}
