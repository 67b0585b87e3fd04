"""When a repetition is not a measurement: the decision, fed with recorded samples."""

from __future__ import annotations

import pytest

from offbeat.experiments.record.disturbed import disturbance_of
from offbeat.jobs.machine_load import Load, LoadSample, LoadTally

PACE = {"pace": 5.0, "iterations": 12, "missed": 3, "worst": 0.9, "mean": 0.01}


def load(*shares: tuple[float, float, float], processors: int = 2) -> Load:
    """Of samples each half a second long: shares of the processors that others took, that were
    idle, and that the launch itself took."""
    tally, at_s, busy_s, idle_s, own_s = LoadTally(processors), 100.0, 900.0, 5000.0, 30.0
    tally.add(LoadSample(at_s, busy_s, idle_s, own_s))
    for foreign, idle, own in shares:
        whole_s = 0.5 * processors
        at_s, own_s = at_s + 0.5, own_s + own * whole_s
        busy_s, idle_s = busy_s + (foreign + own) * whole_s, idle_s + idle * whole_s
        tally.add(LoadSample(at_s, busy_s, idle_s, own_s))
    found = tally.load(0.4)
    assert found is not None
    return found


def test_a_loop_on_all_processors_is_a_disturbance() -> None:
    """Recorded on two processors: four paced hosts beside two busy loops."""
    beside = load(*[(0.86, 0.0, 0.1)] * 20)
    found = disturbance_of(1, beside.record(), {0: PACE})
    assert found is not None
    assert (found.repetition, found.late, found.rank) == (1, None, None)
    assert found.foreign == pytest.approx(0.86)
    assert found.pressure == 0.4


@pytest.mark.parametrize(
    "shares",
    [
        [(0.02, 0.53, 0.4)] * 20,  # a calm machine
        [(0.0, 0.0, 1.0)] * 20,  # the launch uses all of it by itself
        [(-0.03, 0.05, 1.0), (0.03, 0.0, 0.97)] * 10,  # noise of the counters
        [(0.5, 0.4, 0.1)] * 20,  # many processors, and enough are left
        [(0.9, 0.0, 0.1)] * 2 + [(0.01, 0.6, 0.3)] * 20,  # a moment
    ],
)
def test_what_leaves_enough_is_none(shares: list[tuple[float, float, float]]) -> None:
    assert disturbance_of(0, load(*shares).record(), {0: PACE, 1: None}) is None


def test_a_fifth_of_the_time_is_enough() -> None:
    beside = load(*[(0.9, 0.0, 0.1)] * 4, *[(0.0, 0.6, 0.3)] * 16)
    assert beside.disturbed == 0.2
    found = disturbance_of(0, beside.record(), {})
    assert found is not None
    assert found.foreign == pytest.approx(0.18)


def test_late_hosts_are_a_disturbance() -> None:
    """Late by more than 3 % of their compute on average; the worst rank is named."""
    late = {0: {**PACE, "mean": 0.05}, 1: {**PACE, "mean": 0.4}, 2: PACE}
    found = disturbance_of(0, None, late)
    assert found is not None
    assert (found.late, found.rank, found.foreign) == (0.4, 1, None)
    assert disturbance_of(0, None, {0: {**PACE, "mean": 0.029}}) is None
    assert disturbance_of(0, None, {0: {k: v for k, v in PACE.items() if k != "mean"}}) is None
