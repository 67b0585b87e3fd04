"""Schedule of the changes of a launch."""

from collections.abc import Sequence

from offbeat.lab.switch.link_state import ChangePlan


class Schedule:
    """Pending changes of one launch; times are seconds of the caller's clock."""

    def __init__(self, start_s: float, changes: Sequence[ChangePlan]) -> None:
        self._start_s = start_s
        # stable sort: equal times keep their order
        self._left = sorted(changes, key=lambda change: change.at_s)

    def wait_s(self, now_s: float) -> float | None:
        """Return the seconds until the next change; None without one."""
        return max(0.0, self._start_s + self._left[0].at_s - now_s) if self._left else None

    def pop_due(self, now_s: float) -> list[ChangePlan]:
        """Remove and return the changes that are due."""
        count = sum(self._start_s + change.at_s <= now_s for change in self._left)
        due, self._left = self._left[:count], self._left[count:]
        return due

    def since_start_s(self, now_s: float) -> float:
        """Return the seconds since the start of the launch."""
        return now_s - self._start_s
