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
from harness.ranks import Outcome, run_world, watch_world
from oracle.training import Replica, apply_merged, bsp, merged, replicas

from offbeat import P3, WFBP, ByteScheduler, DeAR, Strategy

SLICES = ByteScheduler(partition_elements=40, credit_elements=80)
HALVES = DeAR(fusion_bytes=1)
WHOLE = ByteScheduler(partition_elements=1000)
ITERATIONS = 8
REMEDY = "use a strategy that steps at once, such as WFBP()"

each = pytest.mark.parametrize("strategy", [SLICES, HALVES], ids=str)

LOOPS = [
    *(Loop(clear=how) for how in ("model", "none", "in place", "never", "after forward")),
    *(Loop(clear=how) for how in ("after step", "inner")),
    Loop(micro=3),
    Loop(micro=3, clear="none"),
    Loop(closure=True),
    Loop(evaluate=True),
    Loop(idle=frozenset({(0, 2), (1, 5)})),
]
MODELS = ["attending", "reading", "twice", "late", "branches", "checkpointed", "conv"]
SCRIPTS = [
    *(Script(loop=loop) for loop in LOOPS),
    *(Script(Case(model, "nesterov")) for model in MODELS),
    *(Script(Case(model, "adam"), bare=True) for model in ("attending", "reading")),
    *(Script(after=after) for after in (look, look_on_rank_0, evaluate_on_rank_0)),
    *(Script(after=after) for after in (support.set_rates, support.reload)),
    Script(Case("mlp", "nesterov", "step")),
    Script(Case("mlp", "adamw", "cosine"), after=look),
]


PLACES = {SLICES: range(len(SCRIPTS)), HALVES: range(0, len(SCRIPTS), 3)}
RUNS = [(strategy, i) for strategy, places in PLACES.items() for i in places]


@cache
def trained(strategy: Strategy) -> list[Outcome]:
    """Each rank's result: per script what there is in the end, and what was seen meanwhile."""
    scripts = [SCRIPTS[i] for i in PLACES[strategy]]
    return watch_world(support.follow_all, 2, scripts, strategy, ITERATIONS)


@cache
def expected(i: int) -> list[tuple[Replica, list[Any]]]:
    return support.followed(SCRIPTS[i], ITERATIONS)


@pytest.mark.parametrize(
    ("strategy", "i"), RUNS, ids=[f"{strategy}-{SCRIPTS[i]}" for strategy, i in RUNS]
)
def test_equals_plain_training(strategy: Strategy, i: int) -> None:
    """In the end, and wherever the script looks."""
    for outcome, (replica, seen) in zip(trained(strategy), expected(i), strict=True):
        assert not outcome.error, outcome.traceback
        mine, saw = outcome.result[PLACES[strategy].index(i)]
        assert_close(saw, seen, f"rank {replica.rank}: seen")
        assert_same(mine, replica, f"rank {replica.rank}")


def test_p3_is_seen_updated_too() -> None:
    script = Script(after=look_on_rank_0)
    ranks = run_world(support.follow_all, 2, [script], P3(slice_elements=7), ITERATIONS)
    for [(mine, saw)], (replica, seen) in zip(
        ranks, support.followed(script, ITERATIONS), strict=True
    ):
        assert_close(saw, seen, f"rank {replica.rank}: seen")
        assert_same(mine, replica, f"rank {replica.rank}")


READERS = [Script(Case(model, "nesterov")) for model in ("earlier", "keeping")]


@pytest.mark.parametrize("strategy", [P3(slice_elements=7), HALVES], ids=str)
def test_weights_that_a_later_forward_reads_earlier(strategy: Strategy) -> None:
    """The order of the first forward is not that of later ones; every read is of new weights."""
    ranks = run_world(support.follow_all, 2, READERS, strategy, ITERATIONS)
    for i, script in enumerate(READERS):
        for mine, (replica, _) in zip(ranks, support.followed(script, ITERATIONS), strict=True):
            assert_same(mine[i][0], replica, f"{script}, rank {replica.rank}")


@each
def test_tied_weights_after_observation(strategy: Strategy) -> None:
    script = Script(Case("tied", "nesterov"))
    ranks = run_world(support.follow_observed, 2, script, strategy, ITERATIONS)
    for mine, (replica, _) in zip(ranks, support.followed(script, ITERATIONS), strict=True):
        assert_same(mine, replica, f"rank {replica.rank}")


def test_compiled_blocks() -> None:
    case = Case("blocks", "nesterov")
    world = replicas(replace(case, model="backwards"), 2)
    bsp(world, range(ITERATIONS))
    for [(mine, _)], replica in zip(
        run_world(support.follow_all, 2, [Script(case)], SLICES, ITERATIONS), world, strict=True
    ):
        plain = {name.replace("_orig_mod.", ""): t for name, t in mine.model.items()}
        assert_close(plain, replica.model.state_dict(), f"rank {replica.rank}")


def test_updates_wait_for_the_next_forward() -> None:
    """Else none of the other tests here would mean anything."""
    [[at_once, flushed]] = run_world(support.when_updated, 1, SLICES)
    assert (at_once, flushed) == (False, True)


