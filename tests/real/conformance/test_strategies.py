"""Every registered strategy trains as its equations say, and moves what its plan promises."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from cases.comparing import assert_close, assert_same, sets_of
from cases.conformance import (
    PREFIX,
    states_after_steps,
    train_aliased,
    train_without_plans,
)
from cases.models import USUAL, Case, profile_of
from cases.strategy_lists import ALL, STRATEGIES
from cases.untouched import SETTINGS as GLOBAL_SETTINGS
from cases.workers import (
    Trained,
    promise_of,
    train_all_with_torch,
    train_and_unite,
    train_beside_torch,
    train_in_two_halves,
    train_with,
)
from harness.parts import COMPUTE, RULES, Windows, draw_samples
from harness.ranks import one_of, run_ranks
from oracle.training import (
    Clipping,
    Outer,
    Piece,
    Replica,
    bsp,
    consolidate,
    delayed_sync,
    federated,
    goes,
    local_sgd,
    merged,
    on_time,
    partial_sync,
    replicas,
    selective,
)
from oracle.worlds import by_own_equations
from torch import Tensor

from offbeat import Plan, Profile
from offbeat.plan import BUFFERS, VOTES, Payload
from offbeat.sim import simulate
from offbeat.strategies import Strategy, create
from offbeat.testing.equations import Changes

# One case per setting that changes what is sent or computed; a strategy that is only registered is
# tested with its defaults. Fusions and solvers choose among equal plans: strategies/.
SETTINGS: dict[str, list[dict[str, Any]]] = {
    "ddp": [{}, {"bucket_cap_mb": 0.0002}],
    "wfbp": [{}, {"fusion": "none"}],
    "local-sgd": [
        {"period": 3, "state": "averaged"},
        {"period": 2, "warmup": 3, "state": "reset"},
        {"period": 3, "warmup": 2, "outer": "0.7/0.5"},
    ],
    "partial-sync": [
        {"period": 3, "state": "averaged"},
        {"period": 7, "state": "reset"},
        {"period": 3, "average": "before_update", "outer": "0.7/0.9/plain"},
    ],
    "asc-wfbp": [{"groups": 3}],
    "p3": [{"slice_elements": 15}, {"update": "at_step"}],
    "bytescheduler": [{"partition_elements": 15, "credit_elements": 30}],
    "us-byte": [{"unit_elements": 5}],
    "dear": [{"fusion_bytes": 1}, {"update": "at_step"}],
    "deft": [
        {"scale": "mean", "solver": "greedy"},
        {"partition_elements": 20},
    ],
    "dreamddp": [
        {},
        {"period": 3, "split": True, "average": "before_update", "state": "averaged"},
        {"period": 3, "due": "forward", "split": True, "state": "averaged"},
        {"period": 2, "due": "forward", "average": "before_update", "state": "reset"},
        {"period": 2, "due": "delayed", "average": "before_update"},
        {"period": 3, "due": "delayed", "delay": 2, "gain": 0.5},
        {"period": 2, "clip": 0.3},
        {"period": 2, "due": "delayed", "clip": 0.3},
        {"period": 3, "outer": "0.7/0.5"},
        {"period": 2, "due": "forward", "outer": "0.7/0.5"},
        {"period": 4, "due": "delayed", "delay": 2, "outer": "0.7/0.5"},
    ],
    "diloco": [
        {"period": 4, "fragments": 1},
        {"period": 4, "fragments": 2, "average": "before_update"},
        {"period": 4, "fragments": 2, "delay": 1, "alpha": 0.5},
        {"period": 3, "delay": 2},
        {"period": 4, "fragments": 1, "due": "forward"},
        {"period": 3, "fragments": 1, "due": "forward", "delay": 1, "alpha": 0.5},
    ],
    "selsync": [
        {"delta": 0.1, "smooth": "change", "window": 3, "state": "averaged"},
        {"delta": 0.5, "window": 1, "aggregate": "gradients", "max_period": 3},
        {"delta": 0.3, "vote_lag": 1, "max_period": 4, "state": "reset"},
        {"delta": 0.4, "scope": "layer", "max_period": 3, "state": "averaged"},
    ],
    "eager": [{"period": 3, "outer": "0.7/0.5/plain"}],
    "sparseloco": [{"period": 3, "fraction": 0.2, "lr": 0.7}],
    "demo": [{"fraction": 0.2, "beta": 0.9}],
    "des-loc": [{"period": 2, "first": 2, "second": 3}],
    "noloco": [{"period": 2, "gamma": 0.4, "rounds": 3}],
    "fedavg": [
        {"fraction": 0.5, "local_steps": 2, "seed": 3},
        {"fraction": 0.5, "local_steps": 3, "state": "averaged"},
        {"samples": (1.0, 3.0), "local_steps": (1, 3), "state": "reset"},
    ],
}
ALONE = ("cyclic",)  # its ranks have different parameters: runtime/test_cyclic.py


def settings_of(name: str, number: int) -> Strategy:
    """The strategy in one of its settings."""
    return create(name, SETTINGS.get(name, [{}])[number])


STRATEGIES_UNDER_TEST: list[Strategy] = [
    settings_of(name, number)
    for name in STRATEGIES
    if name not in ALONE
    for number in range(len(SETTINGS.get(name, [{}])))
]
# Halves and means of three, weights of ranks, votes, and what methods do with all ranks' messages.
OF_THREE_RANKS = [
    settings_of("dear", 0),
    settings_of("dreamddp", 0),
    settings_of("selsync", 2),
    settings_of("fedavg", 0),
    *(settings_of(name, 0) for name in ("eager", "sparseloco", "demo", "noloco")),
]
ON_TIME = [name for name, cls in STRATEGIES.items() if cls.synchronous]
PLANNED = [s for s in STRATEGIES_UNDER_TEST if s.name != "ddp"]  # torch runs DDP, not our engine


@cache
def sends_whole_buffers(name: str) -> bool:
    """Whether all messages are collectives without codes, whose tensors can be compared."""
    plan = create(name).plan(profile_of(Case("mlp", "sgd"), 2))
    return all(t.wire is None and t.ranks is None for t in plan.transfers)


PLAIN = [s for s in PLANNED if sends_whole_buffers(s.name)]
CASES = (
    Case("mlp", "nesterov", "step"),
    Case("conv", "adamw", "cosine"),
)
OF_THREE = (Case("mlp", "groups", "step"), Case("conv", "groups", "step"))
ITERATIONS, HALF = 10, 5
OBSERVED = 6  # by default, where no profile is given
BATCH = 27  # strategies that train in one world, which costs as much as a training


def case_of(strategy: Strategy, world_size: int) -> Case:
    """The model with running statistics, and state to average if they do, for the first setting of
    a strategy. Own equations of methods are those of parameters; some average the former, too."""
    is_first = strategy == settings_of(strategy.name, 0) and strategy.name in REFERENCES
    has_statistics = is_first or getattr(strategy, "state", "local") != "local"
    return (CASES if world_size == 2 else OF_THREE)[has_statistics]


def worlds(strategies: list[Strategy]) -> pytest.MarkDecorator:
    """Every setting in a world of two, some of them in a world of three too."""
    pairs = [(s, 2) for s in strategies] + [(s, 3) for s in strategies if s in OF_THREE_RANKS]
    return pytest.mark.parametrize(("strategy", "world_size"), pairs, ids=str)


every_world = worlds(STRATEGIES_UNDER_TEST)
every_planned_world = worlds(PLANNED)
every_plain_world = worlds(PLAIN)


# ---- (a) the numbers ------------------------------------------------------------------------


def layer_sets(world: list[Replica], iterations: range, strategy: Any, profile: Profile) -> None:
    late = getattr(strategy, "due", "end") == "delayed" or strategy.name == "diloco"
    late = late and getattr(strategy, "delay", 1) > 0
    plan = strategy.plan(profile)
    sets = sets_of(plan, profile, "average" if late else "param")
    early = any(apply.rule == "clip_early" for apply in plan.applies)
    clip, tensors = getattr(strategy, "clip", None), [bucket.tensors for bucket in profile.buckets]
    how: dict[str, Any] = {
        "sets": sets,
        "average": strategy.when,
        "clip": clip and Clipping(clip, tensors, early),
        "outer": outer_of(strategy),
    }
    if strategy.name == "diloco" and strategy.fragments == 1:
        how["average"] = "after_update"  # all at the step
    if late:
        if plan.prologue:  # the sets of its cycle begin behind it
            cycle = sets[plan.prologue :]
            how["sets"] = [cycle[(h - plan.prologue) % plan.period] for h in range(plan.period)]
        gain = getattr(strategy, "gain", 1.0)
        delayed_sync(world, iterations, delay=strategy.delay, gain=gain, **how)
    else:
        partial_sync(world, iterations, state=getattr(strategy, "state", "local"), **how)


def outer_of(strategy: Any) -> Outer | None:
    outer, alpha = strategy.outer, getattr(strategy, "alpha", None)
    return outer and Outer(outer.lr, outer.momentum, outer.nesterov, alpha)


def local_steps(world: list[Replica], iterations: range, strategy: Any, _: Profile) -> None:
    local_sgd(
        world,
        iterations,
        period=strategy.period,
        warmup=strategy.warmup,
        state=strategy.state,
        outer=outer_of(strategy),
    )


def votes(
    world: list[Replica], iterations: range, strategy: Any, profile: Profile
) -> dict[str, list[bool]]:
    """What comes out of the votes. Which layers are averaged anyway is the planner's choice, and
    so in the plan."""
    pieces = [Piece(bucket.tensors) for bucket in profile.buckets]
    if strategy.scope == "model":
        pieces = [Piece(tuple(name for piece in pieces for name in piece.names))]
    changes = Changes(strategy.smooth, strategy.window, len(world) / 100)
    plan = strategy.plan(profile)
    told = selective(
        world,
        iterations,
        pieces=pieces,
        forced=plan.fact("forced", [[]]),
        change=changes.change,
        delta=strategy.delta,
        lag=1 if strategy.scope == "layer" else strategy.vote_lag,
        aggregate=strategy.aggregate,
        state=strategy.state,
    )
    return {
        vote.name: [*one] for vote, one in zip(plan.votes, zip(*told, strict=True), strict=True)
    }


def rounds(world: list[Replica], iterations: range, strategy: Any, _: Profile) -> None:
    counts = strategy.counts(len(world))
    federated(
        world,
        iterations,
        local_steps=strategy.steps(len(world)),
        weights=lambda done: draw_samples(counts, strategy.fraction, strategy.seed, done),
        state=strategy.state,
    )


def late(world: list[Replica], iterations: range, strategy: Any, profile: Profile) -> None:
    """Which iterations close a window is the planner's choice, and so in the plan."""
    plan = strategy.plan(profile)
    merged(world, iterations, lambda r: Windows(plan).closes_window(r), strategy.scale)


