"""Layer sets: every solver against enumeration, ties and zeros included."""

import random
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import solve as reference

from offbeat.strategies.solvers import layer_sets as partition
from offbeat.strategies.solvers.layer_sets import Sets

SOLVERS = [
    partition.dfs,
    partition.brute_force,
    partition.optimal,
    partition.balanced,
    partition.equal_number,
    partition.best,
]
CONTIGUOUS = [partition.dfs, partition.brute_force, partition.optimal]

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


def equal_s(value: float, expected: float, exact: bool) -> bool:
    return value == expected if exact else value == pytest.approx(expected, rel=1e-12, abs=1e-15)


def is_partition(sets: Sets, count: int, period: int) -> bool:
    ascending = all(list(members) == sorted(members) for members in sets)
    return len(sets) == period and ascending and sorted(sum(sets, ())) == list(range(count))


def test_finish_equals_the_event_simulation():
    rng = random.Random(1)
    for durations_s, comm_s, _, _ in profiles(2000, 10, 1, seed=2):
        ready_s = [sum(durations_s[: i + 1]) for i in range(len(durations_s))]
        members = [i for i in range(len(ready_s)) if rng.random() < 0.6]
        expected_s = reference.set_finish(members, ready_s, comm_s)
        assert partition.finish(members, ready_s, comm_s) == expected_s
        assert partition.cost(members, ready_s, comm_s) == max(ready_s[-1], expected_s)


def test_contiguous_solvers_equal_enumeration():
    for durations_s, comm_s, period, exact in profiles(4200, 9, 4, seed=3):
        expected_s = reference.best_contiguous_cost(durations_s, comm_s, period)
        for solve in CONTIGUOUS:
            sets = solve(durations_s, comm_s, period)
            assert is_partition(sets, len(comm_s), period)
            assert sum(sets, ()) == tuple(range(len(comm_s))), "not contiguous"
            if solve is not partition.brute_force:  # at-least-one assignment
                assert not any(a == () != b for a, b in pairwise(sets)), "empty before a full one"
            cost_s = partition.period_cost(sets, durations_s, comm_s)
            assert cost_s == pytest.approx(reference.sets_cost(sets, durations_s, comm_s))
            assert equal_s(cost_s, expected_s, exact), (solve, durations_s, comm_s, period)


def test_optimal_equals_dynamic_programming_on_more_buckets():
    for durations_s, comm_s, period, exact in profiles(140, 40, 8, seed=4):
        sets = partition.optimal(durations_s, comm_s, period)
        cost_s = partition.period_cost(sets, durations_s, comm_s)
        expected_s = reference.best_contiguous_cost_dp(durations_s, comm_s, period)
        assert equal_s(cost_s, expected_s, exact), (durations_s, comm_s, period)


def test_balanced_equals_its_slow_twin():
    for durations_s, comm_s, period, exact in profiles(1400, 12, 5, seed=5):
        sets = partition.balanced(durations_s, comm_s, period)
        assert is_partition(sets, len(comm_s), period)
        if exact:  # otherwise rounding may decide ties differently
            slow = reference.balanced_sets(durations_s, comm_s, period)
            assert sets == tuple(map(tuple, slow)), (durations_s, comm_s, period)


def test_balanced_equals_its_slow_twin_on_more_buckets():
    for durations_s, comm_s, period, exact in profiles(28, 40, 9, seed=9):
        for communication_s in (comm_s, [4 * c for c in comm_s]):
            sets = partition.balanced(durations_s, communication_s, period)
            slow = reference.balanced_sets(durations_s, communication_s, period)
            cost_s = partition.period_cost(sets, durations_s, communication_s)
            expected_s = partition.period_cost(slow, durations_s, communication_s)
            assert equal_s(cost_s, expected_s, exact)


def test_no_method_beats_all_assignments_and_balanced_rarely_misses_them():
    missed, number = 0, 420
    for durations_s, comm_s, period, _ in profiles(number, 6, 3, seed=6):
        least_s = reference.best_assignment_cost(durations_s, comm_s, period)
        for solve in SOLVERS:
            cost_s = partition.period_cost(solve(durations_s, comm_s, period), durations_s, comm_s)
            assert cost_s >= least_s * (1 - 1e-12)
            missed += solve is partition.balanced and cost_s > least_s * (1 + 1e-9)
    assert missed <= 0.02 * number


