"""The simulator against closed forms, and against small timelines worked out by hand."""

from dataclasses import replace
from itertools import accumulate

import pytest
from harness.parts import (
    Planning,
    cycle_of,
    event_engine,
    fast_engine,
    gradients_when_ready,
    make_job,
    message_seconds,
    to_trace,
)
from hypothesis import given, settings
from oracle import random_timelines

from offbeat.plan import Apply, Moment, Payload, Plan, local, transfer
from offbeat.profile import Bucket, Link, Profile
from offbeat.sim import Ranks, predict, predict_plan, simulate
from offbeat.strategies import BSP, WFBP, DreamDDP, LocalSGD, PartialSync
from offbeat.strategies import solvers as solve

ALIKE = random_timelines.profiles(most_buckets=8, links=("net",), rank_scales=False)
SECONDS = random_timelines.SECONDS
FORWARD, STEP = Moment("forward"), Moment("step")


def exactly(seconds):
    return pytest.approx(seconds, rel=1e-9, abs=1e-12)


def profile_of(*buckets, latency_s=0.0, **more):
    """Buckets as (forward_s, backward_s, communication_s on net, and on aux if there is one)."""
    names = ("net", "aux")[: len(buckets[0]) - 2]
    return Profile(
        buckets=tuple(
            Bucket(f"b{i}", f, b, 100, dict(zip(names, c, strict=True)))
            for i, (f, b, *c) in enumerate(buckets)
        ),
        links=tuple(Link(name, latency_s, 1e9) for name in names),
        world_size=more.pop("world_size", 2),
        **more,
    )


def computed_s(profile):
    return profile.other_s + profile.forward_s + profile.backward_s + profile.update_s


@settings(max_examples=20, deadline=None)
@given(ALIKE)
def test_bsp_adds_one_message(profile):
    size = len(profile.buckets)
    message_s = profile.message_s(Payload("grad", range(size)), "net")
    prediction = predict(BSP(), profile)
    assert prediction.iteration_s == exactly(computed_s(profile) + message_s)
    assert prediction.exposed_s == exactly(message_s)


@settings(max_examples=20, deadline=None)
@given(ALIKE)
def test_wfbp_follows_its_recursion(profile):
    end_s = 0.0
    for ready_s, message_s in zip(profile.ready_s, profile.communication_s("net"), strict=True):
        end_s = max(ready_s, end_s) + message_s
    exposed_s = max(end_s - profile.backward_s, 0.0)
    prediction = predict(WFBP(fusion="none"), profile)
    assert prediction.iteration_s == exactly(computed_s(profile) + exposed_s)
    assert prediction.exposed_s == exactly(exposed_s)


@settings(max_examples=20, deadline=None)
@given(ALIKE)
def test_optimal_fusion_takes_what_the_solver_says(profile):
    groups = [t.payload.buckets for t in WFBP().plan(profile).transfers]
    end_s = solve.fusion_finish(groups, profile.ready_s, message_seconds(profile))
    expected_s = computed_s(profile) + max(end_s - profile.backward_s, 0.0)
    assert predict(WFBP(), profile).iteration_s == exactly(expected_s)


@settings(max_examples=15, deadline=None)
@given(random_timelines.profiles(most_buckets=5, links=("net",), rank_scales=False), SECONDS)
def test_fusion_includes_what_messages_take_from_compute(profile, each_s):
    """No other division into messages is simulated to be faster."""
    link = replace(profile.links[0], cpu_s_per_message=0.125 + each_s, cpu_s_per_byte=each_s / 8)
    buckets = tuple(replace(b, size_bytes=1 + b.size_bytes) for b in profile.buckets)
    profile = replace(profile, buckets=buckets, links=(link,), world_size=2)
    fastest_s = min(
        predict_plan(gradients_when_ready("wfbp", profile, groups), profile).iteration_s
        for groups in divisions(len(buckets))
    )
    assert predict(WFBP(), profile).iteration_s == exactly(fastest_s)


def divisions(count):
    """All divisions of buckets into groups of neighbours."""
    for mask in range(1 << (count - 1)):
        cuts = [i + 1 for i in range(count - 1) if mask >> i & 1]
        yield tuple(map(range, [0, *cuts], [*cuts, count]))


