"""Serving: which ranks serve, how they meet the workers, and what a serving rank does."""

from __future__ import annotations

import socket
import sys
from collections.abc import Sequence

import torch
from torch import nn

from offbeat.core.runtime.training_job import Ranks
from offbeat.core.transport.cluster import Cluster
from offbeat.core.transport.control import Control
from offbeat.frames.job_secret import common_secret, own_address
from offbeat.server.client import Client
from offbeat.server.layout import Layout
from offbeat.server.optimizers import require_elementwise
from offbeat.server.service import Service
from offbeat.server.snapshots import Snapshots
from offbeat.server.store import Store
from offbeat.server.strategies import Duty, Served

BEATS = 4  # signs of life within the time after which a worker counts as silent


def serve(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    strategy: Served,
    ranks: Ranks,
    cluster: Cluster,
) -> None:
    """What a serving rank does, until every worker has left."""
    layout, duty = layout_of(optimizer, strategy, ranks), strategy.duty
    number = cluster.control.rank - ranks.servers.start
    store = Store(layout, number, optimizer, duty.apply, ranks.workers)
    snapshots = _snapshots(duty, number)
    clock = _common_snapshot(snapshots, ranks, cluster.control)
    if clock is not None:
        assert snapshots is not None
        snapshots.restore(store, clock)
    _forget(model, optimizer)
    listener = socket.create_server((own_address(cluster), 0), backlog=2 * len(ranks.workers))
    secret = _meet(listener.getsockname()[:2], ranks, cluster.control)[1]
    Service(store, listener, secret, silent_s=duty.silent_s, snapshots=snapshots).serve()


def client_of(
    optimizer: torch.optim.Optimizer, strategy: Served, ranks: Ranks, cluster: Cluster
) -> Client:
    """A worker's client, connected to all servers."""
    layout, duty = layout_of(optimizer, strategy, ranks), strategy.duty
    control = cluster.control
    resumed = _common_snapshot(None, ranks, control)
    if resumed is not None and control.rank == 0:
        iteration = strategy.iterations_at(resumed)
        print(
            f"offbeat: servers resume from the snapshot of clock {resumed} in {duty.snapshot}; "
            f"training goes on from iteration {iteration}, and what came after it is lost",
            file=sys.stderr,
            flush=True,
        )
    addresses, secret = _meet(None, ranks, control)
    servers = [
        (f"server {i} (rank {rank})", address)
        for i, (rank, address) in enumerate(zip(ranks.servers, addresses, strict=True))
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


def layout_of(optimizer: torch.optim.Optimizer, strategy: Served, ranks: Ranks) -> Layout:
    """Return the layout of the trained parameters on the servers; ValueError for an optimizer that
    servers cannot have."""
    require_elementwise(optimizer, strategy.duty.apply)
    groups = [[p for p in group["params"] if p.requires_grad] for group in optimizer.param_groups]
    return Layout(groups, len(ranks.servers))


def _meet(
    address: tuple[str, int] | None, ranks: Ranks, control: Control
) -> tuple[Sequence[tuple[str, int]], bytes]:
    """Where the servers listen, and the job's secret."""
    everyone, secret = common_secret(address, ranks.servers.start, control)
    return [tuple(everyone[rank]) for rank in ranks.servers], secret


# ---- snapshots ------------------------------------------------------------------------------


def _snapshots(duty: Duty, number: int) -> Snapshots | None:
    if duty.snapshot is None:
        return None
    return Snapshots(duty.snapshot, number, duty.snapshot_every)


def _common_snapshot(mine: Snapshots | None, ranks: Ranks, control: Control) -> int | None:
    """The newest clock of which every server has a snapshot."""
    everyone = control.gather(mine.clocks() if mine is not None else [])
    common = set.intersection(*(set(everyone[rank]) for rank in ranks.servers))
    return max(common, default=None)


def _remedy(duty: Duty) -> str:
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
