"""Predictions: what a strategy's plan costs per iteration once its pipeline is full."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from statistics import fmean
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from offbeat.core.plan import Plan, base_link
from offbeat.core.profile import Profile
from offbeat.core.sim.job import Run
from offbeat.core.sim.outcomes import Votes
from offbeat.core.sim.ranks import Ranks
from offbeat.core.sim.run import run
from offbeat.core.sim.shared import coupled
from offbeat.core.sim.shorten import SAMPLE, Short, shorten
from offbeat.core.sim.simulation import recorded, to_trace
from offbeat.core.sim.trace import Trace

if TYPE_CHECKING:
    pass

SCHEMA = 1
MOST_ITERATIONS = 2048  # a pipeline that fills more slowly is not waited for
RANDOM_ITERATIONS = 400  # with jitter or open votes: half of them are averaged
LONGEST_CYCLE = 12  # periods after which a steady state may repeat
SHARED_ITERATIONS = 120  # the same where ranks send to each other over shared links
SHARED_SPREAD = 0.1  # of messages there, relative standard deviation: what TCP makes of it
_SAME = 1e-9  # of an iteration


@dataclass(frozen=True)
class Prediction:
    """Steady state of one plan; all times are seconds per iteration, links by name.

    `bound_s` is the lower bound of the strategy's family (None: unknown). `exposed_s` is the time
    for which compute waits for communication, mean over ranks; it contains waiting for slower
    ranks. `busy_s` is the time for which a rank's link carries messages, mean over ranks,
    `idle_s` the rest. `bytes_per_iteration` is payload, mean over the ranks that it passes
    through, for a reduce_scatter or all_gather half of it. Channels of a link that the plan uses
    count as links of their own.
    `plan` is None of a strategy with a parameter server.
    Means are over the iterations in `window`: a whole cycle if the timeline repeats itself
    (`steady`), else the second half of the simulation. `trace` is the last whole period, with
    the numbers in its notes; of a period in which iterations were left out, what comes after.
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
        """The last whole period; made when it is first asked for."""
        trace = self._traced()
        names = ("iteration_s", "bound_s", "exposed_s", "steady")
        notes = {**trace.notes, **{name: getattr(self, name) for name in names}}
        return replace(trace, notes=notes)

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


@dataclass(frozen=True)
class Conditions:
    """Conditions of a prediction.

    Attributes:
        iterations: simulated iterations; None: as many as the timeline needs to repeat.
        seed: seed of jitter and votes.
        ranks: how ranks differ; None: as the profile says.
        votes: by name the share of iterations in which a vote says yes, or its outcomes in a run.
        servers: number of ranks that serve, for strategies with servers.
        skip: first iterations that do not count, where `votes` are outcomes of a run.
    """

    iterations: int | None = None
    seed: int = 0
    ranks: Ranks | None = None
    votes: Votes | None = None
    servers: int = 1
    skip: int = 0


class Predictable(Protocol):
    """A strategy, as far as predictions need it."""

    def predict(
        self, profile: Profile, conditions: Conditions, ran: Plan | None = None
    ) -> Prediction:
        """Return the prediction of the timeline."""
        ...


