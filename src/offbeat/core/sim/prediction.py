"""Predictions of the steady-state time and traffic per iteration of a strategy's plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from statistics import fmean
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from offbeat.core.plan import Plan, base_link
from offbeat.core.profile import Profile
from offbeat.core.profile.elsewhere import network_rate_bps
from offbeat.core.sim.fluid import coupled_links
from offbeat.core.sim.job import Run
from offbeat.core.sim.outcomes import Votes
from offbeat.core.sim.ranks import Ranks
from offbeat.core.sim.shorten import SAMPLE, ShortPlan, shorten
from offbeat.core.sim.simulation import make_job, recorded_iterations, run, to_trace
from offbeat.core.sim.trace import Trace
from offbeat.core.transport.failure_detector import traffic_bps

if TYPE_CHECKING:
    from offbeat.core.strategy.interface import Strategy

SCHEMA = 1
MEMBERS_FACT = "members_every"
"""Fact of a plan of a job whose members may change: iterations between two comparisons of the
members. Each takes a small message of all ranks."""
MOST_ITERATIONS = 2048  # largest number of simulated iterations before a steady state
RANDOM_ITERATIONS = 400  # iterations with jitter or random votes; the second half is averaged
LONGEST_CYCLE = 12  # longest cycle of a steady state, in periods of the plan
SHARED_ITERATIONS = 120  # as RANDOM_ITERATIONS, where sends between ranks share links
SHARED_SPREAD = 0.1  # relative standard deviation of message times there, as with TCP
LEAST_SHARE = 0.001  # smallest share of a link that a trace states for the heartbeat
_SAME = 1e-9  # tolerance of equal times, as share of an iteration


@dataclass(frozen=True)
class Prediction:
    """Steady state of one plan.

    All times are seconds per iteration, averaged over the iterations in `window`. A channel that
    the plan uses counts as a link of its own.

    Attributes:
        strategy: name of the strategy.
        iteration_s: seconds per iteration, measured at the slowest rank.
        bound_s: lower bound of the strategy's family; None if unknown.
        exposed_s: seconds for which compute waits for communication, mean over ranks. It includes
            waiting for slower ranks.
        idle_s: seconds for which a link carries no message, by link.
        busy_s: seconds for which a rank's link carries messages, by link, mean over ranks.
        bytes_per_iteration: payload bytes by link, mean over ranks. A reduce_scatter or all_gather
            counts half its payload.
        window: iterations over which the values are averaged: a whole cycle if `steady`, else the
            second half of the simulation, or the replayed iterations after the first `skip`.
        steady: whether the timeline repeats.
        plan: plan that was simulated; None for a strategy with a parameter server.
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
    plan: Plan | None
    _traced: Callable[[], Trace] = field(repr=False, compare=False)

    @cached_property
    def trace(self) -> Trace:
        """Return the trace of the last whole period, computed on first access.

        Its notes hold `iteration_s`, `bound_s`, `exposed_s` and `steady`. `heartbeat_share` is the
        share of rank 0's rate that the heartbeat takes on a link over which the host of rank 0
        receives it, for links with more than 0.1 %. The prediction does not subtract it, because
        the rates of a measured profile contain it. If iterations of that period were left out of
        the simulation, the trace holds those after the last gap.
        """
        trace = self._traced()
        names = ("iteration_s", "bound_s", "exposed_s", "steady")
        notes = {**trace.notes, **{name: getattr(self, name) for name in names}}
        return replace(trace, notes=notes)

    def to_dict(self) -> dict[str, Any]:
        """Return the prediction as a JSON-compatible dict, without plan and trace."""
        names = (f.name for f in fields(self) if f.name not in ("plan", "_traced"))
        values = {name: getattr(self, name) for name in names}
        return {"schema": SCHEMA, **values, "window": [self.window.start, self.window.stop]}


