"""Preparation of training: connections, agreement of all ranks, and the session of the strategy."""

from __future__ import annotations

import atexit
import hashlib
import inspect
import os
import sys
import threading
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from datetime import timedelta
from functools import cache, partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import PrefixStore

import offbeat
from offbeat.core.buckets.flat import ALIGNED_BYTES, require_supported
from offbeat.core.buckets.shards import describe_shards, reshard, shard_ranks
from offbeat.core.checkpoint.checkpoints import enable_checkpoints, save
from offbeat.core.console import console
from offbeat.core.files import write_or_warn
from offbeat.core.guards.comparison import EVERY, Settings, agree_on_optimizer, describe_difference
from offbeat.core.guards.finite import OnNonfinite, require_policy
from offbeat.core.guards.replicas import broadcast_model
from offbeat.core.measuring.network_check import compare_network
from offbeat.core.plan import INSIDE
from offbeat.core.profile import Profile
from offbeat.core.profile.elsewhere import for_members
from offbeat.core.runtime.joint_optimizer import JointOptimizer, require_disjoint
from offbeat.core.runtime.launch_request import (
    CHECKPOINT_VARIABLE,
    JOIN_VARIABLE,
    STRATEGY_VARIABLE,
    LaunchRequest,
    Replan,
    current_job,
    current_join_request,
    current_links,
    current_nodes,
    current_place,
    current_replan,
    current_servers,
)
from offbeat.core.runtime.launchers import torchrun_variables
from offbeat.core.runtime.member_node import MemberNode, node_of_process
from offbeat.core.runtime.members import JobMember, Members, require_supported_strategy
from offbeat.core.runtime.meter import Meter, SampleBoard
from offbeat.core.runtime.metrics import Log, Metrics
from offbeat.core.runtime.named_strategy import NamedStrategy
from offbeat.core.runtime.prepared import Model, Optimizer, Session
from offbeat.core.runtime.recording import Recorder, joined_processes, process_facts
from offbeat.core.runtime.training_job import (
    JOIN_OBSERVER,
    OPEN_OBSERVER,
    READ_SETTINGS,
    RUN_RECORDER,
    STOP_REQUEST,
    Observation,
    RankRoles,
    TrainingJob,
    Watch,
    divide_ranks,
)
from offbeat.core.strategy.interface import Strategy, load_object, require_count
from offbeat.core.strategy.parsing import parse
from offbeat.core.strategy.registry import create, is_registered
from offbeat.core.transport import addresses, rendezvous
from offbeat.core.transport.cluster import Cluster, connect
from offbeat.core.transport.control import Control
from offbeat.core.transport.device import device_of
from offbeat.core.transport.heartbeat import publish_uncaught_exception, run_at_process_exit
from offbeat.core.transport.interfaces import (
    NCCL_INTERFACE,
    LinkSpec,
    agree_on_links,
    control_interface,
    group_environment,
    parse_link,
)
from offbeat.core.transport.link import THREAD_PREFIX
from offbeat.core.transport.store_agreement import StoreAgreement
from offbeat.core.transport.topology import (
    DIMENSIONS,
    NodeClaim,
    Nodes,
    Topology,
    agree_on_topology,
    claim_topology,
)

if TYPE_CHECKING:
    from offbeat.jobs.stopping import StopRequest

OBSERVE = 6
DEFAULT_STRATEGY = "wfbp"
JOIN_ATTEMPTS = 3  # of a process that joins a running job, whose members may fail meanwhile
TIMEOUT_S = 120.0
OF_INTERFACES = "of network interfaces, at least one, each once, as in ['eth0', 'gloo:eth1']"
WRAPPERS = {"DistributedDataParallel", "DataParallel", "FullyShardedDataParallel"}
_GPU = tuple[str, int]
SAME_MODEL = "build it from the same configuration everywhere"


REHEARSAL: ContextVar[Callable[..., tuple[Model, Any]] | None] = ContextVar(
    "rehearsal", default=None
)
"""Function that replaces `prepare` in the threads of a rehearsal: of (model, optimizer, strategy,
`Watch`)."""


class JoinError(RuntimeError):
    """A member of a running job has failed while this process joined it."""


