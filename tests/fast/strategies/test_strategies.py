"""Strategies: settings, texts, and what every plan promises.

`OFFBEAT_REWRITE_GOLDENS=1` writes tests/golden/<strategy>.txt again.
"""

import cProfile
import math
import os
import random
from dataclasses import FrozenInstanceError, fields, replace
from fractions import Fraction
from pathlib import Path

import pytest
from cases.strategy_lists import STRATEGIES
from hypothesis import given, settings
from oracle import random_timelines
from oracle import solve as reference

from offbeat.core.derive.deferred import early_remedy
from offbeat.core.strategy.registry import module_names
from offbeat.core.verify.check import check
from offbeat.plan import Payload
from offbeat.profile import Bucket, CodecSpeed, Link, Profile
from offbeat.sim import predict, predict_plan
from offbeat.strategies import (
    BSP,
    DDP,
    WFBP,
    Cyclic,
    DeAR,
    DeFT,
    DiLoCo,
    DreamDDP,
    FedAvg,
    LocalSGD,
    OuterSGD,
    PartialSync,
    SelSync,
    create,
)
from offbeat.strategies.compressible import profile_for_wire
from offbeat.strategies.dreamddp import late
from offbeat.strategies.dreamddp import strategy as planner
from offbeat.strategies.pieces import Piece, partial_plan, whole_buckets
from offbeat.strategies.solvers import cap_fusion
from offbeat.testing.conformance import equals_equations, moves_everything, shares
from offbeat.testing.conformance import plan_is_pure as is_pure
from offbeat.testing.conformance import plan_is_sound as is_sound

GOLDEN = Path(__file__).parents[2] / "golden"
KIB = 1024
SMALL = Profile(
    buckets=tuple(
        Bucket(name, forward_s, 2 * forward_s, size * KIB)
        for name, forward_s, size in (
            ("head", 0.004, 900),
            ("h.3", 0.010, 700),
            ("h.2", 0.010, 700),
            ("h.1", 0.010, 700),
            ("h.0", 0.010, 700),
            ("norm", 0.001, 1),
            ("embed", 0.002, 3000),
        )
    ),
    links=(Link("net", 1e-3, 20 * KIB * KIB),),
    world_size=4,
    update_s=0.007,
)
# One case per setting that changes the plan. Those that only move gradients have a single sum.
SYNCHRONOUS = [
    BSP(),
    DDP(bucket_cap_mb=0.5),
    DDP(bucket_cap_mb="tuned"),
    *(WFBP(fusion=fusion) for fusion in ("none", "ddp", "mg-wfbp", "optimal")),
]
PERIODIC = [
    LocalSGD(period=1),
    LocalSGD(period=3, warmup=2, state="averaged"),
    LocalSGD(state="reset"),
    PartialSync(period=1),
    PartialSync(period=3, average="before_update", state="averaged"),
    DreamDDP(),
    *(DreamDDP(period=3, solver=s) for s in ("optimal", "balanced", "dfs")),
    DreamDDP(period=4, fill=False, average="before_update", state="averaged"),
    DreamDDP(period=3, average="before_update", clip=0.5),
    DreamDDP(period=2, split=True, average="before_update", state="averaged"),
    DreamDDP(period=3, solver="optimal", due="forward", state="reset"),
    DreamDDP(period=2, split=False, average="before_update", state="averaged", due="forward"),
    DreamDDP(period=3, solver="balanced", average="before_update", due="delayed", delay=2),
    DreamDDP(period=4, due="delayed", delay=2, gain=0.5),
    LocalSGD(period=3, warmup=2, outer=OuterSGD(0.7, 0.5)),
    PartialSync(period=3, average="before_update", outer=OuterSGD(0.7, 0.9, nesterov=False)),
    DreamDDP(period=3, outer=OuterSGD(0.7, 0.5)),
    DreamDDP(period=2, state="averaged", due="forward", outer=OuterSGD(0.7, 0.5)),
    DreamDDP(period=4, due="delayed", delay=3, outer=OuterSGD(0.7, 0.5)),
    DiLoCo(period=4, fragments=1, delay=2),
    DiLoCo(period=5, delay=2, alpha=0.5),
    DiLoCo(period=4, average="before_update", due="forward"),
    DiLoCo(period=4, fragments=1, delay=1, due="forward"),
]
VARIANTS = SYNCHRONOUS + PERIODIC
VOTING = [
    SelSync(delta=0, aggregate="gradients"),
    SelSync(delta=float("inf"), max_period=3, state="averaged"),
    SelSync(delta=1, smooth="change", window=2, vote_lag=1, state="reset"),
    SelSync(delta=2, scope="layer", smooth="change", window=3, max_period=3, state="averaged"),
    SelSync(max_period=1),
    FedAvg(local_steps=1),
    FedAvg(local_steps=2, state="averaged"),
]


