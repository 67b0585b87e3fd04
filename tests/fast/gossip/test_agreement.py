"""What follows from an agreement, by hand."""

from __future__ import annotations

import math
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from offbeat.gossip.agreement import MIN_EXCHANGES, PERIOD, Agreement
from offbeat.gossip.agreement_rounds import NOTICE, AgreementRounds
from offbeat.gossip.clock import Clock
from offbeat.gossip.exchange import Counts
from offbeat.gossip.pairing import Requests
from offbeat.gossip.state import AVERAGING, Mixing

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
    assert first == Agreement(RING, 1.0, 10.0, 10.0 + PERIOD)
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
    assert other == Agreement(RING[:3], 1.0, 12.0, 12.0 + PERIOD)


def test_an_exchange_that_both_ends_have_counted_is_one() -> None:
    """In 400 units 800 exchanges are planned; 400 take place, so that four workers count 800."""
    clock, changes = Clock(own_s=lambda: 0.0), list[tuple[float, Mixing]]()
    clock.set_unit(1.0, 0.0)
    shared: Any = SimpleNamespace(change_mixing=lambda *change: changes.append(change))
    nothing: Any = None
    rounds = AgreementRounds(
        Agreement(RING, again_at=400.0), 1.0, True, clock, shared, nothing, Counts(), nothing,
        lambda: None,
    )  # fmt: skip
    numbers = torch.tensor([4.0, 800.0, 4.0], dtype=torch.float64)
    reduction: Any = SimpleNamespace(result=[numbers], note={"now_s": 400.0, "edges": None})
    rounds._on_result(reduction)
    assert rounds.agreed == Agreement(RING, 0.5, 400.0, 400.0 + PERIOD)
    assert changes == [(400.0 + NOTICE, Agreement(RING, 0.5).constants(1.0, momentum=True))]


def test_each_end_of_an_edge_requests_half_of_its_exchanges() -> None:
    """2000 units, in which a neighbour with the rate 0.5 gets a quarter of a request per unit."""
    requests, label, counts = Requests(0, {1: 0.5, 2: 1.5}, seed=0), 0.0, Counter[int]()
    while (label := label + requests.wait()) < 2000:
        counts[requests.choose()] += 1
    assert abs(counts[1] - 500) < 100
    assert abs(counts[2] - 1500) < 150
    assert Requests(0, {}, seed=0).wait() == math.inf


def test_no_agreement_is_due_before_the_gradient_time_is_known() -> None:
    """The thread would wake up for it again and again, and begin nothing."""
    nothing: Any = None
    reductions: Any = SimpleNamespace(is_under_way=lambda _: False)
    rounds = AgreementRounds(
        Agreement(RING, again_at=400.0), 1.0, True, nothing, nothing, nothing, Counts(),
        reductions, lambda: None,
    )  # fmt: skip
    assert rounds.due_at is None
    while not rounds.record_gradient(1.0):
        assert rounds.due_at is None
    assert rounds.due_at == 400.0
