"""Distant links: messages in flight together, and messages after a pause, against closed forms."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import rings

from offbeat.core.profile.elsewhere import extrapolate
from offbeat.core.sim import event_engine, fast_engine
from offbeat.core.sim.ranks import Ranks
from offbeat.core.sim.simulation import make_job
from offbeat.core.sim.trace import COMPUTE
from offbeat.experiments.elsewhere import with_slower_links
from offbeat.plan import Moment, Plan, Vote, transfer
from offbeat.profile import Bucket, Link, Profile
from offbeat.sim import predict, simulate
from offbeat.strategies import BSP, DDP, WFBP, LocalSGD

GRAD, STEP, END = Moment("grad"), Moment("step"), Moment("end")
RATE = 1e6
AFTER_PAUSE = ((1000, 0.04), (1_000_000, 0.16))


def profile_of(*sizes, latency_s=0.5, world_size=2, contention=(), backward_s=1.0, **link):
    """Buckets of these bytes and 1 s of backward; links of 1 MB/s with a latency of .5 s."""
    return Profile(
        tuple(Bucket(f"b{i}", 0.0, backward_s, size) for i, size in enumerate(sizes)),
        (Link("net", latency_s, RATE, **link),),
        world_size,
        contention=contention,
    )


def together(count, after=GRAD):
    """Bucket i on channel i, released at once."""
    transfers = tuple(
        transfer(
            "grad", range(b, b + 1), after=after, before=STEP, phases=[0],
            link=f"net#{b}" if b else "net",
        )
        for b in range(count)
    )  # fmt: skip
    return Plan("x", count, transfers)


def messages(trace):
    return {s.lane: (s.start_s, s.end_s) for s in trace.spans if s.lane != COMPUTE}


def exactly(seconds):
    return pytest.approx(seconds, rel=1e-12)


# ---- messages in flight together -------------------------------------------------------------


@pytest.mark.parametrize("engine", [fast_engine, event_engine])
@pytest.mark.parametrize("size", [100_000, 500_000, 4_000_000])
def test_delays_of_two_messages_overlap_and_their_transfers_do_not(engine, size):
    """L + 2 T, for T below, at and above L."""
    job = make_job(together(2), profile_of(size, size), Ranks(), 1)
    latency_s, transfer_s = 0.5, size / RATE
    [[end_s, *_]] = engine.run(job).ends_s
    assert end_s == exactly(2.0 + latency_s + 2 * transfer_s)


@settings(max_examples=60, deadline=None)
@given(
    ranks=st.integers(2, 5),
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=3),
    latency=st.integers(1, 40),
)
def test_messages_in_flight_together_are_no_faster_than_rings(ranks, sizes, latency):
    """L + T1 + T2 + ... beside rings step by step: one at a time exactly, two at most half of the
    latency slower, k at most (k - 1) / k of it."""
    steps, count = 2 * (ranks - 1), len(sizes)
    latency_s, seconds = latency / 40, [size / 10 for size in sizes]
    profile = profile_of(*(int(s * RATE) for s in seconds), latency_s=latency_s, world_size=ranks)
    trace = simulate(together(count), profile, iterations=1)
    modelled_s = max(end_s for _, end_s in messages(trace).values()) - count
    assert modelled_s == pytest.approx(latency_s + sum(seconds))
    exact_s = max(rings.ends_s([(latency_s / steps, s / steps) for s in seconds], steps))
    assert -1e-9 <= modelled_s - exact_s <= latency_s * (count - 1) / count + 1e-9


@pytest.mark.parametrize(
    ("link", "distant"),
    [
        ({"latency_s": 0.0039}, False),  # 2 steps of less than 2 ms
        ({"latency_s": 0.004}, True),
        ({"latency_s": 0.5, "asked_rate_bps": 8e6}, False),  # the recorded delay decides
        ({"latency_s": 0.5, "asked_rate_bps": 8e6, "asked_latency_s": 0.0009}, False),
        ({"latency_s": 0.0, "asked_rate_bps": 8e6, "asked_latency_s": 0.001}, True),
    ],
)
def test_near_links_are_shared_as_before(link, distant):
    profile = profile_of(100_000, 100_000, **link)
    assert profile.is_distant("net#1") is distant
    message_s = link["latency_s"] + 0.1
    ends_s = message_s + 0.1 if distant else 1.5 * message_s
    assert simulate(together(2), profile, iterations=1).ends_s == ((exactly(2 + ends_s),),)
    assert len({t.link for t in DDP(bucket_cap_mb=0.05).plan(profile).transfers}) == 1 + distant


# ---- messages after a pause ------------------------------------------------------------------


def paused_profile(*sizes, pause_s=1.5, forward_s=1.0, **more):
    profile = profile_of(*sizes, pause_s=pause_s, after_pause=AFTER_PAUSE, **more)
    buckets = tuple(replace(bucket, forward_s=forward_s) for bucket in profile.buckets)
    return replace(profile, buckets=buckets, update_s=0.25, other_s=0.125)


@pytest.mark.parametrize("pause_s", [0.0, 2.374, 2.376, 9.0])
def test_bsp_pauses_for_compute(pause_s):
    """F + B + U + L + M / rate, and the additional time if the link was idle for the compute."""
    profile = paused_profile(1_000_000, pause_s=pause_s)
    additional_s = 0.16 if pause_s <= 1 + 1 + 0.25 + 0.125 else 0.0
    prediction = predict(BSP(), profile)
    assert prediction.iteration_s == exactly(2.375 + 0.5 + 1.0 + additional_s)
    assert prediction.busy_s["net"] == exactly(1.5 + additional_s)
    assert prediction.exposed_s == exactly(1.5 + additional_s)


def test_only_the_first_of_several_messages_follows_a_pause():
    """Bucket 0 after forward and backward; bucket 1 waits behind it."""
    profile = paused_profile(1_000_000, 1000, pause_s=0.5)
    prediction = predict(WFBP(fusion="none"), profile)
    # Released after 1 s of backward: 1.66 s, then .501 s, while backward has 1 s left.
    assert prediction.iteration_s == exactly(0.125 + 2 + 1 + 1.66 + 0.501 + 0.25)


def test_additional_time_by_size():
    """Linear in the logarithm of the size, constant outside; of a send by its step of a ring."""
    link = Link("net", 0.5, RATE, pause_s=1.0, after_pause=AFTER_PAUSE)
    for size, seconds in ((1, 0.04), (1000, 0.04), (1e6, 0.16), (1e9, 0.16), (1e4, 0.08)):
        assert link.additional_s(size) == pytest.approx(seconds)
    assert link.additional_s(2500, "send", 4) == pytest.approx(0.08)
    assert link.additional_s(1e4, "reduce_scatter", 4) == pytest.approx(0.08)
    assert Link("net", 0.5, RATE).additional_s(1e4) == 0.0


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("engine", [fast_engine, event_engine])
def test_skipped_messages_do_not_end_a_pause(engine, count):
    """With a vote of no, the link is idle over two iterations. Also with two messages in flight."""
    transfers = tuple(replace(t, when="vote") for t in together(count).transfers)
    vote = Vote("vote", "changed", Moment("forward"), GRAD, [0], {"threshold": 1.0})
    plan = Plan("x", count, transfers, votes=(vote,))
    compute_s = 2.0 * count
    profile = paused_profile(*[100_000] * count, pause_s=compute_s + 1)
    profile = replace(profile, other_s=0.0, update_s=0.0)
    votes = {"vote": [True, False, True, True]}
    run = engine.run(make_job(plan, profile, Ranks(), 4, votes=votes))
    lengths = [b - a for a, b in pairwise([0.0, *run.ends_s[:, 0]])]
    both_s = 0.6 if count == 1 else 0.7
    messages_s = [both_s, 0.0, both_s + 0.04 + 0.12 * 2 / 3, both_s]
    assert lengths == [exactly(compute_s + seconds) for seconds in messages_s]


def test_a_pause_over_several_iterations():
    """Every third iteration sends: the link is idle for two and a half."""
    profile = paused_profile(1_000_000, pause_s=7.0)
    prediction = predict(LocalSGD(period=3), profile)
    assert prediction.steady
    assert prediction.iteration_s == exactly(2.375 + 1.66 / 3)


def test_other_networks_and_files_keep_pauses():
    profile = paused_profile(1_000_000)
    assert Profile.from_dict(profile.to_dict()) == profile
    [slower] = with_slower_links(profile, 2.0).links
    assert (slower.pause_s, slower.after_pause) == (1.5, ((1000, 0.08), (1_000_000, 0.32)))
    [other] = extrapolate(profile, hosts=4, rate_bps=1e9).links
    assert other.after_pause == AFTER_PAUSE


@pytest.mark.parametrize(
    ("link", "named"),
    [
        ({"pause_s": -1.0}, "pause_s"),
        ({"after_pause": ((2, 1.0), (1, 1.0))}, "pause"),
        ({"after_pause": ((0, 1.0),)}, "bytes"),
        ({"after_pause": ((1, -1.0),)}, "seconds"),
    ],
)
def test_wrong_pauses_are_refused(link, named):
    with pytest.raises(ValueError, match=named):
        profile_of(1, **link)
