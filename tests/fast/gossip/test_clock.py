"""Time: the same label everywhere, however clocks and units differ."""

from __future__ import annotations

import pytest

from offbeat.gossip.clock import Clock, RoundTrip, offset_s


def test_the_shortest_trip_tells_the_offset() -> None:
    """The other clock is 5 s ahead; the way there takes 1 ms, the way back as long or longer."""
    trips = [RoundTrip(t, t + 5.001, t + 0.002 + slow) for t, slow in ((0, 0.1), (1, 0), (2, 0.3))]
    assert offset_s(trips) == pytest.approx(5.0)


def test_without_a_unit_time_stands() -> None:
    clock = Clock(3.0, lambda: 100.0)
    assert clock.common_s() == 103.0
    assert clock.now() == 0.0
    assert clock.seconds_until(1.0) is None


def test_labels_are_the_same_line_everywhere() -> None:
    """Units are agreed on from a second of the common clock, wherever the word arrives when."""
    now = 0.0
    one, other = Clock(0.0, lambda: now), Clock(50.0, lambda: now - 50.0)
    now = 10.0
    one.follow(one.line.with_unit(0.5, 10.0))
    now = 12.0
    other.follow(other.line.with_unit(0.5, 10.0))
    assert one.now() == other.now() == 4.0
    one.follow(one.line.with_unit(2.0, 12.0))
    now = 16.0
    other.follow(other.line.with_unit(2.0, 12.0))
    assert one.now() == other.now() == 6.0
    assert one.seconds_until(7.0) == 2.0
