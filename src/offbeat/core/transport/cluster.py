"""Connections of one process to all other ranks: control, links and device."""

from __future__ import annotations

import atexit
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from offbeat.core.plan import Groups, base_link, groups_of
from offbeat.core.transport.collectives import collectives
from offbeat.core.transport.control import Control, new_group
from offbeat.core.transport.device import Device
from offbeat.core.transport.interfaces import LinkSpec, agree_on_links, bind_interface
from offbeat.core.transport.link import LinkThread

CLOSED = (
    "the model is closed: it has left the other ranks. Train before model.close(), or prepare a "
    "model again"
)


@dataclass
class Cluster:
    """Control, links with their process groups, and device of this process.

    Attributes:
        control: small messages to all ranks.
        specs: description of each link, by name.
        where: torch device of the model.
        device: interface to the device.
        timeout_s: timeout of waits in seconds.
        links: open links and channels, by name.
        groups: their process groups, by name.
    """

    control: Control
    specs: dict[str, LinkSpec]
    where: torch.device
    device: Device
    timeout_s: float
    links: dict[str, LinkThread] = field(default_factory=dict)
    groups: dict[str, dist.ProcessGroup] = field(default_factory=dict)
    _parts: dict[str, Groups] = field(default_factory=dict)
    _everyone: dist.ProcessGroup | None = None
    closed: bool = False
    served: bool = False  # whether parameter servers are in use
    leave: Callable[[], None] | None = None  # exit hook, which refers to the session
    before_close: Callable[[], None] | None = None

    @property
    def everyone(self) -> dist.ProcessGroup:
        """Group of all ranks on the first link, independent of the groups of a plan."""
        assert self._everyone is not None
        return self._everyone

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
            parts = tuple(groups_of(name, within or {}))
            if name in self.links and self._parts[name] == parts:
                continue
            if name in self.links:
                self.links.pop(name).close()
            spec = self.specs.get(base_link(name))
            if spec is None:
                known = ", ".join(self.specs)
                raise ValueError(f"link ({name!r}) must be one of {known}, or a channel of one")
            group = self._group(name, spec, parts)
            verbs = collectives(
                group, str(spec.backend), self.where, self.timeout_s, spec.connections
            )
            if self._everyone is None and not parts:
                self._everyone = group
            self.groups[name], self._parts[name] = group, parts
            self.links[name] = LinkThread(name, verbs, self.device)

    def _group(self, name: str, spec: LinkSpec, parts: Groups) -> dist.ProcessGroup:
        """Return a process group on the link's interface, after a first message in it."""
        try:
            with (
                bind_interface(spec.interface, spec.connections),
                self.control.waiting(f"opening link {name!r}"),
            ):
                group = new_group(str(spec.backend), self.timeout_s, parts)
                where = self.where if spec.backend == "nccl" else torch.device("cpu")
                dist.all_reduce(torch.zeros(1, device=where, dtype=torch.float32), group=group)
                self.device.finish()
        except RuntimeError as error:
            interface = spec.interface or "any interface"
            raise RuntimeError(
                f"link {name!r} ({spec.backend} on {interface}) could not be opened: {error}. "
                f"{self.control.report_failure()}"
            ) from error
        return group

    def require_open(self) -> None:
        """Raise RuntimeError if the cluster is closed."""
        if self.closed:
            raise RuntimeError(CLOSED)

    def bytes_sent(self) -> dict[str, int]:
        """Return the bytes that this rank has sent, by link and by each channel in use."""
        sent = {name: link.bytes_sent for name, link in self.links.items()}
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
        for group in (*self.groups.values(), self._everyone, self.control.group):
            with suppress(ValueError):  # the script may have destroyed all of them
                dist.destroy_process_group(group)
        return True


def connect(
    specs: Sequence[LinkSpec], where: torch.device, device: Device, timeout_s: float
) -> Cluster:
    """Return a cluster with control and all links.

    Raises:
        ValueError: on every rank, if links differ between ranks or do not connect all ranks.
    """
    control = Control(timeout_s)
    cluster = Cluster(control, {}, where, device, timeout_s)
    try:
        cluster.specs = {spec.name: spec for spec in agree_on_links(specs, control)}
        cluster.open(cluster.specs)
    except BaseException:
        cluster.close()
        raise
    return cluster