@settings(max_examples=15, deadline=None)
@given(ALIKE)
def test_local_sgd_adds_one_message_per_period(profile):
    message_s = profile.message_s(Payload("param", range(len(profile.buckets))), "net")
    prediction = predict(LocalSGD(period=3, warmup=2), profile)
    assert prediction.iteration_s == exactly(computed_s(profile) + message_s / 3)


@pytest.mark.parametrize("average", ["after_update", "before_update"])
@pytest.mark.parametrize("state", ["local", "averaged"])
@settings(max_examples=15, deadline=None)
@given(profile=ALIKE)
def test_partial_sync_costs_what_the_solvers_minimize(profile, average, state):
    for strategy in (
        PartialSync(period=3, average=average, state=state),
        DreamDDP(period=3, average=average, state=state, fill=False, solver="balanced"),
        DreamDDP(period=4, average=average, state=state, fill=True, solver="optimal"),
    ):
        prediction = predict(strategy, profile)
        sets = prediction.plan.fact("sets")
        cycle = cycle_of(Planning("", profile, strategy.period, average, state), "end")
        assert prediction.iteration_s == exactly(sum(map(cycle.cost, sets)) / len(sets))


def test_a_forward_deadline_hides_a_message_under_the_next_forward():
    # Bucket 0 is needed last by the forward: from grad(0) it has 2 s of backward and 1 s of
    # forward, and takes 5 s. Bucket 1 is needed first, but its message is behind the other's.
    plan = Plan(
        "priority",
        2,
        (
            transfer(
                "grad",
                range(1),
                after=Moment("grad", 0),
                before=Moment("forward", 0, lag=1),
                phases=[0],
                link="net",
            ),
        ),
    )
    profile = profile_of((4.0, 3.0, 5.0), (1.0, 2.0, 5.0))
    prediction = predict_plan(plan, profile)
    assert prediction.iteration_s == exactly(10 + 2)
    assert prediction.exposed_s == exactly(2)
    waits = [s for s in prediction.trace.spans if s.kind == "wait"]
    assert {(w.end_s - w.start_s, w.buckets) for w in waits} == {(2.0, None)}


def late_plan(size):
    """Each bucket's parameters are averaged after the step, and due at its own next forward."""
    transfers = [
        transfer(
            "param",
            range(b, b + 1),
            after=STEP,
            before=Moment("forward", b, lag=1),
            phases=[0],
            link="net",
        )
        for b in reversed(range(size))
    ]
    return Plan("late", size, tuple(transfers), (local(size, STEP, [0]),))


@settings(max_examples=20, deadline=None)
@given(ALIKE)
def test_shards_await_all_averages_when_the_forward_begins(profile):
    """Whole replicas hide a message behind the forward of the buckets before, shards hide none."""
    plan = late_plan(len(profile.buckets))
    message_s = profile.communication_s("net", "param")
    now_s, end_s = profile.other_s, 0.0
    for b in reversed(range(plan.buckets)):
        end_s += message_s[b]
        now_s = max(now_s, end_s) + profile.buckets[b].forward_s
    local_s = profile.backward_s + profile.update_s
    assert predict_plan(plan, profile).iteration_s == exactly(now_s + local_s)
    sharded = replace(profile, topology=(2,) * profile.world_size, sharded=True)
    prediction = predict_plan(plan, sharded)
    begun_s = max(profile.other_s, sum(message_s))
    assert prediction.iteration_s == exactly(begun_s + profile.forward_s + local_s)
    assert prediction.exposed_s == exactly(begun_s - profile.other_s)


@pytest.mark.parametrize("engine", [fast_engine, event_engine])
def test_the_forward_of_shards_in_both_engines(engine):
    # Forward 1 + 1 s, backward 2 + 2 s; bucket 1's message ends at 6 + 5, bucket 0's at 11 + 3.
    profile = profile_of((1.0, 2.0, 3.0), (1.0, 2.0, 5.0), topology=(2, 2), sharded=True)
    plan = late_plan(2)
    job = make_job(plan, profile, Ranks(), 2)
    trace = to_trace(engine.run(job), plan, range(2), range(1, 2))
    assert trace.ends_s[0] == (6.0, 14.0 + 6.0)
    shown = [(s.name, s.start_s, s.end_s) for s in trace.spans if s.rank == 0]
    assert shown[:4] == [
        ("wait", 6.0, 11.0),
        ("wait", 11.0, 14.0),
        ("forward[1:2]", 14.0, 15.0),
        ("forward[0:1]", 15.0, 16.0),
    ]


