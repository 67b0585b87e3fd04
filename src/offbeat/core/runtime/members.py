"""Members: processes that may join, leave and fail while their job trains.

The members of a time without changes form an epoch, with process groups and a store of its own. The
membership service (`offbeat.membership`) holds the order of the members of each epoch. Training
needs it only for a change.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

import torch.distributed as dist
from torch.distributed import TCPStore
from torch.distributed.distributed_c10d import PrefixStore

from offbeat.core.derive import effects
from offbeat.core.plan import Plan
from offbeat.core.strategy.interface import Strategy, require_choice, require_count
from offbeat.core.transport.addresses import parse_address
from offbeat.core.transport.interfaces import LinkSpec, group_environment, ipv4_of

if TYPE_CHECKING:
    from offbeat.membership import (
        Epoch,
        Membership,
        MembershipState,
        MembershipWatch,
        Rendezvous,
    )

LOOK_EVERY_S = 0.05  # seconds between two looks at the reports of other members after a failure
READY_EVERY_S = 0.01  # seconds between two looks at the members that are ready to connect
PROBE_AFTER_S = 0.2  # seconds after which missing members are probed, and between two probes
PROBE_S = 3.0  # longest wait for the answer of a member that may have failed
RENEW_S = 5.0  # longest time between two renewals of a request to join
THREAD_NAME = "offbeat-member"

JoinState = Literal["copy", "fresh"]


@dataclass(frozen=True)
class Members:
    """Settings of a job whose members may join, leave and fail while it trains.

    Attributes:
        service: address of the membership service, as in "10.0.0.1:29600".
        first: number of members with which a new job begins; by default WORLD_SIZE, or else 2.
        least: smallest number of members with which training continues.
        join_state: optimizer state of a member that joins a running job. "copy": that of a member;
            "fresh": its own, which is usually empty. Settings such as the learning rate are those
            of a member in both cases.
    """

    service: str
    first: int | None = None
    least: int = 1
    join_state: JoinState = "copy"

    def __post_init__(self) -> None:
        if isinstance(self.service, str):  # otherwise an object of the class Membership
            parse_address(self.service)
        if self.first is not None:
            require_count("first", self.first)
        require_count("least", self.least)
        require_choice("join_state", self.join_state, ("copy", "fresh"))

    @property
    def founders(self) -> int:
        """Return the number of members with which a new job begins."""
        if self.first is not None:
            return self.first
        return int(os.environ.get("WORLD_SIZE") or 2)


class JobMember:
    """This process as a member of a job.

    Args:
        settings: settings of the job's members.
        job: what must be equal on all members, as text by name.
        interface: network interface of control messages; None for any.
        timeout_s: timeout of waits for other members, in seconds.

    Attributes:
        name: name of this process in the job.
        settings: settings of the job's members.
        membership: connection to the membership service.
        watch: observer of requests of other members.
        epoch: newest epoch of which this process is a member.
        has_joined: whether this process has joined a running job.
    """

    epoch: Epoch
    has_joined = False

    def __init__(
        self, settings: Members, job: Mapping[str, str], interface: str | None, timeout_s: float
    ):
        # Imported here, because jobs without changing members do not need the module.
        from offbeat.membership import MembershipClient, MembershipWatch, new_member_name

        self.settings, self._job = settings, dict(job)
        self._interface, self._timeout_s = interface, timeout_s
        self.name: str = new_member_name()
        service: Any = settings.service
        self.membership: Membership = (
            MembershipClient(service) if isinstance(service, str) else service
        )
        self._address = _own_address(interface, service)
        self._presence = Presence(self._address, self.name)
        self.links: list[str] = []  # names of the links, the same on all members
        self._ended, self._ended_version, self._ended_look_s = False, -1, 0.0  # of `_has_ended`
        self.watch: MembershipWatch = MembershipWatch(self.membership, self.name)

    @property
    def protocol(self) -> str:
        """Return the protocol of members, which must be the same on all of them."""
        from offbeat.membership import PROTOCOL_VERSION

        return f"protocol {PROTOCOL_VERSION} of members"

    @property
    def rank(self) -> int:
        """Return the rank of this process."""
        return self.epoch.members.index(self.name)

    def enter(self) -> None:
        """Wait until this process is a member of an epoch: the first one of a new job, or a later
        one of a running job.

        Raises:
            ValueError: a running job has another strategy, model or other arguments.
            RuntimeError: a new job has not begun within the timeout, or a running job has not
                accepted this process within twice the timeout.
        """
        from offbeat.membership import JoinRequest

        # The members may handle a failure for `timeout_s` seconds before they reach a boundary.
        order, begun_s = int(os.environ.get("RANK") or 0), time.monotonic()
        details = {"order": order, "address": [self._address, self._presence.port]}
        self.membership.request_join(JoinRequest(self.name, details=details))
        state = self.membership.state()
        while state.epoch is None or self.name not in state.epoch.members:
            if is_running(state) and not self._has_ended(state):
                assert state.epoch is not None
                self._require_same_job(state.epoch)
                self.has_joined = True
            else:
                self.has_joined = False
                self._found_job(state)
            limit_s = self._timeout_s * (2 if self.has_joined else 1)
            if time.monotonic() > begun_s + limit_s:
                self.membership.withdraw(self.name)
                raise RuntimeError(self._describe_refusal(state, limit_s))
            state = self.membership.wait_for_change(state.version, RENEW_S / 10, self.name)
        self.epoch = state.epoch

    def _found_job(self, state: MembershipState) -> None:
        """Propose the first epoch of a job if enough members have requested to join."""
        from offbeat.membership import Epoch, RequestRefusedError

        if len(state.joining) < self.settings.founders:
            return
        number = 0 if state.epoch is None else state.epoch.number + 1
        requests = sorted(state.joining, key=lambda request: request.details.get("order", 0))
        names = tuple(request.member for request in requests)
        addresses = {request.member: request.details.get("address") for request in requests}
        details = {"job": self._job, "addresses": addresses, "links": self.links}
        epoch = Epoch(number, names, details=details)
        with suppress(RequestRefusedError):  # a request was withdrawn meanwhile
            self.membership.propose(epoch)

    def _has_ended(self, state: MembershipState) -> bool:
        """Return whether the hosts of all members state that their processes have ended. A host
        that does not respond states nothing."""
        if self._ended_version != state.version or time.monotonic() > self._ended_look_s:
            assert state.epoch is not None
            addresses = state.epoch.details.get("addresses", {}).items()
            self._ended = all(is_gone(there, name, silent=False) for name, there in addresses)
            self._ended_version = state.version
            self._ended_look_s = time.monotonic() + RENEW_S
        return self._ended

    def _require_same_job(self, epoch: Epoch) -> None:
        job = epoch.details.get("job", {})
        for name, value in self._job.items():
            if job.get(name) != value:
                self.membership.withdraw(self.name)
                raise ValueError(
                    f"{name} ({value}) must be that of the running job ({job.get(name)}), which "
                    "this process joins; start it with the same script and the same arguments"
                )

    def _describe_refusal(self, state: MembershipState, limit_s: float) -> str:
        waited = f"within {limit_s:g} s"
        if is_running(state):
            assert state.epoch is not None
            return (
                f"the running job of {len(state.epoch.members)} members has not accepted this "
                f"process {waited}; raise timeout_s to the time between two boundaries of its "
                "plan. If no such job runs, start the membership service with an empty journal"
            )
        return (
            f"{len(state.joining)} of {self.settings.founders} members have called offbeat.prepare "
            f"{waited}; start the others, or lower first in Members"
        )

    # ---- process groups ---------------------------------------------------------------------

    def open_group(self) -> None:
        """Create the default process group of the epoch. Its first member hosts the store.

        Raises:
            RuntimeError: a member is missing after the timeout, or a later epoch exists.
        """
        rank, size = self.rank, len(self.epoch.members)
        timeout = timedelta(seconds=self._timeout_s)
        keys = self.membership.rendezvous(self.epoch.number)
        self._await_members(keys)
        if rank == 0:
            store = TCPStore(self._address, 0, None, True, timeout, wait_for_workers=False)
            keys.set("store", f"{self._address}:{store.port}".encode())
        else:
            try:
                host, port = parse_address(keys.get("store", self._timeout_s).decode())
            except TimeoutError as error:
                raise RuntimeError(f"the first member has opened no store: {error}") from error
            store = TCPStore(host, port, None, False, timeout, wait_for_workers=False)
        with group_environment(LinkSpec("", self._interface), size):
            dist.init_process_group(
                "gloo",
                store=PrefixStore("job", store),
                rank=rank,
                world_size=size,
                timeout=timeout,
            )

    def _await_members(self, keys: Rendezvous) -> None:
        """Wait until all members are ready to connect. torch waits for a member that has failed
        until the timeout.

        Raises:
            RuntimeError: a member has failed or is missing after the timeout, or a later epoch
                exists.
        """
        keys.set(f"ready/{self.name}", b"")
        missing, end_s = [*self.epoch.members], time.monotonic() + self._timeout_s
        look_s = time.monotonic() + PROBE_AFTER_S
        while missing := [name for name in missing if not keys.check([f"ready/{name}"])]:
            if self.membership.epoch(self.epoch.number + 1) is not None:
                raise RuntimeError(f"epoch {self.epoch.number} has ended before it has begun")
            now_s = time.monotonic()
            if now_s > look_s:
                gone, look_s = [n for n in missing if self.is_gone(n)], now_s + PROBE_AFTER_S
                if gone or now_s > end_s:
                    raise RuntimeError(f"member {', '.join(gone or missing)} has not connected")
            time.sleep(READY_EVERY_S)

    # ---- changes ----------------------------------------------------------------------------

    def next_epoch(self, iteration: int, samples: int) -> Epoch | None:
        """Return the next epoch, with all requests of members and of joining processes; None
        without requests, or if the service does not respond.

        Args:
            iteration: number of finished iterations.
            samples: number of samples that the job has read.
        """
        from offbeat.membership import MembershipError, RequestRefusedError

        for _ in range(3):  # a joining process may withdraw meanwhile
            with suppress(RequestRefusedError):
                try:
                    state = self.membership.state()
                    members, addresses = self._requested_members(state)
                    if members == self.epoch.members or not members:
                        return None
                    return self.propose(members, iteration, samples, addresses, {})
                except RequestRefusedError:
                    raise
                except MembershipError:
                    return None
        return None

    def _requested_members(self, state: MembershipState) -> tuple[tuple[str, ...], dict[str, Any]]:
        gone = {request.member for request in state.leaving}
        stay = [name for name in self.epoch.members if name not in gone]
        addresses = dict(self.epoch.details["addresses"])
        addresses |= {r.member: r.details.get("address") for r in state.joining}
        new = [
            request.member
            for request in state.joining
            if request.member not in stay and not is_gone(addresses[request.member], request.member)
        ]
        return (*stay, *(new if stay else ())), addresses

    def propose(
        self,
        members: Iterable[str],
        iteration: int,
        samples: int,
        addresses: Mapping[str, Any],
        more: Mapping[str, Any],
    ) -> Epoch:
        """Propose the next epoch. Return the epoch of that number, which another member may have
        proposed."""
        from offbeat.membership import Epoch

        names = tuple(members)
        details = {
            "job": self._job,
            "links": self.links,
            "addresses": {name: addresses[name] for name in names},
            **more,
        }
        epoch = Epoch(
            self.epoch.number + 1,
            names,
            first_iteration=iteration,
            samples=max(samples, self.epoch.samples),  # samples of failed members are read again
            details=details,
        )
        return self.membership.propose(epoch)

    def request_leave(self, reason: str) -> None:
        """Request to leave the job at the next boundary."""
        from offbeat.membership import LeaveRequest

        self.membership.request_leave(LeaveRequest(self.name, reason))

    def is_gone(self, name: str) -> bool:
        """Return whether the process of a member has ended, or its host does not respond."""
        return is_gone(self.epoch.details["addresses"][name], name)

    def close(self) -> None:
        """Leave the job and close the connection to the service."""
        self.watch.close()
        self._presence.close()
        self.membership.close()


def is_running(state: MembershipState) -> bool:
    """Return whether a job runs: the newest epoch has a member that neither leaves nor has died."""
    gone = {entry.member for entry in (*state.leaving, *state.dead)}
    return state.epoch is not None and not {*state.epoch.members} <= gone


def _own_address(interface: str | None, service: Any) -> str:
    """Return the address of this host at which the other members reach it: that of the interface,
    or else that from which it reaches the service."""
    found = None if interface is None else ipv4_of(interface)
    if found is not None:
        return str(found.ip)
    if not isinstance(service, str):
        return "127.0.0.1"
    host, port = parse_address(service)
    family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as s:
        s.connect(address)
        return str(s.getsockname()[0])


# ---- presence -------------------------------------------------------------------------------


class Presence:
    """Socket that answers with the name of this member as long as its process exists.

    After a failure the other members connect to it. If the process has ended, its host refuses the
    connection at once.

    Args:
        address: address of this host.
        name: name of this member.

    Attributes:
        port: port of the socket.
    """

    def __init__(self, address: str, name: str):
        self._name = name.encode()
        self._listener = socket.create_server((address, 0), backlog=64)
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._answer, name=THREAD_NAME, daemon=True).start()

    def _answer(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:  # closed
                return
            with suppress(OSError), connection:
                connection.settimeout(PROBE_S)
                connection.sendall(self._name)

    def close(self) -> None:
        """Close the socket."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


