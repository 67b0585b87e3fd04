"""Gossip: what strategies without a plan, without servers and without waiting have in common."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from offbeat.core.codecs import BF16, FP16, Codec, Int4, Int8
from offbeat.core.plan import Plan
from offbeat.core.profile import Profile
from offbeat.core.strategy.interface import Needs, Strategy
from offbeat.strategies.compressible import codec_of

if TYPE_CHECKING:
    from offbeat.core.runtime.prepared import Session
    from offbeat.core.runtime.training_job import TrainingJob
    from offbeat.core.sim.prediction import Conditions, Prediction


FINE = BF16, FP16, Int8, Int4
"""Codecs that lose little of every number."""

AS_IN = "must be the name of one, edges as in '0-1,1-2', pairs of workers, or a graph of networkx"


@dataclass(frozen=True)
class Gossip(Strategy):
    """Neighbours in a graph average their parameters in pairs while everybody computes.

    `topology` also takes pairs of workers and graphs of networkx, which become text.
    """

    topology: str = "ring"
    """Who may exchange with whom: a name as in `offbeat graph`, edges as `0-1,1-2`, or
    `measured`."""
    rate: float = 1.0
    """Exchanges per gradient of a worker, in the mean."""
    weights: Literal["snapshot", "live"] = "snapshot"
    """Whether forward and backward see one point (`snapshot`), or exchanges change the weights at
    once (`live`)."""
    wire: str = "none"
    """What travels: parameters as they are (`none`), rounded (`bf16`; workers agree no better than
    to that precision), or codes of their change: `fp16`, `int8`, `int4`."""
    silent_s: float = 10.0
    """A neighbour that cannot be reached for so many seconds is given up."""
    on_partition: Literal["raise", "continue"] = "raise"
    """What happens if the graph falls apart: training fails, or the larger part goes on."""

    synchronous: ClassVar[bool] = False
    needs: ClassVar[Needs] = Needs(
        profile=False, allows_joining=True, survives_ranks=True, one_optimizer=True
    )
    momentum: ClassVar[bool]  # whether there is an x~
    exchange: ClassVar[str] = "after_mixing"

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("rate", "silent_s"):
            value = getattr(self, name)
            if (
                isinstance(value, bool)
                or not isinstance(value, (int, float))
                or not (0 < value < math.inf)
            ):
                raise ValueError(f"{name} ({value!r}) must be a finite number above 0")
        used = codec_of(self.wire)
        if used is not None and not isinstance(used, FINE):
            raise ValueError(
                f"wire ({self.wire!r}) must be none, {', '.join(cls.name for cls in FINE)}: gossip "
                "may amplify what coarser codes lose until workers go apart; use wire='int4'"
            )
        if not isinstance(self.topology, str):
            object.__setattr__(self, "topology", _in_words(self.topology))
        if not self.topology:
            raise ValueError(f"topology ({self.topology!r}) {AS_IN}")

    @property
    def codec(self) -> Codec | None:
        """What makes codes of changes; None: parameters travel, as they are or rounded."""
        return None if self.wire == BF16.name else codec_of(self.wire)

    def schedule(self, profile: Profile) -> Plan:
        raise ValueError(
            f"{self.name} has no plan: its workers exchange in pairs when it suits them; `offbeat "
            "graph` tells how fast they agree"
        )

    def bound_s(self, profile: Profile) -> float:
        """`F + B` and the update with what the loop does around them, of the slowest rank: nobody
        waits for anybody, so that is also what an iteration takes."""
        slowest = profile.slowest()
        return slowest.other_s + slowest.forward_s + slowest.backward_s + slowest.update_s

    def open(self, job: TrainingJob) -> Session:
        from offbeat.gossip.session import open_gossip_session

        return open_gossip_session(self, job)

    def predict(
        self, profile: Profile, conditions: Conditions, ran: Plan | None = None
    ) -> Prediction:
        """Return the prediction of the timeline; `offbeat graph` predicts how workers agree."""
        from offbeat.gossip.spread_prediction import predict_apart

        return predict_apart(
            self,
            profile,
            iterations=conditions.iterations,
            seed=conditions.seed,
            ranks=conditions.ranks,
        )

    def vote_names(self, profile: Profile) -> Sequence[str]:
        return ()


def _in_words(topology: object) -> str:
    """Pairs, or a graph's edges, as text: settings are compared and written."""
    edges = getattr(topology, "edges", topology)
    try:
        pairs = sorted((min(int(i), int(j)), max(int(i), int(j))) for i, j in edges)  # type: ignore[attr-defined]
    except (TypeError, ValueError):
        raise ValueError(f"topology ({topology!r}) {AS_IN}") from None
    return ",".join(f"{i}-{j}" for i, j in pairs)
