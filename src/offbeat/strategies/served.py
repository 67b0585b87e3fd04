"""Served: what strategies with a parameter server have in common."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, ClassVar

from offbeat.plan import Plan
from offbeat.profile import Profile
from offbeat.strategies.base import Strategy

if TYPE_CHECKING:
    from offbeat.sim.prediction import Prediction
    from offbeat.sim.ranks import Ranks


class Served(Strategy):
    """A method whose workers go at their own pace: no plan can say what they do."""

    planned: ClassVar[bool] = False
    synchronous: ClassVar[bool] = False

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
    ) -> Prediction:
        """Prediction with so many servers."""
