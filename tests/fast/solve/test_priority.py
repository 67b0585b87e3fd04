"""Priority schedules: orders against event loops, enumeration and hand-made cases."""

import random
from collections.abc import Iterator
from itertools import accumulate, pairwise, permutations

import pytest

from offbeat.strategies.solvers import (
    Compute,
    Slice,
    improved,
    iteration_s,
    priority_order,
    simultaneous_fusion,
    unit_runs,
)


def problems(number: int, most_slices: int, seed: int) -> Iterator[tuple[list[Slice], Compute]]:
    """Slices in random order and the compute beside them; small integers, so sums are exact."""
    rng = random.Random(seed)
    for _ in range(number):
        count = rng.randint(1, 5)
        compute = Compute(
            list(accumulate(rng.randint(0, 4) for _ in range(count))),
            [rng.randint(0, 4) for _ in range(count)],
            rng.randint(0, 3),
        )
        slices = [
            Slice(rng.randrange(count), rng.randint(0, 5), rng.randint(1, 4))
            for _ in range(rng.randint(1, most_slices))
        ]
        yield slices, compute


def event_loop(order: list[Slice], compute: Compute) -> float:
    free_s, landed_s = 0.0, dict.fromkeys(range(len(compute.ready_s)), 0.0)
    for bucket, seconds, _ in order:
        free_s = max(free_s, compute.ready_s[bucket]) + seconds
        landed_s[bucket] = free_s
    now_s = compute.ready_s[-1] + compute.other_s
    for bucket in reversed(range(len(compute.ready_s))):
        now_s = max(now_s, landed_s[bucket]) + compute.forward_s[bucket]
    return now_s


def ticking_queue(slices: list[Slice], compute: Compute, credit_bytes: int) -> list[int]:
    """The queue, second by second; times are whole seconds."""
    unsent, flight, order, free_s, now_s = set(range(len(slices))), [], [], 0, 0
    while unsent:
        flight = [(end_s, size) for end_s, size in flight if end_s > now_s]
        ready = [i for i in unsent if compute.ready_s[slices[i].bucket] <= now_s]
        if ready and sum(size for _, size in flight) < credit_bytes:
            i = min(ready, key=lambda i: (-slices[i].bucket, i))
            unsent.remove(i)
            order.append(i)
            free_s = max(free_s, now_s) + slices[i].seconds
            flight.append((free_s, slices[i].size_bytes))
        else:
            now_s += 1
    return order


def test_an_iteration_equals_the_event_loop():
    for slices, compute in problems(1000, 12, seed=1):
        assert iteration_s(slices, compute) == event_loop(slices, compute)


def test_an_iteration_without_messages_is_compute():
    assert iteration_s([], Compute([1, 3], [2, 2], 0.5)) == 3 + 0.5 + 4
    assert iteration_s([], Compute([], [], 0.5)) == 0.5


def test_no_order_beats_compute_or_communication():
    for slices, compute in problems(60, 6, seed=2):
        fastest_s = min(iteration_s(order, compute) for order in permutations(slices))
        compute_s = compute.ready_s[-1] + compute.other_s + sum(compute.forward_s)
        first_s = min(compute.ready_s[s.bucket] for s in slices)
        assert fastest_s >= max(compute_s, first_s + sum(s.seconds for s in slices))


def test_priority_is_optimal_for_equal_slices_one_at_a_time():
    for slices, compute in problems(60, 6, seed=3):
        equal = [s._replace(seconds=1) for s in slices]
        order = [equal[i] for i in priority_order(equal, compute.ready_s, 1)]
        assert iteration_s(order, compute) == min(
            iteration_s(other, compute) for other in permutations(equal)
        )


def test_priority_equals_the_ticking_queue():
    rng = random.Random(4)
    for slices, compute in problems(1000, 12, seed=5):
        credit_bytes = rng.randint(1, 8)
        order = priority_order(slices, compute.ready_s, credit_bytes)
        assert order == ticking_queue(slices, compute, credit_bytes)