@torch.inference_mode(mode=False)  # tensors created here are trained later
def prepare(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    strategy: Strategy | str | None = None,
    *,
    profile: Profile | str | Path | None = None,
    links: Sequence[str] | None = None,
    observe: int = OBSERVE,
    min_bucket_bytes: int | None = None,
    timeout_s: float = TIMEOUT_S,
    compare_every: int = EVERY,
    on_nonfinite: OnNonfinite = "raise",
    broadcast_buffers: bool = True,
    replan: Replan | None = None,
    metrics: Metrics | Log | str | None = None,
    record: str | Path | None = None,
    mesh: DeviceMesh | None = None,
    nodes: Nodes | None = None,
    members: Members | None = None,
    process_group: None = None,
) -> tuple[Model, Any]:
    """Return a model and an optimizer that train together with their replicas on all ranks.

    Start one process per rank with `torchrun`, `offbeat run`, `srun` or `mpirun`. A single process
    trains alone. To use several optimizers, each with its own parameters, pass a list, which is
    returned as a list: `model, [muon, adamw] = offbeat.prepare(model, [muon, adamw])`.

    Args:
        model: module to train, on its final device and with its final dtype.
        optimizer: optimizer of the model's parameters, or a list of several.
        strategy: strategy, or its name and settings such as "dreamddp:period=8"; by default
            `WFBP()`. The strategy of `offbeat run`, or else of the variable OFFBEAT_STRATEGY, takes
            precedence.
        profile: profile of the job, or a file. A Profile must match model and job. A file is used
            if it matches, otherwise it is measured and written. Without a profile, the first
            `observe` iterations run BSP and are measured. A few messages show whether the profile
            describes another network: then a file that was measured before is measured again, and
            for any other profile rank 0 prints the difference.
        links: network interfaces, one link each, in the same order on all ranks. Links use gloo,
            with a GPU by way of pinned host memory. "nccl:eth0" is a link of NCCL, and "nccl" lets
            NCCL choose the interface. "eth0*2" opens 2 connections between two ranks (gloo).
            "wan=eth0" gives the link the name "wan".
        observe: iterations of BSP to measure without a profile.
        min_bucket_bytes: smallest bucket, in bytes; by default derived from the measured latency.
        timeout_s: longest wait for other ranks, in seconds.
        compare_every: iterations between two comparisons of replicas; 0: none. If only gradients
            are averaged, a difference raises RuntimeError, which names rank and setting or tensor.
            If parameters are averaged, only the optimizer's settings and the names of frozen
            parameters are compared, and rank 0 warns of weights that only some ranks have written
            between a step and the next forward.
        on_nonfinite: treatment of an average to which a rank contributes NaN or infinity. "raise":
            RuntimeError on every rank, which names rank and bucket. "skip": the average excludes
            that rank, and the rank receives it. "ignore": no check. DDP() ignores this argument and
            `compare_every`.
        broadcast_buffers: whether all ranks receive the buffers that rank 0's forward has written,
            before the next forward, as under torch's DDP. Applies to synchronous strategies; under
            other strategies, every rank keeps its own buffers.
        replan: whether the job is planned again if messages of a link, or the compute of a rank,
            take at least 1.4 times or at most .7 times as long as in the profile. "exact", the
            default: only if the result has the same bits, that is, if only order and moments of
            messages change. "always": also if sums or sets of layers change; `period` never
            changes. "never": nothing is measured. The variable OFFBEAT_REPLAN takes precedence.
        metrics: log of training metrics, see `offbeat.metrics`, which may differ between ranks; or
            sinks as in the variable OFFBEAT_METRICS, such as "prometheus:9400".
        record: folder of the records of jobs; "off" or None: no record. The variable OFFBEAT_RECORD
            takes precedence.
        mesh: device mesh that states which ranks share a replica. For a model that `fully_shard`
            has divided inside nodes: the dimension between nodes, as in mesh=mesh["between"]. For
            whole models: two dimensions, between nodes and inside a node. All ranks of a node hold
            the whole model and average their gradients in every iteration; the strategy averages
            between nodes. None, and no `nodes`: every rank trains a replica of its own.
        nodes: the same without a mesh: "auto" for the ranks that torchrun starts on one host
            (LOCAL_WORLD_SIZE), the number of ranks of each node, or lists of ranks, which may be
            of unequal length. The variable OFFBEAT_NODES ("auto" or a number) is the default. The
            link inside nodes may be named, as in links=["eth0", "inside=gloo:lo"].
        members: settings of a job whose members may join, leave and fail while it trains, as in
            `members=offbeat.Members("10.0.0.1:29600")` with the address of a membership service.
            Start each process, or each node, alone with the same script; with nodes="auto" the
            ranks that torchrun starts on one host are one member. None: the ranks of the job do
            not change.
        process_group: must be None, because all ranks of the job average.

    Returns:
        The prepared model and optimizer, or the prepared model and a list of optimizers.

        With a strategy that has servers (SSP, PSBSP), the last OFFBEAT_SERVERS ranks serve. With
        gossip (A2CiD2, ADPSGD), each rank trains its own parameters, and the job survives the
        failure of ranks.

    Raises:
        ValueError: an argument is invalid, or models, strategies or links differ between ranks. A
            difference raises on every rank.
        SystemExit: on a rank that serves, after all workers have left.
    """
    _require_no_process_group(process_group)
    rehearse = REHEARSAL.get()
    if rehearse is not None:
        watch = Watch(compare_every, on_nonfinite, broadcast_buffers)
        return rehearse(model, optimizer, strategy, watch, mesh=mesh, nodes=nodes)
    _require_mesh(mesh)
    job = current_job()
    if not dist.is_initialized():
        os.environ.update(torchrun_variables(os.environ))
    if job.save_strategy is not None:
        _save_strategy(strategy, job, job.save_strategy)
    strategy, notice = _choose_strategy(strategy, job)
    servers = current_servers()
    given_s = timeout_s if job.timeout_s is None else job.timeout_s
    timeout_s = _require_positive("timeout_s", given_s)
    min_bucket_bytes = job.min_bucket_bytes or min_bucket_bytes
    require_count("observe", observe, remedy="pass a profile to observe no iterations")
    if min_bucket_bytes is not None:
        remedy = "use None to derive it from the measured latency of a message"
        require_count("min_bucket_bytes", min_bucket_bytes, remedy=remedy)
    require_count("compare_every", compare_every, least=0, remedy="0 turns comparisons off")
    require_policy(on_nonfinite)
    measured = current_replan(replan)
    sinks = metrics if isinstance(metrics, str) else None
    settings = load_object(READ_SETTINGS)(
        os.environ, sys.argv, record=record, metrics=sinks, launcher_record=job.record_dir
    )
    console.format = settings.log
    if isinstance(metrics, str):
        metrics = None
    elif metrics is not None and not isinstance(metrics, Metrics):
        metrics = Metrics(metrics)
    whole, is_list = joined_optimizer(model, optimizer, strategy)
    _require_idle_servers()
    _require_one_model(job)
    if current_join_request() is not None and not strategy.needs.allows_joining:
        raise ValueError(
            f"strategy ({strategy}) must be the job's, one of gossip, where {JOIN_VARIABLE} is "
            "set; name it in the script, or as in `offbeat join --strategy a2cid2`"
        )
    if job.checkpoint is not None and strategy.needs.no_checkpoint is not None:
        raise ValueError(strategy.needs.no_checkpoint)
    if mesh is None and nodes is None:
        nodes = current_nodes()
    options = (
        f"observe={observe}, min_bucket_bytes={min_bucket_bytes}, "
        f"profile={_profile_kind(profile)}, compare_every={compare_every}, "
        f"on_nonfinite={on_nonfinite}, broadcast_buffers={broadcast_buffers}, "
        f"replan={measured}, "
        f"servers={servers}, "
        f"{CHECKPOINT_VARIABLE} {'unset' if job.checkpoint is None else 'set'}"
    )
    watch = Watch(compare_every, on_nonfinite, broadcast_buffers, measured)
    member = None
    if members is None:
        cluster = _connect(model, links, timeout_s, mesh, nodes)
    else:
        _require_members(members, strategy, profile, job, mesh=mesh, is_list=is_list)
        _require_no_shards(model)
        node = node_of_process(nodes, os.environ, timeout_s)
        facts = {
            "strategy": f"{strategy.name} {strategy.settings()}",
            "model": fingerprint_of(model),
            "arguments of prepare": options,
            "number of ranks of a member": str(node.size),
        }
        attempts = 0
        while True:
            attempts += 1
            try:
                member, cluster = _connect_member(model, links, timeout_s, members, facts, node)
                if not member.has_joined:
                    break
                joined = _join_running_job(
                    model, whole, strategy, cluster, member, watch, metrics, settings
                )
                enable_checkpoints(replace(job, resume=False), *joined)
                return joined
            except JoinError:
                if attempts == JOIN_ATTEMPTS:
                    raise
    recorder = None
    try:
        if not job.stop_after_profile:  # a measurement runs a plan of its own
            _require_plan(strategy, cluster.topology)
        cluster.control.agree("the arguments of prepare", options, "call it alike everywhere")
        fingerprint = agree_on_model(model, whole, strategy, cluster.control)
        ranks = divide_ranks(servers, strategy, cluster.control)
        known, save_to = None, None
        if strategy.needs.profile:
            resizes = member is not None
            known, save_to = _known_profile(profile, job, fingerprint, cluster, resizes=resizes)
        difference = None if known is None else compare_network(cluster, known)
        if difference is not None:
            assert known is not None
            if save_to is not None and job.profile is None and known.model:
                known, difference = None, f"{difference}; it is measured again"
            else:
                difference += "; plan and predictions do not fit, so measure it again"
            notice = difference if notice is None else f"{notice}\n{difference}"
        how = Observation(
            observe,
            min_bucket_bytes,
            fingerprint,
            save_to,
            job.stop_after_profile,
            job.pace,
            job.turns,
            job.least_buckets,
        )
        sampled = metrics.divergence_every if metrics else None
        if member is not None and sampled:
            sampled = 0  # the store of the samples ends with the epoch
        samples, gpus = zip(*cluster.control.gather((sampled, _gpu_of(cluster.where))), strict=True)
        if any(gpu is not None for gpu in gpus):
            cluster.alignment_bytes = ALIGNED_BYTES
        if cluster.control.rank == 0:
            for text in (*settings.notices, *_notices(notice, strategy, cluster, gpus)):
                console.print("notice", text, "warning")
            console.print("start", _startup_message(strategy, cluster, known, observe))
        recorder = _create_recorder(model, job, cluster)
        if recorder is None:
            names = () if member is None else member.rank_names
            recorder = load_object(OPEN_OBSERVER)(settings, strategy, cluster, names)
        stop_request = None  # a member requests to leave
        if member is None:
            stop_request = _create_stop_request(job, cluster, recorder)
        broadcast_model(model, cluster)  # may take minutes, in which the record shows the job
        if recorder is not None and difference is not None:
            recorder.warnings.append(difference)
        training = TrainingJob(
            model, whole, cluster, known, how, watch, job, ranks, recorder, stop_request, member
        )
        session = strategy.open(training)
    except BaseException:
        if recorder is not None:
            recorder.write({})
        cluster.close()
        if member is not None:
            member.close()
        raise
    if recorder is not None:
        recorder.attach(session)
    prepared = _finish(training, strategy, session, metrics, samples)
    try:
        enable_checkpoints(job, *prepared)
        if stop_request is not None:
            act = None if job.checkpoint is None else partial(save, job.checkpoint, *prepared)
            stop_request.attach(session, act)
            session.stop_request = stop_request
    except BaseException:
        prepared[0].close()
        raise
    return (prepared[0], prepared[1].parts()) if is_list else prepared


