"""Members: processes, or nodes of several, that may join, leave and fail while their job trains.

The members of a time without changes form an epoch, with process groups and a store of its own. The
membership service (`offbeat.membership`) holds the order of the members of each epoch. Training
needs it only for a change.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Literal
from weakref import WeakSet

import torch.distributed as dist
from torch.distributed import TCPStore, distributed_c10d
from torch.distributed.distributed_c10d import PrefixStore

from offbeat.core.derive import effects
from offbeat.core.plan import INSIDE, Plan, base_link
from offbeat.core.plan.types import moment_of
from offbeat.core.strategy.interface import Planned, Strategy, require_choice, require_count
from offbeat.core.transport.addresses import parse_address
from offbeat.core.transport.gloo_devices import share_devices
from offbeat.core.transport.interfaces import LinkSpec, group_environment, own_address
from offbeat.core.transport.rendezvous import run_checked
from offbeat.core.transport.topology import Topology
from offbeat.elastic.feed import Pace, StateReceiver, StateSender, StateSenders
from offbeat.elastic.node import (
    MemberNode,
    describe_rank,
    member_of,
    rank_names,
    topology_of,
)
from offbeat.elastic.presence import (
    PROBES,
    Presence,
    find_ended,
    find_gone,
    is_gone,
    probe,
)

if TYPE_CHECKING:
    from offbeat.membership import (
        Epoch,
        Membership,
        MembershipState,
        MembershipWatch,
        Rendezvous,
    )

LOOK_EVERY_S = 0.05  # seconds between two looks at the reports of other members after a failure
RENEW_S = 5.0  # longest time between two renewals of a request to join
BOUNDARY_S = 5.0  # longest wait for an answer of the service at a boundary
MOST_LOSSES = 5  # connections to senders of the state that may fail without an end of the wait

JoinState = Literal["copy", "fresh"]
_left_groups = WeakSet[dist.ProcessGroup]()  # default groups of jobs that this process has left


@dataclass(frozen=True)
class Members:
    """Settings of a job whose members may join, leave and fail while it trains.

    Attributes:
        service: address of the membership service, as in "10.0.0.1:29600".
        first: number of members with which a new job begins; by default WORLD_SIZE, or else 2, and
            2 if members are nodes of several ranks.
        least: smallest number of members with which training continues after a failure. Requests
            to leave are granted with fewer, too.
        join_state: optimizer state of a member that joins a running job. "copy": that of a member,
            which sends a large one while training continues, so that it is some iterations older;
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

    def founders(self, ranks: int = 1) -> int:
        """Return the number of members with which a new job begins.

        Args:
            ranks: number of ranks of each member.
        """
        if self.first is not None:
            return self.first
        return max(int(os.environ.get("WORLD_SIZE") or 2) // ranks, 1 if ranks == 1 else 2)


class JobMember:
    """This process as a member of a job, or as a rank of one.

    Args:
        settings: settings of the job's members.
        job: what must be equal on all members, as text by name.
        interface: network interface of control messages; None for any.
        timeout_s: timeout of waits for other members, in seconds.
        node: ranks of this member. All of them have the same name in the job.

    Attributes:
        name: name of this member in the job.
        rank_name: name of this rank of the member.
        settings: settings of the job's members.
        membership: connection to the membership service.
        watch: observer of requests of other members.
        epoch: newest epoch of which this process is a member.
        node: ranks of this member.
        all_leave: whether the last call of `next_epoch` has found that all members leave.
        has_joined: whether this process has joined a running job.
        address: address of this host for the other members.
        received: state of an optimizer that this rank has received before it joins.
    """

    epoch: Epoch
    has_joined = False
    all_leave = False

    def __init__(
        self,
        settings: Members,
        job: Mapping[str, str],
        interface: str | None,
        timeout_s: float,
        node: MemberNode,
    ):
        # Imported here, because jobs without changing members do not need the module.
        from offbeat.membership import MembershipClient, MembershipWatch, new_member_name

        self.settings, self._job = settings, dict(job)
        self._interface, self._timeout_s = interface, timeout_s
        self.node = node
        service: Any = settings.service
        self.membership: Membership = (
            MembershipClient(service) if isinstance(service, str) else service
        )
        # All members wait for the answer at a boundary; the next boundary repeats the request.
        self._at_boundaries: Membership = (
            MembershipClient(service, timeout_s=min(BOUNDARY_S, timeout_s / 4))
            if isinstance(service, str)
            else service
        )
        host = parse_address(service)[0] if isinstance(service, str) else "127.0.0.1"
        self.address = own_address(interface, host)
        self.name: str = node.gather(new_member_name())[0]
        self.rank_name: str = rank_names({self.name: node.size})[node.rank]
        self._presence = Presence(self.address)
        self._probed = 0  # number of probes of `require_present`
        self._addresses = node.gather(self._presence.place)
        self.received = StateReceiver(timeout_s)
        self.links: list[str] = []  # names of the links, the same on all members
        self._reported_s = 0.0  # monotonic time of the last report of progress to the node
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
        return self.rank_names.index(self.rank_name)

    @property
    def rank_names(self) -> list[str]:
        """Return the names of all ranks of the epoch."""
        return rank_names(self._sizes)

    @property
    def topology(self) -> Topology:
        """Return the nodes of the epoch."""
        return topology_of(self._sizes, f"members of {self.node.size} ranks")

    @property
    def _sizes(self) -> dict[str, int]:
        """Return the numbers of ranks of the members of the epoch."""
        addresses = self.epoch.details["addresses"]
        return {name: len(addresses[name]) for name in self.epoch.members}

    def describe_rank(self, rank_name: str) -> str:
        """Return the words for a rank of the epoch in messages."""
        return f"rank {self.rank_names.index(rank_name)} ({describe_rank(rank_name)})"

    def enter(self) -> None:
        """Wait until this process is a member of an epoch: the first one of a new job, or a later
        one of a running job.

        Raises:
            ValueError: a running job has another strategy, model or other arguments.
            RuntimeError: a new job has not begun within the timeout, or a running job has not
                accepted this process within twice the timeout.
        """
        if self.node.rank:
            self._follow_first()
            return
        entered: dict[str, Any] = {}
        try:
            self._request_to_enter()
            entered = {"epoch": self.epoch.to_dict(), "joined": self.has_joined}
        except (ValueError, RuntimeError) as error:
            entered = {"error": str(error), "is_value": isinstance(error, ValueError)}
            raise
        finally:
            self.node.first(entered, 0.0)

    def _follow_first(self) -> None:
        """Enter the epoch that the first rank of the node has entered, or raise its error. Before
        that, this rank may receive the optimizer's state from the first one."""
        from offbeat.membership import Epoch

        while "places" in (entered := self.node.first(None, 2 * self._timeout_s)):
            if places := entered["places"]:
                place = places[self.node.rank - 1]
                self.node.gather(self.received.receive(place))
        if "epoch" not in entered:
            words = f"rank 0 of this node: {entered.get('error', 'interrupted')}"
            raise ValueError(words) if entered.get("is_value") else RuntimeError(words)
        self.epoch, self.has_joined = Epoch.from_dict(entered["epoch"]), entered["joined"]

    def _request_to_enter(self) -> None:
        # The members may handle a failure for `timeout_s` seconds before they reach a boundary.
        begun_s = time.monotonic()
        self._request_join()
        state = self.membership.state()
        while state.epoch is None or self.name not in state.epoch.members:
            if is_running(state) and not self._has_ended(state):
                assert state.epoch is not None
                self._require_same_job(state.epoch)
                self.has_joined = True
                if self._receive_state(state.epoch):
                    begun_s = time.monotonic()
            else:
                self.has_joined = False
                self._found_job(state)
            limit_s = self._timeout_s * (2 if self.has_joined else 1)
            if time.monotonic() > begun_s + limit_s:
                self.membership.withdraw(self.name)
                raise RuntimeError(self._describe_refusal(state, limit_s))
            state = self.membership.wait_for_change(state.version, RENEW_S / 10, self.name)
        self.epoch = state.epoch
        is_running_job = self.epoch.first_iteration > 0  # it may have begun, or ended, in between
        if is_running_job and not self.has_joined:
            self._require_same_job(self.epoch)
        self.has_joined = is_running_job
        sizes = self._sizes
        if set(sizes.values()) != {self.node.size}:
            raise ValueError(
                f"members must have equally many ranks, not {', '.join(map(str, sizes.values()))}; "
                "start as many processes on each node"
            )

    def _request_join(self) -> None:
        """Request to join, or change the request."""
        from offbeat.membership import JoinRequest

        order = int(os.environ.get("RANK" if self.node.size == 1 else "GROUP_RANK") or 0)
        facts = {"state": {}} if self.settings.join_state == "fresh" else {}
        details = {"order": order, "addresses": self._addresses, **self.received.facts(), **facts}
        ranks = self.node.size
        self.membership.request_join(JoinRequest(self.name, ranks=ranks, details=details))

    def _receive_state(self, epoch: Epoch) -> bool:
        """Receive the optimizer's state if the first rank of the job sends it to this process, and
        change the request. Return whether the wait of this process begins again."""
        received = self.received
        had_state = received.copy is not None
        place = received.find_sender(epoch, self.membership.rendezvous(epoch.number), self.name)
        if place is None:
            if had_state and received.copy is None:
                self._request_join()
            return False
        if not received.receive(place, self._report_progress):
            self.node.first({"places": []}, 0.0)
        elif not self._pass_to_node():
            received.copy, received.lost = None, place[2]
        self._request_join()
        return received.losses < MOST_LOSSES

    def _pass_to_node(self) -> bool:
        """Send the received state to the other ranks of this node. Return whether all have it."""
        copy, node = self.received.copy, self.node
        assert copy is not None
        senders = [
            StateSender(copy, self.address, Pace(), self._timeout_s) for _ in range(1, node.size)
        ]
        try:
            node.first({"places": [sender.place for sender in senders]}, 0.0)
            return all(node.gather(True))
        finally:
            for sender in senders:
                sender.close()

    def _report_progress(self) -> None:
        """Let the other ranks of the node wait longer for the first one."""
        now = time.monotonic()
        if self.node.size > 1 and now > self._reported_s + RENEW_S:
            self._reported_s = now
            self.node.first({"places": []}, 0.0)

    def _found_job(self, state: MembershipState) -> None:
        """Propose the first epoch of a job if enough members have requested to join."""
        from offbeat.membership import Epoch, RequestRefusedError

        founders = self.settings.founders(self.node.size)
        if len(state.joining) < founders:
            return
        addresses = {r.member: r.details.get("addresses") or () for r in state.joining}
        for rank in find_ended(_places(addresses)):  # requests of ended processes stay for a while
            addresses.pop(member_of(rank), None)
        if len(addresses) < founders:
            return
        number = 0 if state.epoch is None else state.epoch.number + 1
        requests = [request for request in state.joining if request.member in addresses]
        requests.sort(key=lambda request: request.details.get("order", 0))
        names = tuple(request.member for request in requests)
        details = {"job": self._job, "addresses": addresses, "links": self.links}
        epoch = Epoch(number, names, details=details)
        with suppress(RequestRefusedError):  # a request was withdrawn meanwhile
            self.membership.propose(epoch)

    def _has_ended(self, state: MembershipState) -> bool:
        """Return whether the hosts of all members state that their processes have ended. A host
        that does not respond states nothing."""
        if self._ended_version != state.version or time.monotonic() > self._ended_look_s:
            assert state.epoch is not None
            addresses = state.epoch.details.get("addresses", {})
            places = _places(addresses)
            self._ended = len(find_ended(places)) == len(places)
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
            f"{len(state.joining)} of {self.settings.founders(self.node.size)} members have called "
            f"offbeat.prepare {waited}; start the others, or lower first in Members"
        )

    # ---- process groups ---------------------------------------------------------------------

    def open_group(self) -> None:
        """Create the default process group of the epoch. Its first member hosts the store.

        torch waits for a rank that has failed until the timeout. So its waits are given up as soon
        as a rank is gone, or has given up itself.

        Raises:
            RuntimeError: a rank has failed, or is missing after the timeout.
        """
        rank, size = self.rank, len(self.rank_names)
        timeout = timedelta(seconds=self._timeout_s)
        keys = self.membership.rendezvous(self.epoch.number)
        open_store = partial(self._open_store, keys, timeout, is_first=rank == 0)
        store = run_checked(open_store, 2 * self._timeout_s, self.require_present)
        if not dist.is_initialized():
            # torch numbers groups, and counts one whose creation has failed on this rank alone.
            distributed_c10d._world.group_count = 0
        with (
            group_environment(LinkSpec("", self._interface), size),
            share_devices(None, self.require_present),
        ):
            dist.init_process_group(
                "gloo",
                store=PrefixStore("job", store),
                rank=rank,
                world_size=size,
                timeout=timeout,
            )

    def _open_store(self, keys: Rendezvous, timeout: timedelta, *, is_first: bool) -> TCPStore:
        """Return the store of the epoch, which the first rank hosts."""
        if is_first:
            store = TCPStore(self.address, 0, None, True, timeout, wait_for_workers=False)
            keys.set("store", f"{self.address}:{store.port}".encode())
            return store
        try:
            host, port = parse_address(keys.get("store", self._timeout_s).decode())
        except TimeoutError as error:
            raise RuntimeError(f"the first member has opened no store: {error}") from error
        return TCPStore(host, port, None, False, timeout, wait_for_workers=False)

    def require_present(self) -> None:
        """Raise RuntimeError if another rank of the epoch is gone, or has given up the epoch.

        A call probes the next `PROBES` ranks in turn, so the probes of a job do not grow with the
        square of its ranks. A rank that finds one gone gives up, so the others find it sooner.
        """
        number, places = self.epoch.number, _places(self.epoch.details["addresses"])
        names, own = [*places], [*places].index(self.rank_name)
        others = names[own + 1 :] + names[:own]
        first = self._probed % max(len(others), 1)
        self._probed += PROBES
        probed = (others[first:] + others[:first])[:PROBES]
        lost = find_gone({name: places[name] for name in probed}, number)
        if lost:
            words = ", ".join(map(self.describe_rank, lost))
            raise RuntimeError(f"{words} has failed, or has given up epoch {number}")

    def give_up(self) -> None:
        """State to the other ranks that this rank has given up the epoch after a failure."""
        self._presence.given_up = self.epoch.number

    # ---- changes ----------------------------------------------------------------------------

    def next_epoch(self, iteration: int, samples: int, senders: StateSenders) -> Epoch | None:
        """Return the next epoch, with all requests of members and of joining processes; None
        without requests.

        Args:
            iteration: number of finished iterations.
            samples: number of samples that the job has read.
            senders: senders of the optimizer's state to joining processes.

        Raises:
            MembershipError: the service does not respond.
        """
        from offbeat.membership import RequestRefusedError

        self.all_leave = False
        if self.watch.error is not None:  # all members would wait again
            raise self.watch.error
        for _ in range(3):  # a joining process may withdraw meanwhile
            with suppress(RequestRefusedError):
                state = self._at_boundaries.state()
                members, addresses, more = self._requested_members(state, senders)
                self.all_leave = not members
                if members == self.epoch.members or not members:
                    return None
                return self.propose(members, iteration, samples, addresses, more)
        return None

    def _requested_members(
        self, state: MembershipState, senders: StateSenders
    ) -> tuple[tuple[str, ...], dict[str, Any], dict[str, Any]]:
        """Return the members of the next epoch, the addresses of all processes, and details."""
        gone = {request.member for request in state.leaving}
        stay = [name for name in self.epoch.members if name not in gone]
        addresses = dict(self.epoch.details["addresses"])
        addresses |= {r.member: r.details.get("addresses") for r in state.joining}
        new = [
            request
            for request in state.joining
            if stay and request.member not in stay and not _is_any_gone(addresses, request.member)
        ]
        ready, states = senders.select(new)
        members = (*stay, *(request.member for request in ready))
        return members, addresses, {"states": states} if states else {}

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

    def is_gone(self, rank_name: str) -> bool:
        """Return whether the process of a rank has ended, or its host does not respond; or that of
        another rank of the same member, which fails as a whole."""
        return _is_any_gone(self.epoch.details["addresses"], member_of(rank_name))

    def is_alive(self, rank_name: str) -> bool:
        """Return whether the process of a rank answers."""
        return probe(_places(self.epoch.details["addresses"])[rank_name]) == "alive"

    def lost_ranks(self, rank_names: Iterable[str]) -> list[str]:
        """Return the ranks of ended processes, and of hosts that do not respond."""
        places = _places(self.epoch.details["addresses"])
        return find_gone({rank: places[rank] for rank in rank_names})

    def close(self) -> None:
        """Leave the job and close the connection to the service."""
        if (group := dist.group.WORLD) is not None:
            _left_groups.add(group)
        self.watch.close()
        self._presence.close()
        self._at_boundaries.close()
        self.membership.close()


