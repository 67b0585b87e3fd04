"""FedAvg: rounds of local steps, each followed by an average of some workers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import inf
from typing import ClassVar

from offbeat.core.plan import Apply, Fact, Moment, Phases, Plan, local
from offbeat.core.profile import Profile
from offbeat.core.rules.select import draw_samples
from offbeat.core.strategy.interface import periodic_bound_s, require_count
from offbeat.strategies.averaging import kinds_of
from offbeat.strategies.bsp import averages
from offbeat.strategies.compressible import Wired
from offbeat.strategies.equations import Equations, StatePolicy, World, average_piece

STEP, END = Moment("step"), Moment("end")


@dataclass(frozen=True)
class FedAvg(Wired):
    """Average a fraction of the workers after every round of local steps; all receive the average.

    Each round draws its workers at random and weights them by their samples. Steps can differ
    between workers whose data differ in size. All ranks run the same number of iterations per
    round, that of the worker with the most steps. A worker that has done its steps discards its
    gradients for the rest of the round. Every worker takes part in the all-reduce, so `fraction`
    changes the average but not the bytes sent.
    """

    fraction: float = 1.0
    """C: share of the workers that is drawn for each round."""
    local_steps: int | tuple[int, ...] = 5
    """Steps of a round: one number, or one per worker (`2/5`). For rounds of a share E of an epoch,
    as in the paper, it is E times the iterations of an epoch."""
    samples: tuple[float, ...] | None = None
    """Weight of each worker in the average (`100/250`); None: equal weights."""
    seed: int = 0
    """Seed of the random draws of workers."""
    state: StatePolicy = "local"
    """Treatment of optimizer state at an average, as in `LocalSGD`; `averaged` state has the same
    weights as the parameters."""

    name: ClassVar[str] = "fedavg"
    synchronous: ClassVar[bool] = False
    unadvised: ClassVar[str] = "its steps depend on the data of each worker"
    citation: ClassVar[str] = (
        "McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized "
        "Data, AISTATS 2017, Algorithm 1"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.fraction <= 1:
            raise ValueError(
                f"fraction ({self.fraction}) must lie above 0 and be at most 1; 1 averages all "
                "workers"
            )
        if isinstance(self.local_steps, list):  # from JSON
            object.__setattr__(self, "local_steps", tuple(self.local_steps))
        if self.local_steps == ():
            raise ValueError("local_steps (()) must have one number per worker, such as (2, 5)")
        for count in self._all_steps:
            require_count("local_steps", count)
        require_count("seed", self.seed, least=0)
        object.__setattr__(self, "samples", _validate_samples(self.samples))

    @property
    def _all_steps(self) -> tuple[int, ...]:
        """Numbers of steps; a round has as many iterations as the largest."""
        return self.local_steps if isinstance(self.local_steps, tuple) else (self.local_steps,)

    def counts(self, workers: int) -> tuple[float, ...]:
        """Return the samples of every worker.

        Args:
            workers: number of workers.

        Raises:
            ValueError: `samples` has another number of entries.
        """
        counts = self.samples or (1.0,) * workers
        _require_one_each("samples", counts, workers)
        return counts

    def schedule(self, profile: Profile) -> Plan:
        everything, workers = range(len(profile.buckets)), profile.world_size
        samples, last = self.counts(workers), Phases([max(self._all_steps) - 1])
        kinds, steps = kinds_of(self.state), self.steps(workers)
        uneven = len(set(steps)) > 1
        applies: list[Apply] = []
        for start, stop in pairwise([0, *sorted(set(steps))]):
            applies += _updates(everything, range(start, stop), steps)
        if workers > 1 and (self.fraction < 1 or len(set(samples)) > 1 or uneven):
            shared = {"samples": samples, "fraction": float(self.fraction), "seed": self.seed}
            for kind in kinds:
                args = tuple({"buffer": kind, **shared}.items())
                applies.append(Apply("select", everything, STEP, last, args=args))
        if self.state == "reset":
            applies.append(Apply("reset", everything, END, last))
        transfers = averages(profile, kinds, everything, after=STEP, before=END, phases=last)
        facts = [Fact("local_steps", list(steps), "by worker, in a round; then it rests")]
        return Plan(
            self.name,
            len(everything),
            tuple(transfers),
            tuple(applies),
            period=max(self._all_steps),
            facts=tuple(facts if uneven else ()),
        )

    def steps(self, workers: int) -> tuple[int, ...]:
        """Return the local steps of every worker per round.

        Args:
            workers: number of workers.

        Raises:
            ValueError: the setting has another number of entries.
        """
        if not isinstance(self.local_steps, tuple):
            return (self.local_steps,) * workers
        _require_one_each("local_steps", self.local_steps, workers)
        return self.local_steps

    def equations(self, plan: Plan) -> Equations:
        rules = [apply for apply in plan.applies if apply.arg("samples") is not None]
        if not rules:
            return federated(self.local_steps, lambda _: None, self.state)
        samples = rules[0].arg("samples")
        return federated(
            self.local_steps,
            lambda done: draw_samples(samples, self.fraction, self.seed, done),
            self.state,
        )

    def bound_s(self, profile: Profile) -> float:
        return periodic_bound_s(profile, max(self._all_steps), fused=True)


def _updates(everything: range, phases: range, steps: Sequence[int]) -> list[Apply]:
    """Return the updates of the workers with steps left in `phases`; the others clear their
    gradients."""
    update = local(len(everything), STEP, phases)
    left = tuple(rank for rank, count in enumerate(steps) if count >= phases.stop)
    done = tuple(rank for rank in range(len(steps)) if rank not in left)
    if not done:
        return [update]
    drop = Apply("clear", everything, STEP, Phases(phases), done, args=(("buffer", "grad"),))
    return [replace(update, ranks=left), drop]


def _require_one_each(name: str, numbers: Sequence[float], workers: int) -> None:
    if len(numbers) != workers:
        raise ValueError(
            f"{name} ({len(numbers)} numbers) must have one number per worker ({workers})"
        )


def _validate_samples(samples: Sequence[float] | None) -> tuple[float, ...] | None:
    """Return sample counts as a tuple; raise ValueError unless all are finite and above 0."""
    if samples is None:
        return None
    numbers = tuple(map(float, samples))
    if not numbers or not all(0 < number < inf for number in numbers):
        raise ValueError(
            f"samples ({samples}) must be numbers above 0, one per worker, such as (100, 250)"
        )
    return numbers


def federated(
    local_steps: int | Sequence[int],
    weights: Callable[[int], Sequence[float] | None],
    state: StatePolicy = "local",
) -> Equations:
    """Return the equations of federated averaging: rounds of local steps, then a weighted average.

    After a round, `w = sum_k(n_k w_k) / sum_k(n_k)` on all replicas.

    Args:
        local_steps: local steps per round, for all replicas or one number for each. A replica
            with fewer steps waits for the others.
        weights: function of the number of previous rounds that returns the weights n of the
            replicas; None for equal weights.
        state: treatment of the optimizer's state at an average: "local", "averaged" or "reset".
    """
    each = None if isinstance(local_steps, int) else local_steps
    length = local_steps if isinstance(local_steps, int) else max(local_steps)

    def advance(world: World, iteration: int) -> None:
        world.gradients(iteration)
        place = iteration % length
        world.step(None if each is None else [k for k, steps in enumerate(each) if steps > place])
        if place + 1 == length:
            average_piece(world, None, state, weights(iteration // length))
        world.end()

    return advance
