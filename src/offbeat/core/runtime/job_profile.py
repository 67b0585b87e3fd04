"""Profile of a job: given, of a file or of the launcher, or measured in the first iterations."""

from __future__ import annotations

import os
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from offbeat.core.buckets.layout import parameter_counts
from offbeat.core.files import write_or_warn
from offbeat.core.guards.script_usage import UsageRecorder, combine_usage
from offbeat.core.measuring.codec_speed import measure_codecs
from offbeat.core.measuring.idle_links import measure_pauses
from offbeat.core.measuring.links import measure_cluster, measure_inside, worthwhile_bytes
from offbeat.core.measuring.network_check import compare_network
from offbeat.core.measuring.observe import ProfileObserver, observing_plan
from offbeat.core.observers import Observer
from offbeat.core.parts import part
from offbeat.core.profile import Profile
from offbeat.core.runtime.engine import Engine
from offbeat.core.runtime.iteration import Iteration
from offbeat.core.runtime.joint_optimizer import JointOptimizer
from offbeat.core.runtime.model_checks import fingerprint_of
from offbeat.core.runtime.planner import Planner
from offbeat.core.runtime.session_guards import SessionGuards
from offbeat.core.runtime.training_job import TrainingJob
from offbeat.core.start.launch_request import LaunchRequest
from offbeat.core.transport.cluster import Cluster

GivenProfile = Profile | str | Path | None
"""Argument `profile` of `prepare`."""


@dataclass(frozen=True)
class KnownProfile:
    """Profile of a job before its first iteration, the same on all ranks.

    Attributes:
        profile: the profile; None to measure one.
        save_to: file for a measured profile; None: not saved.
        difference: how the network differs from the profile, and what follows; None if it does not.
    """

    profile: Profile | None = None
    save_to: str | None = None
    difference: str | None = None


def find_profile(
    given: GivenProfile, job: LaunchRequest, model: nn.Module, cluster: Cluster
) -> KnownProfile:
    """Return the profile to plan from, after a comparison with model, job and network.

    A Profile and the launcher's file must match. A user's file is a cache and is measured again if
    it does not match. Where members change, the profile may be of another number of replicas, at
    least 2.
    """
    if job.stop_after_profile or (given is None and job.profile is None):
        return KnownProfile(save_to=job.save_profile)
    known = _read_profile(given, job, cluster)
    cache = None if given is None or isinstance(given, Profile) else str(given)
    if known is None:
        return KnownProfile(save_to=cache)
    if cluster.control.has_members and known.world_size > 1:
        known = part("for_members")(known, cluster.topology.replicas)
    mismatch = _find_mismatch(known, model, cluster, job)
    is_cache = cache is not None and job.profile is None and known.model
    if mismatch is not None and not is_cache:
        raise ValueError(
            f"the profile does not match: {mismatch}; measure it again with `offbeat profile`"
        )
    elsewhere = mismatch is not None or job.rehearsed
    difference = None if elsewhere else compare_network(cluster, known)
    if is_cache and (mismatch or difference):
        return KnownProfile(None, cache, difference and f"{difference}; it is measured again")
    remedy = "plan and predictions do not fit, so measure it again"
    return KnownProfile(known, cache, difference and f"{difference}; {remedy}")


def _read_profile(given: GivenProfile, job: LaunchRequest, cluster: Cluster) -> Profile | None:
    """Return on all ranks the profile of the launcher, or that given to rank 0; None if the user's
    file does not exist.

    Raises:
        ValueError: on every rank, if rank 0 cannot read the file.
    """
    known, problem = given if isinstance(given, Profile) else None, None
    file = job.profile or given
    if cluster.control.rank == 0 and isinstance(file, str | Path):
        try:
            known = Profile.load(file) if job.profile or Path(file).exists() else None
        except (OSError, ValueError) as error:
            problem = error
    own = {"problem": problem and str(problem), "profile": known and known.to_dict()}
    result = cluster.control.gather(own)[0]
    if result["problem"] is not None:
        raise problem or ValueError(result["problem"])
    return Profile.from_dict(result["profile"]) if result["profile"] else None


def _find_mismatch(
    profile: Profile, model: nn.Module, cluster: Cluster, job: LaunchRequest
) -> str | None:
    if profile.model and profile.model != fingerprint_of(model):
        return f"it was measured on another model; {parameter_counts(model, profile)}"
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


