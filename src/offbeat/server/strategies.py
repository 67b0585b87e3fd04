"""Strategies with a parameter server: SSP and PS-BSP."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Literal

from offbeat.core.plan import Buffer
from offbeat.core.profile import Profile
from offbeat.core.strategy.interface import Needs, Strategy, require_count

if TYPE_CHECKING:
    from offbeat.core.plan import Plan
    from offbeat.core.runtime.session import Session
    from offbeat.core.runtime.training_job import TrainingJob
    from offbeat.core.sim.prediction import Conditions, Prediction

NO_CHECKPOINT = (
    "offbeat.save and offbeat.load are not for strategies with servers, as the newest parameters "
    "and their optimizer are there; let servers save their part (SSP(snapshot=DIRECTORY)), or save "
    "model.state_dict() on rank 0 after model.consolidate(), and load it before offbeat.prepare"
)


@dataclass(frozen=True)
class SSP(Strategy):
    """Stale-synchronous parallel: a worker may be at most `s` clocks ahead of the slowest one.

    Dedicated servers hold the parameters and step them with the user's optimizer. Workers push
    gradients and pull parameters in the background. A worker's clock is the number of its pushes so
    far. SSP with `s=0` and `apply="clock"` is BSP over a server.
    """

    s: int = 2
    """Largest number of clocks by which a worker may be ahead of the slowest; 0: synchronous."""
    apply: Literal["clock", "push"] = "clock"
    """`clock`: servers step with the average gradient of a clock once every worker has pushed it.
    `push`: servers step with each push, with the learning rate divided by the number of workers."""
    accumulate: int = 1
    """Iterations per clock. The worker averages their gradients before the push."""
    silent_s: float = 30.0
    """Servers stop waiting for a worker from which no frame has come for `silent_s` seconds."""
    snapshot: str | None = None
    """Directory in which each server saves its parameters and optimizer state. A job resumes from
    the newest snapshot that all servers have. None: servers save nothing."""
    snapshot_every: int = 100
    """Clocks between two snapshots."""

    name: ClassVar[str] = "ssp"
    synchronous: ClassVar[bool] = False
    unadvised: ClassVar[str] = "it needs further machines as servers"
    needs: ClassVar[Needs] = Needs(servers=True, one_optimizer=True, no_checkpoint=NO_CHECKPOINT)
    citation: ClassVar[str] = (
        "Ho et al., More effective distributed ML via a stale synchronous parallel parameter "
        "server, NIPS 2013; servers: Li et al., OSDI 2014"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        require_count("s", self.s, least=0, remedy="0 is synchronous")
        require_count("accumulate", self.accumulate)
        require_count("snapshot_every", self.snapshot_every)
        if not isinstance(self.silent_s, (int, float)) or not 0 < self.silent_s < math.inf:
            raise ValueError(f"silent_s ({self.silent_s!r}) must be a number of seconds above 0")

    @property
    def applies_late(self) -> bool:
        return self.s > 0 or self.apply == "push"

    def describe_change(self, plan: Plan | None) -> str | None:
        if not self.applies_late:
            return None
        return f"late: parameters lack gradients of up to {self.s} clocks"

    def extra_buffers(self, profile: Profile, plan: Plan | None) -> Sequence[Buffer]:
        """Return the copies on the host that a worker pushes and pulls."""
        return [Buffer(name, kind="grad") for name in ("outgoing", "incoming")]

    def iterations_at(self, clock: int) -> int:
        """Return the number of iterations before a clock.

        Args:
            clock: number of a push of a worker.
        """
        return clock * self.accumulate

    def bound_s(self, profile: Profile) -> float:
        """Return the seconds per iteration of the slowest rank without any communication.

        They include forward, backward and the rest of the loop, but not the optimizer's step, which
        runs on the servers. No worker is faster for long, as `s` bounds the difference of clocks.
        """
        slowest = profile.slowest()
        return slowest.other_s + slowest.forward_s + slowest.backward_s

    def open(self, job: TrainingJob) -> Session:
        from offbeat.server.session import open_served_session

        return open_served_session(self, job)

    def predict(
        self, profile: Profile, conditions: Conditions, ran: Plan | None = None
    ) -> Prediction:
        from offbeat.server.simulation import predict_served

        if conditions.votes:
            raise ValueError(f"votes ({conditions.votes}) must be left out: {self} has none")
        return predict_served(self, profile, conditions)


@dataclass(frozen=True)
class PSBSP(SSP):
    """Bulk-synchronous training over parameter servers: `SSP(s=0)`.

    Every worker pushes its gradients. The servers step with the average once all workers have
    pushed. Every worker pulls the parameters before its next iteration. All settings of SSP but `s`
    and `apply` remain.
    """

    s: int = field(default=0, init=False)
    apply: Literal["clock", "push"] = field(default="clock", init=False)

    name: ClassVar[str] = "ps-bsp"
    synchronous: ClassVar[bool] = True
    citation: ClassVar[str] = (
        "Li et al., Scaling distributed machine learning with the parameter server, OSDI 2014"
    )
