"""Activation memory over time, by hand."""

from __future__ import annotations

import pytest
from cases.scripts import benchmark

from offbeat.profile import Bucket, Link, Profile

activation_curves = benchmark("activation_curves")
Curve, Stage, curve = activation_curves.Curve, activation_curves.Stage, activation_curves.curve
curve_of, cyclic_curve = activation_curves.curve_of, activation_curves.cyclic_curve
memory = activation_curves.memory

STAGES = [Stage(1.0, 3.0, 8.0), Stage(2.0, 1.0, 2.0)]


def test_two_workers_by_hand():
    """7 s, shifted by 3.5: the other one is at 5/3 of 2 bytes more or less than 8, and so on."""
    found = memory(curve(STAGES), 2)
    # One at its most, at 3 s, while the other is at 6.5 s: 8 - 8/3 * 2.5 = 4/3.
    # One at 1 s (8 bytes), the other at 4.5 s: 8 - 8/3 * 0.5 = 20/3. That is more.
    assert found.parallel_bytes == 10.0
    assert found.cyclic_bytes == pytest.approx((8 + 20 / 3) / 2)
    assert found.reduction == pytest.approx(1 - 22 / 30)


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