def _finish(
    job: TrainingJob,
    strategy: Strategy,
    session: Session,
    metrics: Metrics | None,
    samples: Sequence[int | None],
) -> tuple[Model, Optimizer]:
    """Return model and optimizer of a session that has been opened."""
    model, cluster = job.model, job.cluster
    session.strategy = _job_name(strategy, cluster.topology)
    _prepared[model], cluster.served = ref(cluster), strategy.needs.servers
    cluster.leave = run_at_process_exit(partial(_close_at_exit, session, cluster))
    meter = _create_meter(metrics, samples, session, model, cluster, job.ranks)
    return Model(model, session, meter), Optimizer(job.optimizer, session, meter)


def joined_optimizer(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    strategy: Strategy,
) -> tuple[torch.optim.Optimizer, bool]:
    """Return the optimizer that a session steps, and whether the script has passed a list.

    Raises:
        ValueError: the strategy cannot train the model with this optimizer.
    """
    is_list = isinstance(optimizer, Sequence)
    parts = list(optimizer) if isinstance(optimizer, Sequence) else [optimizer]
    for one in parts:
        if not hasattr(one, "param_groups"):
            raise ValueError(
                f"optimizer ({type(one).__name__}) must be a torch.optim.Optimizer, or a list of "
                "them, each with parameters of its own"
            )
        _require_unprepared(model, one)
        _require_dense_gradients(one, strategy)
    whole = _join_optimizers(model, parts, strategy) if is_list else parts[0]
    if hasattr(model, "_orig_mod"):  # a module that torch.compile has returned
        warnings.warn(
            "a model compiled as a whole yields all gradients at the end of backward, so nothing "
            "can be sent under it; compile its blocks instead",
            stacklevel=3,
        )
    _require_unwrapped(model)
    reshard(model)  # a forward of FSDP may have left whole parameters in the place of shards
    require_supported(model)
    _require_own_parameters(model, whole)
    _require_one_backward(whole)
    return whole, is_list