def is_gone(address: tuple[str, int], name: str, *, silent: bool = True) -> bool:
    """Return whether no process of this name answers at an address.

    A process that accepts the connection but does not answer may be stopped, so it is not gone.

    Args:
        address: host and port of the member's `Presence`.
        name: name of the member.
        silent: whether the member also counts as gone if its host does not respond.
    """
    try:
        connection = socket.create_connection((address[0], address[1]), PROBE_S)
    except ConnectionRefusedError:
        return True
    except OSError:
        return silent
    with connection:
        connection.settimeout(PROBE_S)
        try:
            answer = connection.recv(4096)
        except OSError:
            return False
    return answer != name.encode()


# ---- supported jobs -------------------------------------------------------------------------


def require_supported_strategy(strategy: Strategy) -> None:
    """Raise ValueError if a strategy cannot run while members change."""
    if type(strategy).open is not Strategy.open:
        raise ValueError(
            f"strategy ({strategy}) must be one with a plan where members change, such as "
            "dreamddp:period=8, local-sgd:period=8 or wfbp"
        )


def require_supported_plan(plan: Plan, strategy: Strategy, settings: Members) -> None:
    """Raise ValueError if a plan cannot run while members change.

    Each average of parameters must leave them as they are if a member fails, and all buckets must
    be averaged without a vote at some time.
    """
    problem = None
    gradients = {t.payload.buffer == "grad" for t in plan.transfers}
    if plan.source is not None or plan.all_buffers["grad"].copies > 1:
        problem = "applies gradients of several iterations together"
    elif len(gradients) > 1 or (True in gradients and plan.votes):
        problem = "averages gradients in some iterations only"
    elif True in gradients and settings.join_state != "copy":
        problem = "keeps optimizer states equal; give join_state='copy' in Members"
    elif any(t.wire is not None for t in plan.transfers):
        problem = "encodes messages, whose errors depend on all earlier ones; use wire=None"
    elif any(any(effects.per_rank_settings(apply)) for apply in plan.applies):
        problem = "has weights for each rank"
    elif any(t.verb != "all_reduce" for t in plan.transfers):
        problem = "divides averages into halves"
    else:
        certain = {b for t in plan.transfers if t.when is None for b in t.payload.buckets}
        asked = {b for t in plan.transfers for b in t.payload.buckets}
        if asked - certain:
            problem = "averages some parameters only after a vote; set max_period"
    if problem is not None:
        raise ValueError(
            f"strategy ({strategy}) must be one whose averages may be skipped where members "
            f"change, but its plan {problem}"
        )
