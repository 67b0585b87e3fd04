"""Connections of one process to all other ranks: control, links and device."""

from __future__ import annotations

import atexit
import gc
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from offbeat.core.plan import INSIDE, Groups, base_link, groups_of, is_vote_channel
from offbeat.core.transport.collectives import (
    Collectives,
    Levels,
    agreement_within,
    averaging,
    collectives,
    two_levels,
)
from offbeat.core.transport.control import Control
from offbeat.core.transport.device import Device
from offbeat.core.transport.interfaces import (
    LinkSpec,
    agree_on_links,
    control_interface,
    group_environment,
    own_address,
    require_one_order,
)
from offbeat.core.transport.link import LinkThread, MessageLink
from offbeat.core.transport.rendezvous import run_limited
from offbeat.core.transport.topology import NodeClaim, Topology, agree_on_topology

STUCK_S = 0.2  # longest wait for a link after a failure
ABORT_S = 5.0  # longest wait for the abort of a group of NCCL
CLOSED = (
    "the model is closed: it has left the other ranks. Train before model.close(), or prepare a "
    "model again"
)


@dataclass
class Cluster:
    """Control, links with their process groups, and device of this process.

    Attributes:
        control: small messages to all ranks.
        specs: description of each link between replicas, by name.
        where: torch device of the model.
        device: interface to the device.
        timeout_s: timeout of waits in seconds.
        links: open links and channels, by name.
        groups: their process groups, by name. A link of two levels has the group of the column.
        topology: which ranks hold which replica.
        inside: description of the link between the ranks of a replica; None where every rank holds
            a replica of its own, or where the model is sharded.
        node: group of the ranks of this node for averages after a failure, where members change;
            None if every rank holds a replica of its own.
        alignment_bytes: alignment of tensors in messages, the same on all ranks.
    """

    control: Control
    specs: dict[str, LinkSpec]
    where: torch.device
    device: Device
    timeout_s: float
    links: dict[str, MessageLink] = field(default_factory=dict)
    groups: dict[str, dist.ProcessGroup] = field(default_factory=dict)
    topology: Topology = field(default_factory=lambda: Topology.flat(1))
    inside: LinkSpec | None = None
    _parts: dict[str, Groups] = field(default_factory=dict)
    _everyone: dist.ProcessGroup | None = None
    _nodes: dict[str, dist.ProcessGroup] = field(default_factory=dict)  # of a node, by link
    _sent_before: dict[str, int] = field(default_factory=dict)  # by links of earlier groups
    node: dist.ProcessGroup | None = None
    alignment_bytes: int = 1
    closed: bool = False
    served: bool = False  # whether parameter servers are in use
    leave: Callable[[], None] | None = None  # exit hook, which refers to the session
    before_close: Callable[[], None] | None = None

    @property
    def everyone(self) -> dist.ProcessGroup:
        """Group of all ranks on the first link, independent of the groups of a plan.

        Where replicas have several ranks, it uses any interface.
        """
        assert self._everyone is not None
        return self._everyone

    @property
    def own_address(self) -> str:
        """Address of this host on the first link, or else that towards `MASTER_ADDR`."""
        first = next(iter(self.specs.values()))
        return own_address(first.interface, os.environ.get("MASTER_ADDR", "127.0.0.1"))

    @property
    def replica(self) -> int:
        """Index of the replica that this rank belongs to."""
        return self.topology.replica_of(self.control.rank)

    @property
    def member(self) -> int:
        """Index of this rank within its node."""
        return self.topology.member_of(self.control.rank)

    @property
    def is_first(self) -> bool:
        """Whether broadcasts on links between replicas copy from this rank."""
        column = self.topology.column_of(self.control.rank) if self.topology.sharded else None
        return self.control.rank == (0 if column is None else min(column))

    @property
    def column(self) -> dist.ProcessGroup:
        """Group of the ranks that hold the same part of the model, on the first link.

        Where every rank holds a replica of its own, these are all ranks.
        """
        return self.everyone if self.topology.is_flat else self.groups[next(iter(self.specs))]

    def open(self, names: Iterable[str], within: Mapping[str, Groups] | None = None) -> None:
        """Open links and channels that are not open yet.

        Every rank must call it with the same arguments in the same order.

        Args:
            names: names of links and channels.
            within: groups of a plan, by link. Links that are open with other groups are opened
                again. None leaves open links unchanged.

        Raises:
            ValueError: a name is a channel of an unknown link.
            RuntimeError: on every rank, if a process group cannot be created; names the link.
        """
        for name in dict.fromkeys([*names, *(self.links if within is not None else ())]):
            if name in self.links and within is None:
                continue
            base = base_link(name)
            spec = self.inside if base == INSIDE and self.inside else self.specs.get(base)
            if spec is None:
                known = ", ".join(self.specs)
                raise ValueError(f"link ({name!r}) must be one of {known}, or a channel of one")
            if name != base:  # NCCL needs one order of launches over all its groups
                spec = replace(spec, backend="gloo")
            parts = self._parts_of(name, spec, within or {})
            if name in self.links and self._parts[name] == parts:
                continue
            if name in self.links:
                self._close_link(name)
            act = self._open_link(name, spec, parts)
            self._parts[name] = parts
            self.links[name] = LinkThread(name, act, self.device)

    def close_channels(self, used: Iterable[str]) -> None:
        """Close the channels of gloo that are open and not in use: connections and threads.

        Every rank must call it with the same names, after the release of all messages.

        Args:
            used: names of links and channels that remain open.

        Raises:
            RuntimeError: a message of a channel has not arrived within the timeout.
        """
        kept = {*used, *self.specs}
        for name in [name for name in self.groups if name in self.links and name not in kept]:
            self._close_link(name)

    def _close_link(self, name: str) -> None:
        """Close a link or channel after its last message, and destroy its groups of gloo."""
        link = self.links.pop(name)
        self._sent_before[name] = self._sent_before.get(name, 0) + link.bytes_sent
        with self.control.waiting(f"closing link {name!r}"):
            if not link.close(self.timeout_s):
                raise RuntimeError(
                    f"messages of link {name!r} have not arrived in {self.timeout_s:g} s. "
                    f"{self.control.report_failure()}"
                )
        link.drop_group()
        del self._parts[name]
        for groups in (self.groups, self._nodes):
            group = groups.pop(name, None)
            if group is None or group is self._everyone:
                continue
            if dist.get_backend(group) == "gloo":  # NCCL waits for the other ranks
                dist.destroy_process_group(group)

    def _parts_of(self, name: str, spec: LinkSpec, within: Mapping[str, Groups]) -> Groups:
        """Return the ranks of each process group of a link; () for one group of all ranks.

        Groups of a plan are of replicas. Where these have several ranks, nodes and columns are the
        groups of every plan.
        """
        topology = self.topology
        if topology.is_flat or is_vote_channel(name):
            return tuple(groups_of(name, within))
        if spec is self.inside:
            return topology.nodes
        return (*topology.columns, *([topology.outside] if topology.outside else []))

    def _open_link(self, name: str, spec: LinkSpec, parts: Groups) -> Collectives:
        """Open the process groups of a link or channel. Return its collectives."""
        topology = self.topology
        if is_vote_channel(name) and not topology.is_flat:
            spec = _on_any_interface(spec)
        group = self.groups[name] = self._group(name, spec, parts)
        if self._everyone is None and not parts:
            self._everyone = group
        act = self._collectives(group, spec)
        if topology.sharded and not is_vote_channel(name):
            # On the host, because NCCL needs one order of launches over all its groups.
            within = replace(_on_any_interface(spec), backend="gloo")
            node = self._nodes[name] = self._group(name, within, topology.nodes)
            return replace(act, is_any=agreement_within(node))
        if self.inside is None or spec is self.inside or not parts:
            return act
        node = self._nodes[name] = self._group(name, self.inside, topology.nodes)
        owners = len(topology.columns)
        inside = self._collectives(node, self.inside, owners)
        weight = topology.weight_of(self.replica)
        rank, ranks = self.control.rank, self.control.world_size
        return two_levels(Levels(inside, act, owners, weight, rank, ranks))

    def _collectives(
        self, group: dist.ProcessGroup, spec: LinkSpec, owners: int | None = None
    ) -> Collectives:
        backend, connections = str(spec.backend), spec.connections
        return collectives(group, backend, self.where, self.timeout_s, connections, owners)

    def probe_group(self, name: str) -> dist.ProcessGroup:
        """Return the group whose ranks measure a link together.

        Where replicas have several ranks these are all ranks, so that all columns or nodes send at
        the same time, as in training.
        """
        return self.groups[name] if self.topology.is_flat else self.everyone

    def _group(self, name: str, spec: LinkSpec, parts: Groups) -> dist.ProcessGroup:
        """Return a process group on the link's interface, after a first message in it."""
        control, like = self.control, None
        if (spec.backend, spec.interface, spec.connections) == ("gloo", control.interface, 1):
            like = control.group
        try:
            with (
                group_environment(spec, self.control.world_size),
                self.control.waiting(f"opening link {name!r}"),
            ):
                group = control.new_group(str(spec.backend), parts, like)
                where = self.where if spec.backend == "nccl" else torch.device("cpu")
                first = torch.zeros(1, device=where, dtype=torch.float32)
                control.run_checked(lambda: dist.all_reduce(first, group=group))
                self.device.finish()
        except RuntimeError as error:
            if control.has_members:  # the survivors meet, and need no report
                raise
            interface = spec.interface or "any interface"
            raise RuntimeError(
                f"link {name!r} ({spec.backend} on {interface}) could not be opened: {error}. "
                f"{self.control.report_failure()}"
            ) from error
        return group

    def average(self, tensor: Tensor, *, is_shard: bool = False) -> None:
        """Average a contiguous tensor in place.

        Args:
            tensor: tensor of this rank.
            is_shard: average over the ranks of the column, which alone hold this shard. By default,
                over all ranks.
        """
        averaging(self.column if is_shard else self.everyone)(tensor)

    def broadcast(self, tensor: Tensor, source: int, *, is_shard: bool = False) -> None:
        """Copy a contiguous tensor of a replica to other ranks.

        Args:
            tensor: tensor of this rank.
            source: number of the replica. Its first rank sends to all ranks.
            is_shard: each rank of the replica sends to the other ranks of its column instead.
        """
        rank = self.topology.nodes[source][self.member if is_shard else 0]
        dist.broadcast(tensor, src=rank, group=self.column if is_shard else self.everyone)

    def require_open(self) -> None:
        """Raise RuntimeError if the cluster is closed."""
        if self.closed:
            raise RuntimeError(CLOSED)

    def bytes_sent(self) -> dict[str, int]:
        """Return the bytes that this rank has sent, by link and by each channel in use."""
        sent = dict.fromkeys(self.links, 0) | self._sent_before
        for name, link in self.links.items():
            sent[name] += link.bytes_sent
        return {name: size for name, size in sent.items() if size or name in self.specs}

    def close(self, failure: BaseException | None = None) -> bool:
        """Stop the links and destroy the process groups.

        Args:
            failure: exception of this rank. It is published, so that other ranks stop waiting.

        Returns:
            False if a link is blocked in a collective, which cannot be interrupted. In that case
            the groups are kept, because destroying them could abort the process.
        """
        self.closed = True
        if self.before_close is not None:
            self.before_close()
            self.before_close = None
        if self.leave is not None:
            atexit.unregister(self.leave)
            self.leave = None
        self.control.close(failure)
        closed = [link.close() for link in self.links.values()]
        if not all(closed):
            return False
        # The destruction of the default group would destroy all groups.
        for group in (one for one in self._open_groups() if one is not dist.group.WORLD):
            with suppress(ValueError):  # the script may have destroyed all of them
                dist.destroy_process_group(group)
        return True

    def abort(self) -> None:
        """Abort the groups of NCCL after a failure.

        The destruction of such a group by the script would raise an error, or wait for a rank that
        does not answer.
        """
        known = {*distributed_c10d._world.pg_map} - {dist.group.WORLD}
        for group in known.intersection(self._open_groups()):
            if dist.get_backend(group) == "nccl":
                with suppress(TimeoutError, RuntimeError):
                    run_limited(partial(distributed_c10d._abort_process_group, group), ABORT_S)

    def abandon(self) -> None:
        """Stop heartbeat and links, and drop the process groups, before `reconnect`. A group in
        which a link is blocked after a failure remains until its timeout."""
        for link in self.links.values():
            link.detach()
        end_s = time.monotonic() + STUCK_S
        for link in self.links.values():
            if link.close(max(end_s - time.monotonic(), 0.0)):
                link.drop_group()
        remaining = [ref(group) for group in self._open_groups()]
        self.groups.clear()
        self._nodes.clear()
        self._everyone = self.node = None
        self.control.abandon()
        if dist.is_initialized():
            dist.destroy_process_group()
        # Frames of errors may refer to groups, which would stay connected.
        if any(group() is not None for group in remaining):
            gc.collect()

    def _open_groups(self) -> list[dist.ProcessGroup]:
        """Return all process groups, those of control messages included."""
        control = getattr(self.control, "group", None)  # none after `abandon`
        opened = (*self.groups.values(), *self._nodes.values(), self._everyone, self.node, control)
        return [group for group in opened if group is not None]

    def reconnect(self, topology: Topology) -> None:
        """Meet the ranks of a new default process group, after `abandon`. The links are opened by
        `reopen`.

        Args:
            topology: nodes of these ranks.
        """
        self.control.connect()
        self.set_topology(topology)

    def set_topology(self, topology: Topology) -> None:
        """Set which ranks hold which replica. If the members of the job change, connect the ranks
        of each node."""
        self.topology = topology
        if topology.is_flat:
            return
        self.control.nodes = [topology.replica_of(rank) for rank in range(topology.ranks)]
        if self.control.has_members:
            with self.control.waiting("connecting to the ranks of this node"):
                self.node = self.control.new_group("gloo", topology.nodes)

    def reopen(self) -> None:
        """Open the links again, between the ranks of the new default process group."""
        for name, link in self.links.items():
            self._sent_before[name] = self._sent_before.get(name, 0) + link.bytes_sent
        self.links.clear()
        self._parts.clear()
        self.open_links()

    def open_links(self) -> None:
        """Open the links between replicas, and the group of all ranks."""
        self.open(self.specs)
        if not self.topology.is_flat:
            first = next(iter(self.specs.values()))
            self._everyone = self._group(first.name, _on_any_interface(first), ())


