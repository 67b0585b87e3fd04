"""Bucket fusion: every method against enumeration, simulation and torch."""

import random
from collections.abc import Iterator
from itertools import accumulate, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import solve as reference

from offbeat.strategies.solvers import fusion


def problems(
    number: int, most_buckets: int, seed: int
) -> Iterator[tuple[list[float], list[float], float, bool]]:
    """Ready times, transfer times, latency, and whether sums of them are exact."""
    rng = random.Random(seed)
    for n in range(number):
        count = rng.randint(1, most_buckets)
        if n % 2:
            durations_s = [float(rng.choice([0, 1, 2, 3])) for _ in range(count)]
            transfer_s = [float(rng.choice([0, 0, 1, 2, 5])) for _ in range(count)]
            latency_s = float(rng.choice([0, 1, 2, 4]))
        else:
            ratio = rng.choice([0.3, 1.0, 2.0])
            durations_s = [rng.expovariate(1.0) for _ in range(count)]
            transfer_s = [ratio * rng.expovariate(1.0) for _ in range(count)]
            latency_s = rng.choice([0.0, 0.1, 1.0]) * rng.random()
        yield list(accumulate(durations_s)), transfer_s, latency_s, bool(n % 2)


class Line:
    """Messages that take a latency and their buckets' times."""

    def __init__(self, transfer_s, latency_s):
        self.transfer_s, self.latency_s = transfer_s, latency_s

    def __call__(self, group):
        return self.latency_s + sum(self.transfer_s[group.start : group.stop])

    def ending(self, first, stop):
        return np.array([self(range(start, stop)) for start in range(first, stop)])


def covers(groups: fusion.Fusion, count: int) -> bool:
    return [i for group in groups for i in group] == list(range(count)) and all(groups)


def test_finish_equals_the_event_simulation():
    rng = random.Random(1)
    for ready_s, transfer_s, latency_s, _ in problems(1000, 12, seed=2):
        cuts = [i for i in range(1, len(ready_s)) if rng.random() < 0.5]
        bounds = [0, *cuts, len(ready_s)]
        groups = [range(a, b) for a, b in pairwise(bounds)]
        assert fusion.fusion_finish(groups, ready_s, Line(transfer_s, latency_s)) == pytest.approx(
            reference.fusion_end(groups, ready_s, Line(transfer_s, latency_s)), rel=1e-12
        )


def test_optimal_equals_enumeration():
    for ready_s, transfer_s, latency_s, exact in problems(2000, 7, seed=3):
        groups = fusion.optimal_fusion(ready_s, Line(transfer_s, latency_s).ending)
        assert covers(groups, len(ready_s))
        end_s = fusion.fusion_finish(groups, ready_s, Line(transfer_s, latency_s))
        expected_s = reference.best_fusion_end(ready_s, Line(transfer_s, latency_s))
        if exact:
            assert end_s == expected_s
        assert end_s == pytest.approx(expected_s, rel=1e-12)


def test_greedy_equals_the_published_loop():
    for ready_s, transfer_s, latency_s, exact in problems(2000, 15, seed=4):
        groups = fusion.greedy_fusion(ready_s, Line(transfer_s, latency_s))
        assert covers(groups, len(ready_s))
        if exact:
            assert groups == tuple(reference.mg_wfbp(ready_s, transfer_s, latency_s))


def test_greedy_by_hand():
    # The link is free at 1; bucket 1 is ready at 1.5, within the latency of 1, so 0 waits for it;
    # bucket 2 comes at 4, too late.
    groups = fusion.greedy_fusion([1.0, 1.5, 4.0], Line([1.0] * 3, 1.0))
    assert groups == (range(2), range(2, 3))
    assert fusion.fusion_finish(groups, [1.0, 1.5, 4.0], Line([1.0] * 3, 1.0)) == 6.5


def test_greedy_can_be_worse_than_optimal():
    # Greedy holds the long message 0 back for bucket 1, which could have gone with bucket 2.
    ready_s, transfer_s, latency_s = [0.0, 1.0, 9.0], [9.0, 0.0, 0.0], 1.5
    greedy = fusion.greedy_fusion(ready_s, Line(transfer_s, latency_s))
    optimal = fusion.optimal_fusion(ready_s, Line(transfer_s, latency_s).ending)
    end_s = [
        fusion.fusion_finish(g, ready_s, Line(transfer_s, latency_s)) for g in (greedy, optimal)
    ]
    assert end_s == [13.0, 12.0]


def test_without_latency_no_fusion_is_optimal_and_with_a_large_one_a_single_message():
    for ready_s, transfer_s, _, _ in problems(200, 12, seed=5):
        free, dear = Line(transfer_s, 0.0), Line(transfer_s, 1e6)
        end_s = fusion.fusion_finish(fusion.optimal_fusion(ready_s, free.ending), ready_s, free)
        every = fusion.no_fusion(len(ready_s))
        assert end_s == pytest.approx(fusion.fusion_finish(every, ready_s, free))
        assert fusion.optimal_fusion(ready_s, dear.ending) == (range(len(ready_s)),)