def predict(
    strategy: Predictable,
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
        iterations: as of `predict_plan`, like `seed`, `ranks`, `votes` and `skip`.
        servers: number of ranks that serve, for strategies with servers.
        ran: the plan that a run has executed, if it differs from the strategy's own.
    """
    conditions = Conditions(iterations, seed, ranks, votes, servers, skip)
    return within_bound(strategy.predict(profile, conditions, ran), profile, ranks)


def predict_under(plan: Plan, profile: Profile, conditions: Conditions, name: str) -> Prediction:
    """Return the prediction for the plan of the strategy of this name."""
    return predict_plan(
        plan,
        profile,
        strategy=name,
        iterations=conditions.iterations,
        seed=conditions.seed,
        ranks=conditions.ranks,
        votes=conditions.votes,
        skip=conditions.skip,
    )


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
    """Prediction for a plan.

    Without `iterations` as many are simulated as it takes to see the timeline repeat, at most
    2048 after the prologue, or 400 with jitter (the profile's, unless `ranks` says otherwise) or
    votes that are neither sure nor hopeless; long stretches of equal iterations are shortened.
    Where messages between two ranks share links, there may be several steady states, some of which
    no real run stays in. So there messages vary by a tenth, in 120 iterations.
    `votes` and ValueError as of `simulate`. Where they are the outcomes of a run, all of its
    iterations count after the first `skip`.
    """
    ranks = ranks or Ranks()
    replayed = max((len(v) for v in (votes or {}).values() if isinstance(v, Sequence)), default=0)
    if replayed and iterations is None:
        iterations = replayed
    whole = Short(plan, plan, {}, {}, (), ((0, 0),))
    short = shorten(plan) if iterations is None else whole
    found, cycle = _settle(short, profile, ranks, iterations, seed, votes or {})
    if replayed:
        cycle, here = None, _after(short.plan, skip, len(found.ends_s))
    else:
        here = cycle or _second_half(short.plan, len(found.ends_s))
    window = range(short.number(here.start), short.number(here.stop))
    iteration_s = _seconds(found, here, short, len(window))
    busy_s = _mean_over_lines(found, here, short, len(window), _busy_s)
    waited_s = found.waited_s[here.start : here.stop].mean(axis=1).tolist()
    weights = map(short.weight, here)
    return Prediction(
        strategy=strategy or plan.strategy,
        iteration_s=iteration_s,
        bound_s=plan.bound_s,
        exposed_s=sum(s * w for s, w in zip(waited_s, weights, strict=True)) / len(window),
        idle_s={name: max(iteration_s - busy, 0.0) for name, busy in busy_s.items()},
        busy_s=busy_s,
        bytes_per_iteration=_mean_over_lines(found, here, short, len(window), _bytes),
        window=window,
        steady=cycle is not None and all(_sampled(short, found, cycle)),
        plan=plan,
        _traced=lambda: _trace(found, short),
    )


def within_bound(
    prediction: Prediction, profile: Profile, ranks: Ranks | None = None
) -> Prediction:
    """The prediction, at least its bound if compute varies: the bound holds for the expectation,
    and a finite sample of jitter may have a mean below 1. The bound must be of this profile."""
    bound_s, ranks = prediction.bound_s, ranks or Ranks()
    if bound_s is None or ranks.scale or ranks.link_rates or not any(ranks.jitters(profile)):
        return prediction
    return replace(prediction, iteration_s=max(prediction.iteration_s, bound_s))


def _trace(found: Run, short: Short) -> Trace:
    last = recorded(short.plan, len(found.ends_s), None)
    if len(last) == short.plan.period:
        last = range(last.start + short.gapless - short.plan.prologue, last.stop)
    return to_trace(found, short.original, last, last, short.number)


def _settle(
    short: Short,
    profile: Profile,
    ranks: Ranks,
    iterations: int | None,
    seed: int,
    votes: Votes,
) -> tuple[Run, range | None]:
    """Simulate longer and longer until the timeline repeats; the last run and its cycle."""
    plan = short.plan
    used = {base_link(name) for name in plan.links}
    chance = any(ranks.jitters(profile))
    chance = chance or any(link.jitter for link in profile.links if link.name in used)
    chance = chance or any(map(_open, votes.values()))
    several = iterations is None and not plan.uniform and bool(coupled(plan, profile))
    chance = chance or several
    fixed = iterations is not None or chance
    if iterations is None:
        # A cycle shows in two periods, if these hold all that is still under way.
        periods = 2 if plan.period >= 2 + max(_lags(plan)) else 4
        least = RANDOM_ITERATIONS if chance else periods * plan.period
        if several:
            least = SHARED_ITERATIONS
        iterations = plan.prologue + plan.period * -(-least // plan.period)
    while True:
        found = run(
            plan,
            profile,
            ranks,
            iterations=iterations,
            seed=seed,
            votes=votes,
            repeats=short.repeats,
            spread=SHARED_SPREAD if several else 0.0,
        )
        cycle = None if chance else _cycle(short, found)
        repeated = iterations - plan.prologue
        if cycle or fixed or 2 * repeated > MOST_ITERATIONS:
            return found, cycle
        iterations += repeated


def _open(vote: float | Sequence[bool]) -> bool:
    """Whether iterations differ by a vote."""
    return isinstance(vote, Sequence) or 0 < vote < 1


def _lags(plan: Plan) -> Iterator[int]:
    yield 0
    yield from (t.before.lag for t in plan.transfers)
    yield from (apply.at.lag for apply in plan.applies)
    yield from (vote.due.lag for vote in plan.votes)


def _cycle(short: Short, found: Run) -> range | None:
    """The last iterations that repeat those before, up to a constant shift in time."""
    plan, depth = short.plan, _depth(found)
    last = recorded(plan, len(found.ends_s), None).stop
    for periods in range(1, LONGEST_CYCLE + 1):
        first = last - periods * plan.period
        if first - depth < plan.prologue:
            return None
        if _alike(found, first, last, depth):
            return range(first, last)
    return None


def _sampled(short: Short, found: Run, cycle: range) -> list[bool]:
    """Whether the timeline repeats within every sample."""
    stops = [
        iteration
        for iteration in range(cycle.start + 1, cycle.stop + 1)
        if short.plan.phase(iteration - 1) + 1 in short.samples
    ]
    return [_alike(found, stop - SAMPLE, stop, _depth(found)) for stop in stops]


def _depth(found: Run) -> int:
    return 2 + max(program.lag for program in found.programs)


def _alike(found: Run, first: int, last: int, depth: int) -> bool:
    """Whether the timeline stands at both iterations as it does at the other."""
    then, now = _state(found, first, depth), _state(found, last, depth)
    span_s = float(found.ends_s[last - 1].max() - found.ends_s[first - 1].max())
    tolerance_s = _SAME * span_s / (last - first)
    return len(then) == len(now) and np.allclose(then, now, rtol=0, atol=tolerance_s)


def _state(found: Run, iteration: int, depth: int) -> NDArray[np.float64]:
    """Everything before an iteration that later ones depend on, relative to its start."""
    past = range(iteration - depth, iteration)
    ranks_s = found.ends_s[iteration - 1]
    messages_s = [line.ends_of(past) for lines in found.lines.values() for line in lines]
    return np.concatenate([ranks_s, *messages_s]) - ranks_s.max()


def _second_half(plan: Plan, iterations: int) -> range:
    """Whole periods of the second half; everything if there is no whole period."""
    periods = max(iterations - plan.prologue, 0) // plan.period
    if not periods:
        return range(iterations)
    stop = plan.prologue + periods * plan.period
    return range(stop - (periods + 1) // 2 * plan.period, stop)


def _after(plan: Plan, skip: int, iterations: int) -> range:
    """Whole periods after the first iterations; everything if there is none."""
    start = max(skip, plan.prologue)
    whole = (iterations - start) // plan.period * plan.period
    return range(start, start + whole) if whole > 0 else range(iterations)


def _seconds(found: Run, here: range, short: Short, count: int) -> float:
    """Seconds per iteration, the slowest rank's end counting."""
    ends_s = [0.0, *found.ends_s[max(here.start - 1, 0) : here.stop].max(axis=1).tolist()]
    ends_s = ends_s[bool(here.start) :]
    total_s = ends_s[-1] - ends_s[0]
    if short.weights:
        more = [short.weight(iteration) - 1 for iteration in here]
        total_s += sum(m * (z - a) for m, a, z in zip(more, ends_s, ends_s[1:], strict=False))
    return total_s / count


def _mean_over_lines(
    found: Run, here: range, short: Short, count: int, amount: Callable[[Run, str, int, int], float]
) -> dict[str, float]:
    """Per link and iteration, mean over ranks: an amount of a link, a row and an iteration."""
    return {
        link: fmean(
            sum(amount(found, link, row, iteration) * short.weight(iteration) for iteration in here)
            for row in range(len(lines))
        )
        / count
        for link, lines in found.lines.items()
    }


def _busy_s(found: Run, link: str, row: int, iteration: int) -> float:
    return found.lines[link][row].busy_s(iteration)


def _bytes(found: Run, link: str, row: int, iteration: int) -> float:
    return found.programs[row].sent_bytes(link, iteration)
