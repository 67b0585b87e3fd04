"""Training job of one rank: the objects with which a strategy opens its session."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

from offbeat.core.guards.finite import OnNonfinite, require_policy
from offbeat.core.measuring.connections import open_connections
from offbeat.core.parts import part
from offbeat.core.profile import Profile
from offbeat.core.runtime.recording import Recorder
from offbeat.core.start.launch_request import LaunchRequest
from offbeat.core.strategy.interface import Strategy, require_count
from offbeat.core.transport.cluster import Cluster
from offbeat.core.transport.control import Control
from offbeat.core.transport.job_place import SERVERS_VARIABLE

if TYPE_CHECKING:
    from offbeat.jobs.stopping import StopRequest
    from offbeat.lab.pace import Pace


@dataclass(frozen=True)
class Observation:
    """Options of the measurement of a profile.

    Attributes:
        iterations: iterations of BSP to measure.
        min_bucket_bytes: smallest bucket; None: derived from the measured latency.
        model: fingerprint of the model.
        save_to: file of the profile; None: not saved.

    Raises:
        ValueError: a value is invalid.
    """

    iterations: int
    min_bucket_bytes: int | None = None
    model: str = ""
    save_to: str | None = None

    def __post_init__(self) -> None:
        remedy = "pass a profile to observe no iterations"
        require_count("observe", self.iterations, remedy=remedy)
        if self.min_bucket_bytes is not None:
            remedy = "use None to derive it from the measured latency of a message"
            require_count("min_bucket_bytes", self.min_bucket_bytes, remedy=remedy)


@dataclass(frozen=True)
class Watch:
    """Checks during training.

    Attributes:
        compare_every: iterations between two comparisons of replicas; 0: none.
        on_nonfinite: policy for non-finite values.
        broadcast_buffers: whether all ranks receive rank 0's buffers.

    Raises:
        ValueError: a value is invalid.
    """

    compare_every: int
    on_nonfinite: OnNonfinite
    broadcast_buffers: bool = True

    def __post_init__(self) -> None:
        remedy = "0 turns comparisons off"
        require_count("compare_every", self.compare_every, least=0, remedy=remedy)
        require_policy(self.on_nonfinite)


@dataclass(frozen=True)
class RankRoles:
    """Ranks that train, and ranks that serve: the last ones."""

    workers: range
    servers: range


class Member(Protocol):
    """This process as a member of a job whose members may change; `settings` are those of the
    job's plans."""

    settings: Any


@dataclass(frozen=True)
class TrainingJob:
    """Objects of one rank with which a strategy opens its session.

    Attributes:
        model: the user's module, equal on all ranks.
        optimizer: the user's optimizer.
        cluster: links and control of this rank.
        profile: the known profile; None if it is not needed or is measured first.
        observation: options of the measurement of a profile.
        watch: checks during training.
        request: options of the launcher.
        ranks: the ranks that train, and the ranks that serve.
        recorder: writes this rank's record; None if none is requested.
        stop_request: handler of SIGTERM; None if there is nothing to save or to record.
        member: this process as a member; None if the members of the job do not change.
        joining: facts of the running job that this process joins; None otherwise.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    cluster: Cluster
    profile: Profile | None
    observation: Observation
    watch: Watch
    request: LaunchRequest
    ranks: RankRoles
    recorder: Recorder | None
    stop_request: StopRequest | None = None
    member: Member | None = None
    joining: Mapping[str, Any] | None = None

    def open_connections(self) -> None:
        """Open all connections before a run whose iterations are compared with a prediction."""
        if self.recorder is not None and self.profile is not None:
            open_connections(self.cluster, self.profile)

    def requested_pace(self) -> Pace | None:
        """Return the pace of this rank from the profile that the launcher names; None without
        one."""
        request = self.request
        paced = Profile.load(request.profile) if request.pace and request.profile else None
        return open_pace(paced, self.cluster.replica)


def open_pace(profile: Profile | None, replica: int) -> Pace | None:
    """Return the pace of an emulated host; None if the profile is not of emulated hosts."""
    if profile is None or not profile.pace:
        return None
    return part("Pace")(profile, replica)


def divide_ranks(servers: int, strategy: Strategy, control: Control) -> RankRoles:
    """Return the ranks that train and the ranks that serve. Raise ValueError on every rank if the
    number of servers does not suit the strategy."""
    world_size = control.world_size
    if strategy.needs.servers and servers < 1:
        raise ValueError(
            f"servers ({servers}) must be at least 1 for {strategy}; start with `offbeat run "
            f"--servers 1`, or set {SERVERS_VARIABLE}, the number of last ranks that serve"
        )
    if servers and not strategy.needs.servers:
        raise ValueError(
            f"servers ({servers}) must be 0 for {strategy}, which does not use servers; unset "
            f"{SERVERS_VARIABLE}, or choose a strategy with servers (see `offbeat strategies`)"
        )
    if servers >= world_size:
        raise ValueError(
            f"servers ({servers}) must be below the number of ranks ({world_size}), as at least "
            "one rank must train; start more ranks"
        )
    return RankRoles(range(world_size - servers), range(world_size - servers, world_size))
