"""Start of gossip on a worker: addresses, secret, clock offsets, and a common graph."""

from __future__ import annotations

import copy
import io
import shlex
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import fields

import networkx as nx
import torch
import torch.distributed as dist
from torch import Tensor, nn

from offbeat.core.buckets.coupling import find_coupling
from offbeat.core.buckets.flat import flatten
from offbeat.core.console import console
from offbeat.core.start.launch_request import current_job, current_join_request
from offbeat.core.transport.cluster import Cluster
from offbeat.core.transport.control import Control
from offbeat.core.transport.interfaces import address_towards
from offbeat.core.transport.listeners import open_listener
from offbeat.frames.secret import VARIABLE as SECRET
from offbeat.frames.secret import common_secret, own_secret
from offbeat.gossip.chunks import Wire
from offbeat.gossip.clock import Clock, RoundTrip, offset_s
from offbeat.gossip.graphs import Edge, topology
from offbeat.gossip.joining import TRIPS, Place, get_place
from offbeat.gossip.measured_graph import best_graph
from offbeat.gossip.pairs import measure_pairs
from offbeat.gossip.settings import Settings
from offbeat.gossip.state import AVERAGING, State
from offbeat.gossip.strategies import Gossip as GossipStrategy
from offbeat.gossip.worker import Gossip


def join(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    strategy: GossipStrategy,
    fingerprint: str,
    cluster: Cluster,
) -> GossipSetup:
    """Connect to the other workers of this job, or join a running job.

    Raises:
        ValueError: the graph is invalid, or an optimizer step of one parameter depends on other
            parameters. Raised on every rank.
    """
    require_elementwise(optimizer)
    control, door_of_another = cluster.control, current_join_request()
    own = GossipSetup(model, optimizer, strategy, fingerprint, cluster)
    if door_of_another is not None:
        own.join_job(*door_of_another)
        return own
    if control.world_size == 1:
        return own
    graph = _graph(strategy, control, own.wire.bytes)
    own.clock = Clock(ahead_s(control))
    entrance = open_listener(cluster.own_address, 2 * control.world_size)
    everyone, secret = common_secret(entrance.getsockname()[:2], 0, control)
    addresses = {rank: (host, port) for rank, (host, port) in enumerate(everyone)}
    if own_secret() is not None and control.rank == 0:
        _print_join_command(addresses[0], strategy)
    own.begin(control.rank, graph, secret, addresses, entrance)
    return own


def _print_join_command(address: tuple[str, int], strategy: GossipStrategy) -> None:
    """Print a command to join this job, with the strategy if the launcher has set it."""
    where = f"{address[0]}:{address[1]}"
    command = ["offbeat", "join"]
    if current_job().strategy is not None:
        command += ["--strategy", strategy.name]
        for setting in fields(strategy):
            value = getattr(strategy, setting.name)
            command += ["--set", f"{setting.name}={value}"] if value != setting.default else []
    command += [where, *sys.argv]
    text = f"others can join this job at {where}, with the same {SECRET}:"
    console.print("join", text, command=shlex.join(command), address=where)


def _graph(strategy: GossipStrategy, control: Control, message_bytes: int) -> nx.Graph:
    """Return the graph of the topology; every rank must call it.

    "measured" is the named graph with the fastest agreement if links are the bottleneck.
    """
    if strategy.topology != "measured":
        return topology(strategy.topology, control.world_size)
    rate, delay = measure_pairs(control, message_bytes)
    edges: list[Edge] = []
    if control.rank == 0:  # other hosts may round differently, so only rank 0 computes the graph
        found = best_graph(rate, delay, message_bytes, momentum=strategy.momentum)
        edges = sorted((min(edge), max(edge)) for edge in found.edges)
        listed = ", ".join(f"{i}-{j}" for i, j in edges)
        console.print("graph", f"edges by measured links: {listed}", edges=edges)
    return topology(control.gather(edges)[0], control.world_size)


