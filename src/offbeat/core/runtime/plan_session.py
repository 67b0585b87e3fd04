"""Session of all strategies with a plan: measurement, agreement, planning and execution."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from offbeat.core.buckets.coupling import find_coupling
from offbeat.core.buckets.flat import Flat
from offbeat.core.buckets.gradients import Gradients
from offbeat.core.buckets.layout import BucketSpec, specs_of_profile
from offbeat.core.buckets.module_buffers import has_buffers
from offbeat.core.console import console
from offbeat.core.derive import effects
from offbeat.core.derive.broadcast import with_broadcast, without_broadcast
from offbeat.core.derive.deferred import defer_updates
from offbeat.core.files import write_or_warn
from offbeat.core.guards.comparison import Comparison, ReplicaGuard, SettingsGuard
from offbeat.core.guards.convergence import ConvergenceGuard, Finding
from offbeat.core.guards.finite import FiniteGuard, NonfiniteMessages
from offbeat.core.guards.foreign_step import ForeignStepGuard
from offbeat.core.guards.parameters import ParameterWatch
from offbeat.core.guards.replicas import (
    average_replicas,
    repair,
    replica_tensors,
    require_equal,
    sends_only_gradients,
    take,
)
from offbeat.core.guards.script_usage import ScriptUsage, UsageRecorder
from offbeat.core.guards.unwritten_weights import WeightChanges
from offbeat.core.measuring.beside_compute import ComputeLoad, measure_beside
from offbeat.core.measuring.codec_speed import measure_codecs
from offbeat.core.measuring.idle_links import measure_pauses
from offbeat.core.measuring.links import measure_cluster, measure_inside, worthwhile_bytes
from offbeat.core.measuring.observe import Observer, observing_plan
from offbeat.core.measuring.replica_sample import Sample
from offbeat.core.plan import INSIDE, Fact, Plan, base_link, vote_channel
from offbeat.core.profile import Profile
from offbeat.core.profile.elsewhere import for_members
from offbeat.core.runtime.attached import UncopiedHook
from offbeat.core.runtime.compute import ComputeObserver
from offbeat.core.runtime.engine import Engine
from offbeat.core.runtime.hooks import ALL
from offbeat.core.runtime.iteration import Iteration
from offbeat.core.runtime.joint_optimizer import JointOptimizer
from offbeat.core.runtime.member_changes import MemberChanges
from offbeat.core.runtime.member_samples import MemberSamples, Stream, require_equal_settings
from offbeat.core.runtime.member_state import Feeding
from offbeat.core.runtime.members import JobMember
from offbeat.core.runtime.position import capture, restore, resume_at
from offbeat.core.runtime.prepared import Position, Session
from offbeat.core.runtime.recording import MemberChange, Recorder, joined_processes
from offbeat.core.runtime.replanning import Replanner
from offbeat.core.runtime.training_job import (
    Observation,
    TrainingJob,
    Watch,
    open_pace,
)
from offbeat.core.runtime.updates import early_remedy
from offbeat.core.sim.prediction import MEMBERS_FACT
from offbeat.core.strategy.interface import Strategy, load_object
from offbeat.core.transport.cluster import Cluster
from offbeat.core.verify.check import raise_if_wrong

if TYPE_CHECKING:
    from offbeat.lab.pace import Pace

T = TypeVar("T")
# Named as text, because the runtime must not import these modules.
TURNS = "offbeat.lab.turns:Turns"
PACED_PROFILE = "offbeat.lab.pace:paced_profile"
VARIANT = "offbeat.strategies.levels:variant_of"
MEMBER_ITERATIONS = 8  # iterations between two boundaries of plans with a period of one iteration
MANY_PASSES = 20  # backward passes without a step after which rank 0 warns
SAME_SHAPE = "keep what grows in an attribute that is no buffer, or pass broadcast_buffers=False"


class FlatSession(Session):
    """Session that runs a strategy's plan on flat buckets, after a measurement with BSP if
    needed."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        strategy: Strategy,
        cluster: Cluster,
        recorder: Recorder | None,
        flat: Flat,
        watch: Watch,
    ):
        self._watch = watch
        self._replicas: Comparison | None = None
        self._model, self._strategy, self._cluster = model, strategy, cluster
        self._recorder = recorder
        self._guard: ConvergenceGuard | None = None
        self._replanner: Replanner | None = None
        self._pace: Pace | None = None
        self._trying = False  # whether the first iteration runs all updates at the step
        self._varied = False  # whether a variant replaces the strategy, because the script needs it
        self._around_forward: Callable[[], AbstractContextManager[None]] = nullcontext
        self._observer: Observer | None = None
        self._earlier_iterations = 0  # iterations of processes before this one
        self._loaded = False  # whether a load since the last iteration restarts the plan
        self.changes: MemberChanges | None = None  # of the members of the job
        self.samples: MemberSamples | None = None  # of `read_samples`
        self._stream_state: tuple[Any, Any] | None = None  # of the job that this rank has joined
        self._joined: Mapping[int, Mapping[str, Any]] = {}  # by rank, in the newest epoch
        self._united = -1  # the engine's iteration of the last `consolidate`
        self._has_joined = False  # whether this process has joined a running job
        self._reports_missing_step = True  # until the warning about it
        self.engine = Engine(
            model,
            flat,
            optimizer,
            cluster.links,
            cluster.device,
            cluster.control,
            cluster.timeout_s,
            cluster.replica,
            sends_buffers=cluster.is_first,
        )
        # Guard from a step to the next forward, for plans whose ranks pass parameters on.
        self._untouched = WeightChanges(
            (n, p) for n, p in model.named_parameters() if p.requires_grad
        )
        self._untouched.forget()
        self._shared = cluster.control.world_size > 1 and has_buffers(model)
        self._agreed_on_buffers = 0  # calls of `_agree_on_buffers`
        if self._shared:
            self.engine.module_buffers.before_packing = self._agree_on_buffers
        self._parameters = ParameterWatch(model, self.flush)
        self._parameters.attach(flat.parameters)
        self._create_finite_guard()
        self._stepping = self.engine.stepping = ForeignStepGuard(
            optimizer, self._allows_any_optimizer
        )
        self._guard_links()
        # Hooks on the bare modules, so that reads and loads of their weights see all updates, too.
        flush, discard = UncopiedHook(self.flush), UncopiedHook(self._discard)
        self._handles = [model.register_load_state_dict_pre_hook(discard)]
        self._handles += [m.register_state_dict_pre_hook(flush) for m in model.modules()]

    def _create_finite_guard(self) -> None:
        control, topology = self._cluster.control, self._cluster.topology
        self._finite = FiniteGuard(
            self._watch.on_nonfinite,
            control.rank,
            control.world_size,
            self._describe_buckets,
            len(topology.node_of(control.rank)),
            topology.replicas if topology.sharded else None,
        )
        self.engine.suspects = NonfiniteMessages(self._finite, self.engine.waiting.fail_with)

    def _allows_any_optimizer(self) -> bool:
        """Return whether other optimizers may use the gradients between backward and step."""
        plan, run = self.engine.plan, self.engine.run
        early = run.updates.remedy is not None or run.windows.late
        observing = self._observer is not None and not self._strategy.synchronous
        return sends_only_gradients(plan) and not early and not observing

    def _describe_buckets(self, run: range) -> str:
        """Return the names of the first and the last bucket of a run."""
        names = [self.engine.flat.buckets[b].name for b in (run.start, run.stop - 1)]
        return repr(names[0]) if len(run) == 1 else f"{names[0]!r} to {names[1]!r}"

    def _guard_links(self) -> None:
        for link in self._cluster.links.values():
            link.keeps_last = self.engine.staged
            guard = partial(self._finite.run, is_any=link.collectives.is_any)
            link.guard = guard if self._finite.active else None
            link.leaves_out = self._finite.leaves_out

    def run_from(
        self, profile: Profile, observed: int = 0, habits: ScriptUsage | None = None
    ) -> None:
        """Plan from a profile, check the plan, agree on it with all ranks and adopt it.

        Args:
            profile: profile, the same on all ranks.
            observed: iterations that were measured.
            habits: observed actions of the script between backward and step. None: nothing was
                observed yet; then a plan with early updates runs all updates of the first iteration
                at the step, and the script's actions in it decide about a variant.
        """
        self.profile = profile
        if isinstance(self.engine.optimizer, JointOptimizer):
            habits = replace(habits or ScriptUsage(), drives=True)
        with warnings.catch_warnings(
            record=True
        ) as caught:  # rank 0 reports warnings for all ranks
            warnings.simplefilter("always")
            self._choose_variant()
            plan = self._checked_plan(self._strategy)
            if self.engine.flat.is_sharded:
                plan = self._plan_of_shards(plan)
        if self.engine.flat.shards.are_staged:
            self.report_line(
                f"torch {torch.__version__} stores shards otherwise than expected, so parameters "
                "are copied before and after each average"
            )
        trial = None
        if habits is not None:
            plan = self._suitable_plan(plan, habits)
        else:
            trial = defer_updates(plan)
        self._trying = trial is not None
        self.engine.set_watched(UsageRecorder() if self._trying else None)
        self._run_plan(plan, observed, trial)
        if habits is not None:
            self._set_held_passes(habits)
        elif trial is None and _allows_one_backward(plan):
            self.engine.hooks.held = ALL
        for warning in caught:
            self.report_line(str(warning.message))

    def _choose_variant(self) -> None:
        """Select the variant of the strategy that runs between replicas of several ranks."""
        if self.profile.inside is None:
            return
        asked, self._strategy = self._strategy, load_object(VARIANT)(self._strategy, self.profile)
        if self._strategy is not asked:
            self._varied = True
            self.report_line(
                "gradients are averaged inside a node before they are applied, so "
                f"{self._strategy} runs instead of {asked}"
            )

    def _run_plan(self, plan: Plan, observed: int, trial: Plan | None = None) -> None:
        """Adopt the strategy's first plan, record it, and start the strategy's monitor."""
        self._create_replanner()
        self._adopt(self._strategy, plan, trial)
        reports = self.engine.reports
        reports.listener, reports.needs_ready_times = None, False
        if self._recorder:
            reports.listener = self._recorder.add_iteration
            reports.needs_ready_times = self._recorder.needs_ready_times
            self._recorder.start(str(self._strategy), self.plan, observed, self.profile)
            if not self.engine.flat.is_sharded:  # ranks of a node hold different parameters
                self._recorder.set_sample(partial(Sample.of, self.engine.flat))
        self._stop_guard()
        self._monitor = self._strategy.monitor()
        if self._monitor is not None:
            self._guard = ConvergenceGuard(self._cluster.control, self.engine.optimizer)
            self.engine.set_noise_meter(self._guard.meter)

    def _create_replanner(self) -> None:
        self._replanner = Replanner(self._watch.replan, self.profile, self._cluster, self._plan_for)
        self.engine.reports.meter = self._replanner.add

    def _checked_plan(self, strategy: Strategy) -> Plan:
        return self._plan_for(strategy, self.profile)

    def _plan_for(self, strategy: Strategy, profile: Profile) -> Plan:
        plan = strategy.plan(profile)
        if self._broadcasts(strategy):
            plan = with_broadcast(plan, profile.default_link.name)
        else:
            plan = without_broadcast(plan)
        raise_if_wrong(plan, profile)
        if self.changes is not None:
            self.changes.require_supported(plan, strategy)
            plan = _with_comparisons(plan, profile)
        return plan

    def _plan_of_shards(self, plan: Plan) -> Plan:
        """Return the plan for a sharded model, or that of the variant that updates at the step.

        Raises:
            ValueError: the plan updates buckets one by one, which FSDP's gathers would miss.
        """
        asked = self._strategy
        if early_remedy(plan) is not None and (variant := asked.at_step()) is not None:
            self._strategy, self._varied = variant, True
            why = "the model is sharded, and FSDP gathers weights at moments of its own"
            self.report_line(f"{why}, so {variant} runs instead of {asked}")
            plan = self._checked_plan(variant)
        remedy = early_remedy(plan)
        if remedy is not None:
            raise ValueError(
                f"strategy ({asked}) must update in optimizer.step() where the model is sharded "
                f"(fully_shard), because FSDP gathers weights at moments of its own; {remedy}"
            )
        return plan

    def _broadcasts(self, strategy: Strategy) -> bool:
        """Return whether all ranks receive rank 0's buffers, as under torch's DDP."""
        wanted = self._watch.broadcast_buffers and self.changes is None
        return self._shared and wanted and strategy.synchronous

    def _agree_on_buffers(self) -> None:
        """Agree on the buffers that forward writes.

        Runs in the first iteration and then every `compare_every` iterations. All ranks call this
        method at the same point of an iteration.
        """
        every, iteration = self._watch.compare_every, self._agreed_on_buffers
        if iteration and not (every and iteration % every == 0):
            self._agreed_on_buffers += 1
            return
        buffers, control = self.engine.module_buffers, self._cluster.control
        everyone = control.gather(buffers.changed_names())
        if all(changed is None for changed in everyone):  # no forward yet
            return
        self._agreed_on_buffers += 1
        new = buffers.share({name for changed in everyone for name in changed or ()})
        if new:
            control.agree("the buffers that forward writes", buffers.descriptions(), SAME_SHAPE)
        if new and iteration:
            self.report_line(
                f"forward has begun to write buffer {new[0]!r}, so rank 0's is broadcast"
            )

    def _suitable_plan(self, plan: Plan, habits: ScriptUsage) -> Plan:
        """Return the plan, or the plan of the strategy's variant if the script's habits
        require it."""
        why = habits.conflict_with(plan)
        if why is None:
            return plan
        asked, variant = self._strategy, self._strategy.at_step()
        if variant is None:
            why = replace(habits, hooks=False).conflict_with(plan)
            if why is None:  # `StepHooks` allows hooks that only count, for example
                return plan
            raise ValueError(
                f"the script {why}, but {asked} applies gradients bucket by bucket, at other "
                f"times; {early_remedy(plan)}"
            )
        self._strategy, self._varied = variant, True
        self.report_line(f"the script {why}, so {variant} runs instead of {asked}")
        return self._checked_plan(variant)

    def _set_held_passes(self, habits: ScriptUsage) -> None:
        """Set the number of backward passes per step that only accumulate.

        If each iteration averages its own gradients, no pass is held. Otherwise only the last
        backward before a step begins messages.
        """
        averaging = any(
            t.payload.buffer == "grad" and base_link(t.link) != INSIDE for t in self.plan.transfers
        )
        averaging = averaging and self.plan.source is None and not self.engine.run.windows.late
        self.engine.hooks.held = 0 if averaging else habits.backwards - 1

    def _expect_passes(self) -> None:
        """Expect as many backward passes per step as the rank with the most passes has run in this
        iteration.

        All messages of this iteration have waited for the step.
        """
        hooks, control = self.engine.hooks, self._cluster.control
        passes = [hooks.added_passes]
        self._run_between_members(lambda: passes.extend(control.gather(hooks.added_passes)))
        hooks.held = max(1, *passes) - 1

    def _change_variant(self) -> None:
        """Run the variant that averages the gradients of every backward pass, if there is one.

        Called on all ranks, after the plan has averaged gradients more than once before a step.
        """
        self.engine.repeats = False
        if self._strategy.at_step() is None:
            return
        plan = self._suitable_plan(self.plan, ScriptUsage(backwards=2))
        if plan is not self.plan:
            self.engine.pauses.drain()
            self._adopt(self._strategy, plan)

    def _end_trial(self) -> None:
        """After the first step, which ran all updates at the step, run the plan as planned, or a
        variant if a rank's script needs one.

        All ranks have the same habits and make the same choice.
        """
        watched, self._trying = self.engine.watched, False
        assert watched is not None
        habits = self._combined_usage(watched.usage)
        self.engine.set_watched(None)
        plan = self._suitable_plan(self.plan, habits)
        if plan is self.plan:
            tried = self.engine.cursor.planned
            self._start_plan(plan, tried)
            resume_at(self.engine, tried)
        else:
            self._adopt(self._strategy, plan)
        self._set_held_passes(habits)

    def _combined_usage(self, own: ScriptUsage) -> ScriptUsage:
        """Return the script's actions on all ranks; those on this rank if a member has failed."""
        combined = [own]
        self._run_between_members(
            lambda: combined.append(ScriptUsage.combine(own, self._cluster.control))
        )
        return combined[-1]

    def _adopt(
        self, strategy: Strategy, plan: Plan, trial: Plan | None = None, *, continues: bool = False
    ) -> None:
        """Agree on a plan with all ranks, open its links and run it, or first run its `trial`.

        Args:
            strategy: strategy of the plan.
            plan: the plan.
            trial: plan of the first iteration; None for `plan`.
            continues: whether buffers and memory of the plan that ran before continue.
        """
        control = self._cluster.control
        if self._replanner is not None:
            plan = self._replanner.with_boundaries(plan, strategy)
        control.agree("the plan", plan.digest, "start all ranks with the same offbeat version")
        remedy = early_remedy(plan)
        coupled = find_coupling(self.engine.optimizer) if remedy is not None else None
        if coupled is not None:
            raise ValueError(f"{coupled}, so it cannot step bucket by bucket; {remedy}")
        names = list(plan.links)
        if plan.votes or plan.groups:  # votes and messages of all ranks need a common channel
            names.append(vote_channel(next(iter(self._cluster.specs))))
        self._cluster.open(names, plan.groups)
        self._cluster.close_channels(names)  # of the measurement, or of the plan before
        self._guard_links()
        self.plan = plan
        if self._recorder:
            self._recorder.set_plan(plan, self.profile)
        self._start_plan(plan if trial is None else trial, 0, continues=continues)
        if self._pace is None and self.profile.pace:
            self._pace = open_pace(self.profile, self._cluster.replica)
            assert self._pace is not None
            self.engine.set_compute(self._pace)
        if self._guard is not None:
            self.engine.set_noise_meter(self._guard.meter)
        self._replicas, every = None, self._watch.compare_every
        compared = control, self._model, self.engine.optimizer, every
        if every and sends_only_gradients(plan):
            settle, holders = self.engine.pauses.flush, self._cluster.topology.holders
            self._replicas = ReplicaGuard(*compared, settle, holders)
            self._replicas.compare()
        elif every:
            nodes = () if self._cluster.inside is None else self._cluster.topology.nodes
            self._replicas = SettingsGuard(
                *compared, self._averages_parameters_now, self._report_decision, nodes
            )

    def _averages_parameters_now(self) -> bool:
        """Return whether all ranks average parameters in this iteration, or may do so after a vote.

        Ranks that pass sums and parameters on are iterations apart, so they make no common average.
        """
        transfers = self.engine.run.program.transfers(self.engine.cursor.planned)
        return any(t.payload.buffer != "grad" and t.ranks is None for t in transfers)

    def _start_plan(self, plan: Plan, planned: int, *, continues: bool = False) -> None:
        self.scaler_remedy = _scaler_remedy(plan)
        self.engine.adopt(plan, planned, continues=continues)
        if self._replanner is not None:
            self._replanner.begin(plan)

    def _apply_finding(self, finding: Finding) -> None:
        """Change to the fallback strategy if the loss is not finite, rises or stalls. Plan again if
        the noise has changed.

        All ranks have the same finding and make the same change.
        """
        if finding.problem is not None:
            assert self._monitor is not None
            fallback = self._monitor.fallback
            plan = self._checked_plan(fallback)
            self._stop_guard()
            if plan.digest == self.plan.digest:  # the fallback runs already
                return
            self._report_decision(
                f"{finding.problem}: fell back from {self._strategy} to {fallback}"
            )
            self.engine.pauses.drain()
            self._adopt(fallback, plan)
        elif finding.noise is not None:
            self.profile = replace(self.profile, noise=finding.noise)
            with warnings.catch_warnings():  # the report contains decisions during training
                warnings.simplefilter("ignore")
                plan = self._checked_plan(self._strategy)
            if plan.digest != self.plan.digest:
                why = plan.fact("why") or plan.fact("preserver", {}).get("decision")
                self._report_decision(
                    f"planned again, {why or 'the gradient noise changed'}", warn=False
                )
                self.engine.pauses.drain()
                self._adopt(self._strategy, plan)

    def _plan_again(self, replanner: Replanner) -> None:
        """At a boundary, plan for the measured times of links and ranks if they have changed.

        All ranks have the same measured times and make the same change.
        """
        with warnings.catch_warnings():  # the report contains decisions during training
            warnings.simplefilter("ignore")
            proposal = replanner.propose(self.engine.cursor.planned, self.profile.noise)
        if proposal is None:
            return
        self.profile = proposal.profile
        if self._recorder:
            self._recorder.on_replanning(self.engine.iteration, proposal.text, proposal.numbers)
        if proposal.plan is not None:
            self.engine.pauses.drain()
            self._adopt(replanner.strategy, proposal.plan, continues=True)
        if self._cluster.control.rank == 0:
            iteration, numbers = self.engine.iteration, proposal.numbers
            console.print("replan", proposal.text, iteration=iteration, **numbers)
            if notice := replanner.better_period(self.profile):
                console.print("notice", notice, "notice", iteration=iteration)
                if self._recorder:
                    self._recorder.decide(iteration, notice, None)

    def report_line(self, what: str) -> None:
        """Print one line on rank 0 and add it to the report."""
        self._report_decision(what, warn=False)
        if self._cluster.control.rank == 0:
            console.print("decision", what, iteration=self.engine.iteration)

    def _report_decision(self, what: str, warn: bool = True) -> None:
        """Add a decision to the report; on rank 0, also warn of it."""
        iteration = self.engine.iteration
        warning = f"iteration {iteration}: {what}" if warn else None
        if self._recorder:
            self._recorder.decide(iteration, what, warning)
        if warning is not None and self._cluster.control.rank == 0:
            warnings.warn(warning, stacklevel=2)

    def report_change(self, change: MemberChange) -> None:
        """Print one line about a change of the members on rank 0 and add it to the report."""
        if self._recorder:
            self._recorder.on_members(change, self._joined)
        if self._cluster.control.rank == 0:
            numbers = {"members": len(change.members), "s": change.seconds}
            console.print("members", change.text, iteration=change.iteration, **numbers)

    def end_record(self, text: str) -> None:
        """Record that this process leaves the job."""
        if self._recorder:
            self.engine.reports.deliver(rest=True)
            self._recorder.end("left", text)

    def _stop_guard(self) -> None:
        if self._guard is not None:
            self._guard.close()
            self.engine.set_noise_meter(None)
        self._guard = None

    def observe(self, how: Observation) -> None:
        """Run BSP, measure a profile and plan from it."""
        first = next(iter(self._cluster.specs))
        self.engine.set_watched(UsageRecorder())
        flat = self.engine.flat
        plan = observing_plan(
            len(flat.buckets),
            first,
            broadcasts=self._broadcasts(self._strategy),
        )
        self._cluster.open(plan.links)
        self._guard_links()
        self.engine.adopt(plan)
        # Ranks of a sharded replica wait for each other within forward.
        in_turns = how.turns and not (self._is_emulated or flat.is_sharded)
        turns = load_object(TURNS)(how.turns) if in_turns else ComputeObserver()
        self.engine.set_compute(turns)
        self._observer = observer = Observer(self._model, self.engine, self._cluster.device, turns)
        self._around_forward = observer.memory.forward

        def listen(done: Iteration) -> None:
            if self._recorder:
                self._recorder.add_iteration(done)
            observer.iteration(done)
            if observer.memory.is_complete:
                self._around_forward = nullcontext
            measured = done.number + 1 >= how.iterations and not done.abandoned
            if measured and not self.engine.awaits_change:
                observed = done.number + 1
                act = partial(self._plan_from, observer, how, observed)
                self.engine.change_at_end(partial(self._run_before_plan, act))

        self.engine.reports.listener = listen
        self.engine.reports.needs_ready_times = True

    def _run_before_plan(self, act: Callable[[], None]) -> None:
        """Run exchanges of all ranks before there is a plan, without which a job cannot continue
        after the failure of a member."""
        try:
            act()
        except RuntimeError as error:
            if self.changes is None or not self._cluster.control.blames_peers(error):
                raise
            self.changes.end_without_plan(error)

    def _plan_from(self, observer: Observer, how: Observation, observed: int) -> None:
        observer.finish()
        if self._shared and not self._broadcasts(self._strategy):
            self._agree_on_buffers()  # averages of parameters include buffers
        self._observer, self._around_forward = None, nullcontext
        control = self._cluster.control
        least = how.min_bucket_bytes or worthwhile_bytes(self._cluster, self.engine.flat)
        needed = 1
        if how.min_bucket_bytes is None:
            needed = max(
                how.least_buckets, self._strategy.least_buckets(self._cluster.topology.replicas)
            )
        specs = observer.layout(control, least, needed)
        self.engine.relayout(specs)
        flat = self.engine.flat
        self._parameters.attach(flat.parameters)
        links, contention = measure_cluster(self._cluster, flat, emulated=self._is_emulated)
        inside = measure_inside(self._cluster, flat, emulated=self._is_emulated)
        profile = observer.profile(
            specs, flat, (*links, *inside), contention, self._cluster, how.model
        )
        self.engine.set_compute(ComputeObserver())
        if how.pace is not None and not self._is_emulated:
            paced = load_object(PACED_PROFILE)(profile, how.pace, self._cluster)
            profile = Profile.from_dict(control.share_first(paced.to_dict()))
        # Before `measure_beside`, because ranks do not compute while they pause.
        profile = measure_pauses(self._cluster, flat, profile)
        profile = measure_beside(self._cluster, flat, profile)
        with ComputeLoad(profile) if profile.pace else nullcontext():
            profile = measure_codecs(self._cluster, profile)
        # Every rank must plan from the same profile.
        profile = Profile.from_dict(control.share_first(profile.to_dict()))
        if how.save_to and control.rank == 0:
            again = ", and the next run measures again"
            write_or_warn(profile.save, how.save_to, "profile", again, needed=how.then_stop)
        if how.then_stop:
            raise SystemExit(0)
        assert self.engine.watched is not None
        habits = ScriptUsage.combine(self.engine.watched.usage, control)
        self.run_from(profile, observed, habits)

    @property
    def _is_emulated(self) -> bool:
        """Whether the model's layers are emulated by sleeping."""
        return bool(getattr(self._model, "emulated", False))

    # ---- checkpoints ------------------------------------------------------------------------

    @property
    def iteration(self) -> int:
        return self._earlier_iterations + self.engine.iteration

    def capture_position(self) -> Position:
        self._cluster.require_open()
        if self._observer is not None:
            raise RuntimeError(
                f"there is no plan yet in iteration {self.iteration}, as the first iterations are "
                "measured; save later, or give offbeat.prepare a profile"
            )
        state = {
            "profile": self.profile.to_dict(),
            "plan": self.plan.to_dict(),
            "guard": self._guard.capture() if self._guard is not None else None,
            "drift": self._replanner.capture() if self._replanner is not None else None,
            "engine": capture(self.engine),
            "trying": self._trying,
            "varied": self._varied,
            "held": self.engine.hooks.held,
        }
        united = self._united == self.engine.iteration
        alike = united or (sends_only_gradients(self.plan) and not self.engine.run.windows.late)
        return Position(self.iteration, alike, state)

    @property
    def observing(self) -> bool:
        return self._observer is not None

    def resume(self, iteration: int, state: Mapping[str, Any] | None) -> None:
        self._cluster.require_open()
        self._united = -1
        self._agreed_on_buffers = 0
        self._forget_weights()
        if state is not None:
            self._resume_plan(state)
        else:
            self.engine.pauses.discard()
        self._earlier_iterations = iteration - self.engine.iteration

    def _resume_plan(self, state: Mapping[str, Any]) -> None:
        """Restore the buckets, the plan and the position in it."""
        self.engine.pauses.pause()
        if self._observer is not None:
            self._observer.finish()
            self._observer, self._around_forward = None, nullcontext
            self.engine.set_compute(ComputeObserver())
        self.profile = Profile.from_dict(state["profile"])
        if self._recorder:
            self._recorder.set_sample(None)
        # Sizes of outstanding messages and codec memory depend on the alignment, which differs
        # between jobs on GPUs and on CPUs. Version 0.1 did not align.
        alignment_bytes = state["engine"].get("alignment_bytes", 1)
        self.engine.relayout(specs_of_profile(self._model, self.profile), alignment_bytes)
        self._parameters.attach(self.engine.flat.parameters)
        if state["varied"] and not self._varied:
            variant = self._strategy.at_step()
            assert variant is not None
            self._strategy, self._varied = variant, True
        if state["trying"]:  # no iteration has run yet
            self.run_from(self.profile)
            self.engine.begin()
            return
        self._trying = False
        self.engine.set_watched(None)
        self._run_plan(Plan.from_dict(state["plan"]), observed=0)
        self.engine.hooks.held = state["held"]
        if state["guard"] is None:
            self._stop_guard()
        elif self._guard is not None:
            self._guard.resume(state["guard"])
            self.engine.set_noise_meter(self._guard.meter)
        if self._replanner is not None and state.get("drift") is not None:
            self._replanner.resume(state["drift"])
            self._replanner.begin(self.plan)
        restore(self.engine, state["engine"])

    # ---- what the user calls ----------------------------------------------------------------

    def forward(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._cluster.closed and not (torch.is_grad_enabled() and self._model.training):
            return call(*args, **kwargs)
        if torch.is_grad_enabled():
            if self._shared:
                self.engine.module_buffers.note()
            shared = self._allows_any_optimizer()  # otherwise messages may refer to the storage
            self._parameters.require_unchanged(
                self.engine.flat.restore_parameters if shared else None
            )
            self._require_untouched()
            if self._reports_missing_step and self.engine.passes_without_step >= MANY_PASSES:
                self._report_missing_step()
            begins = self.engine.cursor.now is None and self.engine.trains
            if self.changes is not None and begins:
                self.changes.before_iteration()
            if self._replicas is not None and begins:
                self._replicas.forward_begins()
            if self._loaded and self.engine.trains and not self._cluster.closed:
                self._require_all_loaded()
        with self.engine.forward_begins(), self._around_forward():
            output = call(*args, **kwargs)
        self.engine.forward_ends(output)
        if self._unsampled is not None and self._recorder:
            self._recorder.on_step_end(self._unsampled)
            self._unsampled = None
        return output

    def before_call(self) -> None:
        self.engine.before_call()

    def note_forward(self, output: object) -> None:
        self.engine.note_forward(output)

    def drive(
        self, call: Callable[..., Any], closure: Any = None, /, *args: Any, **kwargs: Any
    ) -> Any:
        self.flush()
        begin_update = self.engine.begin_update
        if closure is not None:

            def evaluate() -> Any:
                loss = closure()
                begin_update()
                return loss

            args = (torch.enable_grad()(evaluate), *args)
        with self._stepping.script_steps(begin_update, inner=closure is None):
            result = call(*args, **kwargs)
        stepped = self._stepping.has_script_step or closure is not None
        if stepped:
            self.engine.flat.restore_parameters()
        return result, stepped

    @property
    def awaits_step(self) -> bool:
        return self.engine.awaits_step

    _unsampled: int | None = None  # iteration whose parameters arrive in the next forward

    def step(self, skip_update: bool) -> None:
        if self._recorder:
            self._recorder.on_step_begin(self.engine.iteration)
        if self._replicas is not None:
            # Other ranks wait for this rank's messages before they compare.
            self.engine.end_backward(skip_update)
            self._run_between_members(self._replicas.step)
        self.engine.step(skip_update)
        self.engine.flat.former.require_unwritten()
        if self.engine.plan.source is not None and self._cluster.control.world_size > 1:
            self._untouched.note()
        if self._replicas is not None:
            self._replicas.note_step(weights_final=not self.engine.run.has_transfers_at_forward)
        if self.engine.run.has_transfers_at_forward:
            self._unsampled = self.engine.iteration - 1
        elif self._recorder:
            self._recorder.on_step_end(self.engine.iteration - 1)
        if self._trying:
            self._end_trial()
        elif self.engine.hooks.held == ALL:
            self._expect_passes()
        if self.engine.repeats:
            self._change_variant()
        finding = self._guard.iteration() if self._guard is not None else None
        if finding is not None:
            self._apply_finding(finding)
        if self._replanner is not None and self._replanner.is_due(self.engine.cursor.planned):
            self._run_between_members(partial(self._plan_again, self._replanner))
        if self.changes is not None:
            self.changes.on_iteration_end()

    def _run_between_members(self, exchange: Callable[[], None]) -> None:
        """Run an exchange of all ranks. After the failure of a member, survivors leave it out."""
        if self.changes is None:
            exchange()
        elif not self.changes.are_agreed:  # until the next epoch, ranks may be iterations apart
            self.changes.run(exchange)

    def _report_missing_step(self) -> None:
        """Warn once that the script runs backward without a step of the prepared optimizer."""
        self._reports_missing_step = False
        self._report_decision(
            f"optimizer.step() was not called in the last {MANY_PASSES} backward passes, so "
            f"{self._strategy} runs no updates; call step() of the optimizer that offbeat.prepare "
            "returned, or wrap backward passes that only accumulate in `with model.no_sync():`"
        )

    def _require_untouched(self) -> None:
        if self.engine.cursor.now is None and (name := self._untouched.changed_name()) is not None:
            raise RuntimeError(
                f"parameter {name!r} was changed outside of optimizer.step(), but this strategy "
                "sends parameters from rank to rank, so other ranks would not receive the change; "
                "change it in optimizer.register_step_post_hook, load with model.load_state_dict, "
                "or use a strategy that steps at once, such as WFBP()"
            )

    def on_scaler_step(self) -> None:
        if self.engine.watched is not None:
            self.engine.watched.record_scaler()

    def skip_step(self) -> None:
        skipping = self.engine.require_skippable()
        self.step(skip_update=skipping)
        if skipping and isinstance(self._replicas, ReplicaGuard):
            self._replicas.skipped += 1

    def zero_grad(self, set_to_none: bool) -> None:
        self.engine.zero_grad(set_to_none)

    def flush(self) -> None:
        self.engine.pauses.flush()

    def traffic(self) -> dict[str, int]:
        return self._cluster.bytes_sent()

    def listen(self, listener: Callable[[Iteration], None]) -> None:
        self.engine.reports.watcher = listener

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        hooks = self.engine.hooks
        before, hooks.accumulating = hooks.accumulating, True
        try:
            yield
        finally:
            hooks.accumulating = before

    def _discard(self) -> None:
        """Prepare for a load of other weights."""
        self._loaded |= self.engine.pauses.discard()
        self.engine.module_buffers.forget()
        self._forget_weights()

    def _forget_weights(self) -> None:
        """Suspend the guards of weights until the next step, because weights may change."""
        self._untouched.forget()
        if self._replicas is not None:
            self._replicas.forget()

    def _require_all_loaded(self) -> None:
        """Raise RuntimeError unless all ranks have loaded weights.

        The plan restarts after a load. A rank that continues would send other messages than this
        rank, for which the backend may end the process.
        """
        self._loaded, control = False, self._cluster.control
        try:
            with control.waiting("loading weights"):
                control.meet(f"loaded/{control.met}/{self.engine.iteration}")
        except RuntimeError as error:
            raise RuntimeError(
                f"weights were loaded on rank {control.rank}, and {self._strategy} begins anew "
                "then; load them on all ranks in the same place, or on none, and evaluate others "
                f"on copy.deepcopy(model): {error}. {control.report_failure()}"
            ) from error

    def optimizer_reloaded(self) -> None:
        self.engine.refresh_groups()

    def consolidate(self, repairing: bool) -> None:
        self._cluster.require_open()
        control = self._cluster.control
        control.set_activity("in consolidate")
        self._forget_weights()
        if self.changes is None:
            with control.joint_call("consolidate"):
                self.engine.pauses.drain()
                self._unify(repairing)
        else:
            self.engine.pauses.drain()
            self.changes.unite(
                partial(self._unify, repairing), partial(self._united_tensors, repairing)
            )
        self._united = self.engine.iteration

    def _unify(self, repairing: bool) -> None:
        """Make all replicas equal. If the members of the job change, a failure of a rank leaves the
        replicas of the other ranks as they are."""
        staged = self.changes is not None
        joint = self._cluster.control.joint_call("consolidate") if staged else nullcontext()
        with joint:
            if self.engine.plan.source is not None:
                take(self.engine.plan.source, self._model, self._cluster)
            elif not sends_only_gradients(self.engine.plan):
                average_replicas(self._model, self._cluster, staged=staged)
            elif repairing:
                repair(self._model, self.engine.optimizer, self._cluster, staged=staged)
            else:
                require_equal(self._model, self._strategy, self._cluster)
                average_replicas(self._model, self._cluster, staged=staged)

    def _united_tensors(self, repairing: bool) -> list[torch.Tensor]:
        """Return the tensors that `_unify` changes."""
        with_state = repairing and sends_only_gradients(self.engine.plan)
        return replica_tensors(self._model, self.engine.optimizer if with_state else None)

    # ---- members ----------------------------------------------------------------------------

    def admit_changes(self, member: JobMember) -> None:
        """Let the members of the job change from now on. Called before the first plan."""
        self.engine.staged = True
        self.changes = MemberChanges(member, self, self._cluster)

    def request_leave(self, reason: str) -> None:
        if self.changes is None:
            super().request_leave(reason)
        else:
            self.changes.request_leave(reason)

    def read_samples(self, stream: Stream) -> MemberSamples:
        if self.changes is None:
            return super().read_samples(stream)
        control = self._cluster.control
        if self._stream_state is None:
            remedy = "create MemberSampler with the same arguments everywhere"
            control.agree("the samples of MemberSampler", stream.settings, remedy)
        else:
            settings, state = self._stream_state
            require_equal_settings(stream.settings, settings)
            stream.load(state)
        self.samples = self.changes.create_samples(stream)
        return self.samples

    @property
    def has_left(self) -> bool:
        return self.changes is not None and self.changes.has_left

    @property
    def has_joined(self) -> bool:
        return self._has_joined

    def run_joint_call(self, act: Callable[[], T]) -> tuple[T | None, str]:
        return (act(), "") if self.changes is None else self.changes.call(act)

    def save_at_changes(self, save: Callable[[], Any]) -> None:
        if self.changes is not None:
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
            self.samples.resume(None if saved is None else saved[1], self.iteration)

    @property
    def first_free_iteration(self) -> int:
        """Number of the first iteration that has not begun, neither with its forward nor with its
        samples."""
        has_read = self.samples is not None and self.samples.has_read(self.iteration)
        return self.iteration + (self.is_in_iteration or has_read)

    @property
    def has_profile(self) -> bool:
        """Whether the profile is known, from which survivors of a failure plan again."""
        return hasattr(self, "profile")

    @property
    def has_equal_replicas(self) -> bool:
        """Whether the plan keeps all replicas equal."""
        return self.engine.run.averages_gradients

    @property
    def is_in_iteration(self) -> bool:
        """Whether an iteration has begun and not ended."""
        return self.engine.cursor.now is not None

    @property
    def is_at_boundary(self) -> bool:
        """Whether a period of the plan ends between the last and the next iteration. Of plans with
        a period of one iteration, a few end."""
        if self._observer is not None or self._trying or self.is_in_iteration:
            return False
        since = self.engine.cursor.planned - self.plan.prologue
        return since >= 0 and since % _iterations_between_boundaries(self.plan) == 0

    def unite(self) -> None:
        """Complete everything in progress and average all replicas, before members change."""
        self._forget_weights()
        if self.saver is not None:
            self.saver.finish()  # its process group ends
            self.saver = None
        self.engine.pauses.drain()
        if not sends_only_gradients(self.plan):
            average_replicas(self._model, self._cluster, staged=True)
        self._united = self.engine.iteration

    @property
    def replica_tensors(self) -> list[torch.Tensor]:
        """Return all tensors of the model, detached."""
        return replica_tensors(self._model)

    def begin_epoch(self, joining: Sequence[int]) -> None:
        """Plan for the present members and run the plan. Keep the optimizers' states, buffers that
        are equal on all ranks, and values of rules.

        Args:
            joining: ranks that have joined and need the state.
        """
        self.saver = None  # it has a process group of the earlier members
        self._forget_weights()
        self.engine.pauses.drain()
        self._joined = {}
        if joining:
            facts = {**self._joining_facts(), "joining": [*joining]}
            self._joined = joined_processes(self._cluster.control.gather(facts))
            self._feed(joining)
        self._set_profile(self.profile)
        self._create_finite_guard()
        self.engine.replica = self._cluster.replica
        if isinstance(self.engine.gradients, Gradients):
            self.engine.gradients.world_size = self._cluster.control.world_size
        self._cluster.control.set_iteration(self.engine.iteration)
        self._create_replanner()
        self._adopt(self._strategy, self._checked_plan(self._strategy), continues=True)
        self._feed_buffers(joining)
        self._cluster.control.largest(0)  # no rank trains before all have this plan
        self.engine.begin()

    def _set_profile(self, profile: Profile) -> None:
        """Set the profile for the present members, computed from that of rank 0: changes that have
        failed may have left ranks with profiles for other members."""
        control = self._cluster.control
        common = control.gather(profile.to_dict() if control.rank == 0 else None)[0]
        self.profile = for_members(Profile.from_dict(common), self._cluster.topology.replicas)

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
            "varied": self._varied,
            "held": self.engine.hooks.held,
            "memory": {key: value for key, value in memory if isinstance(value, (int, float))},
        }

    def join(self, facts: Mapping[str, Any], member: JobMember) -> None:
        """Begin training as a new member of a running job. The members call `begin_epoch`.

        Args:
            facts: result of `_joining_facts` of a member.
            member: this process as a member.
        """
        state = self._feed(facts["joining"])
        if member.settings.join_state == "fresh":
            state["state"] = {}
        self.engine.optimizer.load_state_dict(state)
        self._has_joined = True
        self._set_profile(Profile.from_dict(facts["profile"]))
        self._choose_variant()
        if facts["varied"] and not self._varied:
            variant = self._strategy.at_step()
            assert variant is not None
            self._strategy, self._varied = variant, True
        self._stream_state = facts["samples"]
        self.engine.iteration = facts["iteration"]
        self._earlier_iterations = facts["earlier_iterations"]
        self._cluster.control.set_iteration(self.engine.iteration)
        self._run_plan(self._checked_plan(self._strategy), observed=0)
        self.engine.hooks.held = facts["held"]
        self.engine.run.context.memory.update(facts["memory"])
        self._feed_buffers(facts["joining"])
        self._cluster.control.largest(0)
        self._united = self.engine.iteration

    def _feed(self, joining: Sequence[int]) -> dict[str, Any]:
        """Send parameters, buffers and the optimizer's state to joining ranks. Return the state.

        All members send parameters, which are equal on them. The first one sends the rest.
        """
        feeding, model = Feeding(self._cluster, joining), self._model
        feeding.send((p.data for p in model.parameters()), are_equal=True)
        feeding.send((b.data for b in model.buffers()), are_equal=False)
        state = self.engine.optimizer.state_dict()
        return feeding.send_state(state, are_equal=self._strategy.synchronous)

    def _feed_buffers(self, joining: Sequence[int]) -> None:
        """Send the buffers that are equal on all ranks to joining ranks."""
        for name in sorted(effects.common_buffers(self.plan)) if joining else ():
            for copy in self.engine.flat.contents(name):
                feeding = Feeding(self._cluster, joining)
                feeding.send((tensor.data for tensor in copy), are_equal=True)

    def close(self) -> None:
        if self._cluster.closed:
            return
        if getattr(sys, "last_value", None) is None:  # after an uncaught exception, do not wait
            self.engine.pauses.settle()
        self.engine.waiting.closed = True
        if self._recorder:
            self.engine.reports.deliver(rest=True)
            self._recorder.pace = self._pace.record() if self._pace else None
            self._recorder.write(self.traffic())
        self.detach()
        self._cluster.close(self.engine.waiting.failure)
        if self.changes is not None:
            self.changes.close()

    def detach(self) -> None:
        """Remove every hook on the model, the optimizer and torch."""
        self._stop_guard()
        self.engine.detach()
        self._parameters.close()
        self._stepping.close()
        for handle in self._handles:
            handle.remove()


