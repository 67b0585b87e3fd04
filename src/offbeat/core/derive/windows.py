"""Accumulation windows: iterations whose gradients are added up and applied together.

If a plan has a rule that ends windows, backward adds to the newest copy of the gradients until an
iteration ends the window. With windows of iterations 0-1 and 2-3, the gradients of 0 and 1 are
added up, averaged while 2 and 3 run, and applied at the step of 3.
"""

from __future__ import annotations

from offbeat.core.derive import effects
from offbeat.core.plan.types import Payload, Plan


class Windows:
    """Accumulation windows of a plan. Without a rule that ends windows, each iteration is a window.

    Attributes:
        late: whether the plan has a rule that ends windows.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._closes = [apply.phases for apply in plan.applies if effects.is_window_end(apply)]
        self.late = bool(self._closes)

    def closes_window(self, iteration: int) -> bool:
        """Return whether the gradients added up so far are complete at the end of an iteration."""
        phase = self._plan.phase(iteration)
        return not self._closes or any(phase in phases for phases in self._closes)

    def window(self, iteration: int, age: int = 0) -> range:
        """Return the iterations of the window that contains an iteration, or of the window `age`
        earlier.

        The range is empty if there is no such window.
        """
        if not self.late:
            return range(max(iteration - age, 0), max(iteration - age + 1, 0))
        stop = iteration
        while not self.closes_window(stop):
            stop += 1
        start = self._window_start(iteration)
        for _ in range(age):
            start, stop = self._window_start(start - 1), start - 1
        return range(start, stop + 1)

    def carried_window(self, iteration: int, payload: Payload) -> range | None:
        """Return the iterations whose gradients a message holds; None if it holds the payload of
        its own iteration."""
        merges = self.late and payload.buffer == "grad"
        return self.window(iteration, payload.age) if merges else None

    def applied_window(self, iteration: int) -> range:
        """Return the iterations whose gradients the optimizer applies in an iteration; empty for
        none."""
        if not self.late:
            return range(iteration, iteration + 1)
        if not self.closes_window(iteration):
            return range(iteration, iteration)
        return self.window(iteration, age=1)

    def _window_start(self, iteration: int) -> int:
        """Return the first iteration of the window that contains an iteration."""
        start = max(iteration, 0)
        while start > 0 and not self.closes_window(start - 1):
            start -= 1
        return start
