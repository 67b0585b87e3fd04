"""Use of gradients and weights by a script between backward and step, from its first iterations."""

from __future__ import annotations

from dataclasses import astuple, replace
from typing import TYPE_CHECKING, Any

from offbeat.core.derive import effects
from offbeat.core.derive.deferred import early_remedy
from offbeat.core.plan import Plan
from offbeat.core.profile import ScriptUsage

if TYPE_CHECKING:
    from offbeat.core.transport.control import Control


def combine_usage(usage: ScriptUsage, control: Control) -> ScriptUsage:
    """Return the union of the usage of all ranks. Every rank must call it."""
    return ScriptUsage(*map(max, zip(*control.gather(astuple(usage)), strict=True)))


def conflict_with(usage: ScriptUsage, plan: Plan) -> str | None:
    """Return why a script cannot run with a plan; None if it can."""
    points = {apply.at.point for apply in plan.applies if effects.is_update(apply)}
    if not points & {"grad", "forward"}:
        return None
    late = "forward" in points
    conflicts = [
        (usage.drives, "steps through several optimizers, or through methods of one"),
        (usage.scales, "uses a GradScaler"),
        (usage.changes and not usage.scales, "changes gradients before the step (clipping?)"),
        (usage.skips and not late, "leaves out updates after backward"),
        (usage.reads and late and not usage.changes, "reads gradients before the step"),
        (usage.backwards > 1 and late, "calls backward several times before a step"),
        (usage.hooks, "has hooks of optimizer.step()"),
        (
            usage.alters and "grad" in points,
            "changes weights or the optimizer's settings between backward and step",
        ),
    ]
    words = [word for holds, word in conflicts if holds]
    return " and ".join(words) or None


def scaler_remedy(plan: Plan) -> str | None:
    """Return why GradScaler cannot unscale the gradients of a plan, and the alternative; None if it
    can."""
    if any(map(effects.is_window_end, plan.applies)):
        return "gradients of several scales cannot be unscaled together; use WFBP()"
    remedy = early_remedy(plan)
    return remedy and f"they are applied bucket by bucket, at other times; {remedy}"


class UsageRecorder:
    """Records the usage of the first iterations."""

    def __init__(self) -> None:
        self.usage = ScriptUsage()
        self._backwards = 0

    def record_backward(self) -> None:
        """Record the start of a backward pass."""
        self._backwards += 1

    def record_step(
        self, *, changed: bool, skipped: bool, altered: bool = False, hooked: bool = False
    ) -> None:
        """Record a call of `optimizer.step()`.

        Args:
            changed: gradients were changed since backward.
            skipped: the script has skipped the update.
            altered: weights or settings were changed since backward.
            hooked: the optimizer has step hooks.
        """
        backwards = self._backwards
        self._add(changes=changed, hooks=hooked, alters=altered, skips=skipped and backwards > 0,
                  backwards=backwards)  # fmt: skip
        self._backwards = 0

    def record_dropped_gradients(self) -> None:
        """Record that gradients were zeroed without a step."""
        self._add(skips=self._backwards > 0)
        self._backwards = 0

    def record_read(self) -> None:
        """Record a read of a gradient between backward and step."""
        if not self.usage.reads:  # clipping reads each gradient several times
            self._add(reads=True)

    def record_own_step(self) -> None:
        """Record a step that an optimizer makes in a method of its own."""
        self._add(drives=True)

    def record_scaler(self) -> None:
        """Record a step of a gradient scaler."""
        self._add(scales=True)

    def _add(self, **found: Any) -> None:
        known = {name: max(getattr(self.usage, name), value) for name, value in found.items()}
        self.usage = replace(self.usage, **known)
