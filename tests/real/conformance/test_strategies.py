"""Every registered strategy trains as its equations say, and moves what its plan promises."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from cases.comparing import assert_close, assert_same, sets_of
from cases.models import Case, profile_of
from cases.strategy_lists import STRATEGIES
from cases.workers import (
    Trained,
    promise_of,
    train_all_with_torch,
    train_beside_torch,
    train_cases,
    train_in_two_halves,
)
from harness.ranks import one_of, run_world
from oracle.training import (
    Clipping,
    Outer,
    Piece,
    Replica,
    as_planned,
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
from offbeat.core.derive.windows import Windows
from offbeat.core.rules.select import draw_samples
from offbeat.core.sim.trace import COMPUTE
from offbeat.plan import BUFFERS, VOTES, Payload
from offbeat.sim import simulate
from offbeat.strategies import Strategy, create
from offbeat.strategies.equations import Changes
from offbeat.strategies.partial_sync import average_of

# Settings beside the defaults; a strategy that is only registered is tested with its defaults.
SETTINGS: dict[str, list[dict[str, Any]]] = {
    "ddp": [{"bucket_cap_mb": 0.0002}],
    "wfbp": [{"fusion": "none"}, {"fusion": "mg-wfbp"}],
    "local-sgd": [
        {"period": 1},
        {"period": 3, "state": "averaged"},
        {"period": 2, "warmup": 3, "state": "reset"},
        {"period": 3, "warmup": 2, "outer": "0.7/0.5"},
    ],
    "partial-sync": [
        {"period": 2, "average": "before_update"},
        {"period": 3, "state": "averaged"},
        {"period": 3, "state": "averaged", "average": "before_update"},
        {"period": 7, "state": "reset"},
        {"period": 2, "state": "reset", "average": "before_update"},
        {"period": 3, "outer": "0.7/0.9/plain"},
    ],
    "asc-wfbp": [{"groups": 3}],
    "p3": [{"slice_elements": 7}, {"update": "at_step"}],
    "bytescheduler": [{"partition_elements": 10, "credit_elements": 20}],
    "us-byte": [{"unit_elements": 5}],
    "dear": [{"fusion_bytes": 1}, {"update": "at_step"}],
    "deft": [
        {"scale": "mean", "solver": "greedy"},
        {"partition_elements": 20},
        {"forward": 1, "backward": 2},
    ],
    "dreamddp": [
        {"period": 3, "fill": False, "solver": "balanced"},
        {"period": 3, "solver": "optimal", "average": "before_update", "state": "averaged"},
        {"period": 2, "split": True},
        {"period": 3, "split": True, "average": "before_update", "state": "averaged"},
        {"period": 3, "due": "forward", "split": True, "state": "averaged"},
        {"period": 2, "due": "forward", "average": "before_update", "state": "reset"},
        {"period": 3, "due": "delayed", "delay": 2},
        {"period": 2, "due": "delayed", "average": "before_update"},
        {"period": 3, "due": "delayed", "delay": 2, "gain": 0.5},
        {"period": 2, "clip": 0.3},
        {"period": 2, "due": "forward", "clip": 0.3},
        {"period": 2, "due": "delayed", "clip": 0.3},
        {"period": 3, "outer": "0.7/0.5"},
        {"period": 3, "average": "before_update", "outer": "0.7/0.5"},
        {"period": 2, "due": "forward", "outer": "0.7/0.5"},
        {"period": 4, "due": "delayed", "delay": 2, "outer": "0.7/0.5"},
    ],
    "diloco": [
        {"period": 4, "fragments": 1},
        {"period": 4, "fragments": 2, "average": "before_update"},
        {"period": 4, "fragments": 2, "delay": 1, "alpha": 0.5},
        {"period": 3, "delay": 2},
        {"period": 4, "fragments": 1, "due": "forward"},
        {"period": 4, "fragments": 1, "due": "forward", "average": "before_update"},
        {"period": 3, "fragments": 1, "due": "forward", "delay": 1, "alpha": 0.5},
    ],
    "selsync": [
        {"delta": 0.1, "smooth": "change", "window": 3, "state": "averaged"},
        {"delta": 0.5, "window": 1, "aggregate": "gradients", "max_period": 3},
        {"delta": 0.3, "vote_lag": 1, "max_period": 4, "state": "reset"},
        {"delta": 0.3, "scope": "layer", "max_period": 3},
        {"delta": 0.4, "scope": "layer", "state": "averaged"},
    ],
    "eager": [{"period": 2}, {"period": 3, "outer": "0.7/0.5/plain"}],
    "sparseloco": [{"period": 3, "fraction": 0.2, "lr": 0.7}],
    "demo": [{"fraction": 0.2, "beta": 0.9}],
    "des-loc": [{"period": 2, "first": 2, "second": 3}],
    "noloco": [{"period": 2, "gamma": 0.4, "rounds": 3}],
    "fedavg": [
        {"fraction": 0.5, "local_steps": 2, "seed": 3},
        {"fraction": 0.5, "epoch_share": 0.25, "steps_per_epoch": 12, "state": "averaged"},
        {"samples": (1.0, 3.0), "local_steps": 1, "state": "reset"},
        {"samples": (1.0, 3.0), "local_steps": (1, 3), "state": "averaged"},
    ],
}
KINDS = ("bsp", "dear", "deft", "dreamddp", "fedavg", "local-sgd", "selsync")
ALONE = ("cyclic",)  # its ranks have different parameters: runtime/test_cyclic.py
STRATEGIES_UNDER_TEST: list[Strategy] = [
    create(name, settings)
    for name in STRATEGIES
    if name not in ALONE
    for settings in [{}, *SETTINGS.get(name, [])]
]
# One default of each kind, and published methods with averages in every test.
OF_THREE_RANKS = [
    s
    for s in STRATEGIES_UNDER_TEST
    if (s.name in KINDS and s == create(s.name))
    or (type(s).__module__.startswith("offbeat.strategies.methods.") and s != create(s.name))
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
OF_THREE = (Case("conv", "groups", "step"),)  # in a world of three
# Own equations of methods are those of parameters; some methods average running statistics, too.
WITHOUT_STATISTICS = (Case("mlp", "groups", "step"),)
ITERATIONS = 10
BATCH = 20  # strategies that train in one world, which costs as much as a training

every_strategy = pytest.mark.parametrize("strategy", STRATEGIES_UNDER_TEST, ids=str)
every_plan = pytest.mark.parametrize("strategy", PLANNED, ids=str)


def cases_of(strategy: Strategy, world_size: int) -> tuple[Case, ...]:
    """In a world of two all cases for a strategy's defaults and one for its other settings, with
    state to average if they do; with a third rank only the means are others, so one is enough."""
    if world_size > 2:
        return OF_THREE if strategy.name in KINDS else WITHOUT_STATISTICS
    if strategy == create(strategy.name):
        return CASES
    return CASES[:1] if getattr(strategy, "state", "local") == "local" else CASES[1:2]


def worlds(strategies: list[Strategy]) -> pytest.MarkDecorator:
    """Every setting in a world of two, some of them in a world of three too."""
    pairs = [(s, 2) for s in strategies] + [(s, 3) for s in strategies if s in OF_THREE_RANKS]
    return pytest.mark.parametrize(("strategy", "world_size"), pairs, ids=str)


def kept(strategy: Strategy) -> tuple[Any, ...]:
    """What there is to save under a strategy: other settings change when messages go."""
    due, delay = getattr(strategy, "due", "end"), getattr(strategy, "delay", 0)
    is_reset = getattr(strategy, "state", "local") == "reset"
    outer = getattr(strategy, "outer", None)
    return strategy.name, is_reset, due, bool(delay), outer is not None


# The first setting of each kind.
KEEPING = [*{kept(s): s for s in reversed(STRATEGIES_UNDER_TEST)}.values()][::-1]
every_world = worlds(STRATEGIES_UNDER_TEST)
every_planned_world = worlds(PLANNED)
every_plain_world = worlds(PLAIN)


# ---- (a) the numbers ------------------------------------------------------------------------


def layer_sets(world: list[Replica], iterations: range, strategy: Any) -> None:
    profile = profile_of(world[0].case, len(world))
    late = getattr(strategy, "due", "end") == "delayed" or strategy.name == "diloco"
    late = late and getattr(strategy, "delay", 1) > 0
    plan = strategy.plan(profile)
    sets = sets_of(plan, profile, "average" if late else "param")
    early = any(apply.rule == "clip_early" for apply in plan.applies)
    clip, tensors = getattr(strategy, "clip", None), [bucket.tensors for bucket in profile.buckets]
    how: dict[str, Any] = {
        "sets": sets,
        "average": average_of(strategy.average),
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


def local_steps(world: list[Replica], iterations: range, strategy: Any) -> None:
    local_sgd(
        world,
        iterations,
        period=strategy.period,
        warmup=strategy.warmup,
        state=strategy.state,
        outer=outer_of(strategy),
    )


def what_is_planned(
    world: list[Replica], iterations: range, strategy: Strategy
) -> dict[str, list[bool]]:
    """What came out of the votes."""
    profile = profile_of(world[0].case, len(world))
    tensors = [bucket.tensors for bucket in profile.buckets]
    return as_planned(world, iterations, strategy.plan(profile), tensors)


def votes(world: list[Replica], iterations: range, strategy: Any) -> None:
    """Which layers are averaged anyway is the planner's choice, and so in the plan."""
    profile = profile_of(world[0].case, len(world))
    pieces = [Piece(bucket.tensors) for bucket in profile.buckets]
    if strategy.scope == "model":
        pieces = [Piece(tuple(name for piece in pieces for name in piece.names))]
    changes = Changes(strategy.smooth, strategy.window, len(world) / 100)
    selective(
        world,
        iterations,
        pieces=pieces,
        forced=strategy.plan(profile).fact("forced", [[]]),
        change=changes.change,
        delta=strategy.delta,
        lag=1 if strategy.scope == "layer" else strategy.vote_lag,
        aggregate=strategy.aggregate,
        state=strategy.state,
    )


