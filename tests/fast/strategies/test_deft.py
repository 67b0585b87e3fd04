"""DeFT: plans that pass every check, and what they say about themselves."""

import json
import math
import warnings
from collections import Counter
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat import sim
from offbeat.core.derive.windows import Windows
from offbeat.core.plan.program import Program
from offbeat.core.verify.check import raise_if_wrong
from offbeat.plan import Plan
from offbeat.profile import Bucket, Contention, GradientNoise, Link, Profile
from offbeat.strategies.deft import DeFT
from offbeat.strategies.wfbp import WFBP

VARIANTS = [
    DeFT(),
    DeFT(scale="mean", solver="greedy"),
    DeFT(links="all"),
    DeFT(links="first", partition_elements=1000),
]
NOISE = GradientNoise(loss=2.0, gradient_sq=1.0, noise_sq=4.0, step_size=0.05)


def profile(latency_s=0.001, coverage=1.5, layers=8, second=True, mu=1.65):
    """Equal layers whose bytes take `coverage` times compute on the first link."""
    compute_s = layers * 0.03
    rate = layers * 1e6 / (coverage * compute_s)
    links = (Link("fast", latency_s, rate), Link("slow", latency_s, rate / mu))
    return Profile(
        buckets=tuple(Bucket(f"h.{i}", 0.01, 0.02, 1_000_000) for i in range(layers)),
        links=links[: 1 + second],
        world_size=4,
        update_s=0.005,
        other_s=0.002,
    )


@st.composite
def profiles(draw, most_buckets=6):
    """Profiles on which every message can be cut small enough for backward."""
    names = ("net", "aux", "third")[: draw(st.integers(1, 3))]
    milliseconds = st.integers(1, 30)
    buckets = []
    for i in range(draw(st.integers(1, most_buckets))):
        size = draw(st.sampled_from([0, 4, 4000, 40_000, 400_000]))
        given_s = {n: draw(milliseconds) / 100 for n in names if draw(st.integers(0, 4)) == 0}
        forward_s, backward_s = draw(milliseconds) / 1000, draw(milliseconds) / 500
        buckets.append(Bucket(f"b{i}", forward_s, backward_s, size, given_s))
    pairs = [(a, b) for a in names for b in names if a < b]
    return Profile(
        buckets=tuple(buckets),
        links=tuple(Link(n, draw(st.sampled_from([0.0, 1e-4, 9e-4])), 2e6) for n in names),
        world_size=2,
        contention=tuple(
            Contention(pair, (0.9, draw(st.sampled_from([0.5, 1.0]))))
            for pair in pairs
            if draw(st.booleans())
        ),
        rank_scale=draw(st.sampled_from([(), (1.0, 1.5)])),
        noise=draw(st.sampled_from([None, NOISE])),
    )