REFERENCES: dict[str, Callable[[list[Replica], range, Any, Profile], Any]] = {
    **dict.fromkeys(ON_TIME, lambda world, iterations, *_: on_time(world, iterations)),
    "ddp": lambda world, iterations, *_: bsp(world, iterations, broadcast_buffers=True),
    "local-sgd": local_steps,
    "partial-sync": layer_sets,
    "diloco": layer_sets,
    "dreamddp": layer_sets,
    "deft": late,
    "selsync": votes,
    "fedavg": rounds,
}


def equations(
    world: list[Replica], iterations: range, strategy: Strategy, profile: Profile | None = None
) -> Any:
    """The reference of a strategy, or else its own equations; a new strategy must bring some."""
    profile = profile or profile_of(world[0].case, len(world))
    return REFERENCES.get(strategy.name, by_own_equations)(world, iterations, strategy, profile)


@cache
def trained(strategy: Strategy, world_size: int) -> list[Trained]:
    """Per rank what it has after training, in a world with other strategies."""
    together = STRATEGIES_UNDER_TEST if world_size == 2 else OF_THREE_RANKS
    batch, i = batch_of(strategy, together)
    calls = tuple((s, case_of(s, world_size), ITERATIONS) for s in batch)
    return one_of(world_size, train_and_unite, calls, i)


