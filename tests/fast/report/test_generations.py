"""Which gradients spans hold, against the plan that says so."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.core.derive.windows import Windows
from offbeat.core.sim.trace import COMPUTE, Span
from offbeat.experiments.report.timeline import Generations, held_generation
from offbeat.plan import Apply, Moment, Phases, Plan


def message(iteration, carries=None, kind="grad"):
    return Span(0, "net", kind, iteration, 0.0, 1.0, (0, 1), 8, carries)


def update(iteration, carries=None):
    return Span(0, COMPUTE, "update", iteration, 0.0, 1.0, carries=carries)


@pytest.mark.parametrize(
    ("span", "held"),
    [
        (message(4), (4, 5)),
        (message(4, (2, 4)), (2, 4)),
        (message(4, kind="reduce_scatter"), (4, 5)),
        (message(4, kind="all_gather"), (4, 5)),
        (message(4, kind="param"), None),
        (message(4, kind="state"), None),
        (update(4), None),
    ],
)
def test_what_a_message_carries(span, held):
    assert held_generation(span) == held


closings = st.integers(1, 6).flatmap(
    lambda period: st.tuples(
        st.just(period), st.sets(st.integers(0, period - 1), min_size=1).map(Phases)
    )
)


@given(closings)
def test_updates_apply_what_the_plan_says(closing):
    """Every generation is sent in the iteration after it closes; updates say nothing themselves."""
    period, closes = closing
    close = Apply("close", range(1), Moment("end"), closes)
    windows = Windows(Plan("x", 1, (), (close,), period=period))
    sent = []
    for iteration in range(1, 8 * period):
        held = windows.window(iteration, age=1)
        sent += [message(iteration, (held.start, held.stop))] if held else []
    found = Generations.from_spans([*sent, *map(update, range(8 * period))])
    assert found.late
    for iteration in range(6 * period):
        applied = windows.applied_window(iteration)
        expected = (applied.start, applied.stop) if applied else None
        assert found.generation_of(update(iteration)) == expected


def test_an_update_that_names_its_gradients_is_believed():
    found = Generations.from_spans([message(2, (0, 2)), message(3, (2, 3))])
    assert found.generation_of(update(5, (2, 3))) == (2, 3)
    assert found.generation_of(update(5, (3, 5))) is None, "no message of these gradients was seen"


def test_synchronous_updates_are_not_guessed():
    """When a synchronous update happens, its trace does not say which iteration it belongs to."""
    found = Generations.from_spans([message(0), message(1), message(2)])
    assert not found.late
    assert [found.generation_of(message(i)) for i in range(3)] == [(0, 1), (1, 2), (2, 3)]
    assert found.generation_of(update(1)) is None
