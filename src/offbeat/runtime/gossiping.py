"""Gossiping: how workers meet before they gossip: addresses, secret, clocks, one graph."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from offbeat.gossip.chunks import Wire
from offbeat.gossip.clock import Clock, RoundTrip, offset_s
from offbeat.gossip.gossip import Gossip, Settings
from offbeat.gossip.peers import door
from offbeat.gossip.state import AVERAGING, State
from offbeat.runtime.serving import common_secret, own_address
from offbeat.solve.graphs import topology
from offbeat.storage.coupling import couples
from offbeat.storage.flat import flatten
from offbeat.strategies.gossip import Gossip as GossipStrategy
from offbeat.transport.cluster import Cluster
from offbeat.transport.control import Control

TRIPS = 8  # round trips by which clocks are compared


@dataclass(frozen=True)
class Gossiping:
    """A worker's share of a job of gossip. Without a partner in the world there is no gossip."""

    flats: list[Tensor]
    state: State
    clock: Clock
    gossip: Gossip | None


def join(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    strategy: GossipStrategy,
    fingerprint: str,
    cluster: Cluster,
) -> Gossiping:
    """Meet the other workers. ValueError on every rank for a graph that cannot be, or an optimizer
    whose step of one parameter depends on others."""
    _require_apart(optimizer)
    control = cluster.control
    parameters = [p for p in model.parameters() if p.requires_grad]
    graph = topology(strategy.topology, control.world_size) if control.world_size > 1 else None
    flats = flatten(parameters)
    wire = Wire(flats, strategy.wire)
    state = State(
        flats,
        wire,
        AVERAGING,
        snapshot=strategy.weights == "snapshot",
        momentum=strategy.momentum,
        mixed=strategy.exchange == "after_mixing",
    )
    if graph is None:
        return Gossiping(flats, state, Clock(), None)
    clock = Clock(ahead_s(control))
    entrance = door(own_address(cluster), 2 * control.world_size)
    everyone, secret = common_secret(entrance.getsockname()[:2], 0, control)
    settings = Settings(
        graph,
        strategy.rate,
        strategy.momentum,
        strategy.silent_s,
        cluster.timeout_s,
        strategy.on_partition,
        fingerprint,
    )
    addresses = {rank: (host, port) for rank, (host, port) in enumerate(everyone)}
    gossip = Gossip(control.rank, settings, state, wire, clock, secret, addresses, entrance)
    try:
        gossip.connect()
    except BaseException:
        gossip.close()
        raise
    return Gossiping(flats, state, clock, gossip)


def _require_apart(optimizer: torch.optim.Optimizer) -> None:
    reason = couples(optimizer)
    if reason is not None:
        raise ValueError(
            f"{reason}, but what gossip does to x~ must be what it does to x, element by element; "
            "use an optimizer that works so (SGD, Adam, AdamW), and clip before the step"
        )


def ahead_s(control: Control) -> float:
    """What rank 0's clock is ahead of this rank's. Every rank must call it."""
    if control.rank:
        trips = [_ask(control) for _ in range(TRIPS)]
        return offset_s(trips)
    for rank in range(1, control.world_size):
        for _ in range(TRIPS):
            dist.recv(torch.empty(1), rank, group=control.group)
            now = torch.tensor([time.perf_counter()], dtype=torch.float64)
            dist.send(now, rank, group=control.group)
    return 0.0


def _ask(control: Control) -> RoundTrip:
    left_s, theirs = time.perf_counter(), torch.empty(1, dtype=torch.float64)
    dist.send(torch.zeros(1), 0, group=control.group)
    dist.recv(theirs, 0, group=control.group)
    return RoundTrip(left_s, float(theirs), time.perf_counter())
