"""Activation memory over time, by hand."""

from __future__ import annotations

import pytest
from cases.scripts import benchmark

activation_curves = benchmark("activation_curves")
Curve, memory = activation_curves.Curve, activation_curves.memory

# Stages of 8 and 2 bytes: forwards of 1 and 2 s, backwards of 1 and 3 s.
ONE = Curve((0.0, 1.0, 3.0, 4.0, 7.0), (0.0, 8.0, 10.0, 8.0, 0.0))


def test_two_workers_by_hand():
    """7 s, shifted by 3.5: the other one is at 5/3 of 2 bytes more or less than 8, and so on."""
    found = memory(ONE, 2)
    # One at its most, at 3 s, while the other is at 6.5 s: 8 - 8/3 * 2.5 = 4/3.
    # One at 1 s (8 bytes), the other at 4.5 s: 8 - 8/3 * 0.5 = 20/3. That is more.
    assert found.parallel_bytes == 10.0
    assert found.cyclic_bytes == pytest.approx((8 + 20 / 3) / 2)
    assert found.reduction == pytest.approx(1 - 22 / 30)


@pytest.mark.parametrize(("hosts", "kept_bytes"), [(3, 6e6), (4, 6.375e6)])
def test_several_hosts_of_even_layers(hosts, kept_bytes):
    """Forward takes 6 ms, backward 12. With three hosts one has 12 MB, one is half-way down, one
    has none; with four they have 1, 5/8, 1/4 and 1/4 of 12 MB."""
    found = memory(Curve((0.0, 0.006, 0.018), (0.0, 12e6, 0.0)), hosts)
    assert found.parallel_bytes == 12e6
    assert found.cyclic_bytes == pytest.approx(kept_bytes)
