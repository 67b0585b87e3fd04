"""Start of servers and clients: listeners, exchange of addresses, common snapshot."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from offbeat.core.console import console
from offbeat.core.runtime.training_job import RankRoles, TrainingJob
from offbeat.core.transport.control import Control
from offbeat.core.transport.listeners import open_listener
from offbeat.frames.secret import common_secret
from offbeat.server.client import Client
from offbeat.server.layout import Layout
from offbeat.server.optimizers import require_elementwise
from offbeat.server.parameters import Store
from offbeat.server.service import Service
from offbeat.server.snapshots import Snapshots
from offbeat.server.strategies import SSP

BEATS = 4  # heartbeats of a worker per `silent_s`


def serve(strategy: SSP, job: TrainingJob) -> None:
    """Serve this rank's shards until every worker has left. The model loses its memory."""
    model, optimizer, ranks, cluster = job.model, job.optimizer, job.ranks, job.cluster
    layout = layout_of(optimizer, strategy, ranks)
    number = cluster.control.rank - ranks.servers.start
    store = Store(layout, number, optimizer, strategy.apply, ranks.workers)
    snapshots = None
    if strategy.snapshot is not None:
        snapshots = Snapshots(strategy.snapshot, number, strategy.snapshot_every)
    clock = _common_snapshot(snapshots, ranks, cluster.control)
    if snapshots is not None and clock is not None:
        snapshots.restore(store, clock)
    elif snapshots is not None:
        snapshots.set_aside()
    _free_model(model, optimizer)
    listener = open_listener(cluster.own_address, 2 * len(ranks.workers))
    secret = _exchange_addresses(listener.getsockname()[:2], ranks, cluster.control)[1]
    service = Service(store, listener, secret, silent_s=strategy.silent_s, snapshots=snapshots)
    if job.stop_request is not None:
        job.stop_request.attach_server(lambda: service.is_connected)
    service.serve()


def client_of(strategy: SSP, job: TrainingJob) -> Client:
    """Return a worker's client, connected to all servers."""
    ranks, cluster, control = job.ranks, job.cluster, job.cluster.control
    layout = layout_of(job.optimizer, strategy, ranks)
    resumed = _common_snapshot(None, ranks, control)
    if resumed is not None and control.rank == 0:
        iteration = strategy.iterations_at(resumed)
        console.print(
            "resume",
            f"servers resume from the snapshot of clock {resumed} in {strategy.snapshot}; training "
            f"goes on from iteration {iteration}, and later iterations are lost",
            "notice",
            iteration=iteration,
        )
    addresses, secret = _exchange_addresses(None, ranks, control)
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
        beat_s=strategy.silent_s / BEATS,
        gone=_remedy(strategy),
        resumed=resumed or 0,
    )


def layout_of(optimizer: torch.optim.Optimizer, strategy: SSP, ranks: RankRoles) -> Layout:
    """Return the layout of the trained parameters on the servers.

    Raises ValueError for an optimizer that servers cannot step in pieces.
    """
    require_elementwise(optimizer, strategy.apply)
    groups = [[p for p in group["params"] if p.requires_grad] for group in optimizer.param_groups]
    return Layout(groups, len(ranks.servers))


def _exchange_addresses(
    address: tuple[str, int] | None, ranks: RankRoles, control: Control
) -> tuple[Sequence[tuple[str, int]], bytes]:
    """Exchange addresses between all ranks. Return those of the servers, and the job's secret."""
    everyone, secret = common_secret(address, ranks.servers.start, control)
    return [tuple(everyone[rank]) for rank in ranks.servers], secret


# ---- snapshots ------------------------------------------------------------------------------


def _common_snapshot(snapshots: Snapshots | None, ranks: RankRoles, control: Control) -> int | None:
    """Return the newest clock of which every server has a readable snapshot, or None."""
    everyone = control.gather(snapshots.readable_clocks() if snapshots is not None else [])
    common = set.intersection(*(set(everyone[rank]) for rank in ranks.servers))
    return max(common, default=None)


def _remedy(strategy: SSP) -> str:
    if strategy.snapshot is None:
        return "start the job again (with snapshot=DIRECTORY it would go on where it was saved)"
    return (
        f"start the job again: it goes on from the last snapshot in {strategy.snapshot}, and later "
        "iterations are lost"
    )


def _free_model(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Free the memory of the user's model and optimizer: a server holds its shards instead."""
    optimizer.state.clear()
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.grad = None
        tensor.data = torch.empty(0, dtype=tensor.dtype, device="cpu")
