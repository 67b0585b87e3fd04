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