@dataclass(frozen=True)
class Conditions:
    """Conditions of a prediction.

    Attributes:
        iterations: number of simulated iterations; None for as many as the timeline needs to
            repeat.
        seed: seed of jitter and votes.
        ranks: differences between ranks; None for those of the profile.
        votes: for a vote by name, the probability of a yes, or its outcomes in a run.
        servers: number of ranks that serve, for strategies with servers.
        skip: number of first iterations to leave out if `votes` are outcomes of a run, or if
            `iterations` have run in a job with servers.
    """

    iterations: int | None = None
    seed: int = 0
    ranks: Ranks | None = None
    votes: Votes | None = None
    servers: int = 1
    skip: int = 0


def predict(
    strategy: Strategy,
    profile: Profile,
    *,
    iterations: int | None = None,
    seed: int = 0,
    ranks: Ranks | None = None,
    votes: Votes | None = None,
    servers: int = 1,
    skip: int = 0,
    ran: Plan | None = None,
) -> Prediction:
    """Return the prediction for a strategy.

    Args:
        strategy: the strategy.
        profile: measured facts of model and network.
        iterations: see `predict_plan`.
        seed: see `predict_plan`.
        ranks: see `predict_plan`.
        votes: see `predict_plan`.
        servers: number of ranks that serve, for strategies with servers.
        skip: see `predict_plan`. With servers, a job has run `iterations`, of which the first
            `skip` are left out; 0 predicts the second half of a long job.
        ran: plan that a run has executed, if it differs from the strategy's own plan.
    """
    conditions = Conditions(iterations, seed, ranks, votes, servers, skip)
    return within_bound(strategy.predict(profile, conditions, ran), profile, ranks)


def predict_plan(
    plan: Plan,
    profile: Profile,
    *,
    strategy: str | None = None,
    iterations: int | None = None,
    seed: int = 0,
    ranks: Ranks | None = None,
    votes: Votes | None = None,
    skip: int = 0,
) -> Prediction:
    """Return the prediction for a plan.

    If sends between ranks share links, a plan may have several steady states, and real runs leave
    some of them. In this case message times vary by 10 % and 120 iterations are simulated.

    Args:
        plan: plan to simulate.
        profile: measured facts of model and network.
        strategy: name in the prediction; None for the plan's strategy.
        iterations: number of simulated iterations. None: simulate until the timeline repeats, at
            most 2048 iterations after the prologue. With jitter, or with a vote of probability
            between 0 and 1, simulate 400. Long stretches of equal iterations are shortened.
        seed: seed of jitter and votes.
        ranks: differences between ranks; None for those of the profile.
        votes: for a vote by name, the probability of a yes (default 1), or its outcomes in a run.
        skip: number of first iterations to leave out if `votes` are outcomes of a run. All later
            whole periods are averaged.

    Returns:
        Steady state of the plan.

    Raises:
        ValueError: the plan does not fit the profile or deadlocks.
    """
    conditions = Conditions(iterations, seed, ranks, votes, skip=skip)
    return predict_under(plan, profile, conditions, strategy or plan.strategy)


def predict_under(plan: Plan, profile: Profile, conditions: Conditions, name: str) -> Prediction:
    """Return the prediction for the plan of the strategy of this name; see `predict_plan`."""
    votes = (conditions.votes or {}).values()
    replayed = max((len(v) for v in votes if isinstance(v, Sequence)), default=0)
    if replayed and conditions.iterations is None:
        conditions = replace(conditions, iterations=replayed)
    whole = ShortPlan(plan, plan, {}, {}, (), ((0, 0),))
    short = shorten(plan) if conditions.iterations is None else whole
    result, cycle = _simulate(short, profile, conditions)
    if replayed:
        cycle, here = None, _periods_after(short.plan, conditions.skip, len(result.ends_s))
    else:
        here = cycle or _second_half(short.plan, len(result.ends_s))
    window = range(short.number_of(here.start), short.number_of(here.stop))
    iteration_s = _seconds(result, here, short, len(window))
    if every := plan.fact(MEMBERS_FACT):
        iteration_s += result.job.costs.vote_s / every
    busy_s = _mean_over_rows(result, here, short, len(window), _link_busy_s)
    waited_s = result.waited_s[here.start : here.stop].mean(axis=1).tolist()
    weights = map(short.weight, here)
    return Prediction(
        strategy=name,
        iteration_s=iteration_s,
        bound_s=plan.bound_s,
        exposed_s=sum(s * w for s, w in zip(waited_s, weights, strict=True)) / len(window),
        idle_s={name: max(iteration_s - busy, 0.0) for name, busy in busy_s.items()},
        busy_s=busy_s,
        bytes_per_iteration=_mean_over_rows(result, here, short, len(window), _bytes),
        window=window,
        steady=cycle is not None and all(_samples_repeat(short, result, cycle)),
        plan=plan,
        _traced=lambda: _trace(result, short),
    )


