"""What users' loops do: every one of them trains as its reference does, or says why not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from cases import oddities, workers
from cases.batches import Batch, Call
from cases.comparing import assert_close, assert_same, sets_of
from cases.merging import Merging
from cases.models import USUAL, Case, Loop, build_model, profile_of
from cases.workers import Trained
from harness.ranks import run_ranks
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
FLOAT = replace(CASE, dtype=torch.float32)
MIXED = Case("mixed", "nesterov", dtype=torch.float32)
CONV = Case("conv", "nesterov")
BRANCHES, BRANCHES_ADAM = Case("branches", "nesterov"), Case("branches", "adam")
ITERATIONS = 8
EAGER = WFBP(fusion="none")
AFTER = PartialSync(period=2)
BEFORE = PartialSync(period=2, average="before_update")
LOCAL = LocalSGD(period=3)
AVERAGED = LocalSGD(period=2, state="averaged")
OVERFLOW = frozenset({(0, 2), (1, 5)})
EVERYONE = frozenset({(0, 2), (1, 2), (1, 5), (0, 5)})
OBSERVED = {"observe": 3, "min_bucket_bytes": 1}

ONE, TWO = Batch(1), Batch(2)


# ---- loops that train as their reference ----------------------------------------------------


@dataclass(frozen=True)
class Run:
    """A training of two ranks. Its reference is trained by the loop, or by another one."""

    strategy: Strategy
    loop: Loop = USUAL
    case: Case = CASE
    reference: Loop | None = None
    options: dict[str, Any] = field(default_factory=dict)


def runs(
    strategies: Sequence[Strategy],
    loop: Loop = USUAL,
    case: Case = CASE,
    reference: Loop | None = None,
    **options: Any,
) -> list[Run]:
    return [Run(strategy, loop, case, reference, options) for strategy in strategies]


RUNS: dict[str, list[Run]] = {
    "gradients are cleared in any way": [
        *runs([EAGER], Loop(clear="model")),
        *runs([EAGER, AFTER], Loop(clear="none")),
        *runs([EAGER, AFTER, BEFORE], Loop(clear="in place")),
    ],
    "gradients that are never cleared add up": runs(
        [EAGER, AFTER, BEFORE, LOCAL], Loop(clear="never")
    ),
    # It steps without a backward: zero in an average of gradients, no update of its own.
    "a rank has nothing to do": runs([EAGER, BEFORE, AFTER, LOCAL], Loop(idle=OVERFLOW)),
    "accumulation equals a big batch": [
        *runs([BSP(), EAGER, AFTER, BEFORE, LOCAL], Loop(micro=3), reference=Loop()),
        *runs([DDP()], Loop(micro=3, clear="model"), reference=Loop()),
    ],
    # As with torch's own DDP, whose second backward adds to averages and averages again.
    "backward twice is an iteration without an update": runs(
        [EAGER, DDP(), ByteScheduler()], Loop(twice=frozenset({2, 5}))
    ),
    # `if bad: optimizer.zero_grad(); continue`, on all ranks
    "a step is left out": runs(
        [EAGER, BEFORE, LOCAL, ByteScheduler()], Loop(dropped=frozenset({2, 5}))
    ),
    # Between backward and step there are averaged gradients, or a rank's own where the strategy
    # averages parameters: clipping sees what it would see in plain PyTorch.
    "clipping": runs([EAGER, BEFORE, LOCAL], Loop(clip=0.05)),
    # Scales are powers of two, so scaling changes no digit.
    "gradient scaler": [
        *runs([EAGER, BEFORE, LOCAL], Loop(scale=1024.0, clip=0.05), CASE, Loop(clip=0.05)),
        *runs([EAGER, BEFORE], Loop(scale=1024.0), reference=Loop()),
    ],
    "overflow on one rank skips everyone's update": runs(
        [EAGER], Loop(scale=1024.0, overflow=OVERFLOW), CASE, Loop(overflow=EVERYONE)
    ),
    # The rank stays in step with the others: it sends and receives as if nothing had happened.
    "overflow skips that rank's update": runs(
        [BEFORE, LOCAL], Loop(scale=1024.0, overflow=OVERFLOW)
    ),
    "bf16 autocast": runs([EAGER, AFTER], Loop(autocast=True), FLOAT),
    # Buckets of two dtypes; a message of several buckets is one collective per dtype.
    "parameters of several dtypes": runs([EAGER, AFTER, AVERAGED], case=MIXED),
    # A rank updates what it used; averages include everyone.
    "unused parameters are skipped as in plain PyTorch": runs(
        [AFTER, BEFORE, LOCAL], case=BRANCHES_ADAM
    ),
    # Missing state counts as zero, and never as another parameter's.
    "state of parameters that some ranks never used": [
        Run(strategy(period=2, state=state), case=BRANCHES_ADAM)
        for state in ("averaged", "reset")
        for strategy in (LocalSGD, PartialSync)
    ],
    # Where no rank has one there is none: weight decay and momentum leave the parameter alone.
    "a gradient that one rank lacks counts as zero": [
        *runs([EAGER], case=BRANCHES),
        *runs([EAGER], Loop(clear="none"), BRANCHES),
        *runs([EAGER], Loop(clear="never"), BRANCHES),
    ],
    "activation checkpointing": runs([AFTER], case=Case("checkpointed", "nesterov")),
    "step with a closure": runs([EAGER, AFTER, BEFORE], Loop(closure=True)),
    # Different on every rank, during observation too.
    "evaluation between iterations": [
        *runs([EAGER, AFTER, LocalSGD(period=2)], Loop(evaluate=True), CONV),
        *runs([AFTER], Loop(evaluate=True), **OBSERVED),
    ],
    # Registered backwards: buckets are in the order in which gradients get ready.
    "backwards": runs([AFTER], case=Case("backwards", "sgd"), **OBSERVED),
    # One parameter, ready only when both uses have their gradient: in the last bucket.
    "tied": runs([EAGER, AFTER], case=Case("tied", "nesterov"), **OBSERVED),
    # Three iterations of BSP, then the strategy, counted from 0, on the measured plan.
    "observed": runs(
        [EAGER, LocalSGD(period=2), BEFORE, DreamDDP(3, split=True)],
        case=Case("conv", "adam"),
        unites=True,
        **OBSERVED,
    ),
}


def add(run: Run) -> Call:
    args = (run.case, run.strategy, range(ITERATIONS), run.loop, run.options)
    return TWO.add(workers.train_with, *args)


CALLS = {name: [(run, add(run)) for run in group] for name, group in RUNS.items()}


def equations(
    world: list[Replica], iterations: Sequence[int], strategy: Any, trained: Trained | None = None
) -> None:
    """The reference of a strategy, on the measured plan if there is one."""
    if isinstance(strategy, LocalSGD):
        local_sgd(world, iterations, period=strategy.period, state=strategy.state)
    elif isinstance(strategy, (PartialSync, DreamDDP)):
        profile = trained.profile if trained else profile_of(world[0].case, len(world))
        sets = sets_of(strategy.plan(profile), profile)
        partial_sync(world, iterations, sets=sets, average=strategy.when, state=strategy.state)
    elif isinstance(strategy, DDP):
        bsp(world, iterations, broadcast_buffers=True)
    else:
        on_time(world, iterations)


@pytest.mark.parametrize("name", CALLS)
def test_trained_as_the_reference(name: str) -> None:
    for run, call in CALLS[name]:
        ranks, strategy, loop = call.results, run.strategy, run.loop
        world = replicas(run.case, 2, run.reference or loop)
        observed = run.options.get("observe", 0)
        (on_time if strategy.synchronous else bsp)(world, range(observed))
        later = passes(range(observed, ITERATIONS), loop)
        equations(world, later, strategy, ranks[0] if observed else None)
        # one digit that is rounded differently in float32 is several in bfloat16
        tolerance = 5e-3 if loop.autocast else 1e-12 if run.case.dtype == torch.float64 else 1e-5
        for mine, replica in zip(ranks, world, strict=True):
            assert_same(mine, replica, f"{run}, rank {replica.rank}", tolerance)
            assert mine.place == (replica.rank, 0)


# ---- models ---------------------------------------------------------------------------------


def test_buckets_are_in_the_order_in_which_gradients_get_ready() -> None:
    for _, call in CALLS["backwards"]:
        for rank in call.results:
            assert [bucket.name for bucket in rank.profile.buckets] == ["head", "middle", "first"]
    for _, call in CALLS["tied"]:
        buckets = [bucket.tensors for bucket in call.results[0].profile.buckets]
        assert [sorted(names) for names in buckets] == [
            ["middle.bias", "middle.weight"],
            ["embedding.weight"],
        ]


def test_plans_on_measured_profiles() -> None:
    """They are equal on all ranks; batch norm's statistics travel with the parameters."""
    for _, call in CALLS["observed"]:
        ranks = call.results
        plans = {rank.plan.digest for rank in ranks}
        assert len(plans) == 1
        assert {rank.united for rank in ranks} == {ranks[0].united}
        buffers = [b.buffer_bytes for b in ranks[0].profile.buckets]
        assert sum(buffers) == 8 * 2 * (4 + 3)


