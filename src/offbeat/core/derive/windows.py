"""Accumulation windows: which iterations' gradients are added up, and applied together.

In a plan with a rule that ends windows backward adds to the newest copy of the gradients until an
iteration ends the window. With windows of iterations 0-1 and 2-3, the gradients of 0 and 1 are
added up, averaged while 2 and 3 run, and applied at the step of 3.
"""

from __future__ import annotations

from offbeat.core.derive import effects
from offbeat.core.plan.types import Plan


class Windows:
    """The windows of a plan; without such a rule every iteration is one of its own."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._closes = [apply.phases for apply in plan.applies if effects.is_window_end(apply)]
        self.late = bool(self._closes)

    def closes_window(self, iteration: int) -> bool:
        """Whether the gradients added up so far are complete when this iteration ends."""
        phase = self._plan.phase(iteration)
        return not self._closes or any(phase in phases for phases in self._closes)

    def window(self, iteration: int, age: int = 0) -> range:
        """Iterations whose gradients are added up with this one's, or `age` windows before; empty
        if there was none."""
        if not self.late:
            return range(max(iteration - age, 0), max(iteration - age + 1, 0))
        stop = iteration
        while not self.closes_window(stop):
            stop += 1
        start = self._after_last_close(iteration)
        for _ in range(age):
            start, stop = self._after_last_close(start - 1), start - 1
        return range(start, stop + 1)

    def applied_window(self, iteration: int) -> range:
        """Iterations whose gradients the optimizer applies in this one; empty: it does nothing."""
        if not self.late:
            return range(iteration, iteration + 1)
        if not self.closes_window(iteration):
            return range(iteration, iteration)
        return self.window(iteration, age=1)

    def _after_last_close(self, iteration: int) -> int:
        start = max(iteration, 0)
        while start > 0 and not self.closes_window(start - 1):
            start -= 1
        return start
