"""Sets and orders of messages due at the next forward, compared with all there are."""

import random
from itertools import combinations, permutations, product

import pytest
from harness.parts import Cycle, balanced, best_order, exchanged
from hypothesis import given, settings
from hypothesis import strategies as st


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
    everything = range(len(cycle))
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


def test_orders_are_the_best_of_all_and_no_shorter_than_the_cost():
    better = 0
    for cycle, _ in CASES:
        for members, least_s in cheapest(cycle).items():
            order = best_order(cycle, members)
            assert sorted(order) == list(members)
            assert cycle.seconds(order) == pytest.approx(least_s)
            assert cycle.cost(members) <= least_s * (1 + 1e-9)
            better += least_s < cycle.seconds(members) * (1 - 1e-9)
    assert better > 100  # first in, first out is not


def test_exchanges_rarely_miss_the_best_of_all_sets_and_the_bound_holds():
    missed = exchanges = bounded = 0
    for cycle, period in CASES:
        size, least_of = len(cycle), cheapest(cycle)
        least_s = min(
            sum(least_of[tuple(i for i in range(size) if at[i] == h)] for h in range(period))
            for at in product(range(period), repeat=size)
        )
        first = [best_order(cycle, members) for members in balanced(cycle, period)]
        orders = exchanged(cycle, first)
        assert sorted(i for order in orders for i in order) == list(range(size))
        first_s, found_s = (sum(map(cycle.seconds, one)) for one in (first, orders))
        assert least_s * (1 - 1e-9) <= found_s <= first_s * (1 + 1e-9)
        assert cycle.bound(period) * period <= least_s * (1 + 1e-9)
        missed += found_s > least_s * (1 + 1e-9)
        exchanges += found_s < first_s * (1 - 1e-9)
        bounded += cycle.bound(period) > cycle.least * (1 + 1e-9)
    assert missed <= 3
    assert exchanges > 1
    assert bounded > 10


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 4))
def test_fine_slices_reach_the_bound(seed, period):
    """One share of each message in every cycle, in many small ones, most urgent first."""
    whole = random_cycle(random.Random(seed), 4)
    parts = 64
    fine = Cycle(
        [r for r in whole.ready for _ in range(parts)],
        [c / period / parts for c in whole.message for _ in range(parts)],
        [q for q in whole.tail for _ in range(parts)],
        whole.least,
    )
    limit_s = whole.bound(period)
    found_s = fine.seconds(best_order(fine, range(4 * parts)))
    assert limit_s * (1 - 1e-9) <= found_s <= limit_s + 4 * max(fine.message) + 1e-9
