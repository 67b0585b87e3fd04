"""What the simulator refuses, in which words."""

from dataclasses import replace

import pytest

from offbeat.plan import Moment, Plan, Vote, transfer
from offbeat.profile import Bucket, Link, Profile
from offbeat.sim import simulate
from offbeat.strategies import BSP

PROFILE = Profile(
    (Bucket("a", 1.0, 2.0, 8), Bucket("b", 0.5, 1.0, 4)), (Link("net", 0.5, 4.0),), world_size=2
)
STEP = Moment("step")


def grad(bucket, after, before=STEP, phases=(0,)):
    return transfer(
        "grad", range(bucket, bucket + 1), after=after, before=before, phases=phases, link="net"
    )


def message(*args, **kwargs):
    with pytest.raises(ValueError) as caught:
        simulate(*args, **kwargs)
    return str(caught.value)


def test_a_message_that_is_released_after_its_deadline():
    plan = Plan("late", 2, (grad(0, Moment("end")),))
    assert message(plan, PROFILE) == (
        "the plan can never proceed: iteration 0 waits before step for grad[0:1]@net, which is "
        "released only after end; change the order of the transfers or the deadline\n"
        "late: 2 buckets, period 1 iteration\n"
        "-> grad[0:1]  after end  before step  in 0  on net"
    )


def test_a_message_behind_one_that_waits_for_it():
    blocking = grad(1, STEP, Moment("end"), phases=[1])
    plan = Plan("order", 2, (blocking, grad(0, Moment("grad", 0), phases=[0, 1])), period=2)
    assert message(plan, PROFILE) == (
        "the plan can never proceed: iteration 1 waits before step for grad[0:1]@net, behind "
        "grad[1:2]@net of iteration 1, released only after step; "
        "change the order of the transfers or the deadline\n"
        "order: 2 buckets, period 2 iterations\n"
        "-> grad[1:2]  after step     before end   in 1    on net\n"
        "-> grad[0:1]  after grad(0)  before step  in 0-1  on net"
    )


def send(link, ranks, after, before):
    return transfer(
        "param",
        range(2),
        after=after,
        before=before,
        phases=[0],
        link=link,
        verb="send",
        ranks=ranks,
    )


def test_ranks_that_wait_for_each_other():
    # Each sends only after it has received.
    forward, grad = Moment("forward", 0), Moment("grad")
    there, back = (send(*to, grad, forward) for to in (("net", (0, 1)), ("net#1", (1, 0))))
    text = message(Plan("x", 2, (there, back)), PROFILE)
    assert (
        "can never proceed: iteration 0 waits before forward(0) for send param[0:2] 1->0@net#1"
        in text
    )
    assert "released only after grad;" in text


def test_a_message_behind_one_of_another_pair():
    # On one link rank 1 comes to the second message only after the first, which needs the second.
    profile = replace(PROFILE, world_size=3)
    first = send("net", (1, 2), STEP, Moment("end"))
    second = send("net", (0, 1), Moment("grad"), STEP)
    text = message(Plan("x", 2, (first, second)), profile)
    assert "behind send param[0:2] 1->2@net of iteration 0, released only after step" in text


def test_a_vote_that_is_due_before_all_have_had_their_say():
    vote = Vote("sync", "changed", STEP, Moment("grad"), [0])
    assert message(Plan("x", 2, votes=(vote,)), PROFILE).startswith(
        "the plan can never proceed: iteration 0 waits before grad for the vote 'sync', in which "
        "every rank has its say only at step; change either moment\n"
    )


@pytest.mark.parametrize(
    ("plans", "text"),
    [
        (Plan("x", 3, ()), "the plan has 3 buckets, the profile 2; plan again from this profile"),
        (
            Plan("x", 2, (grad(0, Moment("grad", 7)),)),
            "release grad(7) of grad[0:1]@net never fires: there are 2 buckets\n"
            "x: 2 buckets, period 1 iteration\n"
            "-> grad[0:1]  after grad(7)  before step  in 0  on net",
        ),
        (
            Plan("x", 2, (grad(0, Moment("grad", lag=1), Moment("end", lag=1)),)),
            "release grad+1 of grad[0:1]@net must lie in its own iteration",
        ),
        (
            Plan(
                "x",
                2,
                (transfer("grad", range(2), after=STEP, before=STEP, phases=[0], link="wifi"),),
            ),
            "link 'wifi' of grad[0:2]@wifi must be one of net",
        ),
        (
            Plan("x", 2, (send("net", (0, 2), STEP, STEP),)),
            "send param[0:2] 0->2@net names a rank beyond 0..1",
        ),
        (
            Plan("x", 2, (replace(grad(0, STEP), when="sync"),)),
            "vote 'sync' of grad[0:1]@net must be one of none",
        ),
        (Plan("x", 2, period=0), "period (0) of the plan must be at least 1"),
        (
            Plan("x", 2, groups={"net": ((0,), (2,))}),
            "groups of link 'net' must hold each of the ranks 0..1 once",
        ),
    ],
)
def test_plans_that_do_not_fit(plans, text):
    assert message(plans, PROFILE).startswith(text)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"iterations": 0}, "iterations (0) must be at least 1"),
        ({"record": -1}, "record (-1) must be at least 0"),
        ({"votes": {"sync": 0.5}}, "votes ('sync') must name a vote of the plan: none"),
    ],
)
def test_settings_that_make_no_sense(settings, text):
    assert message(BSP().plan(PROFILE), PROFILE, **settings) == text
