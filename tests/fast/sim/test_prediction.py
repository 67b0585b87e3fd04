"""Predictions: the steady state, against long simulations and on every strategy."""

import json
from dataclasses import replace
from statistics import fmean

import pytest
from cases.strategy_lists import ALL, STRATEGIES
from harness.parts import Windows, network_rate_bps, traffic_bps
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import random_timelines

from offbeat.plan import Moment, Plan, transfer
from offbeat.profile import Bucket, Link, Profile
from offbeat.sim import Ranks, predict, predict_plan, simulate
from offbeat.strategies import BSP, WFBP, Cyclic, LocalSGD

PROFILE = Profile(
    (Bucket("a", 1.0, 2.0, 8, state_bytes=16), Bucket("b", 0.5, 1.0, 4, buffer_bytes=2)),
    (Link("net", 0.5, 4.0), Link("spare", 0.0, 1.0)),
    world_size=4,
    update_s=0.5,
)


@settings(max_examples=6, deadline=None)
@given(st.data())
def test_the_steady_state_is_that_of_a_long_simulation(data):
    profile = data.draw(random_timelines.profiles(most_buckets=3, contention=True))
    plan = data.draw(random_timelines.plans(profile, sends=data.draw(st.booleans())))
    prediction = proceed(plan, profile)
    if prediction is None or not prediction.steady:
        return  # ranks that never wait for each other drift apart
    count = prediction.plan.prologue + 120 * prediction.plan.period
    seconds = simulate(plan, profile, iterations=count, record=0).iteration_seconds()
    half = 60 * prediction.plan.period
    assert prediction.iteration_s == pytest.approx(fmean(seconds[-half:]), rel=1e-9)


def test_a_steady_state_that_disturbed_messages_end_is_not_predicted():
    # Undisturbed, this plan settles where messages happen to pass each other.
    sizes = [(2, 5, 9), (2, 4, 8), (2, 4, 8), (3, 4, 10)]
    profile = Profile(
        tuple(Bucket(f"b{i}", *given) for i, given in enumerate(sizes)),
        (Link("net", 0.0, 1.4),),
        world_size=4,
        update_s=1.0,
    )
    plan = Cyclic(stagger="least").plan(profile)
    predicted_s = predict_plan(plan, profile).iteration_s
    lucky_s = simulate(plan, profile, iterations=60, record=0).iteration_seconds()[-1]
    assert predicted_s > 1.1 * lucky_s
    disturbed = replace(profile, links=(replace(profile.links[0], jitter=0.1),))
    seconds = simulate(plan, disturbed, iterations=120, record=0, seed=1).iteration_seconds()
    assert predicted_s == pytest.approx(fmean(seconds[60:]), rel=0.03)


def proceed(plan, profile):
    try:
        return predict_plan(plan, profile)
    except ValueError:
        return None


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:.*WFBP")  # DeFT where it is no use
@settings(max_examples=10, deadline=None)
@given(random_timelines.profiles(most_buckets=6))
def test_nothing_beats_the_bound_and_all_time_is_accounted_for(profile):
    for cls in STRATEGIES.values():
        strategy = cls()
        try:
            plan = strategy.plan(profile)
        except ValueError:
            continue  # some planners refuse profiles that are no use to them
        prediction = predict_plan(plan, profile)
        assert prediction.bound_s is not None
        # Messages that vary are short at times, too.
        short = 1e-12 if plan.source is None else 0.02
        assert prediction.iteration_s >= prediction.bound_s * (1 - short)
        for link, busy_s in prediction.busy_s.items():
            assert prediction.idle_s[link] + busy_s == pytest.approx(prediction.iteration_s)
        windows = Windows(plan)
        if not profile.rank_scale:
            updates = fmean(bool(windows.applied_window(i)) for i in prediction.window)
            computed_s = profile.other_s + profile.forward_s + profile.backward_s
            alone = plan.source is not None  # one rank updates for all
            computed_s += profile.update_s * updates / (profile.world_size if alone else 1)
            # Ranks that do not settle end the window a little further apart than they began it.
            rel = 1e-6 if prediction.steady else 0.02
            spent_s = computed_s + prediction.exposed_s
            assert prediction.iteration_s == pytest.approx(spent_s, rel=rel)


def test_bytes_are_payload_per_iteration():
    prediction = predict(LocalSGD(period=4, state="averaged"), PROFILE)
    assert prediction.bytes_per_iteration == {"net": (8 + 4 + 2 + 16) / 4, "spare": 0.0}
    assert prediction.idle_s["spare"] == prediction.iteration_s


def test_json_form():
    prediction = predict(WFBP(fusion="none"), PROFILE)
    data = json.loads(json.dumps(prediction.to_dict()))
    # Messages of 2.5 s and 1.5 s from 2 s of 3 s of backward on.
    assert data == {
        "schema": 1,
        "strategy": "wfbp(fusion=none)",
        "iteration_s": 1.5 + 2 + 2.5 + 1.5 + 0.5,
        "bound_s": 5.0,
        "exposed_s": 3.0,
        "busy_s": {"net": 4.0, "spare": 0.0},
        "idle_s": {"net": 4.0, "spare": 8.0},
        "bytes_per_iteration": {"net": 12.0, "spare": 0.0},
        "window": data["window"],
        "steady": True,
    }


