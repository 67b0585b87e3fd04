"""What usual scripts do between backward and step is seen, and a variant that allows it runs."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cases import oddities, workers
from cases.comparing import assert_close, assert_same, sets_of
from cases.models import Case, Loop, profile_of
from cases.strategy_lists import STRATEGIES
from cases.workers import Trained
from harness.parts import average_of, conflict_with, defer_updates
from harness.ranks import run_world, watch_world
from oracle.training import Replica, bsp, local_sgd, partial_sync, replicas

from offbeat import (
    P3,
    WFBP,
    Cyclic,
    DeAR,
    DeFT,
    DreamDDP,
    LocalSGD,
    PartialSync,
    Profile,
    Strategy,
)
from offbeat.plan import Plan
from offbeat.plan import check as problems
from offbeat.profile import ScriptUsage
from offbeat.sim import predict_plan
from offbeat.strategies import DiLoCo, USByte

CASE = Case("mlp", "nesterov", "step")
ITERATIONS = 8
TWICE = frozenset(range(ITERATIONS))
AFTER = PartialSync(period=3)
CLIPPING = Loop(clip=0.05)
SCALING = Loop(scale=1024.0, clip=0.05)

names: Any = {"ids": str}


def train(strategy: Strategy, loop: Loop, case: Case = CASE, **options: Any) -> list[Trained]:
    return run_world(workers.train_with, 2, case, strategy, range(ITERATIONS), loop, options)


def parameters_averaged(
    world: list[Replica], iterations: Sequence[int], strategy: Any, profile: Profile
) -> None:
    sets = sets_of(strategy.plan(profile), profile)
    partial_sync(
        world, iterations, sets=sets, average=average_of(strategy.average), state=strategy.state
    )


def assert_all_same(ranks: Sequence[Trained], world: list[Replica]) -> None:
    for mine, replica in zip(ranks, world, strict=True):
        assert_same(mine, replica, f"rank {replica.rank}")


# ---- clipping and scaling -------------------------------------------------------------------


@pytest.mark.parametrize("loop", [CLIPPING, SCALING], ids=["clip", "scale"])
@pytest.mark.parametrize("strategy", [P3(), DeAR()], **names)
def test_priority_schedules_step_at_once(strategy: Any, loop: Loop) -> None:
    """Observed or not, every iteration is DDP's; rank 0 says in one line what runs."""
    world = replicas(CASE, 2, replace(loop, scale=None))
    bsp(world, range(ITERATIONS))
    for options in ({}, {"observe": 2, "min_bucket_bytes": 1}):
        args = (CASE, strategy, range(ITERATIONS), loop, options)
        ranks, said = zip(*run_world(workers.train_and_hear, 2, *args), strict=True)
        assert_all_same(ranks, world)
        what = f"{replace(strategy, update='at_step')} runs instead of {strategy}"
        assert [sum(what in line for line in lines) for lines in said] == [1, 0]


@pytest.mark.parametrize("loop", [CLIPPING, SCALING], ids=["clip", "scale"])
def test_parameters_are_averaged_before_the_update(loop: Loop) -> None:
    """With a profile the first iteration is as asked for, with the clipped gradients."""
    before, plain = replace(AFTER, average="before_update"), replace(loop, scale=None)
    profile, world = profile_of(CASE, 2), replicas(CASE, 2, plain)
    parameters_averaged(world, range(1), AFTER, profile)
    parameters_averaged(world, range(1, ITERATIONS), before, profile)
    assert_all_same(train(AFTER, loop), world)
    world = replicas(CASE, 2, plain)
    bsp(world, range(2))
    ranks = train(AFTER, loop, observe=2, min_bucket_bytes=1)
    usage = ScriptUsage(True, reads=True, scales=loop.scale is not None)
    assert ranks[0].profile.usage == usage
    parameters_averaged(world, range(2, ITERATIONS), before, ranks[0].profile)
    assert_all_same(ranks, world)


ALTERED = ("lr", "momentum", "weight_decay", "weights", "gradients", "data")