def destroy_left_group() -> None:
    """Destroy the default process group of a job that this process has left, if it exists."""
    if dist.group.WORLD in _left_groups:
        dist.destroy_process_group()


def _places(addresses: Mapping[str, Any]) -> dict[str, Any]:
    """Return the addresses of all ranks by their names."""
    names = rank_names({name: len(places) for name, places in addresses.items()})
    return dict(zip(names, (one for places in addresses.values() for one in places), strict=True))


def _is_any_gone(addresses: Mapping[str, Any], member: str) -> bool:
    """Return whether a rank of a member is gone."""
    places = _places({member: addresses[member]})
    return any(map(is_gone, places.values()))


def is_running(state: MembershipState) -> bool:
    """Return whether a job runs: the newest epoch has a member that neither leaves nor has died."""
    gone = {entry.member for entry in (*state.leaving, *state.dead)}
    return state.epoch is not None and not {*state.epoch.members} <= gone


# ---- supported jobs -------------------------------------------------------------------------


def require_supported_strategy(strategy: Strategy) -> None:
    """Raise ValueError if a strategy cannot run while members change."""
    if type(strategy).open is not Planned.open:
        raise ValueError(
            f"strategy ({strategy}) must be one with a plan where members change, such as "
            "dreamddp:period=8, local-sgd:period=8 or wfbp"
        )


