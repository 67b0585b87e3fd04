"""What usual scripts do between backward and step is seen, and a variant that allows it runs."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from cases import oddities, workers
from cases.batches import Batch, Call
from cases.comparing import assert_close, assert_same, sets_of
from cases.merging import Merging
from cases.models import Case, Loop, profile_of
from cases.strategy_lists import STRATEGIES
from cases.workers import Trained
from harness.parts import conflict_with, defer_updates
from harness.ranks import run_ranks, watch_ranks
from oracle.training import Replica, bsp, local_sgd, partial_sync, replicas

from offbeat import (
    P3,
    WFBP,
    Cyclic,
    DeAR,
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
CLIPPING = Loop(clip=0.05)

ONE, TWO = Batch(1), Batch(2)


def train_alone(strategy: Strategy, loop: Loop, iterations: int = 6) -> Call:
    return ONE.add(workers.train_with, CASE, strategy, range(iterations), loop, {})


# ---- trainings and their references ---------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """A training of two ranks. Its reference follows other strategies, each up to an iteration;
    None averages gradients."""

    strategy: Strategy
    loop: Loop
    phases: Sequence[tuple[int, Any]] = ((ITERATIONS, None),)
    case: Case = CASE
    options: dict[str, Any] = field(default_factory=dict)

    def add(self) -> Call:
        args = (self.case, self.strategy, range(ITERATIONS), self.loop, self.options)
        return TWO.add(workers.train_and_hear, *args)


class Twice(Replica):
    """Adds up two backward passes in every iteration."""

    def gradients(self, iteration: int) -> None:
        super().gradients(iteration)
        super().gradients(iteration)


AFTER, LOCAL = PartialSync(period=3), LocalSGD(period=3)
BEFORE = replace(AFTER, average="before_update")
OUTER = DiLoCo(period=3, fragments=2, due="forward")
SCALING = Loop(scale=1024.0, clip=0.05)
OBSERVED = {"observe": 2, "min_bucket_bytes": 1}
LONGER = {"observe": 3, "min_bucket_bytes": 1}
# Where parameters are averaged and a profile is given, the first iteration is as asked for.
GIVEN = ((1, AFTER), (ITERATIONS, BEFORE))
ALL_SKIP = frozenset((rank, t) for rank in range(2) for t in (0, 2, 5))
ONE_SKIPS = frozenset({(0, 2), (1, 5)})

RUNS: dict[str, list[Run]] = {
    "steps at once": [
        Run(P3(), CLIPPING),
        Run(P3(), SCALING, options=OBSERVED),
        Run(DeAR(), CLIPPING, options=OBSERVED),
    ],
    "averages before the update": [
        *(
            Run(AFTER, loop, ((2, None), (ITERATIONS, BEFORE)), options=OBSERVED)
            for loop in (CLIPPING, SCALING)
        ),
        Run(AFTER, SCALING, GIVEN),
    ],
    # Whichever of them a script changes between backward and step.
    "changes settings and weights": [
        *(
            Run(AFTER, Loop(alters=what), GIVEN)
            for what in ("lr", "momentum", "weights", "gradients", "data")
        ),
        *(
            Run(AFTER, Loop(alters=what), ((3, None), (ITERATIONS, BEFORE)), options=LONGER)
            for what in ("weight_decay", "weights", "data")
        ),
    ],
    "clips in a hook before the step": [
        Run(strategy, Loop(hook=CLIPPING.clip), options=options)
        for strategy, options in ((P3(), OBSERVED), (DeAR(), {}))
    ],
    # Only the last backward before a step sends parameters: a period is of steps. Observing may
    # end between two backwards of one step.
    "accumulates without no_sync": [
        *(Run(one, Loop(twice=TWICE), ((ITERATIONS, one),)) for one in (AFTER, LOCAL)),
        Run(AFTER, Loop(twice=TWICE), ((2, None), (ITERATIONS, AFTER)), options=LONGER),
        *(
            Run(one, Loop(twice=TWICE), options=options)
            for one, options in ((WFBP(), {}), (P3(), {}), (P3(), LONGER))
        ),
    ],
    "all ranks skip a step": [
        Run(strategy, Loop(skipped=ALL_SKIP, early=early), case=Case("mlp", "nesterov"))
        for strategy in (WFBP(), P3(slice_elements=7))
        for early in (False, True)
    ],
    "one rank skips where parameters are averaged": [
        Run(one, Loop(skipped=ONE_SKIPS, early=True), ((ITERATIONS, one),))
        for one in (AFTER, LOCAL)
    ],
    # After a rank without a backward has sent what the others wait for, it compares replicas.
    "one rank is idle": [Run(WFBP(), Loop(idle=ONE_SKIPS), options={"compare_every": 1})],
}
CALLS = {name: [(run, run.add()) for run in group] for name, group in RUNS.items()}


@pytest.mark.parametrize("name", CALLS)
def test_trained_as_the_reference(name: str) -> None:
    for run, call in CALLS[name]:
        ranks, begin, loop = [trained for trained, _ in call.results], 0, run.loop
        plain = replace(loop, scale=None, hook=None, clip=loop.clip or loop.hook)
        world = replicas(run.case, 2, plain)
        if loop.twice:
            parts = [(r.case, r.rank, r.model, r.optimizer, r.scheduler) for r in world]
            world = [Twice(*one) for one in parts]
        profile = ranks[0].profile if "observe" in run.options else profile_of(run.case, 2)
        for end, strategy in run.phases:
            if strategy is None:
                bsp(world, range(begin, end))
            else:
                average_parameters(world, range(begin, end), strategy, profile)
            begin = end
        assert_all_same(ranks, world, str(run))


def average_parameters(
    world: list[Replica], iterations: Sequence[int], strategy: Any, profile: Profile
) -> None:
    if isinstance(strategy, LocalSGD):
        local_sgd(world, iterations, period=strategy.period)
        return
    sets = sets_of(strategy.plan(profile), profile)
    partial_sync(world, iterations, sets=sets, average=strategy.when, state=strategy.state)


def assert_all_same(ranks: Sequence[Trained], world: list[Replica], what: str = "") -> None:
    for mine, replica in zip(ranks, world, strict=True):
        assert_same(mine, replica, f"{what} rank {replica.rank}")


# ---- clipping and scaling -------------------------------------------------------------------


def test_rank_0_says_in_one_line_what_runs() -> None:
    for run, call in CALLS["steps at once"]:
        what = f"{replace(run.strategy, update='at_step')} runs instead of {run.strategy}"  # type: ignore[call-arg]
        said = [lines for _, lines in call.results]
        assert [sum(what in line for line in lines) for lines in said] == [1, 0]


def test_what_is_observed_of_a_script_that_clips() -> None:
    for run, call in CALLS["averages before the update"][:2]:
        usage = ScriptUsage(True, reads=True, scales=run.loop.scale is not None)
        assert call.results[0][0].profile.usage == usage


# ---- what is refused ------------------------------------------------------------------------

FIXED = Merging()  # its plan does not depend on measured times
FOUR = {"observe": 4, "min_bucket_bytes": 1}
SKIPS_ALONE = Loop(skipped=frozenset({(1, 1)}))


def clip_after_one() -> None:
    oddities.add_up(FIXED, [2] * 4 + [1], clip_at=4, **FOUR)


REFUSED: list[tuple[Call, str, list[str]]] = [
    (
        train_alone(WFBP(), Loop(alters="memory", since=3)),
        "ValueError",
        ["a gradient was moved to other memory", "parameter 0 of those that are trained"],
    ),
    *(
        (
            train_alone(AFTER, Loop(alters=what, since=3)),
            "ValueError",
            ["between backward and optimizer.step()"],
        )
        for what in ("lr", "weights", "gradients")
    ),
    (
        Run(Cyclic(), CLIPPING, options=OBSERVED).add(),
        "ValueError",
        [
            "the script changes gradients before the step (clipping?)",
            "let the strategy clip each stage (clip=...)",
        ],
    ),
    # Updates beside an outer optimizer cannot be put off.
    (Run(OUTER, CLIPPING).add(), "ValueError", []),
    (ONE.add(clip_after_one), "ValueError", ["passes are sent in the step"]),
    (
        train_alone(AFTER, Loop(skipped=ONE_SKIPS)),
        "ValueError",
        ["call skip_step() in place of backward, or use average='before_update'"],
    ),
    (
        Run(WFBP(), SKIPS_ALONE, options={"compare_every": 2}).add(),
        "RuntimeError",
        ["rank 1 has skipped 1 steps, rank 0 0"],
    ),
]


def test_refused_on_all_ranks() -> None:
    for call, kind, words in REFUSED:
        for outcome in call.outcomes:
            assert outcome.kind == kind, (words, outcome)
            assert [text for text in words if text not in outcome.error] == []


# ---- hooks, and variants of the strategy ----------------------------------------------------

ACTS = ("clips", "clips if need be", "sets lr", "decays")
KINDS = [
    *((kind, "pre", 0) for kind in ACTS),
    *((kind, "pre", 3) for kind in ("clips", "decays")),
    ("decays", "post", 0),
]
AT_THE_STEP = [
    [ONE.add(oddities.train_hooked, one, *kind) for one in (WFBP(), P3(), DeAR())] for kind in KINDS
]


def test_step_hooks_run_once_per_iteration() -> None:
    """Whatever they do and whenever they begin to, where they are registered from the start."""
    for calls in AT_THE_STEP:
        found = [call.results[0] for call in calls]
        assert [steps for steps, _ in found] == [6] * len(calls)
        assert len({weights for _, weights in found}) == 1


LATE = [("counts", 0), *((kind, 0) for kind in ACTS), ("clips", 4), ("sets lr", 4)]
REGISTERED_LATER = [
    [ONE.add(oddities.train_hooked, one, kind, "pre", since, 2) for kind, since in late]
    for one, late in ((P3(), LATE), (DeAR(), LATE[:2]), (AFTER, LATE))
]


def test_hooks_registered_later_may_count_but_not_change_or_read() -> None:
    """Buckets are stepped one by one; the first hook that does more ends the run."""
    p3, dear, after = [[call.results[0][0] for call in calls] for calls in REGISTERED_LATER]
    assert p3 == [6, 2, 2, 2, 2, 4, 4]  # at the forward of the next iteration
    assert dear == p3[:2]
    # In backward; in iteration 2 of this period all buckets are stepped at once.
    assert after == [6, 3, 3, 3, 3, 4, 4]


@TWO.given(oddities.train_hooked, Cyclic(), "counts")
def test_hooks_are_allowed_without_a_variant_until_they_do_something(call: Call) -> None:
    """In cyclic parallelism the rank that updates refuses a hook that clips."""
    assert [steps for steps, _ in call.results] == [6, 6]
    outcomes = watch_ranks(2, workers.train_with, CASE, Cyclic(), range(4), Loop(hook=0.05), {})
    assert any(one.kind == "ValueError" and "hook" in one.error for one in outcomes)


DREAM = DreamDDP(period=2)
DREAMING = Run(DREAM, CLIPPING, options=OBSERVED).add()


def test_dreamddp_clips_what_the_script_clips() -> None:
    before = DreamDDP(period=2, average="before_update")
    ranks, world = [one for one, _ in DREAMING.results], replicas(CASE, 2, CLIPPING)
    bsp(world, range(2))
    plan = DREAM.plan(ranks[0].profile)
    if any(a.at.point == "grad" for a in plan.applies if a.rule == "local"):
        average_parameters(world, range(2, ITERATIONS), before, ranks[0].profile)
    else:  # everything at once was predicted to be as fast, and steps at the step
        local_sgd(world, range(2, ITERATIONS), period=2)
    assert_all_same(ranks, world)


VARIANT = OUTER.at_step()
assert VARIANT is not None
KNOWN = profile_of(CASE, 2)
USED = replace(KNOWN, usage=ScriptUsage(changes=True, reads=True))
OUTERS = [
    Run(one, CLIPPING, options={"profile": profile}).add()
    for one, profile in ((OUTER, USED), (VARIANT, KNOWN))
]


def test_a_profile_of_a_script_that_clips_needs_no_trial() -> None:
    """With the profile's usage the variant runs from the first iteration on."""
    for (mine, _), (other, _) in zip(*(call.results for call in OUTERS), strict=True):
        assert_close(mine.model, other.model, "model", 0.0)


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
    run_ranks(2, train_launched, tmp_path, *args)
    recorded = Plan.from_dict(json.loads((tmp_path / "plan.json").read_text()))
    assert recorded.digest == variant.plan(profile).digest != P3().plan(profile).digest


