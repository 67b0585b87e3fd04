"""SSP: a parameter server, and workers that may be some clocks apart."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from offbeat.core.profile import Profile
from offbeat.core.strategy.interface import require_count
from offbeat.server.strategies import Duty, Served, require_silence

if TYPE_CHECKING:
    from offbeat.core.plan import Plan
    from offbeat.core.sim.prediction import Conditions, Prediction
    from offbeat.server.session import ServedSession, Worker


@dataclass(frozen=True)
class SSP(Served):
    """Stale-synchronous parallel: a worker may be at most `s` clocks ahead of the slowest one.

    Dedicated servers hold the parameters and step them with the user's optimizer. Workers push
    gradients and pull parameters in the background. With `apply="clock"` and s=0 it is BSP over a
    server.
    """

    s: int = 2
    """Clocks by which a worker may be ahead of the slowest one; 0 is synchronous."""
    apply: Literal["clock", "push"] = "clock"
    """Servers apply the mean of a `clock` once every worker has reached it, or each `push` at once,
    with the learning rate over the number of workers."""
    accumulate: int = 1
    """Iterations of a clock, whose gradients are averaged before they are pushed."""
    silent_s: float = 30.0
    """A worker that is silent for so many seconds counts no more."""
    snapshot: str | None = None
    """Directory in which servers save their part, and from which a job begins; None: nothing is
    saved."""
    snapshot_every: int = 100
    """Clocks from one save to the next."""

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
    def duty(self) -> Duty:
        return Duty(
            self.silent_s,
            self.apply,
            snapshot=self.snapshot,
            snapshot_every=self.snapshot_every,
        )

    def bound_s(self, profile: Profile) -> float:
        """`F + B` with what the loop does around them, of the slowest rank: in the long run nobody
        is faster by more than s clocks. Servers step, and messages are hidden."""
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
