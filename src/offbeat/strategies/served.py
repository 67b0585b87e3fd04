"""Served: what strategies with a parameter server have in common."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from offbeat.plan import Plan
from offbeat.profile import Profile
from offbeat.strategies.base import Strategy

if TYPE_CHECKING:
    from offbeat.sim.outcomes import Votes
    from offbeat.sim.prediction import Prediction
    from offbeat.sim.ranks import Ranks


@dataclass(frozen=True)
class Duty:
    """What servers do for a method.

    `apply`: "clock", the mean of what all workers have pushed for a clock, or "push", each push at
    once. The user's optimizer steps by it, unless the servers only keep it: `keeps` says what
    it is then. `returns`: whether a worker that was silent for `silent_s` may come back.
    """

    silent_s: float
    apply: Literal["clock", "push"] = "clock"
    keeps: Literal["parameters", "gradients"] | None = None
    returns: bool = True
    snapshot: str | None = None
    snapshot_every: int = 100


class Served(Strategy):
    """A method whose workers go at their own pace: no plan can say what they do."""

    planned: ClassVar[bool] = False
    synchronous: ClassVar[bool] = False
    votes: ClassVar[tuple[str, ...]] = ()  # names of what workers decide together

    @property
    @abstractmethod
    def duty(self) -> Duty:
        """What its servers do."""

    def iterations_at(self, clock: int) -> int:
        """Return the number of iterations that a worker has made when it reaches a clock."""
        return clock

    def schedule(self, profile: Profile) -> Plan:
        raise ValueError(
            f"{self.name} has no plan: its workers go at their own pace; `offbeat simulate` "
            "predicts it"
        )

    @abstractmethod
    def predict(
        self,
        profile: Profile,
        *,
        servers: int = 1,
        iterations: int | None = None,
        seed: int = 0,
        ranks: Ranks | None = None,
        votes: Votes | None = None,
    ) -> Prediction:
        """Prediction with so many servers; `votes` as of `simulate`."""


def require_silence(silent_s: float) -> None:
    """ValueError unless `silent_s` is a time."""
    if not isinstance(silent_s, (int, float)) or not 0 < silent_s < math.inf:
        raise ValueError(f"silent_s ({silent_s!r}) must be a number of seconds above 0")
