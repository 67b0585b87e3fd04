"""Agreements of a worker with all others on the unit of time, exchange rates and constants."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from offbeat.gossip.agreement import Agreement
from offbeat.gossip.clock import DRIFT, Clock
from offbeat.gossip.exchange import Counts
from offbeat.gossip.protocol import parse_agreement
from offbeat.gossip.state import Mixing, State
from offbeat.gossip.tree_reduction import TreeReduction
from offbeat.gossip.tree_reductions import OWN, TreeReductions
from offbeat.gossip.view import View

GRADIENTS = 4  # gradients of a worker before its mean gradient time is used
NOTICE, NOTICE_S = 2.0, 1.0  # least delay of a change of constants, in units and in seconds


class AgreementRounds:
    """Reductions by which all workers agree, one after the other, in the gossip thread.

    Args:
        agreed: first agreement.
        rate: planned exchanges per worker and unit of time.
        momentum: whether there is a second copy x~ (A2CiD2).
        clock: common clock.
        shared: parameters, whose constants change.
        view: edges of the graph.
        counts: exchanges of this worker.
        reductions: reductions of this worker.
        then: called after each agreement.

    Attributes:
        agreed: newest agreement.
    """

    def __init__(
        self,
        agreed: Agreement,
        rate: float,
        momentum: bool,
        clock: Clock,
        shared: State,
        view: View,
        counts: Counts,
        reductions: TreeReductions,
        then: Callable[[], None],
    ):
        self.agreed, self._rate, self._momentum = agreed, rate, momentum
        self._clock, self._shared, self._view = clock, shared, view
        self._counts, self._reductions, self._then = counts, reductions, then
        self._gradient_s, self._gradients = 0.0, 0
        # own exchanges at the label `counted_from`, and at the last agreement
        self._counted = (0, 0)

    @property
    def constants(self) -> Mixing:
        """Mixing constants of the newest agreement."""
        return self.agreed.constants(self._rate, momentum=self._momentum)

    @property
    def due_at(self) -> float | None:
        """Label of the next agreement; None while one is under way, for an immediate one, and
        before the gradient time is known."""
        waits = self._gradients < GRADIENTS or self._reductions.is_under_way(OWN)
        return None if waits else self.agreed.again_at

    def record_gradient(self, seconds: float) -> bool:
        """Update the mean gradient time. Return whether it can be used from now on. Called by the
        training thread.
        """
        self._gradients += 1
        weight = max(1 / self._gradients, 0.1)
        self._gradient_s += weight * (seconds - self._gradient_s)
        return self._gradients == GRADIENTS

    def begin_if_due(self) -> None:
        """Begin an agreement at its label, after a change of the edges, or if a neighbour has begun
        one.
        """
        due = (
            self.agreed.again_at is None
            or self._clock.now() >= self.agreed.again_at
            or self._view.edges() != self.agreed.edges
            or self._reductions.is_requested(OWN)
        )
        if due and self._gradients >= GRADIENTS and not self._reductions.is_under_way(OWN):
            self.begin()

    def begin(self) -> None:
        """Begin a reduction of gradient times and counts of exchanges."""
        self._counted = self._counted[0], sum(self._counts.exchanges.values())
        exchanges = self._counted[1] - self._counted[0]
        numbers = torch.tensor([self._gradient_s, exchanges, 1], dtype=torch.float64, device="cpu")
        self._reductions.begin(OWN, [numbers], 0.0, self._on_result, self._note)

    def _note(self) -> dict[str, Any]:
        """Return the note of the root: the common time, and the edges, also for a worker that has
        missed their last change."""
        edges = [list(edge) for edge in self._view.edges()]
        return {"now_s": self._clock.common_s(), "edges": edges}

    def _on_result(self, reduction: TreeReduction) -> None:
        """Derive unit, share and constants from the result of an agreement.

        The result is equal on all workers because the input is. Changes take effect at the same
        label on all workers.
        """
        gradients_s, exchanges, workers = reduction.result[0].tolist()
        now_s, edges = parse_agreement(reduction.note)
        unit_s, before_s = gradients_s / workers, self._clock.unit_s
        if before_s is None or abs(unit_s / before_s - 1) > DRIFT:
            self._clock.set_unit(unit_s, now_s)
        label, old = self._clock.label_at(now_s), self.agreed
        self.agreed = old.renew(label, exchanges / 2, edges or old.edges, self._rate)
        if self.agreed.counted_from != old.counted_from:
            self._counted = self._counted[1], self._counted[1]
        if (self.agreed.share, self.agreed.edges) != (old.share, old.edges):
            notice = max(NOTICE, NOTICE_S / unit_s)  # time for the result to reach all workers
            self._shared.change_mixing(label + notice, self.constants)
        self._then()
