"""What users' loops do: every one of them trains as its reference does, or says why not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from cases import oddities, workers
from cases.comparing import assert_close, assert_same, sets_of
from cases.merging import Merging
from cases.models import Case, Loop, build_model, profile_of
from cases.workers import Trained
from harness.parts import average_of
from harness.ranks import one_of, run_world, watch_world
from oracle.training import (
    Replica,
    bsp,
    local_sgd,
    on_time,
    partial_sync,
    passes,
    replicas,
)

from offbeat import (
    BSP,
    DDP,
    WFBP,
    ByteScheduler,
    DiLoCo,
    DreamDDP,
    LocalSGD,
    PartialSync,
    SelSync,
    Strategy,
)

CASE = Case("mlp", "nesterov", "step")
ITERATIONS = 8
EAGER = WFBP(fusion="none")
AFTER = PartialSync(period=2)
BEFORE = PartialSync(period=2, average="before_update")
LOCAL = LocalSGD(period=3)
EVERYONE = frozenset({(0, 2), (1, 2), (1, 5), (0, 5)})

names = {"ids": str}
SIBLINGS: list[Strategy] = []  # of the test that runs


@pytest.fixture(scope="module")
def strategies_of(request: pytest.FixtureRequest) -> dict[Any, list[Strategy]]:
    """By test the strategies that it is called with, in all its selected calls."""
    found = dict[Any, list[Strategy]]()
    for item in request.session.items:
        if item.path == request.path and (given := getattr(item, "callspec", None)) is not None:
            strategy, own = given.params.get("strategy"), found.setdefault(item.function, [])
            if isinstance(strategy, Strategy) and strategy not in own:
                own.append(strategy)
    return found


@pytest.fixture(autouse=True)
def siblings(request: pytest.FixtureRequest, strategies_of: dict[Any, list[Strategy]]) -> None:
    SIBLINGS[:] = strategies_of.get(request.function, [])


def equations(
    world: list[Replica], iterations: Sequence[int], strategy: Any, trained: Trained | None = None
) -> None:
    """The reference of a strategy, on the measured plan if there is one."""
    if isinstance(strategy, LocalSGD):
        local_sgd(world, iterations, period=strategy.period, state=strategy.state)
    elif isinstance(strategy, (PartialSync, DreamDDP)):
        profile = trained.profile if trained else profile_of(world[0].case, len(world))
        sets = sets_of(strategy.plan(profile), profile)
        partial_sync(
            world, iterations, sets=sets, average=average_of(strategy.average), state=strategy.state
        )
    elif isinstance(strategy, DDP):
        bsp(world, iterations, broadcast_buffers=True)
    else:
        on_time(world, iterations)


def check(
    strategy: Strategy, loop: Loop, case: Case = CASE, reference: Loop | None = None, **options: Any
) -> list[Trained]:
    """Train two ranks so and compare them with the reference; returns what they have. All
    strategies of a test share a world."""
    together = SIBLINGS if strategy in SIBLINGS else [strategy]
    more = tuple(options.items())
    calls = tuple((case, one, range(ITERATIONS), loop, more) for one in together)
    ranks = one_of(workers.train_with, 2, calls, together.index(strategy))
    world = replicas(case, 2, reference or loop)
    observed = options.get("observe", 0)
    (on_time if strategy.synchronous else bsp)(world, range(observed))
    later = passes(range(observed, ITERATIONS), loop)
    equations(world, later, strategy, ranks[0] if observed else None)
    # one digit that is rounded differently in float32 is several in bfloat16
    tolerance = 5e-3 if loop.autocast else 1e-12 if case.dtype == torch.float64 else 1e-5
    for mine, replica in zip(ranks, world, strict=True):
        assert_same(mine, replica, f"rank {replica.rank}", tolerance)
        assert mine.place == (replica.rank, 0)
    return ranks


# ---- gradients ------------------------------------------------------------------------------


@pytest.mark.parametrize("clear", ["model", "none", "in place"])
@pytest.mark.parametrize("strategy", [EAGER, AFTER, BEFORE], **names)
def test_gradients_may_be_cleared_in_any_way(strategy: Strategy, clear: str) -> None:
    check(strategy, Loop(clear=clear))


@pytest.mark.parametrize("strategy", [EAGER, DDP(), AFTER, BEFORE, LOCAL], **names)
def test_gradients_that_are_never_cleared_add_up(strategy: Strategy) -> None:
    check(strategy, Loop(clear="never"))


@pytest.mark.parametrize("strategy", [BSP(), EAGER, BEFORE, AFTER, LOCAL], **names)
def test_a_rank_may_have_nothing_to_do(strategy: Strategy) -> None:
    """It steps without a backward: zero in an average of gradients, no update of its own."""
    check(strategy, Loop(idle=frozenset({(0, 2), (1, 5)})))


@pytest.mark.parametrize("clear", ["optimizer", "model"])
@pytest.mark.parametrize("strategy", [BSP(), EAGER, DDP(), AFTER, BEFORE, LOCAL], **names)
def test_accumulation_equals_a_big_batch(strategy: Strategy, clear: str) -> None:
    check(strategy, Loop(micro=3, clear=clear), reference=Loop())


@pytest.mark.parametrize("strategy", [BSP(), EAGER, DDP(), ByteScheduler()], **names)
def test_backward_twice_is_an_iteration_without_an_update(strategy: Strategy) -> None:
    """As with torch's own DDP, whose second backward adds to averages and averages again."""
    check(strategy, Loop(twice=frozenset({2, 5})))