def test_settings_and_weights_changed_before_the_step_count() -> None:
    """Whichever of them a script changes between backward and step, given a profile or observed."""
    given = {}, {"observe": 3, "min_bucket_bytes": 1}
    runs = [(Loop(alters=what), options) for what in ALTERED for options in given]
    calls = [(CASE, AFTER, range(ITERATIONS), loop, options) for loop, options in runs]
    found = run_world(workers.in_turn, 2, workers.train_with, calls)
    before = replace(AFTER, average="before_update")
    for (loop, options), *ranks in zip(runs, *found, strict=True):
        world, first = replicas(CASE, 2, loop), options.get("observe", 1)
        if options:
            bsp(world, range(first))
            profile = ranks[0].profile
        else:
            profile = profile_of(CASE, 2)
            parameters_averaged(world, range(first), AFTER, profile)
        parameters_averaged(world, range(first, ITERATIONS), before, profile)
        assert_all_same(ranks, world)


def test_gradients_moved_to_other_memory_are_refused() -> None:
    loop = Loop(alters="memory", since=3)
    [outcome] = watch_world(workers.train_with, 1, CASE, WFBP(), range(6), loop, {})
    assert outcome.kind == "ValueError"
    assert "a gradient was moved to other memory" in outcome.error
    assert "parameter 0 of those that are trained" in outcome.error


def test_settings_and_weights_changed_later_are_refused() -> None:
    for what in ALTERED[:-1]:
        loop = Loop(alters=what, since=3)
        [outcome] = watch_world(workers.train_with, 1, CASE, AFTER, range(6), loop, {})
        assert outcome.kind == "ValueError"
        assert "between backward and optimizer.step()" in outcome.error


@pytest.mark.parametrize("strategy", [P3(), DeAR()], **names)
def test_a_hook_before_the_step_clips_all_gradients_at_once(strategy: Any) -> None:
    """Given a profile or observed: every iteration is DDP's, on both ranks."""
    world = replicas(CASE, 2, CLIPPING)
    bsp(world, range(ITERATIONS))
    given = {}, {"observe": 2, "min_bucket_bytes": 1}
    loop = Loop(hook=CLIPPING.clip)
    calls = [(CASE, strategy, range(ITERATIONS), loop, options) for options in given]
    for ranks in zip(*run_world(workers.in_turn, 2, workers.train_with, calls), strict=True):
        assert_all_same(ranks, world)


ACTS = ("clips", "clips if need be", "sets lr", "decays")


def test_step_hooks_run_once_per_iteration() -> None:
    """Whatever they do and whenever they begin to, where they are registered from the start."""
    early = [P3(), DeAR(), USByte()]
    kinds = [(kind, "pre", since) for kind in ACTS for since in (0, 3)] + [("decays", "post", 0)]
    calls = [(strategy, *kind) for kind in kinds for strategy in (WFBP(), *early)]
    [found] = run_world(workers.in_turn, 1, oddities.train_hooked, calls)
    assert [steps for steps, _ in found] == [6] * len(calls)
    size = 1 + len(early)
    alike = [{weights for _, weights in found[i : i + size]} for i in range(0, len(found), size)]
    assert [len(one) for one in alike] == [1] * len(kinds)


def test_hooks_registered_later_may_count_but_not_change_or_read() -> None:
    """Buckets are stepped one by one; the first hook that does more ends the run."""
    strategies = P3(), DeAR(), AFTER
    kinds = [("counts", 0), *((kind, 0) for kind in ACTS), ("clips", 4), ("sets lr", 4)]
    calls = [(s, kind, "pre", since, 2) for s in strategies for kind, since in kinds]
    [found] = run_world(workers.in_turn, 1, oddities.train_hooked, calls)
    steps = [steps for steps, _ in found]
    assert (
        steps[: 2 * len(kinds)] == [6, 2, 2, 2, 2, 4, 4] * 2
    )  # at the forward of the next iteration
    # In backward; in iteration 2 of this period all buckets are stepped at once.
    assert steps[2 * len(kinds) :] == [6, 3, 3, 3, 3, 4, 4]


def test_hooks_are_allowed_without_a_variant_until_they_do_something() -> None:
    """In cyclic parallelism the rank that updates refuses a hook that clips."""
    found = run_world(workers.in_turn, 2, oddities.train_hooked, [(Cyclic(), "counts")])
    assert [steps for [(steps, _)] in found] == [6, 6]
    outcomes = watch_world(workers.train_with, 2, CASE, Cyclic(), range(4), Loop(hook=0.05), {})
    assert any(one.kind == "ValueError" and "hook" in one.error for one in outcomes)