def rounds(world: list[Replica], iterations: range, strategy: Any) -> None:
    counts = strategy.counts(len(world))
    federated(
        world,
        iterations,
        local_steps=strategy.steps(len(world)),
        weights=lambda done: draw_samples(counts, strategy.fraction, strategy.seed, done),
        state=strategy.state,
    )


def late(world: list[Replica], iterations: range, strategy: Any) -> None:
    """Which iterations close a window is the planner's choice, and so in the plan."""
    plan = strategy.plan(profile_of(world[0].case, len(world)))
    merged(world, iterations, lambda r: Windows(plan).closes_window(r), strategy.scale)


REFERENCES: dict[str, Callable[[list[Replica], range, Any], None]] = {
    **dict.fromkeys(ON_TIME, lambda world, iterations, _: on_time(world, iterations)),
    "ddp": lambda world, iterations, _: bsp(world, iterations, broadcast_buffers=True),
    "local-sgd": local_steps,
    "partial-sync": layer_sets,
    "diloco": layer_sets,
    "dreamddp": layer_sets,
    "deft": late,
    "selsync": votes,
    "fedavg": rounds,
}


def equations(world: list[Replica], iterations: range, strategy: Strategy) -> None:
    """The reference of a strategy, or else its own equations; a new strategy must bring some."""
    REFERENCES.get(strategy.name, by_own_equations)(world, iterations, strategy)