def planned(strategy, profile):
    """The plan, and its warning if WFBP takes its place."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        plan = strategy.plan(profile)
    assert [str(w.message) for w in said] == ([plan.fact("why")] if plan.fact("why") else [])
    return plan, [str(w.message) for w in said]


def transfers_of(plan, iteration):
    return Program(plan).transfers(iteration)


def closing(plan):
    """Phases in which a window closes."""
    return next(apply.phases for apply in plan.applies if apply.rule == "close")


def updates_of(plan):
    return len(plan.fact("merges")) / plan.period


@pytest.mark.parametrize("strategy", VARIANTS, ids=str)
@settings(max_examples=5, deadline=None)
@given(profile=profiles())
def test_every_plan_is_sound(strategy, profile):
    plan, said = planned(strategy, profile)
    raise_if_wrong(plan, profile)
    assert Plan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan
    assert (plan, said) == planned(strategy, profile)
    if said:
        assert plan == replace(WFBP().plan(profile), facts=plan.facts, bound_s=plan.bound_s)
        return
    merges = plan.fact("merges")
    assert sum(merges) == plan.period
    second = plan.prologue + plan.period  # the first cycle also applies what the prologue closed
    applied = [Windows(plan).applied_window(t) for t in range(second, second + plan.period)]
    assert Counter(len(one) for one in applied if one) == Counter(merges)
    moved = Counter()
    for phase in plan.phases[plan.prologue :]:
        for t in transfers_of(plan, phase):
            for bucket in t.payload.buckets:
                moved[bucket] += Fraction(1, t.payload.parts)
    assert moved == {bucket: len(merges) for bucket in range(len(profile.buckets))}


def grown(profile, times):
    buckets = [
        replace(b, forward_s=times * b.forward_s, backward_s=times * b.backward_s)
        for b in profile.buckets
    ]
    return replace(profile, buckets=tuple(buckets))


@pytest.mark.long
@settings(max_examples=20, deadline=None)
@given(profile=profiles())
def test_messages_fit_the_windows(profile):
    plan, said = planned(DeFT(preserver=False), profile)
    if said:
        return
    view = grown(profile.slowest(), plan.fact("capacity"))
    used = plan.links
    for t in plan.transfers:
        speed = view.speed(t.link, [link for link in used if link != t.link])
        assert view.message_s(t.payload, t.link) / speed <= view.backward_s * (1 + 1e-6)
    for phase in plan.phases:
        for link in used:
            seconds = sum(
                view.message_s(t.payload, link) for t in transfers_of(plan, phase) if t.link == link
            )
            assert seconds <= (view.forward_s + view.backward_s) * (1 + 1e-6)


def test_one_link_with_room_updates_in_every_iteration():
    plan = DeFT().plan(profile(coverage=0.8))
    assert plan.fact("merges") == [1]
    assert plan.links == ("fast",)
    assert plan.fact("links") == ("fast alone; an update in every iteration needs no further link")
    assert plan.fact("coverage_rate") == pytest.approx(0.8, abs=0.05)
    ages = {t.payload.age for t in transfers_of(plan, plan.prologue)}
    assert ages == {0, 1}  # the input side goes under the next forward


def test_a_second_link_is_used_where_it_gives_more_updates():
    plan = DeFT().plan(profile(coverage=1.2))
    assert set(plan.links) == {"fast", "slow"}
    assert plan.fact("merges") == [1]
    assert plan.fact("links").startswith("fast and slow: 1.000 updates per iteration")
    assert "instead of 0." in plan.fact("links")
    alone = DeFT(links="first").plan(profile(coverage=1.2))
    assert len(alone.fact("merges")) / alone.period < 1
    assert alone.links == ("fast",)
    assert alone.fact("links") == "fast, as set"


def test_a_second_link_that_takes_as_much_as_it_gives_is_left_alone():
    contended = replace(
        profile(coverage=1.5), contention=(Contention(("fast", "slow"), (0.5, 0.5)),)
    )
    plan = DeFT().plan(contended)
    assert plan.links == ("fast",)
    assert plan.fact("links").startswith("fast alone; not fast and slow (")
    together, (said,) = planned(DeFT(links="all"), contended)
    assert together.strategy == "wfbp"
    assert "late updates save no time" in said


def test_a_link_of_no_use_does_not_spoil_the_plan():
    """Its latency alone is longer than backward."""
    base = profile(coverage=1.5)
    plan = DeFT().plan(replace(base, links=(base.links[0], Link("far", 5.0, 1e9))))
    assert plan.links == ("fast",)
    assert "not fast and far (bucket 'h.0' takes" in plan.fact("links")


def test_latency_fuses_messages():
    def messages(latency_s):
        plan = DeFT(links="first").plan(profile(latency_s, coverage=0.5))
        return len(transfers_of(plan, plan.prologue))

    assert messages(0.01) < 8
    assert DeFT(partition_elements=100_000).plan(profile()).transfers[0].payload.parts == 3


def test_a_latency_longer_than_forward():
    short = profile(latency_s=0.1, coverage=0.5)
    assert short.forward_s < 0.1 < short.backward_s
    plan, (said,) = planned(DeFT(), short)  # an update takes longer than with WFBP
    raise_if_wrong(plan, short)
    assert plan.strategy == "wfbp"
    assert "late updates save no time" in said


@pytest.mark.parametrize("noise", [None, NOISE])
def test_a_latency_longer_than_backward(noise):
    """No window has room for a message, however small: WFBP's plan, and it is said."""
    slow = replace(profile(latency_s=1.0), noise=noise)
    with pytest.warns(UserWarning, match=r"'h.0' takes 1\.045 s .* backward \(0\.16 s\); WFBP"):
        plan = DeFT().plan(slow)
    assert plan == replace(WFBP().plan(slow), facts=plan.facts, bound_s=plan.bound_s)
    assert plan.strategy == "wfbp"
    assert "which does not fit into backward" in plan.fact("why")