def batch_of(strategy: Strategy, strategies: list[Strategy]) -> tuple[list[Strategy], int]:
    """The strategies that share a world with this one, and its place among them."""
    i = strategies.index(strategy)
    return strategies[i - i % BATCH :][:BATCH], i % BATCH


@cache
def decided(strategy: Strategy, world_size: int) -> dict[str, list[bool]]:
    """What comes out of the votes."""
    case = case_of(strategy, world_size)
    if not strategy.plan(profile_of(case, world_size)).votes:
        return {}
    return equations(replicas(case, world_size), range(ITERATIONS), strategy)


@every_world
def test_equals_the_equations(strategy: Strategy, world_size: int) -> None:
    world = replicas(case_of(strategy, world_size), world_size)
    equations(world, range(ITERATIONS), strategy)
    for replica, rank in zip(world, trained(strategy, world_size), strict=True):
        assert_same(rank, replica, f"rank {replica.rank}")


# Their plans differ in order and size of messages alone from those of WFBP and P3.
SAME_AFTER_OBSERVATION = ("asc-wfbp", "bsp", "bytescheduler", "us-byte")
# Each other strategy once, with messages in few iterations; and a global setting of torch for each.
WITHOUT_A_PROFILE: dict[str, dict[str, Any]] = {
    **{
        name: SETTINGS.get(name, [{}])[0]
        for name in STRATEGIES
        if name not in (*ALONE, *SAME_AFTER_OBSERVATION)
    },
    "diloco": {"period": 3, "fragments": 2, "delay": 1, "alpha": 0.5},
    "dreamddp": {"period": 3},
    "des-loc": {"period": 1, "first": 2, "second": 3},
    "selsync": {"delta": 0.3, "max_period": 4, "state": "averaged"},
}
OBSERVING = [create(name, settings) for name, settings in WITHOUT_A_PROFILE.items()]
AT_A_TIME = 16


