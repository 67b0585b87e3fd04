"""Changes over time: what is due when, from the start of a launch."""

from collections.abc import Sequence

from offbeat.lab.switch.link_state import ChangePlan


class Schedule:
    """Changes of one launch that are still to come; seconds on the caller's clock."""

    def __init__(self, start_s: float, changes: Sequence[ChangePlan]) -> None:
        self._start_s = start_s
        self._left = sorted(changes, key=lambda change: change.at_s)  # equal times keep their order

    def wait_s(self, now_s: float) -> float | None:
        """Seconds until the next one; None without one."""
        return max(0.0, self._start_s + self._left[0].at_s - now_s) if self._left else None

    def due(self, now_s: float) -> list[ChangePlan]:
        """Take out those whose time has come."""
        count = sum(self._start_s + change.at_s <= now_s for change in self._left)
        due, self._left = self._left[:count], self._left[count:]
        return due

    def since_start_s(self, now_s: float) -> float:
        """Seconds since the start of the launch."""
        return now_s - self._start_s
