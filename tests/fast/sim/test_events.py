"""Plans in which ranks differ in what they do: sends, groups and pipelines, by hand."""

from dataclasses import replace

import pytest

from offbeat.core.sim.trace import COMPUTE
from offbeat.plan import Buffer, Moment, Plan, transfer
from offbeat.profile import Bucket, Link, Profile
from offbeat.sim import Ranks, predict_plan, simulate

GRAD, STEP, END = Moment("grad"), Moment("step"), Moment("end")


def profile_of(*message_s, world_size=2, **more):
    """Buckets of 1 s of backward, with the seconds of sending them."""
    # Half an all-reduce takes half of it; so does a send, as long as nothing else is measured.
    buckets = tuple(Bucket(f"b{i}", 0.0, 1.0, 100, {"net": s}) for i, s in enumerate(message_s))
    return Profile(buckets, (Link("net", 0.0, 1e9),), world_size, **more)


def sent(ranks, after=GRAD, before=STEP, buckets=range(1), link="net", **more):
    return transfer(
        "grad",
        buckets,
        after=after,
        before=before,
        phases=[0],
        link=link,
        verb="send",
        ranks=ranks,
        into="sum",
        **more,
    )


def plan_of(*transfers, buckets=1, **more):
    return Plan("x", buckets, transfers, buffers=(Buffer("sum", "grad"),), **more)


def seconds(profile, t):
    return profile.message_s(replace(t.payload, buffer="grad"), t.link, t.verb)


def shown(trace):
    return [(s.rank, s.kind, s.start_s, s.end_s) for s in trace.spans if s.lane != COMPUTE]


def test_a_chain_of_sends():
    # Each rank sends on what it has received; nobody but the receiver waits.
    profile = profile_of(4.0, world_size=3)
    chain = plan_of(sent((0, 1)), sent((1, 2), after=STEP, before=END))
    s = seconds(profile, chain.transfers[0])
    trace = simulate(chain, profile, iterations=1)
    assert trace.ends_s == ((1.0,), (1 + s,), (1 + 2 * s,))
    assert shown(trace) == [
        (0, "send", 1.0, 1 + s),
        (1, "send", 1.0, 1 + s),
        (1, "send", 1 + s, 1 + 2 * s),
        (2, "send", 1 + s, 1 + 2 * s),
    ]
    prediction = predict_plan(chain, profile, iterations=1)
    assert prediction.busy_s == {"net": pytest.approx((s + 2 * s + s) / 3)}
    assert prediction.bytes_per_iteration == {"net": pytest.approx(400 / 3)}
    assert prediction.exposed_s == pytest.approx((0 + s + 2 * s) / 3)


@pytest.mark.parametrize(("backward_s", "first_s"), [(1.0, 0.55), (0.02, 0.58)])
def test_an_early_request_takes_no_time_from_a_message(backward_s, first_s):
    """Over a path of .05 s: a request, then 100 bytes at 200 per second. The first request is sent
    at the start, the second after the first message, and the third at the start again."""
    bucket, link = Bucket("b", 0.0, backward_s, 100), Link("net", 0.4, 150.0)
    plan = plan_of(sent((0, 1)), sent((0, 1)), sent((0, 2)))
    distant = Profile((bucket,), (replace(link, pair_bytes_per_s=200.0),), 3)
    one, two, three = (ends[0] for ends in simulate(plan, distant, iterations=1).ends_s)
    assert one == backward_s
    assert two == pytest.approx(backward_s + first_s + 0.6)
    assert three == pytest.approx(two + 0.55)
    near = Profile((bucket,), (link,), 3)
    ends_s = [ends[0] - backward_s for ends in simulate(plan, near, iterations=1).ends_s]
    assert ends_s == pytest.approx([0.0, 1.2, 1.8])


def test_collectives_span_one_part_of_a_links_groups():
    profile = profile_of(4.0, world_size=4, rank_scale=(1.0, 1.0, 1.0, 3.0))
    average = transfer("grad", range(1), after=GRAD, before=STEP, phases=[0], link="net")
    plan = plan_of(average, groups={"net": ((0, 1), (2, 3))})
    trace = simulate(plan, profile, iterations=1)
    assert trace.ends_s == ((5.0,), (5.0,), (7.0,), (7.0,))
    slow = Ranks(link_rates={"net": (0.5, 1.0, 1.0, 1.0)})
    trace = simulate(plan, profile, iterations=1, ranks=slow)
    assert trace.ends_s == ((9.0,), (9.0,), (7.0,), (7.0,))


def test_other_buffers_cost_as_the_kind_that_they_are_like():
    bucket = Bucket("b", 0.0, 1.0, 100, buffer_bytes=50, state_bytes=400)
    profile = Profile((bucket,), (Link("net", 0.0, 100.0),), 2)
    for kind, s in (("grad", 1.0), ("param", 1.5), ("state", 4.0)):
        move = transfer("mine", range(1), after=GRAD, before=STEP, phases=[0], link="net")
        plan = Plan("x", 1, (move,), buffers=(Buffer("mine", kind),))
        trace = simulate(plan, profile, iterations=1)
        assert trace.ends_s == ((1 + s,),)
        (span,) = (x for x in trace.spans if x.lane == "net")
        assert (span.kind, span.bytes) == (kind, 100 * s)