@each
def test_modules_outside_of_the_model_leave_updates_to_its_forward(strategy: Strategy) -> None:
    [[at_first, in_the_end]] = run_world(support.when_updated_in_forward, 1, strategy)
    assert (at_first, in_the_end) == (False, True)


def test_what_is_reached_through_the_model_is_updated() -> None:
    ways = (
        *("a submodule", "a submodule's state", "a parameter", "a method", "the bare module"),
        "an attribute of the bare model",
    )
    calls = [(SLICES, what) for what in ways]
    [updated] = run_world(workers.in_turn, 1, support.look_through, calls)
    assert dict(zip(ways, updated, strict=True)) == dict.fromkeys(ways, True)


def test_a_weight_that_is_read_before_its_module_is_called() -> None:
    script = Script(Case("peeking", "nesterov"))
    [[(mine, _)]] = run_world(support.follow_all, 1, [script], SLICES, ITERATIONS)
    [(replica, _)] = support.followed(script, ITERATIONS, ranks=1)
    assert_same(mine, replica, "peeking")


def test_evaluation_in_inference_mode_before_the_first_update() -> None:
    """Optimizer state that is made meanwhile must be fit for training."""
    [weights] = run_world(support.evaluate_in_inference_mode, 1, SLICES)
    world = replicas(CASE, 1)
    bsp(world, range(4))
    assert_close(weights, list(world[0].model.parameters()), "weights")


def test_gradients_zeroed_behind_the_scenes() -> None:
    """In place, while they are still needed: they are applied all the same, or it is an error."""
    script = Script(loop=Loop(clear="inner in place"))
    [outcome] = watch_world(support.follow_all, 1, [script], SLICES, ITERATIONS)
    if outcome.error:
        assert outcome.kind == "ValueError"
        assert "gradients were changed" in outcome.error
        return
    [(replica, _)] = support.followed(script, ITERATIONS, ranks=1)
    assert_same(outcome.result[0][0], replica, "weights")


@pytest.mark.parametrize(
    ("strategy", "how"),
    [
        *((strategy, how) for strategy in (SLICES, WFBP()) for how in ("leaves", "trains")),
        *((strategy, "consolidates") for strategy in (SLICES, WFBP(), Merging(period=2))),
    ],
    ids=str,
)
def test_a_forward_in_vain(strategy: Strategy, how: str) -> None:
    """As of an evaluation that forgets no_grad: no update twice, nobody waits for its messages."""
    world = replicas(CASE, 2)
    if isinstance(strategy, Merging):
        for run in (range(3), range(3, 5)):
            merged(world, run, closes_every(2))
            if run.start == 0:
                apply_merged(world, "sum")
    else:
        bsp(world, range(3 if how == "leaves" else 5))
    for weight, replica in zip(
        run_world(support.forward_again, 2, strategy, how), world, strict=True
    ):
        assert_close(weight, replica.model.get_parameter("6.weight").detach(), how)


def test_a_copy_is_a_plain_module() -> None:
    """It can be pickled and acts on nothing; and the model itself has no hooks left at the end."""
    assert all(run_world(support.use_copies, 1, SLICES)[0])
    assert run_world(support.hooks_left, 1, SLICES) == [0]


# ---- what cannot be done ------------------------------------------------------------------------


@each
def test_clipping_is_an_error(strategy: Strategy) -> None:
    """Where the first iteration did not show that the script clips."""
    args = (CASE, strategy, range(2), Loop(clip=0.05, since=1), {})
    [outcome] = watch_world(workers.train_with, 1, *args)
    assert outcome.kind == "ValueError"
    assert "a gradient was read between backward and optimizer.step()" in outcome.error
    assert REMEDY in outcome.error


def test_gradient_scaler_is_an_error() -> None:
    args = (CASE, SLICES, range(2), Loop(scale=8.0, since=1), {})
    [outcome] = watch_world(workers.train_with, 1, *args)
    assert outcome.kind == "ValueError"
    assert "GradScaler cannot unscale this strategy's gradients" in outcome.error
    assert "bf16 autocast without a scaler" in outcome.error


def test_a_gradient_taken_away_is_an_error() -> None:
    [outcome] = watch_world(oddities.drop_a_gradient, 1, SLICES, 1)
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
    [outcome] = watch_world(train, 1, SLICES)
    assert outcome.kind == "ValueError"
    assert words in outcome.error
    assert REMEDY in outcome.error


def test_killed_peer_while_a_forward_waits() -> None:
    """The survivors' next forward needs what the dead one has not sent, or their step does."""
    args = (SLICES, "is killed", 1, 30.0, False)
    outcomes = watch_world(failing.train_until, 3, *args, doomed=(1,))
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
    [("meets", SLICES), ("meets", HALVES), ("saves", SLICES), ("saves", HALVES), ("slow", WHOLE)],
    ids=str,
)
def test_rank_0_looks_alone(how: str, strategy: Strategy) -> None:
    """It saves a checkpoint while the others wait at a barrier, or at the end, when they leave;
    whoever leaves first takes with it no message that is still under way."""
    for outcome in watch_world(support.leave, 2, how, strategy):
        assert (outcome.error, outcome.exitcode) == ("", 0), outcome.traceback