def test_dreamddp_clips_what_the_script_clips() -> None:
    strategy = DreamDDP(period=2)
    before = DreamDDP(period=2, average="before_update")
    ranks, world = train(strategy, CLIPPING, observe=2, min_bucket_bytes=1), replicas(CASE, 2)
    world = replicas(CASE, 2, CLIPPING)
    bsp(world, range(2))
    plan = strategy.plan(ranks[0].profile)
    if any(a.at.point == "grad" for a in plan.applies if a.rule == "local"):
        parameters_averaged(world, range(2, ITERATIONS), before, ranks[0].profile)
    else:  # everything at once was predicted to be as fast, and steps at the step
        local_sgd(world, range(2, ITERATIONS), period=2)
    assert_all_same(ranks, world)


def test_a_profile_of_a_script_that_clips_needs_no_trial() -> None:
    """Updates beside an outer optimizer cannot be put off. With the profile's usage the variant
    runs from the first iteration on; without it the job ends."""
    outer = DiLoCo(period=3, fragments=2, due="forward")
    profile = profile_of(CASE, 2)
    clips = {"profile": replace(profile, usage=ScriptUsage(changes=True, reads=True))}
    variant = outer.at_step()
    assert variant is not None
    for mine, other in zip(
        train(outer, CLIPPING, **clips), train(variant, CLIPPING, profile=profile), strict=True
    ):
        assert_close(mine.model, other.model, "model", 0.0)
    args = (CASE, outer, range(ITERATIONS), CLIPPING, {"profile": profile})
    for outcome in watch_world(workers.train_with, 2, *args):
        assert outcome.kind == "ValueError", outcome


def train_launched(folder: Path, *args: Any) -> Trained:
    """As a rank of a launcher, with a record in a folder."""
    job = folder / f"job{workers.rank()}.json"
    job.write_text(json.dumps({"schema": 1, "record_dir": str(folder)}))
    os.environ["OFFBEAT_JOB"] = str(job)
    return workers.train_with(*args)


def test_the_record_of_a_run_holds_the_variant(tmp_path: Path) -> None:
    """A comparison predicts the plan in it."""
    profile, variant = profile_of(CASE, 2), P3().at_step()
    assert variant is not None
    args = (CASE, P3(), range(4), CLIPPING, {"profile": profile})
    run_world(train_launched, 2, tmp_path, *args)
    recorded = Plan.from_dict(json.loads((tmp_path / "plan.json").read_text()))
    assert recorded.digest == variant.plan(profile).digest != P3().plan(profile).digest


def test_without_a_variant_it_is_refused_on_all_ranks() -> None:
    args = (CASE, Cyclic(), range(4), CLIPPING, {"observe": 2, "min_bucket_bytes": 1})
    for outcome in watch_world(workers.train_with, 2, *args):
        assert outcome.kind == "ValueError"
        assert "the script changes gradients before the step (clipping?)" in outcome.error
        assert "let the strategy clip each stage (clip=...)" in outcome.error


IDIOMS = (
    "nothing", "averages", "averages a part", "averages what it keeps", "clones what it keeps",
    "copies", "pickles", "clamps", "clamps what it keeps", "prunes", "prunes several",
)  # fmt: skip


def test_looks_at_the_bare_module_see_the_updates_of_the_step() -> None:
    """Where updates come at the next forward, too; and only looks make them come earlier."""
    late = [P3(), DeAR(), USByte()]
    calls = [(strategy, idiom) for idiom in IDIOMS for strategy in (WFBP(), *late)]
    [found] = run_world(workers.in_turn, 1, oddities.train_with_bare, calls)
    size = 1 + len(late)
    for i, idiom in enumerate(IDIOMS):
        alike = {one[:3] for one in found[i * size : (i + 1) * size]}
        assert len(alike) == 1, idiom
        assert next(iter(alike))[0] == 6
    assert [was_late for *_, was_late in found[:size]] == [False, True, True, True]


