"""DeFT: late, merged updates, so that every gradient is sent while something is computed."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, Literal

from offbeat.plan import Apply, Buffer, Fact, Merge, Moment, Payload, Phases, Plan, Transfer, local
from offbeat.profile import GradientNoise, Profile
from offbeat.solve import deft, knapsack, preserver
from offbeat.strategies.base import Strategy, require_count
from offbeat.strategies.messages import Messages, NoWindowError
from offbeat.strategies.wfbp import WFBP, gradients_when_ready_s

RETRIES = 10
GROWTH = 1.1  # of the capacity, per retry


@dataclass(frozen=True)
class DeFT(Strategy):
    """Gradients are sent in whichever later forward or backward has room for them (knapsacks).

    What has not been sent when an iteration ends is merged with the next gradients; an update is
    applied when all of it has been averaged, one iteration late or more, as the `scale` (sum or
    mean) over the iterations merged. `solver`: `exact` or the paper's `greedy`. `links`: all of
    the profile's, the first, or (`auto`) as many as give more updates. `partition_elements`: most
    elements (of 4 bytes) per message. `most_merged`: an update merges at most so many iterations;
    where communication takes longer than their compute, iterations wait for it. `preserver`: from
    the observed gradient noise, estimate what merging and lateness cost, and while that is beyond
    1 +- `epsilon`, plan again with windows 10 % larger. `forward` and `backward`: so many messages
    per window on the first link, first in, first out, instead of the knapsacks and their limit.

    Iterations without an update are no progress. An update that merges k iterations is worth at
    best k single ones (it has seen k batches), and at worst one, as with Adam, whose steps are as
    long whatever the gradients' size. So schedules are chosen by
    seconds per update, then per iteration. If WFBP is predicted to need no more seconds per
    iteration, it runs instead: it has an update in each, and none is late.
    """

    scale: Merge = "sum"
    solver: Literal["exact", "greedy"] = "exact"
    links: Literal["auto", "all", "first"] = "auto"
    partition_elements: int = 6_500_000
    most_merged: int = 4
    preserver: bool = True
    epsilon: float = 0.01
    forward: int | None = None
    backward: int | None = None

    name: ClassVar[str] = "deft"
    citation: ClassVar[str] = "Meng et al., DeFT, 2025, Algorithm 2, Sections III and IV-C"

    def __post_init__(self) -> None:
        super().__post_init__()
        remedy = f"{type(self).partition_elements:,} is the paper's"
        require_count("partition_elements", self.partition_elements, remedy=remedy)
        remedy = "1 updates in every iteration"
        require_count("most_merged", self.most_merged, remedy=remedy)
        number = isinstance(self.epsilon, (int, float)) and not isinstance(self.epsilon, bool)
        if not number or not 0 < self.epsilon < math.inf:
            raise ValueError(
                f"epsilon ({self.epsilon!r}) must be a number above 0; use preserver=False to "
                "accept every schedule"
            )
        self._check_counts()

    def _check_counts(self) -> None:
        if self.forward is None and self.backward is None:
            return
        if self.forward is None or self.backward is None:
            raise ValueError(
                f"forward ({self.forward}) and backward ({self.backward}) must be given together; "
                "give both, or neither for the knapsacks"
            )
        for name in ("forward", "backward"):
            require_count(name, getattr(self, name), least=0)
        if self.forward + self.backward == 0:
            raise ValueError(
                "forward (0) and backward (0) must not both be 0, or nothing is ever sent; "
                "use DeFT() to let knapsacks choose"
            )
        if self.links == "all":
            raise ValueError(
                "links ('all') must be left out with forward and backward: these count messages "
                "on the first link"
            )

    @classmethod
    def fixed(cls, forward: int, backward: int) -> DeFT:
        """So many messages per forward and per backward, first in, first out (an ablation)."""
        return cls(forward=forward, backward=backward)

    def schedule(self, profile: Profile) -> Plan:
        """Warns if WFBP's plan takes the place of DeFT's, because no window has room for a slice or
        because being late is predicted to gain nothing; the plan's `strategy` is then "wfbp"."""
        view = profile.slowest()
        if self.forward is not None and self.backward is not None:
            chosen = self._counted(view, self.forward, self.backward)
            skipped = _skipped("it judges knapsacks, and here messages are counted")
            return _encoded(self, chosen, _notes(chosen, skipped))
        synchronous_s = gradients_when_ready_s(view, WFBP().plan(view))
        try:
            chosen, preserved = self._chosen(view, synchronous_s)
        except NoWindowError as error:
            return _synchronous(profile, str(error))
        if chosen.seconds >= synchronous_s:
            return _synchronous(
                profile,
                f"late updates save no time: {chosen.seconds:.4g} s per iteration (coverage rate "
                f"{chosen.coverage_rate:.3g}, merges {list(chosen.schedule.merges)}), and WFBP "
                f"{synchronous_s:.4g} s",
            )
        return _encoded(self, chosen, _notes(chosen, preserved))

    def bound_s(self, profile: Profile) -> float:
        """The slowest rank's compute with one update per `most_merged` iterations, and an update's
        bytes on all links together; counted messages may be merged without a limit."""
        profile = profile.slowest()
        local_s = profile.other_s + profile.forward_s + profile.backward_s
        if self.forward is not None:
            return local_s
        per_update_s = [sum(profile.transfer_s(link.name)) for link in profile.links]
        if self.links == "first":
            per_update_s = per_update_s[:1]
        rate = sum(1 / seconds if seconds else math.inf for seconds in per_update_s)
        return max(local_s + profile.update_s / self.most_merged, 1 / rate / self.most_merged)

    @property
    def guards_convergence(self) -> bool:
        return self.preserver

    def _counted(self, profile: Profile, forward: int, backward: int) -> _Choice:
        links = [profile.default_link.name]
        messages = Messages(profile, links, self.partition_elements)
        pieces = messages.cut(math.inf, 0.0, 1.0)
        assert pieces is not None
        schedule = deft.fixed(forward, backward, _ready_s(profile, pieces), profile.backward_s)
        why = f"{profile.default_link.name} alone: messages are counted on the first link"
        sized = _Sized(pieces, _ready_s(profile, pieces), messages.weights_s(pieces))
        return _Choice(profile, links, sized, schedule, 1.0, why)

    def _chosen(self, profile: Profile, synchronous_s: float) -> tuple[_Choice, dict[str, Any]]:
        search = _Search(self, profile, synchronous_s)
        if self.preserver and profile.noise is not None:
            return self._preserved(search, profile.noise)
        why = "the profile holds no gradient noise" if self.preserver else "it is switched off"
        return search.best(), _skipped(why)

    def _preserved(self, search: _Search, noise: GradientNoise) -> tuple[_Choice, dict[str, Any]]:
        """The schedule that the Preserver lets pass, and all that it tried.

        Each try goes on from the one before with larger windows, until nothing is merged. Links and
        messages stay.
        """
        chosen = search.best()
        tries: list[tuple[float, _Choice]] = []
        while len(tries) <= RETRIES:
            if tries:
                chosen = search.grown(chosen)
            tries.append((self._ratio(noise, chosen.schedule.merges), chosen))
            if self._accepts(tries[-1][0]) or max(chosen.schedule.merges) == 1:
                break
        ratio, chosen = min(tries, key=lambda t: abs(t[0] - 1))
        verdict = "within" if self._accepts(ratio) else f"the nearest to 1 of {len(tries)}, outside"
        told = [
            {
                "capacity": choice.capacity,
                "ratio": value if math.isfinite(value) else None,
                "merges": list(choice.schedule.merges),
                "accepted": self._accepts(value),
            }
            for value, choice in tries
        ]
        return chosen, {
            "tries": told,
            "decision": f"capacity {chosen.capacity:.2f}, ratio {ratio:.4f}: {verdict} 1 +- "
            f"{self.epsilon:g} (an upper bound of the noise: all of it along the gradient)",
        }

    def _ratio(self, noise: GradientNoise, merges: Sequence[int]) -> float:
        # The variance of g . n for noise n is at most |g|^2 times the trace of its covariance.
        sigma = math.sqrt(noise.gradient_sq * noise.noise_sq)
        scale = "mean" if noise.scale_free else self.scale
        walk = preserver.LossWalk(noise.loss, noise.step_size, sigma, scale=scale)
        return walk.worst_ratio(merges, noise.gradient_sq)

    def _accepts(self, ratio: float) -> bool:
        return abs(ratio - 1) <= self.epsilon


