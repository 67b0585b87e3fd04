"""Channels, and links that slow each other down, in timelines worked out by hand."""

from dataclasses import replace

import pytest

from offbeat.core.sim.trace import COMPUTE
from offbeat.plan import Moment, Payload, Plan, transfer
from offbeat.profile import Bucket, Contention, Link, Profile
from offbeat.sim import simulate

STEP = Moment("step")


def profile_of(net_s, *, links=("net", "aux"), contention=()):
    """Buckets of 1 s of backward each, with their seconds on net; twice as many on aux."""
    return Profile(
        buckets=tuple(
            Bucket(f"b{i}", 0.0, 1.0, 100, {n: s * (1 + k) for k, n in enumerate(links)})
            for i, s in enumerate(net_s)
        ),
        links=tuple(Link(name, 0.0, 1e9) for name in links),
        world_size=2,
        contention=contention,
    )


def plan_of(*links, after=None, before=STEP):
    """Bucket b goes over the b-th of these links, by default once its gradient exists."""
    transfers = tuple(
        transfer(
            "grad",
            range(b, b + 1),
            after=after or Moment("grad", b),
            before=before,
            phases=[0],
            link=link,
        )
        for b, link in enumerate(links)
    )
    return Plan("x", len(links), transfers)


def messages(trace):
    return {s.lane: (s.start_s, s.end_s) for s in trace.spans if s.lane != COMPUTE}


def exactly(*seconds):
    return pytest.approx(seconds, rel=1e-12)


def test_speed_changes_whenever_a_message_begins_or_ends():
    # Alone from 1 to 2, net has 3 of 4 s left; at 2/3 of the speed net#1 needs 3 s for its 2, in
    # which net does 2 of its 3; the last one it does alone.
    trace = simulate(plan_of("net", "net#1"), profile_of([4.0, 2.0]), iterations=1)
    assert messages(trace) == {"net": exactly(1.0, 6.0), "net#1": exactly(2.0, 5.0)}
    assert trace.ends_s[0] == exactly(6.0)


def test_each_of_two_links_loses_its_own_share():
    # net is alone for 1 s; then 1/4 of its speed is left to it, and 4/5 of its own to aux.
    lossy = (Contention(("aux", "net"), (0.8, 0.25)),)
    trace = simulate(plan_of("net", "aux"), profile_of([3.0, 2.0], contention=lossy), iterations=1)
    assert messages(trace) == {"net": exactly(1.0, 2 + 5 + 0.75), "aux": exactly(2.0, 2 + 4 / 0.8)}


def send(link, *ranks):
    return transfer(
        "param",
        range(1),
        after=Moment("grad"),
        before=STEP,
        phases=[0],
        link=link,
        verb="send",
        ranks=ranks,
    )


def test_only_ranks_that_carry_both_slow_down():
    # 0->1 on net and 2->1 on its channel share rank 1; 2->3 shares rank 2 with the latter only.
    profile = replace(profile_of([2.0]), world_size=4)
    alone_s = profile.message_s(Payload("param", range(1)), "net", "send")
    # Only receivers wait: ranks 1 and 3.
    apart = simulate(Plan("x", 1, (send("net", 0, 1), send("net#1", 2, 3))), profile, iterations=1)
    assert apart.ends_s == ((1.0,), exactly(1 + alone_s), (1.0,), exactly(1 + alone_s))
    plan = Plan("x", 1, (send("net", 0, 1), send("net#1", 2, 1), send("net", 2, 3)))
    chain = simulate(plan, profile, iterations=1)
    assert chain.ends_s == ((1.0,), exactly(1 + 2 * alone_s), (1.0,), exactly(1 + 2 * alone_s))


def test_sends_of_one_link_share_it_evenly_whatever_all_reduces_lose():
    lossless = (Contention(("net", "net"), (1.0, 1.0)),)
    for contention in ((), lossless):
        profile = replace(profile_of([2.0], contention=contention), world_size=4)
        alone_s = profile.message_s(Payload("param", range(1)), "net", "send")
        plan = Plan("x", 1, (send("net", 0, 3), send("net#1", 1, 3), send("net#2", 2, 3)))
        trace = simulate(plan, profile, iterations=1)
        assert trace.ends_s == ((1.0,), (1.0,), (1.0,), exactly(1 + 3 * alone_s))
