"""Layer sets: the solvers against enumeration, ties and zeros included."""

import random
from collections.abc import Iterator
from itertools import accumulate, pairwise

import pytest
from harness.parts import Cycle, algorithm_2, balanced, cheaper_sets, fill
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import solve as reference

SOLVERS = [algorithm_2, balanced, cheaper_sets]

Sets = tuple[tuple[int, ...], ...]
Profile = tuple[list[float], list[float]]


def draw(kind: int, count: int, rng: random.Random) -> Profile:
    """A profile; the kinds from 3 on have whole numbers, so that sums are exact and tie."""
    if kind == 0:
        return [rng.random() for _ in range(count)], [rng.random() for _ in range(count)]
    if kind == 1:
        ratio = rng.choice([0.3, 1.0, 3.0, 10.0])
        durations_s = [rng.expovariate(1.0) for _ in range(count)]
        return durations_s, [ratio * rng.expovariate(1.0) for _ in range(count)]
    if kind == 2:  # multiples of 0.1 tie on paper and differ by rounding
        return (
            [rng.randrange(4) / 10 for _ in range(count)],
            [rng.randrange(6) / 10 for _ in range(count)],
        )
    if kind == 3:
        return (
            [float(rng.randrange(4)) for _ in range(count)],
            [float(rng.randrange(6)) for _ in range(count)],
        )
    if kind == 4:  # equal buckets
        return [float(rng.randrange(3))] * count, [float(rng.randrange(4))] * count
    if kind == 5:  # one side is zero
        times_s = [float(rng.randrange(4)) for _ in range(count)]
        zeros_s = [0.0] * count
        return (times_s, zeros_s) if rng.random() < 0.5 else (zeros_s, times_s)
    # a few large messages among many that are free
    large_s = [float(rng.choice([0, 0, 0, 1, 20])) for _ in range(count)]
    return [float(rng.choice([0, 1, 2])) for _ in range(count)], large_s


KINDS = range(7)


def profiles(
    number: int, most_buckets: int, most_period: int, seed: int
) -> Iterator[tuple[list[float], list[float], int, bool]]:
    """Backward times, communication times, period, and whether sums of them are exact."""
    rng = random.Random(seed)
    for n in range(number):
        kind = n % len(KINDS)
        durations_s, comm_s = draw(kind, rng.randint(1, most_buckets), rng)
        yield durations_s, comm_s, rng.randint(1, most_period), kind >= 3


def cycle_of(durations_s: list[float], comm_s: list[float]) -> Cycle:
    """Backward alone: messages are due when it ends."""
    ready_s = list(accumulate(durations_s))
    return Cycle(ready_s, comm_s, [0.0] * len(comm_s), ready_s[-1] if ready_s else 0.0)


def period_cost(sets: Sets, cycle: Cycle) -> float:
    return sum(map(cycle.cost, sets))


def equal_s(value: float, expected: float, exact: bool) -> bool:
    return value == expected if exact else value == pytest.approx(expected, rel=1e-12, abs=1e-15)


def is_partition(sets: Sets, count: int, period: int) -> bool:
    ascending = all(list(members) == sorted(members) for members in sets)
    return len(sets) == period and ascending and sorted(sum(sets, ())) == list(range(count))


def test_the_cost_of_a_set_equals_the_event_simulation():
    rng = random.Random(1)
    for durations_s, comm_s, _, _ in profiles(2000, 10, 1, seed=2):
        cycle = cycle_of(durations_s, comm_s)
        members = [i for i in range(len(comm_s)) if rng.random() < 0.6]
        expected_s = max(cycle.least, reference.set_finish(members, cycle.ready, comm_s))
        assert cycle.seconds(members) == expected_s
        assert cycle.cost(members) == pytest.approx(expected_s, rel=1e-12)


def test_algorithm_2_equals_enumeration():
    for durations_s, comm_s, period, exact in profiles(2100, 9, 4, seed=3):
        cycle = cycle_of(durations_s, comm_s)
        sets = algorithm_2(cycle, period)
        assert is_partition(sets, len(comm_s), period)
        assert sum(sets, ()) == tuple(range(len(comm_s))), "not contiguous"
        assert not any(a == () != b for a, b in pairwise(sets)), "empty before a full one"
        expected_s = reference.best_contiguous_cost(durations_s, comm_s, period)
        assert equal_s(period_cost(sets, cycle), expected_s, exact), (durations_s, comm_s, period)


def test_algorithm_2_equals_dynamic_programming_on_more_buckets():
    for durations_s, comm_s, period, exact in profiles(140, 40, 8, seed=4):
        cycle = cycle_of(durations_s, comm_s)
        cost_s = period_cost(algorithm_2(cycle, period), cycle)
        expected_s = reference.best_contiguous_cost_dp(durations_s, comm_s, period)
        assert equal_s(cost_s, expected_s, exact), (durations_s, comm_s, period)


def test_balanced_equals_its_slow_twin():
    for durations_s, comm_s, period, exact in profiles(1400, 12, 5, seed=5):
        sets = balanced(cycle_of(durations_s, comm_s), period)
        assert is_partition(sets, len(comm_s), period)
        if exact:  # otherwise rounding may decide ties differently
            slow = reference.balanced_sets(durations_s, comm_s, period)
            assert sets == tuple(map(tuple, slow)), (durations_s, comm_s, period)


def test_balanced_continues_given_sets():
    cycle = cycle_of([1.0] * 6, [2.0, 1.0, 1.0, 1.0, 1.0, 2.0])
    sets = balanced(cycle, 2, ((0, 3), (1,)))
    assert is_partition(sets, 6, 2)
    assert {0, 3} <= {*sets[0]}
    assert 1 in sets[1]