@dataclass(frozen=True)
class _Sized:
    """Messages with their times."""

    pieces: Sequence[Payload]
    ready_s: Sequence[float]
    weights_s: Sequence[Sequence[float]]  # [link][message]


class _Search:
    """The best schedules of one profile over sets of links, for windows that grow."""

    def __init__(self, strategy: DeFT, profile: Profile, synchronous_s: float) -> None:
        self._strategy, self._profile, self._synchronous_s = strategy, profile, synchronous_s
        self._names = [link.name for link in profile.links]
        self._on: dict[int, _Schedules] = {}

    def grown(self, choice: _Choice) -> _Choice:
        """The same links and messages in larger windows."""
        return self._on[len(choice.links)].grown(choice)

    def best(self) -> _Choice:
        """The best schedule within the least windows that do, with the reason for its links."""
        names = self._names
        if self._strategy.links != "auto" or len(names) == 1:
            count = len(names) if self._strategy.links == "all" else 1
            used = names[:count]
            why = "the only link" if len(names) == 1 else f"{' and '.join(used)}, as set"
            return replace(self._with(count), why=why)
        best = self._with(1)
        words = []
        for count in range(2, len(names) + 1):
            if best.updates_always:
                words.append("an update in every iteration needs no further link")
                break
            used = names[:count]
            try:
                more = self._with(count)
            except NoWindowError as error:
                words.append(f"not {' and '.join(used)} ({error})")
                continue
            figures = f"{_rate(more)} instead of {_rate(best)}"
            if more.cost[:2] < best.cost[:2]:
                best, words = more, [f"{' and '.join(used)}: {figures}"]
            else:
                words.append(f"not {' and '.join(used)} ({figures})")
        return replace(best, why="; ".join([*_alone(best, words), *words]))

    def _with(self, count: int) -> _Choice:
        """The best schedule on the first links."""
        links = self._names[:count]
        on = _Schedules(self._strategy, self._profile, links, self._synchronous_s)
        self._on[count] = on
        return on.limited()