@pytest.mark.parametrize("strategy", OBSERVING, ids=str)
def test_equals_the_equations_after_observed_iterations(strategy: Strategy) -> None:
    """Without a profile: six iterations of BSP, then the strategy on the measured plan. Global
    settings of torch change no number."""
    i = OBSERVING.index(strategy)
    first = i - i % AT_A_TIME
    calls = [
        (
            case_of(settings_of(one.name, 0), 2),
            one,
            range(OBSERVED + 6),
            USUAL,
            (("observe", OBSERVED), ("min_bucket_bytes", 1), ("setting", setting)),
        )
        for one, setting in zip(OBSERVING, 3 * GLOBAL_SETTINGS, strict=False)
    ]
    ranks = one_of(2, train_with, tuple(calls[first : first + AT_A_TIME]), i - first)
    world = replicas(calls[i][0], 2)
    (on_time if strategy.synchronous else bsp)(world, range(OBSERVED))
    equations(world, range(OBSERVED, OBSERVED + 6), strategy, ranks[0].profile)
    for replica, rank in zip(world, ranks, strict=True):
        assert_same(rank, replica, f"rank {replica.rank}")
        assert rank.plan == ranks[0].plan


def test_gossip_and_servers_leave_global_states() -> None:
    """As all others do: `train` compares."""
    others = [cls() for name, cls in ALL.items() if name not in STRATEGIES]
    run_ranks(3, train_without_plans, others, "bfloat16")


def test_trials_of_an_optimizer_leave_random_states() -> None:
    """Even if it draws in its step."""
    for found, expected in run_ranks(2, states_after_steps, 4):
        assert found == expected


# They have all rules that are not of a method.
ALIASED = [
    settings_of("deft", 0),
    settings_of("diloco", 2),
    settings_of("dreamddp", 6),
    settings_of("dreamddp", 7),
    settings_of("fedavg", 2),
    settings_of("selsync", 2),
    settings_of("selsync", 3),
    create("cyclic", {"rule": "v1"}),
]


def test_rules_may_have_other_names() -> None:
    """They give the same bits, and the same predictions."""
    calls = [(s, case_of(s, 2), s not in STRATEGIES_UNDER_TEST) for s in ALIASED]
    rules = set[str]()
    for number, rank in enumerate(run_ranks(2, train_aliased, calls, ITERATIONS)):
        for strategy, (other, own) in zip(ALIASED, rank, strict=True):
            own = own or trained(strategy, 2)[number]
            assert_close(other.model, own.model, str(strategy), tolerance=0.0)
            assert_close(other.optimizer, own.optimizer, str(strategy), tolerance=0.0)
            assert other.united == own.united
            names = {one.rule for one in (*own.plan.applies, *own.plan.votes)}
            assert {one.rule for one in (*other.plan.applies, *other.plan.votes)} == {
                PREFIX + name for name in names
            }
            rules |= names
    assert rules >= {name for name, rule in RULES.items() if ".core." in rule.__module__}