def _join_optimizers(
    model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], strategy: Strategy
) -> JointOptimizer:
    """Return one optimizer that joins several."""
    if not optimizers or strategy.needs.one_optimizer:
        raise ValueError(
            f"optimizer (a list of {len(optimizers)}) must be one torch.optim.Optimizer under "
            f"{strategy}, or a list of at least one under other strategies, such as WFBP()"
        )
    require_disjoint(model, optimizers)
    for one in optimizers:
        _require_one_backward(one)
    return JointOptimizer(optimizers)


_sessions = count()  # number of sessions with metrics; the same on all ranks


def _create_meter(
    metrics: Metrics | None,
    samples: Sequence[int | None],
    session: Session,
    model: nn.Module,
    cluster: Cluster,
    ranks: RankRoles,
) -> Meter | None:
    """Return the meter of this rank; None if no rank logs.

    All ranks leave samples with the period of the first rank that logs.
    """
    control = cluster.control
    often = next((every for every in samples if every is not None), None)
    if often is None:
        return None
    board = None
    if often and len(ranks.workers) > 1:
        board = SampleBoard(control.store(f"metrics{next(_sessions)}"), control.rank, ranks.workers)
    trained = [p for p in model.parameters() if p.requires_grad]
    return Meter(metrics, session, cluster.device, board, often, trained)


def _create_recorder(model: nn.Module, job: LaunchRequest, cluster: Cluster) -> Recorder | None:
    """Return the recorder of this rank; None if the launcher requests no record."""
    if not job.record_dir:
        return None
    recorder = load_object(RUN_RECORDER)(job.record_dir, cluster.control.rank, cluster.device)
    recorder.notes["emulated"] = bool(getattr(model, "emulated", False))
    recorder.notes.update(cluster.topology.record())
    return recorder


def _create_stop_request(
    job: LaunchRequest, cluster: Cluster, recorder: Recorder | None
) -> StopRequest | None:
    """Return the handler of SIGTERM; None if there is nothing to save or to record."""
    on_end = recorder.end if recorder is not None and recorder.keeps_end else None
    if job.checkpoint is None and on_end is None:
        return None
    request = load_object(STOP_REQUEST)(cluster.control, on_end)
    cluster.before_close = request.close
    return request


