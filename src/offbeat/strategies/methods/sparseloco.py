"""SparseLoCo: rare averages of the largest elements of each chunk, with an error that decays."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from offbeat.core.codecs import codec
from offbeat.core.plan import Apply, Moment, Plan, Wire
from offbeat.core.profile import Profile
from offbeat.core.rules.vocabulary import Context, Setting, rule
from offbeat.core.strategy.interface import Planned, Strategy, backward_bound_s, require_count
from offbeat.strategies.averaging import EVERY_ITERATION
from offbeat.strategies.compressible import encoded_message_s, with_wire
from offbeat.strategies.equations import Array, Equations, World
from offbeat.strategies.local_sgd import LocalSGD
from offbeat.strategies.outer_optimizer import OuterSGD, is_real, with_outer

CODEC = "topk2"
PUBLISHED_PERIODS = (15, 30, 50, 100, 250)  # of the paper's experiments; advice compares them
STEP = Moment("step")


@rule(
    conserves=False,
    buffer=Setting("buffer"),
    share=Setting("number", least=0.0, most=1.0),
)
def fade(context: Context, apply: Apply) -> None:
    """Compute `buffer *= share`, without the absence counters behind gradients.

    Source: Sarfi et al., SparseLoCo, 2025, Algorithm 1, where `share` is the decay of the error.
    """
    context.scale(apply.arg("buffer"), apply.buckets, apply.arg("share"))


@dataclass(frozen=True)
class SparseLoCo(Planned):
    """Local steps, then an average of the largest changes of each chunk, in two bits each.

    The error of a worker's message is added to its next message, smaller by a factor. So it is a
    momentum of the changes that were not sent:

        e_k = decay e_k + (common - w_k);  s_k = codec(e_k);  e_k -= s_k
        common -= lr mean_k(s_k);  w_k = common

    The codec is `topk2`: the share `fraction` of each chunk of 4096 elements of a message. Readings
    of the paper: chunks follow the memory of the message, not the axes of each tensor; a value of
    two bits is a sign and one of two magnitudes of its chunk. Running statistics are averaged.
    """

    period: int = 30
    """Local steps between two averages."""
    fraction: float = 0.0156
    """Share of the elements of each chunk that is sent; .0156 is 64 of 4096."""
    decay: float = 0.95
    """Factor of the error before the next change is added to it."""
    lr: float = 1.0
    """Learning rate of the outer step; with a value other than 1 two more copies of the parameters
    are stored."""

    name: ClassVar[str] = "sparseloco"
    synchronous: ClassVar[bool] = False
    citation: ClassVar[str] = (
        "Sarfi, Thérien, Lidin and Belilovsky, Communication efficient LLM pre-training with "
        "SparseLoCo, arXiv 2508.15706, 2025, Algorithm 1"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        require_count("period", self.period, remedy=EVERY_ITERATION)
        if not is_real(self.fraction) or not 0 < self.fraction <= 1:
            raise ValueError(
                f"fraction ({self.fraction!r}) must lie above 0 and be at most 1; .0156 sends 64 "
                "of 4096 elements"
            )
        if not is_real(self.decay) or not 0 <= self.decay <= 1:
            raise ValueError(
                f"decay ({self.decay!r}) must be at least 0 and at most 1; 1 keeps all errors"
            )
        if not is_real(self.lr) or not 0 < self.lr < float("inf"):
            raise ValueError(f"lr ({self.lr!r}) must be a number above 0; 1 takes the average")

    @classmethod
    def suggestions(cls, profile: Profile, max_staleness: int) -> Iterable[Strategy]:
        return [cls(period) for period in PUBLISHED_PERIODS if period <= max_staleness + 1]

    @property
    def is_lossy(self) -> bool:
        return True

    @property
    def _wire(self) -> Wire:
        return Wire(CODEC, (("fraction", float(self.fraction)),))

    def schedule(self, profile: Profile) -> Plan:
        plan = replace(LocalSGD(self.period).schedule(profile), strategy=self.name)
        if self.lr != 1:
            plan = with_outer(plan, OuterSGD(self.lr, 0.0), profile)
        return plan if profile.world_size == 1 else self._encode_averages(plan, profile)

    def _encode_averages(self, plan: Plan, profile: Profile) -> Plan:
        """Return the plan with encoded averages, and with errors that decay before."""
        plan = with_wire(plan, self._wire, profile)
        fades = tuple(
            Apply(
                fade.__name__,
                t.payload.buckets,
                STEP,
                t.phases,
                args=(("buffer", t.wire.error), ("share", float(self.decay))),
            )
            for t in plan.transfers
            if t.wire is not None
        )
        return replace(plan, applies=(*fades, *plan.applies))

    def equations(self, plan: Plan) -> Equations:
        used, kept = codec(CODEC, dict(self._wire.args)), list[Any]()

        def average(w: Array, common: Array, errors: Array) -> Array:
            given = self.decay * errors + (w - common)
            sent = np.array([used.round_trip(row) for row in given])
            errors[...] = given - sent
            common[...] = common + self.lr * sent.mean(axis=0)
            return common

        def advance(world: World, iteration: int) -> None:
            if not kept:
                kept.extend((world.keep(), 0 * world.keep()))
            world.gradients(iteration)
            world.step()
            if (iteration + 1) % self.period == 0:
                for t in plan.transfers:
                    world.change(t.payload, average, *kept)
            world.end()

        return advance

    def bound_s(self, profile: Profile) -> float:
        """Return `F + max(B, C / period)` with C of the encoded message, as no message overlaps a
        forward."""
        message_s = encoded_message_s(profile, "param", self._wire)
        return backward_bound_s(profile, message_s / self.period)