def test_priority_by_hand():
    # Bucket 1 is ready at 2, when one of the four slices of bucket 0 has left.
    slices = [Slice(0, 2.0, 10)] * 4 + [Slice(1, 1.0, 10)] * 2
    assert priority_order(slices, [0.0, 2.0], credit_bytes=1) == [0, 4, 5, 1, 2, 3]
    # With 20 bytes of credit two slices are under way and a third follows when the first lands;
    # gradient 1 exists by then and comes first.
    assert priority_order(slices, [0.0, 2.0], credit_bytes=20) == [0, 1, 4, 5, 2, 3]
    # 21 bytes let a third slice in before: credit may be overdrawn, never taken back.
    assert priority_order(slices, [0.0, 2.0], credit_bytes=21) == [0, 1, 2, 4, 5, 3]
    assert priority_order(slices, [0.0, 2.0], credit_bytes=1000) == [0, 1, 2, 3, 4, 5]


def test_one_at_a_time_is_preemption_between_slices():
    compute = Compute([0.0, 2.0], [1.0, 5.0])
    slices = [Slice(0, 2.0)] * 4 + [Slice(1, 2.0)]
    first_in_first_out = iteration_s(slices, compute)
    order = [slices[i] for i in priority_order(slices, compute.ready_s, 1)]
    assert (first_in_first_out, iteration_s(order, compute)) == (10 + 5 + 1, 10 + 1)


def test_two_messages_at_once_by_hand():
    # 0 starts at 1 alone, 1 at 2 beside it: 2 s of 0 are left and take 3 s at two thirds. Then 1
    # has 1 s left and the link to itself. 2, ready at 3, waits for channel 0 until 5 and 3 joins.
    groups, ends_s = simultaneous_fusion([1, 2, 3, 4], lambda g: 3.0 * len(g), [1.0, 2 / 3])
    assert groups == (range(1), range(1, 2), range(2, 4))
    # From 5 two run again: 1 s of message 1 takes 1.5 s, the other 6 s then have 5 left.
    assert ends_s == pytest.approx([5.0, 6.5, 11.5])


def test_a_bucket_ready_when_the_message_starts_does_not_join():
    assert simultaneous_fusion([1, 1, 4], lambda _: 3.0, [1.0]) == (
        (range(1), range(1, 2), range(2, 3)),
        [4.0, 7.0, 10.0],
    )
    assert simultaneous_fusion([1, 1, 3], lambda _: 3.0, [1.0])[0] == (range(1), range(1, 3))


def test_channels_that_lose_nothing_are_links_of_their_own():
    groups, ends_s = simultaneous_fusion([0, 0, 0], lambda g: 2.0 + g.start, [1.0, 1.0, 1.0])
    assert groups == (range(1), range(1, 2), range(2, 3))
    assert ends_s == [2.0, 3.0, 4.0]


def test_channels_of_one_link_carry_all_the_work():
    """Four thirds of the rate while two are busy, all of it while one is: work is conserved."""
    rng = random.Random(6)
    for _ in range(300):
        ready_s = list(accumulate(rng.choice([0, 0.5, 1.7]) for _ in range(8)))
        seconds = [rng.choice([0.0, 0.3, 2.0, 5.0]) for _ in range(8)]
        groups, ends_s = simultaneous_fusion(
            ready_s, lambda g, s=seconds: sum(s[g.start : g.stop]), [1.0, 2 / 3]
        )
        assert [bucket for group in groups for bucket in group] == list(range(8))
        spans: list[tuple[float, float]] = []
        for i, (group, end_s) in enumerate(zip(groups, ends_s, strict=True)):
            free_s = spans[i - 2][1] if i > 1 else 0.0
            spans.append((max(ready_s[group[-1]], free_s), end_s))
        moments = sorted({t for span in spans for t in span})
        done_s = 0.0
        for start_s, stop_s in pairwise(moments):
            busy = sum(a <= start_s and stop_s <= b for a, b in spans)
            done_s += (stop_s - start_s) * (0, 1, 4 / 3)[busy]
        assert done_s == pytest.approx(sum(seconds))