COMPILED = [EAGER, LOCAL]
COMPILED_CALL = TWO.add(
    workers.train_in_turn, Case("compiled", "nesterov"), COMPILED, range(6), {"observe": 2}
)


def test_compiled_blocks() -> None:
    """Captured and differentiated by the compiler, but with no machine code made, for time."""
    for i, strategy in enumerate(COMPILED):
        world = replicas(Case("backwards", "nesterov"), 2)
        bsp(world, range(2))
        equations(world, range(2, 6), strategy, COMPILED_CALL.results[0][i])
        for mine, replica in zip(COMPILED_CALL.results, world, strict=True):
            plain = {n.replace("_orig_mod.", ""): t for n, t in mine[i].model.items()}
            where = f"{strategy}, rank {replica.rank}"
            assert_close(plain, replica.model.state_dict(), where)


@TWO.each(oddities.train_half, [EAGER], [AFTER], [AVERAGED])
def test_parameters_outside_the_optimizer_are_averaged_only(calls: list[Call]) -> None:
    for call in calls:
        assert call.results == [[True, False]] * 2


def test_two_links() -> None:
    """A message of one link does not wait for the other's; each keeps the plan's order."""
    ranks = run_ranks(2, oddities.train_on_two_links)
    world = replicas(CASE, 2)
    bsp(world, range(ITERATIONS))
    for mine, replica in zip(ranks, world, strict=True):
        assert_same(mine, replica, f"rank {replica.rank}")
        for link in ("a", "b"):
            moved = [(t, p) for t, name, p, _ in mine.sent if name == link]
            first = 0 if link == "a" else 1
            payloads = [f"all_reduce grad[{b}:{b + 1}]" for b in (first, first + 2)]
            assert moved == [(t, payload) for t in range(ITERATIONS) for payload in payloads]
        assert sum(size for *_, size in mine.sent) == ITERATIONS * sum(
            p.nbytes + 8 for p in build_model(CASE).parameters() if p.requires_grad
        )  # and a number for each parameter