IDIOMS = (
    "nothing", "averages", "averages a part", "averages what it keeps", "clones what it keeps",
    "copies", "pickles", "clamps", "clamps what it keeps", "prunes", "prunes several",
)  # fmt: skip
ALSO_DEAR = ("nothing", "averages", "clamps", "clamps aliases")
BARE = {
    idiom: [
        ONE.add(oddities.train_with_bare, one, idiom)
        for one in ((WFBP(), P3(), DeAR()) if idiom in ALSO_DEAR else (WFBP(), P3()))
    ]
    for idiom in (*IDIOMS, "clamps aliases")
}


def test_looks_at_the_bare_module_see_the_updates_of_the_step() -> None:
    """Where updates come at the next forward, too; and only looks make them come earlier."""
    for idiom in IDIOMS:
        alike = {call.results[0][:3] for call in BARE[idiom]}
        assert len(alike) == 1, idiom
        assert next(iter(alike))[0] == 6
    assert [call.results[0][3] for call in BARE["nothing"]] == [False, True, True]


def test_writes_through_kept_data_are_refused() -> None:
    """There is no hook for them: at the forward after the first one that updates late."""
    assert [call.results[0][0] for call in BARE["clamps aliases"]] == [6, 3, 3]


# ---- several backwards ----------------------------------------------------------------------


