"""Updates right before the next forward: whoever looks sees updated weights, and the numbers are
plain training's."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from cases import failing, oddities, workers
from cases import schedules as support
from cases.comparing import assert_close, assert_same
from cases.merging import Merging, closes_every
from cases.models import Case, Loop
from cases.schedules import CASE, Script, evaluate_on_rank_0, look, look_on_rank_0
from harness.ranks import Outcome, call, in_turn, one_of, run_ranks, watch_ranks
from oracle.training import apply_merged, bsp, merged, replicas

from offbeat import P3, WFBP, ByteScheduler, DeAR, Strategy

SLICES = ByteScheduler(partition_elements=40, credit_elements=80)
HALVES = DeAR(fusion_bytes=1)
WHOLE = ByteScheduler(partition_elements=1000)
ITERATIONS = 8
REMEDY = "use a strategy that steps at once, such as WFBP()"

each = pytest.mark.parametrize("strategy", [SLICES, HALVES], ids=str)
ROWS = P3(slice_elements=7)

IDLE = frozenset({(0, 2), (1, 5)})
STEPPED = Case("mlp", "nesterov", "step")
# What a script does with gradients, in which order a model uses its layers, and who looks at it.
SCRIPTS: dict[str, tuple[Strategy, Script]] = {
    # Gradients that are added up, set to None, zeroed in place, kept, or cleared at other times.
    "several backward passes": (SLICES, Script(STEPPED, Loop(micro=3, clear="none"))),
    "zeroed in place": (SLICES, Script(Case("conv", "nesterov"), Loop(clear="in place"))),
    "never cleared": (SLICES, Script(loop=Loop(clear="never", evaluate=True))),
    "cleared after the forward": (
        SLICES,
        Script(Case("twice", "nesterov"), Loop(clear="after forward")),
    ),
    "cleared by the bare optimizer": (
        SLICES,
        Script(Case("checkpointed", "nesterov"), Loop(clear="inner")),
    ),
    "a closure": (SLICES, Script(loop=Loop(closure=True))),
    # Layers that do not run, or without gradients, and iterations without any.
    "branches": (SLICES, Script(Case("branches", "nesterov"), Loop(idle=IDLE))),
    "a late layer": (SLICES, Script(Case("late", "nesterov"), after=look_on_rank_0)),
    # Weights that are read from outside of their modules, in the bare model.
    "attending": (SLICES, Script(Case("attending", "adam"), bare=True)),
    "reading": (SLICES, Script(Case("reading", "nesterov"), after=evaluate_on_rank_0)),
    # Updates that are due when somebody looks, and settings and weights that change before.
    "looking": (SLICES, Script(Case("mlp", "adamw", "cosine"), after=look)),
    "loading": (SLICES, Script(loop=Loop(clear="model"), after=support.reload)),
    # A half of each average is due in the forward.
    "halves, several backward passes": (HALVES, Script(loop=Loop(micro=3, clear="after step"))),
    "halves, branches": (HALVES, Script(Case("branches", "nesterov"), Loop(idle=IDLE))),
    "halves, other rates": (HALVES, Script(after=support.set_rates)),
    # The order of the first forward is not that of later ones; every read is of new weights.
    "halves, read earlier": (HALVES, Script(Case("keeping", "nesterov"))),
    "rows, read earlier": (ROWS, Script(Case("earlier", "nesterov"))),
    "rows, looking": (ROWS, Script(after=look_on_rank_0)),
}
ITERATED = {
    strategy: [n for n, (s, _) in SCRIPTS.items() if s == strategy]
    for strategy in (SLICES, HALVES, ROWS)
}


@cache
def trained(strategy: Strategy) -> list[Outcome]:
    """Each rank's result: per script what there is in the end, and what was seen meanwhile."""
    scripts = [SCRIPTS[name][1] for name in ITERATED[strategy]]
    return watch_ranks(2, support.follow_all, scripts, strategy, ITERATIONS)


