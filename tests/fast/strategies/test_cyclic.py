"""How far the workers of cyclic data parallelism lag, as the simulator decides it."""

import pytest

from offbeat.plan import Moment
from offbeat.profile import Bucket, CodecSpeed, Link, Profile
from offbeat.sim import predict_plan
from offbeat.strategies import Cyclic


def profile_of(bytes_per_s, world_size=4):
    sizes = [(2, 5, 9), (2, 4, 8), (2, 4, 8), (3, 4, 10)]
    return Profile(
        tuple(Bucket(f"b{i}", *given) for i, given in enumerate(sizes)),
        (Link("net", 0.0, bytes_per_s),),
        world_size,
        update_s=1.0,
    )


@pytest.mark.long
@pytest.mark.parametrize(("bytes_per_s", "faster"), [(1.8, "paper"), (3.4, "least")])
def test_the_stagger_is_the_one_that_is_faster(bytes_per_s, faster):
    profile = profile_of(bytes_per_s)
    plans = {name: Cyclic(stagger=name).plan(profile) for name in ("least", "paper")}
    seconds = {name: predict_plan(plan, profile).iteration_s for name, plan in plans.items()}
    assert min(seconds, key=seconds.__getitem__) == faster
    chosen = Cyclic().plan(profile)
    assert chosen == plans[faster]
    assert chosen.fact("stagger") == faster


def test_nobody_waits_on_purpose_for_a_gain_of_less_than_a_hundredth(monkeypatch):
    # Where everything fits under compute both take the same, or the paper's a little less.
    profile = profile_of(1.8)
    monkeypatch.setattr("offbeat.strategies.cyclic.STAGGER_GAIN", 0.5)
    assert Cyclic().plan(profile).fact("stagger") == "least"


def test_a_worker_alone_lags_behind_nobody():
    plan = Cyclic().plan(profile_of(1.8, world_size=1))
    assert plan.fact("stagger") == "least"
    assert all(t.after != Moment("forward") for t in plan.transfers)


def test_the_bound_counts_messages_by_what_they_take():
    # A bucket whose messages were measured to take nothing bounds nothing.
    free = Profile(
        (Bucket("b0", 1.0, 1.0, 8, {"net": 0.0}), Bucket("b1", 1.0, 1.0, 8, {"net": 0.0})),
        (Link("net", 0.0, 0.5),),
        world_size=2,
    )
    assert Cyclic().bound_s(free) == 4.0


@pytest.mark.long
@pytest.mark.parametrize(
    ("wire", "coding_s", "bytes_per_s"),
    [("int4", 0.0, 1e4), ("int4", 1e-6, 1e6), ("topk:0.1", 1e-6, 1e4), ("topk:0.1", 0.0, 1e6)],
)
def test_the_bound_is_that_of_codes(wire, coding_s, bytes_per_s):
    speed = CodecSpeed(wire.partition(":")[0], coding_s, coding_s)
    buckets = tuple(Bucket(f"b{i}", 0.2, 0.4, 4 * 256 * 10 * (i + 1)) for i in range(4))
    link = Link("net", 1e-3, bytes_per_s, cpu_s_per_message=1e-4, cpu_s_per_byte=1e-8)
    profile = Profile(buckets, (link,), 4, update_s=0.1, codecs=(speed,))
    plain, wired = (s.plan(profile) for s in (Cyclic(), Cyclic(wire=wire)))
    assert wired.bound_s <= plain.bound_s
    prediction = predict_plan(wired, profile)
    assert prediction.iteration_s >= wired.bound_s * (1 - 1e-9)
    if bytes_per_s < 1e5:
        assert prediction.iteration_s < predict_plan(plain, profile).iteration_s / 2