def test_writes_through_kept_data_are_refused() -> None:
    """There is no hook for them: at the forward after the first one that updates late."""
    calls = [(WFBP(), "clamps aliases"), *((one, "clamps aliases") for one in (P3(), DeAR()))]
    [found] = run_world(workers.in_turn, 1, oddities.train_with_bare, calls)
    assert [steps for steps, *_ in found] == [6, 3, 3]


# ---- several backwards ----------------------------------------------------------------------


class Twice(Replica):
    """Adds up two backward passes in every iteration."""

    def gradients(self, iteration: int) -> None:
        super().gradients(iteration)
        super().gradients(iteration)


def twice() -> list[Replica]:
    return [Twice(r.case, r.rank, r.model, r.optimizer, r.scheduler) for r in replicas(CASE, 2)]


@pytest.mark.parametrize("strategy", [AFTER, LocalSGD(period=3)], **names)
def test_accumulation_without_no_sync_counts_steps(strategy: Any) -> None:
    """Only the last backward before a step sends parameters: a period is of steps."""
    world = twice()
    if isinstance(strategy, LocalSGD):
        local_sgd(world, range(ITERATIONS), period=3)
    else:
        parameters_averaged(world, range(ITERATIONS), strategy, profile_of(CASE, 2))
    assert_all_same(train(strategy, Loop(twice=TWICE)), world)


def test_accumulation_without_no_sync_is_observed() -> None:
    """Also where observing would end between two backwards of one step."""
    ranks, world = train(AFTER, Loop(twice=TWICE), observe=3, min_bucket_bytes=1), twice()
    bsp(world, range(2))
    parameters_averaged(world, range(2, ITERATIONS), AFTER, ranks[0].profile)
    assert_all_same(ranks, world)


@pytest.mark.parametrize("strategy", [WFBP(), P3()], **names)
def test_accumulation_is_ddps_where_gradients_are_averaged(strategy: Strategy) -> None:
    world = twice()
    bsp(world, range(ITERATIONS))
    for options in ({}, {"observe": 3, "min_bucket_bytes": 1}):
        assert_all_same(train(strategy, Loop(twice=TWICE), **options), world)


BEFORE = PartialSync(period=3, average="before_update")
FIXED = DeFT(forward=1, backward=1)  # its plan does not depend on measured times
OBSERVED = {"observe": 4, "min_bucket_bytes": 1}, {"observe": 2, "min_bucket_bytes": 1}
COUNTS = {"more": [1] * 4 + [2] * 3 + [3] * 2, "fewer": [3] * 3 + [1] * 4 + [2, 3]}
BOTH_WAYS: list[Any] = [
    *((s, COUNTS["more"], {}, {}) for s in (WFBP(), P3(), DeAR(), LocalSGD(period=3))),
    *((s, COUNTS["fewer"], {}, {}) for s in (P3(), DeAR(), AFTER, BEFORE, Cyclic())),
    (FIXED, [2] * 8, *OBSERVED),
]


def test_accumulation_that_changes_is_that_of_no_sync() -> None:
    """More or fewer backward passes per step than in the first iterations: the weights are those
    with `no_sync()` around all passes but the last."""
    for found in run_world(oddities.add_up_both_ways, 2, BOTH_WAYS):
        for call, (bare, quiet) in zip(BOTH_WAYS, found, strict=True):
            assert_close(bare, quiet, f"{call[0]} {call[1]}")


@pytest.mark.parametrize("strategy", [AFTER, BEFORE, Cyclic()], **names)
def test_another_backward_after_weights_have_moved_is_refused(strategy: Strategy) -> None:
    outcomes = watch_world(oddities.add_up, 2, strategy, [1, 1, 1, 2, 2, 2])
    refused = [o for o in outcomes if "with model.no_sync():" in o.error]
    assert refused
    assert {o.kind for o in outcomes} == {"RuntimeError"}


def test_clipping_after_fewer_backwards_is_refused_where_others_are_applied() -> None:
    [outcome] = watch_world(clip_after_one, 1)
    assert (outcome.kind, "passes are sent in the step" in outcome.error) == ("ValueError", True)


def clip_after_one() -> None:
    oddities.add_up(FIXED, [2] * 4 + [1], clip_at=4, **OBSERVED[0])