def test_of_equally_good_fusions_the_one_with_the_fewest_messages():
    # What is ready at 1 takes a second, alone or together.
    flat = Line([0.0] * 3, 1.0)
    assert fusion.optimal_fusion([0.0, 0.0, 1.0], flat.ending) == (range(3),)


def test_two_thousand_buckets():
    ready_s = [float(i) for i in range(2000)]

    def ending(first, stop):
        return 2.0 + 0.5 * np.arange(stop - first, 0, -1)

    groups = fusion.optimal_fusion(ready_s, ending)
    assert covers(groups, 2000)
    assert fusion.fusion_finish(groups, ready_s, Line([0.5] * 2000, 2.0)) == 1999 + 2.0 + 2.0


def test_cap_closes_a_group_when_it_reaches_the_cap():
    assert fusion.cap_fusion([5, 5, 5, 4, 1, 2], 10) == (range(2), range(2, 5), range(5, 6))
    assert fusion.cap_fusion([5, 5, 5], 10, first_cap_bytes=1) == (range(1), range(1, 3))
    assert fusion.cap_fusion([50], 10) == (range(1),)
    assert fusion.cap_fusion([1, 1], 10) == (range(2),)
    assert fusion.cap_fusion([1, 1], 1) == fusion.no_fusion(2)
    assert fusion.cap_fusion([], 10) == ()


def test_cap_equals_torch():
    torch = pytest.importorskip("torch")
    rng = random.Random(6)
    for _ in range(100):
        sizes_bytes = [rng.choice([1, 10, 100, 1000]) for _ in range(rng.randint(1, 20))]
        cap_bytes, first_cap_bytes = rng.choice([50, 500]), rng.choice([None, 1, 20, 100])
        tensors = [torch.empty(size, dtype=torch.uint8) for size in sizes_bytes]
        limits = [cap_bytes] if first_cap_bytes is None else [first_cap_bytes, cap_bytes]
        buckets, _ = torch.distributed._compute_bucket_assignment_by_size(tensors, limits)
        groups = fusion.cap_fusion(sizes_bytes, cap_bytes, first_cap_bytes)
        assert [list(group) for group in groups] == buckets


def test_edges():
    assert fusion.no_fusion(0) == ()
    assert fusion.no_fusion(2) == (range(1), range(1, 2))
    line = Line([3.0], 1.0)
    for solve, times in ((fusion.greedy_fusion, line), (fusion.optimal_fusion, line.ending)):
        assert solve([], times) == ()
        assert solve([2.0], times) == (range(1),)
    assert fusion.fusion_finish((), [], line) == 0.0
    assert fusion.fusion_finish((range(1),), [2.0], line) == 6.0


seconds = st.floats(0, 1e3).map(lambda x: round(x, 3))


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(seconds, seconds), min_size=1, max_size=20), seconds)
def test_optimal_is_never_later_than_the_others(buckets, latency_s):
    ready_s = list(accumulate(b for b, _ in buckets))
    transfer_s = [t for _, t in buckets]

    def end_s(groups: fusion.Fusion) -> float:
        return fusion.fusion_finish(groups, ready_s, Line(transfer_s, latency_s))

    earliest_s = end_s(fusion.optimal_fusion(ready_s, Line(transfer_s, latency_s).ending))
    assert earliest_s >= ready_s[-1] + latency_s
    for other in (
        fusion.greedy_fusion(ready_s, Line(transfer_s, latency_s)),
        fusion.no_fusion(len(ready_s)),
        (range(len(ready_s)),),
        fusion.cap_fusion([1] * len(ready_s), 3),
    ):
        assert covers(other, len(ready_s))
        assert earliest_s <= end_s(other) * (1 + 1e-12)


@pytest.mark.parametrize(
    ("function", "arguments", "message"),
    [
        (
            fusion.greedy_fusion,
            ([2.0, 1.0], len),
            "ready_s[1] (1) must be at least ready_s[0] (2); list the buckets in backward order",
        ),
        (
            fusion.fusion_finish,
            ((range(1), range(2, 3)), [1.0] * 3, len),
            "groups[1] (range(2, 3)) must be a non-empty range from 1 to at most 3; "
            "list consecutive groups in order",
        ),
        (
            fusion.fusion_finish,
            ((range(1),), [1.0] * 3, len),
            "groups (1 ranges) must end at 3 instead of 1; cover every bucket",
        ),
        (fusion.cap_fusion, ([1], 0), "cap_bytes (0) must be at least 1; use 1 to fuse nothing"),
        (
            fusion.cap_fusion,
            ([1], 5, 0),
            "first_cap_bytes (0) must be at least 1; use 1 to fuse nothing",
        ),
        (fusion.no_fusion, (-1,), "n (-1) must be at least 0; give the number of buckets"),
    ],
)
def test_errors_name_the_parameter_and_the_remedy(function, arguments, message):
    with pytest.raises(ValueError) as error:
        function(*arguments)
    assert str(error.value) == message
