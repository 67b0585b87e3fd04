"""Planner of a session: makes plans from a profile, agrees on them with all ranks, runs them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from offbeat.core.buckets.coupling import find_collective, find_coupling
from offbeat.core.buckets.layout import specs_of_profile
from offbeat.core.derive.broadcast import with_broadcast, without_broadcast
from offbeat.core.derive.deferred import defer_updates, early_remedy
from offbeat.core.derive.effects import sends_only_gradients
from offbeat.core.derive.lean import lean
from offbeat.core.guards.script_usage import (
    UsageRecorder,
    combine_usage,
    conflict_with,
)
from offbeat.core.guards.suitable_strategy import suitable_strategy
from offbeat.core.parts import part
from offbeat.core.plan import INSIDE, Plan, base_link, vote_channel
from offbeat.core.profile import Profile, ScriptUsage
from offbeat.core.runtime.engine import Engine
from offbeat.core.runtime.hooks import ALL
from offbeat.core.runtime.joint_optimizer import JointOptimizer
from offbeat.core.runtime.position import capture, restore, resume_at
from offbeat.core.runtime.recording import Decisions
from offbeat.core.runtime.session_guards import SessionGuards
from offbeat.core.runtime.training_job import TrainingJob, open_pace
from offbeat.core.strategy.interface import Planned
from offbeat.core.verify.check import raise_if_wrong

if TYPE_CHECKING:
    from offbeat.lab.pace import Pace
    from offbeat.strategies.convergence import ConvergenceGuard


class Planner:
    """Planner of a session. All ranks make the same plans, and change them in the same iterations.

    Args:
        strategy: requested strategy.
        job: objects of this rank.
        engine: engine of this rank.
        guards: guards of the session.
        decisions: reports of the session.

    Attributes:
        strategy: the requested strategy, or the variant that runs instead.
        is_variant: whether the model or the script needs a variant.
        profile: profile from which plans are made, the same on all ranks.
        plan: plan on which all ranks have agreed. In a trial, the engine runs it with all updates
            at the step.
        is_trial: whether the first iteration runs all updates at the step, to observe the script.
        convergence: guard of the loss; None if the strategy has no fallback.
        pace: pace of an emulated host; None for a host at full speed.
        decisions: reports of the session.
    """

    profile: Profile
    plan: Plan

    def __init__(
        self,
        strategy: Planned,
        job: TrainingJob,
        engine: Engine,
        guards: SessionGuards,
        decisions: Decisions,
    ) -> None:
        self._job, self._engine, self._guards = job, engine, guards
        self.strategy, self.decisions = strategy, decisions
        self.is_variant = self.is_trial = False
        self._checked: set[str] = set()  # digests of plans
        self._usage: ScriptUsage | None = None  # of this rank, until all ranks know that of all
        self.convergence: ConvergenceGuard | None = None
        self.pace: Pace | None = None

    # ---- making plans -----------------------------------------------------------------------

    def broadcasts(self, strategy: Planned) -> bool:
        """Return whether all ranks receive rank 0's buffers, as under torch's DDP."""
        wanted = self._job.watch.broadcast_buffers and self._job.member is None
        return wanted and self._guards.shares_buffers and strategy.synchronous

    def make(self, strategy: Planned | None = None) -> Plan:
        """Return the checked plan of a strategy (default: `strategy`) for the profile.

        Raises:
            ValueError: the plan is wrong, or cannot run while members change.
        """
        strategy, profile, member = strategy or self.strategy, self.profile, self._job.member
        plan = strategy.plan(profile)
        if self.broadcasts(strategy):
            plan = with_broadcast(plan, profile.default_link.name)
        else:
            plan = without_broadcast(plan)
        plan = lean(plan)
        if member is not None:
            plan = part("plan_of_members")(plan, profile, strategy, member.settings)
        return self._check(plan)

    def _check(self, plan: Plan) -> Plan:
        """Return the plan, which can run from now on. Raise ValueError if it is wrong."""
        raise_if_wrong(plan, self.profile)
        self._checked.add(plan.digest)
        return plan

    def _suitable_plan(self, plan: Plan, usage: ScriptUsage) -> Plan:
        """Return the plan, or that of the variant if the script's usage requires it.

        Raises:
            ValueError: there is no variant that suits the script.
        """
        suitable = suitable_strategy(self.strategy, plan, usage)
        if suitable is self.strategy:
            return plan
        self._replace_strategy(suitable, f"the script {conflict_with(usage, plan)}")
        return self.make()

    def _choose_variant(self) -> None:
        """Select the variant of the strategy that runs between replicas of several ranks."""
        if not self.profile.topology:
            return
        variant = part("variant_of")(self.strategy, self.profile)
        if variant is not self.strategy:
            why = "gradients are averaged inside a node before they are applied"
            if self.profile.sharded:
                why = "the model is sharded, and FSDP gathers weights at moments of its own"
            self._replace_strategy(variant, why)

    def _replace_strategy(self, variant: Planned, why: str) -> None:
        self.decisions.print(f"{why}, so {variant} runs instead of {self.strategy}")
        self.strategy, self.is_variant = variant, True

    def _restore_variant(self, is_variant: bool) -> None:
        """Select the variant that a saved or a running job has selected before."""
        if is_variant and not self.is_variant:
            variant = self.strategy.at_step()
            assert variant is not None
            self.strategy, self.is_variant = variant, True

    # ---- the first plan ---------------------------------------------------------------------

    def begin(self, profile: Profile, observed: int = 0, usage: ScriptUsage | None = None) -> None:
        """Plan from a profile, agree on the plan with all ranks and run it.

        Args:
            profile: profile, the same on all ranks.
            observed: iterations that were measured.
            usage: observed actions of the script between backward and step. None: nothing was
                observed yet; then a plan with early updates runs all updates of the first iteration
                at the step, and the script's actions in it decide about a variant. If updates
                cannot be deferred, the usage in the profile decides.
        """
        engine, trial, self.profile = self._engine, None, profile
        if isinstance(engine.optimizer, JointOptimizer):
            usage = replace(usage or ScriptUsage(), drives=True)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")  # rank 0 reports warnings for all ranks
            self._choose_variant()
            plan = self.make()
        if usage is not None:
            plan = self._suitable_plan(plan, usage)
        elif (trial := defer_updates(plan)) is not None:
            self._check(trial)
        elif self.strategy.at_step() is not None:  # otherwise this script may differ
            plan = self._suitable_plan(plan, profile.usage)
        self.is_trial = trial is not None
        engine.set_watched(UsageRecorder() if self.is_trial else None)
        self._begin(plan, observed, trial)
        if usage is not None:
            self._set_held_passes(usage)
        elif trial is None and engine.traits.moves_in_backward:
            engine.hooks.held = ALL
        for warning in caught:
            self.decisions.print(str(warning.message))

    def join(self, profile: Profile, *, is_variant: bool) -> None:
        """Run the plan of a running job that this process joins.

        Args:
            profile: profile for the present members.
            is_variant: whether the job runs a variant of the strategy.
        """
        self.profile = profile
        self._restore_variant(is_variant)
        self._begin(self.make())

    def begin_again(self, profile: Profile) -> None:
        """Run the strategy's plan for other members. Buffers and memory continue.

        Args:
            profile: profile for the present members.
        """
        self.profile = profile
        plan, usage = self.make(), self._usage
        if usage is not None:  # a member has failed at the end of the trial
            plan = self._suitable_plan(plan, usage)
        self._adopt(plan, continues=True)
        if usage is not None:
            self._set_held_passes(usage)

    def _begin(self, plan: Plan, observed: int = 0, trial: Plan | None = None) -> None:
        """Run the first plan of this process, record it, and start the guard of the loss."""
        engine, recorder = self._engine, self._job.recorder
        self._adopt(plan, trial)
        if recorder:
            recorder.start(str(self.strategy), plan, observed, self.profile)
            if not engine.flat.is_sharded:  # ranks of a node hold different parameters
                recorder.set_sample(partial(part("Sample").of, engine.flat))
        self.stop_watching()
        fallback = self.strategy.fallback()
        if fallback is not None:
            self.convergence = guard = part("ConvergenceGuard")(engine, self, fallback)
            engine.observers.add(guard)

    def stop_watching(self) -> None:
        """Stop the guard of the loss."""
        if self.convergence is not None:
            self.convergence.close()
            self._engine.observers.remove(self.convergence)
        self.convergence = None

    def _set_held_passes(self, usage: ScriptUsage) -> None:
        """Set the number of backward passes per step that only accumulate.

        If each iteration averages its own gradients, no pass is held. Otherwise only the last
        backward before a step begins messages.
        """
        averaging = any(
            t.payload.buffer == "grad" and base_link(t.link) != INSIDE for t in self.plan.transfers
        )
        averaging = averaging and self.plan.source is None and not self._engine.traits.late
        self._engine.hooks.held = 0 if averaging else usage.backwards - 1

    # ---- adoption ---------------------------------------------------------------------------

    def _adopt(self, plan: Plan, trial: Plan | None = None, *, continues: bool = False) -> None:
        """Agree on a plan with all ranks, open its links and run it, or first run its `trial`.

        Args:
            plan: the plan.
            trial: plan of the first iteration; None for `plan`.
            continues: whether buffers and memory of the plan that ran before continue.
        """
        engine, cluster, profile = self._engine, self._job.cluster, self.profile
        remedy = "start all ranks with the same offbeat version"
        cluster.control.agree("the plan", plan.digest, remedy)
        _require_fitting_optimizer(engine.optimizer, plan)
        names = list(plan.links)
        if plan.votes or plan.groups:  # votes and messages of all ranks need a common channel
            names.append(vote_channel(next(iter(cluster.specs))))
        cluster.open(names, plan.groups)
        cluster.close_channels(names)  # of the measurement, or of the plan before
        self.plan, self._usage = plan, None
        if self._job.recorder:
            self._job.recorder.set_plan(plan, profile)
        first = plan if trial is None else trial
        assert first.digest in self._checked
        engine.adopt(first, continues=continues)
        self._guards.note_plan()
        if self.pace is None and (pace := open_pace(profile, cluster.replica)) is not None:
            self.pace = pace
            engine.observers.add(pace)
        self._guards.compare_ranks(plan)

    # ---- changes at the end of an iteration -------------------------------------------------

    def on_step_end(self) -> Callable[[], None] | None:
        """Return the exchange by which all ranks change the plan as the script requires it; None if
        the plan stays. Every rank must run it, unless a member has failed."""
        if self.convergence is not None:
            self.convergence.on_step_end()
        engine, hooks = self._engine, self._engine.hooks
        if self.is_trial:
            assert engine.watched is not None
            self.is_trial, self._usage = False, engine.watched.usage
            engine.set_watched(None)
            return self._end_trial
        if hooks.held == ALL:
            hooks.held = max(1, hooks.added_passes) - 1
            return self._expect_passes
        # The plan has averaged gradients more than once before a step.
        repeats, engine.repeats = engine.repeats, False
        if not repeats or self.strategy.at_step() is None:
            return None
        plan = self._suitable_plan(self.plan, ScriptUsage(backwards=2))
        return None if plan is self.plan else self._changed_to(plan)

    def _end_trial(self) -> None:
        """Run the plan as planned, or a variant if a rank's script needs one."""
        engine = self._engine
        assert self._usage is not None
        usage = combine_usage(self._usage, engine.control)
        plan = self._suitable_plan(self.plan, usage)
        if plan is self.plan:
            tried, self._usage = engine.cursor.planned, None
            engine.adopt(plan, tried)
            self._guards.note_plan()
            resume_at(engine, tried)
        else:
            self._adopt(plan)
        self._set_held_passes(usage)

    def _expect_passes(self) -> None:
        """Expect as many backward passes per step as the rank with the most passes has run in this
        iteration, all of whose messages have waited for the step."""
        hooks = self._engine.hooks
        hooks.held = max(self._engine.control.gather(hooks.held))

    def _changed_to(self, plan: Plan) -> Callable[[], None]:
        """Apply or discard gradients and averages in progress. Return the exchange that adopts a
        plan."""
        self._engine.drain()
        return partial(self._adopt, plan)

    def change(
        self, strategy: Planned | None = None, profile: Profile | None = None
    ) -> Plan | None:
        """Plan again, and run the plan if it differs. Every rank must call this method.

        Args:
            strategy: strategy to run from now on, without its guard of the loss; None: as before.
            profile: new profile; None: as before.

        Returns:
            The plan; None if it runs already.
        """
        self.profile = profile or self.profile
        with warnings.catch_warnings():  # the report contains decisions during training
            warnings.simplefilter("ignore")
            plan = self.make(strategy)
        if plan.digest == self.plan.digest:
            return None
        self._changed_to(plan)()
        return plan

    # ---- checkpoints ------------------------------------------------------------------------

    def capture(self) -> dict[str, Any]:
        """Return the plan and the position in it, for `resume`."""
        convergence = self.convergence
        return {
            "profile": self.profile.to_dict(),
            "plan": self.plan.to_dict(),
            "guard": None if convergence is None else convergence.capture(),
            "engine": capture(self._engine),
            "trying": self.is_trial,
            "varied": self.is_variant,
            "held": self._engine.hooks.held,
        }

    def resume(self, state: Mapping[str, Any]) -> None:
        """Restore the buckets, the plan and the position in it."""
        engine, recorder = self._engine, self._job.recorder
        self.profile = profile = Profile.from_dict(state["profile"])
        if recorder:
            recorder.set_sample(None)
        # Sizes of outstanding messages and codec memory depend on the alignment, which differs
        # between jobs on GPUs and on CPUs.
        specs = specs_of_profile(self._job.model, profile)
        engine.relayout(specs, state["engine"]["alignment_bytes"])
        self._guards.parameters.attach(engine.flat.parameters)
        self._restore_variant(state["varied"])
        if state["trying"]:  # no iteration has run yet
            self.begin(profile)
            engine.begin()
            return
        self.is_trial = False
        engine.set_watched(None)
        self._begin(self._check(Plan.from_dict(state["plan"])))
        engine.hooks.held = state["held"]
        if state["guard"] is None:
            self.stop_watching()
        elif self.convergence is not None:
            self.convergence.resume(state["guard"])
        restore(engine, state["engine"])


def _require_fitting_optimizer(optimizer: torch.optim.Optimizer, plan: Plan) -> None:
    """Raise ValueError if an optimizer cannot step as a plan needs it."""
    remedy = early_remedy(plan)
    coupled = find_coupling(optimizer) if remedy is not None else None
    if coupled is not None:
        raise ValueError(f"{coupled}, so it cannot step bucket by bucket; {remedy}")
    collective = None if sends_only_gradients(plan) else find_collective(optimizer)
    if collective is not None:
        raise ValueError(
            f"{collective}, which needs averaged gradients, but this strategy averages "
            "parameters; use a strategy that averages gradients, such as WFBP()"
        )
