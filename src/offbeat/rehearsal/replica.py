"""One replica of a rehearsal: its state of the process, its session, and the record of its run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from offbeat.core.buckets import random_states
from offbeat.core.derive.windows import Windows
from offbeat.core.guards.replicas import broadcast_model
from offbeat.core.measuring.loss import LossTap
from offbeat.core.plan import Plan
from offbeat.core.profile import Profile
from offbeat.core.runtime.flat_session import open_plan_session
from offbeat.core.runtime.hooks import tensors_of
from offbeat.core.runtime.iteration import Iteration
from offbeat.core.runtime.model_checks import agree_on_model, joined_optimizer
from offbeat.core.runtime.prepare import OBSERVE
from offbeat.core.runtime.prepared import Model, Optimizer
from offbeat.core.runtime.recording import Recorder
from offbeat.core.runtime.session import Session
from offbeat.core.runtime.training_job import Observation, RankRoles, TrainingJob, Watch
from offbeat.core.start.launch_request import LaunchRequest
from offbeat.core.strategy.interface import Strategy, planned
from offbeat.core.transport.device import device_of
from offbeat.core.transport.topology import AUTO, Topology
from offbeat.experiments.record.recorder import VoteLog
from offbeat.rehearsal.checkpoints import DiscardingSaver
from offbeat.rehearsal.cluster import Exchange, MemoryCluster, MemoryControl
from offbeat.rehearsal.links import MemoryNetwork, combine

if TYPE_CHECKING:
    from torch.distributed import Store


class RandomStreams:
    """Random streams of one replica, installed in the process during its turns.

    Args:
        seed: seed of the streams at the start.
    """

    def __init__(self, seed: int) -> None:
        self._seed: int | None = seed
        self._states: Mapping[str, Any] = {}

    def enter(self) -> None:
        """Install the streams of the replica."""
        if self._seed is None:
            random_states.restore(self._states, _device())
        else:
            random_states.seed_all(self._seed, [_device()])
            self._seed = None

    def leave(self) -> None:
        """Store the streams of the replica."""
        self._states = random_states.capture(_device())


def _device() -> torch.device:
    """Return the device whose random stream scripts may use beside the host's."""
    return torch.device("cuda" if torch.cuda.is_initialized() else "cpu")


@dataclass(frozen=True)
class Course:
    """Plan of a rehearsal from an iteration on."""

    first: int
    strategy: str
    plan: Plan