@pytest.mark.parametrize("name", SCRIPTS)
def test_equals_plain_training(name: str) -> None:
    """In the end, and wherever the script looks."""
    strategy, script = SCRIPTS[name]
    expected = support.followed(script, ITERATIONS)
    for outcome, (replica, seen) in zip(trained(strategy), expected, strict=True):
        assert not outcome.error, outcome.traceback
        mine, saw = outcome.result[ITERATED[strategy].index(name)]
        assert_close(saw, seen, f"rank {replica.rank}: seen")
        assert_same(mine, replica, f"rank {replica.rank}")


@pytest.mark.parametrize("i", range(2), ids=["slices", "halves"])
def test_tied_weights_after_observation(i: int) -> None:
    script = Script(Case("tied", "nesterov"))
    calls = tuple((script, strategy, ITERATIONS) for strategy in (SLICES, HALVES))
    ranks = one_of(2, support.follow_observed, calls, i)
    for mine, (replica, _) in zip(ranks, support.followed(script, ITERATIONS), strict=True):
        assert_same(mine, replica, f"rank {replica.rank}")


def test_compiled_blocks() -> None:
    case = Case("blocks", "nesterov")
    world = replicas(replace(case, model="backwards"), 2)
    bsp(world, range(ITERATIONS))
    for [(mine, _)], replica in zip(
        run_ranks(2, support.follow_all, [Script(case)], SLICES, ITERATIONS), world, strict=True
    ):
        plain = {name.replace("_orig_mod.", ""): t for name, t in mine.model.items()}
        assert_close(plain, replica.model.state_dict(), f"rank {replica.rank}")


# ---- what takes turns in a world of one rank ----------------------------------------------------

PEEKING = Script(Case("peeking", "nesterov"))
WAYS = (
    *("a submodule", "a submodule's state", "a parameter", "a method", "the bare module"),
    "an attribute of the bare model",
)
ALONE: tuple[tuple[Any, ...], ...] = (
    (support.when_updated, SLICES),
    *((support.when_updated_in_forward, strategy) for strategy in (SLICES, HALVES)),
    *((support.look_through, SLICES, what) for what in WAYS),
    (support.follow_all, [PEEKING], SLICES, ITERATIONS),
    (support.evaluate_in_inference_mode, SLICES),
    (support.use_copies, SLICES),
    (support.hooks_left, SLICES),
)


@cache
def alone() -> list[Any]:
    [found] = run_ranks(1, in_turn, call, ALONE)
    return found


def found_by(*call: Any) -> Any:
    return alone()[ALONE.index(call)]


def test_updates_wait_for_the_next_forward() -> None:
    """Else none of the other tests here would mean anything."""
    assert found_by(support.when_updated, SLICES) == [False, True]


@each
def test_modules_outside_of_the_model_leave_updates_to_its_forward(strategy: Strategy) -> None:
    assert found_by(support.when_updated_in_forward, strategy) == [False, True]


def test_what_is_reached_through_the_model_is_updated() -> None:
    updated = {what: found_by(support.look_through, SLICES, what) for what in WAYS}
    assert updated == dict.fromkeys(WAYS, True)


def test_a_weight_that_is_read_before_its_module_is_called() -> None:
    [(mine, _)] = found_by(support.follow_all, [PEEKING], SLICES, ITERATIONS)
    [(replica, _)] = support.followed(PEEKING, ITERATIONS, ranks=1)
    assert_same(mine, replica, "peeking")


def test_evaluation_in_inference_mode_before_the_first_update() -> None:
    """Optimizer state that is made meanwhile must be fit for training."""
    weights = found_by(support.evaluate_in_inference_mode, SLICES)
    world = replicas(CASE, 1)
    bsp(world, range(4))
    assert_close(weights, list(world[0].model.parameters()), "weights")


def test_gradients_zeroed_behind_the_scenes() -> None:
    """In place, while they are still needed: they are applied all the same, or it is an error."""
    script = Script(loop=Loop(clear="inner in place"))
    [outcome] = watch_ranks(1, support.follow_all, [script], SLICES, ITERATIONS)
    if outcome.error:
        assert outcome.kind == "ValueError"
        assert "gradients were changed" in outcome.error
        return
    [(replica, _)] = support.followed(script, ITERATIONS, ranks=1)
    assert_same(outcome.result[0][0], replica, "weights")


