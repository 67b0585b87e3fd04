"""Synchronous schedules: plans that every checker accepts, published figures, closed forms."""

from collections import Counter
from fractions import Fraction
from itertools import accumulate

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.core.verify.check import raise_if_wrong
from offbeat.plan import Moment, Plan
from offbeat.profile import Bucket, Contention, Link, Profile
from offbeat.strategies.asc_wfbp import ASCWFBP
from offbeat.strategies.dear import DeAR, decoupled_iteration_s
from offbeat.strategies.priorities import MOST_MESSAGES, P3, TIE, ByteScheduler, USByte, order_s
from offbeat.strategies.solvers import cap_fusion, fusion_finish
from offbeat.strategies.wfbp import message_seconds

BY_FORWARD = [
    P3(),
    P3(slice_elements=1_000_000),
    ByteScheduler(),
    ByteScheduler(partition_elements=4_000_000, credit_elements=16_000_000),
    ByteScheduler(partition_elements=500_000),
    ByteScheduler(credit_elements=3_000_000),
    USByte(),
    USByte(unit_elements=1_000_000),
]
VARIANTS = [
    *BY_FORWARD,
    *(ASCWFBP(groups) for groups in (1, 2, 3)),
    DeAR(),
    DeAR(fusion_bytes=1),
    DeAR(fusion_bytes=25_000_000),
]
MILLISECONDS = st.integers(0, 50).map(lambda n: n / 1000)


@st.composite
def profiles(draw):
    """1 to 12 buckets of up to 40 MB; some empty, some with a measured time of their own."""
    buckets = tuple(
        Bucket(
            f"b{i}",
            forward_s=draw(MILLISECONDS),
            backward_s=draw(MILLISECONDS),
            size_bytes=draw(st.one_of(st.just(0), st.integers(1, 9), st.integers(1, 40_000_000))),
            communication_s={"net": draw(MILLISECONDS)} if draw(st.booleans()) else {},
        )
        for i in range(draw(st.integers(1, 12)))
    )
    halves = {"all_gather": (draw(MILLISECONDS), 3e9)} if draw(st.booleans()) else {}
    lost = draw(st.sampled_from([None, 0.5, 0.9]))
    return Profile(
        buckets=buckets,
        links=(Link("net", draw(st.integers(0, 5)) / 1000, 1e9, halves=halves),),
        world_size=2,
        update_s=draw(MILLISECONDS),
        other_s=draw(MILLISECONDS),
        rank_scale=draw(st.sampled_from([(), (1.0, 1.5)])),
        contention=() if lost is None else (Contention(("net", "net"), (lost, lost)),),
    )


def vgg_19() -> Profile:
    """VGG-19 in six buckets, as measured for DeFT (Table II); output side first."""
    forward_ms = [0.103, 0.326, 1.899, 4.801, 28.799, 1.238]
    backward_ms = [0.162, 0.484, 2.319, 4.872, 12.786, 72.496]
    communication_ms = [8.651, 31.754, 178.643, 15.447, 11.262, 11.968]
    bytes_per_ms = 4 * 102_760_448 / 178.643  # the first fully connected layer
    buckets = tuple(
        Bucket(str(6 - i), f / 1e3, b / 1e3, round(c * bytes_per_ms), {"net": c / 1e3})
        for i, (f, b, c) in enumerate(zip(forward_ms, backward_ms, communication_ms, strict=True))
    )
    return Profile(buckets, (Link("net", 0.0, bytes_per_ms * 1e3),), world_size=16)


def uneven(layers: int, latency_s: float) -> Profile:
    """Large and small layers in turn; communication takes about as long as compute."""
    buckets = tuple(
        Bucket(f"h.{i}", 0.002, 0.004, (200_000, 9_000_000, 1_000_000)[i % 3])
        for i in range(layers)
    )
    return Profile(buckets, (Link("net", latency_s, 600e6),), world_size=4, update_s=0.002 * layers)


def iteration_s(plan: Plan, profile: Profile) -> float:
    """Of plans on one link whose gradients are due by the next forward."""
    return order_s([t.payload for t in plan.transfers], profile.slowest())