@pytest.mark.parametrize("strategy", [BSP(), EAGER, DDP(), BEFORE, LOCAL, ByteScheduler()], **names)
def test_a_step_may_be_left_out(strategy: Strategy) -> None:
    """`if bad: optimizer.zero_grad(); continue`, on all ranks."""
    check(strategy, Loop(dropped=frozenset({2, 5})))


@pytest.mark.parametrize(
    ("strategy", "again"),
    [
        *((AFTER, how) for how in ("forward", "zero_grad")),  # has updated in backward
        *((Merging(period=2), how) for how in ("forward", "zero_grad")),  # has added up
        (BEFORE, "backward"),  # has averaged weights in backward
        (SelSync(), "forward"),  # has voted
    ],
    ids=str,
)
def test_what_was_sent_or_applied_cannot_be_taken_back(strategy: Strategy, again: str) -> None:
    works = strategy == AFTER and again == "zero_grad"  # BEFORE raises if a backward adds
    remedy = "average='before_update'" if works else "such as WFBP()"
    for outcome in watch_world(oddities.go_on_without_a_step, 2, strategy, again):
        assert outcome.kind == "RuntimeError", strategy
        assert "backward ran without optimizer.step() after it" in outcome.error
        assert "`with model.no_sync():`" in outcome.error
        assert outcome.error.endswith(remedy), outcome.error


@pytest.mark.parametrize("strategy", [BSP(), EAGER, DDP(), BEFORE, LOCAL], **names)
def test_clipping(strategy: Strategy) -> None:
    """Between backward and step there are averaged gradients, or a rank's own where the strategy
    averages parameters: clipping sees what it would see in plain PyTorch."""
    check(strategy, Loop(clip=0.05))


def test_clipping_what_was_already_applied_is_an_error() -> None:
    for case in (CASE, Case("branches")):
        loop = Loop(clip=0.05, since=1)
        [outcome] = watch_world(workers.train_with, 1, case, AFTER, range(2), loop, {})
        assert outcome.kind == "ValueError"
        assert "gradients were changed between backward and optimizer.step()" in outcome.error
        assert "use average='before_update'" in outcome.error


def test_dropping_a_gradient() -> None:
    """As plain PyTorch: no gradient, no update. An error where the update has happened, and the
    first iteration did not show that it would be so."""
    for strategy in (EAGER, AFTER):
        assert run_world(oddities.drop_a_gradient, 1, strategy, 0) == [True]
    [outcome] = watch_world(oddities.drop_a_gradient, 1, AFTER, 1)
    assert "use average='before_update'" in outcome.error


def test_create_graph_is_an_error() -> None:
    [outcome] = watch_world(oddities.backward_with_graph, 1)
    assert "torch.autograd.grad(..., create_graph=True)" in outcome.error


# ---- mixed precision ------------------------------------------------------------------------


@pytest.mark.parametrize("clip", [None, 0.05])
@pytest.mark.parametrize("strategy", [EAGER, DDP(), BEFORE, LOCAL], **names)
def test_gradient_scaler(strategy: Strategy, clip: float | None) -> None:
    """Scales are powers of two, so scaling changes no digit."""
    loop = Loop(scale=1024.0, clip=clip)
    check(strategy, loop, reference=replace(loop, scale=None))