def at(plan, iteration):
    """Transfers of one iteration."""
    return [t for t in plan.transfers if plan.phase(iteration) in t.phases]


@pytest.mark.parametrize("name", STRATEGIES)
def test_golden(name):
    golden(name, STRATEGIES[name]())


@pytest.mark.parametrize("due", ["forward", "delayed"])
def test_golden_beyond_the_paper(due):
    golden(f"dreamddp-{due}", DreamDDP(due=due))


def test_golden_of_streaming_fragments():
    golden("diloco-streaming", DiLoCo(period=6, fragments=3, delay=2, alpha=0.5))


def test_golden_of_one_fragment_due_at_the_forward():
    golden("diloco-forward", DiLoCo(period=6, fragments=1, due="forward"))


@pytest.mark.parametrize(
    "strategy",
    [DreamDDP(wire="int4"), Cyclic(wire="int4"), FedAvg(wire="int4", fraction=0.5)],
    ids=str,
)
def test_golden_of_a_wire(strategy):
    golden(f"{strategy.name}-int4", strategy)


def golden(name, strategy):
    path = GOLDEN / f"{name}.txt"
    text = f"{strategy.plan(SMALL)}\n"
    if os.environ.get("OFFBEAT_REWRITE_GOLDENS") == "1":
        path.write_text(text)
    assert path.read_text() == text


# Settings of a strategy share most of its planner, so that two profiles for each are enough.
@pytest.mark.parametrize("strategy", VARIANTS + VOTING, ids=str)
@settings(max_examples=2, deadline=None)
@given(profile=random_timelines.profiles(most_buckets=6))
def test_every_plan_is_sound_and_trains_as_its_equations_say(strategy, profile):
    is_sound(strategy, profile)
    is_pure(strategy, profile)
    equals_equations(strategy, profile, ranks=2)
    equals_equations(strategy, profile, ranks=3, seed=1)


WIRED = [
    BSP(wire="fp16"),
    WFBP(wire="topk:0.01", error_feedback=False),
    DreamDDP(wire="sign", split=True),
    DreamDDP(wire="bf16", due="delayed"),
    SelSync(wire="randomk:0.1", scope="layer"),
    DeAR(wire="int8", update="at_step"),
    FedAvg(wire="randomk:0.1", fraction=0.5, state="averaged"),
    Cyclic(wire="int4", stages=1),
]


@pytest.mark.parametrize("strategy", WIRED, ids=str)
@settings(max_examples=2, deadline=None)
@given(profile=random_timelines.profiles(most_buckets=6))
def test_every_plan_with_a_wire_is_sound(strategy, profile):
    is_sound(strategy, profile)
    is_pure(strategy, profile)


@pytest.mark.parametrize("strategy", PERIODIC, ids=str)
@settings(max_examples=2, deadline=None)
@given(profile=random_timelines.profiles(most_buckets=6))
def test_every_bucket_moves_as_often_as_promised(strategy, profile):
    if getattr(strategy, "split", False):  # which slices fill is not in the plan's notes
        strategy = replace(strategy, fill=False)
    plan = strategy.plan(profile)
    moves_everything(plan)
    filled = [bucket for buckets in plan.fact("fill", []) for bucket in buckets]
    kinds = ["param"]
    if getattr(strategy, "state", "local") == "averaged":
        kinds.append("state")
    assert shares(plan) == {
        (kind, bucket): 1 + filled.count(bucket)
        for kind in kinds
        for bucket in range(len(profile.buckets))
    }
    assert plan.period == strategy.period


@pytest.mark.parametrize("strategy", SYNCHRONOUS, ids=str)
@settings(max_examples=2, deadline=None)
@given(profile=random_timelines.profiles(most_buckets=6))
def test_every_gradient_moves_in_every_iteration(strategy, profile):
    plan = strategy.plan(profile)
    assert shares(plan) == {("grad", bucket): 1 for bucket in range(len(profile.buckets))}
    assert plan.period == 1


def test_a_prologue_averages_gradients():
    plan = LocalSGD(period=3, warmup=2).plan(SMALL)
    assert (plan.prologue, plan.period) == (2, 3)
    assert [[t.payload.buffer for t in at(plan, i)] for i in range(8)] == [
        ["grad"],
        ["grad"],
        [],
        [],
        ["param"],
        [],
        [],
        ["param"],
    ]


