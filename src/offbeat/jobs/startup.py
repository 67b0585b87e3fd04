"""Texts that rank 0 prints at the start of a run: the run, its nodes, and GPUs that ranks share."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch

from offbeat.core.profile import Profile
from offbeat.core.strategy.interface import Planned, Strategy
from offbeat.core.transport.cluster import Cluster
from offbeat.core.transport.topology import Topology
from offbeat.jobs.machine_load import describe_foreign

Gpu = tuple[str, int]
"""Id of a rank's GPU, and the number of GPUs that its process sees."""


def startup_message(
    strategy: Strategy, cluster: Cluster, known: Profile | None, observe: int
) -> str:
    """Return one line about the run."""
    ranks = cluster.control.world_size
    links = ", ".join(map(str, cluster.specs.values()))
    how = ""
    if known is not None:
        how = ", profile given"
        if known.foreign_share:
            how += f", which was disturbed: {describe_foreign(known.foreign_share)}"
    elif isinstance(strategy, Planned) and strategy.needs.measures:
        how = f", observing {observe} iterations"
    return f"{strategy}, {ranks} rank{'s' * (ranks > 1)}, {links}{how}"


def startup_notices(strategy: Strategy, cluster: Cluster, gpus: Sequence[Gpu | None]) -> list[str]:
    """Return the notices about nodes, GPUs and a process that no launcher has started.

    Args:
        strategy: strategy that runs.
        cluster: links and nodes of the job.
        gpus: by rank, the result of `gpu_of`.
    """
    topology = cluster.topology
    if topology.is_flat:
        nodes = None if topology.source else _nodes_notice(os.environ, strategy, topology.ranks)
    else:
        nodes = f"{topology} ({topology.source}): {_describe_nodes(topology, strategy)}"
    shared = _shared_gpu_notice(cluster.control.hosts, gpus)
    alone = None if cluster.control.has_members else _alone_notice(os.environ, topology.ranks)
    return [text for text in (alone, nodes, shared) if text is not None]


def _alone_notice(environ: Mapping[str, str], ranks: int) -> str | None:
    """Return a notice if the script was started without a launcher; otherwise None."""
    if ranks > 1 or "WORLD_SIZE" in environ:
        return None
    return (
        "1 rank: nothing is averaged; start the script with torchrun, such as "
        "`torchrun --nproc-per-node 2 train.py`, or set WORLD_SIZE=1 if it trains alone"
    )


def gpu_of(where: torch.device) -> Gpu | None:
    """Return the GPU of this rank; None for a CPU."""
    if where.type != "cuda":
        return None
    return str(torch.cuda.get_device_properties(where).uuid), torch.cuda.device_count()


def _shared_gpu_notice(hosts: Sequence[str], gpus: Sequence[Gpu | None]) -> str | None:
    """Return a notice if ranks share a GPU although their host has several; otherwise None."""
    ranks_of = defaultdict[tuple[str, str], list[int]](list)
    for rank, (host, gpu) in enumerate(zip(hosts, gpus, strict=True)):
        if gpu is not None and gpu[1] > 1:
            ranks_of[host, gpu[0]].append(rank)
    shared = next((one for one in ranks_of.items() if len(one[1]) > 1), None)
    if shared is None:
        return None
    (host, _), ranks = shared
    return (
        f"ranks {', '.join(map(str, ranks))} of host {host} use the same GPU, which has the memory "
        "and the speed of one; call torch.cuda.set_device(int(os.environ['LOCAL_RANK'])) before "
        "the model moves to a GPU"
    )


def _describe_nodes(topology: Topology, strategy: Strategy) -> str:
    """Return what the ranks of a node share."""
    between = f"{strategy.name} averages between the {topology.replicas} nodes"
    if topology.replicas == 1:
        between = "there is no other node to average with"
    if topology.sharded:
        return f"each node holds the model in shards, whose gradients FSDP averages, and {between}"
    if topology.replicas == 1:
        return (
            "every rank holds the whole model; gradients are averaged inside the node in every "
            f"iteration, and {between}"
        )
    return (
        "every rank holds the whole model; the ranks of a node average their gradients in every "
        f"iteration, and {between}"
    )


def _nodes_notice(environ: Mapping[str, str], strategy: Strategy, ranks: int) -> str | None:
    """Return a notice if several ranks share a node and the job has several nodes; otherwise
    None."""
    local = environ.get("LOCAL_WORLD_SIZE", "")
    if not local.isdigit() or not 1 < int(local) < ranks:
        return None
    remedy = "start one rank per node, or use a strategy such as dreamddp with nodes='auto'"
    if type(strategy).open is Planned.open:
        remedy = (
            "give nodes='auto': the ranks of a node then share a replica, and each message crosses "
            "that network once per node"
        )
    return (
        f"LOCAL_WORLD_SIZE ({local}) is above 1 and below the number of ranks ({ranks}), and every "
        "rank communicates as if it were a node of its own. Where the network between nodes is "
        f"slow, {remedy}"
    )
