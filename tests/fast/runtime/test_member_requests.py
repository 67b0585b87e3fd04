"""Requests to join and to leave: which of them count, and boundaries without an answer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from cases.memberships import admit, begin

from offbeat.elastic.changes import MemberChanges
from offbeat.elastic.members import JobMember, Members
from offbeat.elastic.node import MemberNode
from offbeat.elastic.presence import Presence
from offbeat.membership import (
    Epoch,
    JoinRequest,
    LeaveRequest,
    LocalMembership,
    MembershipState,
    ServiceUnreachableError,
)

HOST = "127.0.0.1"
JOB = {"strategy": "wfbp"}


class Service(LocalMembership):
    """Service that a test lets answer, or not."""

    answers = True

    def state(self) -> MembershipState:
        if not self.answers:
            raise ServiceUnreachableError("the service of this test does not answer")
        return super().state()


def member_at(service: Any, **settings: Any) -> JobMember:
    return JobMember(Members(service, **settings), JOB, None, 5.0, MemberNode())


def changes_of(member: Any, control: Any) -> Any:
    """Return changes of a member at the first boundary of its job."""
    changes: Any = MemberChanges.__new__(MemberChanges)
    changes._member, changes._cluster = member, SimpleNamespace(control=control)
    changes._session = SimpleNamespace(iteration=8, samples=None, unite=lambda: None)
    changes.senders = SimpleNamespace(select=lambda requests: (requests, {}))
    changes._handled, changes._begins_at, changes.has_left = -1, None, False
    changes._unions = changes._united = 0
    return changes


# ---- boundaries -----------------------------------------------------------------------------


def test_a_boundary_without_an_answer_leaves_requests_to_the_next_one() -> None:
    service = Service()
    member: Any = JobMember.__new__(JobMember)
    addresses = {name: [[HOST, 1]] for name in ("a", "b")}
    member.epoch = service.propose(Epoch(0, ("a", "b"), details={"addresses": addresses}))
    service.request_leave(LeaveRequest("b"))
    member.watch = SimpleNamespace(version=2, error=None)
    member.membership = member._at_boundaries = service
    member._job, member.links = JOB, []
    control = SimpleNamespace(rank=0, gather=lambda own: [own])
    changes = changes_of(member, control)
    service.answers = False
    assert [*changes._agree_on_requests()] == []
    assert changes._handled == -1
    service.answers, changes._session.iteration = True, 16
    [epoch] = changes._agree_on_requests()
    assert (epoch.members, epoch.first_iteration) == (("a",), 16)
    assert changes._handled == 2


@pytest.mark.parametrize(("has_answer", "handled"), [(True, 4), (False, -1)])
def test_all_ranks_ask_again_if_the_first_one_has_no_answer(has_answer: bool, handled: int) -> None:
    given = iter([[4, 3], [(None, has_answer), None]])
    control = SimpleNamespace(rank=1, gather=lambda _: next(given))
    changes = changes_of(SimpleNamespace(watch=SimpleNamespace(version=4)), control)
    assert [*changes._agree_on_requests()] == []
    assert changes._handled == handled


def test_a_boundary_does_not_wait_for_a_service_that_does_not_answer_the_watch() -> None:
    member: Any = JobMember.__new__(JobMember)
    member.watch = SimpleNamespace(error=ServiceUnreachableError("an error of this test"))
    member.membership = member._at_boundaries = None
    with pytest.raises(ServiceUnreachableError, match="of this test"):
        member.next_epoch(8, 0, None)


# ---- begin of a job -------------------------------------------------------------------------


def test_a_process_that_has_ended_founds_no_job() -> None:
    """Its request stays at the service for a while."""
    service = LocalMembership()
    member = member_at(service, first=2)
    there, ended = Presence(HOST), Presence(HOST)
    for name, presence in (("there", there), ("ended", ended)):
        details = {"addresses": [presence.place]}
        service.request_join(JoinRequest(name, details=details))
    ended.close()
    member._found_job(service.state())
    assert service.state().epoch is None
    member._request_join()
    member._found_job(service.state())
    epoch = service.state().epoch
    assert epoch is not None
    assert {*epoch.members} == {*epoch.details["addresses"]} == {"there", member.name}
    member.close()
    there.close()


@pytest.mark.parametrize("first_iteration", [0, 6])
def test_a_process_that_is_accepted_before_its_first_look_has_joined(first_iteration: int) -> None:
    """A job whose first iteration is still to come is new."""
    service = LocalMembership()
    member = member_at(service)
    addresses = {name: [[HOST, 1]] for name in ("a", member.name)}
    details = {"job": JOB, "addresses": addresses}
    begin(service, "a")
    admit(service, 1, "a", member.name, first_iteration=first_iteration, details=details)
    member.enter()
    assert member.epoch.number == 1
    assert member.has_joined is bool(first_iteration)
    member.close()


def test_a_process_with_other_arguments_is_refused_also_after_its_acceptance() -> None:
    service = LocalMembership()
    member = member_at(service)
    addresses = {name: [[HOST, 1]] for name in ("a", member.name)}
    details = {"job": {"strategy": "p3"}, "addresses": addresses}
    begin(service, "a")
    admit(service, 1, "a", member.name, first_iteration=6, details=details)
    with pytest.raises(ValueError, match=r"strategy \(wfbp\) must be that of the running job \(p3"):
        member.enter()
    member.close()