def floored_profiles(number, most_buckets, seed):
    """Random profiles with measured least times, some of which fall or jump, and empty buckets."""
    rng = random.Random(seed)
    for _ in range(number):
        small, size = [], 0
        for _ in range(rng.randint(0, 4)):
            size += rng.choice([1, 3000, 40_000])
            small.append((size, rng.choice([1e-4, 0.01, 0.05]) * rng.uniform(0.5, 2)))
        link = Link(
            "net", rng.choice([0.0, 1e-3, 0.02]), rng.choice([1e5, 1e6, 1e7]), small=tuple(small)
        )
        buckets = tuple(
            Bucket(
                str(i),
                0.01,
                rng.choice([0.0, 0.01, 0.03]),
                rng.choice([0, 100, 5000, 20_000, 100_000]),
                buffer_bytes=rng.choice([0, 0, 50]),
                state_bytes=rng.choice([0, 9000]),
            )
            for i in range(rng.randint(1, most_buckets))
        )
        yield Profile(buckets, (link,), 4, update_s=0.002)


def seconds_of(strategy, profile, **how):
    return predict(strategy, profile, **how).iteration_s


def test_fusion_is_the_best_of_all_on_floored_profiles():
    better = 0
    for profile in floored_profiles(80, 8, seed=1):
        size = len(profile.buckets)

        def end_s(groups, profile=profile):
            messages = [
                (profile.ready_s[g[-1]], profile.message_s(Payload("grad", g), "net"))
                for g in groups
            ]
            return reference.fifo_end(messages)

        groups = [t.payload.buckets for t in WFBP().plan(profile).transfers]
        least_s = min(end_s(groups) for groups in reference.fusions(size))
        assert end_s(groups) == pytest.approx(least_s, rel=1e-12)
        # Without a delay, on which DDP has two messages in flight.
        near = replace(profile, links=(replace(profile.default_link, asked_rate_bps=1e9),))
        tuned = [t.payload.buckets for t in DDP(bucket_cap_mb="tuned").plan(near).transfers]
        assert end_s(tuned) <= end_s(cap_fusion([b.size_bytes for b in profile.buckets], 1 << 40))
        greedy = [t.payload.buckets for t in WFBP(fusion="mg-wfbp").plan(profile).transfers]
        better += end_s(groups) < end_s(greedy) * (1 - 1e-9)
    assert better > 5


@pytest.mark.long
def test_neither_slices_nor_the_choice_are_ever_predicted_slower():
    sliced = at_once = 0
    for n, profile in enumerate(floored_profiles(60, 7, seed=2)):
        period, state = 2 + n % 3, ("local", "averaged")[n % 2]
        whole_s = seconds_of(DreamDDP(period, split=False, state=state), profile)
        split = DreamDDP(period, split=True, state=state)
        split_s = seconds_of(split, profile)
        assert split_s <= whole_s * (1 + 1e-9)
        chosen_s = seconds_of(DreamDDP(period, state=state), profile)
        local_s = seconds_of(LocalSGD(period, state=state), profile)
        assert chosen_s <= min(whole_s, local_s) * (1 + 1e-9)
        sliced += split_s < whole_s * (1 - 1e-9)
        at_once += chosen_s < whole_s * (1 - 0.02)
    assert sliced > 4
    assert at_once > 4


@pytest.mark.parametrize("average", ["after_update", "before_update"])
def test_with_jitter_the_choice_is_not_slower_than_local_sgd(average):
    """Filled or in sets, every iteration with a message is a barrier."""
    whole_buckets = 0
    for profile in floored_profiles(6, 6, seed=3):
        uneven = replace(profile, jitter=0.3)
        chosen = DreamDDP(3, average=average)
        for other in (
            LocalSGD(3),
            DreamDDP(3, "balanced", fill=True, split=False, average=average),
        ):
            assert seconds_of(chosen, uneven) <= seconds_of(other, uneven) * 1.02
        whole_buckets += chosen.plan(profile) != chosen.plan(uneven)
    assert whole_buckets > 0


def test_processor_time_per_message_favours_few_messages():
    cheap = replace(SMALL, links=(Link("net", 1e-5, 1e9),))
    busy = replace(SMALL, links=(Link("net", 1e-5, 1e9, cpu_s_per_message=1e-3),))
    assert len(DreamDDP().plan(cheap).transfers) == len(SMALL.buckets)
    few = DreamDDP().plan(busy).transfers
    assert [t.payload.buckets for t in few] == [range(5), range(5, 7)]


def test_calls_of_the_optimizer_favour_the_step_as_a_whole():
    """Where nothing is gained by bucket-wise updates, the schedule is local SGD's own."""
    link = Link("net", 1e-5, 1e12)
    dear = replace(SMALL, links=(link,), step_s=1e-3)
    chosen, local = DreamDDP().plan(dear), LocalSGD().plan(dear)
    assert (chosen.transfers, chosen.applies) == (local.transfers, local.applies)
    assert chosen.fact("sets") == [[], [], [], [], list(range(7))]
    [update] = DreamDDP().plan(replace(dear, step_s=0.0)).applies
    assert update.at.point == "grad"