class GossipSetup:
    """Parameters, state, clock and gossip thread of this worker.

    Attributes:
        flats: flat tensors of the parameters.
        state: shared parameters.
        clock: common clock.
        gossip: gossip thread; None in a world of one rank, and before `begin`.
        wire: form in which the parameters are sent.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        strategy: GossipStrategy,
        fingerprint: str,
        cluster: Cluster,
    ):
        self._model, self._optimizer, self._strategy = model, optimizer, strategy
        self._fingerprint, self._cluster = fingerprint, cluster
        self.clock = Clock()
        self.gossip: Gossip | None = None
        self.flats = flatten([p for p in model.parameters() if p.requires_grad])
        form = "bf16" if strategy.wire == "bf16" else "none"
        self.wire = Wire(self.flats, form, codec=strategy.codec)
        self.state = State(
            self.flats,
            self.wire,
            AVERAGING,
            snapshot=strategy.weights == "snapshot",
            momentum=strategy.momentum,
            mixed=strategy.mixes_first,
            device=cluster.device,
        )

    def begin(
        self,
        me: int,
        graph: nx.Graph,
        secret: bytes,
        addresses: Mapping[int, tuple[str, int]],
        entrance: socket.socket,
        place: Place | None = None,
    ) -> None:
        """Create the gossip thread and wait for the neighbours."""
        strategy = self._strategy
        settings = Settings(
            graph,
            strategy.rate,
            strategy.momentum,
            strategy.silent_s,
            self._cluster.timeout_s,
            strategy.on_partition,
            self._fingerprint,
            str(strategy),
        )
        self.gossip = Gossip(
            me,
            settings,
            self.state,
            self.wire,
            self.clock,
            secret,
            addresses,
            entrance,
            place=place,
            luggage=self._pack_state,
        )
        try:
            self.gossip.connect()
        except BaseException:
            self.gossip.close()
            raise

    def join_job(self, address: tuple[str, int], worker: int | None) -> None:
        """Join a running job with the state of the worker at an address."""
        secret = own_secret()
        if secret is None:
            raise ValueError(
                f"{SECRET} must be set to join a job, there and here to the same: without it "
                "every job makes a secret of its own"
            )
        entrance = open_listener(_own_host(address), 16)
        about = {"layout": self._fingerprint, "strategy": str(self._strategy), "id": worker}
        place = get_place(address, secret, about, self._cluster.timeout_s)
        self.clock = Clock(place.ahead_s)
        self._unpack_state(place.luggage)
        text = f"joined the job at {address[0]}:{address[1]} as worker {place.me}"
        console.print("join", text, worker=place.me)
        self.begin(place.me, nx.Graph(place.first), secret, place.near, entrance, place)

    def _pack_state(self, t: float) -> Tensor:
        """Return the initial state of a joining worker: x mixed up to `t`, buffers, optimizer
        state.
        """
        with self.state.frozen_x(t) as x:
            held = {
                "x": [flat.detach().to("cpu", copy=True) for flat in x],
                "buffers": [b.detach().to("cpu", copy=True) for b in self._model.buffers()],
                "optimizer": copy.deepcopy(self._optimizer.state_dict()),
            }
        file = io.BytesIO()
        torch.save(held, file)
        return torch.frombuffer(file.getbuffer(), dtype=torch.uint8)

    def _unpack_state(self, luggage: Tensor) -> None:
        file = io.BytesIO(luggage.numpy().data)
        held = torch.load(file, weights_only=True, map_location="cpu")  # not the sender's device
        self.state.set_parameters(held["x"], 0.0)  # x and x~ are equal, so mixing changes nothing
        with torch.no_grad():
            for buffer, value in zip(self._model.buffers(), held["buffers"], strict=True):
                buffer.copy_(value)
        self._optimizer.load_state_dict(held["optimizer"])


def _own_host(towards: tuple[str, int]) -> str:
    """Return the address of this host on the route to a worker."""
    try:
        return address_towards(towards[0])
    except OSError as error:
        host, port = towards
        raise RuntimeError(
            f"the worker at {host}:{port} cannot be joined: there is no way to {host} ({error}); "
            "give the address that the job's rank 0 has printed"
        ) from error


def require_elementwise(optimizer: torch.optim.Optimizer) -> None:
    reason = find_coupling(optimizer)
    if reason is not None:
        raise ValueError(
            f"{reason}, but what gossip does to x~ must be what it does to x, element by element; "
            "use an optimizer that works so (SGD, Adam, AdamW), and clip before the step"
        )


def ahead_s(control: Control) -> float:
    """Return the lead of rank 0's clock over the local one in seconds. Every rank must call it."""
    if control.rank:
        trips = [_measure_round_trip(control) for _ in range(TRIPS)]
        return offset_s(trips)
    for rank in range(1, control.world_size):
        for _ in range(TRIPS):
            dist.recv(torch.empty(1, dtype=torch.float32, device="cpu"), rank, group=control.group)
            now = torch.tensor([time.perf_counter()], dtype=torch.float64, device="cpu")
            dist.send(now, rank, group=control.group)
    return 0.0


def _measure_round_trip(control: Control) -> RoundTrip:
    left_s, theirs = time.perf_counter(), torch.empty(1, dtype=torch.float64, device="cpu")
    dist.send(torch.zeros(1, dtype=torch.float32, device="cpu"), 0, group=control.group)
    dist.recv(theirs, 0, group=control.group)
    return RoundTrip(left_s, float(theirs), time.perf_counter())