def _choose_strategy(
    strategy: Strategy | str | None, job: LaunchRequest
) -> tuple[Strategy, str | None]:
    """Return the strategy to run, and a notice if it is not the script's."""
    script = parse(strategy) if isinstance(strategy, str) else strategy
    if script is not None and not isinstance(script, Strategy):
        raise ValueError(
            f"strategy ({script!r}) must be a strategy, or its name and settings as "
            "'dreamddp:period=8'"
        )
    requested = os.environ.get(STRATEGY_VARIABLE)
    if job.strategy is not None:
        chosen, by = create(job.strategy, job.settings), "the launcher"
    elif requested:
        chosen, by = parse(requested), STRATEGY_VARIABLE
    else:
        return script if script is not None else create(DEFAULT_STRATEGY), None
    if script is None or script == chosen or job.stop_after_profile:
        return chosen, None
    return chosen, f"{by} selects {chosen}, so {script} of the script is not used"


def _save_strategy(strategy: Strategy | str | None, job: LaunchRequest, path: str) -> None:
    """On rank 0, write the strategy that would run without the launcher's choice, for the
    launcher."""
    chosen, _ = _choose_strategy(strategy, replace(job, strategy=None))
    if "RANK" not in os.environ or current_place()[0] == 0:
        script = parse(strategy) if isinstance(strategy, str) else strategy
        text = None if script is None else str(script)
        named = NamedStrategy(text, chosen.name, chosen.settings(), not is_registered(chosen))
        write_or_warn(named.save, path, "strategy", needed=job.stop_after_strategy)
    if job.stop_after_strategy:
        raise SystemExit(0)


def _startup_message(
    strategy: Strategy, cluster: Cluster, known: Profile | None, observe: int
) -> str:
    """Return one line about the run."""
    ranks = cluster.control.world_size
    links = ", ".join(map(str, cluster.specs.values()))
    how = ""
    if known is not None:
        how = ", profile given"
    elif strategy.needs.profile and strategy.needs.measures:
        how = f", observing {observe} iterations"
    return f"{strategy}, {ranks} rank{'s' * (ranks > 1)}, {links}{how}"


def _notices(
    notice: str | None, strategy: Strategy, cluster: Cluster, gpus: Sequence[_GPU | None]
) -> list[str]:
    """Return the notices about settings, nodes and GPUs, for the start of a run."""
    topology = cluster.topology
    if topology.is_flat:
        nodes = None if topology.source else _nodes_notice(os.environ, strategy, topology.ranks)
    else:
        nodes = f"{topology} ({topology.source}): {_describe_nodes(topology)}"
    shared = _shared_gpu_notice(cluster.control.hosts, gpus)
    return [text for text in (notice, nodes, shared) if text is not None]


def _gpu_of(where: torch.device) -> _GPU | None:
    """Return the GPU of this rank, and the number of GPUs that this process sees; None for a
    CPU."""
    if where.type != "cuda":
        return None
    return str(torch.cuda.get_device_properties(where).uuid), torch.cuda.device_count()


def _shared_gpu_notice(hosts: Sequence[str], gpus: Sequence[_GPU | None]) -> str | None:
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


def _job_name(strategy: Strategy, topology: Topology) -> str:
    """Return the name of strategy and nodes, which must be equal where a checkpoint continues."""
    return str(strategy) if topology.is_flat else f"{strategy} on {topology}"


def _describe_nodes(topology: Topology) -> str:
    """Return what the ranks of a node share."""
    if topology.sharded:
        return "each node holds one replica in shards, which average between nodes"
    if topology.replicas == 1:
        return (
            "every rank holds the whole model; gradients are averaged inside the node in every "
            "iteration, and there is no other node to average with"
        )
    return (
        "every rank holds the whole model; gradients are averaged inside a node in every "
        f"iteration, and the strategy averages {topology.replicas} replicas between nodes"
    )


def _nodes_notice(environ: Mapping[str, str], strategy: Strategy, ranks: int) -> str | None:
    """Return a notice if several ranks share a node and the job has several nodes; otherwise
    None."""
    local = environ.get("LOCAL_WORLD_SIZE", "")
    if not local.isdigit() or not 1 < int(local) < ranks:
        return None
    remedy = "start one rank per node, or use a strategy such as dreamddp with nodes='auto'"
    if type(strategy).open is Strategy.open:
        remedy = (
            "give nodes='auto': the ranks of a node then share a replica, and each message crosses "
            "that network once per node"
        )
    return (
        f"LOCAL_WORLD_SIZE ({local}) is above 1 and below the number of ranks ({ranks}), and every "
        "rank communicates as if it were a node of its own. Where the network between nodes is "
        f"slow, {remedy}"
    )


def _require_positive(name: str, value: float) -> float:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not 0 < value < float("inf"):
        raise ValueError(f"{name} ({value!r}) must be a number of seconds above 0")
    return float(value)


# Clusters by model, weak: sessions refer to the model, so a strong reference would keep both alive.
_prepared: WeakKeyDictionary[nn.Module, ref[Cluster]] = WeakKeyDictionary()


def _open_clusters() -> dict[nn.Module, Cluster]:
    """Return the clusters of prepared models that are not closed, by model."""
    clusters = ((model, known()) for model, known in _prepared.items())
    return {m: cluster for m, cluster in clusters if cluster is not None and not cluster.closed}


