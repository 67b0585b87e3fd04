"""Plans: phases, text, JSON."""

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import random_plans

from offbeat.plan import (
    POINTS,
    Moment,
    Payload,
    Plan,
    format_phases,
    parse_moment,
    parse_phases,
    transfer,
)

STEP = Moment("step")


def grad(start, stop, phases, link="net"):
    return transfer(
        "grad",
        range(start, stop),
        after=Moment("grad", stop - 1),
        before=STEP,
        phases=phases,
        link=link,
    )


PLAN = Plan(
    "mixed",
    3,
    (
        grad(0, 3, [0]),
        transfer(
            "param",
            range(2, 3),
            after=Moment("updated", 2),
            before=Moment("forward", 2, lag=1),
            phases=[1, 2],
            link="aux",
        ),
    ),
    period=2,
    prologue=1,
    updates="in_backward",
    notes={"sets": [[0], [1, 2]]},
)
TEXT = """\
mixed: 3 buckets, period 2 iterations after a prologue of 1, updates in backward
   grad[0:3]   after grad(2)     before step          in 0    on net
   param[2:3]  after updated(2)  before forward(2)+1  in 1-2  on aux"""

moments = st.builds(
    Moment,
    st.sampled_from(POINTS),
    st.none() | st.integers(0, 20),
    st.integers(0, 5),
)


@st.composite
def plans(draw):
    profile = draw(random_plans.profiles())
    plan = draw(random_plans.plans(profile))
    notes = st.dictionaries(st.text(), st.integers() | st.lists(st.text()))
    return replace(plan, notes=draw(notes))


def test_text():
    assert str(PLAN) == TEXT


def test_text_with_an_arrow():
    lines = PLAN.text(mark=PLAN.transfers[1:]).splitlines()
    assert lines[:2] == TEXT.splitlines()[:2]
    assert lines[2] == "->" + TEXT.splitlines()[2][2:]


def test_text_without_transfers():
    assert str(Plan("alone", 1, ())) == "alone: 1 bucket, period 1 iteration, updates at step"


def test_phases_of_iterations():
    assert [PLAN.phase(i) for i in range(6)] == [0, 1, 2, 1, 2, 1]
    assert PLAN.phases == range(3)
    assert PLAN.at(0) == PLAN.transfers[:1]
    assert PLAN.at(101) == PLAN.at(102) == PLAN.transfers[1:]
    assert PLAN.links == ("net", "aux")


@settings(max_examples=50, deadline=None)
@given(plans())
def test_at_gives_the_active_transfers_in_issue_order(plan):
    for iteration in range(12):
        active = [t for t in plan.transfers if plan.phase(iteration) in t.phases]
        assert plan.at(iteration) == tuple(active)


@settings(max_examples=50, deadline=None)
@given(plans())
def test_json_round_trip(plan):
    again = Plan.from_dict(json.loads(json.dumps(plan.to_dict())))
    assert again == plan
    assert (again.digest, str(again)) == (plan.digest, str(plan))


@given(moments)
def test_moments_round_trip_through_text(moment):
    assert parse_moment(str(moment)) == moment


@given(st.frozensets(st.integers(0, 50)))
def test_phases_round_trip_through_text(phases):
    assert parse_phases(format_phases(phases)) == phases


@pytest.mark.parametrize(
    ("phases", "text"),
    [((), "none"), ((3,), "3"), ((0, 1, 2, 5), "0-2,5"), ((7, 1, 6), "1,6-7")],
)
def test_phases_are_written_as_runs(phases, text):
    assert format_phases(phases) == text


def test_the_digest_is_of_what_ranks_must_agree_on():
    assert replace(PLAN, notes={}).digest == PLAN.digest
    assert replace(PLAN, transfers=PLAN.transfers[::-1]).digest != PLAN.digest
    assert replace(PLAN, updates="at_step").digest != PLAN.digest


def test_ids_name_payload_and_link():
    assert [t.id for t in PLAN.transfers] == ["grad[0:3]@net", "param[2:3]@aux"]
    assert str(Payload("state", range(4, 9))) == "state[4:9]"


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"schema": 2}, r"schema \(2\) of the plan must be 1; write the plan again with"),
        ({"updates": "later"}, r"updates \('later'\) must be one of at_step, in_backward"),
        ({"period": None}, r"the plan lacks the field 'period'"),
    ],
)
def test_malformed_plans(change, text):
    data = {k: v for k, v in (PLAN.to_dict() | change).items() if v is not None}
    with pytest.raises(ValueError, match=text):
        Plan.from_dict(data)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"kind": "gard"}, r"kind \('gard'\) must be one of grad, param, state"),
        ({"verb": "sum"}, r"verb \('sum'\) must be one of mean"),
        ({"after": "tick(2)"}, r"moment \('tick'\) must be one of forward, grad, step"),
        ({"link": None}, r"the plan lacks the field 'link'"),
    ],
)
def test_malformed_transfers(change, text):
    data = PLAN.to_dict()
    row = data["transfers"][0] | change
    data["transfers"][0] = {k: v for k, v in row.items() if v is not None}
    with pytest.raises(ValueError, match=text):
        Plan.from_dict(data)