# Updates in the forward, after the step, and of merged gradients; the last leaves at once.
IN_VAIN: tuple[tuple[Strategy, str], ...] = (
    (SLICES, "trains"),
    (WFBP(), "consolidates"),
    (Merging(period=2), "consolidates"),
    (SLICES, "leaves"),
)


@pytest.mark.parametrize("i", range(len(IN_VAIN)), ids=[f"{one}-{how}" for one, how in IN_VAIN])
def test_a_forward_in_vain(i: int) -> None:
    """As of an evaluation that forgets no_grad: no update twice, nobody waits for its messages."""
    (strategy, how), world = IN_VAIN[i], replicas(CASE, 2)
    if isinstance(strategy, Merging):
        for run in (range(3), range(3, 5)):
            merged(world, run, closes_every(2))
            if run.start == 0:
                apply_merged(world, "sum")
    else:
        bsp(world, range(3 if how == "leaves" else 5))
    ranks = one_of(2, support.forward_again, IN_VAIN, i)
    for weight, replica in zip(ranks, world, strict=True):
        assert_close(weight, replica.model.get_parameter("6.weight").detach(), how)


def test_a_copy_is_a_plain_module() -> None:
    """It can be pickled and acts on nothing; and the model itself has no hooks left at the end."""
    assert all(found_by(support.use_copies, SLICES))
    assert found_by(support.hooks_left, SLICES) == 0


# ---- what cannot be done ------------------------------------------------------------------------


def test_clipping_is_an_error() -> None:
    """Where the first iteration did not show that the script clips."""
    args = (CASE, HALVES, range(2), Loop(clip=0.05, since=1), {})
    [outcome] = watch_ranks(1, workers.train_with, *args)
    assert outcome.kind == "ValueError"
    assert "a gradient was read between backward and optimizer.step()" in outcome.error
    assert REMEDY in outcome.error


def test_gradient_scaler_is_an_error() -> None:
    args = (CASE, SLICES, range(2), Loop(scale=8.0, since=1), {})
    [outcome] = watch_ranks(1, workers.train_with, *args)
    assert outcome.kind == "ValueError"
    assert "GradScaler cannot unscale this strategy's gradients" in outcome.error
    assert "bf16 autocast without a scaler" in outcome.error


def test_a_gradient_taken_away_is_an_error() -> None:
    [outcome] = watch_ranks(1, oddities.drop_a_gradient, SLICES, 1)
    assert outcome.kind == "ValueError"
    assert "gradients were changed between backward and optimizer.step()" in outcome.error


@pytest.mark.parametrize(
    ("train", "words"),
    [
        (oddities.train_counting, "Counting changes its param groups in step()"),
        (oddities.train_wrapped, "Wrapper calls the step of another optimizer"),
    ],
)
def test_optimizers_that_cannot_step_bucket_by_bucket(train: Any, words: str) -> None:
    [outcome] = watch_ranks(1, train, SLICES)
    assert outcome.kind == "ValueError"
    assert words in outcome.error
    assert REMEDY in outcome.error


def test_killed_peer_while_a_forward_waits() -> None:
    """The survivors' next forward needs what the dead one has not sent, or their step does."""
    args = (SLICES, "is killed", 1, 30.0, False)
    outcomes = watch_ranks(3, failing.train_until, *args, doomed=(1,))
    for outcome in (outcomes[0], outcomes[2]):
        assert outcome.kind == "RuntimeError", outcome.error
        where = re.match(
            r"rank \d: grad of bucket \d on link 'net' in iteration [34] (failed|will not arrive)",
            outcome.error,
        )
        assert where, outcome.error
        assert "forward" in outcome.traceback
        assert outcome.seconds < 30


# ---- ranks that do not do the same --------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "strategy"),
    [("meets", SLICES), ("saves", HALVES), ("slow", WHOLE)],
    ids=str,
)
def test_rank_0_looks_alone(how: str, strategy: Strategy) -> None:
    """It saves a checkpoint while the others wait at a barrier, or at the end, when they leave;
    whoever leaves first takes with it no message that is still under way."""
    for outcome in watch_ranks(2, support.leave, how, strategy):
        assert (outcome.error, outcome.exitcode) == ("", 0), outcome.traceback
