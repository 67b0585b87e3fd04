"""Cutting a model into stages, beside every way to cut it."""

from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.strategies.solvers.stages import cut


@settings(max_examples=200, deadline=None)
@given(st.lists(st.floats(0, 100), min_size=1, max_size=9), st.data())
def test_no_other_cut_has_a_cheaper_longest_stage(costs, data):
    stages = data.draw(st.integers(1, len(costs)))
    runs = cut(costs, stages)
    assert len(runs) == stages
    assert [b for run in runs for b in run] == list(range(len(costs)))
    assert all(runs)
    best = min(
        max(sum(costs[a:z]) for a, z in pairwise([0, *ends, len(costs)]))
        for ends in combinations(range(1, len(costs)), stages - 1)
    )
    assert max(sum(costs[b] for b in run) for run in runs) == pytest.approx(best)


def test_bad_numbers():
    with pytest.raises(ValueError, match="stages"):
        cut([1.0, 2.0], 3)
    with pytest.raises(ValueError, match="costs"):
        cut([1.0, -1.0], 2)
