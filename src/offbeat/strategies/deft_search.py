"""Search for schedules of late updates over links, message sizes and windows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from offbeat.core.plan import Payload
from offbeat.core.profile import Profile
from offbeat.strategies.solvers import knapsack
from offbeat.strategies.solvers import queues as deft
from offbeat.strategies.solvers.window_messages import Messages, NoWindowError

if TYPE_CHECKING:
    from offbeat.strategies.deft import DeFT

GROWTH = 1.1  # growth factor of the windows per try


@dataclass(frozen=True)
class Sized:
    """Messages of one size limit with their times.

    Attributes:
        pieces: payload of each message.
        ready_s: seconds at which the gradients of each message exist.
        weights_s: seconds of each message on each link, `[link][message]`.
    """

    pieces: Sequence[Payload]
    ready_s: Sequence[float]
    weights_s: Sequence[Sequence[float]]  # [link][message]


class Search:
    """Search for the best schedule of one profile over sets of links."""

    def __init__(self, strategy: DeFT, profile: Profile, synchronous_s: float) -> None:
        self._strategy, self._profile, self._synchronous_s = strategy, profile, synchronous_s
        self._names = [link.name for link in profile.links]
        self._on: dict[int, _Schedules] = {}

    def enlarge_windows(self, choice: Choice) -> Choice:
        """Return the schedule of the same links and messages in windows larger by `GROWTH`."""
        return self._on[len(choice.links)].enlarge_windows(choice)

    def best(self) -> Choice:
        """Return the best schedule in the smallest feasible windows, with the reason for its
        links."""
        names = self._names
        if self._strategy.links != "auto" or len(names) == 1:
            count = len(names) if self._strategy.links == "all" else 1
            used = names[:count]
            why = "the only link" if len(names) == 1 else f"{' and '.join(used)}, as set"
            return replace(self._best_on_links(count), why=why)
        best = self._best_on_links(1)
        words = []
        for count in range(2, len(names) + 1):
            if best.is_optimal:
                words.append("an update in every iteration needs no further link")
                break
            used = names[:count]
            try:
                more = self._best_on_links(count)
            except NoWindowError as error:
                words.append(f"not {' and '.join(used)} ({error})")
                continue
            figures = f"{_describe_rate(more)} instead of {_describe_rate(best)}"
            if more.cost[:2] < best.cost[:2]:
                best, words = more, [f"{' and '.join(used)}: {figures}"]
            else:
                words.append(f"not {' and '.join(used)} ({figures})")
        return replace(best, why="; ".join([*_single_link_reason(best, words), *words]))

    def _best_on_links(self, count: int) -> Choice:
        """Return the best schedule on the first `count` links."""
        links = self._names[:count]
        on = _Schedules(self._strategy, self._profile, links, self._synchronous_s)
        self._on[count] = on
        return on.best_within_limit()


class _Schedules:
    """Schedules on one set of links that merge at most `most_merged` iterations."""

    def __init__(
        self, strategy: DeFT, profile: Profile, links: Sequence[str], synchronous_s: float
    ) -> None:
        self._strategy, self._profile, self._links = strategy, profile, links
        self._messages = Messages(profile, links, strategy.partition_elements)
        self._synchronous_s = synchronous_s

    def enlarge_windows(self, choice: Choice) -> Choice:
        """Return the schedule of the same messages in windows larger by `GROWTH`."""
        more = self._simulate_schedule(choice.sized, choice.capacity * GROWTH)
        return choice if more is None else replace(more, why=choice.why)

    def best_within_limit(self) -> Choice:
        """Return the best schedule of the smallest windows in which updates merge at most
        `most_merged` iterations.

        Windows also grow until updates per second reach those of WFBP, or until iterations wait.
        """
        capacity = 1.0
        most = deft.most_updates(
            *self._windows_s(capacity), next(self._messages_of(capacity)).weights_s
        )
        # At least one message fits, so `most` is above 0.
        capacity = max(capacity, 1 / (most * self._strategy.most_merged))
        while True:
            choice = self._best(capacity)
            if choice is not None and (choice.has_waits or self._keeps_pace(choice)):
                return choice
            capacity *= GROWTH

    def _keeps_pace(self, choice: Choice) -> bool:
        return choice.seconds <= self._synchronous_s * choice.schedule.updates_per_iteration

    def _best(self, capacity: float) -> Choice | None:
        """Return the best schedule over message sizes that keeps the merge limit; None without
        one."""
        best: Choice | None = None
        for sized in self._messages_of(capacity):
            most = deft.most_updates(*self._windows_s(capacity), sized.weights_s)
            if best and most <= best.schedule.updates_per_iteration:
                break  # smaller messages only add communication
            choice = self._simulate_schedule(sized, capacity)
            if choice and (best is None or choice.cost < best.cost):
                best = choice
        return best

    def _simulate_schedule(self, sized: Sized, capacity: float) -> Choice | None:
        """Return the schedule of these messages; None if it exceeds the merge limit."""
        schedule = deft.simulate(
            *self._windows_s(capacity),
            sized.ready_s,
            sized.weights_s,
            solver=_SOLVERS[self._strategy.solver],
            names=[str(piece) for piece in sized.pieces],
        )
        if schedule.longest > self._strategy.most_merged:
            return None
        return Choice(self._profile, self._links, sized, schedule, capacity)

    def _messages_of(self, capacity: float) -> Iterator[Sized]:
        for pieces in self._messages.variants(*self._windows_s(capacity)):
            weights_s = self._messages.weights_s(pieces)
            yield Sized(pieces, ready_s_of(self._profile, pieces), weights_s)

    def _windows_s(self, capacity: float) -> tuple[float, float]:
        return self._profile.forward_s * capacity, self._profile.backward_s * capacity


@dataclass(frozen=True)
class Choice:
    """Schedule of messages on links.

    Attributes:
        links: names of the links.
        sized: messages and their times.
        schedule: links and windows of the messages.
        capacity: size of the windows relative to forward and backward.
        why: reason for the links.
    """

    profile: Profile
    links: Sequence[str]
    sized: Sized
    schedule: deft.Schedule
    capacity: float
    why: str = ""

    @property
    def coverage_rate(self) -> float:
        """Communication of all messages on the first link over compute, per iteration."""
        return sum(self.sized.weights_s[0]) / self._compute_s if self._compute_s else 0.0

    @property
    def seconds(self) -> float:
        """Seconds per iteration. Messages also overlap with the update and with time outside the
        model."""
        update_s = self.profile.update_s * self.schedule.updates_per_iteration
        return max(self.profile.other_s + self._compute_s + update_s, self.cost[1])

    @property
    def has_waits(self) -> bool:
        """Whether some iterations take longer than their compute."""
        return self.cost[1] > self._compute_s

    @property
    def is_optimal(self) -> bool:
        """Whether every iteration has an update and none waits, which no schedule improves on."""
        return self.cost[0] == self._compute_s

    @cached_property
    def cost(self) -> tuple[float, float, float, int]:
        """Cost in lexicographic order: seconds per update, seconds per iteration, communication
        seconds per update, number of messages."""
        busy_s = [0.0] * len(self.links)
        for iteration in self.schedule.cycle:
            for piece, link in iteration.forward + iteration.current + iteration.future:
                busy_s[link] += self.sized.weights_s[link][piece]
        iteration_s = max(self._compute_s, max(busy_s) / len(self.schedule.cycle))
        updates = len(self.schedule.merges)
        per_update_s = iteration_s / self.schedule.updates_per_iteration
        return per_update_s, iteration_s, sum(busy_s) / updates, len(self.sized.pieces)

    @property
    def _compute_s(self) -> float:
        return self.profile.forward_s + self.profile.backward_s


def _describe_rate(choice: Choice) -> str:
    updates = choice.schedule.updates_per_iteration
    return f"{updates:.3f} updates per iteration of {choice.cost[1]:.4g} s"


def _single_link_reason(best: Choice, words: Sequence[str]) -> list[str]:
    return [f"{best.links[0]} alone"] if len(best.links) == 1 and words else []


def ready_s_of(profile: Profile, pieces: Sequence[Payload]) -> list[float]:
    ready_s = profile.ready_s
    return [ready_s[piece.buckets[-1]] for piece in pieces]


_SOLVERS: dict[str, knapsack.Solver] = {"exact": knapsack.exact, "greedy": knapsack.greedy}
