"""Control and links of one replica of a rehearsal, in place of process groups."""

from __future__ import annotations

import socket
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from offbeat.core.plan import INSIDE, Groups, base_link, groups_of, is_vote_channel
from offbeat.core.transport.cluster import Cluster
from offbeat.core.transport.control import Control
from offbeat.core.transport.device import Device
from offbeat.core.transport.interfaces import LinkSpec
from offbeat.core.transport.packed import pack, unpack
from offbeat.rehearsal.links import MemoryNetwork, combine
from offbeat.rehearsal.turns import Turns

T = TypeVar("T")


class Exchange:
    """Exchange of values between all ranks, one after the other.

    Args:
        ranks: number of ranks.
        turns: turns of the ranks.
    """

    def __init__(self, ranks: int, turns: Turns) -> None:
        self._ranks, self._turns = ranks, turns
        self._numbers = [0] * ranks  # exchanges that a rank has begun
        self._given: dict[int, dict[int, Any]] = defaultdict(dict)  # by exchange and rank
        self._taken: dict[int, int] = defaultdict(int)  # ranks that have received the values

    def gather(self, rank: int, value: T, what: str) -> list[T]:
        """Return the values of all ranks, by rank. Every rank must call it."""
        number, self._numbers[rank] = self._numbers[rank], self._numbers[rank] + 1
        given = self._given[number]
        given[rank] = value
        self._turns.wait_until(lambda: len(given) == self._ranks, lambda: f"all ranks ({what})")
        self._taken[number] += 1
        if self._taken[number] == self._ranks:
            del self._given[number], self._taken[number]
        return [given[one] for one in range(self._ranks)]


class MemoryControl(Control):
    """Agreement between replicas in memory. There is no heartbeat.

    Args:
        rank: rank of the replica.
        ranks: number of replicas.
        exchange: exchange of all replicas.
        store: store of the job.
        timeout_s: timeout that the script has given; no wait uses it.
    """

    def __init__(
        self, rank: int, ranks: int, exchange: Exchange, store: dist.Store, timeout_s: float
    ) -> None:
        # `Control.__init__` would create process groups.
        self.rank, self.world_size, self.timeout_s = rank, ranks, timeout_s
        self.met = 1
        self.hosts = [socket.gethostname()] * ranks
        self._heartbeat = None
        self._joint_calls = {}
        self._exchange, self._store = exchange, store

    @property
    def group(self) -> dist.ProcessGroup:  # type: ignore[override]
        """Raise ValueError: a rehearsal has no process groups."""
        raise ValueError(
            "this call needs a process group, which a rehearsal does not have: leave offbeat.load, "
            "offbeat.data.Injected and offbeat.join of loaders without a length out"
        )

    def meet(self, what: str) -> None:
        self._exchange.gather(self.rank, None, what)

    def gather(self, value: Any, activity: str = "exchanging values") -> list[Any]:
        given = self._exchange.gather(self.rank, pack(value), activity)
        return [unpack(data, rank) for rank, data in enumerate(given)]

    def share(self, tensor: Tensor) -> list[Tensor]:
        """Return copies of the tensors of all ranks, by rank. Every rank must call it."""
        return self._exchange.gather(self.rank, tensor.detach().clone(), "exchanging tensors")

    def store(self, name: str) -> dist.Store:
        return dist.PrefixStore(f"offbeat/{name}", self._store)


class MemoryCluster(Cluster):
    """Connections of one replica.

    Args:
        control: control of the replica.
        network: links of all replicas.
        names: names of the links of the profile.
        where: torch device of the model.
        device: interface to the device.
    """

    def __init__(
        self,
        control: MemoryControl,
        network: MemoryNetwork,
        names: Iterable[str],
        where: torch.device,
        device: Device,
    ) -> None:
        specs = {name: LinkSpec(name, backend="memory") for name in names}
        super().__init__(control, specs, where, device, control.timeout_s)
        self.topology, self.network = network.topology, network
        if not self.topology.is_flat:
            self.inside = LinkSpec(INSIDE, backend="memory")
            control.nodes = [self.topology.replica_of(rank) for rank in range(network.ranks)]
        self.open(specs)

    def open(self, names: Iterable[str], within: Mapping[str, Groups] | None = None) -> None:
        for name in dict.fromkeys([*names, *(self.links if within is not None else ())]):
            parts, nodes = tuple(groups_of(name, within or {})), None
            if self.inside is not None:
                is_inside = base_link(name) == INSIDE
                parts = self.topology.nodes if is_inside else ()
                nodes = None if is_inside or is_vote_channel(name) else self.topology
            if name in self.links and self._parts[name] == parts:
                continue
            known = [*self.specs, *([INSIDE] if self.inside is not None else ())]
            if base_link(name) not in known:
                raise ValueError(
                    f"link ({name!r}) must be one of {', '.join(known)}, or a channel of one"
                )
            self._parts[name] = parts
            self.links[name] = self.network.open(name, self.control.rank, parts, self.device, nodes)
        # A message may run when its last rank has released it, on the links of all its ranks.
        self.control.meet("opening links")

    def average(self, tensor: Tensor, *, is_shard: bool = False) -> None:
        tensor.copy_(combine("all_reduce", self._share(tensor)))

    def broadcast(self, tensor: Tensor, source: int, *, is_shard: bool = False) -> None:
        tensor.copy_(self._share(tensor)[self.topology.nodes[source][0]])

    def close(self, failure: BaseException | None = None) -> bool:
        self.closed = True
        return True

    @property
    def _share(self) -> Callable[[Tensor], list[Tensor]]:
        assert isinstance(self.control, MemoryControl)
        return self.control.share
