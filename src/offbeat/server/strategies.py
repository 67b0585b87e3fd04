"""Served: what strategies with a parameter server have in common."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from offbeat.core.plan import Plan
from offbeat.core.profile import Profile
from offbeat.core.strategy.interface import Needs, Strategy

if TYPE_CHECKING:
    from offbeat.core.runtime.prepared import Session
    from offbeat.core.runtime.training_job import TrainingJob
    from offbeat.server.session import ServedSession, Worker

NO_CHECKPOINT = (
    "offbeat.save and offbeat.load are not for strategies with servers, as the newest parameters "
    "and their optimizer are there; let servers save their part (SSP(snapshot=DIRECTORY)), or save "
    "model.state_dict() on rank 0 after model.consolidate(), and load it before offbeat.prepare"
)


@dataclass(frozen=True)
class Duty:
    """What servers do for a method.

    `apply`: "clock", the mean of what all workers have pushed for a clock, or "push", each push at
    once. The user's optimizer steps by it.
    """

    silent_s: float
    apply: Literal["clock", "push"] = "clock"
    snapshot: str | None = None
    snapshot_every: int = 100


class Served(Strategy):
    """A method whose workers go at their own pace: no plan can say what they do."""

    synchronous: ClassVar[bool] = False
    needs: ClassVar[Needs] = Needs(
        profile=False, servers=True, one_optimizer=True, no_checkpoint=NO_CHECKPOINT
    )

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

    def open(self, job: TrainingJob) -> Session:
        from offbeat.server.session import open_served_session

        return open_served_session(self, job)

    @abstractmethod
    def open_worker(self, worker: Worker) -> ServedSession:
        """Return the session of a worker."""

    def vote_names(self, profile: Profile) -> Sequence[str]:
        return ()


def require_silence(silent_s: float) -> None:
    """ValueError unless `silent_s` is a time."""
    if not isinstance(silent_s, (int, float)) or not 0 < silent_s < math.inf:
        raise ValueError(f"silent_s ({silent_s!r}) must be a number of seconds above 0")
