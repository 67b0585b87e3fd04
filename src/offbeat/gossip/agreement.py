"""Agreement: what all workers hold for true together, and what follows from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import networkx as nx

from offbeat.gossip.clock import DRIFT
from offbeat.gossip.graphs import constants, edge_rates
from offbeat.gossip.state import AVERAGING, Mixing
from offbeat.gossip.view import Edge

PULSE = 50.0  # units between two agreements
ENOUGH = 200  # exchanges, before their measured rate is believed


@dataclass(frozen=True)
class Agreement:
    """The edges, and the share of their planned rates that comes about. Labels: since when
    exchanges are counted, and when to agree again (None: at once)."""

    edges: list[Edge]
    share: float = 1.0
    counted_from: float = 0.0
    again_at: float | None = None

    def constants(self, rate: float, *, momentum: bool) -> Mixing:
        """Those of A2CiD2 for what comes about; without momentum AD-PSGD's."""
        if not (self.edges and momentum):
            return AVERAGING
        rates = {edge: one * self.share for edge, one in planned(self.edges, rate).items()}
        found = constants(rates, sorted({end for edge in rates for end in edge}))
        return Mixing(found.eta, found.alpha, found.alpha_tilde)

    def renewed(self, label: float, exchanges: float, edges: list[Edge], rate: float) -> Agreement:
        """The one that follows: so many exchanges have been counted, and there are these edges.

        The share changes when it is 20 % off and there were enough exchanges to tell it.
        """
        due = sum(planned(self.edges, rate).values()) * (label - self.counted_from)
        first, enough = self.again_at is None, due >= ENOUGH
        share = self.share
        if enough and not first:
            found = max(exchanges / due, 1 / ENOUGH)
            share = found if abs(found / share - 1) > DRIFT else share
        anew = first or enough or edges != self.edges
        since = label if anew else self.counted_from
        return replace(self, edges=edges, share=share, counted_from=since, again_at=label + PULSE)


def planned(edges: Sequence[Edge], rate: float) -> dict[Edge, float]:
    """Exchanges per unit of each edge."""
    return edge_rates(nx.Graph(edges), rate) if edges else {}
