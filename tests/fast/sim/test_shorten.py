"""Plans with very many iterations that are alike: as exact, in no time."""

from dataclasses import replace

import pytest

from offbeat.core.sim.shorten import LONG, shorten
from offbeat.plan import Moment, Plan, local, transfer
from offbeat.profile import Bucket, Link, Profile
from offbeat.sim import Ranks, predict, predict_plan
from offbeat.strategies import LocalSGD

PROFILE = Profile(
    (Bucket("a", 1.0, 2.0, 8), Bucket("b", 0.5, 1.0, 4)),
    (Link("net", 0.5, 4.0),),
    world_size=3,
    update_s=0.5,
    other_s=0.25,
)
MILLION = 10**6


def same(one, other):
    """Both predictions say the same, to rounding."""
    assert one.iteration_s == pytest.approx(other.iteration_s, rel=1e-9)
    assert one.exposed_s == pytest.approx(other.exposed_s, rel=1e-6)
    for name in ("busy_s", "idle_s", "bytes_per_iteration"):
        assert getattr(one, name) == pytest.approx(getattr(other, name), rel=1e-9)


@pytest.mark.parametrize("scale", [(), (1.0, 2.0, 1.5)])
def test_idle_stretches_take_as_long_as_their_iterations(scale):
    ranks = Ranks(scale=scale)
    for period in (LONG + 100, MILLION):
        prediction = predict(LocalSGD(period=period, warmup=period), PROFILE, ranks=ranks)
        slowest = max(scale, default=1.0)
        message_s = 0.5 + 12 / 4
        assert prediction.steady
        assert prediction.iteration_s == pytest.approx(0.25 + 5 * slowest + message_s / period)
        assert prediction.busy_s["net"] == pytest.approx(message_s / period)
        assert prediction.bytes_per_iteration["net"] == pytest.approx(12 / period)
        assert len(prediction.window) == period
    alike = LocalSGD(period=LONG + 100, warmup=3).plan(PROFILE)
    for plan in (alike, replace(alike, groups={"net": ((0, 1, 2),)})):
        enumerated = predict_plan(plan, PROFILE, ranks=ranks, iterations=3 + 4 * plan.period)
        same(predict_plan(plan, PROFILE, ranks=ranks), enumerated)


def busy(period, lag=0):
    """All gradients in every iteration, and once per period the parameters as well."""
    everything = range(2)
    transfers = (
        transfer(
            "grad",
            everything,
            after=Moment("grad"),
            before=Moment("step", lag=lag),
            phases=range(period),
            link="net",
        ),
        transfer(
            "param",
            everything,
            after=Moment("step"),
            before=Moment("end"),
            phases=[period - 1],
            link="net",
        ),
    )
    return Plan("busy", 2, transfers, (local(2, Moment("step"), range(period)),), period=period)


@pytest.mark.parametrize("lag", [0, 2])
def test_busy_stretches_are_sampled(lag):
    plan = busy(LONG + 130, lag)
    short = shorten(plan)
    assert len(short.plan.phases) < len(plan.phases)
    slow = replace(PROFILE, links=(Link("net", 6.0, 4.0),))  # so that messages pile up
    for profile in (PROFILE, slow):
        prediction = predict_plan(plan, profile)
        assert prediction.steady
        same(prediction, predict_plan(plan, profile, iterations=4 * plan.period))
    assert predict_plan(busy(MILLION, lag), PROFILE).steady


def test_a_sample_that_does_not_repeat_is_no_steady_state():
    # Ranks that do not wait for each other drift apart in every iteration.
    plan = busy(LONG + 130)
    send = replace(plan.transfers[0], verb="send", ranks=(0, 1), into=None)
    apart = replace(plan, transfers=(send, plan.transfers[1]))
    assert not predict_plan(apart, PROFILE, ranks=Ranks(scale=(1.0, 1.0, 2.0))).steady


def test_a_stretch_with_messages_of_other_ranks_is_not_idle():
    plan = busy(LONG + 130)
    send = replace(plan.transfers[0], verb="send", ranks=(1, 2))
    plan = replace(plan, transfers=(send, plan.transfers[1]))
    slow = replace(PROFILE, links=(Link("net", 20.0, 4.0),))
    prediction = predict_plan(plan, slow)
    assert not prediction.steady  # rank 0 runs ahead until the averages
    enumerated = predict_plan(plan, slow, iterations=4 * plan.period)
    assert prediction.iteration_s == pytest.approx(enumerated.iteration_s)


def test_the_trace_shows_what_comes_after_the_gap():
    trace = predict(LocalSGD(period=MILLION, warmup=2), PROFILE).trace
    last = trace.first + trace.iterations
    assert (last - 2) % MILLION == 0
    assert {s.iteration for s in trace.spans} == set(range(trace.first, last))
    assert [s.iteration for s in trace.spans if s.lane == "net"] == [last - 1]
    assert trace.notes["iteration_s"] > 0