def test_no_method_beats_all_assignments_and_balanced_rarely_misses_them():
    missed, number = 0, 420
    for durations_s, comm_s, period, _ in profiles(number, 6, 3, seed=6):
        cycle = cycle_of(durations_s, comm_s)
        least_s = reference.best_assignment_cost(durations_s, comm_s, period)
        assert cycle.bound(period) * period <= least_s * (1 + 1e-12)
        for solve in SOLVERS:
            cost_s = period_cost(solve(cycle, period), cycle)
            assert cost_s >= least_s * (1 - 1e-12)
            missed += solve is balanced and cost_s > least_s * (1 + 1e-9)
    assert missed <= 0.02 * number


def test_the_cheaper_sets_prefer_neighbours():
    won_by_balanced = 0
    for durations_s, comm_s, period, _ in profiles(700, 20, 6, seed=7):
        cycle = cycle_of(durations_s, comm_s)
        contiguous, scattered = algorithm_2(cycle, period), balanced(cycle, period)
        chosen = cheaper_sets(cycle, period)
        costs_s = [period_cost(sets, cycle) for sets in (contiguous, scattered)]
        assert period_cost(chosen, cycle) <= min(costs_s) * (1 + 1e-12)
        if costs_s[0] <= costs_s[1]:
            assert chosen == contiguous
        won_by_balanced += chosen != contiguous
    assert won_by_balanced > 100


def test_sets_that_are_not_contiguous_can_win():
    # Bucket 1's message fills one backward exactly; 0, 2 and 3 share the other and end at 3 of 2.
    cycle = cycle_of([0.0, 0.0, 1.0, 1.0], [1.0, 2.0, 1.0, 1.0])
    assert period_cost(algorithm_2(cycle, 2), cycle) == 6.0
    sets = cheaper_sets(cycle, 2)
    assert sets == ((0, 2, 3), (1,))
    assert period_cost(sets, cycle) == 5.0


def test_hidden_communication_costs_nothing_but_the_last_message():
    cycle = cycle_of([2.0] * 6, [0.5] * 6)
    for solve in SOLVERS:
        assert period_cost(solve(cycle, 3), cycle) == 3 * 12.0 + 0.5


@pytest.mark.parametrize("solve", SOLVERS)
def test_edges(solve):
    assert solve(cycle_of([1.0], [2.0]), 1) == ((0,),)
    assert solve(cycle_of([0.0, 0.0], [0.0, 0.0]), 1) == ((0, 1),)
    assert is_partition(solve(cycle_of([1.0], [2.0]), 3), 1, 3)
    assert is_partition(solve(cycle_of([1.0, 2.0], [2.0, 1.0]), 5), 2, 5)


def test_many_buckets_and_sets_do_not_exhaust_the_stack():
    cycle = cycle_of([1.0, 2.0] * 2500, [3.0, 1.0, 0.0, 8.0] * 1250)
    assert is_partition(algorithm_2(cycle, 20), 5000, 20)
    assert is_partition(algorithm_2(cycle_of([1.0] * 1500, [9.0] * 1500), 1500), 1500, 1500)


def test_fill_equals_trying_every_prefix():
    filled = 0
    for durations_s, comm_s, period, exact in profiles(1400, 10, 4, seed=8):
        cycle = cycle_of(durations_s, comm_s)
        for solve in (algorithm_2, balanced):
            sets = solve(cycle, period)
            extra = fill(cycle, sets)
            slow = [reference.free_prefix(members, durations_s, comm_s) for members in sets]
            if exact:  # otherwise rounding may decide whether a message fits
                assert extra == tuple(map(tuple, slow))
            assert not any(set(a) & set(b) for a, b in zip(sets, extra, strict=True))
            union = tuple(tuple(sorted(a + b)) for a, b in zip(sets, extra, strict=True))
            assert equal_s(period_cost(union, cycle), period_cost(sets, cycle), exact)
            filled += sum(map(len, extra))
    assert filled > 2_000


def test_fill_by_hand():
    # The last iteration hides buckets 0 and 1 (ends at 3 of 4); bucket 2 would end at 5. The empty
    # one stays empty.
    cycle = cycle_of([1.0] * 4, [1.0, 1.0, 2.0, 1.0])
    assert fill(cycle, ((0, 1, 2), (), (3,))) == ((), (), (0, 1))


times_s = st.floats(0, 1e3).map(lambda x: round(x, 3))
problems = st.tuples(
    st.lists(st.tuples(times_s, times_s), min_size=1, max_size=12), st.integers(1, 5)
).map(lambda p: (cycle_of([b for b, _ in p[0]], [c for _, c in p[0]]), p[1]))


@settings(max_examples=150, deadline=None)
@given(problems)
def test_doubling_all_times_changes_no_sets(problem):
    cycle, period = problem
    ready_s, message_s = ([2 * s for s in times] for times in (cycle.ready, cycle.message))
    twice = Cycle(ready_s, message_s, cycle.tail, 2 * cycle.least)
    for solve in SOLVERS:
        assert solve(twice, period) == solve(cycle, period)


@settings(max_examples=150, deadline=None)
@given(problems)
def test_costs_are_ordered_and_bounded(problem):
    cycle, period = problem
    best_s, contiguous_s = (period_cost(f(cycle, period), cycle) for f in SOLVERS[::-2])
    slack = 1 + 1e-9
    assert period * cycle.bound(period) <= best_s * slack
    assert best_s <= contiguous_s * slack
    assert contiguous_s <= (period * cycle.least + sum(cycle.message)) * slack
    limit_s = (contiguous_s + cycle.least) * slack
    assert period_cost(algorithm_2(cycle, period + 1), cycle) <= limit_s
