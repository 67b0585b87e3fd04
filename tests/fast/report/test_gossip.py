"""Gossip in the report: exchanges at their places, counts of pairs, distance at one time."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
from cases.gossip_runs import THREE, record, repetition

from offbeat import A2CiD2, Profile, sim
from offbeat.experiments.record.run_directory import Contestant
from offbeat.experiments.report.boxes import figure
from offbeat.experiments.report.divergence import distance_curve, relative_distances
from offbeat.experiments.report.gossip import (
    Exchange,
    clock_differences_s,
    gossip_picture,
    gossips_of,
    measured_gossip,
    predicted_gossip,
    trace_events,
    visible_part,
)
from offbeat.experiments.report.timeline import predicted_window
from offbeat.profile import Bucket, Link


def test_exchanges_are_where_they_were_on_one_clock() -> None:
    found = measured_gossip(repetition(THREE))
    assert found is not None
    assert found.exchanges == [
        Exchange(0, 1, (2.25, 2.75), (2.25, 2.75), 400),
        Exchange(1, 2, (3.5, 3.75), (3.5, 3.75), 400),
    ]
    assert found.counts == [[0, 1, 0], [1, 0, 1], [0, 1, 0]]
    assert [own[-1] for own in found.gradients.values()] == [(3, 4)] * 3
    part = visible_part(found)
    start = part.length_s - 4  # the window ends when the last iteration does
    times = pytest.approx((2.25 + start, 2.75 + start))
    assert part.exchanges[0] == Exchange(0, 1, times, times, 400)
    picture = figure(gossip_picture(part, "three <workers>"))
    assert 'aria-label="three &lt;workers&gt;"' in picture
    assert picture.count('data-n="worker ') == 3
    assert picture.count('<i class="n"') == 2 * 2  # each exchange on both of its workers
    assert picture.count('class="tie"') == 2
    assert "exchange of workers 0 and 1\n" in picture
    assert "400 B in each direction, 800 B/s" in picture


def test_workers_without_a_record_are_shown_by_their_partners() -> None:
    """Worker 4 has joined from elsewhere, worker 3 has never been there."""
    joined = record(0, [1, 2, 3, 4], [(1, 1, 2.25, 2.75, 400), (4, 1, 3.0, 3.5, 400)])
    rep = repetition([joined, *THREE[1:]])
    found = measured_gossip(rep)
    assert found is not None
    assert Exchange(0, 4, (3.0, 3.5), (3.0, 3.5), 400) in found.exchanges
    assert found.counts[0][4] == found.counts[4][0] == 1
    assert found.window_s == measured_gossip(repetition(THREE)).window_s  # type: ignore[union-attr]
    part = visible_part(found)
    assert (part.workers, part.all) == ([0, 1, 2, 4], 4)
    assert part.gradients[3] == []
    assert part.counts[0] == [0, 1, 0, 1]
    named = {
        e["pid"]
        for e in trace_events(found, clock_differences_s(rep))
        if e["name"] == "thread_name"
    }
    assert named == {0, 1, 2, 4}


def test_exchanges_in_a_chrome_trace() -> None:
    """Each end in the seconds of its own worker, as the other spans are, and one arrow a pair."""
    rep = repetition(THREE)
    found, ahead = measured_gossip(rep), clock_differences_s(rep)
    assert found is not None
    assert ahead is not None
    events = trace_events(found, ahead)
    spans = [(e["pid"], e["name"], e["ts"], e["dur"]) for e in events if e["ph"] == "X"]
    own = {
        (r.rank, peer): (begin_s, end_s)
        for r in rep.ranks
        for peer, _, begin_s, end_s, _ in r.trace.notes["gossip"]["last"]
    }
    assert sorted(spans) == [
        (rank, f"with {peer}", pytest.approx(1e6 * begin), pytest.approx(1e6 * (end - begin)))
        for (rank, peer), (begin, end) in sorted(own.items())
    ]
    arrows = [(e["ph"], e["id"], e["pid"]) for e in events if e["ph"] in "sf"]
    assert arrows == [("s", 0, 0), ("f", 0, 1), ("s", 1, 1), ("f", 1, 2)]
    json.dumps(events)


def test_one_end_stands_for_both() -> None:
    """Worker 0 has lost the connection before it knew that both had all."""
    found = measured_gossip(repetition([record(0, [1, 2, 3, 4], []), *THREE[1:]]))
    assert found is not None
    assert found.exchanges[0] == Exchange(0, 1, (2.25, 2.75), (2.25, 2.75), 400)
    assert found.counts[0][1] == found.counts[1][0] == 1


def test_only_time_of_which_all_is_known_is_shown() -> None:
    """Of eight exchanges of each the last two are kept; who is fast ends early."""
    ends = [float(i + 1) for i in range(30)]
    late = [(1, n, 20.0 + n, 20.5 + n, 8) for n in (7, 8)]
    other = [(0, n, 20.0 + n, 20.5 + n, 8) for n in (7, 8)]
    pair = [record(0, ends, late, counts={1: 8}), record(1, ends, other, counts={0: 8})]
    found = measured_gossip(repetition(pair))
    assert found is not None
    assert found.window_s == (27.0, 30.0)
    assert found.counts == [[0, 8], [8, 0]]
    fast = record(1, [end / 3 for end in ends], other, counts={0: 8})
    found = measured_gossip(repetition([pair[0], fast]))
    assert found is not None
    part = visible_part(found)
    assert part.length_s == 0
    assert part.exchanges == []
    assert part.counts == [[0, 8], [8, 0]]


def test_many_workers_are_cut() -> None:
    few = measured_gossip(repetition(THREE))
    assert few is not None
    many = replace(
        few,
        gradients={n: [(0.0, 1.0)] for n in range(70)},
        exchanges=[Exchange(0, 69, (0.1, 0.2), (0.1, 0.2), 1)],
        counts=[[0] * 70 for _ in range(70)],
    )
    part = visible_part(many)
    assert part.workers == list(range(64))
    assert part.all == 70
    assert part.exchanges == []
    assert len(part.counts) == len(part.counts[0]) == 64


def test_other_strategies_have_no_picture() -> None:
    plain = replace(repetition(THREE).ranks[0].trace, notes={})
    ranks = tuple(replace(rank, trace=plain) for rank in repetition(THREE).ranks)
    rep = replace(repetition(THREE), ranks=ranks)
    assert measured_gossip(rep) is None
    assert predicted_gossip(plain) is None
    assert gossips_of(Contestant("s", "s", {}, (rep,))) == {}


def test_distance_is_that_of_one_time() -> None:
    """Rank 1 is twice as slow: what it has at t is compared with what rank 0 has at t."""
    slow = record(1, [2, 4, 6], [], origin_s=0.0, numbers=[10, 20, 30])
    fast = record(0, [1, 2, 3, 4, 5, 6], [], numbers=[0, 10, 14, 20, 24, 30])
    found = relative_distances(repetition([fast, slow]))
    # At 1 rank 1 has nothing yet; at 3 it has 10, at 5 20.
    assert found == pytest.approx({1: 0.0, 2: 2 / 12, 3: 0.0, 4: 2 / 22, 5: 0.0})
    assert distance_curve(repetition([fast, slow])).seconds == (2, 3, 4, 5, 6)
    # The other way round: nothing is said of what came after the fast one's end.
    fast = {**fast, "rank": 1}
    slow = record(0, [2, 4, 8], [], numbers=[10, 20, 30])
    assert relative_distances(repetition([slow, fast])) == {0: 0.0, 1: 0.0}


PROFILE = Profile(
    (Bucket("a", 0.1, 0.2, 4000),), (Link("net", 0.0, 1e5),), 4, rank_scale=(1.0, 1.0, 2.0, 1.0)
)


def test_predicted_exchanges_fit_the_graph_and_the_link() -> None:
    trace = sim.predict(A2CiD2("0-1,1-2,2-3", rate=1.0), PROFILE).trace
    found = predicted_gossip(trace)
    assert found is not None
    assert found.unit_s == pytest.approx((3 * 0.3 + 0.6) / 4)
    start, end = found.window_s
    assert end - start == pytest.approx(10 * found.unit_s)
    assert {(one.i, one.j) for one in found.exchanges} == {(0, 1), (1, 2), (2, 3)}
    # The link carries 1.5e5 bytes per second in one direction: 2 (n - 1) / n of a ring's rate.
    assert min(one.at_i[1] - one.at_i[0] for one in found.exchanges) >= 4000 / 1.5e5 - 1e-9
    assert found.counts == [list(row) for row in zip(*found.counts, strict=True)]
    # Edges' rates are 2 / (1 + 2), 2 / (2 + 2), 2 / (2 + 1) in 100 units, at random.
    for (i, j), rate in {(0, 1): 2 / 3, (1, 2): 1 / 2, (2, 3): 2 / 3}.items():
        assert abs(found.counts[i][j] - 100 * rate) < 5 * math.sqrt(100 * rate)
    assert found.counts[0][2] == found.counts[0][3] == 0


def test_a_period_is_each_workers_own() -> None:
    """Workers with jitter drift apart; the simulation keeps the last iterations only."""
    shaky = replace(PROFILE, jitter=0.2)
    window = predicted_window(
        Contestant("s", "s", {}, (), predicted=sim.predict(A2CiD2(), shaky).trace)
    )
    assert window is not None
    assert window.iterations.start > 0
    assert [window.bounds_s(rank)[0] for rank in range(4)] == pytest.approx([0.0] * 4)
    assert window.length_s == pytest.approx(max(window.bounds_s(rank)[1] for rank in range(4)))
    assert all(
        [s.kind for s in own][:2] == ["forward", "backward"] for own in window.shown.values()
    )


def test_alone_nothing_is_predicted() -> None:
    alone = replace(PROFILE, world_size=1, rank_scale=())
    assert predicted_gossip(sim.predict(A2CiD2(), alone).trace) is None
