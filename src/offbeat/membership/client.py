"""Client interface of the membership service, and its implementation in the memory of a process."""

from __future__ import annotations

import json
import secrets
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from offbeat.membership.errors import MembershipError
from offbeat.membership.ledger import RENEWAL_S, Ledger
from offbeat.membership.records import (
    DeathReport,
    Epoch,
    JoinRequest,
    LeaveRequest,
    MembershipState,
    Record,
)
from offbeat.membership.registry import Command, Reply, decode, encode

WATCH_S = RENEWAL_S / 3  # wait of one request of a watch, which also renews a join request
WATCH_PAUSE_S = 1.0  # between two requests of a watch if the service does not answer


class Membership(ABC):
    """Membership of a job: epochs, requests to join and to leave, reports of deaths.

    Any thread may call the methods.
    """

    @abstractmethod
    def request(self, command: Command, wait_s: float = 0.0) -> Reply:
        """Return the reply of the service to a command.

        Args:
            command: operation and arguments; see `Registry`.
            wait_s: longest time in seconds to wait for the condition of the command.

        Raises:
            RequestRefusedError: the command is not allowed.
            EpochReplacedError: the command needs keys of an epoch that a later one has replaced.
            ServiceUnreachableError: the service does not answer within the timeout.
            SecretRefusedError: service and client have no secret in common.
            ProtocolRefusedError: service and client have different protocol versions.
        """

    def close(self) -> None:  # noqa: B027  # in memory there is nothing to close
        """Close the connections to the service."""

    def state(self) -> MembershipState:
        """Return the current state."""
        return MembershipState.from_dict(self.request({"op": "state"})["state"])

    def wait_for_change(
        self, version: int, timeout_s: float, member: str | None = None
    ) -> MembershipState:
        """Return the first state with a version above `version`.

        Args:
            version: version of the known state; -1 for any.
            timeout_s: longest wait in seconds. Afterwards the current state is returned.
            member: name whose join request is renewed by this call. A request that is not renewed
                for 30 s is withdrawn, because its process has ended.
        """
        command: Command = {"op": "state", "version": version}
        if member is not None:
            command["member"] = member
        return MembershipState.from_dict(self.request(command, timeout_s)["state"])

    def propose(self, epoch: Epoch) -> Epoch:
        """Write an epoch unless one with its number exists, and return the epoch of that number.

        All members that propose the same number get the same epoch. Requests and reports that the
        epoch fulfils are removed with it: join requests of its members, and leave requests and
        reports of members that it no longer has.

        Args:
            epoch: proposed epoch. Its number is that of the newest epoch plus 1, and each member is
                in the newest epoch or has requested to join. `first_iteration` and `samples` do not
                decrease, unless the epoch has no member of the newest one, as in a new run of the
                job. Epoch 0 may have any members.

        Raises:
            RequestRefusedError: the epoch cannot follow the newest one.
        """
        return Epoch.from_dict(self.request({"op": "propose", "epoch": epoch.to_dict()})["epoch"])

    def epoch(self, number: int) -> Epoch | None:
        """Return an epoch; None if it is not written yet.

        Raises:
            RequestRefusedError: the epoch is older than the 16 newest ones.
        """
        found = self.request({"op": "epoch", "number": number})["epoch"]
        return None if found is None else Epoch.from_dict(found)

    def request_join(self, request: JoinRequest) -> None:
        """Request that a new member joins. No effect if the newest epoch has this member."""
        self._record("join", "request", request)

    def request_leave(self, request: LeaveRequest) -> None:
        """Request that a member leaves. No effect if the newest epoch has no such member."""
        self._record("leave", "request", request)

    def report_death(self, report: DeathReport) -> None:
        """Report a dead member. No effect if the newest epoch has no such member."""
        self._record("death", "report", report)

    def withdraw(self, member: str) -> None:
        """Withdraw the requests of a member to join or to leave."""
        self.request({"op": "withdraw", "member": member})

    def rendezvous(self, epoch: int) -> Rendezvous:
        """Return the keys through which the members of an epoch meet.

        The service keeps the keys of the two newest epochs.
        """
        return Rendezvous(self, epoch)

    def _record(self, operation: str, name: str, record: Record) -> None:
        self.request({"op": operation, name: record.to_dict()})


