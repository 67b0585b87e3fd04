"""Membership service: epochs of a job's members, requests to join and to leave, rendezvous."""

from offbeat.membership.client import LocalMembership, Membership, MembershipWatch, Rendezvous
from offbeat.membership.errors import (
    EpochReplacedError,
    MembershipError,
    ProtocolRefusedError,
    RequestRefusedError,
    SecretRefusedError,
    ServiceUnreachableError,
)
from offbeat.membership.protocol import PROTOCOL_VERSION
from offbeat.membership.records import (
    DeathReport,
    Epoch,
    JoinRequest,
    LeaveRequest,
    MembershipState,
    new_member_name,
)
from offbeat.membership.remote import MembershipClient

__all__ = [
    "PROTOCOL_VERSION",
    "DeathReport",
    "Epoch",
    "EpochReplacedError",
    "JoinRequest",
    "LeaveRequest",
    "LocalMembership",
    "Membership",
    "MembershipClient",
    "MembershipError",
    "MembershipState",
    "MembershipWatch",
    "ProtocolRefusedError",
    "Rendezvous",
    "RequestRefusedError",
    "SecretRefusedError",
    "ServiceUnreachableError",
    "new_member_name",
]
