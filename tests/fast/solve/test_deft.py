"""DeFT's queues: what every schedule promises, and the paper's example."""

import math
from itertools import accumulate

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.strategies.solvers import knapsack
from offbeat.strategies.solvers import queues as deft

# VGG-19, Table II, output side first: forward, backward, communication in us; bucket 1 with the
# 11,968 us that the printed total needs.
VGG19 = [
    (103, 162, 8651),
    (326, 484, 31754),
    (1899, 2319, 178643),
    (4801, 4872, 15447),
    (28799, 12786, 11262),
    (1238, 72496, 11968),
]
MU = 1.65


def vgg19(links, share=1.0):
    """Windows, ready times and weights; the fewest slices that fit a share of all windows."""
    forward_s = sum(row[0] for row in VGG19) * 1e-6
    backward_s = sum(row[1] for row in VGG19) * 1e-6
    ready_s, own_s = [], []
    smallest_s = share * forward_s / MU ** (links - 1)
    for at_us, (_, _, us) in zip(accumulate(row[1] for row in VGG19), VGG19, strict=True):
        parts = math.ceil(us * 1e-6 / smallest_s)
        ready_s += [at_us * 1e-6] * parts
        own_s += [us * 1e-6 / parts] * parts
    weights_s = [own_s, [MU * seconds for seconds in own_s]][:links]
    return forward_s, backward_s, ready_s, weights_s


@st.composite
def problems(draw, most_pieces=7):
    seconds = draw(
        st.sampled_from([st.integers(1, 9).map(float), st.floats(0.1, 9.0), st.just(2.0)])
    )
    count, links = draw(st.integers(1, most_pieces)), draw(st.integers(1, 3))
    own_s = [draw(seconds) for _ in range(count)]
    backwards_s = [draw(st.integers(0, 6)) / 2 for _ in range(count)]
    slowest = (1.0, 1.65, 2.0)[links - 1]
    backward_s = max(float(sum(backwards_s)), slowest * max(own_s))
    weights_s = [[mu * seconds for seconds in own_s] for mu in (1.0, 1.65, 2.0)[:links]]
    return draw(st.integers(0, 9)) / 1.0, backward_s, list(accumulate(backwards_s)), weights_s


def unrolled(schedule, cycles=3):
    return [*schedule.prologue, *schedule.cycle * cycles]


def assert_carries_all(schedule, count):
    """Each generation's pieces are sent once each, between its own close and the next."""
    left = set()
    for iteration in unrolled(schedule):
        for send in iteration.forward + iteration.current:
            left.remove(send.piece)
        assert iteration.closes == (not left)
        assert iteration.closes or not iteration.future
        if iteration.closes:
            left = set(range(count)) - {send.piece for send in iteration.future}
            assert len(left) == count - len(iteration.future)
    assert schedule.cycle[-1].closes
    assert sum(schedule.merges) == len(schedule.cycle)


def end_s(sends, link, ready_s, weights_s):
    end = 0.0
    for send in sends:
        if send.link == link:
            end = max(end, ready_s[send.piece]) + weights_s[link][send.piece]
    return end


@pytest.mark.parametrize("solver", [knapsack.exact, knapsack.greedy])
@settings(max_examples=60, deadline=None)
@given(problem=problems())
def test_every_generation_is_sent_within_the_windows(solver, problem):
    forward_s, backward_s, ready_s, weights_s = problem
    schedule = deft.simulate(*problem, solver=solver)
    assert_carries_all(schedule, len(ready_s))
    late_s = 1e-6
    for iteration in unrolled(schedule, 1):
        for link in range(len(weights_s)):
            waiting = [0.0] * len(ready_s)
            assert end_s(iteration.forward, link, waiting, weights_s) <= forward_s + late_s
            before = end_s(iteration.current, link, waiting, weights_s)
            after = [max(before, at_s) for at_s in ready_s]
            assert before <= backward_s + late_s
            early = [send for send in iteration.future if send.link == link]
            assert not early or end_s(early, link, after, weights_s) <= backward_s + late_s
    assert schedule.updates_per_iteration <= deft.most_updates(forward_s, backward_s, weights_s)


@settings(max_examples=60, deadline=None)
@given(problem=problems(most_pieces=5))
def test_a_schedule_follows_the_queues(problem):
    """Every iteration but the last of the cycle sends as much as any choice could."""
    forward_s, backward_s, ready_s, weights_s = problem
    schedule = deft.simulate(*problem)

    def seconds(sends):
        return sum(weights_s[0][send.piece] for send in sends)

    def best_s(pieces, *window):
        rows = [[row[i] for i in pieces] for row in weights_s]
        return sum(rows[0][i] for on_link in knapsack.exact(rows, *window) for i in on_link)

    left = []
    for at, iteration in enumerate(unrolled(schedule, 1)):
        if (iteration.forward, iteration.current, iteration.future, at) == ((), (), (), 0):
            left = list(range(len(ready_s)))  # a close that sends nothing early
            continue
        assert seconds(iteration.forward) == pytest.approx(best_s(left, forward_s))
        left = [i for i in left if i not in {send.piece for send in iteration.forward}]
        assert seconds(iteration.current) == pytest.approx(best_s(left, backward_s))
        left = [i for i in left if i not in {send.piece for send in iteration.current}]
        if iteration.closes and at < len(schedule.prologue) + len(schedule.cycle) - 1:
            busy_s = [
                sum(weights_s[k][s.piece] for s in iteration.current if s.link == k)
                for k in range(len(weights_s))
            ]
            window = backward_s, ready_s, busy_s
            assert seconds(iteration.future) == pytest.approx(best_s(range(len(ready_s)), *window))
        if iteration.closes:
            early = {send.piece for send in iteration.future}
            left = [i for i in range(len(ready_s)) if i not in early]


def test_vgg19_on_two_links():
    forward_s, backward_s, ready_s, weights_s = vgg19(2)
    assert forward_s + backward_s == pytest.approx(0.130285)
    for solver in (knapsack.exact, knapsack.greedy):
        schedule = deft.simulate(forward_s, backward_s, ready_s, weights_s, solver=solver)
        assert schedule.merges == (2, 1, 1)
    assert {send.piece for it in schedule.cycle for send in it.future}.isdisjoint(
        {len(ready_s) - 1}
    )  # the input side is ready when backward ends


def test_a_long_search_ends():
    """Incommensurable times hardly ever leave the same twice."""
    own_s = [math.sqrt(p) for p in (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31)]
    ready_s = [float(i) for i in range(1, 12)]
    schedule = deft.simulate(6.0, 11.0, ready_s, [own_s])
    assert_carries_all(schedule, 11)
    assert len(schedule.merges) <= deft.MOST_GENERATIONS
    most = deft.most_updates(6.0, 11.0, [own_s])
    assert schedule.updates_per_iteration >= 0.85 * most
