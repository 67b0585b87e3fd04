"""Agreement of all workers on edges, unit of time, exchange rates and mixing constants.

Each worker floods a report of its gradient time and its exchanges. The member with the smallest id
derives an agreement from the reports of all members, and floods it. The newer agreement replaces
the older one. Gradients do not wait for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import networkx as nx

from offbeat.frames.frames import WireError
from offbeat.gossip.clock import DRIFT, Line
from offbeat.gossip.graphs import constants, edge_rates
from offbeat.gossip.protocol import finite, parse_edges
from offbeat.gossip.settings import Member
from offbeat.gossip.state import AVERAGING, Change, Mixing, changed
from offbeat.gossip.view import Edge

PERIOD = 50.0  # units of time between two agreements
MIN_EXCHANGES = 200  # least number of planned exchanges before the measured rate is used
GRADIENTS = 4  # gradients of a worker before its mean gradient time is used
NO_UNIT = Line()
NOTICE, NOTICE_S = 2.0, 1.0  # least delay of a change of constants, in units and in seconds


class Report(NamedTuple):
    """What a worker contributes to the agreement with this number: its mean gradient time, and all
    its exchanges so far."""

    worker: int
    number: int
    gradient_s: float
    exchanges: int


@dataclass(frozen=True)
class Agreement:
    """State that is equal on all workers. Times are labels of `Clock`.

    Attributes:
        edges: edges of the graph on which workers exchange.
        share: measured exchanges divided by planned exchanges.
        counted_from: label from which exchanges are counted.
        counted: exchanges of all workers before it.
        again_at: label of the next agreement; None for an immediate one.
        number: number of the agreement; of equal numbers that of the larger `leader` counts.
        leader: worker that has derived it.
        line: labels as a function of the common clock.
        changes: changes of the mixing constants.
    """

    edges: list[Edge]
    share: float = 1.0
    counted_from: float = 0.0
    counted: float = 0.0
    again_at: float | None = None
    number: int = 0
    leader: int = 0
    line: Line = NO_UNIT
    changes: tuple[Change, ...] = ()

    @staticmethod
    def unpack(data: Any) -> Agreement:
        """Return the agreement from JSON data. Raise WireError if the data is invalid."""
        try:
            since_s, label, unit_s = data["line"]
            return Agreement(
                parse_edges(data["edges"]),
                finite(data["share"]),
                finite(data["counted_from"]),
                finite(data["counted"]),
                None if data["again_at"] is None else finite(data["again_at"]),
                int(data["number"]),
                int(data["leader"]),
                Line(finite(since_s), finite(label), None if unit_s is None else finite(unit_s)),
                tuple(Change(finite(t), Mixing(*map(finite, m))) for t, m in data["changes"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise WireError(f"this agreement cannot be: {error}") from None

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
        """Return the next agreement, with the line and changes of this one.

        The share changes only after at least `MIN_EXCHANGES` planned exchanges, and if the measured
        share differs by more than `DRIFT`.

        Args:
            label: label of the new agreement.
            exchanges: exchanges of all workers so far.
            edges: current edges of the graph.
            rate: planned exchanges per worker and unit of time.
        """
        due = sum(planned_rates(self.edges, rate).values()) * (label - self.counted_from)
        first, enough = self.again_at is None, due >= MIN_EXCHANGES
        share = self.share
        if enough and not first:
            found = max((exchanges - self.counted) / due, 1 / MIN_EXCHANGES)
            share = found if abs(found / share - 1) > DRIFT else share
        anew = first or enough or edges != self.edges
        return replace(
            self,
            edges=edges,
            share=share,
            counted_from=label if anew else self.counted_from,
            counted=exchanges if anew else self.counted,
            again_at=label + PERIOD,
            number=self.number + 1,
        )


def planned_rates(edges: Sequence[Edge], rate: float) -> dict[Edge, float]:
    """Return the planned exchanges of each edge per unit of time."""
    return edge_rates(nx.Graph(edges), rate) if edges else {}


class Agreements:
    """Reports and agreements of a worker, in the gossip thread.

    Args:
        member: this worker.
        then: called after each agreement.

    Attributes:
        agreed: newest agreement.
    """

    def __init__(self, member: Member, then: Callable[[], None]):
        self._clock, self._shared, self._view = member.clock, member.shared, member.view
        self._rate, self._momentum = member.settings.rate, member.settings.momentum
        self._counts, self._then = member.counts, then
        self.agreed = Agreement(member.view.first)
        self._gradient_s, self._gradients = 0.0, 0
        self._reports: dict[int, Report] = {}  # for the next agreement, by worker

    @property
    def constants(self) -> Mixing:
        """Mixing constants of the newest agreement."""
        return self.agreed.constants(self._rate, momentum=self._momentum)

    @property
    def due_at(self) -> float | None:
        """Label of the next report; None if this worker has made it, if it is due, and before the
        gradient time is known."""
        waits = self._gradients < GRADIENTS or self._view.me in self._reports
        return None if waits else self.agreed.again_at

    def record_gradient(self, seconds: float) -> bool:
        """Update the mean gradient time. Return whether it can be used from now on. Called by the
        training thread.
        """
        self._gradients += 1
        weight = max(1 / self._gradients, 0.1)
        self._gradient_s += weight * (seconds - self._gradient_s)
        return self._gradients == GRADIENTS

    # ---- flooding ---------------------------------------------------------------------------

    def known(self) -> dict[str, Any]:
        """Return all that this worker knows, as JSON data."""
        return _pack([*self._reports.values()], self.agreed)

    def merge(self, told: Mapping[str, Any]) -> dict[str, Any]:
        """Merge what a neighbour knows. Return what is new, as JSON data; empty if nothing is.

        Raises:
            WireError: the data is invalid.
        """
        agreed, newer = told.get("agreed"), None
        if agreed is not None:
            found = Agreement.unpack(agreed)
            if (found.number, found.leader) > (self.agreed.number, self.agreed.leader):
                newer = found
                self._adopt(found)
        reports = [_parse_report(one) for one in told.get("reports", [])]
        new = [report for report in reports if self._add(report)]
        return _pack(new, newer)

    def advance(self) -> dict[str, Any]:
        """Report if it is due, and agree if all members have reported and this worker is the first
        of them. Return what is new, as JSON data; empty if nothing is.
        """
        new: list[Report] = []
        due = (
            self.agreed.again_at is None
            or self._clock.now() >= self.agreed.again_at
            or self._view.edges() != self.agreed.edges
            or self._reports
        )
        me = self._view.me
        if due and self._gradients >= GRADIENTS and me not in self._reports:
            exchanges = sum(self._counts.exchanges.values())
            new.append(Report(me, self.agreed.number + 1, self._gradient_s, exchanges))
            self._add(new[0])
        members = self._view.members()
        if me == members[0] and all(worker in self._reports for worker in members):
            self._adopt(self._derive([self._reports[worker] for worker in members]))
            return _pack(new, self.agreed)
        return _pack(new, None)

    def _add(self, report: Report) -> bool:
        """Store a report for the next agreement. Return whether it is new."""
        new = report.number == self.agreed.number + 1 and report.worker not in self._reports
        if new:
            self._reports[report.worker] = report
        return new

    def _derive(self, reports: Sequence[Report]) -> Agreement:
        """Return the agreement that follows from the reports of all members."""
        now_s, line = self._clock.common_s(), self._clock.line
        unit_s = sum(report.gradient_s for report in reports) / len(reports)
        if line.unit_s is None or abs(unit_s / line.unit_s - 1) > DRIFT:
            line = line.with_unit(unit_s, now_s)
        label, old = line.label_at(now_s), self.agreed
        exchanges = sum(report.exchanges for report in reports) / 2  # both ends count each
        new = old.renew(label, exchanges, self._view.edges(), self._rate)
        changes = self._shared.course.changes
        if (new.share, new.edges) != (old.share, old.edges):
            notice = max(NOTICE, NOTICE_S / unit_s)  # time for the agreement to reach all workers
            mixing = new.constants(self._rate, momentum=self._momentum)
            changes = changed(changes, label + notice, mixing)
        return replace(new, leader=self._view.me, line=line, changes=tuple(changes))

    def _adopt(self, agreed: Agreement) -> None:
        """Use an agreement. Changes take effect at the same labels on all workers."""
        self.agreed = agreed
        self._clock.follow(agreed.line)
        for change in agreed.changes:
            if change not in self._shared.course.changes:
                self._shared.change_mixing(change.since, change.mixing)
        self._reports = {}
        self._then()


def _pack(reports: Sequence[Report], agreed: Agreement | None) -> dict[str, Any]:
    data: dict[str, Any] = {"reports": list(reports)} if reports else {}
    return data if agreed is None else {**data, "agreed": asdict(agreed)}


def _parse_report(data: Any) -> Report:
    try:
        worker, number, gradient_s, exchanges = data
        return Report(int(worker), int(number), finite(gradient_s), int(exchanges))
    except (TypeError, ValueError) as error:
        raise WireError(f"report ({data!r}) cannot be: {error}") from None