class _Schedules:
    """Schedules on one set of links, none of which merges more than the limit."""

    def __init__(
        self, strategy: DeFT, profile: Profile, links: Sequence[str], synchronous_s: float
    ) -> None:
        self._strategy, self._profile, self._links = strategy, profile, links
        self._messages = Messages(profile, links, strategy.partition_elements)
        self._synchronous_s = synchronous_s

    def grown(self, choice: _Choice) -> _Choice:
        """The same messages in larger windows."""
        more = self._simulated(choice.sized, choice.capacity * GROWTH)
        return choice if more is None else replace(more, why=choice.why)

    def limited(self) -> _Choice:
        """Let the windows grow until an update merges no more than it may: iterations then wait.

        And until there are as many updates per second as WFBP has, or iterations wait anyway.
        """
        capacity = 1.0
        most = deft.most_updates(*self._windows_s(capacity), next(self._sized(capacity)).weights_s)
        # Some message fits, so most is above 0.
        capacity = max(capacity, 1 / (most * self._strategy.most_merged))
        while True:
            choice = self._best(capacity)
            if choice is not None and (choice.waits or self._keeps_pace(choice)):
                return choice
            capacity *= GROWTH

    def _keeps_pace(self, choice: _Choice) -> bool:
        return choice.seconds <= self._synchronous_s * choice.schedule.updates_per_iteration

    def _best(self, capacity: float) -> _Choice | None:
        """The best schedule that keeps the limit, over the sizes of messages; None without one."""
        best: _Choice | None = None
        for sized in self._sized(capacity):
            most = deft.most_updates(*self._windows_s(capacity), sized.weights_s)
            if best and most <= best.schedule.updates_per_iteration:
                break  # smaller messages only add communication
            choice = self._simulated(sized, capacity)
            if choice and (best is None or choice.cost < best.cost):
                best = choice
        return best

    def _simulated(self, sized: _Sized, capacity: float) -> _Choice | None:
        """The schedule of these messages; None if it does not keep the limit."""
        schedule = deft.simulate(
            *self._windows_s(capacity),
            sized.ready_s,
            sized.weights_s,
            solver=_SOLVERS[self._strategy.solver],
            names=[str(piece) for piece in sized.pieces],
        )
        if schedule.longest > self._strategy.most_merged:
            return None
        return _Choice(self._profile, self._links, sized, schedule, capacity)

    def _sized(self, capacity: float) -> Iterator[_Sized]:
        for pieces in self._messages.variants(*self._windows_s(capacity)):
            weights_s = self._messages.weights_s(pieces)
            yield _Sized(pieces, _ready_s(self._profile, pieces), weights_s)

    def _windows_s(self, capacity: float) -> tuple[float, float]:
        return self._profile.forward_s * capacity, self._profile.backward_s * capacity