def shared(plan: Plan) -> Counter[int]:
    """Per bucket how much of its gradient is averaged."""
    moved: Counter[int] = Counter()
    for t in plan.transfers:
        if t.verb != "reduce_scatter":
            for bucket in t.payload.buckets:
                moved[bucket] += Fraction(t.payload.width, t.payload.parts)
    return moved


@pytest.mark.parametrize("strategy", VARIANTS, ids=str)
@settings(max_examples=8, deadline=None)
@given(profile=profiles())
def test_every_plan_is_sound(strategy, profile):
    plan = strategy.plan(profile)
    raise_if_wrong(plan, profile)
    assert plan == strategy.plan(profile.slowest()) == Plan.from_dict(plan.to_dict())
    assert shared(plan) == dict.fromkeys(range(len(profile.buckets)), 1)
    assert all(t.payload.buffer == "grad" for t in plan.transfers)
    assert (plan.strategy, plan.period, plan.prologue) == (strategy.name, 1, 0)


@pytest.mark.parametrize("strategy", BY_FORWARD, ids=str)
@settings(max_examples=8, deadline=None)
@given(profile=profiles())
def test_the_forward_waits_bucket_by_bucket(strategy, profile):
    plan = strategy.plan(profile)
    assert [(a.rule, str(a.at)) for a in plan.applies] == [("local", "forward+1")]
    for t in plan.transfers:
        last = t.payload.buckets[-1]
        assert (t.after, t.before) == (Moment("grad", last), Moment("forward", last, lag=1))
    assert iteration_s(plan, profile) >= strategy.bound_s(profile) * (1 - 1e-9)


def test_bytescheduler_on_vgg_19():
    """258.3 ms: the link is busy from the first gradient on; buckets 5 and 6 are computed last."""
    profile = vgg_19()
    paper = ByteScheduler(partition_elements=4_000_000, credit_elements=16_000_000)
    assert iteration_s(paper.plan(profile), profile) == pytest.approx(
        (0.162 + 257.725 + 0.326 + 0.103) / 1e3
    )
    assert iteration_s(ByteScheduler().plan(profile), profile) == pytest.approx(0.2583, rel=0.005)