class Rendezvous:
    """Keys and values by which the members of one epoch meet.

    Any thread may call the methods. A change is applied once, also if a connection breaks and the
    client repeats the request.

    Args:
        membership: client.
        epoch: number of an epoch that has been written.
    """

    def __init__(self, membership: Membership, epoch: int):
        self.epoch, self._membership = epoch, membership

    def set(self, key: str, value: bytes) -> None:
        """Set a key to a value of at most 256 KiB."""
        self._change("set", key, value=encode(value))

    def get(self, key: str, timeout_s: float) -> bytes:
        """Return the value of a key, as soon as it is set.

        Raises:
            TimeoutError: the key was not set within `timeout_s` seconds.
            EpochReplacedError: the key is not set, and a later epoch has been written.
        """
        return decode(self._await([key], timeout_s, value=True)["value"])

    def wait(self, keys: Sequence[str], timeout_s: float) -> None:
        """Return as soon as all keys are set.

        Raises:
            TimeoutError: names keys that were not set within `timeout_s` seconds.
            EpochReplacedError: a key is not set, and a later epoch has been written.
        """
        if keys:
            self._await(list(keys), timeout_s, value=False)

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all keys are set."""
        return not keys or not self.missing(keys)

    def missing(self, keys: Sequence[str]) -> list[str]:
        """Return the keys, of at least one, that are not set."""
        return self._request("await", keys=list(keys))["missing"]

    def add(self, key: str, amount: int) -> int:
        """Add a number to that of a key, which begins with 0, and return the sum."""
        return self._change("add", key, amount=amount)["total"]

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        """Set a key to `desired` if its value is `expected`, and return its value.

        A key that is not set counts as empty. If it is not set and `expected` is not empty, the
        call returns `expected`, as stores of torch do.
        """
        reply = self._change("compare_set", key, expected=encode(expected), desired=encode(desired))
        return decode(reply["value"])

    def delete(self, key: str) -> bool:
        """Remove a key, and return whether it was set."""
        return self._change("delete", key)["existed"]

    def count(self) -> int:
        """Return the number of keys."""
        return self._request("count")["count"]

    def _await(self, keys: list[str], timeout_s: float, *, value: bool) -> Reply:
        reply = self._request("await", timeout_s, keys=keys, value=value, replaces=True)
        if reply["missing"]:
            names = ", ".join(reply["missing"][:8])
            raise TimeoutError(
                f"key {names} of epoch {self.epoch} was not set within {timeout_s:g} s; a member "
                "has not reached this rendezvous"
            )
        return reply

    def _change(self, operation: str, key: str, **arguments: Any) -> Reply:
        return self._request(operation, key=key, token=secrets.token_hex(8), **arguments)

    def _request(self, operation: str, wait_s: float = 0.0, **arguments: Any) -> Reply:
        command = {"op": operation, "epoch": self.epoch, **arguments}
        return self._membership.request(command, wait_s)


class LocalMembership(Membership):
    """Membership in the memory of one process, whose threads share this object."""

    def __init__(self) -> None:
        self._ledger, self._changed = Ledger(), threading.Condition()

    def request(self, command: Command, wait_s: float = 0.0) -> Reply:
        """See `Membership.request`."""
        until_s = time.monotonic() + wait_s
        command = json.loads(json.dumps(command))  # a later change by the caller has no effect
        with self._changed:
            while True:
                changes = self._ledger.registry.changes
                self._ledger.withdraw_expired()
                answer = self._ledger.execute(command)
                if self._ledger.registry.changes != changes:
                    self._changed.notify_all()
                left_s = until_s - time.monotonic()
                if answer.is_ready or left_s <= 0:
                    return json.loads(json.dumps(answer.reply))
                self._changed.wait(min(left_s, WATCH_S))


class MembershipWatch:
    """Background thread that follows the state. It neither raises nor prints.

    Args:
        membership: client.
        member: member whose join request the watch renews.

    Attributes:
        state: newest known state; None before the first answer.
        error: last error; None while the service answers.
    """

    def __init__(self, membership: Membership, member: str | None = None):
        self._membership, self._member = membership, member
        self.state: MembershipState | None = None
        self.error: MembershipError | None = None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="membership", daemon=True)
        self._thread.start()

    @property
    def version(self) -> int:
        """Version of the newest known state; -1 before the first answer."""
        return -1 if self.state is None else self.state.version

    def close(self) -> None:
        """End the watch. Its last request to the service may continue for some seconds."""
        self._closed.set()

    def _follow(self) -> None:
        while not self._closed.is_set():
            try:
                self.state = self._membership.wait_for_change(self.version, WATCH_S, self._member)
                self.error = None
            except MembershipError as error:
                self.error = error
                self._closed.wait(WATCH_PAUSE_S)