COUNTS = {"more": [1] * 4 + [2] * 3 + [3] * 2, "fewer": [3] * 3 + [1] * 4 + [2, 3]}
BOTH_WAYS: list[Any] = [
    *((s, COUNTS["more"], {}, {}) for s in (WFBP(), P3(), LocalSGD(period=3))),
    *((s, COUNTS["fewer"], {}, {}) for s in (DeAR(), AFTER, BEFORE, Cyclic())),
    (FIXED, [2] * 8, FOUR, OBSERVED),
]
BOTH = [TWO.add(oddities.add_up_both_ways, [call]) for call in BOTH_WAYS]


def test_accumulation_that_changes_is_that_of_no_sync() -> None:
    """More or fewer backward passes per step than in the first iterations: the weights are those
    with `no_sync()` around all passes but the last."""
    for what, call in zip(BOTH_WAYS, BOTH, strict=True):
        for [(bare, quiet)] in call.results:
            assert_close(bare, quiet, f"{what[0]} {what[1]}")


@TWO.each(oddities.add_up, [AFTER, [1, 1, 1, 2, 2, 2]], [BEFORE, [1, 1, 1, 2, 2, 2]])
def test_another_backward_after_weights_have_moved_is_refused(calls: list[Call]) -> None:
    alone = watch_ranks(2, oddities.add_up, Cyclic(), [1, 1, 1, 2, 2, 2])
    for outcomes in (alone, *(call.outcomes for call in calls)):
        assert any("with model.no_sync():" in o.error for o in outcomes)
        assert {o.kind for o in outcomes} == {"RuntimeError"}


