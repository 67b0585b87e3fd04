"""Coupled links: links that slow each other down while they carry messages."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations

from offbeat.core.plan import Plan, base_link
from offbeat.core.profile import Profile
from offbeat.core.sim.lines import SharedLine


def coupled_links(plan: Plan, profile: Profile) -> frozenset[str]:
    """Return the plan's links and channels that slow down, or are slowed down by, another one."""
    sending = {t.link for t in plan.transfers if t.ranks is not None}
    pairs = (
        (a, b)
        for a, b in permutations(plan.links, 2)
        if profile.speed(a, (b,)) != 1.0 or ({a, b} <= sending and base_link(a) == base_link(b))
    )
    return frozenset(name for pair in pairs for name in pair)


class CoupledLinks:
    """Coupled links, advanced together in order of time.

    The remaining seconds of a message pass at its link's current speed. The speed changes whenever
    a message on another of the links starts or ends. A message that is released between two calls
    of `advance` must not be released before the end of the first call's last message.
    """

    def __init__(self, links: Sequence[SharedLine], profile: Profile) -> None:
        self.links = tuple(links)
        self._profile = profile
        self._now_s = 0.0
        self._starts_s: dict[str, float] = {}  # start of each active message, by link
        self._left_s: dict[str, float] = {}  # remaining seconds of each, at full speed
        self._speeds: dict[tuple[str, ...], dict[str, float]] = {}  # speeds by active links

    def advance(self, awaited: tuple[str, int] | None = None) -> bool:
        """Advance until the awaited message (link, number) ends, or until no message can run.

        Returns:
            Whether the awaited message has ended.
        """
        while (event := self._next_event()) is not None:
            now_s, link = event
            self._pass_time(now_s)
            if link.name not in self._left_s:
                self._begin(link)
                continue
            number = len(link.ends_s)
            del self._left_s[link.name]
            link.end_message(self._starts_s.pop(link.name), now_s)
            if (link.name, number) == awaited:
                return True
        return False

    def _next_event(self) -> tuple[float, SharedLine] | None:
        """Return time and link of the next start or end of a message, or None."""
        speeds = self._current_speeds()
        first: tuple[float, SharedLine] | None = None
        for link in self.links:
            if link.name in speeds:
                at_s = self._now_s + self._left_s[link.name] / speeds[link.name]
            elif (next_message := link.next_message()) is not None:
                at_s = next_message[0]
            else:
                continue
            if first is None or at_s < first[0]:
                first = at_s, link
        return first

    def _begin(self, link: SharedLine) -> None:
        next_message = link.next_message()
        assert next_message is not None
        self._starts_s[link.name], self._left_s[link.name] = next_message

    def _pass_time(self, until_s: float) -> None:
        """Advance the active messages to `until_s`."""
        for name, speed in self._current_speeds().items():
            left_s = self._left_s[name] - (until_s - self._now_s) * speed
            self._left_s[name] = max(left_s, 0.0)  # rounding must not make an end precede `until_s`
        self._now_s = until_s

    def _current_speeds(self) -> dict[str, float]:
        """Return the speed of each active link, as a share of its full speed."""
        running = tuple(self._left_s)
        if running not in self._speeds:
            self._speeds[running] = {
                name: self._profile.speed(name, [other for other in running if other != name])
                for name in running
            }
        return self._speeds[running]
