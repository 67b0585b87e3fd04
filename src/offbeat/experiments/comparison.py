"""Definition of a comparison: script, cluster, strategies, checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from offbeat.core.measuring.processors import processors
from offbeat.core.profile import Profile
from offbeat.core.sim.ranks import Ranks
from offbeat.core.strategy.parsing import parts, text_of
from offbeat.core.transport.addresses import require_interfaces
from offbeat.core.transport.interfaces import parse_link
from offbeat.experiments.device_speed import DeviceSpeed
from offbeat.experiments.profile_for_network import ranks_on, replicas_of
from offbeat.experiments.script import require_runnable
from offbeat.lab import Cluster, Lab, NoLab
from offbeat.lab.launch import Result
from offbeat.strategies import Strategy

WAIT_S = 120.0
NO_LIMIT_S = 7 * 24 * 3600.0


@dataclass(frozen=True)
class Contestant:
    """One strategy of a comparison.

    Attributes:
        label: name of its directory and of its row in the report.
        strategy: the strategy.
        arguments: arguments of the script for this strategy alone, after those for all.
    """

    label: str
    strategy: Strategy
    arguments: tuple[str, ...] = ()

    @classmethod
    def of(cls, strategy: Strategy) -> Contestant:
        """Return a strategy with the label of its text."""
        return cls("-".join(parts(text_of(strategy))), strategy)


def require_labels(contestants: Iterable[Contestant]) -> None:
    """Raise ValueError if there is no contestant, or if two have the same label."""
    labels = [contestant.label for contestant in contestants]
    if not labels:
        raise ValueError("contestants ([]) must not be empty; name a strategy")
    for label in labels:
        if labels.count(label) > 1:
            raise ValueError(f"contestant ({label!r}) must be unique; change one of its settings")


@dataclass(frozen=True)
class Setup:
    """A script and the cluster that runs it.

    Attributes:
        script: script or module with its arguments.
        cluster: hosts and links.
        shaped: whether the lab shapes the links to the cluster's rates. If False, all ranks use
            the loopback interface.
        seed: seed of the first repetition.
        timeout_s: seconds after which a launch is stopped.
        wait_s: seconds that a rank waits at most for another rank.
        links: links for `offbeat.prepare`, in place of the cluster's; empty in the lab.
        pace: hosts compute at 1/pace of this machine's core. With "auto" the pace is the smallest
            at which this machine can emulate all hosts at once. With "none" hosts compute at full
            speed. With None the pace is that of the given profile; without a given profile it is
            "auto" in the lab if hosts differ in speed or ranks outnumber processors, else "none".
        servers: number of ranks, the last ones of the cluster, that only serve under strategies
            with servers.
        min_bucket_bytes: `min_bucket_bytes` of `offbeat.prepare`, in place of the script's.
        job: further fields of the job file.
        launch: replaces `offbeat.lab.launch`, for launches whose times are not measured.
    """

    script: tuple[str, ...]
    cluster: Cluster
    shaped: bool = True
    seed: int = 0
    timeout_s: float = NO_LIMIT_S
    wait_s: float = WAIT_S
    links: tuple[str, ...] = ()
    pace: float | Literal["auto", "none"] | None = None
    servers: int = 0
    min_bucket_bytes: int | None = None
    job: Mapping[str, Any] = field(default_factory=dict)
    launch: Callable[..., Result] | None = None

    def __post_init__(self) -> None:
        if isinstance(self.pace, (int, float)) and not 1 <= self.pace < float("inf"):
            raise ValueError(
                f"pace ({self.pace:g}) must be at least 1: a host cannot be faster than this "
                "machine; give a larger one, auto or none"
            )
        if self.uneven and (self.pace == "none" or (self.pace is None and not self.shaped)):
            raise ValueError(
                "speed and jitter of hosts need a pace, by which they are emulated; leave --pace "
                "none out, or give --pace auto on the loopback"
            )
        require_runnable(self.script)
        if self.links and self.shaped:
            raise ValueError(
                f"links ({', '.join(self.links)}) must be left to the cluster's description in the "
                "lab; put them into the cluster file, or add --lab none"
            )
        interfaces = (parse_link(link).interface for link in self.links)
        require_interfaces("--links", (name for name in interfaces if name))
        if not 0 <= self.servers < self.cluster.world_size:
            raise ValueError(
                f"servers ({self.servers}) must be below the number of ranks "
                f"({self.cluster.world_size}), so that a rank trains; add hosts"
            )
        for name in ("timeout_s", "wait_s"):
            if not 0 < getattr(self, name) <= NO_LIMIT_S:
                raise ValueError(
                    f"{name} ({getattr(self, name)}) must be above 0 and at most {NO_LIMIT_S:.0f} s"
                )

    @property
    def uneven(self) -> bool:
        """Whether the hosts differ in speed or have jitter."""
        hosts = range(self.cluster.hosts)
        return any(self.cluster.speed_of(h) != 1 or self.cluster.jitter_of(h) for h in hosts)

    @property
    def measured_pace(self) -> float | Literal["auto"] | None:
        """Pace at which a profile is measured; None for full speed."""
        if self.pace is None:
            crowded = self.workers > processors()
            return "auto" if self.shaped and (crowded or self.uneven) else None
        return None if self.pace == "none" else self.pace

    @property
    def workers(self) -> int:
        """Number of ranks that train."""
        return self.cluster.world_size - self.servers

    @property
    def replicas(self) -> int:
        """Number of replicas that train."""
        return replicas_of(self.cluster, self.workers)

    @property
    def ranks(self) -> Ranks | None:
        """Rates of the ranks that train, if the lab shapes the links."""
        first = self.cluster.host_of(self.workers - 1) + 1
        served = range(first, self.cluster.hosts if self.servers else first)
        return ranks_on(self.cluster, self.replicas, served=served) if self.shaped else None

    def lab(self) -> Lab | NoLab:
        """Return the lab. Entering it raises LabError if this machine has no support."""
        return Lab(self.cluster, "offbeat") if self.shaped else NoLab(self.cluster)


@dataclass(frozen=True)
class CheckpointOptions:
    """Checkpoints of a run.

    Attributes:
        folder: folder of the checkpoints.
        every: iterations between two checkpoints; None saves none.
        resume: whether the run continues from the newest checkpoint in `folder`.
    """

    folder: Path
    every: int | None = None
    resume: bool = False

    def __post_init__(self) -> None:
        if self.every is not None and self.every < 1:
            raise ValueError(f"every ({self.every}) must be at least 1 iteration")
        if self.every is None and not self.resume:
            raise ValueError(
                f"checkpoint ({self.folder}) needs --every N to be saved, --resume to go on from, "
                "or both"
            )

    @property
    def job(self) -> dict[str, Any]:
        """Fields of the runtime's job file."""
        return {
            "checkpoint": str(self.folder.absolute()),
            "checkpoint_every": self.every,
            "resume": self.resume,
        }


