"""Plan that a session runs: its adoption by all ranks, and its changes during training."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from offbeat.core.buckets.coupling import find_collective, find_coupling
from offbeat.core.buckets.layout import specs_of_profile
from offbeat.core.derive.deferred import early_remedy
from offbeat.core.derive.effects import sends_only_gradients
from offbeat.core.guards.script_usage import UsageRecorder, combine_usage
from offbeat.core.parts import part
from offbeat.core.plan import INSIDE, Plan, base_link, vote_channel
from offbeat.core.profile import Profile, ScriptUsage
from offbeat.core.runtime.engine import Engine
from offbeat.core.runtime.hooks import ALL
from offbeat.core.runtime.joint_optimizer import JointOptimizer
from offbeat.core.runtime.plan_choice import PlanChoice
from offbeat.core.runtime.position import capture, restore, resume_at
from offbeat.core.runtime.session_guards import SessionGuards
from offbeat.core.runtime.training_job import TrainingJob, open_pace

if TYPE_CHECKING:
    from offbeat.lab.pace import Pace
    from offbeat.strategies.convergence import ConvergenceGuard, Finding


class PlanRunner:
    """Plan that all ranks have agreed on, and its replacements: the plan of a variant that the
    script needs, or of a fallback. All ranks make the same changes.

    Args:
        job: objects of this rank.
        engine: engine of this rank.
        choice: strategy that runs, and its plans.
        guards: guards of the session.
        run_jointly: runs an exchange of all ranks; leaves it out after the failure of a member.

    Attributes:
        engine: engine of this rank.
        plan: plan of the strategy. In a trial, the engine runs it with all updates at the step.
        is_trial: whether the first iteration runs all updates at the step, to observe the script.
        convergence: guard of the loss; None if the strategy has no fallback.
        pace: pace of an emulated host; None for a host at full speed.
    """

    plan: Plan

    def __init__(
        self,
        job: TrainingJob,
        engine: Engine,
        choice: PlanChoice,
        guards: SessionGuards,
        run_jointly: Callable[[Callable[[], None]], None],
    ) -> None:
        self._model, self._cluster, self._recorder = job.model, job.cluster, job.recorder
        self.engine, self._choice = engine, choice
        self._guards, self._decisions, self._run_jointly = guards, choice.decisions, run_jointly
        self.is_trial = False
        self.convergence: ConvergenceGuard | None = None
        self.pace: Pace | None = None

    # ---- the first plan ---------------------------------------------------------------------

    def run_from(
        self, profile: Profile, observed: int = 0, usage: ScriptUsage | None = None
    ) -> None:
        """Plan from a profile, check the plan, agree on it with all ranks and adopt it.

        Args:
            profile: profile, the same on all ranks.
            observed: iterations that were measured.
            usage: observed actions of the script between backward and step. None: nothing was
                observed yet; then a plan with early updates runs all updates of the first iteration
                at the step, and the script's actions in it decide about a variant. If updates
                cannot be deferred, the usage in the profile decides.
        """
        engine, choice, trial = self.engine, self._choice, None
        choice.profile = profile
        if isinstance(engine.optimizer, JointOptimizer):
            usage = replace(usage or ScriptUsage(), drives=True)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")  # rank 0 reports warnings for all ranks
            plan = choice.first_plan()
        if usage is not None:
            plan = choice.suitable_plan(plan, usage)
        else:
            trial = choice.trial_of(plan)
            if trial is None:
                plan = choice.expected_plan(plan)
        self.is_trial = trial is not None
        engine.set_watched(UsageRecorder() if self.is_trial else None)
        self.begin(plan, observed, trial)
        if usage is not None:
            self._set_held_passes(usage)
        elif trial is None and engine.traits.moves_in_backward:
            engine.hooks.held = ALL
        for warning in caught:
            self._decisions.print(str(warning.message))

    def begin(
        self,
        plan: Plan,
        observed: int = 0,
        trial: Plan | None = None,
        *,
        has_fallen_back: bool = False,
    ) -> None:
        """Adopt the strategy's first plan, or one of its fallback, record it, and start the
        guard of the loss."""
        engine, recorder, strategy = self.engine, self._recorder, self._choice.strategy
        self._fallback, self._has_fallen_back = strategy.fallback(), has_fallen_back
        self._adopt(plan, trial)
        if recorder:
            recorder.start(str(strategy), self.plan, observed, self._choice.profile)
            if not engine.flat.is_sharded:  # ranks of a node hold different parameters
                recorder.set_sample(partial(part("Sample").of, engine.flat))
        self.stop_monitor()
        if self._fallback is not None:
            self.convergence = guard = part("ConvergenceGuard")(engine)
            engine.observers.add(guard)

    def begin_again(self) -> None:
        """Adopt the strategy's plan for other members. Buffers and memory continue."""
        self._adopt(self._choice.plan(), continues=True)

    def stop_monitor(self) -> None:
        """Stop the guard of the loss."""
        if self.convergence is not None:
            self.convergence.close()
            self.engine.observers.remove(self.convergence)
        self.convergence = None

    def _set_held_passes(self, usage: ScriptUsage) -> None:
        """Set the number of backward passes per step that only accumulate.

        If each iteration averages its own gradients, no pass is held. Otherwise only the last
        backward before a step begins messages.
        """
        averaging = any(
            t.payload.buffer == "grad" and base_link(t.link) != INSIDE for t in self.plan.transfers
        )
        averaging = averaging and self.plan.source is None and not self.engine.traits.late
        self.engine.hooks.held = 0 if averaging else usage.backwards - 1

    # ---- adoption ---------------------------------------------------------------------------

    def _adopt(self, plan: Plan, trial: Plan | None = None, *, continues: bool = False) -> None:
        """Agree on a plan with all ranks, open its links and run it, or first run its `trial`.

        Args:
            plan: the plan.
            trial: plan of the first iteration; None for `plan`.
            continues: whether buffers and memory of the plan that ran before continue.
        """
        engine, cluster, profile = self.engine, self._cluster, self._choice.profile
        remedy = "start all ranks with the same offbeat version"
        cluster.control.agree("the plan", plan.digest, remedy)
        remedy = early_remedy(plan)
        coupled = find_coupling(engine.optimizer) if remedy is not None else None
        if coupled is not None:
            raise ValueError(f"{coupled}, so it cannot step bucket by bucket; {remedy}")
        if not sends_only_gradients(plan):
            collective = find_collective(engine.optimizer)
            if collective is not None:
                raise ValueError(
                    f"{collective}, which needs averaged gradients, but this strategy averages "
                    "parameters; use a strategy that averages gradients, such as WFBP()"
                )
        names = list(plan.links)
        if plan.votes or plan.groups:  # votes and messages of all ranks need a common channel
            names.append(vote_channel(next(iter(cluster.specs))))
        cluster.open(names, plan.groups)
        cluster.close_channels(names)  # of the measurement, or of the plan before
        self._guards.guard_links()
        self.plan = plan
        if self._recorder:
            self._recorder.set_plan(plan, profile)
        self._start(plan if trial is None else trial, continues=continues)
        if self.pace is None and profile.pace:
            self.pace = open_pace(profile, cluster.replica)
            assert self.pace is not None
            engine.observers.add(self.pace)
        self._guards.compare_ranks(plan)

    def _start(self, plan: Plan, planned: int = 0, *, continues: bool = False) -> None:
        assert plan.digest in self._choice.checked, "only a checked plan runs"
        self.engine.adopt(plan, planned, continues=continues)
        self._guards.note_plan()

    def _change(self, plan: Plan) -> None:
        """Apply or discard gradients and averages in progress, and run another plan."""
        self.engine.drain()
        # A member may have failed meanwhile. Then there is no exchange before the next epoch.
        self._run_jointly(partial(self._adopt, plan))

    # ---- changes at the end of an iteration -------------------------------------------------

    def on_step_end(self) -> None:
        """Change the plan if the script or the loss requires it."""
        engine = self.engine
        if self.is_trial:
            self._end_trial()
        elif engine.hooks.held == ALL:
            self._expect_passes()
        if engine.repeats:
            self._change_variant()
        finding = self.convergence.iteration() if self.convergence is not None else None
        if finding is not None:
            self._apply_finding(finding)

    def _end_trial(self) -> None:
        """After the first step, which ran all updates at the step, run the plan as planned, or a
        variant if a rank's script needs one."""
        engine, self.is_trial = self.engine, False
        assert engine.watched is not None
        own = engine.watched.usage
        everyone = [own]  # if a member has failed, only this rank
        self._run_jointly(lambda: everyone.append(combine_usage(own, engine.control)))
        usage = everyone[-1]
        engine.set_watched(None)
        plan = self._choice.suitable_plan(self.plan, usage)
        if plan is self.plan:
            tried = engine.cursor.planned
            self._start(plan, tried)
            resume_at(engine, tried)
        else:
            self._run_jointly(partial(self._adopt, plan))
        self._set_held_passes(usage)

    def _expect_passes(self) -> None:
        """Expect as many backward passes per step as the rank with the most passes has run in this
        iteration.

        All messages of this iteration have waited for the step.
        """
        hooks, control = self.engine.hooks, self.engine.control
        passes = [hooks.added_passes]
        self._run_jointly(lambda: passes.extend(control.gather(hooks.added_passes)))
        hooks.held = max(1, *passes) - 1

    def _change_variant(self) -> None:
        """Run the variant that averages the gradients of every backward pass, if there is one.

        Called on all ranks, after the plan has averaged gradients more than once before a step.
        """
        self.engine.repeats = False
        if self._choice.strategy.at_step() is None:
            return
        plan = self._choice.suitable_plan(self.plan, ScriptUsage(backwards=2))
        if plan is not self.plan:
            self._run_jointly(partial(self._change, plan))

    def _apply_finding(self, finding: Finding) -> None:
        """Change to the fallback strategy if the loss is not finite, rises or stalls. Plan again if
        the noise has changed."""
        choice = self._choice
        if finding.problem is not None:
            fallback = self._fallback
            assert fallback is not None
            plan = choice.plan(fallback)
            self.stop_monitor()
            if plan.digest == self.plan.digest:  # the fallback runs already
                return
            self._decisions.warn(
                f"{finding.problem}: fell back from {choice.strategy} to {fallback}"
            )
            self._has_fallen_back = True
            self._change(plan)
        elif finding.noise is not None:
            choice.profile = replace(choice.profile, noise=finding.noise)
            with warnings.catch_warnings():  # the report contains decisions during training
                warnings.simplefilter("ignore")
                plan = choice.plan()
            if plan.digest != self.plan.digest:
                why = plan.fact("why") or plan.fact("preserver", {}).get("decision")
                self._decisions.record(f"planned again, {why or 'the gradient noise changed'}")
                self._change(plan)

    # ---- checkpoints ------------------------------------------------------------------------

    def capture(self) -> dict[str, Any]:
        """Return the plan and the position in it, for `resume`."""
        convergence = self.convergence
        return {
            "profile": self._choice.profile.to_dict(),
            "plan": self.plan.to_dict(),
            "guard": None if convergence is None else convergence.capture(),
            "engine": capture(self.engine),
            "trying": self.is_trial,
            "varied": self._choice.is_variant,
            "fallen_back": self._has_fallen_back,
            "held": self.engine.hooks.held,
        }

    def resume(self, state: Mapping[str, Any]) -> None:
        """Restore the buckets, the plan and the position in it."""
        engine, choice = self.engine, self._choice
        choice.profile = Profile.from_dict(state["profile"])
        if self._recorder:
            self._recorder.set_sample(None)
        # Sizes of outstanding messages and codec memory depend on the alignment, which differs
        # between jobs on GPUs and on CPUs.
        specs = specs_of_profile(self._model, choice.profile)
        engine.relayout(specs, state["engine"]["alignment_bytes"])
        self._guards.parameters.attach(engine.flat.parameters)
        choice.restore(state["varied"])
        if state["trying"]:  # no iteration has run yet
            self.run_from(choice.profile)
            engine.begin()
            return
        self.is_trial = False
        engine.set_watched(None)
        plan = choice.check(Plan.from_dict(state["plan"]), choice.profile)
        self.begin(plan, has_fallen_back=state["fallen_back"])
        engine.hooks.held = state["held"]
        if state["guard"] is None:
            self.stop_monitor()
        elif self.convergence is not None:
            self.convergence.resume(state["guard"])
        restore(engine, state["engine"])
