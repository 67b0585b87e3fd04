"""What follows from an agreement, by hand."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import networkx as nx
import pytest

from offbeat.frames.frames import WireError
from offbeat.gossip.agreement import (
    GRADIENTS,
    MIN_EXCHANGES,
    NOTICE,
    PERIOD,
    Agreement,
    Agreements,
)
from offbeat.gossip.clock import Clock, Line
from offbeat.gossip.pairing import Requests
from offbeat.gossip.settings import Member, Settings
from offbeat.gossip.state import AVERAGING, Course
from offbeat.gossip.view import State, View

RING = [(0, 1), (0, 3), (1, 2), (2, 3)]  # rate 1: half an exchange per edge and unit


def test_constants_are_those_of_what_comes_about() -> None:
    """A ring of four at rate 1: chi1 = 1, chi2 = 3/4, by hand; at half the rate both double."""
    for share in (1.0, 0.5):
        chi1, chi2 = 1 / share, 0.75 / share
        found = Agreement(RING, share).constants(1.0, momentum=True)
        assert found.eta == pytest.approx(1 / (2 * math.sqrt(chi1 * chi2)))
        assert found.alpha_tilde == pytest.approx(math.sqrt(chi1 / chi2) / 2)
    assert Agreement(RING).constants(1.0, momentum=False) == AVERAGING
    assert Agreement([]).constants(1.0, momentum=True) == AVERAGING


def test_the_share_changes_when_it_is_far_off_and_enough_was_counted() -> None:
    first = Agreement(RING).renew(10.0, 0, RING, 1.0)
    assert first == Agreement(RING, 1.0, 10.0, 0, 10.0 + PERIOD, 1)
    units = MIN_EXCHANGES / 2 + 1  # two exchanges are planned per unit
    early = first.renew(10.0 + units - 2, 1, RING, 1.0)
    assert (early.share, early.counted_from) == (1.0, 10.0)  # goes on counting
    near = first.renew(10.0 + units, 1.9 * units, RING, 1.0)
    assert (near.share, near.counted_from) == (1.0, 10.0 + units)
    far = first.renew(10.0 + units, units, RING, 1.0)
    assert far.share == pytest.approx(0.5)
    assert first.renew(10.0 + units, 0, RING, 1.0).share == 1 / MIN_EXCHANGES


def test_with_other_edges_counting_begins_anew() -> None:
    first = Agreement(RING).renew(10.0, 0, RING, 1.0)
    other = first.renew(12.0, 3, RING[:3], 1.0)
    assert other == Agreement(RING[:3], 1.0, 12.0, 3, 12.0 + PERIOD, 2)


class Worker(Member):
    """Agreements of a worker of the ring without a network; time is in seconds."""

    def __init__(self, me: int, now: list[float], agreed: Agreement) -> None:
        self.course = Course(AVERAGING)
        shared: Any = SimpleNamespace(course=self.course, change_mixing=self.course.change)
        clock = Clock(own_s=lambda: now[0])
        clock.follow(agreed.line)
        super().__init__(Settings(nx.Graph(RING)), clock, shared, View(me, RING))
        self.agreements = Agreements(self, lambda: None)
        self.agreements.agreed = agreed

    def train(self, seconds: float) -> None:
        for _ in range(GRADIENTS):
            self.agreements.record_gradient(seconds)


def members(now: list[float], agreed: Agreement) -> list[Worker]:
    return [Worker(me, now, agreed) for me in range(4)]


def flood(ring: list[Worker]) -> None:
    """All news to all, as JSON, in rounds until there are none."""
    news = [(one.view.me, data) for one in ring if (data := one.agreements.advance())]
    while news:
        told = [(me, json.loads(json.dumps(data))) for me, data in news]
        news = []
        for one in ring:
            new = [one.agreements.merge(data) for me, data in told if me != one.view.me]
            news += [(one.view.me, data) for data in [*new, one.agreements.advance()] if data]


def test_all_members_take_the_agreement_of_the_first_one() -> None:
    """In 400 units 800 exchanges are planned; 400 take place, so that four workers count 800."""
    now = [400.0]
    ring = members(now, Agreement(RING, again_at=400.0, line=Line(0.0, 0.0, 1.0)))
    for one in ring:
        one.train(1.0)
        one.counts.exchanges[(one.view.me + 1) % 4] = 200
    flood(ring)
    half = Agreement(RING, 0.5).constants(1.0, momentum=True)
    for one in ring:
        agreed = one.agreements.agreed
        assert (agreed.share, agreed.counted_from, agreed.counted) == (0.5, 400.0, 400.0)
        assert (agreed.number, agreed.leader, agreed.again_at) == (1, 0, 400.0 + PERIOD)
        assert one.course.last == half
        assert one.course.changes[-1].since == 400.0 + NOTICE


def test_the_unit_is_the_mean_gradient_time_and_waits_for_all() -> None:
    now = [10.0]
    ring = members(now, Agreement(RING))
    for one in ring[:3]:
        one.train(1.0)
    flood(ring)
    assert [one.clock.unit_s for one in ring] == [None] * 4
    ring[3].train(2.0)
    flood(ring)
    assert [one.clock.unit_s for one in ring] == [1.25] * 4
    now[0] = 20.0
    assert len({one.clock.now() for one in ring}) == 1


def test_without_the_first_member_the_next_one_agrees() -> None:
    now = [10.0]
    ring = members(now, Agreement(RING))
    for one in ring:
        one.train(1.0)
    dead, *living = ring
    told = [dead.agreements.advance(), *(one.agreements.advance() for one in living)]
    for one in living:
        for data in told:
            one.agreements.merge(json.loads(json.dumps(data)))
        one.view.merge([(0, 1, 1, int(State.GONE), 0.0), (0, 3, 1, int(State.GONE), 0.0)])
    flood(living)
    assert {one.agreements.agreed.leader for one in living} == {1}
    assert [one.agreements.agreed.edges for one in living] == [[(1, 2), (2, 3)]] * 3


def test_of_two_agreements_with_one_number_one_counts() -> None:
    now = [10.0]
    first, second = members(now, Agreement(RING))[:2]
    one = {"agreed": {**asdict(Agreement(RING, 0.7, number=1, leader=0))}}
    other = {"agreed": {**asdict(Agreement(RING, 0.9, number=1, leader=1))}}
    one, other = json.loads(json.dumps([one, other]))
    assert first.agreements.merge(one)
    assert first.agreements.merge(other)
    assert second.agreements.merge(other)
    assert second.agreements.merge(one) == {}
    assert first.agreements.agreed == second.agreements.agreed


@pytest.mark.parametrize("told", [{"agreed": {"edges": []}}, {"reports": [[1, 2]]}])
def test_what_no_agreement_can_be_is_refused(told: dict[str, Any]) -> None:
    with pytest.raises(WireError):
        Worker(0, [0.0], Agreement(RING)).agreements.merge(told)


def test_each_end_of_an_edge_requests_half_of_its_exchanges() -> None:
    """2000 units, in which a neighbour with the rate 0.5 gets a quarter of a request per unit."""
    requests, label, counts = Requests(0, {1: 0.5, 2: 1.5}, seed=0), 0.0, Counter[int]()
    while (label := label + requests.wait()) < 2000:
        counts[requests.choose()] += 1
    assert abs(counts[1] - 500) < 100
    assert abs(counts[2] - 1500) < 150
    assert Requests(0, {}, seed=0).wait() == math.inf


def test_no_report_is_due_before_the_gradient_time_is_known() -> None:
    """The thread would wake up for it again and again, and report nothing."""
    one = Worker(0, [0.0], Agreement(RING, again_at=400.0, line=Line(0.0, 0.0, 1.0)))
    assert one.agreements.due_at is None
    one.train(1.0)
    assert one.agreements.due_at == 400.0