@pytest.mark.parametrize("strategy", [WFBP(), DeAR()], ids=str)
def test_one_rank_alone_runs_another_backward(strategy: Strategy) -> None:
    """It names the rank that does not; nobody waits longer than for the timeout."""
    first, second = watch_ranks(2, add_alone, strategy)
    assert (first.kind, second.kind) == ("RuntimeError", "RuntimeError")
    assert "rank 1 did not" in first.error
    assert max(first.seconds, second.seconds) < 20


def add_alone(strategy: Strategy) -> None:
    oddities.add_up(strategy, [1, 1, (2, 1), 1, 1], timeout_s=2.0)


# ---- plans ----------------------------------------------------------------------------------


def test_a_deferred_plan_updates_at_the_step() -> None:
    """Where there is one, it is sound and moves the same messages."""
    profile = profile_of(CASE, 2)
    for name, strategy in STRATEGIES.items():
        plan = strategy().plan(profile)
        put_off = defer_updates(plan)
        early = {a.at.point for a in plan.applies if a.rule == "local"} & {"grad", "forward"}
        outer = any(a.rule == "outer" for a in plan.applies)  # has moments of its own
        assert (put_off is not None) == bool(early and plan.source is None and not outer), name
        if put_off is not None:
            assert not problems(put_off, profile), name
            assert [t.payload for t in put_off.transfers] == [t.payload for t in plan.transfers]
            points = {a.at.point for a in put_off.applies if a.rule == "local"}
            assert points <= {"step", "end"}, name


def test_variants_at_the_step() -> None:
    """They suit every habit, and nobody asks them for another variant."""
    everything = ScriptUsage(True, True, True, True, backwards=2, alters=True, hooks=True)
    profile = profile_of(CASE, 2)
    for strategy in (P3(), USByte(), DeAR(), PartialSync()):
        variant = strategy.at_step()
        assert variant is not None
        assert variant.at_step() is None
        assert conflict_with(everything, strategy.plan(profile)) is not None
        assert conflict_with(everything, variant.plan(profile)) is None
        assert variant.bound_s(profile) <= predict_plan(variant.plan(profile), profile).iteration_s