# ---- (b) the same as torch's own DDP --------------------------------------------------------

SYNCHRONOUS = [s for s in STRATEGIES_UNDER_TEST if s.name in ON_TIME]
SINGLE = Case("conv", "adam", "step", torch.float32)


@cache
def trained_by_torch(world_size: int) -> list[list[Trained]]:
    cases = CASES if world_size == 2 else OF_THREE
    return run_ranks(world_size, train_all_with_torch, cases, ITERATIONS)


@worlds(SYNCHRONOUS)
def test_equals_torch_ddp(strategy: Strategy, world_size: int) -> None:
    case = case_of(strategy, world_size)
    number = (CASES if world_size == 2 else OF_THREE).index(case)
    ranks = zip(trained_by_torch(world_size), trained(strategy, world_size), strict=True)
    for torchs, mine in ranks:
        assert_like_torch(mine, torchs[number], f"{strategy} {case}", 1e-12)


def test_equals_torch_ddp_in_single_precision() -> None:
    """Whole gradients, slices and halves."""
    strategies = [settings_of(name, 0) for name in ("ddp", "wfbp", "p3", "dear")]
    for theirs, ours in run_ranks(2, train_beside_torch, strategies, SINGLE, 6):
        for strategy, mine in zip(strategies, ours, strict=True):
            assert_like_torch(mine, theirs, str(strategy), 1e-6)


def assert_like_torch(mine: Trained, theirs: Trained, what: str, tolerance: float) -> None:
    assert_close(weights(mine), weights(theirs), f"{what}: model", tolerance)
    assert_close(mine.optimizer, theirs.optimizer, what, tolerance)


def weights(trained: Trained) -> dict[str, Tensor]:
    """Without running statistics: DDP overwrites them with rank 0's, we keep each rank's own."""
    return {n: t for n, t in trained.model.items() if "running" not in n}


# ---- (c) what is moved ----------------------------------------------------------------------


@every_plain_world
def test_moves_what_the_plan_promises(strategy: Strategy, world_size: int) -> None:
    """Every message of the plan reaches the collective in its iteration, once, and whole."""
    profile = profile_of(case_of(strategy, world_size), world_size)
    promised = promises(strategy.plan(profile), profile, decided(strategy, world_size))
    for rank in trained(strategy, world_size):
        moved = Counter(m for m in rank.sent if not m[1].endswith(VOTES))
        assert moved == promised, f"{moved - promised} extra, {promised - moved} short"


def promises(
    plan: Plan, profile: Profile, outcomes: dict[str, list[bool]]
) -> Counter[tuple[int, str, str, int]]:
    """(iteration, link, verb and payload, bytes sent) of every message; halves send half."""
    expected: Counter[tuple[int, str, str, int]] = Counter()
    for t in range(ITERATIONS):
        for message in plan.transfers:
            size = payload_bytes(profile, message.payload, kind_of(plan, message.payload))
            if size and plan.phase(t) in message.phases and goes(message, t, outcomes):
                sent = size if message.verb in ("all_reduce", "broadcast") else size // 2
                expected[t, message.link, promise_of(message), sent] += 1
    return expected


def kind_of(plan: Plan, payload: Payload) -> Any:
    """The kind of a payload's buffer."""
    return plan.all_buffers[payload.buffer].kind


