"""Connection of a rank to all others, and its end when the process exits."""

from __future__ import annotations

import atexit
import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import cache, partial

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import PrefixStore

import offbeat
from offbeat.core.buckets.shards import shard_ranks
from offbeat.core.console import console
from offbeat.core.start.launch_request import current_links
from offbeat.core.transport import addresses, rendezvous
from offbeat.core.transport.agreement import StoreAgreement, compare_versions
from offbeat.core.transport.cluster import Cluster, connect
from offbeat.core.transport.device import device_of
from offbeat.core.transport.heartbeat import publish_uncaught_exception, run_at_process_exit
from offbeat.core.transport.interfaces import (
    NCCL_INTERFACE,
    LinkSpec,
    agree_on_links,
    control_interface,
    group_environment,
    parse_link,
    require_one_order,
)
from offbeat.core.transport.job_place import current_place
from offbeat.core.transport.link import THREAD_PREFIX
from offbeat.core.transport.topology import (
    NodeClaim,
    Nodes,
    Topology,
    agree_on_topology,
    claim_topology,
)

OF_INTERFACES = "of network interfaces, at least one, each once, as in ['eth0', 'gloo:eth1']"


class Connector:
    """Connects this rank to all others.

    Args:
        model: module to train, whose trained parameters are on the device of this rank.
        links: argument `links` of `prepare`.
        timeout_s: timeout of waits, in seconds.

    Attributes:
        where: torch device of the model.
        device: interface to the device.
        links: argument `links` of `prepare`.
        specs: the links.
        timeout_s: timeout of waits, in seconds.

    Raises:
        ValueError: a link is invalid.
    """

    def __init__(self, model: nn.Module, links: Sequence[str] | None, timeout_s: float) -> None:
        self._model, self.links, self.timeout_s = model, links, timeout_s
        self.where = next(p.device for p in model.parameters() if p.requires_grad)
        self.device = device_of(self.where)
        if self.where.type == "cuda":  # DLPack and NCCL use the current device of the process
            torch.cuda.set_device(self.where)
        self.specs = link_specs(links, self.where)

    def connect_job(self, mesh: DeviceMesh | None, nodes: Nodes | None) -> Cluster:
        """Join the default process group, unless the script has, and open control and links.

        Args:
            mesh: argument of `prepare`.
            nodes: argument of `prepare`, or of the environment.

        Raises:
            ValueError: on every rank, if links or nodes are invalid or differ between ranks.
            RuntimeError: this rank could not connect to all others.
        """
        specs, topology, joins = self.specs, None, not dist.is_initialized()
        if joins:
            specs, topology = _join_process_group(specs, nodes, self.timeout_s)
        else:
            _warn_of_earlier_nccl(specs)
        register_exit(joins)
        rank, size = dist.get_rank(), dist.get_world_size()
        try:
            shards = shard_ranks(self._model)
            claim = claim_topology(mesh, nodes, shards, rank, size, os.environ)
        except ValueError as error:  # every rank must raise it
            claim = NodeClaim("", problem=str(error))
        ends = self.where, self.device, self.timeout_s
        return connect(specs, *ends, claim, topology, owns_default=joins)


def link_specs(links: Sequence[str] | None, where: torch.device) -> list[LinkSpec]:
    """Return the specifications of the links. Raise ValueError for invalid links before any is
    opened."""
    if isinstance(links, str):
        raise ValueError(f"links ({links!r}) must be a list {OF_INTERFACES}")
    given = current_links() if links is None else [parse_link(link) for link in links]
    if not given or len({spec.name for spec in given}) < len(given):
        raise ValueError(f"links ({links!r}) must be a list {OF_INTERFACES}")
    specs = [replace(spec, backend=spec.backend or "gloo") for spec in given]
    over_nccl = [spec for spec in specs if spec.backend == "nccl"]
    if over_nccl and where.type != "cuda":
        raise ValueError(
            f"{over_nccl[0]} needs a model on a GPU ({where}); give gloo:INTERFACE instead"
        )
    for spec in over_nccl:
        if spec.connections > 1:
            raise ValueError(
                f"{spec} must use gloo; give gloo:{spec.interface}*{spec.connections}, or set "
                "NCCL_NSOCKS_PERTHREAD instead"
            )
    require_one_order(specs)
    return specs


