"""Predictions: what a strategy's plan costs per iteration once its pipeline is full."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from offbeat.plan import Plan
from offbeat.profile import Profile
from offbeat.sim.engine import Run, run
from offbeat.sim.program import message_bytes
from offbeat.sim.ranks import Ranks
from offbeat.sim.simulation import as_plans, default_iterations, recorded, to_trace
from offbeat.trace import Trace

if TYPE_CHECKING:
    from offbeat.strategies.base import Strategy

SCHEMA = 1
MOST_ITERATIONS = 2048  # a pipeline that fills more slowly is not waited for
NOISY_ITERATIONS = 400  # with jitter: half of them are averaged
LONGEST_CYCLE = 12  # periods after which a steady state may repeat
_SAME = 1e-9  # of an iteration


@dataclass(frozen=True)
class Prediction:
    """Steady state of one plan; all times are seconds per iteration, links by name.

    `bound_s` is the lower bound of the strategy's family (None: unknown). `exposed_s` is the time
    for which compute waits for communication, mean over ranks; it contains waiting for slower
    ranks. `busy_s` is the time for which a link carries messages, `idle_s` the rest.
    `bytes_per_iteration` is payload, for a reduce_scatter or all_gather half of it. Channels of a
    link that the plan uses count as links of their own.
    Means are over the iterations in `window`: a whole cycle if the timeline repeats itself
    (`steady`), else the second half of the simulation. `trace` is the last whole period, with
    the numbers in its notes.
    """

    strategy: str
    iteration_s: float
    bound_s: float | None
    exposed_s: float
    idle_s: dict[str, float]
    busy_s: dict[str, float]
    bytes_per_iteration: dict[str, float]
    window: range
    steady: bool
    plan: Plan
    trace: Trace

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form, without plan and trace."""
        return {
            "schema": SCHEMA,
            "strategy": self.strategy,
            "iteration_s": self.iteration_s,
            "bound_s": self.bound_s,
            "exposed_s": self.exposed_s,
            "idle_s": self.idle_s,
            "busy_s": self.busy_s,
            "bytes_per_iteration": self.bytes_per_iteration,
            "window": [self.window.start, self.window.stop],
            "steady": self.steady,
        }


def predict(
    strategy: Strategy,
    profile: Profile,
    *,
    iterations: int | None = None,
    seed: int = 0,
    ranks: Ranks | None = None,
) -> Prediction:
    """Prediction for rank 0's plan of a strategy on all ranks; arguments as of `predict_plan`."""
    return predict_plan(
        strategy.plan(profile),
        profile,
        strategy=str(strategy),
        bound_s=strategy.bound_s(profile),
        iterations=iterations,
        seed=seed,
        ranks=ranks,
    )


def predict_plan(
    plans: Plan | Sequence[Plan],
    profile: Profile,
    *,
    strategy: str | None = None,
    bound_s: float | None = None,
    iterations: int | None = None,
    seed: int = 0,
    ranks: Ranks | None = None,
) -> Prediction:
    """Prediction for a plan, or for one plan per rank.

    Without `iterations` as many are simulated as it takes to see the timeline repeat, at most
    2048 after the prologue, or 400 with jitter. ValueError as `simulate`.
    """
    plans, ranks = as_plans(plans), ranks or Ranks()
    result, cycle = _settle(plans, profile, ranks, iterations, seed)
    window = cycle or _second_half(plans[0], len(result.ends_s))
    iteration_s = _seconds(result, window)
    busy_s = {name: link.busy_s(window) for name, link in result.links.items()}
    prediction = Prediction(
        strategy=strategy or plans[0].strategy,
        iteration_s=iteration_s,
        bound_s=bound_s,
        exposed_s=float(result.waited_s[window.start : window.stop].mean()),
        idle_s={name: max(iteration_s - busy, 0.0) for name, busy in busy_s.items()},
        busy_s=busy_s,
        bytes_per_iteration=_bytes(plans[0], profile, result, window),
        window=window,
        steady=cycle is not None,
        plan=plans[0],
        trace=to_trace(plans[0], profile, result, recorded(plans[0], len(result.ends_s), None)),
    )
    return replace(prediction, trace=replace(prediction.trace, notes=_notes(prediction)))


def _notes(prediction: Prediction) -> dict[str, Any]:
    """Numbers that a reader of the trace alone may want."""
    names = ("iteration_s", "bound_s", "exposed_s", "steady")
    return {**prediction.trace.notes, **{name: getattr(prediction, name) for name in names}}


def _settle(
    plans: Sequence[Plan], profile: Profile, ranks: Ranks, iterations: int | None, seed: int
) -> tuple[Run, range | None]:
    """Simulate longer and longer until the timeline repeats; the last run and its cycle."""
    plan = plans[0]
    fixed = iterations is not None or ranks.jitter > 0
    if iterations is None:
        iterations = default_iterations(plan, NOISY_ITERATIONS if ranks.jitter else 0)
    while True:
        record = recorded(plan, iterations, None)
        result = run(plans, profile, ranks, iterations=iterations, seed=seed, record=record)
        cycle = None if ranks.jitter else _cycle(plan, result)
        repeated = iterations - plan.prologue
        if cycle or fixed or 2 * repeated > MOST_ITERATIONS:
            return result, cycle
        iterations += repeated


def _cycle(plan: Plan, result: Run) -> range | None:
    """The last iterations that repeat those before, up to a constant shift in time."""
    depth = 2 + max(group.program.lag for group in result.groups)
    last = recorded(plan, len(result.ends_s), None).stop
    now = _state(result, last, depth)
    for periods in range(1, LONGEST_CYCLE + 1):
        first = last - periods * plan.period
        if first - depth < plan.prologue:
            return None
        then = _state(result, first, depth)
        tolerance_s = _SAME * _seconds(result, range(first, last))
        if len(then) == len(now) and np.allclose(then, now, rtol=0, atol=tolerance_s):
            return range(first, last)
    return None


def _state(result: Run, iteration: int, depth: int) -> NDArray[np.float64]:
    """Everything before an iteration that later ones depend on, relative to its start."""
    past = range(iteration - depth, iteration)
    ranks_s = result.ends_s[iteration - 1]
    messages_s = [link.ends_of(past) for link in result.links.values()]
    return np.concatenate([ranks_s, *messages_s]) - ranks_s.max()


def _second_half(plan: Plan, iterations: int) -> range:
    """Whole periods of the second half; everything if there is no whole period."""
    periods = max(iterations - plan.prologue, 0) // plan.period
    if not periods:
        return range(iterations)
    stop = plan.prologue + periods * plan.period
    return range(stop - (periods + 1) // 2 * plan.period, stop)


def _seconds(result: Run, window: range) -> float:
    """Seconds per iteration, the slowest rank's end counting."""
    begin_s = result.ends_s[window.start - 1].max() if window.start else 0.0
    return float(result.ends_s[window.stop - 1].max() - begin_s) / len(window)


def _bytes(plan: Plan, profile: Profile, result: Run, window: range) -> dict[str, float]:
    """Payload per iteration on every link."""
    total = dict.fromkeys(result.links, 0.0)
    for phase, count in Counter(map(plan.phase, window)).items():
        for t in plan.at(phase):
            total[t.link] += message_bytes(t, profile) * count / len(window)
    return total