def require_supported_plan(plan: Plan, strategy: Strategy, settings: Members) -> None:  # noqa: C901
    """Raise ValueError if a plan cannot run while members change.

    Each average of parameters must leave them as they are if a member fails, and all buckets must
    be averaged without a vote at some time. Averages on the way can be dropped.
    """
    problem = None
    between = [t for t in plan.transfers if base_link(t.link) != INSIDE]
    gradients = {t.payload.buffer == "grad" for t in between}
    if plan.source is not None or plan.all_buffers["grad"].copies > 1:
        problem = "applies gradients of several iterations together"
    elif len(gradients) > 1 or (True in gradients and plan.votes):
        problem = "averages gradients in some iterations only"
    elif True in gradients and settings.join_state != "copy":
        problem = "keeps optimizer states equal; give join_state='copy' in Members"
    elif True in gradients and any(t.wire is not None for t in plan.transfers):
        problem = (
            "encodes gradients, of which the survivors of a failure would repeat messages without "
            "their errors; use wire='none', or a strategy that averages parameters"
        )
    elif any(any(effects.per_rank_settings(apply)) for apply in plan.applies):
        problem = "has weights for each rank"
    elif any(t.ranks is not None for t in plan.transfers):
        problem = "sends between single members"
    elif _completes_late(plan):
        problem = "completes an average with values that each rank keeps until a later period"
    elif any(t.verb != "all_reduce" for t in plan.transfers):
        problem = "divides averages into halves"
    else:
        certain = {b for t in between if t.when is None for b in t.payload.buckets}
        asked = {b for t in between for b in t.payload.buckets}
        if asked - certain:
            problem = "averages some parameters only after a vote; set max_period"
    if problem is not None:
        raise ValueError(
            f"strategy ({strategy}) must be one whose averages may be skipped where members "
            f"change, but its plan {problem}"
        )


def _completes_late(plan: Plan) -> bool:
    """Return whether averages arrive in a later iteration in buffers that are not dropped when
    members change."""
    own = {buffer.name for buffer in plan.buffers if moment_of(buffer.name) is None}
    late = {t.target for t in plan.transfers if t.before.lag}
    return not late & own <= {*effects.delayed_buffers(plan)}