def test_unit_runs_by_hand():
    # Latency 1, blocks of 2 s. At 0: slack 6 < 1 + 4 * 2, so ceil(5 / 2) = 3 blocks, until 7.
    # At 7, bucket 1 is ready (6) and the next gradient at 7.5: slack below the latency, 1 block.
    # At 10 all are ready: what is left, input side first.
    runs = unit_runs([0.0, 6.0, 7.5], [4, 3, 2], lambda _, n: 1.0 + 2.0 * n)
    assert runs == [
        (0, range(3)),
        (1, range(1)),
        (2, range(2)),
        (1, range(1, 3)),
        (0, range(3, 4)),
    ]


def test_a_bucket_that_ends_before_the_next_gradient_is_one_message():
    runs = unit_runs([0.0, 20.0], [4, 4], lambda _, n: 1.0 + 2.0 * n)
    assert runs == [(0, range(4)), (1, range(4))]


def test_blocks_that_cost_nothing_more_ride_along():
    runs = unit_runs([0.0, 1.0], [9, 1], lambda _, n: max(3.0, 0.5 * n))
    assert runs == [(0, range(6)), (1, range(1)), (0, range(6, 9))]


def test_unit_runs_cover_every_block_once():
    rng = random.Random(7)
    for _ in range(300):
        count = rng.randint(1, 8)
        ready_s = list(accumulate(rng.choice([0, 1, 3.3]) for _ in range(count)))
        units = [rng.randint(1, 9) for _ in range(count)]
        unit_s = [rng.choice([0.0, 0.4, 2.0]) for _ in range(count)]
        latency_s = rng.choice([0.0, 0.7])
        runs = unit_runs(ready_s, units, lambda b, n, u=unit_s, a=latency_s: a + n * u[b])
        for bucket in range(count):
            blocks = [block for b, run in runs if b == bucket for block in run]
            assert blocks == list(range(units[bucket]))


def never(*_):
    return None


def test_moves_approach_the_best_order():
    optimal, total = 0, 0
    for slices, compute in problems(100, 6, seed=8):
        costs = [iteration_s(order, compute) for order in permutations(slices)]
        start_s = iteration_s(slices, compute)
        order = improved(slices, lambda order, c=compute: iteration_s(order, c), never, 1000)
        assert sorted(order) == sorted(slices)
        assert min(costs) <= iteration_s(order, compute) <= start_s
        if start_s > min(costs):
            total, optimal = total + 1, optimal + (iteration_s(order, compute) == min(costs))
    assert total > 20
    assert optimal > 0.8 * total


def test_messages_are_joined_where_that_is_faster():
    def joined(first, second):
        return (*first, *second) if first[-1] + 1 == second[0] else None

    order = improved(
        [(1,), (3,), (0,), (2,)], lambda order: 10 + len(order) + (order[0][0] != 0), joined, 100
    )
    assert order == [(0, 1, 2, 3)]


def test_evaluations_are_bounded():
    spent = []
    improved(list(range(50)), lambda order: spent.append(order) or 1000 - len(spent), never, 70)
    assert len(spent) == 71


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: Compute([2.0, 1.0], [1.0, 1.0]), r"ready_s\[1\] \(1\) must be at least ready_s"),
        (lambda: Compute([1.0], [1.0, 1.0]), r"forward_s \(2 values\) must be as long as ready_s"),
        (lambda: Compute([1.0], [1.0], -1), r"other_s \(-1\) must be finite and at least 0"),
        (lambda: priority_order([], [], 0), r"credit_bytes \(0\) must be at least 1; use 1 for"),
        (lambda: simultaneous_fusion([], len, []), r"speeds \(\[\]\) must have a value per chan"),
        (lambda: simultaneous_fusion([], len, [1, 0]), r"speeds\[1\] \(0\) must be above 0; use"),
        (
            lambda: unit_runs([1.0], [1, 1], max),
            r"units \(2 values\) must be as long as ready_s \(1 values\)",
        ),
    ],
)
def test_input_that_makes_no_sense(call, text):
    with pytest.raises(ValueError, match=text):
        call()
