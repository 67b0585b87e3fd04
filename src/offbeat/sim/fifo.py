"""FIFO links: the messages of one link in virtual time."""

from __future__ import annotations

from bisect import bisect_right

from offbeat.plan import Plan, Transfer
from offbeat.profile import Profile
from offbeat.sim.program import queue


class FifoLink:
    """Collectives on one link, issued in plan order, one at a time.

    A message starts when every rank has released it and the link is free, and ends on all ranks
    at once. `ends_s[n]` is the end of the n-th message; those of iteration i begin at `begins[i]`.
    The messages of a coupled link end only when `Shared` says so.
    """

    def __init__(
        self,
        name: str,
        plan: Plan,
        profile: Profile,
        *,
        groups: int,
        rate: float = 1.0,
        coupled: bool = False,
    ) -> None:
        self.name = name
        self.coupled = coupled
        self.begins: list[int] = []
        self.ends_s: list[float] = []
        self._plan = plan
        self._groups = groups
        self._message_s: list[float] = []
        self._released: dict[int, tuple[int, float]] = {}  # by how many groups, when last
        self._phase_s = [
            [profile.message_s(t.payload, name, t.verb) / rate for t in transfers]
            for transfers in (queue(plan, name, phase) for phase in plan.phases)
        ]

    def open(self, iteration: int) -> None:
        """Number the messages of all iterations up to this one."""
        while len(self.begins) <= iteration:
            phase = self._plan.phase(len(self.begins))
            self.begins.append(len(self._message_s))
            self._message_s += self._phase_s[phase]

    def release(self, iteration: int, position: int, now_s: float) -> None:
        """A group of ranks has released a message, its last rank at `now_s`."""
        number = self.begins[iteration] + position
        count, latest_s = self._released.get(number, (0, now_s))
        self._released[number] = (count + 1, now_s if now_s > latest_s else latest_s)

    def arrival_s(self, iteration: int, position: int) -> float | None:
        """End of a message; None as long as it or one before it is not released everywhere."""
        number = self.begins[iteration] + position
        if len(self.ends_s) <= number:
            self.issue()
        return self.ends_s[number] if number < len(self.ends_s) else None

    def issue(self) -> None:
        """Run every message that is released on all ranks, in order; not on a coupled link."""
        if self.coupled:
            return
        number = len(self.ends_s)
        free_s = self.ends_s[-1] if number else 0.0
        while (state := self._released.get(number)) is not None and state[0] == self._groups:
            del self._released[number]
            start_s = state[1]
            free_s = (start_s if start_s > free_s else free_s) + self._message_s[number]
            self.ends_s.append(free_s)
            number += 1

    def waiting(self) -> tuple[float, float] | None:
        """Start and seconds of the first message that has not ended; None before its release."""
        number = len(self.ends_s)
        count, released_s = self._released.get(number, (0, 0.0))
        if count < self._groups:
            return None
        return max(released_s, self.ends_s[-1] if number else 0.0), self._message_s[number]

    def land(self, start_s: float, end_s: float) -> None:
        """End the first message that has not ended."""
        number = len(self.ends_s)
        del self._released[number]
        self._message_s[number] = end_s - start_s
        self.ends_s.append(end_s)

    def number(self, iteration: int, position: int) -> int:
        """A message's place among all on the link."""
        return self.begins[iteration] + position

    def free_s(self, iteration: int, position: int) -> float:
        """When the link became free for a message."""
        number = self.number(iteration, position)
        return self.ends_s[number - 1] if number else 0.0

    def busy_s(self, iterations: range) -> float:
        """Seconds for which the messages of some iterations keep the link busy, per iteration."""
        return sum(self._message_s[self._numbers(iterations)]) / len(iterations)

    def ends_of(self, iterations: range) -> list[float]:
        """Ends of the messages of some iterations, in issue order, as far as they have run."""
        return self.ends_s[self._numbers(iterations)]

    def _numbers(self, iterations: range) -> slice:
        """Numbers of the messages of a run of iterations."""
        self.open(iterations.stop)
        return slice(self.begins[iterations.start], self.begins[iterations.stop])

    def head(self) -> tuple[int, Transfer]:
        """Iteration and transfer of the first message that has not been issued."""
        number = len(self.ends_s)
        iteration = bisect_right(self.begins, number) - 1
        return iteration, queue(self._plan, self.name, iteration)[number - self.begins[iteration]]
