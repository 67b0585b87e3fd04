"""What the simulator refuses: plans that cannot proceed or do not fit, settings without sense."""

from dataclasses import replace

import pytest

from offbeat.plan import Moment, Plan, Vote, transfer
from offbeat.profile import Bucket, Link, Profile
from offbeat.sim import Ranks, simulate
from offbeat.strategies import BSP

PROFILE = Profile(
    (Bucket("a", 1.0, 2.0, 8), Bucket("b", 0.5, 1.0, 4)), (Link("net", 0.5, 4.0),), world_size=3
)
GRAD, STEP, END = Moment("grad"), Moment("step"), Moment("end")


def grad(bucket, after, before=STEP, phases=(0,), **more):
    buckets = range(bucket, bucket + 1)
    told = {"link": "net", **more}
    return transfer("grad", buckets, after=after, before=before, phases=phases, **told)


def send(link, ranks, after, before):
    place = {"link": link, "verb": "send", "ranks": ranks}
    return transfer("param", range(2), after=after, before=before, phases=[0], **place)


FORWARD = Moment("forward", 0)
NEVER = {
    "after its deadline": Plan("x", 2, (grad(0, END),)),
    "behind one that waits for it": Plan(
        "x", 2, (grad(1, STEP, END, [1]), grad(0, Moment("grad", 0), phases=[0, 1])), period=2
    ),
    "ranks that wait for each other": Plan(
        "x", 2, (send("net", (0, 1), GRAD, FORWARD), send("net#1", (1, 0), GRAD, FORWARD))
    ),
    "behind one of another pair": Plan(
        "x", 2, (send("net", (1, 2), STEP, END), send("net", (0, 1), GRAD, STEP))
    ),
    "on links that are shared": Plan("x", 2, (grad(0, END), grad(1, END, link="net#1"))),
    "a vote before all have had their say": Plan(
        "x", 2, votes=(Vote("sync", "changed", STEP, GRAD, [0]),)
    ),
}


@pytest.mark.parametrize("case", NEVER)
def test_plans_that_can_never_proceed(case):
    with pytest.raises(ValueError, match="can never proceed"):
        simulate(NEVER[case], PROFILE)


@pytest.mark.parametrize(
    ("plan", "named"),
    [
        (Plan("x", 3, ()), "3 buckets"),
        (Plan("x", 2, (grad(0, Moment("grad", 7)),)), r"grad\(7\)"),
        (Plan("x", 2, (grad(0, Moment("grad", lag=1), Moment("end", lag=1)),)), r"grad\+1"),
        (Plan("x", 2, (grad(0, STEP, link="wifi"),)), "wifi"),
        (Plan("x", 2, (send("net", (0, 3), STEP, STEP),)), "rank"),
        (Plan("x", 2, (replace(grad(0, STEP), when="sync"),)), "sync"),
        (Plan("x", 2, period=0), "period"),
        (Plan("x", 2, groups={"net": ((0,), (2,))}), "groups"),
    ],
)
def test_plans_that_do_not_fit(plan, named):
    with pytest.raises(ValueError, match=named):
        simulate(plan, PROFILE)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"iterations": 0}, "iterations"),
        ({"record": -1}, "record"),
        ({"votes": {"sync": 0.5}}, "votes"),
        ({"ranks": {"jitter": -0.1}}, "jitter"),
        ({"ranks": {"scale": (1.0, 0.0, 1.0)}}, "scale"),
        ({"ranks": {"scale": (1.0, 2.0)}}, "scale"),
        ({"ranks": {"link_rates": {"net": (-1.0,) * 3}}}, "link_rates"),
        ({"ranks": {"link_rates": {"net": (1.0,)}}}, "link_rates"),
        ({"ranks": {"link_rates": {"nat": (1.0,) * 3}}}, "nat"),
        ({"ranks": {"link_rates": {"net#1": (1.0,) * 3}}}, "link_rates"),
    ],
)
def test_settings_that_make_no_sense(settings, named):
    def simulated(ranks=None, **settings):
        return simulate(BSP().plan(PROFILE), PROFILE, ranks=Ranks(**ranks or {}), **settings)

    with pytest.raises(ValueError, match=named):
        simulated(**settings)
