"""Checks of plans: every kind of problem is found, and printed with an arrow where it is."""

from dataclasses import replace

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st
from reference import random_plans

from offbeat.check import check, raise_if_wrong
from offbeat.plan import Moment, Plan, transfer
from offbeat.profile import Bucket, Link, Profile
from offbeat.sim import simulate
from offbeat.strategies import BSP, LocalSGD

PROFILE = Profile(
    (Bucket("a", 1.0, 2.0, 8), Bucket("b", 0.5, 1.0, 4)), (Link("net", 0.5, 4.0),), world_size=2
)
STEP, END = Moment("step"), Moment("end")


def move(kind, start, stop, after, before, phases=(0,), link="net"):
    return transfer(kind, range(start, stop), after=after, before=before, phases=phases, link=link)


def plan_of(*transfers, **more):
    return Plan("mine", 2, transfers, **more)


ALL_GRADIENTS = move("grad", 0, 2, Moment("grad", 1), STEP)
FIRST, SECOND = (move("grad", b, b + 1, Moment("grad", b), STEP) for b in range(2))


def only_problem(plan, profile=PROFILE):
    problems = check([plan], profile)
    assert len(problems) == 1, [p.message for p in problems]
    return problems[0]


@pytest.mark.parametrize(
    ("plan", "message", "arrows"),
    [
        (
            plan_of(move("grad", 0, 2, END, STEP)),
            "deadline step of grad[0:2]@net comes before its release end",
            [0],
        ),
        (
            plan_of(move("grad", 0, 2, Moment("grad", 1), Moment("grad", 1))),
            "deadline grad(1) of grad[0:2]@net comes before its release grad(1)",
            [0],
        ),
        (
            plan_of(move("grad", 0, 2, Moment("grad", 5), STEP)),
            "release grad(5) of grad[0:2]@net never fires: there are 2 buckets",
            [0],
        ),
        (
            plan_of(FIRST, move("grad", 1, 2, Moment("grad", 1), Moment("updated", 2))),
            "deadline updated(2) of grad[1:2]@net never fires: there are 2 buckets",
            [1],
        ),
        (
            plan_of(move("grad", 0, 3, Moment("grad", 1), STEP)),
            "grad[0:3]@net must move a run of buckets within 0..1",
            [0],
        ),
        (
            plan_of(move("grad", 1, 1, Moment("grad", 1), STEP), ALL_GRADIENTS),
            "grad[1:1]@net must move a run of buckets within 0..1",
            [0],
        ),
        (
            plan_of(move("grad", 0, 2, Moment("grad", 1), STEP, phases=(0, 2))),
            "grad[0:2]@net never fires in phases 2: the plan has the phases 0..0",
            [0],
        ),
        (
            plan_of(ALL_GRADIENTS, move("state", 0, 2, Moment("updated"), END, phases=())),
            "state[0:2]@net never fires in phases none: the plan has the phases 0..0",
            [1],
        ),
        (
            plan_of(FIRST, move("grad", 1, 2, Moment("grad", 1), STEP, link="wifi")),
            "link 'wifi' of grad[1:2]@wifi must be one of net",
            [1],
        ),
        (
            # The gradient of bucket 1 does not exist yet.
            plan_of(move("grad", 0, 2, Moment("grad", 0), STEP)),
            "grad[0:2]@net is overwritten in flight: grad(1) of bucket 1 comes between its "
            "release grad(0) and its deadline step",
            [0],
        ),
        (
            # The update would use the gradient before it is averaged.
            plan_of(move("grad", 0, 2, Moment("grad", 1), END)),
            "grad[0:2]@net is overwritten in flight: updated(0) of bucket 0 comes between its "
            "release grad(1) and its deadline end",
            [0],
        ),
        (
            plan_of(FIRST, SECOND, updates="in_backward"),
            "grad[0:1]@net is overwritten in flight: updated(0) of bucket 0 comes between its "
            "release grad(0) and its deadline step",
            [0],
        ),
        (
            # The next forward reads parameters that are still being averaged.
            plan_of(move("param", 0, 2, Moment("updated"), Moment("forward", 0, lag=1))),
            "param[0:2]@net is overwritten in flight: forward(1)+1 of bucket 1 comes between its "
            "release updated and its deadline forward(0)+1",
            [0],
        ),
        (
            plan_of(ALL_GRADIENTS, move("grad", 1, 2, Moment("grad", 1), STEP)),
            "bucket 1 is moved twice in phases 0: by grad[0:2]@net and grad[1:2]@net",
            [0, 1],
        ),
        (
            plan_of(FIRST),
            "bucket 1 is never moved in the period",
            [],
        ),
        (
            plan_of(FIRST, replace(SECOND, payload=replace(SECOND.payload, part=1, parts=2))),
            "bucket 1 is only moved in part in the period",
            [],
        ),
        (
            plan_of(FIRST, SECOND, replace(SECOND, payload=replace(SECOND.payload, parts=2))),
            "bucket 1 is moved twice in phases 0: by grad[1:2]@net and grad[1:2]/1of2@net",
            [1, 2],
        ),
        (
            plan_of(FIRST, replace(SECOND, payload=replace(SECOND.payload, part=2, parts=2))),
            "grad[1:2]/3of2@net must be one of its 2 parts",
            [1],
        ),
        (
            # Moved in the prologue only.
            plan_of(FIRST, replace(SECOND, phases=frozenset([1])), prologue=1),
            "bucket 0 is never moved in the period",
            [],
        ),
        (
            plan_of(move("state", 0, 2, Moment("updated"), END), FIRST, SECOND),
            "grad[0:1]@net can never meet its deadline step: state[0:2]@net goes first on net "
            "and is released only after updated",
            [0, 1],
        ),
    ],
)
def test_every_kind_of_problem(plan, message, arrows):
    problem = check([plan], PROFILE)[0]
    assert problem.message == message
    first, head, *lines = str(problem).splitlines()
    assert first == message
    assert head == str(plan).splitlines()[0]
    assert [line.startswith("->") for line in lines] == [
        i in arrows for i in range(len(plan.transfers))
    ]
    with pytest.raises(ValueError) as caught:
        raise_if_wrong([plan], PROFILE)
    assert str(caught.value).startswith(f"the plan is wrong: {message}\n")