@dataclass
class ReplicaLog:
    """Log of one replica.

    Attributes:
        losses: loss of each iteration; None for an iteration without a backward.
        votes: columns of `VoteLog`.
        without_update: iterations that applied no gradient.
        decisions: iteration and text of each decision of the runtime.
        warnings: warnings of the runtime.
        metrics: iteration and value of each metric that the script has reported, by name.
        sent_bytes: bytes that the replica has sent, by link.
        notes: facts about the run.
        input_elements: elements of the tensors that forward passes for training have received.
    """

    losses: list[float | None] = field(default_factory=list)
    votes: dict[str, Any] = field(default_factory=dict)
    without_update: list[int] = field(default_factory=list)
    decisions: list[tuple[int, str]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    metrics: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    sent_bytes: dict[str, int] = field(default_factory=dict)
    notes: dict[str, Any] = field(default_factory=dict)
    input_elements: int = 0

    def outcomes(self, course: Course, stop: int) -> dict[str, list[bool]]:
        """Return the outcomes of the votes of a plan in its iterations before `stop`."""
        by_vote = self.votes.get("by_vote", {})
        return {
            vote.name: [bool(yes) for yes in by_vote[vote.name]["yes"][course.first : stop]]
            for vote in course.plan.votes
        }


class ReplicaRecorder(Recorder):
    """Recorder of one replica.

    Attributes:
        log: log of the replica.
        courses: plans in the order of their first iterations.
        on_iteration: called with the number of iterations that have reached their step.
    """

    def __init__(self, losses: LossTap) -> None:
        super().__init__()
        self.log = ReplicaLog()
        self.courses: list[Course] = []
        self.on_iteration: Callable[[int], None] = lambda _: None
        self._losses, self._votes = losses, VoteLog()

    def start(
        self, strategy: str, plan: Plan | None, observed: int, profile: Profile | None = None
    ) -> None:
        """The plan is known from `set_plan`."""

    def set_plan(self, plan: Plan, profile: Profile | None = None) -> None:
        super().set_plan(plan, profile)
        done = len(self.log.losses)
        self.courses = [course for course in self.courses if course.first < done]
        self.courses.append(Course(done, plan.strategy, plan))

    def on_step_begin(self, iteration: int) -> None:
        loss = self._losses.take()
        self.log.losses.append(None if loss is None else float(loss))
        self.on_iteration(iteration + 1)

    def ended(self, iteration: Iteration) -> None:
        done = iteration
        if self.plan is None:
            return
        if not Windows(self.plan).applied_window(done.planned):
            self.log.without_update.append(done.number)
        if self.plan.votes:
            self._votes.add_iteration(done, [vote.name for vote in self.plan.votes])

    def add_metric(self, name: str, value: float) -> None:
        """Record a metric of the script, with the iteration of the last step."""
        values = self.log.metrics.setdefault(name, [])
        values.append((max(len(self.log.losses) - 1, 0), value))

    def decide(self, iteration: int, what: str, warning: str | None) -> None:
        self.log.decisions.append((iteration, what))
        if warning is not None:
            self.log.warnings.append(warning)

    def write(self, bytes_sent: Mapping[str, int]) -> None:
        self.log.votes = self._votes.pop_columns()
        self.log.sent_bytes, self.log.notes = dict(bytes_sent), self.notes


def _require_nodes(parts: Mapping[str, object], topology: Topology) -> None:
    """Raise ValueError unless the script states the nodes of the rehearsal, or none.

    Args:
        parts: arguments of `prepare` about ranks that share a replica.
        topology: nodes of the rehearsal.
    """
    sizes = {*topology.sizes}
    fitting = (topology.nodes, [*map(list, topology.nodes)], *(sizes if len(sizes) == 1 else ()))
    for name, value in parts.items():
        fits = name == "nodes" and (value in fitting or value == AUTO)
        if value is not None and not fits:
            raise ValueError(
                f"{name} ({value}) must be that of the rehearsal, whose replicas have "
                f"{', '.join(map(str, sorted(sizes)))} ranks, stated by its profile; leave {name} "
                "out, or rehearse with --per-node"
            )


class EndOfRehearsal(BaseException):
    """Ends a script after the last iteration. Not an Exception: scripts must not catch it."""


@dataclass
class _LastIteration:
    """Stop request of a session that ends its replica after `iterations` iterations."""

    iterations: int

    def on_iteration_end(self, iteration: int) -> None:
        if iteration >= self.iterations:
            raise EndOfRehearsal


class CountingModel(Model):
    """Prepared model of a replica, which counts the elements of its training inputs."""

    def __init__(self, module: nn.Module, session: Session, log: ReplicaLog) -> None:
        super().__init__(module, session)
        object.__setattr__(self, "_replica_log", log)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.training and torch.is_grad_enabled():
            self._replica_log.input_elements += sum(t.numel() for t in tensors_of((args, kwargs)))
        return super().forward(*args, **kwargs)


class MemoryJob(TrainingJob):
    """Training job of a replica. Its links have no connections to open."""

    def open_connections(self) -> None:
        pass


class Replica:
    """One replica of a job.

    Attributes:
        rank: rank of the replica.
        ranks: number of replicas.
        strategy: strategy of the job.
        profile: profile from which the strategy plans.
        recorder: recorder of the run.
        exchange: exchange of values between the replicas.
        session: session of the strategy; None before `prepare`.
        model: prepared model; None before `prepare`.
        last_iteration: number of iterations after which `optimizer.step()` raises `EndOfRehearsal`;
            None: never.
        on_prepared: called when `prepare` has prepared the model.
    """

    def __init__(
        self,
        rank: int,
        strategy: Strategy,
        profile: Profile,
        network: MemoryNetwork,
        exchange: Exchange,
        store: Store,
        losses: LossTap,
    ) -> None:
        self.rank, self.ranks, self.strategy, self.profile = rank, network.ranks, strategy, profile
        self.recorder = ReplicaRecorder(losses)
        self.session: Session | None = None
        self.model: Model | None = None
        self.last_iteration: int | None = None
        self.on_prepared: Callable[[], None] = lambda: None
        self.exchange = exchange
        self._network, self._store = network, store

    def prepare(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        strategy: Strategy | str | None,
        watch: Watch,
        **parts: object,
    ) -> tuple[Model, Any]:
        """Return the prepared model and optimizer, as `offbeat.prepare` does.

        Args:
            model: module of this replica.
            optimizer: optimizer of the module, or a list of several.
            strategy: strategy of the script, which is not used.
            watch: checks during training.
            parts: arguments of `offbeat.prepare` about ranks that share a replica.

        Raises:
            ValueError: the strategy cannot train the model, or models of replicas differ.
        """
        if self.session is not None:
            raise ValueError(
                "model must be the only one of a rehearsal; train both as one module with one "
                "optimizer"
            )
        _require_nodes(parts, self._network.topology)
        whole, is_list = joined_optimizer(model, optimizer, self.strategy)
        where = next(model.parameters()).device
        control = MemoryControl(self.rank, self.ranks, self.exchange, self._store, 0.0)
        links = [link.name for link in self.profile.links]
        cluster = MemoryCluster(control, self._network, links, where, device_of(where))
        fingerprint = agree_on_model(model, whole, self.strategy, control)
        broadcast_model(model, cluster)
        job = MemoryJob(
            model,
            whole,
            cluster,
            self.profile,
            Observation(OBSERVE, model=fingerprint),
            watch,
            LaunchRequest(),
            RankRoles(range(self.ranks), range(self.ranks, self.ranks)),
            self.recorder,
        )
        self.session = session = open_plan_session(planned(self.strategy), job)
        session.strategy, session.saver = str(self.strategy), DiscardingSaver()
        session.observers.add(self.recorder)
        if self.last_iteration is not None:
            session.stop_request = _LastIteration(self.last_iteration)  # type: ignore[assignment]
        prepared = CountingModel(model, session, self.recorder.log)
        self.model = prepared
        self.on_prepared()
        made = Optimizer(whole, session)
        return prepared, (made.parts() if is_list else made)

    def average_model(self) -> nn.Module | None:
        """Return a copy of the model with the average of all replicas, on replica 0.

        Every replica must call it, between two iterations. Training continues as without the call.

        Returns:
            The copy in evaluation mode; None on all other replicas.
        """
        assert self.session is not None
        assert self.model is not None
        module, plan = self.model.module, self.recorder.plan
        assert plan is not None
        control = self.session.cluster.control
        assert isinstance(control, MemoryControl)
        copy = deepcopy(module).eval() if self.rank == 0 else None
        places = [] if copy is None else [*copy.parameters(), *copy.buffers()]
        for number, own in enumerate([*module.parameters(), *module.buffers()]):
            given = control.share(own)
            if copy is None:
                continue
            with torch.no_grad():
                if plan.source is not None:
                    places[number].copy_(given[plan.source])
                elif own.is_floating_point():
                    places[number].copy_(combine("all_reduce", given))
        return copy
