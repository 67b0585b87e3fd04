"""Requests and values that the members of a job send, for each version of their protocol.

`OFFBEAT_REWRITE_GOLDENS=1` writes tests/golden/membership.json again.
"""

from __future__ import annotations

import json
import os
from dataclasses import fields
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, patch

from offbeat.elastic.meeting import Report, agreed_details
from offbeat.elastic.members import JobMember, Members
from offbeat.elastic.node import MemberNode
from offbeat.elastic.session import MemberSession
from offbeat.membership import (
    PROTOCOL_VERSION,
    DeathReport,
    Epoch,
    JoinRequest,
    LeaveRequest,
    LocalMembership,
    MembershipState,
)
from offbeat.membership.protocol import Kind, Refusal
from offbeat.membership.registry import Registry

GOLDEN = Path(__file__).parents[2] / "golden" / "membership.json"


def sent_values() -> dict[str, Any]:
    """Return names and fields of everything that members send to each other or to the service."""
    request, first, later = job_of_one_member()
    agreed = agreed_details({"a": Report(0, 1, 1, {"net": 0}), "b": Report(0, 1, 1)})
    kinds = (Epoch, JoinRequest, LeaveRequest, DeathReport, MembershipState, Report)
    return {
        "frames": {kind.name: int(kind) for kind in Kind},
        "refusals": sorted(value for name, value in vars(Refusal).items() if name.isupper()),
        "operations": sorted(Registry()._operations),
        "fields": {kind.__name__: [one.name for one in fields(kind)] for kind in kinds},
        "details of a request": sorted(request.details),
        "details of the first epoch": sorted(first.details),
        "details of a later epoch": sorted(later.details),
        "further details after a failure": sorted(agreed),
        "landed message": sorted(agreed["landed"]["net"]),
        "facts for a joining process": sorted(MemberSession._joining_facts(MagicMock())),
    }


def job_of_one_member() -> tuple[JoinRequest, Epoch, Epoch]:
    """Return the request of the first member of a job, and two epochs that it proposes."""
    membership, requests = LocalMembership(), list[JoinRequest]()
    member = JobMember(Members(membership, first=1), {}, None, 9.0, MemberNode())  # type: ignore[arg-type]
    request_join = membership.request_join
    try:

        def record(request: JoinRequest) -> None:
            requests.append(request)
            request_join(request)

        with patch.object(membership, "request_join", record):
            member.enter()
        addresses = member.epoch.details["addresses"]
        return requests[0], member.epoch, member.propose([member.name], 1, 0, addresses, {})
    finally:
        member.close()


def test_changes_of_what_members_send_have_a_protocol_version_of_their_own() -> None:
    """Members with equal versions train together, also if their versions of offbeat differ."""
    found = {"version": PROTOCOL_VERSION, **sent_values()}
    known = json.loads(GOLDEN.read_text())
    if os.environ.get("OFFBEAT_REWRITE_GOLDENS") == "1":
        assert found == known or found["version"] > known["version"], "increase PROTOCOL_VERSION"
        GOLDEN.write_text(json.dumps(found, indent=1) + "\n")
        return
    assert found == known, "increase PROTOCOL_VERSION, then write the file again"
