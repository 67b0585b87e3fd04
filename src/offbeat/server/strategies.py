"""Base class of strategies with a parameter server, and settings of the servers."""

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
class ServerSettings:
    """Settings of the servers.

    `silent_s`: seconds without a frame after which a server removes a worker. `apply`: the user's
    optimizer steps with the average gradient of a clock ("clock"), or with each push ("push").
    `snapshot`: directory of the snapshots, or None. `snapshot_every`: clocks between snapshots.
    """

    silent_s: float
    apply: Literal["clock", "push"] = "clock"
    snapshot: str | None = None
    snapshot_every: int = 100


class ServedStrategy(Strategy):
    """Base class of strategies whose workers are not synchronous, so that no plan describes them.

    Subclasses define `server_settings` and `open_worker`.
    """

    synchronous: ClassVar[bool] = False
    needs: ClassVar[Needs] = Needs(
        profile=False, servers=True, one_optimizer=True, no_checkpoint=NO_CHECKPOINT
    )

    @property
    @abstractmethod
    def server_settings(self) -> ServerSettings:
        """Settings of the servers."""

    def iterations_at(self, clock: int) -> int:
        """Return the number of iterations before a clock."""
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
    """Raise ValueError unless `silent_s` is positive and finite."""
    if not isinstance(silent_s, (int, float)) or not 0 < silent_s < math.inf:
        raise ValueError(f"silent_s ({silent_s!r}) must be a number of seconds above 0")
