"""Entry of a process into a job whose members change: checks, connection, and repeated attempts."""

from __future__ import annotations

import gc
import os
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from offbeat.core.buckets.shards import shard_ranks
from offbeat.core.parts import part
from offbeat.core.plan import INSIDE
from offbeat.core.profile import Profile
from offbeat.core.runtime.job_profile import KnownProfile
from offbeat.core.runtime.model_checks import fingerprint_of
from offbeat.core.runtime.prepare import Preparation, closing_on_error
from offbeat.core.runtime.recording import joined_processes, process_facts
from offbeat.core.runtime.training_job import divide_ranks
from offbeat.core.start.connecting import Connector, register_exit
from offbeat.core.transport.cluster import Cluster, connect
from offbeat.core.transport.interfaces import control_interface
from offbeat.core.transport.topology import NodeClaim, Nodes, Topology
from offbeat.elastic.members import (
    JobMember,
    Members,
    destroy_left_group,
    require_supported_strategy,
)
from offbeat.elastic.node import MemberNode, node_of_process

if TYPE_CHECKING:
    from offbeat.core.runtime.prepared import Model, Optimizer

JOIN_ATTEMPTS = 3  # of a process that joins a running job, whose members may fail meanwhile


class JoinError(RuntimeError):
    """A member of a running job has failed while this process joined it."""


def require_members(
    members: Members, preparation: Preparation, *, mesh: DeviceMesh | None, is_list: bool
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
    request = preparation.request
    if request.checkpoint_every is not None or request.record_dir or request.stop_after_profile:
        raise ValueError(
            "members (given) must be left out under `offbeat run`, `compare` and `profile`, whose "
            "ranks do not change; start each member alone"
        )
    if members.founders() < 2 and preparation.profile is None:
        raise ValueError(
            f"first ({members.founders()}) in Members must be at least 2 without a profile, "
            "because one member cannot measure the network; give a profile of at least 2 ranks"
        )
    require_supported_strategy(preparation.strategy)
    ranks = shard_ranks(preparation.model)
    if ranks is not None:
        raise ValueError(
            f"the model (sharded over ranks {', '.join(map(str, ranks))}) must be whole on every "
            "rank where members change, because fully_shard keeps process groups that end with "
            "each change; leave fully_shard out and give nodes='auto', or leave members out"
        )


def enter_job(
    members: Members, preparation: Preparation, own: Connector, nodes: Nodes | None
) -> tuple[Model, Optimizer]:
    """Enter a job whose members change, in at most `JOIN_ATTEMPTS` attempts.

    Args:
        members: settings of the job.
        preparation: steps of `prepare` on connected ranks.
        own: device and links of this rank.
        nodes: argument `nodes` of `prepare`.

    Returns:
        The prepared model and optimizer.

    Raises:
        ValueError: the script has connected ranks itself, or requests links of NCCL.
        JoinError: a member of a running job has failed in each attempt to join it.
    """
    for name in ("join_observer", "MemberSession"):  # the others wait for a joining process
        part(name)
    node, strategy = node_of_process(nodes, os.environ, own.timeout_s), preparation.strategy
    facts = {
        "strategy": f"{strategy.name} {strategy.settings()}",
        "model": fingerprint_of(preparation.model),
        "arguments of prepare": preparation.arguments,
        "number of ranks of a member": str(node.size),
    }
    for _ in range(JOIN_ATTEMPTS - 1):
        with suppress(JoinError):
            return _begin(preparation, *_connect(members, facts, node, own))
        gc.collect()  # groups in reference cycles stay connected, and other ranks would await them
    return _begin(preparation, *_connect(members, facts, node, own))


def _begin(
    preparation: Preparation, member: JobMember, cluster: Cluster
) -> tuple[Model, Optimizer]:
    """Open the session of a member: of a job that begins, or of a running job that this process
    joins, whose members are in `MemberSession.begin_epoch`.

    Raises:
        JoinError: a member of the running job has failed meanwhile.
    """
    if not member.has_joined:
        return preparation.open_session(cluster, member)
    with closing_on_failure(member), closing_on_error(cluster, member) as undo:
        everyone = cluster.control.gather({"joins": process_facts()})
        facts, strategy = everyone[0], preparation.strategy
        if (record := facts.get("record")) is not None:
            record |= {"members": member.rank_names, "joined": joined_processes(everyone)}
        recorder = part("join_observer")(preparation.settings, strategy, cluster, record)
        if recorder is not None:
            undo.callback(recorder.write, {})
        cluster.alignment_bytes = facts["alignment_bytes"]
        known = KnownProfile(Profile.from_dict(facts["profile"]))
        ranks = divide_ranks(0, strategy, cluster.control)
        fingerprint, more = fingerprint_of(preparation.model), {"member": member, "joining": facts}
        job = preparation.job(cluster, known, fingerprint, ranks, recorder, **more)
        session = strategy.open(job)
        undo.pop_all()
    return preparation.finish(job, session, [0 if preparation.metrics else None])


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
