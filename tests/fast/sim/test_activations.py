"""Activation memory over time: by hand, beside a fine grid, and what holds for any model."""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
from cases.scripts import benchmark
from hypothesis import example, given, settings
from hypothesis import strategies as st

from offbeat.profile import Bucket, Link, Profile

activation_curves = benchmark("activation_curves")
Curve, Stage, curve = activation_curves.Curve, activation_curves.Stage, activation_curves.curve
curve_of, cyclic_curve = activation_curves.curve_of, activation_curves.cyclic_curve
memory = activation_curves.memory

STAGES = [Stage(1.0, 3.0, 8.0), Stage(2.0, 1.0, 2.0)]


def test_a_curve_by_hand():
    one = curve(STAGES, rest_s=0.5)
    assert one.at_s == (0.0, 1.0, 3.0, 4.0, 7.0, 7.5)
    assert one.kept_bytes == (0.0, 8.0, 10.0, 8.0, 0.0, 0.0)
    assert (one.period_s, one.peak_bytes) == (7.5, 10.0)


def test_a_profile_lists_its_buckets_from_the_output():
    buckets = tuple(
        Bucket(str(i), s.forward_s, s.backward_s, 4, activation_bytes=int(s.activation_bytes))
        for i, s in enumerate(reversed(STAGES))
    )
    profile = Profile(buckets, (Link("net", 0.0, 1.0),), 4, update_s=0.25, other_s=0.25)
    assert curve_of(profile) == curve(STAGES, rest_s=0.5)


def test_two_workers_by_hand():
    """7 s, shifted by 3.5: the other one is at 5/3 of 2 bytes more or less than 8, and so on."""
    found = memory(curve(STAGES), 2)
    # One at its most, at 3 s, while the other is at 6.5 s: 8 - 8/3 * 2.5 = 4/3.
    # One at 1 s (8 bytes), the other at 4.5 s: 8 - 8/3 * 0.5 = 20/3. That is more.
    assert found.parallel_bytes == 10.0
    assert found.cyclic_bytes == pytest.approx((8 + 20 / 3) / 2)
    assert found.reduction == pytest.approx(1 - 22 / 30)


@pytest.mark.parametrize("workers", [2, 4, 6, 32])
def test_even_stages_spare_half(workers):
    one = curve([Stage(1.0, 1.0, 5.0)] * 7)
    assert memory(one, workers).reduction == pytest.approx(0.5)
    assert memory(one, 1).reduction == 0.0


def test_odd_workers_spare_a_little_less():
    """One of three at its most, the others at a third of it."""
    assert memory(curve([Stage(2.0, 2.0, 9.0)]), 3).cyclic_bytes == pytest.approx(5.0)


SECONDS = st.sampled_from([0.0, 0.125, 0.3, 1.0, 7.0])
CURVES = st.builds(
    curve,
    st.lists(st.builds(Stage, SECONDS, SECONDS, st.integers(0, 100)), min_size=1, max_size=3),
    st.sampled_from([0.1, 1.0]),
)


def decimal(seconds: float) -> Fraction:
    """What sums of SECONDS are without rounding: turns that are one in decimals are one here."""
    return Fraction(seconds).limit_denominator(1000)


def exact(one: Curve, at: Fraction, after: bool) -> Fraction:
    """Bytes just before or just after a time, in fractions."""
    points = [(decimal(t), Fraction(y)) for t, y in zip(one.at_s, one.kept_bytes, strict=True)]
    at %= points[-1][0]
    if at == 0 and not after:
        at = points[-1][0]
    for (t, y), (u, z) in pairwise(points):
        if t < u and (t <= at < u if after else t < at <= u):
            return y + (z - y) * (at - t) / (u - t)
    raise AssertionError


@settings(max_examples=40, deadline=None)
@given(CURVES, st.integers(1, 6))
@example(curve([Stage(0.3, 1.0, 1), Stage(0.0, 0.3, 1)], 1.0), 6)
def test_equals_exact_arithmetic_where_anybody_turns(one, workers):
    period = decimal(one.at_s[-1])
    turns = {(decimal(t) + period * k / workers) % period for t in one.at_s for k in range(workers)}
    most = max(
        sum(exact(one, t + period * k / workers, after) for k in range(workers)) / workers
        for t in turns
        for after in (False, True)
    )
    found = memory(one, workers)
    assert found.cyclic_bytes == pytest.approx(float(most), rel=1e-9, abs=1e-6)
    assert found.parallel_bytes == max(one.kept_bytes)


@settings(max_examples=40, deadline=None)
@given(CURVES, st.integers(1, 6))
def test_a_fine_grid_sees_no_more(one, workers):
    grid = np.linspace(0, one.period_s, 3001)
    shifts = np.arange(workers) * one.period_s / workers
    by_grid = np.mean([one.limits((grid + s) % one.period_s)[1] for s in shifts], axis=0)
    found = memory(one, workers)
    slack = 1e-9 * (1 + one.peak_bytes)
    assert by_grid.max() <= found.cyclic_bytes + slack
    assert found.cyclic_bytes <= found.parallel_bytes + slack
    points = [*zip(one.at_s, one.kept_bytes, strict=True)]
    if all(t < u for t, u in pairwise(one.at_s)):  # no jumps: a near moment has nearly as much
        steepest = max(abs(z - y) / (u - t) for (t, y), (u, z) in pairwise(points))
        assert by_grid.max() >= found.cyclic_bytes - one.period_s / 3000 * steepest - slack


@settings(max_examples=40, deadline=None)
@given(CURVES, st.integers(1, 6))
def test_the_mean_over_time_stays(one, workers):
    def integral(c: Curve) -> float:
        return float(np.trapezoid(c.kept_bytes, c.at_s))

    together = cyclic_curve(one, workers)
    assert together.period_s == pytest.approx(one.period_s / workers)
    assert workers * integral(together) == pytest.approx(integral(one), abs=1e-9)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: curve([Stage(0.0, 0.0, 1.0)]), "an iteration takes time"),
        (lambda: Curve((0.0, 2.0, 1.0), (0.0, 0.0, 0.0)), "must be in order"),
        (lambda: Curve((0.0, 1.0), (0.0,)), "one number of kept_bytes at each"),
        (lambda: memory(curve(STAGES), 0), r"workers \(0\) must be at least 1"),
    ],
)
def test_what_cannot_be(make, words):
    with pytest.raises(ValueError, match=words):
        make()


def test_nothing_kept_spares_nothing():
    found = memory(curve([Stage(1.0, 1.0, 0.0)]), 4)
    assert (found.parallel_bytes, found.cyclic_bytes, found.reduction) == (0.0, 0.0, 0.0)
    assert not math.isnan(found.reduction)


@pytest.mark.parametrize(("hosts", "kept_bytes"), [(3, 6e6), (4, 6.375e6)])
def test_even_layers_of_a_profile(hosts, kept_bytes):
    """Forward takes 6 ms, backward 12. With three hosts one has 12 MB, one is half-way down, one
    has none; with four they have 1, 5/8, 1/4 and 1/4 of 12 MB."""
    buckets = tuple(Bucket(f"b{i}", 1e-3, 2e-3, 4000, activation_bytes=2_000_000) for i in range(6))
    one = curve_of(Profile(buckets, (Link("net", 0.0, 1e6),), 16))
    found = memory(one, hosts)
    assert (found.parallel_bytes, one.kept_bytes[6]) == (12e6, 12e6)
    assert found.cyclic_bytes == pytest.approx(kept_bytes)
    assert one.period_s == pytest.approx(0.018)