WIRED = LocalSGD(period=2, wire="int8"), DiLoCo(period=3, fragments=2, delay=1)


@TWO.each(oddities.train_odd_shapes, *((one,) for one in (EAGER, AFTER, AVERAGED, *WIRED)))
def test_shapes_that_are_easy_to_get_wrong(calls: list[Call]) -> None:
    """Scalars, empty parameters, channels_last, sliced and transposed tensors."""
    for call in calls:
        ranks = call.results
        assert ranks[0]["bits"] == ranks[1]["bits"]
        for rank in ranks:
            assert rank["strides"] == [(16, 1, 8, 4), (1, 3)]
            assert rank["between"] == [[1.0, 3.0]] * 3  # what lies in the gaps of a sliced buffer


# ---- what is refused ------------------------------------------------------------------------

TAKEN_BACK = [
    (strategy, again, TWO.add(oddities.go_on_without_a_step, strategy, again))
    for strategy, again in (
        *((AFTER, how) for how in ("forward", "zero_grad")),  # has updated in backward
        *((Merging(period=2), how) for how in ("forward", "zero_grad")),  # has added up
        (BEFORE, "backward"),  # has averaged weights in backward
        (SelSync(), "forward"),  # has voted
    )
]


def test_what_was_sent_or_applied_cannot_be_taken_back() -> None:
    for strategy, again, call in TAKEN_BACK:
        works = strategy == AFTER and again == "zero_grad"  # BEFORE raises if a backward adds
        remedy = "average='before_update'" if works else "such as WFBP()"
        for outcome in call.outcomes:
            assert outcome.kind == "RuntimeError", strategy
            assert "backward ran without optimizer.step() after it" in outcome.error
            assert "`with model.no_sync():`" in outcome.error
            assert outcome.error.endswith(remedy), outcome.error


def from_the_second_on(loop: Loop, case: Case = CASE) -> Call:
    return ONE.add(workers.train_with, case, AFTER, range(2), replace(loop, since=1), {})


CHANGED = "gradients were changed between backward and optimizer.step()"
INSTEAD = "use average='before_update'"
GRAPH = "torch.autograd.grad(..., create_graph=True)"
CHECKPOINTING = "use activation checkpointing with use_reentrant=False"
GROUPS = "Counting changes its param groups in step()"
WRAPPER = "Wrapper calls the step of another optimizer"
# Calls of one rank, the kind of the error, and what its text names.
REFUSED: list[tuple[Call, str, list[str]]] = [
    (from_the_second_on(Loop(clip=0.05)), "ValueError", [CHANGED, INSTEAD]),
    (from_the_second_on(Loop(clip=0.05), Case("branches")), "ValueError", [CHANGED, INSTEAD]),
    (
        from_the_second_on(Loop(scale=8.0)),
        "ValueError",
        ["GradScaler cannot unscale this strategy", "average='before_update', or bf16 autocast"],
    ),
    # The update has happened, and the first iteration did not show that it would be so.
    (ONE.add(oddities.drop_a_gradient, AFTER, 1), "ValueError", [INSTEAD]),
    (ONE.add(oddities.backward_with_graph), "ValueError", [GRAPH]),
    (ONE.add(oddities.reentrant_checkpointing), "RuntimeError", [CHECKPOINTING]),
    (ONE.add(oddities.train_counting, AFTER), "ValueError", [GROUPS]),
    (ONE.add(oddities.train_wrapped, AFTER), "ValueError", [WRAPPER]),
]
# Without an update in backward they work; as in plain PyTorch, no gradient is no update.
ALLOWED = [
    *((ONE.add(oddities.drop_a_gradient, one, 0), True) for one in (EAGER, AFTER)),
    *((ONE.add(oddities.train_counting, one), 4) for one in (BEFORE, EAGER)),
    (ONE.add(oddities.train_wrapped, AVERAGED), 4),
]


def test_refused_where_updates_come_in_backward() -> None:
    for call, kind, words in REFUSED:
        [outcome] = call.outcomes
        assert outcome.kind == kind, outcome.error
        assert [text for text in words if text not in outcome.error] == []
    for call, found in ALLOWED:
        assert call.results == [found]
