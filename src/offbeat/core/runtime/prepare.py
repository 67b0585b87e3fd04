"""Preparation of training: checks, connections, agreement of all ranks, and the session."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from offbeat.core.buckets.flat import ALIGNED_BYTES
from offbeat.core.checkpoint.checkpoints import enable_checkpoints, save
from offbeat.core.console import console
from offbeat.core.guards.comparison import EVERY
from offbeat.core.guards.finite import OnNonfinite
from offbeat.core.guards.replicas import broadcast_model
from offbeat.core.parts import part
from offbeat.core.profile import Profile
from offbeat.core.runtime.job_profile import GivenProfile, KnownProfile, find_profile
from offbeat.core.runtime.model_checks import (
    agree_on_model,
    joined_optimizer,
    note_prepared,
    require_one_model,
    unclosed_models_notice,
)
from offbeat.core.runtime.prepared import Model, Optimizer
from offbeat.core.runtime.recording import Recorder
from offbeat.core.runtime.session import Session
from offbeat.core.runtime.training_job import (
    Observation,
    RankRoles,
    TrainingJob,
    Watch,
    divide_ranks,
)
from offbeat.core.start.connecting import Connector, close_at_exit
from offbeat.core.start.launch_request import (
    CHECKPOINT_VARIABLE,
    LaunchRequest,
    current_job,
    current_nodes,
)
from offbeat.core.start.launchers import torchrun_variables
from offbeat.core.start.strategy_choice import (
    choose_strategy,
    require_fitting_strategy,
    require_fitting_topology,
)
from offbeat.core.strategy.interface import Planned, Strategy
from offbeat.core.transport.cluster import Cluster
from offbeat.core.transport.job_place import current_servers
from offbeat.core.transport.topology import DIMENSIONS, Nodes

if TYPE_CHECKING:
    from offbeat.elastic.members import JobMember, Members
    from offbeat.jobs.metrics import Log, Metrics
    from offbeat.jobs.stopping import StopRequest

OBSERVE = 6
TIMEOUT_S = 120.0


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
            RuntimeError on every rank, which names rank and bucket. "ignore": no check. DDP()
            ignores this argument and `compare_every`.
        broadcast_buffers: whether all ranks receive the buffers that rank 0's forward has written,
            before the next forward, as under torch's DDP. Applies to synchronous strategies; under
            other strategies, every rank keeps its own buffers.
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
    _require_whole_job(process_group, mesh)
    watch = Watch(compare_every, on_nonfinite, broadcast_buffers)
    job = current_job()
    if not dist.is_initialized():
        os.environ.update(torchrun_variables(os.environ))
    strategy, notice = choose_strategy(strategy, job)
    servers = current_servers()
    timeout_s = _require_seconds(timeout_s if job.timeout_s is None else job.timeout_s)
    observation = Observation(observe, job.min_bucket_bytes or min_bucket_bytes)
    sinks, log = (metrics, None) if isinstance(metrics, str) else (None, metrics)
    settings = part("read_settings")(
        os.environ, sys.argv, record=record, metrics=sinks, launcher_record=job.record_dir
    )
    console.format = settings.log
    log = part("metrics_of")(log)
    whole, is_list = joined_optimizer(model, optimizer, strategy)
    require_one_model(job)
    notices = *settings.notices, notice, unclosed_models_notice()
    require_fitting_strategy(strategy, job)
    if mesh is None and nodes is None:
        nodes = current_nodes()
    what = model, whole, strategy, profile, observation, watch, servers
    preparation = Preparation(*what, job, log, settings, notices)
    own = Connector(model, links, timeout_s)
    if members is None:
        prepared = preparation.open_session(own.connect_job(mesh, nodes))
    else:
        part("require_members")(members, preparation, mesh=mesh, is_list=is_list)
        prepared = part("enter_job")(members, preparation, own, nodes)
    return (prepared[0], prepared[1].parts()) if is_list else prepared


@dataclass(frozen=True)
class Preparation:
    """Steps of `prepare` on connected ranks, after its arguments were checked.

    Attributes:
        model: the script's module.
        optimizer: optimizer that the session steps.
        strategy: strategy of the job.
        profile: the given profile.
        observation: options of the measurement of a profile.
        watch: checks during training.
        servers: number of servers.
        request: options of the launcher.
        metrics: log of training metrics; None for none.
        settings: settings of record, console and metrics, see `jobs/settings.py`.
        notices: notices about the arguments; None for none.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    strategy: Strategy
    profile: GivenProfile
    observation: Observation
    watch: Watch
    servers: int
    request: LaunchRequest
    metrics: Metrics | None
    settings: Any
    notices: Sequence[str | None]

    @property
    def arguments(self) -> str:
        """Arguments of `prepare` that must be equal on all ranks; of the profile only its kind."""
        given, watch = self.profile, self.watch
        kind = "given" if isinstance(given, Profile) else "none" if given is None else "a file"
        return (
            f"observe={self.observation.iterations}, "
            f"min_bucket_bytes={self.observation.min_bucket_bytes}, "
            f"profile={kind}, compare_every={watch.compare_every}, "
            f"on_nonfinite={watch.on_nonfinite}, broadcast_buffers={watch.broadcast_buffers}, "
            f"servers={self.servers}, "
            f"{CHECKPOINT_VARIABLE} {'unset' if self.request.checkpoint is None else 'set'}"
        )

    def open_session(
        self, cluster: Cluster, member: JobMember | None = None
    ) -> tuple[Model, Optimizer]:
        """Agree with all ranks, and open the session of the strategy.

        Raises:
            ValueError: on every rank, if ranks differ, or the strategy does not fit the job.
            SystemExit: on a rank that serves, after all workers have left.
        """
        strategy, control, request = self.strategy, cluster.control, self.request
        with closing_on_error(cluster, member) as undo:
            if not request.stop_after_profile:  # a measurement runs a plan of its own
                require_fitting_topology(strategy, cluster.topology)
            control.agree("the arguments of prepare", self.arguments, "call it alike everywhere")
            fingerprint = agree_on_model(self.model, self.optimizer, strategy, control)
            ranks = divide_ranks(self.servers, strategy, control)
            known = KnownProfile()
            if isinstance(strategy, Planned):
                known = find_profile(self.profile, request, self.model, cluster)
            sampled = self.metrics.divergence_every if self.metrics else None
            if member is not None and sampled:
                sampled = 0  # the store of the samples ends with the epoch
            samples, gpus = zip(
                *control.gather((sampled, part("gpu_of")(cluster.where))), strict=True
            )
            if any(gpu is not None for gpu in gpus):
                cluster.alignment_bytes = ALIGNED_BYTES
            if control.rank == 0:
                notices = part("startup_notices")(strategy, cluster, gpus)
                for text in filter(None, (*self.notices, known.difference, *notices)):
                    console.print("notice", text, "warning")
                observe = self.observation.iterations
                message = part("startup_message")(strategy, cluster, known.profile, observe)
                console.print("start", message)
            names = () if member is None else member.rank_names
            recorder = part("open_observer")(self.settings, self.strategy, cluster, names)
            if recorder is not None:
                recorder.notes["emulated"] = bool(getattr(self.model, "emulated", False))
                undo.callback(recorder.write, {})
            stop_request = None  # a member requests to leave
            if member is None:
                stop_request = self._create_stop_request(cluster, recorder)
            broadcast_model(self.model, cluster)  # may take minutes; the record shows the job
            if recorder is not None and known.difference is not None:
                recorder.warnings.append(known.difference)
            more = {"stop_request": stop_request, "member": member}
            job = self.job(cluster, known, fingerprint, ranks, recorder, **more)
            session = strategy.open(job)
            undo.pop_all()
        return self.finish(job, session, samples)

    def job(
        self,
        cluster: Cluster,
        known: KnownProfile,
        fingerprint: str,
        ranks: RankRoles,
        recorder: Recorder | None,
        **more: Any,
    ) -> TrainingJob:
        """Return the objects of this rank.

        Args:
            cluster: links and control of this rank.
            known: the known profile.
            fingerprint: fingerprint of the model.
            ranks: the ranks that train, and the ranks that serve.
            recorder: writes this rank's record; None if none is requested.
            **more: further attributes of `TrainingJob`.
        """
        observation = replace(self.observation, model=fingerprint, save_to=known.save_to)
        objects = self.model, self.optimizer, cluster, known.profile, observation
        return TrainingJob(*objects, self.watch, self.request, ranks, recorder, **more)

    def finish(
        self, job: TrainingJob, session: Session, samples: Sequence[int | None]
    ) -> tuple[Model, Optimizer]:
        """Return model and optimizer of a session that has been opened.

        Args:
            job: objects of this rank.
            session: session of the strategy.
            samples: by rank, the iterations between two samples of the divergence of replicas.
        """
        if job.recorder is not None:
            session.observers.add(job.recorder)
            job.recorder.attach(session)
        cluster = job.cluster
        session.strategy = str(self.strategy)
        session.keeps_replicas_equal = self.strategy.synchronous
        note_prepared(self.model, cluster)
        cluster.served = self.strategy.needs.servers
        close_at_exit(session.close, cluster)
        meter = part("open_meter")(self.metrics, session, job, samples)
        model = Model(self.model, session, meter)
        optimizer = Optimizer(self.optimizer, session)
        if meter is not None:
            session.observers.add(meter)
        resumes = job.request.resume and job.joining is None  # otherwise members send the state
        try:
            enable_checkpoints(replace(job.request, resume=resumes), model, optimizer)
            if job.stop_request is not None:
                path = job.request.checkpoint
                act = None if path is None else partial(save, path, model, optimizer)
                job.stop_request.attach(session, act)
                session.stop_request = job.stop_request
        except BaseException:
            model.close()
            raise
        return model, optimizer

    def _create_stop_request(
        self, cluster: Cluster, recorder: Recorder | None
    ) -> StopRequest | None:
        """Return the handler of SIGTERM; None if there is nothing to save or to record."""
        on_end = recorder.end if recorder is not None and recorder.ends_at_signal else None
        if self.request.checkpoint is None and on_end is None:
            return None
        request = part("StopRequest")(cluster.control, on_end)
        cluster.before_close = request.close
        return request


