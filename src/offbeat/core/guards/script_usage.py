"""Use of gradients and weights by a script between backward and step, from its first iterations.

A strategy that applies gradients at other times than in `optimizer.step()` depends on it.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass

from offbeat.core.derive import effects
from offbeat.core.plan import Plan
from offbeat.core.transport.control import Control


@dataclass
class ScriptUsage:
    """Use of gradients, weights and the optimizer by a script.

    Attributes:
        changes: gradients were changed or replaced before a step, as clipping does.
        reads: gradients were read before a step.
        scales: a gradient scaler has stepped.
        skips: an update was skipped after a backward.
        backwards: largest number of backward passes before one step.
        alters: weights or settings of param groups were changed between backward and step.
        drives: the optimizer has stepped in a method of its own, has evaluated a closure several
            times, or is one of several optimizers.
        hooks: the optimizer has step hooks. With a step per bucket they would run once per bucket.
    """

    changes: bool = False
    reads: bool = False
    scales: bool = False
    skips: bool = False
    backwards: int = 1
    alters: bool = False
    drives: bool = False
    hooks: bool = False

    @classmethod
    def combine(cls, usage: ScriptUsage, control: Control) -> ScriptUsage:
        """Return the union of the usage of all ranks. Every rank must call it."""
        return cls(*map(max, zip(*control.gather(astuple(usage)), strict=True)))

    def conflict_with(self, plan: Plan) -> str | None:
        """Return why the script cannot run with a plan; None if it can."""
        points = {apply.at.point for apply in plan.applies if effects.is_update(apply)}
        if not points & {"grad", "forward"}:
            return None
        late = "forward" in points
        conflicts = [
            (self.drives, "steps through several optimizers, or through methods of one"),
            (self.scales, "uses a GradScaler"),
            (self.changes and not self.scales, "changes gradients before the step (clipping?)"),
            (self.skips and not late, "leaves out updates after backward"),
            (self.reads and late and not self.changes, "reads gradients before the step"),
            (self.backwards > 1 and late, "calls backward several times before a step"),
            (self.hooks, "has hooks of optimizer.step()"),
            (
                self.alters and "grad" in points,
                "changes weights or the optimizer's settings between backward and step",
            ),
        ]
        words = [word for holds, word in conflicts if holds]
        return " and ".join(words) or None


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
        self.usage.changes |= changed
        self.usage.hooks |= hooked
        self.usage.alters |= altered
        self.usage.skips |= skipped and self._backwards > 0
        self.usage.backwards = max(self.usage.backwards, self._backwards)
        self._backwards = 0

    def record_dropped_gradients(self) -> None:
        """Record that gradients were zeroed without a step."""
        self.usage.skips |= self._backwards > 0
        self._backwards = 0

    def record_read(self) -> None:
        """Record a read of a gradient between backward and step."""
        self.usage.reads = True

    def record_own_step(self) -> None:
        """Record a step that an optimizer makes in a method of its own."""
        self.usage.drives = True

    def record_scaler(self) -> None:
        """Record a step of a gradient scaler."""
        self.usage.scales = True
