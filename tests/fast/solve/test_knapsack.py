"""Knapsacks: against every assignment of messages to links."""

import itertools

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from offbeat.strategies.solvers import knapsack

WHOLE = st.integers(0, 6).map(float)  # ties, zeros, and exact sums
TENTHS = st.integers(0, 12).map(lambda n: n / 10)  # sums that tie on paper, not in floating point


@st.composite
def problems(draw, most_messages=5, most_links=3):
    seconds = draw(st.sampled_from([WHOLE, TENTHS]))
    messages = draw(st.integers(0, most_messages))
    links = draw(st.integers(1, most_links))
    own_s = st.lists(seconds, min_size=messages, max_size=messages)
    weights_s = [draw(own_s) for _ in range(links)]
    window_s = draw(st.integers(0, 12)) * (1.0 if seconds is WHOLE else 0.1)
    ready_s = draw(st.none() | own_s)
    busy_s = draw(st.none() | st.lists(seconds, min_size=links, max_size=links))
    if busy_s is not None:
        busy_s = [min(busy, window_s) for busy in busy_s]
    return weights_s, window_s, ready_s, busy_s


def fits(messages, weights_s, window_s, ready_s, busy_s):
    """DeFT's condition, as its Problem with release times states it."""
    tolerance_s = 1e-6
    return all(
        sum(weights_s[j] for j in messages if ready_s[j] >= ready_s[i])
        <= min(window_s - ready_s[i], window_s - busy_s) + tolerance_s
        for i in messages
    )


def value_s(placement, weights_s):
    return sum(weights_s[0][i] for messages in placement for i in messages)


def brute_force_s(weights_s, window_s, ready_s=None, busy_s=None):
    """The most that any of (links + 1)^n assignments is worth."""
    count, links = len(weights_s[0]), len(weights_s)
    ready_s, busy_s = ready_s or [0.0] * count, busy_s or [0.0] * links
    best_s = 0.0
    for places in itertools.product(range(links + 1), repeat=count):
        sets = [[i for i in range(count) if places[i] == k] for k in range(links)]
        if all(fits(sets[k], weights_s[k], window_s, ready_s, busy_s[k]) for k in range(links)):
            best_s = max(best_s, value_s(sets, weights_s))
    return best_s


def assert_feasible(placement, weights_s, window_s, ready_s, busy_s):
    count, links = len(weights_s[0]), len(weights_s)
    ready_s, busy_s = ready_s or [0.0] * count, busy_s or [0.0] * links
    assert len(placement) == links
    sent = [i for messages in placement for i in messages]
    assert len(sent) == len(set(sent))
    for k, messages in enumerate(placement):
        assert fits(messages, weights_s[k], window_s, ready_s, busy_s[k])
        assert [ready_s[i] for i in messages] == sorted(ready_s[i] for i in messages)


@settings(max_examples=60, deadline=None)
@given(problems())
@example(([[0.1] * 3], 0.3, None, None))  # 0.1 + 0.1 + 0.1 > 0.3 in floating point
def test_exact_is_the_best_assignment(problem):
    placement = knapsack.exact(*problem)
    assert_feasible(placement, *problem)
    assert value_s(placement, problem[0]) == pytest.approx(brute_force_s(*problem), abs=1e-9)


@settings(max_examples=40, deadline=None)
@given(problems(most_messages=8))
def test_greedy_is_feasible_and_never_better(problem):
    placement = knapsack.greedy(*problem)
    assert_feasible(placement, *problem)
    best_s = value_s(knapsack.exact(*problem), problem[0])
    assert value_s(placement, problem[0]) <= best_s + 1e-9


@settings(max_examples=40, deadline=None)
@given(problems(most_messages=9))
def test_sums_as_bits_find_the_same_on_one_link(problem):
    """The method for many messages, on problems that enumeration solves too."""
    weights_s, window_s, ready_s, busy_s = problem
    problem = weights_s[:1], window_s, ready_s, busy_s and busy_s[:1]
    placement = knapsack.by_sums(*problem)
    assert_feasible(placement, *problem)
    best_s = value_s(knapsack.exact(*problem), weights_s)
    shorter_s = window_s * (1 - len(weights_s[0]) / knapsack.CELLS)
    less_busy_s = busy_s and [min(busy_s[0], shorter_s)]
    least_s = value_s(knapsack.exact(weights_s[:1], shorter_s, ready_s, less_busy_s), weights_s)
    assert least_s - 1e-9 <= value_s(placement, weights_s) <= best_s + 1e-9


@pytest.mark.parametrize("links", [1, 2, 3])
@pytest.mark.parametrize("count", [15, 40, 200])
def test_many_messages(count, links):
    rng = np.random.default_rng(count)
    own_s = rng.uniform(0.1, 1.0, count)
    weights_s = [list(own_s * mu) for mu in (1.0, 1.65, 3.0)[:links]]
    window_s = float(own_s.sum()) / 4
    ready_s = list(np.sort(rng.uniform(0, window_s, count)))
    for problem in ((weights_s, window_s, None, None), (weights_s, window_s, ready_s, None)):
        placement = knapsack.exact(*problem)
        assert_feasible(placement, *problem)
        least_s = value_s(knapsack.greedy(*problem), weights_s)
        assert value_s(placement, weights_s) >= least_s
    full_s = window_s * sum(1 / mu for mu in (1.0, 1.65, 3.0)[:links])
    sent_s = value_s(knapsack.exact(weights_s, window_s), weights_s)
    assert sent_s >= full_s * (0.97 if count == 15 else 0.999)


def test_everything_is_placed_so_that_it_ends_early():
    weights_s = [[4.0, 3.0, 3.0, 2.0], [4.0, 3.0, 3.0, 2.0]]
    for count in (4, 20):
        rows = [row * (count // 4) for row in weights_s]
        placement = knapsack.exact(rows, 100.0)
        assert [sum(rows[0][i] for i in messages) for messages in placement] == [
            sum(rows[0]) / 2
        ] * 2


def test_what_takes_no_time_is_always_sent():
    assert knapsack.exact([[0.0, 5.0, 0.0]], 1.0, [0.5, 0.0, 1.0]) == ((0, 2),)
    assert knapsack.greedy([[0.0, 5.0]], 0.0) == ((0,),)
    assert knapsack.exact([[]], 1.0) == ((),)


def test_greedy_takes_the_slow_link_and_the_long_messages_first():
    """The long message on the slow link, where it fits just so, and nothing besides."""
    assert knapsack.greedy([[5.0, 3.0, 3.0], [10.0, 6.0, 6.0]], 10.0) == ((1, 2), (0,))


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (([], 1.0), r"weights_s \(\[\]\) must hold at least one link"),
        (([[1.0]], -1.0), r"window_s \(-1\) must be finite and at least 0"),
        (([[1.0], [2.0, 3.0]], 1.0), r"weights_s\[1\] \(2 values\) must be as long as ready_s"),
        (([[1.0, -2.0]], 1.0), r"weights_s\[0\]\[1\] \(-2\) must be finite and at least 0"),
        (([[1.0]], 1.0, [0.0], [0.0, 0.0]), r"busy_s \(2 values\) must have one value per link"),
        (([[1.0]], 1.0, None, [2.0]), r"busy_s \(2\) must be at most window_s \(1\)"),
    ],
)
def test_problems_that_make_no_sense(arguments, text):
    for solve in (knapsack.exact, knapsack.greedy):
        with pytest.raises(ValueError, match=text):
            solve(*arguments)
