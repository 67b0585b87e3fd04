"""Choice of the plan of a session: the strategy or a variant of it, and its checked plans."""

from __future__ import annotations

from dataclasses import replace

from offbeat.core.buckets.module_buffers import has_buffers
from offbeat.core.derive.broadcast import with_broadcast, without_broadcast
from offbeat.core.derive.deferred import defer_updates
from offbeat.core.derive.lean import lean
from offbeat.core.guards.script_usage import conflict_with, suitable_strategy
from offbeat.core.parts import part
from offbeat.core.plan import Fact, Plan
from offbeat.core.profile import Profile, ScriptUsage
from offbeat.core.runtime.recording import Decisions
from offbeat.core.runtime.training_job import TrainingJob
from offbeat.core.sim.prediction import MEMBERS_FACT
from offbeat.core.strategy.interface import Planned
from offbeat.core.verify.check import raise_if_wrong
from offbeat.elastic.members import require_supported_plan

MEMBER_ITERATIONS = 8  # iterations between two boundaries of plans with a period of one iteration


class PlanChoice:
    """Planned that runs, and its checked plans.

    Args:
        strategy: requested strategy.
        job: objects of this rank.
        decisions: reports of the session.

    Attributes:
        decisions: reports of the session.
        strategy: the requested strategy, or the variant that runs instead.
        is_variant: whether the model or the script needs a variant.
        profile: profile from which plans are made, the same on all ranks.
        checked: digests of the checked plans.
        shares_buffers: whether the model has buffers, and replicas on other ranks.
    """

    profile: Profile

    def __init__(self, strategy: Planned, job: TrainingJob, decisions: Decisions) -> None:
        self.strategy, self.decisions, self.is_variant = strategy, decisions, False
        self.checked = set[str]()
        self._members = None if job.member is None else job.member.settings
        self._wants_broadcasts = job.watch.broadcast_buffers and job.member is None
        self.shares_buffers = job.cluster.control.world_size > 1 and has_buffers(job.model)

    def broadcasts(self, strategy: Planned) -> bool:
        """Return whether all ranks receive rank 0's buffers, as under torch's DDP."""
        return self.shares_buffers and self._wants_broadcasts and strategy.synchronous

    def plan(self, strategy: Planned | None = None, profile: Profile | None = None) -> Plan:
        """Return the checked plan of a strategy (default: `strategy`) for a profile (`profile`).

        Raises:
            ValueError: the plan is wrong, or cannot run while members change.
        """
        strategy, profile = strategy or self.strategy, profile or self.profile
        plan = strategy.plan(profile)
        if self.broadcasts(strategy):
            plan = with_broadcast(plan, profile.default_link.name)
        else:
            plan = without_broadcast(plan)
        plan = lean(plan)
        if self._members is not None:
            require_supported_plan(plan, strategy, self._members)
            plan = _with_comparisons(plan, profile)
        return self.check(plan, profile)

    def check(self, plan: Plan, profile: Profile) -> Plan:
        """Return a plan that is checked and may run.

        Raises:
            ValueError: the plan is wrong.
        """
        raise_if_wrong(plan, profile)
        self.checked.add(plan.digest)
        return plan

    def trial_of(self, plan: Plan) -> Plan | None:
        """Return a checked plan that runs all updates at the step, to observe what the script does
        before; None if it need not or cannot be observed so."""
        trial = defer_updates(plan)
        return trial and self.check(trial, self.profile)

    def first_plan(self) -> Plan:
        """Return the plan with which the session begins.

        Raises:
            ValueError: the strategy cannot run between replicas of several ranks.
        """
        self.choose_variant()
        return self.plan()

    def suitable_plan(self, plan: Plan, usage: ScriptUsage) -> Plan:
        """Return the plan, or that of the variant if the script's usage requires it.

        Raises:
            ValueError: there is no variant that suits the script.
        """
        suitable = suitable_strategy(self.strategy, plan, usage)
        if suitable is self.strategy:
            return plan
        self._replace(suitable, f"the script {conflict_with(usage, plan)}")
        return self.plan()

    def expected_plan(self, plan: Plan) -> Plan:
        """Return the plan, or that of the variant if the script of the profile required it. Without
        a variant the plan is kept, because this script may differ."""
        usage = self.profile.usage
        try:
            suitable_strategy(self.strategy, plan, usage)
        except ValueError:
            return plan
        return self.suitable_plan(plan, usage)  # its errors are of the variant's plan

    def choose_variant(self) -> None:
        """Select the variant of the strategy that runs between replicas of several ranks."""
        if not self.profile.topology:
            return
        variant = part("variant_of")(self.strategy, self.profile)
        if variant is not self.strategy:
            why = "gradients are averaged inside a node before they are applied"
            if self.profile.sharded:
                why = "the model is sharded, and FSDP gathers weights at moments of its own"
            self._replace(variant, why)

    def restore(self, is_variant: bool) -> None:
        """Select the variant that a saved or a running job has selected before."""
        if is_variant and not self.is_variant:
            variant = self.strategy.at_step()
            assert variant is not None
            self.strategy, self.is_variant = variant, True

    def _replace(self, variant: Planned, why: str) -> None:
        asked, self.strategy, self.is_variant = self.strategy, variant, True
        self.decisions.print(f"{why}, so {variant} runs instead of {asked}")


def iterations_between_boundaries(plan: Plan) -> int:
    """Return the iterations between two comparisons of the members of a job."""
    return plan.period if plan.period > 1 else MEMBER_ITERATIONS


def _with_comparisons(plan: Plan, profile: Profile) -> Plan:
    """Return the plan with the comparisons of the members as a fact, for predictions."""
    if profile.world_size == 1:
        return plan
    meaning = "iterations between two comparisons of the members"
    fact = Fact(MEMBERS_FACT, iterations_between_boundaries(plan), meaning)
    return replace(plan, facts=(*plan.facts, fact))
