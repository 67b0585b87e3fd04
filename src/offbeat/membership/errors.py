"""Errors of the membership service and its clients."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from offbeat.membership.records import Epoch


class MembershipError(RuntimeError):
    """Base class of the errors of the membership service."""


class ServiceUnreachableError(MembershipError):
    """The service has not answered within the timeout of the client."""


class SecretRefusedError(MembershipError):
    """Service and client have no secret in common."""


class ProtocolRefusedError(MembershipError):
    """Service and client have different protocol versions."""


class RequestRefusedError(MembershipError, ValueError):
    """A request or a record is not allowed. It has no effect."""


class EpochReplacedError(MembershipError):
    """A later epoch has been written, so that the rendezvous of this epoch cannot complete.

    Attributes:
        epoch: newest epoch.
    """

    def __init__(self, number: int, epoch: Epoch):
        super().__init__(
            f"epoch ({number}) has been replaced by epoch {epoch.number} with the members "
            f"{', '.join(epoch.members)}; continue with that epoch"
        )
        self.number, self.epoch = number, epoch