def within_bound(
    prediction: Prediction, profile: Profile, ranks: Ranks | None = None
) -> Prediction:
    """Return the prediction with `iteration_s` raised to the bound if compute times have jitter.

    The bound holds for the expectation, but a finite sample of jitter may have a mean below 1.

    Args:
        prediction: prediction with a bound for this profile, or without a bound.
        profile: profile of the prediction.
        ranks: differences between ranks of the prediction; None for those of the profile.

    Returns:
        The prediction itself if it has no bound, if compute has no jitter, or if `ranks` changes
        compute scale or link rates.
    """
    bound_s, ranks = prediction.bound_s, ranks or Ranks()
    if bound_s is None or ranks.scale or ranks.link_rates or not any(ranks.jitters(profile)):
        return prediction
    return replace(prediction, iteration_s=max(prediction.iteration_s, bound_s))


def _trace(result: Run, short: ShortPlan) -> Trace:
    last = recorded_iterations(short.plan, len(result.ends_s), None)
    if len(last) == short.plan.period:
        last = range(last.start + short.gapless_start - short.plan.prologue, last.stop)
    trace = to_trace(result, short.original, last, last, short.number_of)
    shares = _heartbeat_shares(result.job.profile)
    return replace(trace, notes={**trace.notes, "heartbeat_share": shares}) if shares else trace


def _heartbeat_shares(profile: Profile) -> dict[str, float]:
    """Return the share of each link that the heartbeat takes at rank 0, if above `LEAST_SHARE`."""
    replicas = profile.world_size
    if replicas < 2:
        return {}
    traffic = traffic_bps(profile.ranks)
    shares = {link.name: traffic / network_rate_bps(link, replicas) for link in profile.links}
    return {name: round(share, 4) for name, share in shares.items() if share > LEAST_SHARE}