@pytest.mark.parametrize("strategy", [BSP(), EAGER, DDP()], **names)
def test_overflow_on_one_rank_skips_everyones_update(strategy: Strategy) -> None:
    loop = Loop(scale=1024.0, overflow=frozenset({(0, 2), (1, 5)}))
    everyone = Loop(overflow=EVERYONE)
    check(strategy, loop, reference=replace(everyone, clip=None))


@pytest.mark.parametrize("strategy", [BEFORE, LOCAL], **names)
def test_overflow_skips_that_ranks_update(strategy: Strategy) -> None:
    """The rank stays in step with the others: it sends and receives as if nothing had happened."""
    check(strategy, Loop(scale=1024.0, overflow=frozenset({(0, 2), (1, 5)})))


def test_scaler_with_updates_in_backward_is_an_error() -> None:
    loop = Loop(scale=8.0, since=1)
    [outcome] = watch_world(workers.train_with, 1, CASE, AFTER, range(2), loop, {})
    assert outcome.kind == "ValueError"
    assert "GradScaler cannot unscale this strategy" in outcome.error
    assert "average='before_update', or bf16 autocast" in outcome.error


@pytest.mark.parametrize("strategy", [EAGER, AFTER, BEFORE], **names)
def test_bf16_autocast(strategy: Strategy) -> None:
    check(strategy, Loop(autocast=True), replace(CASE, dtype=torch.float32))


@pytest.mark.parametrize("strategy", [EAGER, AFTER, LocalSGD(period=2, state="averaged")], **names)
def test_parameters_of_several_dtypes(strategy: Strategy) -> None:
    """Buckets of two dtypes; a message of several buckets is one collective per dtype."""
    check(strategy, Loop(), Case("mixed", "nesterov", dtype=torch.float32))


# ---- models ---------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", [AFTER, BEFORE, LOCAL], **names)
def test_unused_parameters_are_skipped_as_in_plain_pytorch(strategy: Strategy) -> None:
    """A rank updates what it used; averages include everyone."""
    for optimizer in ("nesterov", "adam"):
        check(strategy, Loop(), Case("branches", optimizer))


@pytest.mark.parametrize("state", ["averaged", "reset"])
def test_state_of_parameters_that_some_ranks_never_used(state: Any) -> None:
    """Missing state counts as zero, and never as another parameter's."""
    for strategy in (LocalSGD(period=2, state=state), PartialSync(period=2, state=state)):
        check(strategy, Loop(), Case("branches", "adam"))


@pytest.mark.parametrize("strategy", [BSP(), EAGER], **names)
def test_a_gradient_that_one_rank_lacks_counts_as_zero(strategy: Strategy) -> None:
    """Where no rank has one there is none: weight decay and momentum leave the parameter alone."""
    for clear in ("optimizer", "none", "never"):
        check(strategy, Loop(clear=clear), Case("branches", "nesterov"))


def test_order_of_execution_is_observed() -> None:
    """Registered backwards: buckets are in the order in which gradients get ready."""
    for strategy in (EAGER, AFTER):
        ranks = check(strategy, Loop(), Case("backwards", "sgd"), observe=3, min_bucket_bytes=1)
        for rank in ranks:
            assert [bucket.name for bucket in rank.profile.buckets] == ["head", "middle", "first"]


def test_tied_weights() -> None:
    """One parameter, ready only when both uses have their gradient: in the last bucket."""
    for strategy in (EAGER, AFTER, BEFORE):
        ranks = check(strategy, Loop(), Case("tied", "nesterov"), observe=3, min_bucket_bytes=1)
        buckets = [bucket.tensors for bucket in ranks[0].profile.buckets]
        assert [sorted(names) for names in buckets] == [
            ["middle.bias", "middle.weight"],
            ["embedding.weight"],
        ]


@pytest.mark.parametrize("strategy", [EAGER, AFTER, BEFORE], **names)
def test_activation_checkpointing(strategy: Strategy) -> None:
    check(strategy, Loop(), Case("checkpointed", "nesterov"))


def test_reentrant_checkpointing_says_what_to_do() -> None:
    [outcome] = watch_world(oddities.reentrant_checkpointing, 1)
    assert "use activation checkpointing with use_reentrant=False" in outcome.error


def test_compiled_blocks() -> None:
    """Captured and differentiated by the compiler, but with no machine code made, for time. The
    compiler takes seconds to import, so both strategies run in one world."""
    case, strategies = Case("compiled", "nesterov"), [EAGER, LOCAL]
    ranks = run_world(workers.train_in_turn, 2, case, strategies, range(6), {"observe": 2})
    for i, strategy in enumerate(strategies):
        world = replicas(replace(case, model="backwards"), 2)
        bsp(world, range(2))
        equations(world, range(2, 6), strategy, ranks[0][i])
        for mine, replica in zip(ranks, world, strict=True):
            plain = {n.replace("_orig_mod.", ""): t for n, t in mine[i].model.items()}
            where = f"{strategy}, rank {replica.rank}"
            assert_close(plain, replica.model.state_dict(), where)


