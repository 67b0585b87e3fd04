"""Records of the membership service: epochs, requests, reports, and their JSON forms.

A member is a replica: one rank, or all ranks of a node, which come and go together.
"""

from __future__ import annotations

import json
import re
import secrets
import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

from offbeat.membership.errors import RequestRefusedError

MOST_NAME_CHARACTERS = 64
MOST_REASON_CHARACTERS = 200
MOST_DETAILS_BYTES = 64 << 10
MOST_COUNT = 1 << 62
_NAME = re.compile(r"[A-Za-z0-9._:-]{1,64}")
_DIGEST = re.compile(r"[A-Za-z0-9._:+/=-]{0,128}")

R = TypeVar("R", bound="Record")


def new_member_name() -> str:
    """Return a name for this process that no other process has: the host's name and a token."""
    host = re.sub(r"[^A-Za-z0-9.-]", "-", socket.gethostname())[:40] or "host"
    return f"{host}-{secrets.token_hex(8)}"


@dataclass(frozen=True, slots=True)
class Record:
    """A record with a JSON form. A record with a value that is not allowed cannot exist.

    Raises:
        RequestRefusedError: a value has a wrong type, or is out of its range.
    """

    def to_dict(self) -> dict[str, Any]:
        """Return the record as a dictionary that JSON supports."""
        found = {one.name: getattr(self, one.name) for one in fields(self)}
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in found.items()
        }

    @classmethod
    def from_dict(cls: type[R], value: object) -> R:
        """Return the record of a dictionary. Unknown keys are ignored.

        Raises:
            RequestRefusedError: the value is no dictionary of a record.
        """
        if not isinstance(value, dict):
            raise RequestRefusedError(f"{cls.__name__} must be an object of JSON")
        names = {one.name for one in fields(cls)}
        try:
            return cls(**{name: part for name, part in value.items() if name in names})
        except TypeError as error:
            raise RequestRefusedError(f"{cls.__name__}: {error}") from None


@dataclass(frozen=True, slots=True)
class Epoch(Record):
    """A time in which the members of a job do not change.

    Attributes:
        number: 0, 1, 2, ... without gaps.
        members: names of the members, in the order of replicas.
        first_iteration: first iteration of the epoch.
        plan_digest: digest of the plan.
        profile_digest: digest of the profile.
        samples: samples that the job has consumed before the first iteration.
        details: other values that all members must read alike, at most 64 KiB of JSON.
    """

    number: int
    members: tuple[str, ...]
    first_iteration: int = 0
    plan_digest: str = ""
    profile_digest: str = ""
    samples: int = 0
    details: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def __post_init__(self) -> None:
        for name in ("number", "first_iteration", "samples"):
            require_count(name, getattr(self, name))
        for name in ("plan_digest", "profile_digest"):
            value = getattr(self, name)
            if not isinstance(value, str) or not _DIGEST.fullmatch(value):
                raise RequestRefusedError(f"{name} must be a digest of at most 128 characters")
        if isinstance(self.members, list):
            object.__setattr__(self, "members", tuple(self.members))
        if not isinstance(self.members, tuple) or not self.members:
            raise RequestRefusedError("members must be a list of at least one name")
        for member in self.members:
            require_name("member", member)
        if len(set(self.members)) < len(self.members):
            raise RequestRefusedError("members must be different; each name stands for one replica")
        _require_details(self.details)


@dataclass(frozen=True, slots=True)
class JoinRequest(Record):
    """Request of a new member.

    Attributes:
        member: name of the new member.
        ranks: number of its ranks.
        details: other values for the members, at most 64 KiB of JSON.
    """

    member: str
    ranks: int = 1
    details: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def __post_init__(self) -> None:
        require_name("member", self.member)
        require_count("ranks", self.ranks)
        if self.ranks < 1:
            raise RequestRefusedError(f"ranks ({self.ranks}) must be at least 1")
        _require_details(self.details)


@dataclass(frozen=True, slots=True)
class LeaveRequest(Record):
    """Request of a member that leaves.

    Attributes:
        member: name of the member.
        reason: cause, for the record of the job. At most 200 characters are kept.
    """

    member: str
    reason: str = ""

    def __post_init__(self) -> None:
        require_name("member", self.member)
        object.__setattr__(self, "reason", _shorten("reason", self.reason))


@dataclass(frozen=True, slots=True)
class DeathReport(Record):
    """Report of a member that has died or does not answer.

    Attributes:
        member: name of the dead member.
        reporter: name of the member that reports.
        reason: cause, for the record of the job. At most 200 characters are kept.
    """

    member: str
    reporter: str
    reason: str = ""

    def __post_init__(self) -> None:
        require_name("member", self.member)
        require_name("reporter", self.reporter)
        object.__setattr__(self, "reason", _shorten("reason", self.reason))


@dataclass(frozen=True, slots=True)
class MembershipState:
    """Snapshot of the membership. Equal versions have equal contents.

    Attributes:
        version: number of changes up to this snapshot.
        epoch: newest epoch; None before the first.
        joining: join requests, in the order of their arrival.
        leaving: leave requests, in the order of their arrival.
        dead: reports of deaths, in the order of their arrival.
    """

    version: int = 0
    epoch: Epoch | None = None
    joining: tuple[JoinRequest, ...] = ()
    leaving: tuple[LeaveRequest, ...] = ()
    dead: tuple[DeathReport, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the state as a dictionary that JSON supports."""
        return {
            "version": self.version,
            "epoch": None if self.epoch is None else self.epoch.to_dict(),
            "joining": [one.to_dict() for one in self.joining],
            "leaving": [one.to_dict() for one in self.leaving],
            "dead": [one.to_dict() for one in self.dead],
        }

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> MembershipState:
        """Return the state of a dictionary that `to_dict` has made."""
        epoch = value["epoch"]
        return cls(
            value["version"],
            None if epoch is None else Epoch.from_dict(epoch),
            _records(JoinRequest, value["joining"]),
            _records(LeaveRequest, value["leaving"]),
            _records(DeathReport, value["dead"]),
        )


def _records(kind: type[R], values: Iterable[object]) -> tuple[R, ...]:
    return tuple(kind.from_dict(value) for value in values)


def require_name(what: str, value: object) -> str:
    """Return a member's name. Raise RequestRefusedError if it is none."""
    if not isinstance(value, str) or not _NAME.fullmatch(value):
        raise RequestRefusedError(
            f"{what} ({str(value)[:80]!r}) must have 1 to {MOST_NAME_CHARACTERS} letters, digits "
            "and . _ : -; offbeat.membership.new_member_name() returns one"
        )
    return value


def require_count(what: str, value: object) -> int:
    """Return a whole number from 0 to 2^62. Raise RequestRefusedError if it is none."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MOST_COUNT:
        raise RequestRefusedError(f"{what} ({str(value)[:80]}) must be a whole number from 0")
    return value


def _shorten(what: str, value: object) -> str:
    if not isinstance(value, str):
        raise RequestRefusedError(f"{what} must be a text")
    return value[:MOST_REASON_CHARACTERS]


def _require_details(details: object) -> None:
    try:
        size = len(json.dumps(details, allow_nan=False))
    except (TypeError, ValueError, RecursionError):
        raise RequestRefusedError("details must be an object that JSON supports") from None
    if not isinstance(details, Mapping) or any(not isinstance(key, str) for key in details):
        raise RequestRefusedError("details must be an object whose keys are texts")
    if size > MOST_DETAILS_BYTES:
        raise RequestRefusedError(
            f"details ({size} bytes of JSON) must have at most {MOST_DETAILS_BYTES} bytes"
        )