def _warn_of_earlier_nccl(specs: Sequence[LinkSpec]) -> None:
    """Warn if NCCL may have chosen another interface than that of the links before prepare."""
    wanted = next((s.interface for s in specs if s.backend == "nccl" and s.interface), None)
    chosen = os.environ.get(NCCL_INTERFACE, "")
    if wanted is None or chosen.lstrip("=") == wanted or not _has_used_nccl():
        return
    warnings.warn(
        f"NCCL was used before offbeat.prepare and chooses its interface once per process, so link "
        f"{wanted!r} may not be in use ({NCCL_INTERFACE}={chosen!r}); set "
        f"{NCCL_INTERFACE}={wanted} before the start of the process",
        RuntimeWarning,
        stacklevel=4,
    )


def _has_used_nccl() -> bool:
    """Return whether a process group of this process has an open communicator of NCCL."""
    cuda = torch.device("cuda")
    for group in distributed_c10d._world.pg_map:
        if cuda in group._device_types and "nccl" in dist.get_backend_config(group):
            backend = group._get_backend(cuda)
            if getattr(backend, "_is_initialized", lambda: True)():
                return True
    return False


def _join_process_group(
    specs: list[LinkSpec], nodes: Nodes | None, timeout_s: float
) -> tuple[list[LinkSpec], Topology | None]:
    """Join the default process group by torchrun's rendezvous; a process without RANK is a group of
    its own. Return the links and nodes on which all ranks have agreed; None for a single process.

    The group is on the interface of the first link, so the ranks check the links before. gloo would
    report a host that cannot be reached only after its timeout.
    """
    backend = "nccl" if any(spec.backend == "nccl" for spec in specs) else "gloo"
    timeout = timedelta(seconds=timeout_s)
    if "RANK" not in os.environ:
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1, timeout=timeout)
        return specs, None
    rank, size = current_place()
    addresses.require_address(rank, os.environ, hosts_store=addresses.is_store_host(rank))
    with _naming_address(rank, size, timeout_s):
        store = rendezvous.connect_store(rank, size, timeout_s)
    with StoreAgreement(PrefixStore("agreement", store), rank, size, timeout_s) as ranks:
        # `Control` compares the versions of torch.
        ranks.hosts = compare_versions(ranks, offbeat.__version__, "")
        claim = claim_topology(None, nodes, None, rank, size, os.environ)
        topology = agree_on_topology(claim, ranks)
        specs = agree_on_links(specs, ranks, topology)
    spec = LinkSpec("", control_interface(specs, topology))
    with _naming_address(rank, size, timeout_s), group_environment(spec, size):
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
    return specs, topology


@contextmanager
def _naming_address(rank: int, size: int, timeout_s: float) -> Iterator[None]:
    """Name the address of the job in errors of the block."""
    try:
        yield
    except (RuntimeError, ValueError, TimeoutError) as error:
        raise RuntimeError(
            f"rank {rank} could not connect to all {size} "
            f"ranks at {os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')} within "
            f"{timeout_s:g} s: {error}"
        ) from error


# ---- exit -----------------------------------------------------------------------------------


def close_at_exit(close: Callable[[], None], cluster: Cluster) -> None:
    """At exit, call `close`, which closes the session, if the cluster is still open."""
    cluster.leave = run_at_process_exit(partial(_close, close, cluster))


def _close(close: Callable[[], None], cluster: Cluster) -> None:
    if not cluster.closed:
        publish_uncaught_exception()
        if cluster.topology.sharded and getattr(sys, "last_value", None) is not None:
            # FSDP's own error names no rank. The report waits up to 3 s for missing heartbeats.
            console.print("failure", cluster.control.report_failure(), "error")
        close()


@cache
def register_exit(joined_here: bool) -> None:
    """Register `_destroy_process_group` once, before any session, so that it runs after all of them
    have closed."""
    atexit.register(_destroy_process_group, joined_here, os.getpid())


def _destroy_process_group(joined_here: bool, process_id: int) -> None:
    """Destroy the default process group, or end the process immediately after a failure.

    A link may be blocked in a collective. Exit with a living process group can then abort the
    process, so end it immediately; the exit status is 1 after a failure. A fork of the process
    `process_id` cannot destroy the group, because it has no threads of gloo.
    """
    failed = getattr(sys, "last_value", None) is not None
    stuck = any(t.name.startswith(THREAD_PREFIX) for t in threading.enumerate())
    if failed or stuck:
        sys.stdout.flush()
        sys.stderr.flush()
        # Without a failure, a thread is stuck in a message of the last forward that no code awaits.
        os._exit(1 if failed else 0)
    if joined_here and dist.is_initialized() and os.getpid() == process_id:
        dist.destroy_process_group()