@pytest.mark.parametrize("strategy", [s for s in PLANNED if s.name in REFERENCES], ids=str)
def test_plan_says_what_the_equations_say(strategy: Strategy) -> None:
    case = CASES[0]
    workers = len(getattr(strategy, "samples", None) or range(3))
    mine, theirs = replicas(case, workers), replicas(case, workers)
    what_is_planned(mine, range(ITERATIONS), strategy)
    equations(theirs, range(ITERATIONS), strategy)
    for a, b in zip(mine, theirs, strict=True):
        assert_close(a.model.state_dict(), b.model.state_dict(), str(strategy))
        assert_close(a.optimizer.state_dict(), b.optimizer.state_dict(), str(strategy))


@cache
def trained(strategy: Strategy, world_size: int) -> list[list[Trained]]:
    """Per rank and case what it has after training, in a world with other strategies."""
    batch, i = batch_of(strategy, STRATEGIES_UNDER_TEST if world_size == 2 else OF_THREE_RANKS)
    calls = tuple((s, cases_of(s, world_size), ITERATIONS) for s in batch)
    return one_of(train_cases, world_size, calls, i)


def batch_of(strategy: Strategy, strategies: list[Strategy]) -> tuple[list[Strategy], int]:
    """The strategies that share a world with this one, and its place among them."""
    i = strategies.index(strategy)
    return strategies[i - i % BATCH :][:BATCH], i % BATCH


@cache
def decided(strategy: Strategy, case: Case, world_size: int) -> dict[str, list[bool]]:
    """What comes out of the votes."""
    if not strategy.plan(profile_of(case, world_size)).votes:
        return {}
    return what_is_planned(replicas(case, world_size), range(ITERATIONS), strategy)


@every_world
def test_equals_the_equations(strategy: Strategy, world_size: int) -> None:
    cases = cases_of(strategy, world_size)
    for i, case in enumerate(cases):
        world = replicas(case, world_size)
        equations(world, range(ITERATIONS), strategy)
        for replica, rank in zip(world, trained(strategy, world_size), strict=True):
            assert_same(rank[i], replica, f"{case}, rank {replica.rank}")


