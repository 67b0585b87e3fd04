"""Session with a plan of a job whose members may join, leave and fail while it trains."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

from torch import Tensor

from offbeat.core.buckets.flat import Flat
from offbeat.core.console import console
from offbeat.core.derive import effects
from offbeat.core.derive.effects import sends_only_gradients
from offbeat.core.guards.replicas import average_replicas, replica_tensors
from offbeat.core.profile import Profile
from offbeat.core.profile.elsewhere import network_rate_bps
from offbeat.core.runtime.flat_session import FlatSession
from offbeat.core.runtime.recording import MemberChange, joined_processes
from offbeat.core.runtime.training_job import TrainingJob
from offbeat.core.strategy.interface import Planned
from offbeat.elastic import feed as member_feed
from offbeat.elastic.changes import MemberChanges
from offbeat.elastic.members import JobMember
from offbeat.elastic.profile import for_members, iterations_between_boundaries
from offbeat.elastic.samples import MemberSamples, Stream, require_equal_settings
from offbeat.elastic.state import Feeding

T = TypeVar("T")


class MemberSession(FlatSession):
    """Session of one member. `MemberChanges` decides when members change; this class trains on.

    Args:
        strategy: requested strategy.
        job: objects of this rank.
        flat: storage of the model.

    Attributes:
        changes: changes of the members.
        samples: samples that this member reads; None before `read_samples`.
    """

    def __init__(self, strategy: Planned, job: TrainingJob, flat: Flat) -> None:
        super().__init__(strategy, job, flat)
        self._member = member = cast(JobMember, job.member)
        self.changes = MemberChanges(member, self, job.cluster)
        self.samples: MemberSamples | None = None
        self._stream_state: tuple[Any, Any] | None = None  # of the job that this rank has joined
        self._joined: Mapping[int, Mapping[str, Any]] = {}  # by rank, in the newest epoch
        self._has_joined = False  # whether this process has joined a running job
        self._replicas = [*member.epoch.members]  # members to which the profile refers

    def begin(self) -> None:
        if self._job.joining is None:
            super().begin()
        else:
            self.join(self._job.joining)

    # ---- iterations -------------------------------------------------------------------------

    def run_jointly(self, exchange: Callable[[], None]) -> None:
        """Run an exchange of all ranks. After the failure of a member, survivors leave it out."""
        if not self.changes.has_ended_epoch:  # until the next one, ranks may be iterations apart
            self.changes.run(exchange)

    def _begin_iteration(self) -> None:
        self.changes.before_iteration()
        super()._begin_iteration()

    def step(self, skip_update: bool) -> None:
        super().step(skip_update)
        self.changes.on_iteration_end()

    def _consolidate(self, repairing: bool) -> None:
        self.engine.drain()

        def act() -> None:
            with self._cluster.control.joint_call("consolidate"):
                self._unify(repairing, staged=True)

        def tensors() -> list[Tensor]:
            with_state = repairing and self.engine.traits.sends_only_gradients
            return replica_tensors(self._model, self.engine.optimizer if with_state else None)

        self.changes.unite(act, tensors)

    # ---- calls of the user ------------------------------------------------------------------

    def request_leave(self, reason: str) -> None:
        self.changes.request_leave(reason)

    def read_samples(self, stream: Stream) -> MemberSamples:
        if self._stream_state is None:
            remedy = "create MemberSampler with the same arguments everywhere"
            control = self._cluster.control
            control.agree("the samples of MemberSampler", stream.settings, remedy)
        else:
            settings, state = self._stream_state
            require_equal_settings(stream.settings, settings)
            stream.load(state)
        self.samples = self.changes.create_samples(stream)
        return self.samples

    @property
    def has_left(self) -> bool:
        return self.changes.has_left

    @property
    def has_joined(self) -> bool:
        return self._has_joined

    def run_joint_call(self, act: Callable[[], T]) -> tuple[T | None, str]:
        return self.changes.call(act)

    def save_at_changes(self, save: Callable[[], Any]) -> None:
        self.changes.snapshot = save
        if self._has_joined:  # the members save at the beginning of this epoch
            self.changes.save_snapshot()

    def capture_samples(self) -> tuple[Any, Any] | None:
        if self.samples is None:
            return self._stream_state
        return self.samples.stream.settings, self.samples.unread

    def resume_samples(self, saved: tuple[Any, Any] | None) -> None:
        if saved is not None:
            self._stream_state = saved
            if self.samples is not None:
                require_equal_settings(self.samples.stream.settings, saved[0])
        if self.samples is not None:
            self.samples.resume(None if saved is None else saved[1], self.iteration)

    # ---- read by `MemberChanges` ------------------------------------------------------------

    @property
    def first_free_iteration(self) -> int:
        """Number of the first iteration that has not begun, neither with its forward nor with its
        samples."""
        has_read = self.samples is not None and self.samples.has_read(self.iteration)
        return self.iteration + (self.is_in_iteration or has_read)

    @property
    def has_plan(self) -> bool:
        """Whether there is a plan, without which survivors of a failure cannot continue."""
        return hasattr(self, "plan")

    @property
    def has_equal_replicas(self) -> bool:
        """Whether the plan keeps all replicas equal."""
        return self.engine.traits.averages_gradients

    @property
    def is_in_iteration(self) -> bool:
        """Whether an iteration has begun and not ended."""
        return self.engine.cursor.now is not None

    @property
    def is_at_boundary(self) -> bool:
        """Whether a period of the plan ends between the last and the next iteration. Of plans with
        a period of one iteration, a few end."""
        if self.observing or self.planner.is_trial or self.is_in_iteration:
            return False
        since = self.engine.cursor.planned - self.plan.prologue
        return since >= 0 and since % iterations_between_boundaries(self.plan) == 0

    @property
    def replica_tensors(self) -> list[Tensor]:
        """All tensors of the model, detached."""
        return replica_tensors(self._model)

    @property
    def sends_state_ahead(self) -> bool:
        """Whether joining processes receive the optimizer's state before members change. It is then
        that of an earlier iteration, so it need not be equal on all ranks."""
        payloads = [t.payload for t in self.plan.transfers]
        sends_state = any(p.buffer == "state" or p.moment is not None for p in payloads)
        if self.planner.strategy.synchronous or sends_state:
            return False
        size = member_feed.size_bytes(self._optimizer_state)
        least = max(member_feed.LEAST_BYTES, member_feed.LEAST_S * self.network_bytes_per_s)
        return size >= least

    @property
    def network_bytes_per_s(self) -> float:
        """Rate of the network between members on the first link."""
        link = self.profile.links[0]
        return network_rate_bps(link, max(self.profile.world_size, 2)) / 8

    def copy_state(self) -> member_feed.StateCopy:
        """Return a copy of the optimizer's state after the last iteration."""
        self.engine.flush()
        iteration, name = self.iteration, self._member.name
        return member_feed.StateCopy.of(self._optimizer_state, iteration, name)

    @property
    def _optimizer_state(self) -> Mapping[Any, Any]:
        return self.engine.optimizer.state_dict()["state"]

    @property
    def _has_sent_states(self) -> bool:
        """Whether the processes that join in this epoch have received the optimizer's state."""
        return "states" in self._member.epoch.details

    # ---- changes of the members -------------------------------------------------------------

    def unite(self) -> None:
        """Complete everything in progress and average all replicas, before members change."""
        self._guards.forget_weights()
        if self.saver is not None:
            self.saver.finish()  # its process group ends
            self.saver = None
        self.engine.drain()
        if self.changes.has_ended_epoch:  # a member has failed meanwhile
            return
        if not sends_only_gradients(self.plan):
            self._guards.require_finite_replicas()
            average_replicas(self._model, self._cluster, staged=True)
        self._united = self.engine.iteration

    def begin_epoch(self, joining: Sequence[int], *, are_united: bool = False) -> None:
        """Plan for the present members and run the plan. Keep the optimizers' states, buffers that
        are equal on all ranks, errors of codecs, and values of rules.

        Args:
            joining: ranks that have joined and need the state.
            are_united: whether all members have the same parameters, which they have averaged after
                the last iteration.
        """
        control = self._cluster.control
        self.saver = None  # it has a process group of the earlier members
        self._guards.forget_weights()
        self.engine.drain()
        self.engine.run.begin_epoch(are_united=are_united)
        self._joined = {}
        if joining:
            facts = {**self._joining_facts(), "joining": [*joining]}
            self._joined = joined_processes(control.gather(facts))
            self._feed(joining)
        profile = self._present_profile(self.profile)
        self._guards.create_finite_guard()
        self.engine.replica = self._cluster.replica
        control.set_iteration(self.engine.iteration)
        self.planner.begin_again(profile)
        self._feed_buffers(joining)
        control.gather(None)  # no rank trains before all have this plan
        self.engine.begin()

    def join(self, facts: Mapping[str, Any]) -> None:
        """Begin training as a new member of a running job. The members call `begin_epoch`.

        Args:
            facts: result of `_joining_facts` of a member.
        """
        engine, control = self.engine, self._cluster.control
        state = self._feed(facts["joining"])
        if self._member.settings.join_state == "fresh":
            state["state"] = {}
        elif self._has_sent_states:
            received = self._member.received.copy
            assert received is not None
            state["state"] = received.state
        self._member.received.copy = None
        engine.optimizer.load_state_dict(state)
        self._has_joined = True
        profile = self._present_profile(Profile.from_dict(facts["profile"]))
        self._stream_state = facts["samples"]
        engine.iteration = facts["iteration"]
        self._earlier_iterations = facts["earlier_iterations"]
        control.set_iteration(engine.iteration)
        self.planner.join(profile, is_variant=facts["varied"])
        engine.hooks.held = facts["held"]
        engine.run.context.memory.update(facts["memory"])
        self._feed_buffers(facts["joining"])
        control.gather(None)
        self._united = engine.iteration

    def _joining_facts(self) -> dict[str, Any]:
        """Return the facts that a joining member needs, besides tensors."""
        memory = self.engine.run.context.memory.items()
        stream = None if self.samples is None else self.samples.stream
        return {
            "samples": stream and (stream.settings, stream.state),
            "profile": self.profile.to_dict(),
            "alignment_bytes": self.engine.flat.alignment_bytes,
            "record": None if self._recorder is None else self._recorder.joining_facts(),
            "iteration": self.engine.iteration,
            "earlier_iterations": self._earlier_iterations,
            "varied": self.planner.is_variant,
            "held": self.engine.hooks.held,
            "memory": {key: value for key, value in memory if isinstance(value, (int, float))},
        }

    def _present_profile(self, profile: Profile) -> Profile:
        """Return the profile for the present members, computed from that of rank 0: changes that
        have failed may have left ranks with profiles for other members.

        Compute times of remaining members are kept by name. New members have not been measured.
        """
        control, names = self._cluster.control, self._member.epoch.members
        known, before = control.share_first([profile.to_dict(), self._replicas])
        earlier = [before.index(name) if name in before else None for name in names]
        self._replicas = [*names]
        return for_members(Profile.from_dict(known), len(names), earlier)

    def _feed(self, joining: Sequence[int]) -> dict[str, Any]:
        """Send parameters, buffers and the optimizer's state to joining ranks. Return the state.

        All members send parameters, which are equal on them. The first one sends the rest. If it
        has sent the state of its optimizer before, only settings remain, such as the learning rate.
        """
        feeding, model = Feeding(self._cluster, joining), self._model
        feeding.send((p.data for p in model.parameters()), are_equal=True)
        feeding.send((b.data for b in model.buffers()), are_equal=False)
        state = self.engine.optimizer.state_dict()
        if self._has_sent_states:
            state = {**state, "state": {}}
        return feeding.send_state(state, are_equal=self.planner.strategy.synchronous)

    def _feed_buffers(self, joining: Sequence[int]) -> None:
        """Send the buffers that are equal on all ranks to joining ranks."""
        for name in sorted(effects.common_buffers(self.plan)) if joining else ():
            for copy in self.engine.flat.contents(name):
                feeding = Feeding(self._cluster, joining)
                feeding.send((tensor.data for tensor in copy), are_equal=True)

    def report_change(self, change: MemberChange) -> None:
        """Print one line about a change of the members on rank 0 and add it to the report."""
        if self._recorder:
            self._recorder.on_members(change, self._joined)
        if self._cluster.control.rank == 0:
            numbers = {"members": len(change.members), "s": change.seconds}
            console.print("members", change.text, iteration=change.iteration, **numbers)

    # ---- end --------------------------------------------------------------------------------

    def end_record(self, text: str) -> None:
        """Record that this process leaves the job."""
        if self._recorder:
            self.engine.observers.deliver(rest=True)
            self._recorder.end("left", text)

    def close(self) -> None:
        if not self._cluster.closed:
            super().close()
            self.changes.close()

    def cancel(self) -> None:
        super().cancel()
        self.changes.senders.close()
        self.changes.restore_handler()  # this process may request to join again