def test_the_trace_is_the_last_period_with_the_numbers():
    strategy = LocalSGD(period=3, warmup=1)
    prediction = predict(strategy, PROFILE)
    trace = prediction.trace
    assert (trace.first - 1) % 3 == 0
    assert trace.iterations == trace.period == 3
    assert {span.iteration for span in trace.spans} == set(range(trace.first, trace.first + 3))
    assert trace.iteration_s() == pytest.approx(prediction.iteration_s)
    whole = simulate(strategy.plan(PROFILE), PROFILE, iterations=trace.first + 3)
    assert trace.starts_s == (whole.ends_s[0][trace.first - 1],)
    assert trace.ends_s == (whole.ends_s[0][trace.first :],)
    assert trace.spans == whole.spans
    assert trace.notes == {
        "ranks": 4,
        "iteration_s": prediction.iteration_s,
        "bound_s": prediction.bound_s,
        "exposed_s": prediction.exposed_s,
        "steady": True,
        "heartbeat_share": {
            link.name: round(traffic_bps(4) / network_rate_bps(link, 4), 4)
            for link in PROFILE.links
        },
    }


def test_trace_states_the_share_of_the_heartbeat():
    """For links of which it takes more than 0.1 %: 23 kbit/s at 4 ranks, 488 at 128."""

    def share(ranks, bits_per_s):
        links = (replace(Link("net", 1e-4, 1e6), asked_rate_bps=bits_per_s),)
        profile = replace(PROFILE, world_size=ranks, links=links)
        return predict(BSP(), profile).trace.notes.get("heartbeat_share")

    assert share(4, 1e7) == {"net": 0.0023}
    assert share(4, 1e8) is None
    assert share(128, 1e8) == {"net": 0.0049}
    assert share(1, 1e3) is None


def test_too_few_iterations_are_averaged_as_they_are():
    prediction = predict(LocalSGD(period=4), PROFILE, iterations=2)
    assert not prediction.steady
    assert prediction.window == range(2)
    assert prediction.iteration_s == 5.0


@pytest.mark.parametrize("name", ["bsp", "dreamddp", "selsync", "ssp", "a2cid2"])
def test_a_sample_of_jitter_is_not_faster_than_the_bound(name):
    """One rank has no other one to wait for, so half of all samples would be."""
    alone = replace(PROFILE, world_size=1, links=(Link("net", 1e-9, 1e12),), jitter=0.1)
    strategy, below = ALL[name](), 0
    for seed in range(6):
        prediction = predict(strategy, alone, seed=seed)
        assert prediction.iteration_s >= prediction.bound_s
        assert prediction.trace.notes["iteration_s"] == prediction.iteration_s
        below += prediction.iteration_s == prediction.bound_s
    assert below  # some samples were


def test_jitter_is_averaged_over_many_iterations():
    # The mean of the larger of two lognormal factors with deviation s is 1 + s / sqrt(pi) + O(s^2).
    profile = Profile(PROFILE.buckets, PROFILE.links, world_size=2)
    prediction = predict(BSP(), profile, ranks=Ranks(jitter=0.1))
    assert not prediction.steady
    assert len(prediction.window) == 200
    assert prediction.iteration_s == pytest.approx(4.5 * (1 + 0.1 / 3.1416**0.5) + 3.5, rel=0.01)


def test_the_bound_is_the_plans():
    plan = BSP().plan(PROFILE)
    assert predict_plan(plan, PROFILE).bound_s == BSP().bound_s(PROFILE)
    prediction = predict_plan(replace(plan, bound_s=None), PROFILE)
    assert (prediction.strategy, prediction.bound_s) == ("bsp", None)


def test_a_plan_that_moves_nothing():
    plan = Plan("alone", 2, ())
    prediction = predict_plan(plan, PROFILE)
    assert (prediction.iteration_s, prediction.exposed_s) == (4.5, 0.0)


def test_ranks_that_never_meet_have_no_common_cycle():
    prediction = predict_plan(Plan("alone", 2, ()), PROFILE, ranks=Ranks(scale=(1, 1, 1, 2)))
    assert not prediction.steady
    assert prediction.iteration_s == pytest.approx(9.0)


def test_iterations_must_be_positive():
    with pytest.raises(ValueError, match=r"iterations \(0\) must be at least 1"):
        predict(BSP(), PROFILE, iterations=0)


def test_messages_that_are_still_under_way_are_counted():
    late = transfer(
        "grad",
        range(2),
        after=Moment("grad"),
        before=Moment("forward", 0, lag=2),
        phases=[0],
        link="net",
    )
    prediction = predict_plan(Plan("late", 2, (late,)), PROFILE)
    assert (prediction.iteration_s, prediction.exposed_s) == (4.5, 0.0)
    assert prediction.busy_s["net"] == 3.5
    assert [s.end_s - s.start_s for s in prediction.trace.spans if s.lane == "net"] == [3.5]