@dataclass(frozen=True)
class Comparison:
    """Definition of a comparison.

    Attributes:
        setup: script and cluster.
        contestants: strategies to run in turns; None runs the strategy that the script names.
        repetitions: number of repetitions of each contestant.
        target_loss: training loss to which the time is measured.
        profile: file of the profile, or the profile of a rehearsal; None measures the profile
            first.
        command: command line of the user.
        keeping: checkpoints, for a single contestant.
        repeat_disturbed: whether a disturbed repetition or profile is measured once more.
        device: the user's device, on which each contestant is predicted as well.
        facts: fields of run.json of a rehearsal; empty for a measured comparison.
        target: name and value of a reported metric that replaces the training loss as the target.
        given_seeds: seed of each repetition; empty: those from the setup's seed on.
    """

    setup: Setup
    contestants: tuple[Contestant, ...] | None
    repetitions: int = 1
    target_loss: float | None = None
    profile: Path | Profile | None = None
    command: tuple[str, ...] = ()
    keeping: CheckpointOptions | None = None
    repeat_disturbed: bool = False
    device: DeviceSpeed | None = None
    given_seeds: tuple[int, ...] = ()
    target: tuple[str, float] | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.repetitions < 1:
            raise ValueError(f"repetitions ({self.repetitions}) must be at least 1")
        if self.given_seeds and len(self.given_seeds) != self.repetitions:
            raise ValueError(
                f"given_seeds ({len(self.given_seeds)}) must be as many as repetitions "
                f"({self.repetitions})"
            )
        if self.contestants is None:
            return
        served = [c.label for c in self.contestants if c.strategy.needs.servers]
        if served and self.keeping is not None:
            raise ValueError(
                f"checkpoint ({self.keeping.folder}) is not for {served[0]}, whose parameters are "
                "on its servers; let them save their part with --set snapshot=DIRECTORY"
            )
        if served and not self.setup.servers:
            raise ValueError(
                f"servers (0) must be at least 1 for {served[0]}; add --servers 1, which are hosts "
                "beside those that train"
            )
        if self.setup.servers and not served:
            raise ValueError(
                f"servers ({self.setup.servers}) must be 0 unless a strategy has servers; leave "
                "--servers out, or choose one that has: ssp, ps-bsp"
            )
        require_labels(self.contestants)

    @property
    def is_rehearsal(self) -> bool:
        """Return whether the times are simulated."""
        return bool(self.facts)

    @property
    def seeds(self) -> tuple[int, ...]:
        """Seed of each repetition; equal for all contestants."""
        if self.given_seeds:
            return self.given_seeds
        return tuple(self.setup.seed + repetition for repetition in range(self.repetitions))