@pytest.mark.parametrize("strategy", [WFBP(), DeAR()], **names)
def test_one_rank_alone_runs_another_backward(strategy: Strategy) -> None:
    """It names the rank that does not; nobody waits longer than for the timeout."""
    first, second = watch_world(add_alone, 2, strategy)
    assert (first.kind, second.kind) == ("RuntimeError", "RuntimeError")
    assert "rank 1 did not" in first.error
    assert max(first.seconds, second.seconds) < 20


def add_alone(strategy: Strategy) -> None:
    oddities.add_up(strategy, [1, 1, (2, 1), 1, 1], timeout_s=2.0)


# ---- skipped steps --------------------------------------------------------------------------

EVERYONE = frozenset((rank, t) for rank in range(2) for t in (0, 2, 5))
ONE = frozenset({(0, 2), (1, 5)})


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("strategy", [WFBP(), P3(slice_elements=7)], **names)
def test_all_ranks_skip_a_step(strategy: Strategy, early: bool) -> None:
    loop, case = Loop(skipped=EVERYONE, early=early), Case("mlp", "nesterov")
    world = replicas(case, 2, loop)
    bsp(world, range(ITERATIONS))
    assert_all_same(train(strategy, loop, case), world)


@pytest.mark.parametrize("strategy", [AFTER, LocalSGD(period=3)], **names)
def test_one_rank_skips_its_step_where_parameters_are_averaged(strategy: Any) -> None:
    loop = Loop(skipped=ONE, early=True)
    world = replicas(CASE, 2, loop)
    if isinstance(strategy, LocalSGD):
        local_sgd(world, range(ITERATIONS), period=3)
    else:
        parameters_averaged(world, range(ITERATIONS), strategy, profile_of(CASE, 2))
    assert_all_same(train(strategy, loop), world)


def test_skipping_what_was_applied_is_an_error() -> None:
    args = (CASE, AFTER, range(4), Loop(skipped=ONE), {})
    [outcome] = watch_world(workers.train_with, 1, *args)
    assert outcome.kind == "ValueError"
    assert "call skip_step() in place of backward, or use average='before_update'" in outcome.error


def test_a_rank_that_skips_alone_is_named() -> None:
    args = (CASE, WFBP(), range(4), Loop(skipped=frozenset({(1, 1)})), {"compare_every": 2})
    for outcome in watch_world(workers.train_with, 2, *args):
        assert outcome.kind == "RuntimeError"
        assert "rank 1 has skipped 1 steps, rank 0 0" in outcome.error


def test_a_rank_without_a_backward_compares_replicas_too() -> None:
    """After it has sent what the others wait for."""
    loop = Loop(idle=frozenset({(0, 2), (1, 5)}))
    world = replicas(CASE, 2, loop)
    bsp(world, range(ITERATIONS))
    assert_all_same(train(WFBP(), loop, compare_every=1), world)


# ---- plans ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_deferred_plan_updates_at_the_step(name: str) -> None:
    """Where there is one, it is sound and moves the same messages."""
    profile = profile_of(CASE, 2)
    plan = STRATEGIES[name]().plan(profile)
    put_off = defer_updates(plan)
    early = {a.at.point for a in plan.applies if a.rule == "local"} & {"grad", "forward"}
    outer = any(a.rule == "outer" for a in plan.applies)  # has moments of its own
    assert (put_off is not None) == bool(early and plan.source is None and not outer)
    if put_off is not None:
        assert not problems(put_off, profile)
        assert [t.payload for t in put_off.transfers] == [t.payload for t in plan.transfers]
        assert {a.at.point for a in put_off.applies if a.rule == "local"} <= {"step", "end"}


@pytest.mark.parametrize("strategy", [P3(), USByte(), DeAR(), PartialSync()], **names)
def test_variants_at_the_step(strategy: Strategy) -> None:
    """They suit every habit, and nobody asks them for another variant."""
    everything = ScriptUsage(True, True, True, True, backwards=2, alters=True, hooks=True)
    variant = strategy.at_step()
    assert variant is not None
    assert variant.at_step() is None
    profile = profile_of(CASE, 2)
    assert conflict_with(everything, strategy.plan(profile)) is not None
    assert conflict_with(everything, variant.plan(profile)) is None
    assert variant.bound_s(profile) <= predict_plan(variant.plan(profile), profile).iteration_s
