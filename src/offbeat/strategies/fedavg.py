"""FedAvg: rounds of local steps, after which some of the workers are averaged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import ClassVar

from offbeat.numerics.select import drawn
from offbeat.plan import Apply, Moment, Phases, Plan, local, transfer
from offbeat.profile import Profile
from offbeat.strategies.base import StatePolicy, Strategy, periodic_bound_s, require_count
from offbeat.strategies.partial_sync import kinds_of
from offbeat.testing.equations import Equations, federated

LOCAL_STEPS = 5
STEP, END = Moment("step"), Moment("end")


@dataclass(frozen=True)
class FedAvg(Strategy):
    """Average a fraction of the workers after every round of local steps; all receive the average.

    `fraction` (C) of the workers are drawn anew in each round, by `seed`, and weighted by their
    `samples`: a number per worker, on the command line with slashes between (`100/250`); by default
    all count the same. A round is `local_steps` long, or `epoch_share` (E) of an epoch of
    `steps_per_epoch` iterations (.25: four rounds per epoch); by default 5 steps. `state` as in
    `LocalSGD`; averaged, it is weighted alike.

    All workers take the same number of steps in a round, those that are not drawn included; and
    all take part in the all-reduce, so C changes what is learnt and not what is sent.
    """

    fraction: float = 1.0
    local_steps: int | None = None
    epoch_share: float | None = None
    steps_per_epoch: int | None = None
    samples: tuple[float, ...] | None = None
    seed: int = 0
    state: StatePolicy = "local"

    name: ClassVar[str] = "fedavg"
    synchronous: ClassVar[bool] = False
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
        self._require_one_length()
        require_count("seed", self.seed, least=0)
        object.__setattr__(self, "samples", _numbers(self.samples))

    def _require_one_length(self) -> None:
        if self.local_steps is not None:
            require_count("local_steps", self.local_steps)
        if self.steps_per_epoch is not None:
            require_count("steps_per_epoch", self.steps_per_epoch)
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
    def round_steps(self) -> int:
        """Local steps in a round."""
        if self.epoch_share is None:
            return self.local_steps or LOCAL_STEPS
        assert self.steps_per_epoch is not None
        return max(1, round(self.epoch_share * self.steps_per_epoch))

    def counts(self, workers: int) -> tuple[float, ...]:
        """Samples of every worker; ValueError unless there is one number for each."""
        counts = self.samples or (1.0,) * workers
        if len(counts) != workers:
            raise ValueError(
                f"samples ({len(counts)} numbers) must have one number per worker ({workers})"
            )
        return counts

    def schedule(self, profile: Profile) -> Plan:
        everything, steps = range(len(profile.buckets)), self.round_steps
        samples, last = self.counts(profile.world_size), Phases([steps - 1])
        kinds = kinds_of(self.state)
        applies = [local(len(everything), STEP, range(steps))]
        if self.fraction < 1 or len(set(samples)) > 1:
            shared = {"samples": samples, "fraction": float(self.fraction), "seed": self.seed}
            for kind in kinds:
                args = tuple({"buffer": kind, **shared}.items())
                applies.append(Apply("select", everything, STEP, last, args=args))
        if self.state == "reset":
            applies.append(Apply("reset", everything, END, last))
        transfers = [
            transfer(
                kind,
                everything,
                after=STEP,
                before=END,
                phases=last,
                link=profile.default_link.name,
            )
            for kind in kinds
        ]
        return Plan(self.name, len(everything), tuple(transfers), tuple(applies), period=steps)

    def equations(self, plan: Plan) -> Equations:
        rules = [apply for apply in plan.applies if apply.rule == "select"]
        if not rules:
            return federated(self.round_steps, lambda _: None, self.state)
        samples = rules[0].arg("samples")
        return federated(
            self.round_steps,
            lambda done: drawn(samples, self.fraction, self.seed, done),
            self.state,
        )

    def bound_s(self, profile: Profile) -> float:
        return periodic_bound_s(profile, self.round_steps, fused=True)


def _numbers(samples: Sequence[float] | None) -> tuple[float, ...] | None:
    """Sample counts as a tuple, whatever JSON has made of it; ValueError unless above 0."""
    if samples is None:
        return None
    numbers = tuple(map(float, samples))
    if not numbers or not all(0 < number < inf for number in numbers):
        raise ValueError(
            f"samples ({samples}) must be numbers above 0, one per worker, such as (100, 250)"
        )
    return numbers
