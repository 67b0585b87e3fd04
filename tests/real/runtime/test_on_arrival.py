"""Updates right before the next forward: whoever looks sees updated weights, and the numbers are
plain training's."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from cases import failing, oddities, workers
from cases import schedules as support
from cases.batches import Batch, Call
from cases.comparing import assert_close, assert_same
from cases.merging import Merging, closes_every
from cases.models import Case, Loop
from cases.schedules import CASE, Script, evaluate_on_rank_0, look, look_on_rank_0
from harness.ranks import watch_ranks
from oracle.training import apply_merged, bsp, merged, replicas

from offbeat import P3, WFBP, ByteScheduler, DeAR, Strategy

SLICES = ByteScheduler(partition_elements=40, credit_elements=80)
HALVES = DeAR(fusion_bytes=1)
WHOLE = ByteScheduler(partition_elements=1000)
ITERATIONS = 8
REMEDY = "use a strategy that steps at once, such as WFBP()"

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
ONE, TWO = Batch(1), Batch(2)
FOLLOWED = {
    name: TWO.add(support.follow, script, strategy, ITERATIONS)
    for name, (strategy, script) in SCRIPTS.items()
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_equals_plain_training(name: str) -> None:
    """In the end, and wherever the script looks."""
    expected = support.followed(SCRIPTS[name][1], ITERATIONS)
    for (mine, saw), (replica, seen) in zip(FOLLOWED[name].results, expected, strict=True):
        assert_close(saw, seen, f"rank {replica.rank}: seen")
        assert_same(mine, replica, f"rank {replica.rank}")


TIED = Script(Case("tied", "nesterov"))


@TWO.each(support.follow_observed, *((TIED, strategy, ITERATIONS) for strategy in (SLICES, HALVES)))
def test_tied_weights_after_observation(calls: list[Call]) -> None:
    for call in calls:
        expected = support.followed(TIED, ITERATIONS)
        for mine, (replica, _) in zip(call.results, expected, strict=True):
            assert_same(mine, replica, f"rank {replica.rank}")


BLOCKS = Case("blocks", "nesterov")


@TWO.given(support.follow, Script(BLOCKS), SLICES, ITERATIONS)
def test_compiled_blocks(call: Call) -> None:
    world = replicas(replace(BLOCKS, model="backwards"), 2)
    bsp(world, range(ITERATIONS))
    for (mine, _), replica in zip(call.results, world, strict=True):
        plain = {name.replace("_orig_mod.", ""): t for name, t in mine.model.items()}
        assert_close(plain, replica.model.state_dict(), f"rank {replica.rank}")


# ---- what takes turns in a world of one rank ----------------------------------------------------

PEEKING = Script(Case("peeking", "nesterov"))
WAYS = (
    *("a submodule", "a submodule's state", "a parameter", "a method", "the bare module"),
    "an attribute of the bare model",
)


@ONE.given(support.when_updated, SLICES)
def test_updates_wait_for_the_next_forward(call: Call) -> None:
    """Else none of the other tests here would mean anything."""
    assert call.results == [[False, True]]


@ONE.each(support.when_updated_in_forward, [SLICES], [HALVES])
def test_modules_outside_of_the_model_leave_updates_to_its_forward(calls: list[Call]) -> None:
    assert [call.results for call in calls] == [[[False, True]]] * 2


@ONE.each(support.look_through, *((SLICES, what) for what in WAYS))
def test_what_is_reached_through_the_model_is_updated(calls: list[Call]) -> None:
    assert [call.results for call in calls] == [[True]] * len(WAYS)


@ONE.given(support.follow, PEEKING, SLICES, ITERATIONS)
def test_a_weight_that_is_read_before_its_module_is_called(call: Call) -> None:
    [(mine, _)] = call.results
    [(replica, _)] = support.followed(PEEKING, ITERATIONS, ranks=1)
    assert_same(mine, replica, "peeking")


@ONE.given(support.evaluate_in_inference_mode, SLICES)
def test_evaluation_in_inference_mode_before_the_first_update(call: Call) -> None:
    """Optimizer state that is made meanwhile must be fit for training."""
    [weights] = call.results
    world = replicas(CASE, 1)
    bsp(world, range(4))
    assert_close(weights, list(world[0].model.parameters()), "weights")


ZEROED = Script(loop=Loop(clear="inner in place"))


@ONE.given(support.follow, ZEROED, SLICES, ITERATIONS)
def test_gradients_zeroed_behind_the_scenes(call: Call) -> None:
    """In place, while they are still needed: they are applied all the same, or it is an error."""
    [outcome] = call.outcomes
    if outcome.error:
        assert outcome.kind == "ValueError"
        assert "gradients were changed" in outcome.error
        return
    [(replica, _)] = support.followed(ZEROED, ITERATIONS, ranks=1)
    assert_same(outcome.result[0], replica, "weights")


# Updates in the forward, after the step, and of merged gradients; the last leaves at once.
IN_VAIN: tuple[tuple[Strategy, str], ...] = (
    (SLICES, "trains"),
    (WFBP(), "consolidates"),
    (Merging(period=2), "consolidates"),
    (SLICES, "leaves"),
)


@TWO.each(support.forward_again, *IN_VAIN)
def test_a_forward_in_vain(calls: list[Call]) -> None:
    """As of an evaluation that forgets no_grad: no update twice, nobody waits for its messages."""
    for (strategy, how), call in zip(IN_VAIN, calls, strict=True):
        world = replicas(CASE, 2)
        if isinstance(strategy, Merging):
            for run in (range(3), range(3, 5)):
                merged(world, run, closes_every(2))
                if run.start == 0:
                    apply_merged(world, "sum")
        else:
            bsp(world, range(3 if how == "leaves" else 5))
        for weight, replica in zip(call.results, world, strict=True):
            assert_close(weight, replica.model.get_parameter("6.weight").detach(), how)


COPIED, LEFT = ONE.add(support.use_copies, SLICES), ONE.add(support.hooks_left, SLICES)


def test_a_copy_is_a_plain_module() -> None:
    """It can be pickled and acts on nothing; and the model itself has no hooks left at the end."""
    assert all(COPIED.results[0])
    assert LEFT.results == [0]


# ---- what cannot be done ------------------------------------------------------------------------


@ONE.given(workers.train_with, CASE, HALVES, range(2), Loop(clip=0.05, since=1), {})
def test_clipping_is_an_error(call: Call) -> None:
    """Where the first iteration did not show that the script clips."""
    [outcome] = call.outcomes
    assert outcome.kind == "ValueError"
    assert "a gradient was read between backward and optimizer.step()" in outcome.error
    assert REMEDY in outcome.error


@ONE.given(workers.train_with, CASE, SLICES, range(2), Loop(scale=8.0, since=1), {})
def test_gradient_scaler_is_an_error(call: Call) -> None:
    [outcome] = call.outcomes
    assert outcome.kind == "ValueError"
    assert "GradScaler cannot unscale this strategy's gradients" in outcome.error
    assert "bf16 autocast without a scaler" in outcome.error


@ONE.given(oddities.drop_a_gradient, SLICES, 1)
def test_a_gradient_taken_away_is_an_error(call: Call) -> None:
    [outcome] = call.outcomes
    assert outcome.kind == "ValueError"
    assert "gradients were changed between backward and optimizer.step()" in outcome.error


UNFIT = [
    (ONE.add(train, SLICES), words)
    for train, words in (
        (oddities.train_counting, "Counting changes its param groups in step()"),
        (oddities.train_wrapped, "Wrapper calls the step of another optimizer"),
    )
]


def test_optimizers_that_cannot_step_bucket_by_bucket() -> None:
    for call, words in UNFIT:
        [outcome] = call.outcomes
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
