"""State of a prepared model for tests: plan, profile, iteration and the messages sent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from offbeat.core.observers import Observer

if TYPE_CHECKING:
    from torch import nn

    from offbeat.core.plan import Plan, Transfer
    from offbeat.core.profile import Profile
    from offbeat.core.runtime.iteration import Iteration


@dataclass(frozen=True)
class SentMessage:
    """Message that this rank has sent or received.

    Attributes:
        iteration: iteration of the process to which the message belongs.
        link: name of its link.
        order: its number among the messages of the link, the same on all ranks.
        transfer: transfer of the plan.
        sent_bytes: bytes that this rank has sent. Each half of an all-reduce counts half.
    """

    iteration: int
    link: str
    order: int
    transfer: Transfer
    sent_bytes: int


class Inspection:
    """State of a prepared model. Messages count from its creation.

    Args:
        model: prepared model.
    """

    def __init__(self, model: nn.Module) -> None:
        self._session: Any = model._session
        self._log = _MessageLog()
        self._session.observers.add(self._log)

    @property
    def plan(self) -> Plan | None:
        """Plan that runs; None before there is one, and for strategies without a plan."""
        return getattr(self._session, "plan", None)

    @property
    def profile(self) -> Profile | None:
        """Profile from which the plan was made; None before there is one, and without a plan."""
        return getattr(self._session, "profile", None)

    @property
    def iteration(self) -> int:
        """Number of finished iterations, including those before a resume."""
        return int(self._session.iteration)

    @property
    def exchanges(self) -> Mapping[int, int]:
        """Completed exchanges of gossip so far, by the other worker; empty without gossip."""
        return getattr(self._session, "exchanges", {})

    @property
    def messages(self) -> list[SentMessage]:
        """Messages of all iterations that are complete, by iteration, then by number on the link.
        All iterations are complete once the model is closed."""
        return sorted(self._log.messages, key=lambda message: (message.iteration, message.order))


class _MessageLog(Observer):
    def __init__(self) -> None:
        self.messages: list[SentMessage] = []

    def ended(self, iteration: Iteration) -> None:
        self.messages += [
            SentMessage(m.iteration, m.transfer.link, m.order, m.transfer, m.sent_bytes)
            for m in iteration.messages
            if m.was_sent
        ]


def inspect(model: nn.Module) -> Inspection:
    """Return the state of a prepared model, and count its messages from now on.

    Args:
        model: model that `offbeat.prepare` has returned.
    """
    return Inspection(model)