@pytest.mark.long
def test_whatever_messages_and_calls_cost_the_choice_is_not_slower_than_local_sgd():
    kinds = set()
    for n, profile in enumerate(floored_profiles(24, 6, seed=4)):
        costs = {
            "cpu_s_per_message": (0.0, 1e-3)[n % 2],
            "cpu_s_per_byte": (0.0, 1e-9, 1e-8)[n % 3],
        }
        links = (replace(profile.links[0], **costs),)
        busy = replace(profile, links=links, step_s=(0.0, 5e-4)[n // 2 % 2])
        period, state = 2 + n % 3, ("local", "averaged")[n % 2]
        chosen = DreamDDP(period, state=state)
        local_s = seconds_of(LocalSGD(period, state=state), busy)
        assert seconds_of(chosen, busy) <= local_s * (1 + 1e-9)
        [update] = chosen.plan(busy).applies
        kinds.add((update.at.point, len(chosen.plan(busy).transfers) > 1))
    assert len(kinds) > 2


def test_an_iteration_without_a_set_is_not_filled():
    plan = DreamDDP(period=9, solver="balanced", fill=True).plan(SMALL)
    assert any(plan.fact("fill"))
    for own, extra in zip(plan.fact("sets"), plan.fact("fill"), strict=True):
        assert own or not extra


def test_slices_reach_the_closed_form():
    """20 equal layers, C / H just above B: each iteration sends a fifth of every layer."""
    layers = tuple(Bucket(f"h.{i}", 0.005, 0.010, 400_000) for i in range(20))
    profile = Profile(layers, (Link("net", 0.0, 8e6 / 1.05),), world_size=4)
    plan = DreamDDP(period=5, split=True).plan(profile)
    assert {t.payload.parts for t in plan.transfers} == {5}
    assert [len(at(plan, h)) for h in range(5)] == [20] * 5
    first_gradient_s, share_s = 0.010, 1.05 / 5
    assert predict(DreamDDP(period=5, split=True), profile).iteration_s == pytest.approx(
        0.1 + first_gradient_s + share_s
    )


@pytest.mark.parametrize(("ratio", "gains"), [(1.2, False), (0.9, True)])
def test_slices_that_are_not_asked_for_must_gain_two_percent(ratio, gains):
    """`ratio`: a period's messages over its backwards."""
    layers = tuple(Bucket(f"h.{i}", 0.005, 0.010, 400_000) for i in range(8))
    rate = 8 * 400_000 / (ratio * 2 * 8 * 0.010)
    profile = Profile(layers, (Link("net", 1e-3, rate),), world_size=4)
    whole_s, split_s = (
        seconds_of(DreamDDP(period=2, split=split), profile) for split in (False, True)
    )
    assert split_s < whole_s * (0.98 if gains else 0.99)
    assert (split_s < whole_s * 0.98) == gains
    chosen = DreamDDP(period=2).plan(profile)
    assert any(t.payload.parts > 1 for t in chosen.transfers) == gains


def fast_link(profile, times):
    link = profile.links[0]
    return replace(profile, links=(replace(link, bytes_per_s=link.bytes_per_s * times),))


@pytest.mark.long
@pytest.mark.parametrize("due", ["forward", "delayed"])
def test_later_deadlines_are_not_slower(due):
    """Than the paper's variant; nor faster than their bounds."""
    faster = 0
    for n, profile in enumerate(floored_profiles(24, 6, seed=5)):
        # A floor that jumps makes two slices faster than the whole: no link does, and no bound.
        plain = replace(profile, links=(replace(profile.links[0], small=()),))
        period, average = 2 + n % 3, ("after_update", "before_update")[n % 2]
        strategy = DreamDDP(period, average=average, due=due)
        later_s = seconds_of(strategy, plain)
        assert strategy.bound_s(plain) <= later_s * (1 + 1e-9)
        paper_s = seconds_of(DreamDDP(period, average=average), plain)
        assert later_s <= paper_s * (1 + 1e-9)
        faster += later_s < paper_s * 0.98
    assert faster > 5


def test_due_at_forward_takes_what_the_solver_says():
    for n, profile in enumerate(floored_profiles(24, 6, seed=6)):
        strategy = DreamDDP(
            2 + n % 3,
            average=("after_update", "before_update")[n // 2 % 2],
            state=("local", "averaged")[n % 2],
            due="forward",
            fill=n % 3 == 0,
            split=False,
            solver=("auto", "balanced")[n // 4 % 2],
        )
        plan = strategy.plan(profile)
        if any(len(t.payload.buckets) > 1 for t in plan.transfers):
            continue
        job = late.Planning("", profile, strategy.period, strategy.when, strategy.state)
        cycle = planner.cycle_of(job, "forward")
        order = [
            [t.payload.buckets[0] for t in at(plan, h) if t.payload.buffer == "param"]
            for h in range(plan.period)
        ]
        expected_s = sum(map(cycle.seconds, order)) / plan.period
        assert seconds_of(strategy, profile) == pytest.approx(expected_s)


JOB = late.Planning("x", SMALL, 2, "after_update")


def test_a_piece_of_several_buckets_is_due_when_the_first_of_them_is_needed():
    pieces = [Piece(range(3)), Piece(range(3, 7))]
    plan = partial_plan("x", SMALL, pieces, ((0,), (1,)), "after_update", "local", late=True)
    assert check(plan) == []
    assert [t.before.bucket for t in plan.transfers] == [2, 6]


@pytest.mark.parametrize("due", ["end", "forward"])
def test_filling_costs_nothing(due):
    whole = whole_buckets(7)
    plain = planner.of_sets(JOB, due, whole, ((0, 1, 2, 3, 4), (5, 6)))
    filled = planner.filled(JOB, plain)
    assert any(filled.fill)
    cycle = planner.cycle_of(JOB, due)
    for order, longer, more in zip(plain.sends, filled.sends, filled.fill, strict=True):
        assert sorted(longer) == sorted((*order, *more))
        assert cycle.seconds(longer) <= cycle.seconds(order) * (1 + 1e-9)


def test_what_is_due_at_the_next_forward_is_filled_where_that_costs_nothing():
    """More bytes may fit in time, and take processor time from compute."""
    layers = tuple(Bucket(f"h.{i}", 0.005, 0.010, 40_000) for i in range(3))
    profile = Profile(layers, (Link("net", 1e-4, 4e6, cpu_s_per_byte=1e-9),), world_size=4)
    without, chosen, filled = (
        DreamDDP(3, due="forward", fill=fill, split=False) for fill in (False, "auto", True)
    )
    sent = [sum(len(t.phases) for t in s.plan(profile).transfers) for s in (filled, without)]
    assert sent[0] > sent[1]
    assert seconds_of(filled, profile) > seconds_of(without, profile) * (1 + 1e-6)
    assert chosen.plan(profile).transfers == without.plan(profile).transfers
    free = replace(profile, links=(replace(profile.links[0], cpu_s_per_byte=0.0),))
    assert chosen.plan(free).transfers == filled.plan(free).transfers


@pytest.mark.parametrize("due", ["end", "forward"])
def test_every_candidate_averages_everything_once(due):
    """In pieces of its own, within the time that it states."""
    found = [
        *planner.of_layers(JOB, due, "auto"),
        *planner.of_runs(JOB, due, math.inf),
        *planner.of_slices(JOB, due, math.inf),
        *planner.all_at_once(JOB, due),
    ]
    assert len(found) == 10
    for one in found:
        sent = [one.pieces[i] for order in one.sends for i in order]
        assert {b for piece in sent for b in piece.buckets} == {*range(7)}
        assert sum(Fraction(len(piece.buckets), piece.parts) for piece in sent) == 7
        plan = planner.plan_of(JOB, one)
        assert check(plan) == []
        seconds = predict_plan(plan, SMALL).iteration_s * 2
        assert seconds == pytest.approx(one.seconds)


def test_delayed_sets_keep_every_bucket():
    for pieces, sets in late.delayed_sets(late.Planning("x", SMALL, 3, "after_update", delay=1)):
        sent = [b for members in sets for i in members for b in pieces[i].buckets]
        assert sorted(sent) == [*range(7)]
        assert len(sets) == 3


@pytest.mark.parametrize("times", [1, 1000])
def test_all_at_once_hides_behind_what_comes_before_the_next_forward(times):
    """And without a bucket's own update, whose bound counts one of all."""
    profile = replace(fast_link(SMALL, times), other_s=0.02, step_s=5e-3)
    job = replace(JOB, profile=profile)
    *_, local = planner.all_at_once(job, "forward")
    plan = planner.plan_of(job, local)
    assert predict_plan(plan, profile).iteration_s * 2 == pytest.approx(local.seconds)
    bound_s = late.forward_bound_s(job, planner.cycle_of(job, "forward"))
    assert bound_s * 2 <= local.seconds * (1 + 1e-9)


@pytest.mark.parametrize("wire", ["int8", "int4", "topk:0.01", "powersgd:4"])
def test_codes_of_bfloat16_are_those_of_float32(wire):
    """Of as many elements in half of the bytes: bytes, times, and what planners are told."""
    strategy = LocalSGD(period=2, wire=wire)
    used = strategy.plan(SMALL).transfers[0].wire
    speed = CodecSpeed(used.name, 1e-9, 2e-9, 1e-4, 1e-4, 1e-4)
    single = replace(SMALL, codecs=(speed,))
    halved = tuple(replace(b, size_bytes=b.size_bytes // 2) for b in single.buckets)
    half = replace(single, buckets=halved, element_bytes=2.0)
    one, other = (predict(strategy, profile) for profile in (single, half))
    assert other.bytes_per_iteration == one.bytes_per_iteration
    assert other.iteration_s == pytest.approx(one.iteration_s)
    payload = Payload("param", range(len(halved)))
    told_s, expected_s = (
        profile_for_wire(profile, used).message_s(payload, profile.default_link.name)
        for profile in (half, single)
    )
    assert told_s == pytest.approx(expected_s)


def test_what_hiding_costs():
    parameters = sum(bucket.payload_bytes("param") for bucket in SMALL.buckets)
    for strategy, memory_bytes, staleness in (
        (DreamDDP(due="forward"), 0, 0),
        (DreamDDP(due="delayed", delay=3), 2 * parameters, 3),
    ):
        plan = strategy.plan(SMALL)
        assert plan.fact("memory_bytes") == memory_bytes
        assert plan.fact("staleness") == staleness


def test_delays_hide_whatever_the_link_can_carry():
    """Up to its last percents; less cannot be promised than one iteration needs."""
    for times in (0.4, 1, 3):
        profile = fast_link(SMALL, times)
        strategy = DreamDDP(due="delayed", delay=2)
        assert seconds_of(strategy, profile) <= strategy.bound_s(profile) * 1.02


def test_with_jitter_choices_are_simulated():
    uneven = replace(fast_link(SMALL, 4), jitter=0.3)
    plain, chosen = DreamDDP(due="forward", fill=True), DreamDDP(due="forward")
    assert seconds_of(chosen, uneven) <= seconds_of(plain, uneven)


def test_more_iterations_than_buckets():
    plan = PartialSync(period=9).plan(replace(SMALL, buckets=SMALL.buckets[:2]))
    assert plan.fact("sets") == [[0], [1], [], [], [], [], [], [], []]
    assert [len(at(plan, i)) for i in range(9)] == [1, 1, 0, 0, 0, 0, 0, 0, 0]


def test_planners_see_the_slowest_rank():
    uneven = replace(SMALL, rank_scale=(1.0, 1.0, 1.0, 3.0))
    for strategy in (WFBP(), DreamDDP()):
        assert strategy.plan(uneven) == strategy.plan(uneven.slowest())
        assert strategy.bound_s(uneven) == strategy.bound_s(uneven.slowest())


def test_a_cap_makes_torchs_groups():
    def groups(strategy):
        return [
            (t.payload.buckets.start, t.payload.buckets.stop)
            for t in strategy.plan(SMALL).transfers
        ]

    mib = [900 / KIB, 700 / KIB, 700 / KIB]
    assert mib[0] + mib[1] > 1  # the default's first cap
    assert groups(DDP()) == groups(WFBP(fusion="ddp")) == [(0, 2), (2, 7)]
    assert groups(DDP(bucket_cap_mb=0.5)) == [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5), (5, 7)]
    assert groups(DDP(bucket_cap_mb=1e6)) == [(0, 7)]


def test_registry_and_creation():
    averaging = ["dreamddp", "fedavg", "local-sgd", "partial-sync", "selsync"]
    others = ["cyclic", "deft", "diloco", *averaging]
    synchronous = ["wfbp", "asc-wfbp", "bsp", "bytescheduler", "dear", "p3", "us-byte"]
    methods = [name for name in module_names() if name in STRATEGIES]
    assert methods == sorted(methods)
    assert list(STRATEGIES) == ["ddp", *synchronous, *others, *methods]
    late = [name for name, cls in STRATEGIES.items() if not cls.synchronous]
    assert late == [*others, *methods]
    for name, cls in STRATEGIES.items():
        assert create(name) == cls()
        assert cls.citation
        assert cls.__doc__
    assert create("dreamddp", {"period": 7, "fill": False}) == DreamDDP(7, fill=False)


def test_texts_show_what_was_changed():
    assert str(DreamDDP()) == "dreamddp"
    assert str(DreamDDP(period=7, fill=False)) == "dreamddp(period=7, fill=False)"
    assert DreamDDP().settings() == {
        "wire": "none",
        "error_feedback": True,
        "period": 5,
        "solver": "auto",
        "fill": "auto",
        "split": "auto",
        "average": "auto",
        "state": "local",
        "due": "end",
        "delay": 1,
        "gain": 1.0,
        "clip": None,
        "outer": None,
    }


def test_settings_are_values():
    for strategy in VARIANTS:
        again = create(strategy.name, strategy.settings())
        assert again == strategy
        assert hash(again) == hash(strategy)
        for field in fields(strategy):
            with pytest.raises(FrozenInstanceError):
                setattr(strategy, field.name, None)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (
            lambda: create("dreamdp"),
            r"strategy \('dreamdp'\) must be one of ddp, .*; did you mean 'dreamddp'\?",
        ),
        (
            lambda: create("wfbp", {"fuson": 1}),
            r"setting of wfbp \('fuson'\) must be one of .*; did you mean 'fusion'\?",
        ),
        (
            lambda: WFBP(fusion="mgwfbp"),  # pyright: ignore[reportArgumentType]
            r"fusion \('mgwfbp'\) must be one of none, ddp, mg-wfbp, optimal; did you mean 'mg-wf",
        ),
        (
            lambda: LocalSGD(period=0),
            r"period \(0\) must be an integer of at least 1; use BSP\(\) to synchronize in every",
        ),
        (lambda: LocalSGD(period=True), r"period \(True\) must be an integer of at least 1"),
        (lambda: LocalSGD(warmup=-1), r"warmup \(-1\) must be an integer of at least 0"),
        (lambda: PartialSync(period=2.5), r"period \(2.5\) must be an integer of at least 1"),
        (lambda: DreamDDP(period=0), r"period \(0\) must be an integer of at least 1; use BSP"),
        (
            lambda: PartialSync(average="never"),
            r"average \('never'\) must be one of auto, after_update",
        ),
        (lambda: DreamDDP(state="gone"), r"state \('gone'\) must be one of local, averaged, reset"),
        (lambda: DreamDDP(due="late"), r"due \('late'\) must be one of end, forward, delayed"),
        (
            lambda: DreamDDP(due="delayed", delay=0),
            r"delay \(0\) must be an .*; due='forward' lands",
        ),
        (lambda: DreamDDP(delay=2), r"delay \(2\) counts only with due 'delayed'; due is 'end'"),
        (
            lambda: DreamDDP(period=3, due="delayed", delay=3),
            r"delay \(3\) must be below the period \(3\)",
        ),
        (lambda: DreamDDP(due="delayed", gain=0), r"gain \(0\) must lie above 0 and be at most 1"),
        (lambda: DreamDDP(gain=0.5), r"gain \(0.5\) counts only with due 'delayed'"),
        (lambda: DreamDDP(due="delayed", state="reset"), r"state \('reset'\) must be left out"),
        (lambda: DreamDDP(due="delayed", fill=True), r"fill \(True\) must be left out"),
        (lambda: DreamDDP(due="delayed", split=True), r"split \(True\) must be left out"),
        (
            lambda: DreamDDP(fill=True, outer="0.7/0.5"),
            r"fill \(True\) must be left out with outer",
        ),
        (lambda: DreamDDP(split=True, outer=OuterSGD()), r"split \(True\) must be left out with"),
        (lambda: DreamDDP(outer=0.7), r"outer \(0.7\) must be an OuterSGD"),
        (lambda: OuterSGD(lr=0), r"lr \(0\) of outer must be a number above 0"),
        (lambda: OuterSGD(momentum=1.0), r"momentum \(1.0\) of outer must be at least 0 and below"),
        (lambda: OuterSGD(momentum=-0.1), r"momentum \(-0.1\) of outer must be at least 0"),
        (lambda: DiLoCo(outer=None), r"outer \(None\) must be an OuterSGD"),
        (lambda: DiLoCo(period=4, delay=4), r"delay \(4\) must be below the period \(4\)"),
        (lambda: DiLoCo(period=4, fragments=5), r"fragments \(5\) must be at most the period"),
        (lambda: DiLoCo(fragments=0), r"fragments \(0\) must be an integer of at least 1"),
        (lambda: DiLoCo(fragments=9).plan(SMALL), r"fragments \(9\) .* the model's buckets \(7\)"),
        (lambda: DiLoCo(delay=1, alpha=1.0), r"alpha \(1.0\) must be at least 0 and below 1"),
        (lambda: DiLoCo(alpha=0.5), r"alpha \(0.5\) counts only with a delay"),
        (lambda: create("deft", {"outer": "0.7/0.5"}), r"outer must be left out with deft"),
        (lambda: DreamDDP(solver="balance"), r"solver \('balance'\) .* did you mean 'balanced'\?"),
        (lambda: DDP(bucket_cap_mb=0), r"bucket_cap_mb \(0\) must be a number above 0"),
        (lambda: DDP(bucket_cap_mb=float("nan")), r"bucket_cap_mb \(nan\) must be a number"),
    ],
)
def test_settings_that_make_no_sense(make, text):
    with pytest.raises(ValueError, match=text):
        make()


@settings(max_examples=10, deadline=None)
@given(profile=random_timelines.profiles(most_buckets=6))
def test_delayed_averages_travel_together_where_that_takes_no_longer(profile):
    """The plan of whole buckets with even loads is faster by half a per cent at most."""
    strategy = DreamDDP(period=3, due="delayed")
    job = late.Planning("dreamddp", profile, 3, "after_update", delay=1)
    even = late.delayed_plan(job, *late.even_sets(job, 3))
    limit_s = predict_plan(even, profile).iteration_s
    assert seconds_of(strategy, profile) <= limit_s * 1.006


def test_hidden_averages_are_one_message():
    bucket = Bucket("b", 0.1, 0.2, 1000)
    profile = Profile((bucket,) * 6, (Link("net", 1e-3, 1e6),), 2)
    [message] = DreamDDP(period=3, due="delayed").plan(profile).transfers
    assert message.payload.buckets == range(6)
    slow = replace(profile, links=(Link("net", 1e-3, 2500.0),))
    runs = [t.payload.buckets for t in DreamDDP(period=3, due="delayed").plan(slow).transfers]
    assert runs == [range(3), range(3, 6)]


def _uneven_profile(rng: random.Random) -> Profile:
    """A profile in which a variant has been slower than what it extends: calls of the optimizer
    that cost time, long latencies, or jitter."""
    size = rng.randint(2, 24)
    buckets = tuple(
        Bucket(f"b{i}", rng.expovariate(size), rng.expovariate(size), rng.randint(1, 10**6))
        for i in range(size)
    )
    link = Link("net", rng.choice((0.001, 0.03, 0.1)), rng.choice((1e6, 1e7)))
    return Profile(
        buckets,
        (replace(link, cpu_s_per_message=rng.choice((0.0, 1e-4))),),
        world_size=4,
        update_s=0.1,
        step_s=rng.choice((0.0, 0.01)),
        jitter=rng.choice((0.0, 0.0, 0.1)),
    )


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:late updates save no time")
def test_no_variant_is_predicted_slower_than_what_it_extends() -> None:
    rng, late = random.Random(1), 0
    for n in range(4):
        profile, period = _uneven_profile(rng), rng.randint(2, 6)
        for average in ("after_update", "before_update") if n % 2 else ("before_update",):
            plain = DreamDDP(period, average=average)
            seconds = predict_plan(plain.plan(profile), profile).iteration_s
            for due in ("forward", "delayed"):
                variant = replace(plain, due=due).plan(profile)
                assert predict_plan(variant, profile).iteration_s <= seconds * (1 + 1e-9), due
        merged = DeFT(preserver=False).plan(profile)
        merges = merged.fact("merges", [1]) if merged.strategy == "deft" else [1]
        late += max(merges) > 1
        update_s = predict_plan(merged, profile).iteration_s * sum(merges) / len(merges)
        wfbp_s = predict_plan(WFBP().plan(profile), profile).iteration_s
        assert update_s <= wfbp_s * (1 + 1e-9 + 0.02 * bool(profile.jitter))
    assert late


def test_a_variant_that_gives_way_can_still_step_at_once() -> None:
    """A script that clips needs it, whichever plan was taken."""
    for average in ("after_update", "before_update"):
        strategy = DreamDDP(3, due="delayed", average=average)
        at_step = strategy.at_step() or strategy
        assert early_remedy(at_step.plan(_uneven_profile(random.Random(2)))) is None


@pytest.mark.long
def test_planning_has_one_budget_at_every_size() -> None:
    """Function calls, which do not depend on the machine: their number is limited by the budgets,
    not by the number of buckets or the period. `benchmarks/planner.py` measures the seconds."""
    period = 20
    for size, most, more in (
        (5000, 500_000, {}),
        (5000, 2_000_000, {"split": True}),
        (5000, 10_000_000, {"due": "forward", "split": True}),
        (1500, 2_000_000, {"due": "delayed"}),
    ):
        profile = _random_profile(size, random.Random(3))
        strategy, calls = DreamDDP(period, **more), cProfile.Profile(builtins=False)
        calls.runcall(strategy.plan, profile)
        count = sum(entry.callcount for entry in calls.getstats())
        assert count < most, (size, period, more)


def _random_profile(size: int, rng: random.Random) -> Profile:
    """Backward takes half a second; the messages of all buckets take about twice as long."""
    buckets = [
        Bucket(f"b{i}", rng.random() / size, rng.random() / size, rng.randint(1, 10**6))
        for i in range(size)
    ]
    return Profile(tuple(buckets), (Link("net", 0.1 / size, 2e5 * size),), world_size=4)