def test_best_is_the_cheaper_one_and_prefers_contiguous_sets():
    won_by_balanced = 0
    for durations_s, comm_s, period, _ in profiles(700, 20, 6, seed=7):
        contiguous = partition.optimal(durations_s, comm_s, period)
        scattered = partition.balanced(durations_s, comm_s, period)
        chosen = partition.best(durations_s, comm_s, period)
        cost_s = {
            sets: partition.period_cost(sets, durations_s, comm_s)
            for sets in (contiguous, scattered, chosen)
        }
        assert cost_s[chosen] <= min(cost_s.values()) * (1 + 1e-12)
        if cost_s[contiguous] <= cost_s[scattered]:
            assert chosen == contiguous
        won_by_balanced += chosen != contiguous
    assert won_by_balanced > 100


def test_sets_that_are_not_contiguous_can_win():
    # Bucket 1's message fills one backward exactly; 0, 2 and 3 share the other and end at 3 of 2.
    durations_s, comm_s = [0.0, 0.0, 1.0, 1.0], [1.0, 2.0, 1.0, 1.0]
    contiguous = partition.optimal(durations_s, comm_s, 2)
    assert partition.period_cost(contiguous, durations_s, comm_s) == 6.0
    sets = partition.best(durations_s, comm_s, 2)
    assert sets == ((0, 2, 3), (1,))
    assert partition.period_cost(sets, durations_s, comm_s) == 5.0


def test_equal_number_rounds_up():
    ones_s = [1.0] * 7
    assert partition.equal_number(ones_s, ones_s, 3) == ((0, 1, 2), (3, 4, 5), (6,))
    assert partition.equal_number(ones_s[:4], ones_s[:4], 3) == ((0, 1), (2, 3), ())
    assert partition.equal_number(ones_s[:2], ones_s[:2], 3) == ((0,), (1,), ())


def test_hidden_communication_costs_nothing_but_the_last_message():
    durations_s, comm_s = [2.0] * 6, [0.5] * 6
    for solve in SOLVERS:
        sets = solve(durations_s, comm_s, 3)
        assert partition.period_cost(sets, durations_s, comm_s) == 3 * 12.0 + 0.5


@pytest.mark.parametrize("solve", SOLVERS)
def test_edges(solve):
    assert solve([], [], 1) == ((),)
    assert solve([], [], 3) == ((), (), ())
    assert solve([1.0], [2.0], 1) == ((0,),)
    assert solve([0.0, 0.0], [0.0, 0.0], 1) == ((0, 1),)
    assert is_partition(solve([1.0], [2.0], 3), 1, 3)
    assert is_partition(solve([1.0, 2.0], [2.0, 1.0], 5), 2, 5)
    assert partition.period_cost(solve([], [], 3), [], []) == 0.0


def test_many_buckets_do_not_exhaust_the_stack():
    durations_s, comm_s = [1.0, 2.0] * 2500, [3.0, 1.0, 0.0, 8.0] * 1250
    sets = partition.optimal(durations_s, comm_s, 20)
    assert is_partition(sets, 5000, 20)
    assert is_partition(partition.dfs(durations_s, comm_s, 3), 5000, 3)


def test_fill_bubbles_equals_trying_every_prefix():
    filled = 0
    for durations_s, comm_s, period, _ in profiles(1400, 10, 4, seed=8):
        for solve in (partition.optimal, partition.balanced, partition.equal_number):
            sets = solve(durations_s, comm_s, period)
            extra = partition.fill_bubbles(sets, durations_s, comm_s)
            slow = [reference.free_prefix(members, durations_s, comm_s) for members in sets]
            assert extra == tuple(map(tuple, slow))
            assert not any(set(a) & set(b) for a, b in zip(sets, extra, strict=True))
            union = [sorted(a + b) for a, b in zip(sets, extra, strict=True)]
            assert partition.period_cost(union, durations_s, comm_s) == partition.period_cost(
                sets, durations_s, comm_s
            )
            filled += sum(map(len, extra))
    assert filled > 3_000


