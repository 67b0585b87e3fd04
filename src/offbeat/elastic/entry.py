"""Entry of a process into a job whose members change: checks, connection, and repeated attempts."""

from __future__ import annotations

import gc
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import TypeVar

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from offbeat.core.buckets.shards import shard_ranks
from offbeat.core.plan import INSIDE
from offbeat.core.runtime.job_profile import GivenProfile
from offbeat.core.start.connecting import Connector, register_exit
from offbeat.core.start.launch_request import LaunchRequest
from offbeat.core.strategy.interface import Strategy
from offbeat.core.transport.cluster import Cluster, connect
from offbeat.core.transport.interfaces import control_interface
from offbeat.core.transport.topology import NodeClaim, Topology
from offbeat.elastic.members import (
    JobMember,
    Members,
    destroy_left_group,
    require_supported_strategy,
)
from offbeat.elastic.node import MemberNode

JOIN_ATTEMPTS = 3  # of a process that joins a running job, whose members may fail meanwhile
T = TypeVar("T")


class JoinError(RuntimeError):
    """A member of a running job has failed while this process joined it."""


def require_members(
    members: Members,
    strategy: Strategy,
    profile: GivenProfile,
    job: LaunchRequest,
    model: nn.Module,
    *,
    mesh: DeviceMesh | None,
    is_list: bool,
) -> None:
    """Raise ValueError if a job whose members change does not support an argument of `prepare`."""
    if not isinstance(members, Members):
        raise ValueError(
            f"members ({members!r}) must be offbeat.Members(service), with the address of a "
            "membership service, as in '10.0.0.1:29600'"
        )
    if mesh is not None or is_list:
        raise ValueError(
            "members (given) must be left out with mesh or a list of optimizers; give one "
            "optimizer, and nodes='auto' for members of several ranks"
        )
    if job.checkpoint_every is not None or job.record_dir or job.stop_after_profile:
        raise ValueError(
            "members (given) must be left out under `offbeat run`, `compare` and `profile`, whose "
            "ranks do not change; start each member alone"
        )
    if members.founders() < 2 and profile is None:
        raise ValueError(
            f"first ({members.founders()}) in Members must be at least 2 without a profile, "
            "because one member cannot measure the network; give a profile of at least 2 ranks"
        )
    require_supported_strategy(strategy)
    ranks = shard_ranks(model)
    if ranks is not None:
        raise ValueError(
            f"the model (sharded over ranks {', '.join(map(str, ranks))}) must be whole on every "
            "rank where members change, because fully_shard keeps process groups that end with "
            "each change; leave fully_shard out and give nodes='auto', or leave members out"
        )


def enter_job(
    members: Members,
    facts: dict[str, str],
    node: MemberNode,
    own: Connector,
    begin: Callable[[JobMember, Cluster], T],
) -> T:
    """Enter a job whose members change, in at most `JOIN_ATTEMPTS` attempts.

    Args:
        members: settings of the job.
        facts: facts that must be equal on all members, by description.
        node: ranks of this member.
        own: device and links of this rank.
        begin: begins to train on connected ranks. Its result is returned.

    Raises:
        ValueError: the script has connected ranks itself, or requests links of NCCL.
        JoinError: a member of a running job has failed in each attempt to join it.
    """
    for _ in range(JOIN_ATTEMPTS - 1):
        with suppress(JoinError):
            return begin(*_connect(members, facts, node, own))
        gc.collect()  # groups in reference cycles stay connected, and other ranks would await them
    return begin(*_connect(members, facts, node, own))


def _connect(
    members: Members, facts: dict[str, str], node: MemberNode, own: Connector
) -> tuple[JobMember, Cluster]:
    """Return this process as a member, and its connections to all members."""
    specs = own.specs
    destroy_left_group()
    if dist.is_initialized() or any(spec.backend != "gloo" for spec in specs):
        what = "process group (initialized)" if dist.is_initialized() else f"links ({own.links!r})"
        raise ValueError(
            f"{what} must be left to offbeat.prepare where members change: it creates groups of "
            "gloo for each set of members; remove init_process_group and links of NCCL, "
            "and close a model that has been prepared before"
        )
    register_exit(True)
    facts = {**facts, "number of links": str(len(specs))}
    interface = control_interface(specs, Topology((tuple(range(node.size)),)))
    member = JobMember(members, facts, interface, own.timeout_s, node)
    member.links = [spec.name for spec in specs]
    try:
        member.enter()
        with closing_on_failure(member):
            topology, claim = member.topology, NodeClaim("", node=(member.rank,))
            if not topology.is_flat:
                claim = NodeClaim(topology.source, nodes=topology.nodes)
            agreed = topology if member.has_joined else None
            if member.has_joined:  # the members have agreed on links before
                names = member.epoch.details["links"]
                specs = [replace(s, name=name) for s, name in zip(specs, names, strict=True)]
            member.open_group()
            ends = own.where, own.device, own.timeout_s
            cluster = connect(
                specs,
                *ends,
                claim,
                agreed,
                member.protocol,
                require_members=member.require_present,
                owns_default=True,
            )
    except BaseException:
        member.close()
        raise
    between = iter([name for name in cluster.specs if name != INSIDE])
    member.links = [INSIDE if spec.name == INSIDE else next(between) for spec in specs]
    return member, cluster


@contextmanager
def closing_on_failure(member: JobMember) -> Iterator[None]:
    """Destroy the process groups if the body fails.

    Raises:
        JoinError: the body has raised a RuntimeError in a process that joins a running job.
    """
    try:
        yield
    except BaseException as error:
        traceback.clear_frames(error.__traceback__)  # they refer to groups, which would stay open
        if dist.is_initialized():
            dist.destroy_process_group()
        gc.collect()
        if member.has_joined and isinstance(error, RuntimeError):
            raise JoinError(str(error)) from error
        raise