def test_a_least_message_time_longer_than_backward():
    """Small messages take longer than the line through latency and rate says."""
    base = profile(second=False)
    (link,) = base.links
    plan, said = planned(DeFT(), replace(base, links=(replace(link, small=((10**8, 0.2),)),)))
    assert "which does not fit into backward (0.16 s)" in said[0]
    assert plan.strategy == "wfbp"


def test_slices_no_smaller_than_the_least_message_time_allows():
    """Whole buckets of 0.1 s fit into backward (0.16 s), not into forward (0.08 s)."""
    base = profile(second=False, coverage=3)
    (link,) = base.links
    floored = replace(base, links=(replace(link, small=((1_000_000, 0.1),)),))
    plan = DeFT().plan(floored)
    raise_if_wrong(plan, floored)
    assert all(floored.message_s(t.payload, "fast") <= 0.16 for t in plan.transfers)


def test_without_compute_there_is_nothing_to_hide_under():
    base = profile()
    plan, said = planned(DeFT(), grown(base, 0.0))
    assert plan.strategy == "wfbp"
    assert said


@pytest.mark.parametrize("noise", [None, replace(NOISE, loss=0.2)])
def test_a_late_plan_that_saves_nothing_gives_way_to_wfbp(noise):
    """Iterations are shorter, but an update merges two of them and takes longer than WFBP's."""
    base = replace(profile(coverage=1.5, second=False, latency_s=0.04), noise=noise)
    plan, (said,) = planned(DeFT(), base)
    assert plan.strategy == "wfbp"
    assert "late updates save no time" in said


@settings(max_examples=4, deadline=None)
@given(
    profile=profiles(),
    most=st.integers(1, 5),
    slower=st.sampled_from([1.0, 3.0, 20.0]),
    strategy=st.sampled_from([DeFT(), DeFT(links="all"), DeFT(links="first", solver="greedy")]),
)
def test_no_update_merges_more_than_the_limit(profile, most, slower, strategy):
    links = [replace(ln, bytes_per_s=ln.bytes_per_s / slower) for ln in profile.links]
    plan, said = planned(replace(strategy, most_merged=most), replace(profile, links=tuple(links)))
    if said:
        return
    closes = [-1, *sorted(closing(plan))]
    assert max(b - a for a, b in pairwise(closes)) <= most  # also before the cycle


@pytest.mark.parametrize("noise", [None, NOISE])
@pytest.mark.parametrize(("coverage", "least"), [(2.1, 1.9), (90, 1.0)])
def test_high_coverage(coverage, least, noise):
    """No fewer updates per second than WFBP, and not fewer iterations: simulated."""
    rate = 3.4e6 / (coverage * 0.006)
    base = Profile(
        tuple(Bucket(f"b{i}", 1e-4, 2e-4, 170_000) for i in range(20)),
        (Link("net", 1e-4, rate),),
        world_size=2,
        noise=noise,
    )
    plan, said = planned(DeFT(), base)
    assert (plan.strategy == "wfbp") == bool(said)
    late_s, wfbp_s = (sim.predict_plan(p, base).iteration_s for p in (plan, WFBP().plan(base)))
    updates = 1 if said else updates_of(plan)
    assert late_s / updates <= wfbp_s * (1 + 1e-9)
    if noise is None:
        assert wfbp_s / late_s >= least
        assert late_s >= (1 - 1e-9) * DeFT().bound_s(base)
    assert len(plan.transfers) < 200


def test_the_preserver_accepts_small_steps():
    small = replace(NOISE, step_size=1e-4)
    plan = DeFT(links="first").plan(replace(profile(coverage=1.2), noise=small))
    (only,) = plan.fact("preserver")["tries"]
    assert only["accepted"]
    assert only["merges"] == plan.fact("merges")
    assert abs(only["ratio"] - 1) <= 0.01
    assert plan.fact("capacity") == 1.0


def test_the_preserver_enlarges_windows_until_it_accepts():
    """Two iterations late cost more than 1 % of the loss here, one late does not."""
    steep = replace(NOISE, step_size=0.015)
    plan = DeFT(links="first").plan(replace(profile(), noise=steep))
    tries = plan.fact("preserver")["tries"]
    assert [t["accepted"] for t in tries] == [False] * (len(tries) - 1) + [True]
    assert len(tries) > 1
    assert max(tries[-2]["merges"]) == 2
    assert plan.fact("merges") == tries[-1]["merges"] == [1]
    first = tries[0]["capacity"]
    assert [t["capacity"] / first for t in tries] == pytest.approx(
        [1.1**i for i in range(len(tries))]
    )
    assert plan.fact("capacity") == tries[-1]["capacity"] > 1
    assert "within 1 +- 0.01 (an upper bound" in plan.fact("preserver")["decision"]