def _require_unprepared(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    if isinstance(optimizer, Optimizer):
        raise ValueError("the optimizer is prepared already; call prepare once")
    if isinstance(model, Model) or model in _open_clusters():
        raise ValueError(
            "the model is prepared already; call prepare once, or model.close() before"
        )


def _require_unwrapped(model: nn.Module) -> None:
    """Raise ValueError if the model contains a wrapper of DDP, DataParallel or FSDP.

    The check compares class names, because most of these modules take long to import.
    """
    for name, module in model.named_modules():
        wrapper = WRAPPERS & {cls.__name__ for cls in type(module).__mro__}
        if wrapper:
            raise ValueError(
                f"the model ({name or type(module).__name__}) must not be wrapped in "
                f"{wrapper.pop()}, which sends gradients or weights between processes itself; pass "
                "the wrapped module to offbeat.prepare"
            )


def _require_no_process_group(process_group: object) -> None:
    """Raise ValueError if the script names a part of the job."""
    if process_group is not None:
        raise ValueError(
            f"process_group ({type(process_group).__name__}) must be left out: offbeat averages "
            "over all ranks of the job"
        )


def _require_mesh(mesh: object) -> None:
    """Raise ValueError unless the mesh is a device mesh of torch or None."""
    if mesh is not None and not isinstance(mesh, DeviceMesh):
        raise ValueError(
            f"mesh ({type(mesh).__name__}) must be a torch.distributed.device_mesh.DeviceMesh of "
            f"two dimensions, between nodes and inside: {DIMENSIONS}"
        )


def _require_plan(strategy: Strategy, topology: Topology) -> None:
    """Raise ValueError on every rank if replicas have several ranks and the strategy has a session
    of its own, which supports one rank per replica only, or if it requires early updates and the
    model is sharded."""
    if topology.sharded and strategy.requires_early_updates:
        raise ValueError(
            f"strategy ({strategy}) must not require updates in backward where the model is "
            "sharded (fully_shard), because FSDP gathers weights at moments of its own; use "
            "average='before_update', or leave average out"
        )
    supports = type(strategy).open is Strategy.open or strategy.needs.nodes
    if not topology.is_flat and not supports:
        raise ValueError(
            f"strategy ({strategy}) must be one with a plan where replicas have several ranks "
            f"({topology.source}: {topology}), because its workers exchange whole models at times "
            "of their own, and the ranks of a replica train in step; use one such as dreamddp or "
            "wfbp, or leave mesh and nodes out, so that every rank trains a replica of its own"
        )


def _require_idle_servers() -> None:
    if any(cluster.served for cluster in _open_clusters().values()):
        raise ValueError(
            "another model is prepared with servers, which serve only that model; train both as "
            "one module with one optimizer, or use strategies without servers"
        )


def _require_one_model(job: LaunchRequest) -> None:
    if not _open_clusters():
        return
    if job.checkpoint is not None:
        raise ValueError(
            f"a second model cannot be prepared where {CHECKPOINT_VARIABLE} or `offbeat run "
            "--checkpoint` names a folder: its checkpoints are of one model. Train both as one "
            "module with one optimizer, or call offbeat.save and offbeat.load for each of them"
        )
    if job.record_dir or job.stop_after_profile:
        raise ValueError(
            "a second model cannot be prepared in a process that `offbeat run`, `compare` or "
            "`profile` has started: profile and record are of one model. Train both as one module "
            "with one optimizer, or start the script with torchrun"
        )


def _require_one_backward(optimizer: torch.optim.Optimizer) -> None:
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        raise ValueError(
            f"optimizer ({type(optimizer).__name__}) must have a step() that needs no closure, as "
            "an iteration has one backward; use one such as SGD or AdamW"
        )


def _require_dense_gradients(optimizer: torch.optim.Optimizer, strategy: Strategy) -> None:
    if isinstance(optimizer, torch.optim.SparseAdam) and not strategy.needs.sparse_gradients:
        raise ValueError(
            f"optimizer ({type(optimizer).__name__}) must accept dense gradients, because sparse "
            "ones become dense in offbeat's buckets; use Adam or SGD, or the strategy ddp"
        )


def _profile_kind(profile: Profile | str | Path | None) -> str:
    if profile is None:
        return "none"
    return "given" if isinstance(profile, Profile) else "a file"


def _require_own_parameters(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model_ids = {id(p) for p in model.parameters()}
    for g, group in enumerate(optimizer.param_groups):
        for i, p in enumerate(group["params"]):
            if id(p) not in model_ids:
                raise ValueError(
                    f"parameter {i} of the optimizer's group {g} must belong to the model; build "
                    "the optimizer from model.parameters() after the model is final"
                )


# ---- connecting -----------------------------------------------------------------------------


def _connect(
    model: nn.Module,
    links: Sequence[str] | None,
    timeout_s: float,
    mesh: DeviceMesh | None,
    nodes: Nodes | None,
) -> Cluster:
    where = next(p.device for p in model.parameters() if p.requires_grad)
    device = device_of(where)
    if where.type == "cuda":  # DLPack and NCCL use the current device of the process
        torch.cuda.set_device(where)
    specs = _link_specs(links, where)
    joined_here, topology = not dist.is_initialized(), None
    if not joined_here:
        _warn_of_earlier_nccl(specs)
    if joined_here:
        specs, topology = _join_process_group(specs, nodes, timeout_s)
    _register_exit(joined_here)
    rank, size = dist.get_rank(), dist.get_world_size()
    try:
        claim = claim_topology(mesh, nodes, shard_ranks(model), rank, size, os.environ)
    except ValueError as error:  # every rank must raise it
        claim = NodeClaim("", problem=str(error))
    return connect(specs, where, device, timeout_s, claim, topology, owns_default=joined_here)


def _link_specs(links: Sequence[str] | None, where: torch.device) -> list[LinkSpec]:
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
    between = [spec for spec in over_nccl if spec.name != INSIDE]
    if len({spec.interface for spec in between}) > 1:
        raise ValueError(
            f"{between[1]} must have the interface of {between[0]}, as NCCL uses one choice in "
            f"the whole process; give gloo:{between[1].interface} instead"
        )
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
        ranks.compare_versions(offbeat.__version__)
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


def agree_on_model(
    model: nn.Module, optimizer: torch.optim.Optimizer, strategy: Strategy, control: Control
) -> str:
    """Return the fingerprint of the model. Raise ValueError if strategy, model or optimizer differ
    between ranks."""
    settings = f"{strategy.name} {strategy.settings()}"
    control.agree("the strategy", settings, "start every rank with the same settings")
    tensors = _layout_of(model)
    layout: Settings = {
        f"parameter {i}": f"{name} {list(shape)} {dtype} {'trainable' if trained else 'frozen'} "
        f"with strides {list(strides)}"
        for i, (name, shape, dtype, trained, strides) in enumerate(tensors)
    }
    layout |= describe_shards(model)
    layout |= {f"buffer {n!r}": f"{list(b.shape)} {b.dtype}" for n, b in model.named_buffers()}
    difference = describe_difference(control.gather(layout))
    if difference is not None:
        raise ValueError(f"the model must be the same on all ranks: {difference}; {SAME_MODEL}")
    agree_on_optimizer(control, optimizer, model)
    return fingerprint_of(model)


def fingerprint_of(model: nn.Module) -> str:
    """Return a digest of names, shapes, types and strides of all parameters."""
    return hashlib.sha256(repr(_layout_of(model)).encode()).hexdigest()[:16]


def _layout_of(model: nn.Module) -> list[tuple[str, tuple[int, ...], str, bool, tuple[int, ...]]]:
    return [
        (name, tuple(p.shape), str(p.dtype), p.requires_grad, p.stride())
        for name, p in model.named_parameters()
    ]


# ---- profiles -------------------------------------------------------------------------------


def _known_profile(
    given: Profile | str | Path | None,
    job: LaunchRequest,
    fingerprint: str,
    cluster: Cluster,
    *,
    resizes: bool = False,
) -> tuple[Profile | None, str | None]:
    """Return the profile to plan from and the file to save a measured profile to.

    A Profile and the launcher's file must match. A user's file is a cache and is measured again if
    it does not match. Rank 0 reads the file for all ranks. With `resizes`, the profile may be of
    another number of replicas, at least 2.

    Returns:
        The profile, or None to measure one; the file, or None.
    """
    if job.stop_after_profile or (given is None and job.profile is None):
        return None, job.save_profile
    strict = job.profile is not None or isinstance(given, Profile)
    known, problem = None, None
    if cluster.control.rank == 0:
        try:
            known = _read_profile(given, job)
        except (OSError, ValueError) as error:
            problem = error
    own_result = {"problem": problem and str(problem), "profile": known and known.to_dict()}
    result = cluster.control.gather(own_result)[0]
    if result["problem"] is not None:
        raise problem or ValueError(result["problem"])
    known = result["profile"] and Profile.from_dict(result["profile"])
    cache = None if isinstance(given, Profile) else str(given) if given else None
    if known is None:
        return None, cache
    if resizes and known.world_size > 1:
        known = for_members(known, cluster.topology.replicas)
    mismatch = _find_mismatch(known, fingerprint, cluster, job)
    if mismatch and (strict or not known.model):
        raise ValueError(
            f"the profile does not match: {mismatch}; measure it again with `offbeat profile`"
        )
    return (None, cache) if mismatch else (known, cache)


def _read_profile(given: Profile | str | Path | None, job: LaunchRequest) -> Profile | None:
    if job.profile is not None:
        return Profile.load(job.profile)
    if isinstance(given, Profile):
        return given
    assert given is not None
    return Profile.load(given) if Path(given).exists() else None


def _find_mismatch(
    profile: Profile, fingerprint: str, cluster: Cluster, job: LaunchRequest
) -> str | None:
    if profile.model and profile.model != fingerprint:
        return f"it was measured on another model ({profile.model}, here {fingerprint})"
    topology = cluster.topology
    if profile.world_size != topology.replicas:
        return f"its world_size ({profile.world_size}) must be {topology.replicas}"
    sizes = () if topology.is_flat else topology.sizes
    if (profile.topology, profile.sharded) != (sizes, topology.sharded):
        return f"the numbers of ranks of its replicas ({profile.topology}) must be {sizes}"
    if profile.pace and not job.pace:
        return (
            f"it is of emulated hosts (pace {profile.pace:g}), and this machine is to be used as "
            "it is"
        )
    names = [link.name for link in profile.links]
    if names != list(cluster.specs):
        return f"its links ({', '.join(names)}) must be {', '.join(cluster.specs)}"
    return None


# ---- members --------------------------------------------------------------------------------


def _require_members(
    members: Members,
    strategy: Strategy,
    profile: Profile | str | Path | None,
    job: LaunchRequest,
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


def _require_no_shards(model: nn.Module) -> None:
    """Raise ValueError if a model is sharded, in a job whose members change."""
    ranks = shard_ranks(model)
    if ranks is not None:
        raise ValueError(
            f"the model (sharded over ranks {', '.join(map(str, ranks))}) must be whole on every "
            "rank where members change, because fully_shard keeps process groups that end with "
            "each change; leave fully_shard out and give nodes='auto', or leave members out"
        )


def _connect_member(
    model: nn.Module,
    links: Sequence[str] | None,
    timeout_s: float,
    members: Members,
    facts: dict[str, str],
    node: MemberNode,
) -> tuple[JobMember, Cluster]:
    """Enter a job whose members change, and connect to its members."""
    where = next(p.device for p in model.parameters() if p.requires_grad)
    specs = _link_specs(links, where)
    if dist.is_initialized() or any(spec.backend != "gloo" for spec in specs):
        what = "process group (initialized)" if dist.is_initialized() else f"links ({links!r})"
        raise ValueError(
            f"{what} must be left to offbeat.prepare where members change: it creates groups of "
            "gloo for each set of members; remove init_process_group and links of NCCL"
        )
    device = device_of(where)
    if where.type == "cuda":
        torch.cuda.set_device(where)
    _register_exit(joined_here=True)
    facts["number of links"] = str(len(specs))
    interface = control_interface(specs, Topology((tuple(range(node.size)),)))
    member = JobMember(members, facts, interface, timeout_s, node)
    member.links = [spec.name for spec in specs]
    try:
        member.enter()
        with _closing_on_failure(member):
            topology, claim = member.topology, NodeClaim("", node=(member.rank,))
            if not topology.is_flat:
                claim = NodeClaim(topology.source, nodes=topology.nodes)
            agreed = topology if member.has_joined else None
            if member.has_joined:  # the members have agreed on links before
                names = member.epoch.details["links"]
                specs = [replace(s, name=name) for s, name in zip(specs, names, strict=True)]
            member.open_group()
            cluster = connect(
                specs,
                where,
                device,
                timeout_s,
                claim,
                agreed,
                member.protocol,
                owns_default=True,
            )
    except BaseException:
        member.close()
        raise
    between = iter([name for name in cluster.specs if name != INSIDE])
    member.links = [INSIDE if spec.name == INSIDE else next(between) for spec in specs]
    return member, cluster


@contextmanager
def _closing_on_failure(member: JobMember) -> Iterator[None]:
    """Destroy the process groups if the body fails.

    Raises:
        JoinError: the body has raised a RuntimeError in a process that joins a running job.
    """
    try:
        yield
    except BaseException as error:
        if dist.is_initialized():
            dist.destroy_process_group()
        if member.has_joined and isinstance(error, RuntimeError):
            raise JoinError(str(error)) from error
        raise


def _join_running_job(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    strategy: Strategy,
    cluster: Cluster,
    member: JobMember,
    watch: Watch,
    metrics: Metrics | None,
    settings: Any,
) -> tuple[Model, Optimizer]:
    """Return the prepared model and optimizer of a process that joins a running job.

    The other members are in `FlatSession.begin_epoch`.
    """
    control, recorder = cluster.control, None
    with _closing_on_failure(member):
        try:
            everyone = control.gather({"joins": process_facts()})
            facts = everyone[0]
            if (record := facts.get("record")) is not None:
                record |= {"members": member.rank_names, "joined": joined_processes(everyone)}
            recorder = load_object(JOIN_OBSERVER)(settings, strategy, cluster, record)
            cluster.alignment_bytes = facts["alignment_bytes"]
            job = TrainingJob(
                model,
                optimizer,
                cluster,
                Profile.from_dict(facts["profile"]),
                Observation(OBSERVE, None, fingerprint_of(model), None, False),
                watch,
                LaunchRequest(),
                divide_ranks(0, strategy, control),
                recorder,
                member=member,
                joining=facts,
            )
            session = strategy.open(job)
        except BaseException:
            if recorder is not None:
                recorder.write({})
            cluster.close()
            member.close()
            raise
    if recorder is not None:
        recorder.attach(session)
    return _finish(job, strategy, session, metrics, [0 if metrics else None])


# ---- leaving --------------------------------------------------------------------------------


def _close_at_exit(session: Session, cluster: Cluster) -> None:
    """At exit, close a session that is still open."""
    if not cluster.closed:
        publish_uncaught_exception()
        if cluster.topology.sharded and getattr(sys, "last_value", None) is not None:
            # FSDP's own error names no rank. The report waits up to 3 s for missing heartbeats.
            console.print("failure", cluster.control.report_failure(), "error")
        session.close()


@cache
def _register_exit(joined_here: bool) -> None:
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
