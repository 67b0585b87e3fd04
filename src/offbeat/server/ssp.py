"""Strategy SSP: stale-synchronous workers with a parameter server."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from offbeat.core.profile import Profile
from offbeat.core.strategy.interface import require_count
from offbeat.server.strategies import ServedStrategy, ServerSettings, require_silence

if TYPE_CHECKING:
    from offbeat.core.plan import Plan
    from offbeat.core.sim.prediction import Conditions, Prediction
    from offbeat.server.session import ServedSession, Worker


@dataclass(frozen=True)
class SSP(ServedStrategy):
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
    citation: ClassVar[str] = (
        "Ho et al., More effective distributed ML via a stale synchronous parallel parameter "
        "server, NIPS 2013; servers: Li et al., OSDI 2014"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        require_count("s", self.s, least=0, remedy="0 is synchronous")
        require_count("accumulate", self.accumulate)
        require_count("snapshot_every", self.snapshot_every)
        require_silence(self.silent_s)

    def iterations_at(self, clock: int) -> int:
        return clock * self.accumulate

    @property
    def server_settings(self) -> ServerSettings:
        """Return the settings that the servers receive."""
        return ServerSettings(
            self.silent_s,
            self.apply,
            snapshot=self.snapshot,
            snapshot_every=self.snapshot_every,
        )

    def bound_s(self, profile: Profile) -> float:
        """Return the seconds per iteration of the slowest rank without any communication.

        They include forward, backward and the rest of the loop, but not the optimizer's step, which
        runs on the servers. No worker is faster for long, as `s` bounds the difference of clocks.
        """
        slowest = profile.slowest()
        return slowest.other_s + slowest.forward_s + slowest.backward_s

    def open_worker(self, worker: Worker) -> ServedSession:
        from offbeat.server.ssp_session import SSPSession

        return SSPSession(worker, self)

    def predict(
        self, profile: Profile, conditions: Conditions, ran: Plan | None = None
    ) -> Prediction:
        from offbeat.server.simulation import predict_served

        if conditions.votes:
            raise ValueError(f"votes ({conditions.votes}) must be left out: {self} has none")
        return predict_served(
            self,
            profile,
            servers=conditions.servers,
            iterations=conditions.iterations,
            seed=conditions.seed,
            ranks=conditions.ranks,
        )
