"""Strategies: settings, texts, and what every plan promises.

`OFFBEAT_REWRITE_GOLDENS=1` writes tests/golden/<strategy>.txt again.
"""

import os
from collections import Counter
from dataclasses import FrozenInstanceError, fields, replace
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given, settings
from reference import random_plans

from offbeat.check import check
from offbeat.plan import Plan
from offbeat.profile import Bucket, Link, Profile
from offbeat.sim import predict
from offbeat.strategies import BSP, DDP, STRATEGIES, WFBP, DreamDDP, LocalSGD, PartialSync, create

GOLDEN = Path(__file__).parent.parent / "golden"
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
VARIANTS = [
    BSP(),
    DDP(),
    DDP(bucket_cap_mb=0.5),
    DDP(bucket_cap_mb="tuned"),
    *(WFBP(fusion=fusion) for fusion in ("none", "ddp", "mg-wfbp", "optimal")),
    LocalSGD(),
    LocalSGD(period=1),
    LocalSGD(period=3, warmup=2, state="averaged"),
    LocalSGD(state="reset"),
    PartialSync(),
    PartialSync(period=1),
    PartialSync(period=3, average="before_update", state="averaged"),
    *(DreamDDP(period=3, solver=s) for s in ("best", "optimal", "balanced", "dfs", "brute-force")),
    DreamDDP(period=4, fill=False, average="before_update", state="averaged"),
    DreamDDP(period=3, split=True),
    DreamDDP(period=2, split=True, average="before_update", state="averaged"),
]


@pytest.mark.parametrize("name", STRATEGIES)
def test_golden(name):
    path = GOLDEN / f"{name}.txt"
    text = f"{STRATEGIES[name]().plan(SMALL)}\n"
    if os.environ.get("OFFBEAT_REWRITE_GOLDENS") == "1":
        path.write_text(text)
    assert path.read_text() == text


@pytest.mark.parametrize("strategy", VARIANTS, ids=str)
@settings(max_examples=25, deadline=None)
@given(profile=random_plans.profiles(most_buckets=6))
def test_every_plan_is_sound(strategy, profile):
    plan = strategy.plan(profile)
    assert check([plan], profile) == []
    assert plan == strategy.plan(profile) == Plan.from_dict(plan.to_dict())
    assert plan.strategy == strategy.name
    assert strategy.bound_s(profile) >= 0


@pytest.mark.parametrize("strategy", VARIANTS, ids=str)
@settings(max_examples=25, deadline=None)
@given(profile=random_plans.profiles(most_buckets=6))
def test_every_bucket_moves_as_often_as_promised(strategy, profile):
    if getattr(strategy, "split", False):  # which slices fill is not in the notes
        strategy = replace(strategy, fill=False)
    plan = strategy.plan(profile)
    filled = [bucket for buckets in plan.notes.get("fill", []) for bucket in buckets]
    moved: Counter[tuple[str, int]] = Counter()
    for phase in plan.phases[plan.prologue :]:
        for t in plan.at(phase):
            for bucket in t.payload.buckets:
                moved[t.payload.kind, bucket] += Fraction(1, t.payload.parts)
    synchronous = isinstance(strategy, BSP | DDP | WFBP)
    kinds = ["grad"] if synchronous else ["param"]
    if strategy.state_policy == "averaged":
        kinds.append("state")
    assert moved == {
        (kind, bucket): 1 + filled.count(bucket)
        for kind in kinds
        for bucket in range(len(profile.buckets))
    }
    assert plan.period == (1 if synchronous else strategy.period)


def test_a_prologue_averages_gradients():
    plan = LocalSGD(period=3, warmup=2).plan(SMALL)
    assert (plan.prologue, plan.period) == (2, 3)
    assert [[t.payload.kind for t in plan.at(i)] for i in range(8)] == [
        ["grad"],
        ["grad"],
        [],
        [],
        ["param"],
        [],
        [],
        ["param"],
    ]


@settings(max_examples=40, deadline=None)
@given(profile=random_plans.profiles(most_buckets=6))
def test_slices_are_never_predicted_slower(profile):
    whole = predict(DreamDDP(period=3, fill=False), profile)
    sliced = predict(DreamDDP(period=3, fill=False, split=True), profile)
    assert sliced.iteration_s <= whole.iteration_s * (1 + 1e-9)


def test_slices_reach_the_closed_form():
    """20 equal layers, C / H just above B: each iteration sends a fifth of every layer."""
    layers = tuple(Bucket(f"h.{i}", 0.005, 0.010, 400_000) for i in range(20))
    profile = Profile(layers, (Link("net", 0.0, 8e6 / 1.05),), world_size=4)
    plan = DreamDDP(period=5, split=True).plan(profile)
    assert {t.payload.parts for t in plan.transfers} == {5}
    assert [len(plan.at(h)) for h in range(5)] == [20] * 5
    first_gradient_s, share_s = 0.010, 1.05 / 5
    assert predict(DreamDDP(period=5, split=True), profile).iteration_s == pytest.approx(
        0.1 + first_gradient_s + share_s
    )


def test_more_iterations_than_buckets():
    plan = PartialSync(period=9).plan(replace(SMALL, buckets=SMALL.buckets[:2]))
    assert plan.notes["sets"] == [[0], [1], [], [], [], [], [], [], []]
    assert [len(plan.at(i)) for i in range(9)] == [1, 1, 0, 0, 0, 0, 0, 0, 0]


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
    late = ["deft", "local-sgd", "partial-sync", "dreamddp"]
    priority = ["asc-wfbp", "p3", "bytescheduler", "us-byte", "dear"]
    assert list(STRATEGIES) == ["ddp", "bsp", "wfbp", *priority, *late]
    for name, cls in STRATEGIES.items():
        assert create(name) == cls()
        assert cls.citation
        assert cls.__doc__
    assert create("dreamddp", {"period": 7, "fill": False}) == DreamDDP(7, fill=False)


def test_texts_show_what_was_changed():
    assert str(DreamDDP()) == "dreamddp"
    assert str(DreamDDP(period=7, fill=False)) == "dreamddp(period=7, fill=False)"
    assert DreamDDP().settings() == {
        "period": 5,
        "solver": "best",
        "fill": True,
        "split": False,
        "average": "after_update",
        "state": "local",
    }


@pytest.mark.parametrize("strategy", VARIANTS, ids=str)
def test_settings_are_values(strategy):
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
            r"setting of wfbp \('fuson'\) must be one of fusion; did you mean 'fusion'\?",
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
        (lambda: PartialSync(average="never"), r"average \('never'\) must be one of after_update"),
        (lambda: DreamDDP(state="gone"), r"state \('gone'\) must be one of local, averaged, reset"),
        (lambda: DreamDDP(solver="best!"), r"solver \('best!'\) .* did you mean 'best'\?"),
        (lambda: DDP(bucket_cap_mb=0), r"bucket_cap_mb \(0\) must be a number above 0"),
        (lambda: DDP(bucket_cap_mb=float("nan")), r"bucket_cap_mb \(nan\) must be a number"),
    ],
)
def test_settings_that_make_no_sense(make, text):
    with pytest.raises(ValueError, match=text):
        make()
