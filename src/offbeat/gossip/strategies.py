"""Gossip strategies, which have no plan and no servers: AD-PSGD and A2CiD2."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from offbeat.core.codecs import BF16, FP16, Codec, Int4, Int8
from offbeat.core.plan import Buffer, Plan
from offbeat.core.profile import Profile
from offbeat.core.strategy.interface import Needs, Strategy
from offbeat.strategies.compressible import codec_of

if TYPE_CHECKING:
    from offbeat.core.runtime.session import Session
    from offbeat.core.runtime.training_job import TrainingJob
    from offbeat.core.sim.prediction import Conditions, Prediction


FINE = BF16, FP16, Int8, Int4
"""Codecs with a small error in each number; gossip may amplify larger errors."""

AS_IN = "must be the name of one, edges as in '0-1,1-2', pairs of workers, or a graph of networkx"


@dataclass(frozen=True)
class Gossip(Strategy):
    """Neighbours in a graph average their parameters in pairs while all workers compute.

    `topology` also accepts pairs of workers and networkx graphs, which are converted to text.
    """

    topology: str = "ring"
    """Graph of the workers that exchange: a name, such as `ring`, edges as `0-1,1-2`, or
    `measured`."""
    rate: float = 1.0
    """Mean number of exchanges of a worker per gradient."""
    weights: Literal["snapshot", "live"] = "snapshot"
    """Whether weights are constant during forward and backward (`snapshot`), or exchanges change
    them immediately (`live`)."""
    wire: str = "none"
    """Numbers in messages: unchanged parameters (`none`), rounded parameters (`bf16`, which limits
    the precision of the agreement), or codes of their changes (`fp16`, `int8`, `int4`)."""
    silent_s: float = 10.0
    """Seconds after which an unreachable neighbour is removed from the job."""
    on_partition: Literal["raise", "continue"] = "raise"
    """Action if the graph is partitioned: training fails (`raise`), or the larger part goes on."""

    synchronous: ClassVar[bool] = False
    unadvised: ClassVar[str] = (
        "replicas differ until the end of training, as only pairs of workers average"
    )
    needs: ClassVar[Needs] = Needs(allows_joining=True, survives_ranks=True, one_optimizer=True)
    momentum: ClassVar[bool]  # whether there is a second copy x~ of the parameters

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
            object.__setattr__(self, "topology", _topology_text(self.topology))
        if not self.topology:
            raise ValueError(f"topology ({self.topology!r}) {AS_IN}")

    @property
    def codec(self) -> Codec | None:
        """Return the codec of changes; None if parameters are sent, unchanged or rounded."""
        return None if self.wire == BF16.name else codec_of(self.wire)

    @property
    def mixes_first(self) -> bool:
        """Return whether parameters and their second copy mix before an exchange."""
        return True

    @property
    def applies_late(self) -> bool:
        return True

    def describe_change(self, plan: Plan | None) -> str | None:
        return "late: pairs of workers average while all compute, and replicas differ"

    def extra_buffers(self, profile: Profile, plan: Plan | None) -> Sequence[Buffer]:
        """Return the copies of the parameters that exchanges need: the values that exchanges
        change while a forward or backward reads the weights, the second copy of `momentum`, and
        the exchange in progress, with a codec both sides of it. Anchors of codecs are on the edges,
        two per neighbour on a ring."""
        names = ["own"]
        names += ["beside"] * (self.momentum or self.weights == "snapshot")
        names += ["second copy"] * self.momentum
        names += ["partner's", *["anchors"] * 4] if self.codec is not None else []
        return [Buffer(name) for name in names]

    def bound_s(self, profile: Profile) -> float:
        """Return the compute time of an iteration on the slowest rank: forward, backward, update
        and the code of the loop around them.

        Workers do not wait for each other, so this bound is also the duration of an iteration.
        """
        return profile.slowest().compute_s

    def open(self, job: TrainingJob) -> Session:
        from offbeat.gossip.session import open_gossip_session

        return open_gossip_session(self, job)

    def predict(
        self, profile: Profile, conditions: Conditions, ran: Plan | None = None
    ) -> Prediction:
        from offbeat.gossip.prediction import predict_gossip

        return predict_gossip(self, profile, conditions)


@dataclass(frozen=True)
class A2CiD2(Gossip):
    """Gossip with a second copy of the parameters: agreement about sqrt(n) times faster on a ring.

    An exchange moves the copy further than the parameters. Between two exchanges both mix at a rate
    that follows from the graph. The other settings are those of `Gossip`.

    Source: Nabli, Belilovsky, Oyallon, A2CiD2, NeurIPS 2023.
    """

    exchange: Literal["after_mixing", "before_mixing"] = "after_mixing"
    """Whether parameters and copy mix before each exchange (`after_mixing`) or after it
    (`before_mixing`, Algorithm 1 of the paper, which reaches agreement more slowly)."""

    name: ClassVar[str] = "a2cid2"
    momentum: ClassVar[bool] = True
    citation: ClassVar[str] = (
        "Nabli, Belilovsky, Oyallon, A2CiD2: Accelerating asynchronous communication in "
        "decentralized deep learning, NeurIPS 2023"
    )

    @property
    def mixes_first(self) -> bool:
        return self.exchange == "after_mixing"


@dataclass(frozen=True)
class ADPSGD(Gossip):
    """Asynchronous decentralized parallel SGD: after an exchange both partners hold the average.

    The settings are those of `Gossip`.

    Source: Lian et al., ICML 2018.
    """

    name: ClassVar[str] = "ad-psgd"
    momentum: ClassVar[bool] = False
    citation: ClassVar[str] = (
        "Lian et al., Asynchronous decentralized parallel stochastic gradient descent, ICML 2018"
    )


def _topology_text(topology: object) -> str:
    """Return pairs, or the edges of a graph, as text, because settings are compared and stored as
    text.
    """
    edges = getattr(topology, "edges", topology)
    try:
        pairs = sorted((min(int(i), int(j)), max(int(i), int(j))) for i, j in edges)  # type: ignore[attr-defined]
    except (TypeError, ValueError):
        raise ValueError(f"topology ({topology!r}) {AS_IN}") from None
    return ",".join(f"{i}-{j}" for i, j in pairs)