def test_messages_wait_behind_one_that_is_released_later():
    first = transfer(
        "grad", range(1, 2), after=Moment("grad", 1), before=STEP, phases=[0], link="net"
    )
    second = transfer(
        "grad", range(1), after=Moment("grad", 0), before=STEP, phases=[0], link="net"
    )
    profile = profile_of((0.0, 1.0, 4.0), (0.0, 2.0, 8.0))
    in_order, reverse = (Plan("x", 2, ts) for ts in ((second, first), (first, second)))
    assert predict_plan(in_order, profile).iteration_s == exactly(1 + 4 + 8)
    assert predict_plan(reverse, profile).iteration_s == exactly(3 + 8 + 4)


def test_links_carry_messages_at_the_same_time():
    transfers = [
        transfer(
            "grad", range(b, b + 1), after=Moment("grad", b), before=STEP, phases=[0], link=link
        )
        for b, link in ((0, "net"), (1, "aux"))
    ]
    profile = profile_of((1.0, 1.0, 5.0, 99.0), (1.0, 2.0, 99.0, 7.0), update_s=1.0)
    prediction = predict_plan(Plan("x", 2, tuple(transfers), (local(2, STEP, [0]),)), profile)
    assert prediction.iteration_s == exactly(2 + max(1 + 5, 3 + 7) + 1)
    assert prediction.busy_s == {"net": exactly(5), "aux": exactly(7)}
    assert prediction.idle_s == {"net": exactly(13 - 5), "aux": exactly(13 - 7)}


def test_a_link_that_is_slightly_too_slow_sets_the_pace_in_the_end():
    # The link falls behind by 1 % of an iteration until the deadlines, three later, hold.
    everything = transfer(
        "grad", range(1), after=Moment("grad"), before=Moment("step", lag=3), phases=[0], link="net"
    )
    profile = profile_of((40.0, 60.0, 101.0))
    prediction = predict_plan(Plan("stale", 1, (everything,)), profile)
    assert prediction.steady
    assert prediction.iteration_s == exactly(101.0)
    assert prediction.exposed_s == exactly(1.0)


def test_an_update_waits_for_what_is_due_at_its_moment():
    # Messages of 3 s from 1 and 2 on end at 4 and 7. In the next iteration each bucket's update of
    # 1 s waits for its own before its forward: the input side's, bucket 1, comes first.
    transfers = [
        transfer(
            "grad",
            range(b, b + 1),
            after=Moment("grad", b),
            before=Moment("forward", b, lag=1),
            phases=[0],
            link="net",
        )
        for b in range(2)
    ]
    profile = profile_of((0.0, 1.0, 3.0), (0.0, 1.0, 3.0), update_s=2.0)
    plan = Plan("x", 2, tuple(transfers), (local(2, Moment("forward", lag=1), [0]),))
    trace = simulate(plan, profile, iterations=2)
    assert trace.ends_s == ((2.0, 7 + 2 + 2.0),)
    # At one moment a rank waits, then applies, then releases.
    moment = Moment("grad", 1)
    early = [replace(t, before=moment) for t in transfers[:1]]
    late = transfer("param", range(2), after=moment, before=Moment("end"), phases=[0], link="net")
    plan = Plan("x", 2, (*early, late), (Apply("local", range(2), moment, [0]),))
    # 4: the message, 6: the update, then both buckets' parameters in one message of 3 + 3 s.
    assert simulate(plan, profile, iterations=1).ends_s == ((12.0,),)


def test_the_slowest_rank_sets_the_pace():
    profile = profile_of((1.0, 2.0, 4.0), world_size=3, rank_scale=(0.5, 1.0, 1.5), other_s=0.25)
    prediction = predict(BSP(), profile)
    assert prediction.iteration_s == exactly(0.25 + 1.5 * 3 + 4)
    waits = [s for s in prediction.trace.spans if s.kind == "wait"]
    assert [(w.rank, w.end_s - w.start_s) for w in waits] == [
        (0, exactly(4 + 3)),
        (1, exactly(4 + 1.5)),
        (2, exactly(4)),
    ]
    messages = [s for s in prediction.trace.spans if s.lane == "net"]
    assert [m.end_s - m.start_s for m in messages] == [exactly(7), exactly(5.5), exactly(4)]
    assert prediction.exposed_s == exactly((7 + 5.5 + 4) / 3)
    assert prediction.idle_s["net"] == exactly(4.75)


