"""Plans for measured times: levels with hysteresis, agreement of all ranks, and the equations."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cases.batches import Batch, Call
from cases.comparing import assert_same, sets_of
from cases.drifting import Drifted, Times, train
from cases.models import Case, profile_of
from harness.ranks import run_ranks
from oracle.training import partial_sync, replicas

from offbeat import ASCWFBP, BSP, P3, WFBP, DreamDDP, LocalSGD, Plan, Profile, Strategy
from offbeat.core.derive.exactness import have_same_bits, is_reorderable
from offbeat.core.measuring.drift import Drift, Level, steps_of, weighted_median
from offbeat.core.profile.elsewhere import with_slower_links, with_slower_replicas
from offbeat.core.runtime.iteration import Iteration, MomentTimes, Timestamps
from offbeat.core.runtime.launch_request import current_replan
from offbeat.core.runtime.replanning import BoundaryMeter, _overlaps, _plan_seconds, compute_s
from offbeat.core.sim.costs import Costs
from offbeat.core.sim.prediction import BOUNDARY_FACT
from offbeat.core.sim.ranks import Ranks
from offbeat.core.transport.device import CPU
from offbeat.core.transport.link import Message
from offbeat.core.transport.topology import Topology
from offbeat.jobs.record_lines import load
from offbeat.plan import Fact, Payload
from offbeat.profile import Bucket, Link
from offbeat.sim import predict_plan

CASE = Case("mlp", "nesterov")
PROFILE = profile_of(CASE, 2)


# ---- levels ---------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
def test_jitter_of_a_tenth_changes_no_level(seed: int) -> None:
    """At any true ratio to which the level has settled."""
    draw = random.Random(seed)
    level = Level(steps=draw.randrange(-8, 9))
    true = level.factor
    assert not any(level.add(true * math.exp(draw.gauss(0, 0.1))) for _ in range(500))


def test_a_level_changes_at_the_third_boundary_in_a_row() -> None:
    level = Level()
    assert [level.add(2.0) for _ in range(4)] == [False, False, True, False]
    assert level.factor == 2.0
    assert [level.add(ratio) for ratio in (1.0, 1.0, 1.9, 1.0, 1.0, 1.0)] == [
        False, False, False, False, False, True,
    ]  # fmt: skip
    assert level.factor == 1.0


def test_changes_in_both_directions_are_no_change() -> None:
    level = Level()
    assert not any(level.add(ratio) for ratio in (2.0, 0.5) * 20)
    assert not any(level.add(ratio) for ratio in (2.0, 2.0, None, 0.5) * 5)


def test_a_boundary_without_a_measurement_neither_counts_nor_interrupts() -> None:
    level = Level()
    assert [level.add(ratio) for ratio in (2.0, None, 2.0, math.inf, 2.0)][-1]


def test_steps_are_quarters_of_a_factor_of_two() -> None:
    for steps in range(-16, 17):
        assert steps_of(2 ** (steps / 4) * 1.08) == steps_of(2 ** (steps / 4) / 1.08) == steps
    assert [steps_of(1e9), steps_of(1e-9)] == [16, -16]


def test_the_median_by_weight_is_that_of_repeated_values() -> None:
    draw = random.Random(0)
    for _ in range(50):
        pairs = [(draw.random(), draw.randrange(4)) for _ in range(draw.randrange(1, 9))]
        values = sorted(value for value, weight in pairs for _ in range(weight))
        expected = values[(len(values) - 1) // 2] if values else None
        assert weighted_median(pairs) == expected


def test_levels_survive_a_file() -> None:
    drift = Drift.of(PROFILE)
    for _ in range(3):
        drift.add({"net": 2.0}, [None, 4.0])
    drift.add({"net": 4.0}, [1.0, 4.0])
    other = Drift.of(PROFILE)
    other.resume(json.loads(json.dumps(drift.capture())))
    assert other == drift
    assert [drift.links["net"], drift.replicas[1]] == [Level(4, [8]), Level(8)]


def test_the_profile_of_the_levels_has_their_times() -> None:
    profile = profile_of(CASE, 2, links=("a", "b"))
    drift = Drift.of(profile)
    drift.links["b"].steps, drift.replicas[1].steps = 4, -4
    slower = drift.profile(profile)
    for name, factor in (("a", 1.0), ("b", 2.0)):
        payload = Payload("param", range(1, 3))
        assert slower.message_s(payload, name) == pytest.approx(
            factor * profile.message_s(payload, name)
        )
    own_s = [scale * slower.compute_s for scale in slower.scale_of_ranks]
    assert own_s == pytest.approx([profile.compute_s, profile.compute_s / 2])
    scaled = with_slower_replicas(replace(profile, rank_scale=(0.5, 1.5)), [2.0, 2.0])
    assert (scaled.rank_scale, scaled.compute_s) == ((0.5, 1.5), 2 * profile.compute_s)


def test_spans_overlap_as_pairwise_comparison_finds() -> None:
    draw = random.Random(1)
    for _ in range(200):
        cuts = sorted(draw.sample(range(40), 2 * draw.randrange(1, 8)))
        spans = [(float(a), float(b)) for a, b in zip(cuts[::2], cuts[1::2], strict=True)]
        start = draw.random() * 40
        end = start + draw.random() * 10
        expected = any(a < end and start < b for a, b in spans)
        assert _overlaps(spans, start, end) == expected


class Echo:
    """Control of two ranks with equal times."""

    rank, world_size = 0, 2

    def minimum(self, values: list[float]) -> list[float]:
        return values


def exchanged(plan: Plan, times: dict[int, tuple[float, float]]) -> dict[str, float | None]:
    """Ratios of the links if the messages of the second iteration had these starts and ends, by
    their place in the plan; the first iteration belongs to no window."""
    cluster = SimpleNamespace(control=Echo(), device=CPU(), topology=Topology.flat(2), replica=0)
    meter = BoundaryMeter(plan, PROFILE, 2, cluster)  # type: ignore[arg-type]
    messages = []
    for index, t in enumerate(plan.transfers):
        message = Message(t, 1, index)
        message.start, message.end = times.get(index, (None, None))
        messages.append(message)
    meter.add(Iteration(1, Timestamps(end=100.0), messages, planned=1))
    assert [meter.is_boundary(planned) for planned in range(4)] == [False, False, True, False]
    return meter.exchange(2)[0]


def test_messages_that_slow_each_other_down_are_left_out() -> None:
    """Of two channels of one link: the times of a message beside another one say nothing."""
    plan = ASCWFBP().plan(with_slower_links(PROFILE, 3.0))
    assert {t.link for t in plan.transfers} == {"net", "net#1"}
    alone_s = [PROFILE.message_s(t.payload, t.link) for t in plan.transfers]
    apart = {i: (10.0 * i, 10.0 * i + 2 * alone_s[i]) for i in range(len(alone_s))}
    assert exchanged(plan, apart) == {"net": pytest.approx(2.0)}
    second = apart[1][0] - 9.0, apart[1][1]  # begins during the first message
    beside = apart | {1: second}
    assert exchanged(plan, {i: beside[i] for i in (0, 1)}) == {"net": None}
    assert exchanged(plan, beside) == {"net": pytest.approx(2.0)}


# ---- plans with the same bits ---------------------------------------------------------------


def test_compute_is_that_of_the_last_batch_as_in_a_profile() -> None:
    marks = Timestamps(begin=0.0, first_forward=1.0, forward=8.0, forward_end=9.0)
    marks.backward_end, marks.waited, marks.step, marks.end = 11.0, 11.5, 11.5, 12.0
    marks.acted = [MomentTimes(0, begin=7.5, waited=7.75, applied=7.75)]
    done = SimpleNamespace(marks=marks)
    assert compute_s(done, CPU()) == 1.0 + 2.0 + 0.5  # type: ignore[arg-type]


def test_additional_time_after_a_pause_is_no_slower_link() -> None:
    """Most messages follow a pause of .5 s or more, and take .3 s longer."""
    link = Link("net", 0.1, 1e3, pause_s=0.5, after_pause=((10, 0.3),))
    profile = Profile((Bucket("all", 0.1, 0.2, 100),), (link,), 2)
    plan = BSP().plan(profile)
    device = SimpleNamespace(seconds=lambda mark: mark)
    control = SimpleNamespace(rank=0, world_size=1, minimum=lambda values: values)
    topology = SimpleNamespace(nodes=((0,),))
    cluster: Any = SimpleNamespace(control=control, device=device, topology=topology, replica=0)
    meter = BoundaryMeter(plan, profile, 20, cluster)
    marks, now_s = SimpleNamespace(first_forward=None), 0.0
    for planned, pause_s in enumerate((0.5, 0.49, 0.6)):
        start_s = now_s + pause_s
        now_s = start_s + 2 * 0.2 + (0.3 if pause_s >= 0.5 else 0.0)  # half of the speed
        [t] = plan.transfers
        messages = [SimpleNamespace(start=start_s, end=now_s, passed=False, transfer=t)]
        done: Any = SimpleNamespace(
            planned=planned, messages=messages, marks=marks, is_reached=lambda _: True
        )
        meter.add(done)
    links, _ = meter.exchange(20)
    assert links == {"net": pytest.approx(2.0)}


def test_another_order_of_the_same_messages_has_the_same_bits() -> None:
    strategy = P3(slice_elements=8)
    plan = strategy.plan(PROFILE)
    other = strategy.plan(with_slower_links(PROFILE, 0.01))
    assert other.digest != plan.digest
    assert have_same_bits(plan, other)
    wider = P3(slice_elements=16).plan(PROFILE)
    assert is_reorderable(wider)
    assert not have_same_bits(plan, wider)


@pytest.mark.parametrize("strategy", [WFBP(), DreamDDP(period=3)], ids=str)
def test_other_sums_have_other_bits(strategy: Strategy) -> None:
    plans = [strategy.plan(with_slower_links(PROFILE, times)) for times in (0.01, 1.0, 100.0)]
    changed = [plan for plan in plans if plan.digest != plans[1].digest]
    assert changed
    assert not any(have_same_bits(plans[1], plan) for plan in changed)


def test_the_prediction_contains_the_message_of_a_boundary() -> None:
    plan = WFBP().plan(PROFILE)
    measured = replace(plan, facts=(*plan.facts, Fact(BOUNDARY_FACT, 20)))
    seconds = Costs(plan, PROFILE, Ranks()).vote_s
    assert seconds > 0
    more_s = predict_plan(measured, PROFILE).iteration_s - predict_plan(plan, PROFILE).iteration_s
    assert more_s == pytest.approx(seconds / 20)


def test_the_bound_of_a_plan_does_not_hold_for_a_faster_profile() -> None:
    """With jitter, a prediction is no less than the bound of its plan."""
    fast, strategy = replace(PROFILE, jitter=0.1), BSP()
    plan = strategy.plan(with_slower_replicas(with_slower_links(fast, 4.0), [4.0, 4.0]))
    expected_s = predict_plan(replace(plan, bound_s=None), fast).iteration_s
    assert plan.bound_s is not None
    assert expected_s < plan.bound_s
    assert _plan_seconds(strategy, plan, fast) == expected_s


def test_invalid_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [current_replan(value) for value in (None, "never")] == ["exact", "never"]
    monkeypatch.setenv("OFFBEAT_REPLAN", "always")
    assert current_replan("never") == "always"
    monkeypatch.setenv("OFFBEAT_REPLAN", "often")
    with pytest.raises(ValueError, match=r"OFFBEAT_REPLAN \('often'\) must be 'never', 'exact' or"):
        current_replan("never")
    monkeypatch.delenv("OFFBEAT_REPLAN")
    with pytest.raises(ValueError, match=r"replan \('often'\) must be"):
        current_replan("often")


# ---- in jobs --------------------------------------------------------------------------------

PERIOD, BOUNDARY = 3, 3


TWO, THREE = Batch(2), Batch(3)


def drifted(
    strategy: Strategy, iterations: int, times: Times, batch: Batch = TWO, **options: Any
) -> Call:
    options.setdefault("profile", profile_of(CASE, batch.world_size))
    return batch.add(_train, strategy, iterations, times, options)


def _train(strategy: Strategy, iterations: int, times: Times, options: dict[str, Any]) -> Drifted:
    profile = options.pop("profile")
    return train(CASE, strategy, profile, iterations, times, BOUNDARY, **options)


@pytest.mark.parametrize(
    ("due", "last", "starts"), [("end", 0.25, [0, 15]), ("forward", 4.0, [0, 15, 24])]
)
def test_weights_are_those_of_the_plans_in_sequence(
    due: str, last: float, starts: list[int], tmp_path: Path
) -> None:
    """All ranks change at the same boundaries, although each has measured other times. Times
    change twice; each change counts at the third boundary after it."""
    strategy, iterations = DreamDDP(PERIOD, due=due), 30  # type: ignore[arg-type]
    times = Times(messages=((0, 1.0), (6, 2.0), (15, last)))
    options = {"profile": PROFILE, "replan": "always", "folder": str(tmp_path)}
    ranks = run_ranks(2, _train, strategy, iterations, times, options)
    sequences = [[(t, plan.digest) for t, plan in mine.plans] for mine in ranks]
    assert sequences[0] == sequences[1]
    assert [t for t, _ in sequences[0]] == starts
    world = replicas(CASE, 2)
    for stretch, plan in ranks[0].stretches(iterations):
        partial_sync(world, stretch, sets=sets_of(plan, PROFILE), average="after_update")
    for mine, replica in zip(ranks, world, strict=True):
        assert_same(mine.trained, replica, f"rank {replica.rank}")
    record = load([next(tmp_path.iterdir())])
    for lines in record.ranks.values():
        events = [event for event in lines.events if event["event"] == "replan"]
        assert [event["iteration"] for event in events] == [15, 24]
        assert [event["links"] for event in events] == [{"net": 2.0}, {"net": last}]
        for event in events:
            changed = event["iteration"] in starts
            assert changed == (event["to_s"] <= 0.98 * event["from_s"])
            assert changed == ("planned again, because link 'net' takes" in event["text"])
    assert "planned again, because link 'net' takes 2 times as long" in ranks[0].printed
    assert "planned again" not in ranks[1].printed


SLOW = Times(messages=((0, 4.0),))
HIDDEN = with_slower_links(PROFILE, 1e-6)
SAVES_NOTHING = drifted(DreamDDP(PERIOD), 10, SLOW, profile=HIDDEN, replan="always")


def test_no_plan_that_saves_less_than_two_percent() -> None:
    """Messages that compute hides at any rate."""
    first, second = SAVES_NOTHING.results
    assert [len(first.plans), len(second.plans)] == [1, 1]
    assert "no other plan saves 2%, so the plan stays" in first.printed
    assert first.profile == second.profile != HIDDEN


SLOW_RANK = drifted(DreamDDP(PERIOD), 10, Times(compute={1: 2.0}), replan="always")


def test_times_of_a_rank() -> None:
    """Rank 1 computes twice as long from the first iteration on."""
    first, second = SLOW_RANK.results
    assert first.profile == second.profile
    before, after = ([s * p.compute_s for s in p.scale_of_ranks] for p in (PROFILE, first.profile))
    other = PROFILE.other_s
    assert [a - other for a in after] == pytest.approx(
        [before[0] - other, 2 * (before[1] - other)], rel=1e-9
    )
    assert "rank 1 computes 2 times as long as in the profile" in first.printed


# Three ranks, because two have only one order of a sum.
REORDERED = [
    drifted(P3(slice_elements=8), 15, Times(messages=((0, 0.5),)), THREE, **options)
    for options in ({}, {"replan": "never"})
]


def test_another_order_changes_no_bit() -> None:
    planned, plain = (call.results for call in REORDERED)
    assert [t for t, _ in planned[0].plans] == [0, 9]
    assert planned[0].exchanges == 5
    assert [len(mine.plans) for mine in plain] == [1, 1, 1]
    assert {mine.bits for mine in planned} == {mine.bits for mine in plain}


STEADY = [
    drifted(strategy, 7, SLOW, **({"replan": replan} if replan else {}))
    for strategy, replan in (
        *((DreamDDP(PERIOD), None), (WFBP(), "exact")),
        *((BSP(), "exact"), (LocalSGD(PERIOD), "never")),
    )
]


def test_nothing_is_sent_where_nothing_can_change() -> None:
    for mine in (mine for call in STEADY for mine in call.results):
        assert mine.exchanges == 0
        assert len(mine.plans) == 1
        assert mine.plans[0][1].fact(BOUNDARY_FACT) is None


OTHER_PERIOD = drifted(LocalSGD(PERIOD), 10, SLOW, replan="always")


def test_another_period_is_reported_and_not_used() -> None:
    first, _ = OTHER_PERIOD.results
    assert len(first.plans) == 1
    assert "local-sgd(period=6) would take" in first.printed
    assert "the period stays, because it changes what is learnt" in first.printed


def _differ(profile: Profile) -> str:
    from cases.models import build_model, build_optimizer
    from cases.workers import prepared, rank

    model = build_model(CASE)
    options = {"profile": profile, "replan": ("never", "always")[rank()]}
    try:
        with prepared(model, build_optimizer(CASE, model), WFBP(), **options):
            return ""
    except ValueError as error:
        return str(error)


@TWO.given(_differ, PROFILE)
def test_ranks_must_have_the_same_policy(call: Call) -> None:
    assert all("replan=" in error for error in call.results)
