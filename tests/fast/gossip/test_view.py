"""Views: whatever way the words take, workers come to the same graph and the same tree."""

from __future__ import annotations

import itertools
import random

import pytest

from offbeat.gossip.partitions import remaining_part
from offbeat.gossip.view import Known, State, View

ALL = [(i, j) for j in range(5) for i in range(j)]
RING = [(0, 1), (1, 2), (2, 3), (0, 3)]


def views(edges: list[tuple[int, int]] = RING) -> dict[int, View]:
    return {me: View(me, edges) for me in sorted({end for edge in edges for end in edge})}


def spread(all_: dict[int, View], told: list[list[Known]], seed: int) -> None:
    """Everybody hears everything, each in an order of its own, some of it twice."""
    order = random.Random(seed)
    for view in all_.values():
        words = [*told, *order.sample(told, len(told) // 2)]
        order.shuffle(words)
        for known in words:
            view.merge(known)


@pytest.mark.parametrize("seed", range(5))
def test_the_order_of_words_does_not_matter(seed: int) -> None:
    all_ = views()
    told = [
        all_[1].set_edge(2, State.DOWN),
        all_[2].set_edge(1, State.DOWN),
        all_[1].set_edge(2, State.UP),
        all_[0].set_edge(3, State.DOWN),
        all_[0].set_edge(3, State.GONE),
    ]
    spread(all_, told, seed)
    assert len({view.digest for view in all_.values()}) == 1
    assert all_[3].edges(State.UP) == [(0, 1), (1, 2), (2, 3)]


def test_of_equal_versions_the_worse_counts() -> None:
    a, b = View(0, [(0, 1)]), View(1, [(0, 1)])
    up = [*a.set_edge(1, State.DOWN), *a.set_edge(1, State.UP)][-1:]
    b.set_edge(0, State.DOWN)
    gone = b.set_edge(0, State.GONE)
    assert a.merge(gone) == gone
    assert b.merge(up) == []
    assert a.digest == b.digest


def test_a_known_edge_is_not_forwarded_again() -> None:
    """Otherwise two neighbours would send it to each other without end."""
    a, b = View(0, RING), View(1, RING)
    down = a.set_edge(1, State.DOWN, 0.5)
    assert b.merge(down) == down
    assert b.merge(down) == a.merge(down) == []


def test_the_tree_spans_all_members() -> None:
    all_ = views([(0, 1), (1, 2), (2, 3), (1, 4)])
    places = {me: view.place() for me, view in all_.items()}
    assert places[0] is not None
    assert (places[0].parent, places[0].children, places[0].members) == (None, (1,), 5)
    for me, place in places.items():
        assert place is not None
        for child in place.children:
            assert places[child].parent == me  # type: ignore[union-attr]
    assert sum(len(place.children) for place in places.values() if place) == 4


def test_a_broken_edge_is_gone_round_and_a_dead_worker_is_none() -> None:
    all_ = views()
    told = [all_[0].set_edge(1, State.DOWN), all_[2].set_edge(1, State.DOWN)]
    spread(all_, told, 0)
    assert all_[3].place() is None  # worker 1 may come back
    told = [all_[0].set_edge(1, State.GONE), all_[2].set_edge(1, State.GONE)]
    spread(all_, told, 0)
    assert all_[3].members() == [0, 2, 3]
    assert all_[3].dead_workers() == [1]
    assert all_[3].parts() == [[0, 2, 3]]
    place = all_[0].place()
    assert place is not None
    assert (place.children, place.members) == ((3,), 3)


def test_parts_and_going_on_with_one() -> None:
    """Of a ring of six, 0 and 3 die: 1-2 cannot know whether 3 or 4 has died."""
    edges = [(i, (i + 1) % 6) if i < 5 else (0, 5) for i in range(6)]
    view = View(1, edges)
    view.set_edge(0, State.GONE)
    view.merge([(2, 3, 1, int(State.GONE), 0.5)])
    assert view.parts() == [[0, 3, 4, 5], [1, 2]]
    assert view.label == 0.5
    view.cut_off([1, 2])
    assert view.parts() == [[1, 2]]
    assert view.members() == [1, 2]


def test_neighbours_that_die_together_are_no_part() -> None:
    """Nobody is left to say that the edge between them is gone."""
    view = View(0, ALL)
    for i, j in ALL:
        if i < 3 <= j:
            view.merge([(i, j, 1, int(State.GONE), 0.0)])
    assert view.parts() == [[0, 1, 2], [3, 4]]
    assert view.is_surviving_majority([0, 1, 2])
    assert not view.is_surviving_majority([3, 4])
    view.cut_off([0, 1, 2])
    assert view.dead_workers() == [3, 4]


def test_of_a_worker_behind_a_dead_one_nobody_can_know() -> None:
    view = View(0, [(0, 1), (1, 2), (2, 3), (3, 4)])
    view.merge([(2, 3, 1, int(State.GONE), 0.0)])
    assert not view.is_surviving_majority([0, 1, 2])


def test_who_has_said_goodbye_is_not_dead() -> None:
    view = View(0, [(0, 1), (0, 2)])
    view.set_edge(1, State.LEFT)
    assert view.dead_workers() == []
    assert view.has_leavers()
    assert view.members() == [0, 2]


def test_a_failed_worker_whose_neighbour_has_left_is_dead() -> None:
    view = View(0, [(0, 1), (1, 2), (0, 3), (2, 3)])
    view.merge([(1, 2, 1, int(State.LEFT), 0.0), (2, 3, 1, int(State.GONE), 0.0)])
    view.set_edge(1, State.LEFT)
    assert view.members() == [0, 3]
    assert view.dead_workers() == [2]


def test_an_invalid_edge_merges_no_other_edge() -> None:
    view = View(0, [(0, 1)])
    with pytest.raises(ValueError, match="cannot be"):
        view.merge([(0, 1, 1, int(State.GONE), 0.0), (9, 0, 1, 0, 0.0)])
    assert view.changed_edges() == []


def test_words_that_cannot_be_are_refused() -> None:
    for bad in (
        [(9, 0, 1, 0, 0.0)],
        [(0, 0.5, 1, 0, 0.0)],
        [(-1, 0, 1, 0, 0.0)],
        [(0, 1, 1, 9, 0.0)],
        [(0, 1)],
    ):
        with pytest.raises((ValueError, TypeError)):
            View(0, [(0, 1)]).merge(bad)


def test_known_is_enough_for_a_newcomer() -> None:
    a, b = View(0, RING), View(2, RING)
    for peer, state in itertools.product((1, 3), (State.DOWN, State.GONE)):
        a.set_edge(peer, state)
    b.merge(a.changed_edges())
    assert a.digest == b.digest


@pytest.mark.parametrize(("worst", "warns"), [(State.LEFT, False), (State.GONE, True)])
def test_only_lost_workers_are_a_warning(worst: State, warns: bool) -> None:
    """Workers 0, 3 and 5 of a ring of eight end before the others, which are then in two parts. In
    a healthy job all three have left; else 0 and 3 have died."""
    ring = [(i, i + 1) for i in range(7)] + [(0, 7)]
    view = View(2, ring)
    for edge in [(0, 1), (0, 7), (2, 3), (3, 4)]:
        view.merge([(*edge, 1, int(worst), 0.0)])
    for edge in [(4, 5), (5, 6)]:
        view.merge([(*edge, 1, int(State.LEFT), 0.0)])
    assert view.parts() == [[1, 2], [6, 7]]
    part, notice = remaining_part(view, "raise")
    assert (part, bool(notice)) == ([1, 2], warns)
    view.cut_off(part)
    assert view.parts() == [[1, 2]]  # no longer waits for the others