def _iterations_between_boundaries(plan: Plan) -> int:
    """Return the iterations between two comparisons of the members."""
    return plan.period if plan.period > 1 else MEMBER_ITERATIONS


def _with_comparisons(plan: Plan, profile: Profile) -> Plan:
    """Return the plan with the comparisons of the members as a fact, for predictions."""
    if profile.world_size == 1:
        return plan
    meaning = "iterations between two comparisons of the members"
    fact = Fact(MEMBERS_FACT, _iterations_between_boundaries(plan), meaning)
    return replace(plan, facts=(*plan.facts, fact))


def _allows_one_backward(plan: Plan) -> bool:
    """Return whether parameters change during backward, so that no other pass may follow before the
    step."""
    averages = any(t.payload.buffer == "param" and t.after.point == "grad" for t in plan.transfers)
    return averages or plan.source is not None


def _scaler_remedy(plan: Plan) -> str | None:
    """Return why GradScaler cannot unscale this plan's gradients, and the alternative; None if it
    can."""
    if any(map(effects.is_window_end, plan.applies)):
        return "gradients of several scales cannot be unscaled together; use WFBP()"
    remedy = early_remedy(plan)
    return remedy and f"they are applied bucket by bucket, at other times; {remedy}"


def build_flat(model: nn.Module, profile: Profile | None, alignment_bytes: int = 1) -> Flat:
    """Return flat storage with the profile's buckets, or one bucket per parameter in reverse
    order."""
    if profile is not None:
        specs = specs_of_profile(model, profile)
    else:
        names = [name for name, p in model.named_parameters() if p.requires_grad]
        specs = [BucketSpec(name, (name,)) for name in reversed(names)]
    return Flat(model, specs, alignment_bytes=alignment_bytes)


def open_plan_session(strategy: Strategy, job: TrainingJob) -> FlatSession:
    """Return the session that runs the strategy's plan. It measures a profile if none is known."""
    flat = build_flat(job.model, job.profile, job.cluster.alignment_bytes)
    session = FlatSession(
        job.model, job.optimizer, strategy, job.cluster, job.recorder, flat, job.watch
    )
    try:
        if job.member is not None:
            session.admit_changes(job.member)
        if job.joining is not None:
            assert job.member is not None
            session.join(job.joining, job.member)
        elif job.profile is not None:
            session.run_from(job.profile)
        else:
            session.observe(job.observation)
        if job.joining is None:  # the members are in `begin_epoch`
            job.open_connections()
        session.engine.begin()
    except BaseException:
        session.detach()
        if session.changes is not None:  # this process may request to join again
            session.changes.restore_handler()
        raise
    return session
