"""Serving: which ranks serve, how they meet the workers, and what a serving rank does."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from offbeat.run.job import SERVERS_VARIABLE
from offbeat.server.client import Client
from offbeat.server.layout import Layout
from offbeat.server.optimizers import Keep, require_elementwise
from offbeat.server.service import Service
from offbeat.server.snapshots import Snapshots
from offbeat.server.store import Store
from offbeat.strategies import Served
from offbeat.strategies.served import Duty
from offbeat.transport import secret as secrets
from offbeat.transport.cluster import Cluster
from offbeat.transport.control import Control
from offbeat.transport.interfaces import ipv4_of

BEATS = 4  # signs of life within the time after which a worker counts as silent


@dataclass(frozen=True)
class Crew:
    """Which ranks train and which serve: the last ones."""

    workers: range
    servers: range


def crew_of(servers: int, strategy: object, served: bool, control: Control) -> Crew:
    """Who serves; ValueError on every rank for a number of servers that cannot be."""
    world_size = control.world_size
    if served and servers < 1:
        raise ValueError(
            f"servers ({servers}) must be at least 1 for {strategy}; start with `offbeat run "
            f"--servers 1`, or set {SERVERS_VARIABLE}: so many of the last ranks serve"
        )
    if servers and not served:
        raise ValueError(
            f"servers ({servers}) must be 0 for {strategy}, which has none to train with; unset "
            f"{SERVERS_VARIABLE}, or choose one that has: ssp, ps-bsp, ps-selsync"
        )
    if servers >= world_size:
        raise ValueError(
            f"servers ({servers}) must be below the number of ranks ({world_size}), as somebody "
            "must train; start more ranks"
        )
    return Crew(range(world_size - servers), range(world_size - servers, world_size))


def serve(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    strategy: Served,
    crew: Crew,
    cluster: Cluster,
) -> None:
    """What a serving rank does, until every worker has left."""
    layout, duty = layout_of(model, optimizer, strategy, crew), strategy.duty
    number = cluster.control.rank - crew.servers.start
    stepping = Keep(layout.parameters) if duty.keeps else optimizer
    store = Store(layout, number, stepping, duty.apply, crew.workers)
    snapshots = _snapshots(duty, number)
    clock = _common_snapshot(snapshots, crew, cluster.control)
    if clock is not None:
        assert snapshots is not None
        snapshots.restore(store, clock)
    _forget(model, optimizer)
    listener = socket.create_server((own_address(cluster), 0), backlog=2 * len(crew.workers))
    secret = _meet(listener.getsockname()[:2], crew, cluster.control)[1]
    Service(
        store,
        listener,
        secret,
        silent_s=duty.silent_s,
        snapshots=snapshots,
        returns=duty.returns,
    ).serve()


def client_of(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    strategy: Served,
    crew: Crew,
    cluster: Cluster,
) -> Client:
    """A worker's client, connected to all servers."""
    layout, duty = layout_of(model, optimizer, strategy, crew), strategy.duty
    control = cluster.control
    resumed = _common_snapshot(None, crew, control)
    if resumed is not None and control.rank == 0:
        iteration = strategy.iterations_at(resumed)
        print(
            f"offbeat: servers resume from the snapshot of clock {resumed} in {duty.snapshot}; "
            f"training goes on from iteration {iteration}, and what came after it is lost",
            file=sys.stderr,
            flush=True,
        )
    addresses, secret = _meet(None, crew, control)
    servers = [
        (f"server {i} (rank {rank})", address)
        for i, (rank, address) in enumerate(zip(crew.servers, addresses, strict=True))
    ]
    return Client(
        layout,
        servers,
        control.rank,
        secret,
        timeout_s=cluster.timeout_s,
        beat_s=duty.silent_s / BEATS,
        gone=_remedy(duty),
        resumed=resumed or 0,
    )


def layout_of(
    model: nn.Module, optimizer: torch.optim.Optimizer, strategy: Served, crew: Crew
) -> Layout:
    """Where that lies which servers hold: the trained parameters; averaged ones with the model's
    running statistics. ValueError for an optimizer that servers cannot have."""
    groups = [[p for p in group["params"] if p.requires_grad] for group in optimizer.param_groups]
    if not strategy.duty.keeps:
        require_elementwise(optimizer, strategy.duty.apply)
        return Layout(groups, len(crew.servers))
    held: list[Tensor] = [p for group in groups for p in group]
    if strategy.duty.keeps == "parameters":
        held += [b for b in model.buffers() if b.is_floating_point() and b.numel()]
    return Layout([held], len(crew.servers))


def own_address(cluster: Cluster) -> str:
    """This host's address on the first link, else the one that reaches the other ranks."""
    spec = next(iter(cluster.specs.values()))
    found = ipv4_of(spec.interface) if spec.interface else None
    if found is not None:
        return str(found.ip)
    return address_towards(os.environ.get("MASTER_ADDR", "127.0.0.1"))


def address_towards(host: str) -> str:
    """This host's address on the way to another one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        s.connect((host, 9))  # sends nothing: it only chooses the interface
        return s.getsockname()[0]


def _meet(
    address: tuple[str, int] | None, crew: Crew, control: Control
) -> tuple[Sequence[tuple[str, int]], bytes]:
    """Where the servers listen, and the job's secret."""
    everyone, secret = common_secret(address, crew.servers.start, control)
    return [tuple(everyone[rank]) for rank in crew.servers], secret


def common_secret(value: Any, maker: int, control: Control) -> tuple[list[Any], bytes]:
    """Everyone's value, and the job's secret: the user's, or one that rank `maker` has made.
    Ranks compare fingerprints of the user's secret, salted with nonces of this job, so that a
    fingerprint of one job tells nothing about another."""
    mine = secrets.own_secret()
    new = secrets.new_secret()
    everyone = control.gather((value, new.hex() if mine is None else None, secrets.nonce().hex()))
    salt = bytes.fromhex("".join(nonce for *_, nonce in everyone))
    digest = None if mine is None else secrets.proof(mine, b"salt", salt, b"").hex()
    digests = control.gather(digest)
    odd = [rank for rank, theirs in enumerate(digests) if theirs != digests[0]]
    if odd:
        words = ", ".join(map(str, odd))
        raise ValueError(f"the secret of rank {words} must be that of rank 0: {secrets.REMEDY}")
    secret = mine if mine is not None else bytes.fromhex(everyone[maker][1])
    return [theirs for theirs, *_ in everyone], secret


# ---- snapshots ------------------------------------------------------------------------------


def _snapshots(duty: Duty, number: int) -> Snapshots | None:
    if duty.snapshot is None:
        return None
    return Snapshots(duty.snapshot, number, duty.snapshot_every)


def _common_snapshot(mine: Snapshots | None, crew: Crew, control: Control) -> int | None:
    """The newest clock of which every server has a snapshot."""
    everyone = control.gather(mine.clocks() if mine is not None else [])
    common = set.intersection(*(set(everyone[rank]) for rank in crew.servers))
    return max(common, default=None)


def _remedy(duty: Duty) -> str:
    if duty.keeps:
        return "start the job again, from your last checkpoint"
    if duty.snapshot is None:
        return "start the job again (with snapshot=DIRECTORY it would go on where it was saved)"
    return (
        f"start the job again: it goes on from the last snapshot in {duty.snapshot}, and what "
        "came after it is lost"
    )


def _forget(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Give the memory of the user's model back: the shards are what this rank holds."""
    optimizer.state.clear()
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.grad = None
        tensor.data = torch.empty(0, dtype=tensor.dtype, device="cpu")