def _simulate(
    short: ShortPlan, profile: Profile, conditions: Conditions
) -> tuple[Run, range | None]:
    """Simulate with a growing number of iterations until the timeline repeats.

    Returns:
        The last run, and the iterations of its cycle or None.
    """
    plan, iterations = short.plan, conditions.iterations
    ranks, votes = conditions.ranks or Ranks(), conditions.votes or {}
    used = {base_link(name) for name in plan.links}
    chance = any(ranks.jitters(profile))
    chance = chance or any(link.jitter for link in profile.all_links if link.name in used)
    chance = chance or any(map(_is_random_vote, votes.values()))
    several = iterations is None and not plan.uniform and bool(coupled_links(plan, profile))
    chance = chance or several
    fixed = iterations is not None or chance
    if iterations is None:
        # Two periods suffice to detect a cycle if a period is longer than any transfer's lag.
        periods = 2 if plan.period >= 2 + max(_lags(plan)) else 4
        least = RANDOM_ITERATIONS if chance else periods * plan.period
        if several:
            least = SHARED_ITERATIONS
        iterations = plan.prologue + plan.period * -(-least // plan.period)
    while True:
        spread = SHARED_SPREAD if several else 0.0
        seed, repeats = conditions.seed, short.repeats
        result = run(make_job(plan, profile, ranks, iterations, seed, votes, repeats, spread))
        cycle = None if chance else _cycle(short, result)
        repeated = iterations - plan.prologue
        if cycle or fixed or 2 * repeated > MOST_ITERATIONS:
            return result, cycle
        iterations += repeated


def _is_random_vote(vote: float | Sequence[bool]) -> bool:
    """Return whether the outcome of a vote may differ between iterations."""
    return isinstance(vote, Sequence) or 0 < vote < 1


def _lags(plan: Plan) -> Iterator[int]:
    yield 0
    yield from (t.before.lag for t in plan.transfers)
    yield from (apply.at.lag for apply in plan.applies)
    yield from (vote.due.lag for vote in plan.votes)


def _cycle(short: ShortPlan, result: Run) -> range | None:
    """Return the last iterations if the timeline repeats after them, shifted in time, or None."""
    plan, depth = short.plan, _depth(result)
    last = recorded_iterations(plan, len(result.ends_s), None).stop
    for periods in range(1, LONGEST_CYCLE + 1):
        first = last - periods * plan.period
        if first - depth < plan.prologue:
            return None
        if _is_same_state(result, first, last, depth):
            return range(first, last)
    return None


def _samples_repeat(short: ShortPlan, result: Run, cycle: range) -> list[bool]:
    """Return for each sample in the cycle whether the timeline repeats within it."""
    stops = [
        iteration
        for iteration in range(cycle.start + 1, cycle.stop + 1)
        if short.plan.phase(iteration - 1) + 1 in short.samples
    ]
    return [_is_same_state(result, stop - SAMPLE, stop, _depth(result)) for stop in stops]


def _depth(result: Run) -> int:
    return 2 + max(program.lag for program in result.programs)


def _is_same_state(result: Run, first: int, last: int, depth: int) -> bool:
    """Return whether the simulation has equal states before iterations `first` and `last`."""
    then, now = _state(result, first, depth), _state(result, last, depth)
    span_s = float(result.ends_s[last - 1].max() - result.ends_s[first - 1].max())
    tolerance_s = _SAME * span_s / (last - first)
    return len(then) == len(now) and np.allclose(then, now, rtol=0, atol=tolerance_s)


def _state(result: Run, iteration: int, depth: int) -> NDArray[np.float64]:
    """Return all times on which iterations from `iteration` on depend, relative to its start."""
    past = range(iteration - depth, iteration)
    ranks_s = result.ends_s[iteration - 1]
    messages_s = [queue.ends_of(past) for queues in result.queues.values() for queue in queues]
    return np.concatenate([ranks_s, *messages_s]) - ranks_s.max()


def _second_half(plan: Plan, iterations: int) -> range:
    """Return the whole periods of the second half, or all iterations without a whole period."""
    periods = max(iterations - plan.prologue, 0) // plan.period
    if not periods:
        return range(iterations)
    stop = plan.prologue + periods * plan.period
    return range(stop - (periods + 1) // 2 * plan.period, stop)


def _periods_after(plan: Plan, skip: int, iterations: int) -> range:
    """Return the whole periods after `skip` iterations, or all iterations without one."""
    start = max(skip, plan.prologue)
    whole = (iterations - start) // plan.period * plan.period
    return range(start, start + whole) if whole > 0 else range(iterations)


def _seconds(result: Run, here: range, short: ShortPlan, count: int) -> float:
    """Return the seconds per iteration, measured at the slowest rank."""
    ends_s = [0.0, *result.ends_s[max(here.start - 1, 0) : here.stop].max(axis=1).tolist()]
    ends_s = ends_s[bool(here.start) :]
    total_s = ends_s[-1] - ends_s[0]
    if short.weights:
        more = [short.weight(iteration) - 1 for iteration in here]
        total_s += sum(m * (z - a) for m, a, z in zip(more, ends_s, ends_s[1:], strict=False))
    return total_s / count


def _mean_over_rows(
    result: Run, here: range, short: ShortPlan, n: int, value: Callable[[Run, str, int, int], float]
) -> dict[str, float]:
    """Return for each link the mean of `value` over ranks, summed over `here` and divided by `n`.

    `value(result, link, row, iteration)` is a quantity of one row of the link in one iteration.
    """
    return {
        link: fmean(
            sum(value(result, link, row, iteration) * short.weight(iteration) for iteration in here)
            for row in range(len(queues))
        )
        / n
        for link, queues in result.queues.items()
    }


def _link_busy_s(result: Run, link: str, row: int, iteration: int) -> float:
    return result.queues[link][row].link_busy_s(iteration)


def _bytes(result: Run, link: str, row: int, iteration: int) -> float:
    return result.program(row).link_bytes(link, iteration)
