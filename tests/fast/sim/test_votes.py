"""Votes in simulations: when an outcome is known, and what depends on it."""

from dataclasses import replace

import pytest

from offbeat.plan import Apply, Moment, Plan, Vote, transfer
from offbeat.profile import Bucket, Link, Profile
from offbeat.sim import Ranks, predict_plan, simulate

GRAD, STEP, END = Moment("grad"), Moment("step"), Moment("end")


def profile_of(**more):
    """4 s per average, 1 s of compute, 0.25 s per vote."""
    link = Link("net", 0.25, 100 / 3.75, **more)
    return Profile((Bucket("b", 0.0, 1.0, 100),), (link,), 2, update_s=0.5)


def selected(**more):
    average = transfer(
        "grad", range(1), after=STEP, before=END, phases=[0], link="net", when="sync"
    )
    vote = Vote("sync", "changed", GRAD, STEP, [0], {"threshold": 1.0})
    return Plan("x", 1, (average,), votes=(vote,), **more)


def test_an_outcome_is_known_a_least_message_after_the_last_say():
    assert simulate(selected(), profile_of(), iterations=1).ends_s == ((1 + 0.25 + 4,),)
    late = Ranks(scale=(1.0, 3.0))
    ends = simulate(selected(), profile_of(), iterations=1, ranks=late).ends_s
    assert ends == ((3 + 0.25 + 4,),) * 2
    floor = profile_of(small=((10, 0.5),))
    assert simulate(selected(), floor, iterations=1).ends_s == ((1 + 0.5 + 4,),)
    measured = replace(floor, links=(replace(floor.links[0], vote_s=0.125),))
    assert simulate(selected(), measured, iterations=1).ends_s == ((1 + 0.125 + 4,),)


def test_a_no_passes_over_messages_and_rules():
    updates = (Apply("local", range(1), STEP, [0], when="sync"),)
    for votes, end_s, kinds in (
        ({}, 1 + 0.25 + 0.5 + 4, {"update", "grad"}),
        ({"sync": 0.0}, 1 + 0.25, set()),
    ):
        trace = simulate(selected(applies=updates), profile_of(), iterations=1, votes=votes)
        assert trace.ends_s == ((end_s,),)
        assert {s.kind for s in trace.spans} - {"wait", "forward", "backward"} == kinds


def test_predictions_average_over_chance():
    prediction = predict_plan(selected(), profile_of(), votes={"sync": 0.5})
    assert not prediction.steady
    share = prediction.bytes_per_iteration["net"] / 100
    assert share == pytest.approx(0.5, abs=0.15)
    assert prediction.busy_s["net"] == pytest.approx(4 * share)
    assert prediction.iteration_s == pytest.approx(1.25 + 4 * share)
    never = predict_plan(selected(), profile_of(), votes={"sync": 0.0})
    assert (never.steady, never.iteration_s, never.bytes_per_iteration["net"]) == (True, 1.25, 0.0)


def test_outcomes_of_a_run_are_replayed():
    said = [True, False, False]
    trace = simulate(selected(), profile_of(), iterations=6, votes={"sync": said})
    assert trace.iteration_seconds() == pytest.approx([5.25, 1.25, 1.25] * 2)
    assert trace.uneven
    for skip, seconds in ((0, (5.25 + 2 * 1.25) / 3), (1, 1.25)):
        prediction = predict_plan(selected(), profile_of(), votes={"sync": said}, skip=skip)
        assert prediction.iteration_s == pytest.approx(seconds)
        assert list(prediction.window) == list(range(skip, 3))
    with pytest.raises(ValueError, match="votes"):
        simulate(selected(), profile_of(), votes={"sync": []})


def test_a_vote_of_the_iteration_before():
    """Where there was none it is a yes; nobody waits for what comes out in this one."""
    average = transfer(
        "grad", range(1), after=STEP, before=END, phases=[0], link="net", when="sync", ago=1
    )
    vote = Vote("sync", "changed", GRAD, Moment("step", lag=1), [0], {"threshold": 1.0})
    plan = Plan("x", 1, (average,), votes=(vote,))
    trace = simulate(plan, profile_of(), iterations=4, votes={"sync": [False, True, False]})
    assert trace.iteration_seconds() == pytest.approx([1 + 4, 1, 1 + 4, 1])
