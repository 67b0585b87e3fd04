"""What the simulator refuses, in which words."""

import pytest

from offbeat.plan import Moment, Plan, transfer
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
        "late: 2 buckets, period 1 iteration, updates at step\n"
        "-> grad[0:1]  after end  before step  in 0  on net"
    )


def test_a_message_behind_one_that_waits_for_it():
    blocking = grad(1, Moment("updated", 1), Moment("end"), phases=[1])
    plan = Plan("order", 2, (blocking, grad(0, Moment("grad", 0), phases=[0, 1])), period=2)
    assert message(plan, PROFILE) == (
        "the plan can never proceed: iteration 1 waits before step for grad[0:1]@net, behind "
        "grad[1:2]@net of iteration 1, released only after updated(1); "
        "change the order of the transfers or the deadline\n"
        "order: 2 buckets, period 2 iterations, updates at step\n"
        "-> grad[1:2]  after updated(1)  before end   in 1    on net\n"
        "-> grad[0:1]  after grad(0)     before step  in 0-1  on net"
    )


def test_ranks_that_wait_for_each_other():
    aux = Link("aux", 0.5, 4.0)
    profile = Profile(PROFILE.buckets, (*PROFILE.links, aux), world_size=2)

    def plan(first, second):
        return Plan(
            "crossed",
            2,
            tuple(
                transfer("grad", range(b, b + 1), after=a, before=d, phases=[0], link=link)
                for (a, d), b, link in ((first, 0, "net"), (second, 1, "aux"))
            ),
        )

    early, late = (Moment("forward"), Moment("forward", 0)), (Moment("grad"), STEP)
    assert "can never proceed: iteration 0 waits before forward(0) for grad" in message(
        [plan(early, late), plan(late, early)], profile
    )


def test_plans_must_agree_on_the_order():
    one = Plan("x", 2, (grad(0, Moment("grad", 0)), grad(1, Moment("grad", 1))))
    other = Plan("x", 2, tuple(reversed(one.transfers)))
    text = message([one, other], PROFILE)
    assert text.startswith("ranks must issue the same transfers in the same order; these differ:")
    assert str(one) in text
    assert str(other) in text


@pytest.mark.parametrize(
    ("plans", "text"),
    [
        (Plan("x", 3, ()), "the plan has 3 buckets, the profile 2; plan again from this profile"),
        ([], "plans ([]) must not be empty"),
        (
            [BSP().plan(PROFILE)] * 3,
            "plans (3) must be one for all ranks or one per rank (2)",
        ),
        (
            Plan("x", 2, (grad(0, Moment("grad", 7)),)),
            "moment grad(7) of grad[0:1]@net never fires: there are 2 buckets\n"
            "x: 2 buckets, period 1 iteration, updates at step\n"
            "-> grad[0:1]  after grad(7)  before step  in 0  on net",
        ),
        (
            Plan(
                "x",
                2,
                (transfer("grad", range(2), after=STEP, before=STEP, phases=[0], link="wifi"),),
            ),
            "link ('wifi') must be one of the profile's links: net",
        ),
    ],
)
def test_plans_that_do_not_fit(plans, text):
    assert message(plans, PROFILE) == text


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"iterations": 0}, "iterations (0) must be at least 1"),
        ({"record": -1}, "record (-1) must be at least 0"),
    ],
)
def test_settings_that_make_no_sense(settings, text):
    assert message(BSP().plan(PROFILE), PROFILE, **settings) == text
