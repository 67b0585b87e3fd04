"""Shared capacity: links that slow each other down while they carry messages."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations

from offbeat.core.plan import Plan, base_link
from offbeat.core.profile import Profile
from offbeat.core.sim.lines import SharedLine


def coupled(plan: Plan, profile: Profile) -> frozenset[str]:
    """A plan's links and channels that slow another of them down, or are slowed down."""
    sending = {t.link for t in plan.transfers if t.ranks is not None}
    pairs = (
        (a, b)
        for a, b in permutations(plan.links, 2)
        if profile.speed(a, (b,)) != 1.0 or ({a, b} <= sending and base_link(a) == base_link(b))
    )
    return frozenset(name for pair in pairs for name in pair)


class Shared:
    """Coupled links, advanced together in the order of time.

    A message is so many seconds of work, done at its link's current speed, which changes whenever
    a message on another of the links begins or ends. What is released between two advances must
    not be released before the end of the first.
    """

    def __init__(self, links: Sequence[SharedLine], profile: Profile) -> None:
        self.links = tuple(links)
        self._profile = profile
        self._now_s = 0.0
        self._starts_s: dict[str, float] = {}  # of the messages under way, by link
        self._left_s: dict[str, float] = {}  # their work, alone on the link
        self._speeds: dict[tuple[str, ...], dict[str, float]] = {}  # by who is under way

    def advance(self, awaited: tuple[str, int] | None = None) -> bool:
        """Run until the awaited message (link, number) ends; by default all that can.

        False if it does not end with what has been released so far.
        """
        while (event := self._next()) is not None:
            now_s, link = event
            self._work(now_s)
            if link.name not in self._left_s:
                self._begin(link)
                continue
            number = len(link.ends_s)
            del self._left_s[link.name]
            link.land(self._starts_s.pop(link.name), now_s)
            if (link.name, number) == awaited:
                return True
        return False

    def _next(self) -> tuple[float, SharedLine] | None:
        """When and on which link the next message begins or ends."""
        speeds = self._current_speeds()
        first: tuple[float, SharedLine] | None = None
        for link in self.links:
            if link.name in speeds:
                at_s = self._now_s + self._left_s[link.name] / speeds[link.name]
            elif (waiting := link.waiting()) is not None:
                at_s = waiting[0]
            else:
                continue
            if first is None or at_s < first[0]:
                first = at_s, link
        return first

    def _begin(self, link: SharedLine) -> None:
        waiting = link.waiting()
        assert waiting is not None
        self._starts_s[link.name], self._left_s[link.name] = waiting

    def _work(self, until_s: float) -> None:
        """Let time pass for the messages under way."""
        for name, speed in self._current_speeds().items():
            left_s = self._left_s[name] - (until_s - self._now_s) * speed
            self._left_s[name] = max(left_s, 0.0)  # rounding must not let time run backwards
        self._now_s = until_s

    def _current_speeds(self) -> dict[str, float]:
        """Share of its speed at which each link runs that carries a message."""
        running = tuple(self._left_s)
        if running not in self._speeds:
            self._speeds[running] = {
                name: self._profile.speed(name, [other for other in running if other != name])
                for name in running
            }
        return self._speeds[running]