def test_the_slowest_rate_sets_the_pace_of_a_collective():
    profile = profile_of((1.0, 2.0, 4.0), world_size=2)
    ranks = Ranks(link_rates={"net": (2.0, 0.5)})
    assert predict(BSP(), profile, ranks=ranks).iteration_s == exactly(3 + 8)


def test_local_steps_average_stragglers_out():
    # Ranks take turns at being slow only with jitter: synchronizing rarely then costs less.
    profile = profile_of((1.0, 2.0, 0.0), world_size=32)
    often, rarely = (
        predict(strategy, profile, ranks=Ranks(jitter=0.3)).iteration_s
        for strategy in (BSP(), LocalSGD(period=20))
    )
    assert 3.0 < rarely < 3.6 < often < 6.0


def test_a_prologue_happens_once():
    profile = profile_of((1.0, 2.0, 4.0))
    trace = simulate(LocalSGD(period=2, warmup=3).plan(profile), profile, iterations=9)
    seconds = [7.0, 7.0, 7.0, 3.0, 7.0, 3.0, 7.0, 3.0, 7.0]
    assert trace.iteration_seconds() == seconds
    assert trace.ends_s == (tuple(accumulate(seconds)),)


def test_a_timeline_by_hand():
    profile = profile_of((1.0, 2.0, 4.0), (0.5, 1.0, 2.0), update_s=1.0, other_s=0.25)
    plan = PartialSync(period=2).plan(profile)
    trace = simulate(plan, profile, iterations=4)
    shown = [
        (s.lane, s.name, s.iteration, s.start_s, s.end_s) for s in trace.spans if s.iteration == 2
    ]
    # Iterations 0 and 1: 0.25 + 1.5 + backward 3 with updates 1, and 1.5 more where bucket 0's
    # message outlasts the rest of backward (1.5); bucket 1's is wholly exposed (2).
    begin = 5.75 + 2.5 + 5.75 + 2.0
    assert [trace.ends_s[0][1]] == [begin]
    assert shown == [
        ("compute", "other", 2, begin, begin + 0.25),
        ("compute", "forward[1:2]", 2, begin + 0.25, begin + 0.75),
        ("compute", "forward[0:1]", 2, begin + 0.75, begin + 1.75),
        ("compute", "backward[0:1]", 2, begin + 1.75, begin + 3.75),
        ("compute", "update[0:1]", 2, begin + 3.75, begin + 4.25),
        ("compute", "backward[1:2]", 2, begin + 4.25, begin + 5.25),
        ("net", "param[0:1]", 2, begin + 4.25, begin + 8.25),
        ("compute", "update[1:2]", 2, begin + 5.25, begin + 5.75),
        ("compute", "wait", 2, begin + 5.75, begin + 8.25),
    ]


def test_messages_and_calls_of_the_optimizer_take_from_compute():
    # Backward 2 + 2 s, an update of 1 s per bucket, each with a call of .5 s. A message takes 4 s
    # on the link and .25 s from what comes after its release.
    link = Link("net", 4.0, 1e12, cpu_s_per_message=0.25)
    layers = tuple(Bucket(f"b{i}", 1.0, 2.0, 100) for i in range(2))
    profile = Profile(layers, (link,), 2, update_s=2.0, step_s=0.5)
    compute_s = 2 * 1.0 + 2 * 2.0 + 2 * (1.0 + 0.5)
    alone = PartialSync(period=2).plan(profile)
    first, second = predict_plan(alone, profile).trace.iteration_seconds()[-2:]
    assert first == exactly(compute_s + 0.5)  # released after 5.5 s, with 3.5 s to go and .25 s
    assert second == exactly(compute_s + 4.0)  # the last bucket's: who waits loses nothing more
    assert predict(LocalSGD(period=2), profile).iteration_s == exactly(2 + 4 + 2 + 4 / 2)
