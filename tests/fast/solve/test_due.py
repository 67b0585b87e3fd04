"""Sets and orders of messages due at the next forward, compared with all there are."""

import random
from itertools import combinations, permutations, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.strategies.solvers.due import Cycle, bound_s, due_sets, greedy, refill


def cycle_of(forward_s, backward_s, message_s, other_s=0.0):
    """A cycle from the times of buckets."""
    ready_s = [forward_s[0] + sum(backward_s[: i + 1]) for i in range(len(backward_s))]
    left_s = [sum(forward_s[1 : i + 1]) for i in range(len(forward_s))]
    return Cycle(ready_s, message_s, left_s, other_s + sum(forward_s) + sum(backward_s))


def random_cycle(rng, buckets):
    forward_s = [rng.choice([0.0, rng.random(), rng.random()]) for _ in range(buckets)]
    backward_s = [2 * f * rng.uniform(0.5, 1.5) for f in forward_s]
    scale = rng.choice([0.3, 1, 2, 4])
    message_s = [rng.random() ** 2 * scale for _ in range(buckets)]
    return cycle_of(forward_s, backward_s, message_s, rng.choice([0.0, 0.1]))


def walked(cycle_s, order, forward_s, backward_s, message_s):
    """The same by hand: forward by forward, in the cycle that follows a backward."""
    landed, now_s = {}, 0.0
    ready_s = forward_s[0]
    ready = []
    for b in backward_s:
        ready_s += b
        ready.append(ready_s)
    for i in order:
        now_s = max(now_s, ready[i]) + message_s[i]
        landed[i] = now_s
    now_s = ready_s + cycle_s
    for b in reversed(range(1, len(forward_s))):
        now_s = max(now_s, landed.get(b, 0.0)) + forward_s[b]
    return max(now_s, landed.get(0, 0.0))


def cheapest(cycle):
    """Of every set: the least seconds over all its orders."""
    everything = range(len(cycle.ready_s))
    return {
        members: min(map(cycle.seconds, permutations(members)))
        for size in range(len(everything) + 1)
        for members in combinations(everything, size)
    }


RANDOM = [random.Random(seed) for seed in range(60)]
CASES = [(random_cycle(rng, rng.randint(1, 6)), rng.randint(1, 3)) for rng in RANDOM]


@pytest.mark.parametrize("seed", range(20))
def test_a_cycle_takes_what_walking_it_takes(seed):
    rng = random.Random(seed)
    n = rng.randint(1, 6)
    forward_s, backward_s, message_s = ([rng.random() for _ in range(n)] for _ in range(3))
    order = rng.sample(range(n), rng.randint(0, n))
    walked_s = walked(0.3, order, forward_s, backward_s, message_s)
    assert cycle_of(forward_s, backward_s, message_s, 0.3).seconds(order) == pytest.approx(walked_s)


def test_orders_are_the_best_of_all():
    better = 0
    for cycle, _ in CASES:
        for members, least_s in cheapest(cycle).items():
            found_s, order = cycle.best(members)
            assert sorted(order) == list(members)
            assert found_s == pytest.approx(least_s)
            better += found_s < cycle.seconds(members) * (1 - 1e-9)
    assert better > 100  # first in, first out is not


def test_sets_are_the_best_of_all_and_the_bound_holds():
    climbed = bounded = 0
    for cycle, period in CASES:
        size, least_of = len(cycle.ready_s), cheapest(cycle)
        least_s = min(
            sum(least_of[tuple(i for i in range(size) if at[i] == h)] for h in range(period))
            for at in product(range(period), repeat=size)
        )
        orders = due_sets(cycle, period)
        assert sorted(i for order in orders for i in order) == list(range(size))
        found_s = sum(map(cycle.seconds, orders))
        assert found_s == pytest.approx(least_s)
        at_once = due_sets(cycle, period, [[range(size), *[()] * (period - 1)]])
        assert sum(map(cycle.seconds, at_once)) <= found_s * (1 + 1e-9)
        assert bound_s(cycle, period) * period <= least_s * (1 + 1e-9)
        first_s = sum(cycle.best(members)[0] for members in greedy(cycle, period))
        climbed += found_s < first_s * (1 - 1e-9)
        bounded += bound_s(cycle, period) > cycle.least_s * (1 + 1e-9)
    assert climbed > 1
    assert bounded > 10


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 4))
def test_fine_slices_reach_the_bound(seed, period):
    """One share of each message in every cycle, in many small ones, most urgent first."""
    whole = random_cycle(random.Random(seed), 4)
    parts = 64
    fine = Cycle(
        [r for r in whole.ready_s for _ in range(parts)],
        [c / period / parts for c in whole.message_s for _ in range(parts)],
        [q for q in whole.left_s for _ in range(parts)],
        whole.least_s,
    )
    limit_s = bound_s(whole, period)
    found_s, _ = fine.best(range(4 * parts))
    assert limit_s * (1 - 1e-9) <= found_s <= limit_s + 4 * max(fine.message_s) + 1e-9


def test_filling_costs_nothing():
    filled_some = 0
    for cycle, period in CASES:
        orders = due_sets(cycle, period)
        for order, more in zip(orders, refill(cycle, orders), strict=True):
            assert not set(order) & set(more)
            assert order or not more
            assert cycle.best((*order, *more))[0] <= cycle.seconds(order) * (1 + 1e-9)
            others = [i for i in range(len(cycle.ready_s)) if i not in order]
            if order and len(more) < len(others):
                longer = (*order, *others[: len(more) + 1])
                assert cycle.best(longer)[0] > cycle.seconds(order)
            filled_some += bool(more)
    assert filled_some > 10
