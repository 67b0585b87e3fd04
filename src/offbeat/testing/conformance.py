"""Conformance suite of strategies, for any package. Failed checks raise AssertionError.

from offbeat.testing.conformance import conforms
conforms(MyStrategy(), profile)
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction

import numpy as np

from offbeat.core.plan import Plan
from offbeat.core.plan.program import Program
from offbeat.core.plan.types import moment_of
from offbeat.core.profile import Profile
from offbeat.core.verify.check import check
from offbeat.core.verify.interpreter import Interpreter
from offbeat.core.verify.worker import Array, InterpretedModel, Worker
from offbeat.strategies import Planned
from offbeat.testing.replicas import NumpyWorld, Optimizer, Task, adam, momentum, rmsprop

__all__ = [
    "TOLERANCE",
    "conforms",
    "equals_equations",
    "interpret_plan",
    "moves_everything",
    "plan_is_pure",
    "plan_is_sound",
    "shares",
]

TOLERANCE = 1e-12
"""Largest difference between the weights of an interpreted plan and of its equations."""


def conforms(strategy: Planned, profile: Profile, *, ranks: Sequence[int] = (2, 3)) -> None:
    """Run all checks of this module.

    Args:
        strategy: the strategy.
        profile: profile for which it plans.
        ranks: numbers of ranks for which the plan is compared with the equations.

    Raises:
        AssertionError: a check has failed.
    """
    plan_is_sound(strategy, profile)
    plan_is_pure(strategy, profile)
    plan = strategy.plan(profile)
    moves_everything(plan)
    for count in ranks:
        sized = profile if plan.uniform else replace(profile, world_size=count)
        equals_equations(strategy, sized, ranks=count)


def plan_is_sound(strategy: Planned, profile: Profile) -> None:
    """Check that a plan is valid and that its bound is finite and the strategy's.

    Args:
        strategy: the strategy.
        profile: profile for which it plans.

    Raises:
        AssertionError: `offbeat.plan.check` reports a problem, or name or bound of the plan
            differ from those of the strategy.
    """
    plan = strategy.plan(profile)
    problems = check(plan, profile)
    assert not problems, f"{strategy}: {problems[0]}"
    assert plan.strategy == strategy.name, f"{strategy} signs its plan as {plan.strategy!r}"
    bound_s = strategy.bound_s(strategy.costed(profile))
    assert 0 <= bound_s < float("inf"), f"{strategy}: bound_s ({bound_s}) must be a time"
    assert plan.bound_s == bound_s, f"{strategy}: the plan's bound is not the strategy's"


def plan_is_pure(strategy: Planned, profile: Profile) -> None:
    """Check that equal inputs give equal plans, so that all ranks have the same plan.

    Args:
        strategy: the strategy.
        profile: profile for which it plans.

    Raises:
        AssertionError: a plan differs the second time, after profile or plan have been converted to
            JSON and back, or for a strategy that was created from the same settings.
    """
    plan = strategy.plan(profile)
    assert strategy.plan(profile) == plan, f"{strategy} plans differently the second time"
    sent = Profile.from_dict(json.loads(json.dumps(profile.to_dict())))
    again = Plan.from_dict(json.loads(json.dumps(plan.to_dict())))
    for other, where in ((strategy.plan(sent), "from a profile"), (again, "itself")):
        assert other == plan, f"{strategy}: the plan {where} that was written and read differs"
        assert other.digest == plan.digest, f"{strategy}: the digest {where} differs"
    same = type(strategy)(**strategy.settings())
    assert same == strategy, f"{strategy} is not made of its settings"
    assert same.plan(profile) == plan, f"{strategy} plans by more than its settings"


def moves_everything(plan: Plan) -> None:
    """Check that a cycle of the plan moves each bucket's gradients or parameters completely.

    Args:
        plan: the plan.

    Raises:
        AssertionError: a bucket is moved less than once or a fractional number of times per cycle.
    """
    moved = shares(plan)
    for bucket in range(plan.buckets):
        counts = [moved[buffer, bucket] for buffer in ("grad", "param")]
        assert max(counts) >= 1, f"of bucket {bucket} only {max(counts)} is moved per cycle"
        odd = next((count for count in counts if count.denominator > 1), None)
        assert odd is None, f"bucket {bucket} is moved {odd} times per cycle"


def shares(plan: Plan) -> Counter[tuple[str, int]]:
    """Count how often a cycle of a plan moves each bucket.

    Args:
        plan: the plan.

    Returns:
        Number of moves by (kind of buffer, bucket). A slice counts as its fraction. The two halves
        of an all-reduce count once. Copies of the parameters count as "param".
    """
    moved: Counter[tuple[str, int]] = Counter()
    for t in plan.transfers:
        if t.verb == "reduce_scatter":
            continue
        times = sum(phase in t.phases for phase in plan.cycle)
        for bucket in t.payload.buckets if times else ():
            share = Fraction(times * t.payload.width, t.payload.parts)
            kind = plan.all_buffers[t.payload.buffer].kind
            moved[kind, bucket] += share  # type: ignore[assignment]
    return moved


def equals_equations(
    strategy: Planned,
    profile: Profile,
    *,
    ranks: int,
    optimizers: Sequence[Optimizer] = (momentum, rmsprop),
    seed: int = 0,
) -> None:
    """Check that an interpreted plan computes the same weights as the strategy's equations.

    Args:
        strategy: the strategy.
        profile: profile for which it plans.
        ranks: number of ranks.
        optimizers: update rules to compare.
        seed: seed of the task and of the order in which workers are interpreted.

    Raises:
        AssertionError: weights differ by more than `TOLERANCE`.
    """
    plan = strategy.plan(profile)
    iterations = plan.prologue + 2 * plan.period + Program(plan).lag + 1
    task = Task([1 + (5 * b + seed) % 7 for b in range(plan.buckets)], seed)
    moments = _moments(plan)
    for optimizer in (adam,) if len(moments) == 2 else optimizers:
        trained = interpret_plan(plan, task, ranks, iterations, optimizer, seed=seed)
        world = NumpyWorld(task, ranks, optimizer, moments if len(moments) == 2 else ())
        advance = strategy.equations(plan)
        for iteration in range(iterations):
            apart = float(abs(trained[iteration] - world.weights).max())
            where = f"{strategy} on {ranks} ranks with {optimizer.__name__}"
            assert apart <= TOLERANCE, (
                f"{where}: the weights of iteration {iteration} are {apart:.1e} away from those "
                f"of its equations\n{plan}"
            )
            advance(world, iteration)


def interpret_plan(
    plan: Plan,
    task: Task,
    ranks: int,
    iterations: int,
    optimizer: Optimizer = momentum,
    *,
    seed: int | None = None,
) -> list[Array]:
    """Interpret a plan in numpy and record the weights of each forward.

    Args:
        plan: the plan.
        task: sizes, initial weights and gradients of the buckets.
        ranks: number of ranks.
        iterations: number of iterations.
        optimizer: update rule.
        seed: seed of the order in which workers are interpreted; None: a fixed order.

    Returns:
        Weights [ranks, elements] of each iteration's forwards.
    """
    used = [np.full((ranks, task.offsets[-1]), np.nan) for _ in range(iterations)]

    def gradient(rank: int, iteration: int, buckets: range, weights: Array) -> Array:
        used[iteration][rank, task.span(buckets)] = weights
        return task.gradient(rank, iteration, buckets, weights)

    moments = _moments(plan)

    def update(worker: Worker, buckets: range, weights: Array, gradients: Array) -> None:
        own = moments if len(moments) == 2 else ["state"]
        state = [worker.write(name, buckets)[0] for name in own]
        optimizer(weights, state if len(own) == 2 else state[0], gradients)

    model = InterpretedModel(task.sizes, task.start, gradient, update)
    Interpreter(plan, model, ranks).run(iterations, seed=seed)
    return used


def _moments(plan: Plan) -> list[str]:
    """Return the moments of the optimizer's state that a plan moves."""
    return sorted(buffer.name for buffer in plan.buffers if moment_of(buffer.name) is not None)
