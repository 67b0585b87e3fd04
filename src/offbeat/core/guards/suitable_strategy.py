"""The variant of a strategy that suits a script."""

from __future__ import annotations

from dataclasses import replace

from offbeat.core.derive.deferred import early_remedy
from offbeat.core.derive.traits import PlanTraits
from offbeat.core.guards.script_usage import conflict_with, scaler_remedy
from offbeat.core.plan import Plan
from offbeat.core.profile import Profile, ScriptUsage
from offbeat.core.strategy.interface import Planned, Strategy


def suitable_strategy(strategy: Planned, plan: Plan, usage: ScriptUsage) -> Planned:
    """Return the strategy, or its variant if the usage does not allow the strategy's plan.

    Raises:
        ValueError: there is no variant that suits the script.
    """
    why = conflict_with(usage, plan)
    if why is None:
        return strategy
    if (variant := strategy.at_step()) is not None:
        return variant
    why = conflict_with(replace(usage, hooks=False), plan)
    if why is None:  # `StepHooks` allows hooks that only count, for example
        return strategy
    raise ValueError(
        f"the script {why}, but {strategy} applies gradients bucket by bucket, at other times; "
        f"{early_remedy(plan)}"
    )


def strategy_that_runs(strategy: Strategy, profile: Profile) -> Strategy:
    """Return the strategy, or its variant if the script of the profile needs one.

    Raises:
        ValueError: the strategy has no plan for this profile, or none that suits the script.
    """
    usage = profile.usage
    if usage == ScriptUsage() or not isinstance(strategy, Planned):
        return strategy
    plan = strategy.plan(profile)
    suitable = suitable_strategy(strategy, plan, usage)
    if suitable is not strategy and (usage.scales or usage.drives):
        plan = suitable.plan(profile)
    if usage.scales and (remedy := scaler_remedy(plan)):
        raise ValueError(f"the script uses a GradScaler with {strategy}, but {remedy}")
    if usage.drives and not PlanTraits(plan).allows_own_steps:
        raise ValueError(
            "the script steps through several optimizers, or through methods of one, but "
            f"{strategy} updates at other moments than the step; use WFBP()"
        )
    return suitable