# ---- (b) the same as torch's own DDP --------------------------------------------------------

SYNCHRONOUS = [s for s in STRATEGIES_UNDER_TEST if s.name in ON_TIME]
SINGLE = (
    Case("mlp", "nesterov", "cosine", torch.float32),
    Case("conv", "adam", "step", torch.float32),
)


@cache
def trained_by_torch(world_size: int) -> list[list[Trained]]:
    cases = CASES if world_size == 2 else OF_THREE
    return run_world(train_all_with_torch, world_size, cases, ITERATIONS)


@worlds(SYNCHRONOUS)
def test_equals_torch_ddp(strategy: Strategy, world_size: int) -> None:
    for torchs, ours in zip(
        trained_by_torch(world_size), trained(strategy, world_size), strict=True
    ):
        for case, theirs, mine in zip(cases_of(strategy, world_size), torchs, ours, strict=False):
            assert_like_torch(mine, theirs, f"{strategy} {case}", 1e-12)


def test_equals_torch_ddp_in_single_precision() -> None:
    strategies = [s for s in SYNCHRONOUS if s == create(s.name)]
    for rank in run_world(train_beside_torch, 2, strategies, SINGLE, 6):
        for case, (theirs, ours) in zip(SINGLE, rank, strict=True):
            for strategy, mine in zip(strategies, ours, strict=True):
                assert_like_torch(mine, theirs, f"{strategy} {case}", 1e-6)


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
    cases = cases_of(strategy, world_size)
    for i, case in enumerate(cases):
        profile = profile_of(case, world_size)
        outcomes = decided(strategy, case, world_size)
        promised = promises(strategy.plan(profile), profile, outcomes)
        for rank in trained(strategy, world_size):
            moved = Counter(m for m in rank[i].sent if not m[1].endswith(VOTES))
            assert moved == promised, f"{case}: {moved - promised} extra, {promised - moved} short"


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
    for i, case in enumerate(cases_of(strategy, 2)):
        profile = profile_of(case, 2)
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
                moved = bytes_moved(rank[i], period, kind)
                assert moved == everything, f"{case}, {period}"


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
    return sum(size for _, _, size in messages)


# ---- (d) the same order as in the simulator -------------------------------------------------


@every_planned_world
def test_order_equals_the_simulators(strategy: Strategy, world_size: int) -> None:
    cases = cases_of(strategy, world_size)
    for i, case in enumerate(cases):
        profile = profile_of(case, world_size)
        trace = simulate(
            strategy.plan(profile),
            profile,
            iterations=ITERATIONS,
            record=ITERATIONS,
            votes=decided(strategy, case, world_size),
        )
        sent = sorted((s for s in trace.spans if s.lane != COMPUTE), key=lambda s: s.start_s)
        for number, rank in enumerate(trained(strategy, world_size)):
            row = min(number, len(trace.ends_s) - 1)  # a single row is that of every rank
            simulated = [(s.iteration, s.lane, s.name) for s in sent if s.rank == row]
            for link in {span.lane for span in sent}:
                on_link = [message for message in rank[i].messages if message[1] == link]
                assert on_link == [s for s in simulated if s[1] == link], str(case)


# ---- (e) the end ----------------------------------------------------------------------------


@every_world
def test_consolidate_makes_replicas_identical(strategy: Strategy, world_size: int) -> None:
    """Frozen parameters and buffers too, and with a straggler, in the last case of a strategy."""
    united = {cases[-1].united for cases in trained(strategy, world_size)}
    assert len(united) == 1
    assert united != {""}


# ---- (f) checkpoints ------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", KEEPING, ids=str)
def test_checkpoint_continues_exactly(strategy: Strategy) -> None:
    """Consolidated, saved, loaded into a fresh prepare: as if the schedule had begun anew."""
    case = Case("conv", "nesterov")
    world = replicas(case, 2)
    batch, i = batch_of(strategy, KEEPING)
    calls = tuple((case, s, ITERATIONS) for s in batch)
    ranks = one_of(train_in_two_halves, 2, calls, i)
    equations(world, range(ITERATIONS // 2), strategy)
    consolidate(world, getattr(strategy, "scale", "sum"))
    for replica, (first, _) in zip(world, ranks, strict=True):
        assert_same(first, replica, f"saved by rank {replica.rank}")
    equations(world, range(ITERATIONS // 2, ITERATIONS), strategy)
    for replica, (_, second) in zip(world, ranks, strict=True):
        assert_same(second, replica, f"continued on rank {replica.rank}")