def test_one_problem_is_printed_whole():
    assert str(only_problem(plan_of(FIRST))) == (
        "bucket 1 is never moved in the period\n"
        "mine: 2 buckets, period 1 iteration, updates at step\n"
        "   grad[0:1]  after grad(0)  before step  in 0  on net"
    )


def test_more_problems_are_counted():
    plan = plan_of(move("state", 0, 2, Moment("updated"), END))
    with pytest.raises(ValueError, match=r"bucket 0 is never moved[\s\S]*\n\(and 1 more\)$"):
        raise_if_wrong([plan])


def test_a_plan_for_another_profile():
    plan = BSP().plan(PROFILE)
    more = replace(PROFILE, buckets=PROFILE.buckets * 2)
    assert only_problem(plan, more).message == (
        "the plan has 2 buckets, the profile 4; plan again from this profile"
    )
    assert check([plan]) == check([plan], PROFILE) == []


def test_a_message_blocked_by_one_of_the_iteration_before():
    late = move("state", 0, 1, Moment("grad", 1, lag=1), Moment("step", lag=1))
    early = move("param", 1, 2, Moment("forward", 1), Moment("forward", 0))
    plan = plan_of(early, late, ALL_GRADIENTS, period=1)
    assert check([plan], PROFILE)[1].message == (
        "param[1:2]@net can never meet its deadline forward(0): state[0:1]@net goes first on net "
        "and is released only after grad(1)+1"
    )


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (
            plan_of(SECOND, FIRST),
            "ranks disagree on the order in phase 0: rank 0 issues grad[0:1]@net, rank 1 issues "
            "grad[1:2]@net",
        ),
        (
            plan_of(FIRST),
            "ranks disagree on the order in phase 0: rank 0 issues grad[1:2]@net, rank 1 issues "
            "nothing",
        ),
        (
            plan_of(FIRST, SECOND, period=2),
            "rank 1 has the period 2 after 0, rank 0 has 1 after 0",
        ),
    ],
)
def test_ranks_that_disagree(other, message):
    plan = plan_of(FIRST, SECOND)
    assert message in [problem.message for problem in check([plan, other], PROFILE)]


def test_ranks_may_issue_at_different_moments():
    lazy = plan_of(replace(FIRST, after=Moment("grad", 1)), SECOND)
    assert check([plan_of(FIRST, SECOND), lazy, lazy], PROFILE) == []


def test_links_have_an_order_each():
    profile = replace(PROFILE, links=(*PROFILE.links, Link("aux", 0.0, 1.0)))
    other = replace(SECOND, link="aux")
    assert check([plan_of(FIRST, other), plan_of(other, FIRST)], profile) == []


def test_warm_up_and_average_are_no_conflict():
    assert check([LocalSGD(period=3, warmup=2, state="averaged").plan(PROFILE)], PROFILE) == []


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_what_can_never_proceed_is_found_without_simulating(data):
    profile = data.draw(random_plans.profiles(most_buckets=3))
    plan = data.draw(random_plans.plans(profile))
    late = [
        problem
        for problem in check([plan], profile)
        if "comes before its release" in problem.message or "can never meet" in problem.message
    ]
    event(f"stuck: {bool(late)}")
    iterations = plan.prologue + plan.period + 2
    if late:
        with pytest.raises(ValueError, match="the plan can never proceed"):
            simulate(plan, profile, iterations=iterations)
    else:
        simulate(plan, profile, iterations=iterations)