def payload_bytes(profile: Profile, payload: Payload, kind: Any, width: int = 8) -> int:
    """Bytes of whole elements of `width` bytes; a number per parameter follows the gradients of
    its bucket."""
    run = payload.buckets
    held = payload.slice_of(profile.payload_bytes(kind, run) // width)
    elements = held.stop - held.start
    if payload.buffer == "grad" and payload.part + payload.width == payload.parts:
        elements += parameters(profile, run)  # with the last slice
    return elements * width


def parameters(profile: Profile, run: range) -> int:
    """Parameters in some buckets: all that moves with them but the running statistics."""
    names = [name for b in run for name in profile.buckets[b].tensors]
    return len([name for name in names if "running" not in name])


@pytest.mark.parametrize("strategy", PLAIN, ids=str)
def test_everything_is_averaged_in_every_period(strategy: Strategy) -> None:
    """What makes all of these converge, read off the collectives and not off the plan."""
    profile = profile_of(case_of(strategy, 2), 2)
    plan = strategy.plan(profile)
    if plan.votes and plan.period == 1:
        return  # nothing is promised
    buffers = {t.payload.buffer for t in plan.transfers} - {"state", BUFFERS}
    kind = next(iter(buffers)) if len(buffers) == 1 else "param"
    assert kind in buffers
    payload = Payload(kind, range(plan.buckets))
    everything = payload_bytes(profile, payload, kind_of(plan, payload))
    windows = Windows(plan)
    if windows.late:  # per window that is averaged in a period
        everything *= len([phase for phase in plan.cycle if windows.closes_window(phase)])
    for rank in trained(strategy, 2):
        for start in range(plan.prologue, ITERATIONS - plan.period + 1):
            period = range(start, start + plan.period)
            assert bytes_moved(rank, period, kind) == everything, str(period)


def bytes_moved(trained: Trained, iterations: range, kind: str) -> int:
    """Bytes of the different messages of one kind in some iterations; halves count once. Gradients
    that are added up are sent anew for every window."""
    late = trained.plan is not None and Windows(trained.plan).late
    messages = {
        (t if late else None, name, size)
        for t, _, name, size in trained.sent
        if t in iterations and name.partition(" ")[2].startswith(kind)
        if not name.startswith("reduce_scatter")
    }
    # An all-gather sends half of what it moves.
    return sum(size * (2 if name.startswith("all_gather") else 1) for _, name, size in messages)


# ---- (d) the same order as in the simulator -------------------------------------------------


@every_planned_world
def test_order_equals_the_simulators(strategy: Strategy, world_size: int) -> None:
    profile = profile_of(case_of(strategy, world_size), world_size)
    trace = simulate(
        strategy.plan(profile),
        profile,
        iterations=ITERATIONS,
        record=ITERATIONS,
        votes=decided(strategy, world_size),
    )
    sent = sorted((s for s in trace.spans if s.lane != COMPUTE), key=lambda s: s.start_s)
    for number, rank in enumerate(trained(strategy, world_size)):
        row = min(number, len(trace.ends_s) - 1)  # a single row is that of every rank
        simulated = [(s.iteration, s.lane, s.name) for s in sent if s.rank == row]
        for link in {span.lane for span in sent}:
            on_link = [message for message in rank.messages if message[1] == link]
            assert on_link == [s for s in simulated if s[1] == link]


# ---- (e) the end ----------------------------------------------------------------------------


@every_world
def test_consolidate_makes_replicas_identical(strategy: Strategy, world_size: int) -> None:
    """Frozen parameters and buffers too, and with a straggler."""
    united = {rank.united for rank in trained(strategy, world_size)}
    assert len(united) == 1
    assert united != {""}


# ---- (f) checkpoints ------------------------------------------------------------------------

# What is under way when replicas are consolidated: nothing, gradients of windows, averages.
HALVES = [
    settings_of("local-sgd", 0),
    settings_of("deft", 0),
    settings_of("dreamddp", 3),
    settings_of("dreamddp", 5),
    settings_of("diloco", 2),
]


@pytest.mark.parametrize("strategy", HALVES, ids=str)
def test_checkpoint_continues_exactly(strategy: Strategy) -> None:
    """Consolidated, saved, loaded into a fresh prepare: as if the schedule had begun anew."""
    case = Case("conv", "nesterov")
    world = replicas(case, 2)
    calls = tuple((case, s, ITERATIONS) for s in HALVES)
    ranks = one_of(2, train_in_two_halves, calls, HALVES.index(strategy))
    equations(world, range(HALF), strategy)
    consolidate(world, getattr(strategy, "scale", "sum"))
    for replica, (first, _) in zip(world, ranks, strict=True):
        assert_same(first, replica, f"saved by rank {replica.rank}")
    equations(world, range(HALF, ITERATIONS), strategy)
    for replica, (_, second) in zip(world, ranks, strict=True):
        assert_same(second, replica, f"continued on rank {replica.rank}")