# ---- loops ----------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", [EAGER, DDP(), AFTER, BEFORE], **names)
def test_step_with_a_closure(strategy: Strategy) -> None:
    check(strategy, Loop(closure=True))


@pytest.mark.parametrize("strategy", [EAGER, AFTER, LocalSGD(period=2)], **names)
def test_evaluation_between_iterations(strategy: Strategy) -> None:
    """Different on every rank, during observation too."""
    check(strategy, Loop(evaluate=True), Case("conv", "nesterov"))
    check(strategy, Loop(evaluate=True), observe=3, min_bucket_bytes=1)


@pytest.mark.parametrize(
    "strategy",
    [BSP(), EAGER, LocalSGD(period=2), AFTER, BEFORE, DreamDDP(period=2), DreamDDP(3, split=True)],
    **names,
)
def test_observed_iterations_come_first(strategy: Strategy) -> None:
    """Three iterations of BSP, then the strategy, counted from 0, on the measured plan; batch
    norm's statistics travel with the parameters from then on."""
    case, observed = Case("conv", "adam"), {"observe": 3, "min_bucket_bytes": 1}
    ranks = check(strategy, Loop(), case, unites=True, **observed)
    plans = {rank.plan.digest for rank in ranks}
    assert len(plans) == 1
    assert {rank.united for rank in ranks} == {ranks[0].united}
    buffers = [b.buffer_bytes for b in ranks[0].profile.buckets]
    assert sum(buffers) == 8 * 2 * (4 + 3)


def test_optimizer_that_changes_its_groups() -> None:
    [outcome] = watch_world(oddities.train_counting, 1, AFTER)
    assert outcome.kind == "ValueError"
    assert "Counting changes its param groups in step()" in outcome.error
    assert run_world(oddities.train_counting, 1, BEFORE) == [4]
    assert run_world(oddities.train_counting, 1, EAGER) == [4]


def test_optimizer_that_wraps_another() -> None:
    [outcome] = watch_world(oddities.train_wrapped, 1, AFTER)
    assert "Wrapper calls the step of another optimizer" in outcome.error
    assert run_world(oddities.train_wrapped, 1, LocalSGD(period=2, state="averaged")) == [4]


def test_parameters_outside_the_optimizer_are_averaged_only() -> None:
    for strategy in (EAGER, AFTER, LocalSGD(period=2, state="averaged")):
        ranks = run_world(oddities.train_half, 2, strategy)
        assert ranks[0] == ranks[1] == [True, False]


def test_two_links() -> None:
    """A message of one link does not wait for the other's; each keeps the plan's order."""
    ranks = run_world(oddities.train_on_two_links, 2)
    world = replicas(CASE, 2)
    bsp(world, range(ITERATIONS))
    for mine, replica in zip(ranks, world, strict=True):
        assert_same(mine, replica, f"rank {replica.rank}")
        for link in ("a", "b"):
            moved = [(t, p) for t, name, p, _ in mine.sent if name == link]
            first = 0 if link == "a" else 1
            runs = [f"all_reduce grad[{b}:{b + 1}]" for b in (first, first + 2)]
            assert moved == [(t, run) for t in range(ITERATIONS) for run in runs]
        assert sum(size for *_, size in mine.sent) == ITERATIONS * sum(
            p.nbytes + 8 for p in build_model(CASE).parameters() if p.requires_grad
        )  # and a number for each parameter


def test_shapes_that_are_easy_to_get_wrong() -> None:
    """Scalars, empty parameters, channels_last, sliced and transposed tensors."""
    wired = LocalSGD(period=2, wire="int8"), DiLoCo(period=3, fragments=2, delay=1)
    for strategy in (EAGER, AFTER, LocalSGD(period=2, state="averaged"), *wired):
        ranks = run_world(oddities.train_odd_shapes, 2, strategy)
        assert ranks[0]["bits"] == ranks[1]["bits"]
        for rank in ranks:
            assert rank["strides"] == [(16, 1, 8, 4), (1, 3)]
            assert rank["between"] == [[1.0, 3.0]] * 3  # what lies in the gaps of a sliced buffer