class FirstIterations(Observer):
    """Measurement of a profile in the first iterations of a job, which run BSP from now on.

    Args:
        job: objects of this rank.
        engine: engine of this rank.
        planner: planner of the session, which has no plan yet.
        guards: guards of the session.

    Attributes:
        observed: number of observed iterations, if these suffice; otherwise 0.
    """

    def __init__(
        self, job: TrainingJob, engine: Engine, planner: Planner, guards: SessionGuards
    ) -> None:
        self._job, self._engine, self._planner, self._guards = job, engine, planner, guards
        self.observed = 0
        # Whether the model's layers are emulated by sleeping.
        self._is_emulated = bool(getattr(job.model, "emulated", False))
        # the launcher's other ranks are no other programs
        launcher = int(os.environ.get("OFFBEAT_LAUNCHER", os.getppid()))
        self._load = part("LoadSampler")(launcher)
        self._load.sample()
        self._watched = UsageRecorder()
        if isinstance(engine.optimizer, JointOptimizer):
            self._watched.record_own_step()
        engine.set_watched(self._watched)
        broadcasts = planner.broadcasts(planner.strategy)
        first = next(iter(job.cluster.specs))
        plan = observing_plan(len(engine.flat.buckets), first, broadcasts=broadcasts)
        job.cluster.open(plan.links)
        engine.adopt(plan)
        guards.note_plan(observes=True)
        # Ranks of a sharded replica wait for each other within forward.
        lock = None if self._is_emulated or engine.flat.is_sharded else job.request.turns
        self._turns: Any = part("Turns")(lock) if lock else nullcontext()  # of this machine's ranks
        self._observer = ProfileObserver(engine, self._turns)
        engine.observers.add(self)
        if lock:
            engine.observers.add(self._turns)

    def ended(self, iteration: Iteration) -> None:
        number = iteration.number + 1
        if number >= self._job.observation.iterations and not iteration.abandoned:
            self.observed = number

    def close(self) -> None:
        """Stop observing iterations."""
        self._observer.finish()
        for one in (self, self._turns):
            self._engine.observers.remove(one)

    def measure(self) -> Profile:
        """Return the profile of the observed iterations, the same on all ranks, after the storage
        was divided into buckets. Every rank must call this method between two iterations.

        Raises:
            SystemExit: the launcher requests the profile only.
        """
        how, stops = self._job.observation, self._job.request.stop_after_profile
        self.close()
        self._load.sample()
        strategy = self._planner.strategy
        if self._guards.shares_buffers and not self._planner.broadcasts(strategy):
            # Averages of parameters include buffers.
            self._guards.agree_on_buffers(only_alike=strategy.synchronous)
        profile = self._measure()
        if how.save_to and self._job.cluster.control.rank == 0:
            again = ", and the next run measures again"
            write_or_warn(profile.save, how.save_to, "profile", again, needed=stops)
        if stops:
            raise SystemExit(0)
        return profile

    def _measure(self) -> Profile:
        how, request, engine = self._job.observation, self._job.request, self._engine
        cluster, emulated = self._job.cluster, self._is_emulated
        control, least, needed = cluster.control, how.min_bucket_bytes, 1
        if least is None:
            least = worthwhile_bytes(cluster, engine.flat)
            replicas = cluster.topology.replicas
            needed = max(request.least_buckets, self._planner.strategy.least_buckets(replicas))
        specs = self._observer.layout(control, least, needed)
        engine.relayout(specs)
        flat = engine.flat
        self._guards.parameters.attach(flat.parameters)
        links, contention = measure_cluster(cluster, flat, emulated=emulated)
        links = (*links, *measure_inside(cluster, flat, emulated=emulated))
        profile = self._observer.profile(specs, flat, links, contention, cluster, how.model)
        profile = replace(profile, usage=combine_usage(self._watched.usage, control))
        if request.pace is not None and not emulated:
            paced = part("paced_profile")(profile, request.pace, cluster)
            profile = Profile.from_dict(control.share_first(paced.to_dict()))
        # Before `measure_beside`, because ranks do not compute while they pause.
        profile = measure_pauses(cluster, flat, profile)
        if profile.pace:
            profile = part("measure_beside")(cluster, flat, profile)
        with part("ComputeLoad")(profile) if profile.pace else nullcontext():
            profile = measure_codecs(cluster, profile)
        self._load.sample()
        profile = replace(profile, foreign_share=self._foreign_share())
        # Every rank must plan from the same profile.
        return Profile.from_dict(control.share_first(profile.to_dict()))

    def _foreign_share(self) -> float:
        """Return the largest share of the processors of a host that other programs used, if they
        disturbed the measurement; otherwise 0. `offbeat profile` samples the load itself."""
        load = None if self._job.request.stop_after_profile else self._load.load()
        own = part("disturbing_share")(load and load.record())
        return max(share or 0.0 for share in self._job.cluster.control.gather(own))