@dataclass(frozen=True)
class _Choice:
    """Messages on links, and when they are sent."""

    profile: Profile
    links: Sequence[str]
    sized: _Sized
    schedule: deft.Schedule
    capacity: float
    why: str = ""

    @property
    def coverage_rate(self) -> float:
        """Communication of all messages on the first link over compute, per iteration."""
        return sum(self.sized.weights_s[0]) / self._compute_s if self._compute_s else 0.0

    @property
    def seconds(self) -> float:
        """Per iteration. Messages are sent while the loop does other things and updates, too."""
        update_s = self.profile.update_s * self.schedule.updates_per_iteration
        return max(self.profile.other_s + self._compute_s + update_s, self.cost[1])

    @property
    def waits(self) -> bool:
        """Whether some iterations take longer than their compute."""
        return self.cost[1] > self._compute_s

    @property
    def updates_always(self) -> bool:
        """Whether every iteration updates and none waits: nothing could be better."""
        return self.cost[0] == self._compute_s

    @cached_property
    def cost(self) -> tuple[float, float, float, int]:
        """What is to be least: seconds per update, seconds per iteration, communication per
        update, messages."""
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


def _rate(choice: _Choice) -> str:
    updates = choice.schedule.updates_per_iteration
    return f"{updates:.3f} updates per iteration of {choice.cost[1]:.4g} s"


def _alone(best: _Choice, words: Sequence[str]) -> list[str]:
    return [f"{best.links[0]} alone"] if len(best.links) == 1 and words else []


def _notes(chosen: _Choice, preserved: dict[str, Any]) -> dict[str, Any]:
    return {
        "links": chosen.why,
        "merges": list(chosen.schedule.merges),
        "coverage_rate": chosen.coverage_rate,
        "capacity": chosen.capacity,
        "preserver": preserved,
    }


def _skipped(why: str) -> dict[str, Any]:
    return {"tries": [], "decision": f"skipped: {why}"}


def _synchronous(profile: Profile, why: str) -> Plan:
    """WFBP's plan, with a warning why not DeFT's."""
    said = f"{why}; WFBP runs instead of DeFT"
    warnings.warn(said, stacklevel=3)
    facts = (Fact("instead_of", "deft", "the strategy that was asked for"), Fact("why", said))
    return replace(WFBP().plan(profile), facts=facts)


def _ready_s(profile: Profile, pieces: Sequence[Payload]) -> list[float]:
    ready_s = profile.ready_s
    return [ready_s[piece.buckets[-1]] for piece in pieces]


def _encoded(strategy: DeFT, choice: _Choice, notes: dict[str, Any]) -> Plan:
    """The plan of a schedule: what is sent of the closed generation has age 1, of the one that
    closes age 0; both are due when the next one closes."""
    prologue, cycle = choice.schedule.prologue, choice.schedule.cycle
    iterations = prologue + cycle
    due = _iterations_to_close(iterations, len(prologue))
    transfers: list[Transfer] = []
    for phase, iteration in enumerate(iterations):
        for piece, link in iteration.forward + iteration.current:
            transfers.append(
                Transfer(
                    payload=replace(choice.sized.pieces[piece], age=1),
                    after=Moment("forward"),
                    before=Moment("step", lag=due[phase]),
                    phases=Phases([phase]),
                    link=choice.links[link],
                )
            )
        for piece, link in iteration.future:
            payload = choice.sized.pieces[piece]
            transfers.append(
                Transfer(
                    payload=payload,
                    after=Moment("grad", payload.buckets[-1]),
                    before=Moment("step", lag=1 + due[phase + 1]),
                    phases=Phases([phase]),
                    link=choice.links[link],
                )
            )
    buckets = len(choice.profile.buckets)
    closes = Phases(phase for phase, iteration in enumerate(iterations) if iteration.closes)
    return Plan(
        strategy.name,
        buckets,
        tuple(transfers),
        (
            local(buckets, Moment("step"), closes, age=1, merge=strategy.scale),
            Apply("close", range(buckets), Moment("end"), closes),
        ),
        buffers=(Buffer("grad", "grad", copies=2),),
        period=len(cycle),
        prologue=len(prologue),
        facts=tuple(Fact(name, value) for name, value in notes.items()),
    )


def _iterations_to_close(iterations: Sequence[deft.Iteration], start: int) -> list[int]:
    """For each iteration, and the one that comes after the last: how many until one closes."""
    result = [next(n for n, iteration in enumerate(iterations[start:]) if iteration.closes)]
    for iteration in reversed(iterations):
        result.append(0 if iteration.closes else result[-1] + 1)
    return result[::-1]


_SOLVERS: dict[str, knapsack.Solver] = {"exact": knapsack.exact, "greedy": knapsack.greedy}
