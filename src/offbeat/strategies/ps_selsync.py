"""SelSync over parameter servers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from offbeat.profile import Profile
from offbeat.strategies.selsync import SelSync
from offbeat.strategies.served import Duty, Served, require_silence

if TYPE_CHECKING:
    from offbeat.plan import Plan
    from offbeat.runtime.served_session import ServedSession, Worker
    from offbeat.sim.prediction import Conditions, Prediction


@dataclass(frozen=True)
class PSSelSync(Served):
    """Selective synchronization over parameter servers; it computes what `SelSync` computes.

    Every worker steps with its own optimizer. If the gradient of any worker has changed by `delta`
    all workers push and pull: with `aggregate="parameters"` what their steps have led to, of which
    the servers keep the mean; with "gradients" before the step, which then uses the mean. In other
    iterations only the vote goes over the network.
    """

    delta: float = 0.3
    """All synchronize if the gradient of any worker has changed by so much."""
    window: int = 25
    """Iterations over which is smoothed."""
    smooth: Literal["norm", "change"] = "norm"
    """Whether norms or their changes are smoothed."""
    aggregate: Literal["parameters", "gradients"] = "parameters"
    """What servers keep the mean of: what steps have led to, or gradients before the step."""
    silent_s: float = 30.0
    """A worker that is silent for so many seconds counts no more, and cannot come back."""

    name: ClassVar[str] = "ps-selsync"
    votes: ClassVar[tuple[str, ...]] = ("sync",)
    citation: ClassVar[str] = SelSync.citation

    def __post_init__(self) -> None:
        super().__post_init__()
        SelSync(self.delta, self.window, self.smooth, self.aggregate)  # it says what cannot be
        require_silence(self.silent_s)

    @property
    def duty(self) -> Duty:
        return Duty(self.silent_s, keeps=self.aggregate, returns=False)

    def bound_s(self, profile: Profile) -> float:
        """`F + B` and the update with what the loop does around them, of the slowest rank. With
        delta=0 its parameters also leave in every iteration, after backward."""
        from offbeat.sim.served import server_of

        slowest = profile.slowest()
        compute_s = slowest.other_s + slowest.forward_s + slowest.backward_s + slowest.update_s
        if self.delta > 0:
            return compute_s
        server = server_of(profile, 1)
        return compute_s + server.size_bytes / server.rate

    def open_worker(self, worker: Worker) -> ServedSession:
        from offbeat.runtime.ps_selsync_session import PSSelSyncSession

        return PSSelSyncSession(worker, self, len(worker.ranks.workers))

    def predict(
        self, profile: Profile, conditions: Conditions, ran: Plan | None = None
    ) -> Prediction:
        from offbeat.sim.selective import predict_selective

        return predict_selective(
            self,
            profile,
            servers=conditions.servers,
            iterations=conditions.iterations,
            seed=conditions.seed,
            ranks=conditions.ranks,
            votes=conditions.votes,
        )