def closing_on_error(cluster: Cluster, member: JobMember | None) -> ExitStack:
    """Return a context that leaves the job if its body fails. Callbacks added to it run before."""
    undo = ExitStack()
    if member is not None:
        undo.callback(member.close)
    undo.callback(cluster.close)
    return undo


def _require_seconds(timeout_s: Any) -> float:
    """Return a number of seconds. Raise ValueError unless it is above 0 and finite."""
    is_number = isinstance(timeout_s, (int, float)) and not isinstance(timeout_s, bool)
    if not is_number or not 0 < timeout_s < float("inf"):
        raise ValueError(f"timeout_s ({timeout_s!r}) must be a number of seconds above 0")
    return float(timeout_s)


def _require_whole_job(process_group: object, mesh: object) -> None:
    """Raise ValueError if the script names a part of the job, or a mesh that is no device mesh of
    torch."""
    if process_group is not None:
        raise ValueError(
            f"process_group ({type(process_group).__name__}) must be left out: offbeat averages "
            "over all ranks of the job"
        )
    if mesh is not None and not isinstance(mesh, DeviceMesh):
        raise ValueError(
            f"mesh ({type(mesh).__name__}) must be a torch.distributed.device_mesh.DeviceMesh of "
            f"two dimensions, between nodes and inside: {DIMENSIONS}"
        )
