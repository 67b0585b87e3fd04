"""FedAvg: rounds of local steps, each followed by an average of some workers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import inf
from typing import Any, ClassVar

from offbeat.core.plan import Apply, Fact, Moment, Phases, Plan, local
from offbeat.core.profile import Profile
from offbeat.core.rules.select import draw_samples
from offbeat.core.strategy.interface import StatePolicy, periodic_bound_s, require_count
from offbeat.strategies.averaging import kinds_of
from offbeat.strategies.bsp import averages
from offbeat.strategies.compressible import Wired
from offbeat.strategies.equations import Equations, federated

LOCAL_STEPS = 5
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
    local_steps: int | tuple[int, ...] | None = None
    """Steps of a round: one number, or one per worker (`2/5`); None: 5, or derived from
    `epoch_share`."""
    epoch_share: float | None = None
    """E: length of a round as a share of an epoch, such as .25."""
    steps_per_epoch: int | tuple[int, ...] | None = None
    """Iterations of an epoch: one number, or one per worker; required with `epoch_share`."""
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
        for name in ("local_steps", "steps_per_epoch"):
            object.__setattr__(self, name, _validate_counts(name, getattr(self, name)))
        self._require_one_length()
        require_count("seed", self.seed, least=0)
        object.__setattr__(self, "samples", _validate_samples(self.samples))

    def _require_one_length(self) -> None:
        if self.epoch_share is None:
            if self.steps_per_epoch is not None:
                raise ValueError(
                    f"steps_per_epoch ({self.steps_per_epoch}) must come with epoch_share; "
                    "without it give local_steps"
                )
            return
        if not 0 < self.epoch_share < inf:
            raise ValueError(
                f"epoch_share ({self.epoch_share}) must be a number above 0; .25 makes four "
                "rounds per epoch"
            )
        if self.local_steps is not None or self.steps_per_epoch is None:
            raise ValueError(
                f"epoch_share ({self.epoch_share}) must come with steps_per_epoch and without "
                "local_steps; give the iterations of an epoch, or local_steps alone"
            )

    @property
    def round_steps(self) -> int | tuple[int, ...]:
        """Local steps of a round: one number for all workers, or one per worker."""
        if self.epoch_share is None:
            return self.local_steps or LOCAL_STEPS
        assert self.steps_per_epoch is not None
        if isinstance(self.steps_per_epoch, int):
            return max(1, round(self.epoch_share * self.steps_per_epoch))
        return tuple(max(1, round(self.epoch_share * steps)) for steps in self.steps_per_epoch)

    @property
    def _round_iterations(self) -> int:
        """Iterations of a round."""
        steps = self.round_steps
        return steps if isinstance(steps, int) else max(steps)

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
        samples, last = self.counts(workers), Phases([self._round_iterations - 1])
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
            period=self._round_iterations,
            facts=tuple(facts if uneven else ()),
        )

    def steps(self, workers: int) -> tuple[int, ...]:
        """Return the local steps of every worker per round.

        Args:
            workers: number of workers.

        Raises:
            ValueError: the setting has another number of entries.
        """
        steps = self.round_steps
        if isinstance(steps, int):
            return (steps,) * workers
        _require_one_each("steps_per_epoch" if self.epoch_share else "local_steps", steps, workers)
        return steps

    def equations(self, plan: Plan) -> Equations:
        rules = [apply for apply in plan.applies if apply.arg("samples") is not None]
        if not rules:
            return federated(self.round_steps, lambda _: None, self.state)
        samples = rules[0].arg("samples")
        return federated(
            self.round_steps,
            lambda done: draw_samples(samples, self.fraction, self.seed, done),
            self.state,
        )

    def bound_s(self, profile: Profile) -> float:
        return periodic_bound_s(profile, self._round_iterations, fused=True)


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


def _validate_counts(name: str, given: Any) -> int | tuple[int, ...] | None:
    """Return a count, or a tuple of counts from a list; raise ValueError if a count is below 1."""
    each = given if isinstance(given, (list, tuple)) else (given,)
    for count in each if given is not None else ():
        require_count(name, count)
    if isinstance(given, (list, tuple)):
        if not given:
            raise ValueError(f"{name} ({given!r}) must have one number per worker, such as (2, 5)")
        return tuple(given)
    return given


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