def test_fill_bubbles_by_hand():
    # The last iteration hides buckets 0 and 1 (ends at 3 of 4); bucket 2 would end at 5. The empty
    # one stays empty.
    sets = ((0, 1, 2), (), (3,))
    durations_s, comm_s = [1.0] * 4, [1.0, 1.0, 2.0, 1.0]
    assert partition.fill_bubbles(sets, durations_s, comm_s) == ((), (), (0, 1))
    assert partition.fill_bubbles(((), ()), [], []) == ((), ())


times_s = st.floats(0, 1e3).map(lambda x: round(x, 3))
problems = st.tuples(st.lists(st.tuples(times_s, times_s), max_size=12), st.integers(1, 5)).map(
    lambda p: ([b for b, _ in p[0]], [c for _, c in p[0]], p[1])
)


@settings(max_examples=150, deadline=None)
@given(problems)
def test_doubling_all_times_changes_no_sets(problem):
    durations_s, comm_s, period = problem
    for solve in (partition.dfs, partition.optimal, partition.balanced, partition.best):
        doubled = solve([2 * b for b in durations_s], [2 * c for c in comm_s], period)
        assert doubled == solve(durations_s, comm_s, period)


@settings(max_examples=150, deadline=None)
@given(problems)
def test_costs_are_ordered_and_bounded(problem):
    durations_s, comm_s, period = problem

    def cost_s(solve) -> float:
        return partition.period_cost(solve(durations_s, comm_s, period), durations_s, comm_s)

    slack = 1 + 1e-9
    assert period * sum(durations_s) <= cost_s(partition.best) * slack
    assert cost_s(partition.best) <= cost_s(partition.optimal) * slack
    assert cost_s(partition.best) <= cost_s(partition.balanced) * slack
    assert cost_s(partition.optimal) <= cost_s(partition.equal_number) * slack
    assert cost_s(partition.equal_number) <= (period * sum(durations_s) + sum(comm_s)) * slack


@settings(max_examples=100, deadline=None)
@given(problems)
def test_one_more_iteration_costs_at_most_one_more_backward(problem):
    durations_s, comm_s, period = problem
    shorter = partition.optimal(durations_s, comm_s, period)
    longer = partition.optimal(durations_s, comm_s, period + 1)
    limit_s = partition.period_cost(shorter, durations_s, comm_s) + sum(durations_s)
    assert partition.period_cost(longer, durations_s, comm_s) <= limit_s * (1 + 1e-9)


@pytest.mark.parametrize("solve", SOLVERS)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ([1.0], [1.0], 0),
            "period (0) must be at least 1; use BSP() to synchronize in every iteration",
        ),
        (
            ([1.0, 2.0], [1.0], 2),
            "communication_s (1 values) must be as long as backward_s (2 values); "
            "give one value per bucket",
        ),
        (
            ([1.0, -2.0], [1.0, 1.0], 2),
            "backward_s[1] (-2) must be finite and at least 0; measure it again",
        ),
        (
            ([1.0, 2.0], [float("nan"), 1.0], 2),
            "communication_s[0] (nan) must be finite and at least 0; measure it again",
        ),
        (
            ([float("inf")], [1.0], 2),
            "backward_s[0] (inf) must be finite and at least 0; measure it again",
        ),
    ],
)
def test_errors_name_the_parameter_and_the_remedy(solve, arguments, message):
    with pytest.raises(ValueError) as error:
        solve(*arguments)
    assert str(error.value) == message


@pytest.mark.parametrize("members", [(1, 0), (0, 0), (2,), (-1,)])
@pytest.mark.parametrize("function", [partition.period_cost, partition.fill_bubbles])
def test_sets_must_ascend_and_exist(function, members):
    with pytest.raises(ValueError) as error:
        function(((0,), members), [1.0, 1.0], [1.0, 1.0])
    assert str(error.value) == (
        f"sets[1] ({members}) must hold ascending bucket indices below 2; "
        "sort it and remove what is repeated or unknown"
    )


def test_importing_the_solvers_does_not_import_torch():
    code = "import sys, offbeat.strategies.solvers; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