def connect(
    specs: Sequence[LinkSpec],
    where: torch.device,
    device: Device,
    timeout_s: float,
    claim: NodeClaim | None = None,
    topology: Topology | None = None,
    protocol: str | None = None,
    *,
    require_members: Callable[[], None] | None = None,
    owns_default: bool = False,
) -> Cluster:
    """Return a cluster with control and all links.

    Args:
        specs: the links. One of the name `INSIDE` is the link between the ranks of a replica; by
            default it is one of the device's own backend on any interface.
        where: torch device of the model.
        device: interface to the device.
        timeout_s: timeout of waits in seconds.
        claim: what this rank states of the nodes; None: every rank holds a replica of its own.
        topology: the nodes, if all ranks have agreed on nodes and links before.
        protocol: protocol of members, see `Control`.
        require_members: see `Control`.
        owns_default: whether offbeat has created the default process group, see `Control`.

    Raises:
        ValueError: on every rank, if links or nodes differ between ranks, or if a link does not
            connect all ranks that use it.
    """
    known = topology
    if known is None and protocol is not None:  # members state all nodes, or have one rank each
        known = Topology(claim.nodes) if claim and claim.nodes else Topology.flat(1)
    interface = known and control_interface(specs, known)
    control = Control(
        timeout_s, interface, protocol, require_members=require_members, owns_default=owns_default
    )
    cluster = Cluster(control, {}, where, device, timeout_s)
    try:
        links = specs
        if topology is None:
            claim = claim or NodeClaim("", node=(control.rank,))
            topology = agree_on_topology(claim, control)
            links = agree_on_links(specs, control, topology)
        cluster.set_topology(topology)
        own = {spec.name: spec for spec in links}
        inside = None if topology.is_flat else own.pop(INSIDE, None)
        if not own:
            raise ValueError(f"links must hold one between nodes beside {INSIDE!r}, as in eth0")
        if not (topology.is_flat or topology.sharded):
            backend = "nccl" if where.type == "cuda" else "gloo"
            cluster.inside = inside or LinkSpec(INSIDE, None, backend)
        cluster.specs = own
        used = [*own.values(), *([cluster.inside] if cluster.inside else [])]
        require_one_order(used, shards=topology.sharded and where.type == "cuda")
        # A message of NCCL never fails if another rank has died. Messages of gloo do.
        control.fails_on_silence = any(spec.backend == "nccl" for spec in used)
        cluster.open_links()
    except BaseException:
        cluster.close()
        raise
    return cluster


def _on_any_interface(spec: LinkSpec) -> LinkSpec:
    return replace(spec, interface=None, connections=1)