@settings(max_examples=25, deadline=None)
@given(profile=profiles())
def test_tuning_is_as_fast_as_whole_buckets_and_quarters(profile):
    tuned_s = iteration_s(ByteScheduler().plan(profile), profile)
    largest = max(*(-(-bucket.size_bytes // 4) for bucket in profile.buckets), 1)
    for elements, credit in ((largest, 1), (-(-largest // 4), largest)):
        fixed = ByteScheduler(elements, credit).plan(profile)
        assert tuned_s <= iteration_s(fixed, profile) * (1 + TIE)


def test_latency_makes_larger_messages():
    for strategy in (ByteScheduler(), USByte()):
        fast, slow = (
            len(strategy.plan(uneven(30, latency_s)).transfers) for latency_s in (1e-5, 5e-3)
        )
        assert slow < fast


def test_two_hundred_buckets_stay_within_the_limits_of_tuning():
    profile = uneven(200, 1e-4)
    bound_s = ByteScheduler().bound_s(profile)
    seconds = {}
    for strategy in (P3(), ByteScheduler(), USByte()):
        plan = strategy.plan(profile)
        seconds[strategy.name] = iteration_s(plan, profile)
        assert len(plan.transfers) <= MOST_MESSAGES or strategy == P3()
    assert len(P3().plan(profile).transfers) > 4000
    assert bound_s <= seconds["us-byte"] <= seconds["bytescheduler"] <= seconds["p3"]


def test_us_byte_joins_small_neighbours():
    small = Profile(
        tuple(Bucket(f"h.{i}", 0.001, 0.001, 1000) for i in range(12)),
        (Link("net", 5e-3, 1e9),),
        world_size=2,
    )
    us_byte, byte_scheduler = USByte().plan(small), ByteScheduler().plan(small)
    assert len(byte_scheduler.transfers) == 12
    assert any(len(t.payload.buckets) > 1 for t in us_byte.transfers)
    assert iteration_s(us_byte, small) < 0.6 * iteration_s(byte_scheduler, small)


def test_us_byte_never_joins_blocks_of_different_buckets():
    # Each gradient exists when one block of the bucket before has left, so all are sent in two.
    buckets = tuple(Bucket(f"h.{i}", 0.001, 0.005, 1000) for i in range(4))
    profile = Profile(buckets, (Link("net", 5e-3, 1e9),), world_size=2)
    plan = USByte(unit_elements=125).plan(profile)
    assert shared(plan) == dict.fromkeys(range(4), 1)
    raise_if_wrong(plan, profile)


def test_p3_cuts_and_interrupts():
    """Bucket 1 gets its gradient while bucket 0's third slice is under way, and goes next."""
    buckets = (Bucket("head", 0.001, 0.0, 800_000), Bucket("embed", 0.001, 0.0045, 160_000))
    profile = Profile(buckets, (Link("net", 1e-3, 160e6),), world_size=2)  # 2 ms per slice
    order = [(t.payload.buckets[0], t.payload.part) for t in P3().plan(profile).transfers]
    assert order == [(0, 0), (0, 1), (0, 2), (1, 0), (0, 3), (0, 4)]


def test_simultaneous_messages_take_channels_in_turn():
    buckets = tuple(Bucket(f"h.{i}", 0.01, 0.01, 28_000_000) for i in range(6))
    profile = Profile(buckets, (Link("net", 0.0, 1e9),), world_size=2)
    plan = ASCWFBP().plan(profile)
    # 0 leaves at 10 ms, 1 at 20 ms beside it, when 18 of 0's 28 ms are left: 27 ms at two thirds.
    # So 2, ready at 30 ms, waits until 47 ms and 3 joins it. 4, ready at 50 ms, waits for 1.
    assert [(t.payload.buckets, t.link) for t in plan.transfers] == [
        (range(1), "net"),
        (range(1, 2), "net#1"),
        (range(2, 4), "net"),
        (range(4, 6), "net#1"),
    ]
    assert {t.before for t in plan.transfers} == {Moment("step")}
    assert [(a.rule, str(a.at)) for a in plan.applies] == [("local", "step")]
    assert ASCWFBP().bound_s(profile) == pytest.approx(6 * 0.028 / (4 / 3))
    alone = Contention(("net", "net"), (0.5, 0.5))
    slower = Profile(buckets, profile.links, world_size=2, contention=(alone,))
    assert ASCWFBP(groups=3).bound_s(slower) == pytest.approx(6 * 0.028)


def dear_event_loop(groups: list[range], profile: Profile) -> float:
    """The link serves its queue while compute walks through backward, step and forward."""
    facts = profile.default_link

    def half_s(group: range, verb: str) -> float:
        sizes = [profile.buckets[b].size_bytes for b in group]
        latency_s, bytes_per_s = facts.halves.get(
            verb, (facts.latency_s / 2, 2 * facts.bytes_per_s)
        )
        return latency_s + sum(sizes) / bytes_per_s if any(sizes) else 0.0

    ready_s, now_s = {}, 0.0
    for b, bucket in enumerate(profile.buckets):
        now_s += bucket.backward_s
        ready_s[b] = now_s
    link_s = 0.0
    for group in groups:
        link_s = max(link_s, ready_s[group[-1]]) + half_s(group, "reduce_scatter")
    step_s = now_s = max(now_s, link_s)
    now_s += profile.other_s
    for group in reversed(groups):
        link_s = max(link_s, step_s) + half_s(group, "all_gather")
        now_s = max(now_s, link_s)
        for b in reversed(group):
            now_s += profile.bucket_update_s[b] + profile.buckets[b].forward_s
    return now_s


def plain(profile: Profile) -> Profile:
    """Without measured times, which the event loop leaves to the profile."""
    buckets = tuple(
        Bucket(b.name, b.forward_s, b.backward_s, b.size_bytes) for b in profile.buckets
    )
    return Profile(buckets, profile.links, 2, profile.update_s, profile.other_s)


@settings(max_examples=100, deadline=None)
@given(profile=profiles().map(plain), cap_bytes=st.integers(1, 100_000_000))
def test_dear_equals_the_event_loop_and_is_tuned(profile, cap_bytes):
    groups = cap_fusion([bucket.size_bytes for bucket in profile.buckets], cap_bytes)
    expected_s = dear_event_loop(list(groups), profile)
    assert decoupled_iteration_s(groups, profile) == pytest.approx(expected_s)
    assert expected_s >= DeAR().bound_s(profile) * (1 - 1e-9)
    for cap in (1, sum(bucket.size_bytes for bucket in profile.buckets)):
        fixed = DeAR(fusion_bytes=max(cap, 1)).plan(profile)
        assert dear_s(DeAR().plan(profile), profile) <= dear_s(fixed, profile) * (1 + 1e-9)


def dear_s(plan: Plan, profile: Profile) -> float:
    groups = [t.payload.buckets for t in plan.transfers if t.verb == "reduce_scatter"]
    return dear_event_loop(groups, profile)


def test_dear_at_the_step_is_tuned_to_the_end_of_its_messages():
    """One message of each half saves a latency under the forward; whole messages end earlier one
    by one."""
    buckets = tuple(Bucket(f"h.{i}", 0.0, 1.0, 2) for i in range(2))
    profile = Profile(buckets, (Link("net", 0.5, 8.0),), world_size=2)
    at_step, on_arrival = (
        [t.payload.buckets for t in DeAR(update=update).plan(profile).transfers]
        for update in ("at_step", "on_arrival")
    )
    assert at_step == [range(1), range(1, 2)]
    assert on_arrival == [range(2)] * 2


@settings(max_examples=50, deadline=None)
@given(profile=profiles())
def test_dear_at_the_step_ends_no_later_than_with_another_cap(profile):
    """Of caps that are sizes of runs from the output side on."""

    def end_s(fusion_bytes=None):
        plan = DeAR(fusion_bytes=fusion_bytes, update="at_step").plan(profile)
        groups = [t.payload.buckets for t in plan.transfers]
        return fusion_finish(groups, profile.slowest().ready_s, message_seconds(profile))

    caps = {1, *accumulate(bucket.size_bytes for bucket in profile.buckets)} - {0}
    assert end_s() <= min(map(end_s, caps)) * (1 + 1e-9)


def test_dear_gathers_in_forward_order_from_the_step_on():
    plan = DeAR(fusion_bytes=9_200_000).plan(uneven(6, 1e-3))
    scatter, gather = plan.transfers[:3], plan.transfers[3:]
    runs = [range(2), range(2, 5), range(5, 6)]
    assert [t.payload.buckets for t in scatter] == runs
    assert [t.payload.buckets for t in gather] == runs[::-1]
    assert {t.verb for t in scatter} == {"reduce_scatter"}
    assert {t.before for t in scatter} == {Moment("step")}
    assert {t.after for t in gather} == {Moment("step")}
    assert [t.before for t in gather] == [Moment("forward", run[-1], lag=1) for run in runs[::-1]]
    assert [(a.rule, str(a.at)) for a in plan.applies] == [("local", "forward+1")]


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: P3(slice_elements=0), r"slice_elements \(0\) must be an integer of at least 1"),
        (
            lambda: ByteScheduler(partition_elements=0),
            r"partition_elements \(0\) must be an integer of at least 1; use None to have it tuned",
        ),
        (lambda: ByteScheduler(credit_elements=1.5), r"credit_elements \(1.5\) must be an integer"),  # pyright: ignore[reportArgumentType]
        (lambda: USByte(unit_elements=-1), r"unit_elements \(-1\) .* use None to have it tuned"),
        (lambda: ASCWFBP(groups=0), r"groups \(0\) .* of at least 1; use WFBP\(\) for one message"),
        (lambda: DeAR(fusion_bytes=0), r"fusion_bytes \(0\) .* at least 1; use 1 to fuse nothing"),
    ],
)
def test_settings_that_make_no_sense(make, text):
    with pytest.raises(ValueError, match=text):
        make()