def test_the_preserver_knows_that_adam_steps_no_further_for_a_sum():
    """As with the mean: two merged iterations are worth one update."""

    def first(strategy, noise):
        tried = strategy.plan(replace(profile(), noise=noise)).fact("preserver")["tries"][0]
        return tried["ratio"], tried["merges"]

    noise = replace(NOISE, step_size=0.01)
    adam = replace(noise, scale_free=True)
    assert first(DeFT(links="first"), adam) == first(DeFT(links="first", scale="mean"), noise)
    assert first(DeFT(links="first"), adam) != first(DeFT(links="first"), noise)


def test_the_preserver_gives_up_after_ten_retries():
    """Windows 2.6 times as long as the limit needs are not enough for a coverage rate of 20."""
    noisy = replace(NOISE, loss=0.2, noise_sq=9.0)
    plan = DeFT(links="first").plan(replace(profile(coverage=20.0), noise=noisy))
    preserved = plan.fact("preserver")
    assert len(preserved["tries"]) == 11
    assert not any(t["accepted"] for t in preserved["tries"])
    nearest = min(preserved["tries"], key=lambda t: abs(t["ratio"] - 1))
    assert plan.fact("merges") == nearest["merges"]
    assert "the nearest to 1 of 11, outside 1 +- 0.01" in preserved["decision"]


def test_the_preserver_ends_where_nothing_is_merged():
    """Being one iteration late is what DeFT is: larger windows cannot mend it."""
    steep = replace(NOISE, step_size=0.2)
    plan = DeFT(links="first").plan(replace(profile(coverage=0.8), noise=steep))
    (only,) = plan.fact("preserver")["tries"]
    assert not only["accepted"]
    assert plan.fact("merges") == only["merges"] == [1]


def test_the_preserver_says_why_it_was_skipped():
    assert DeFT().plan(profile()).fact("preserver") == {
        "tries": [],
        "decision": "skipped: the profile holds no gradient noise",
    }
    plan = DeFT(preserver=False).plan(replace(profile(), noise=NOISE))
    assert plan.fact("preserver")["decision"] == "skipped: it is switched off"


def test_bound_is_compute_of_the_slowest_rank():
    even = profile()
    assert DeFT().bound_s(even) == pytest.approx(0.002 + 8 * 0.03 + 0.005 / 4)
    uneven = replace(even, rank_scale=(1.0, 1.0, 1.0, 2.0))
    assert DeFT().bound_s(uneven) == pytest.approx(0.002 + 2 * 8 * 0.03 + 2 * 0.005 / 4)
    assert DeFT().plan(uneven) == DeFT().plan(uneven.slowest())


def test_bound_is_communication_of_the_most_that_is_merged():
    slow = profile(coverage=20)
    assert DeFT(links="first").bound_s(slow) == pytest.approx(20 * 0.24 / 4)
    both = 20 * 0.24 / (1 + 1 / 1.65)
    assert DeFT(most_merged=2).bound_s(slow) == pytest.approx(both / 2)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: DeFT(scale="max"), r"scale \('max'\) must be one of sum, mean"),  # pyright: ignore
        (lambda: DeFT(solver="exat"), r"solver \('exat'\) .*; did you mean 'exact'\?"),  # pyright: ignore
        (lambda: DeFT(links="both"), r"links \('both'\) must be one of auto, all, first"),  # pyright: ignore
        (lambda: DeFT(partition_elements=0), r"partition_elements \(0\) must be an integer of at"),
        (lambda: DeFT(most_merged=0), r"most_merged \(0\) must be an integer of at least 1; 1 upd"),
        (lambda: DeFT(epsilon=0), r"epsilon \(0\) must be a number above 0; use preserver=False"),
        (lambda: DeFT(epsilon=math.nan), r"epsilon \(nan\) must be a number above 0"),
    ],
)
def test_settings_that_make_no_sense(make, text):
    with pytest.raises(ValueError, match=text):
        make()


def test_its_fallback_sends_what_it_sends():
    """A run that falls back to WFBP stays as lossy as it was."""
    wired = DeFT(wire="int8", error_feedback=False).fallback()
    assert wired == WFBP(wire="int8", error_feedback=False)
    assert DeFT().fallback() == WFBP()
    assert DeFT(preserver=False).fallback() is None
