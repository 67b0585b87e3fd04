"""DeFT: delayed and merged updates, so that messages always overlap with compute."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, Literal

from offbeat.core.codecs.cost import ELEMENT_BYTES
from offbeat.core.derive import effects
from offbeat.core.plan import (
    Apply,
    Buffer,
    Fact,
    Merge,
    Moment,
    Payload,
    Phases,
    Plan,
    Transfer,
    local,
)
from offbeat.core.profile import GradientNoise, Profile
from offbeat.core.strategy.interface import Planned, Strategy, require_count
from offbeat.strategies.compressible import Wired
from offbeat.strategies.equations import Equations, World, synchronous
from offbeat.strategies.solvers import knapsack, preserver
from offbeat.strategies.solvers import queues as deft
from offbeat.strategies.wfbp import WFBP, gradients_when_ready_s

RETRIES = 10
GROWTH = 1.1  # growth factor of the windows per try
MOST_PARTS = 256  # largest number of slices of a bucket; smaller ones take little but latency
ROUNDING = 1e-12
# Pairs of shares of the largest message that fits: size up to which consecutive buckets are fused,
# and size of slices. Smaller messages fill windows better; larger messages have less latency.
LEVELS = ((1.0, 1.0), (0.25, 1.0), (0.0, 1.0), (0.0, 0.5), (0.0, 0.25))
_SOLVERS: dict[str, knapsack.Solver] = {"exact": knapsack.exact, "greedy": knapsack.greedy}


@dataclass(frozen=True)
class DeFT(Wired):
    """Send each gradient in a later forward or backward that has room for it (knapsacks).

    Gradients that have not been sent at the end of an iteration are merged with the next ones. An
    update is applied when all of its gradients have been averaged, at least one iteration late. The
    `preserver` estimates the ratio of losses. While that ratio is outside 1 +- `epsilon`, the
    preserver plans again with 10 % larger windows.

    An iteration without an update makes no progress. An update that merges k iterations is worth at
    most k single updates, because it uses k batches. The lower limit is one single update, as with
    Adam, whose step length does not depend on the gradient's size. Therefore schedules are compared
    by seconds per update, then by seconds per iteration. If WFBP is predicted to need no more
    seconds per update, WFBP's plan is used, whose updates are never late.
    """

    scale: Merge = "sum"
    """Merged update: `sum` or `mean` of the gradients of its iterations."""
    solver: Literal["exact", "greedy"] = "exact"
    """Solver that chooses the messages of a window: an `exact` knapsack or the paper's `greedy`
    one."""
    links: Literal["auto", "all", "first"] = "auto"
    """Links of the profile: `all`, the `first`, or as many as increase the updates (`auto`)."""
    partition_elements: int = 6_500_000
    """Largest number of 4-byte elements in a message."""
    most_merged: int = 4
    """Largest number of iterations that an update merges. If communication takes longer, iterations
    wait."""
    preserver: bool = True
    """Whether to estimate the effect of merging and lateness on the loss, and to plan again with
    larger windows if the effect is too large."""
    epsilon: float = 0.01
    """Accepted distance of the estimated ratio of losses from 1."""

    name: ClassVar[str] = "deft"
    synchronous: ClassVar[bool] = False
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

    @classmethod
    def suggestions(cls, profile: Profile, max_staleness: int) -> Iterable[Strategy]:
        return (cls(),)

    @property
    def applies_late(self) -> bool:
        return True

    def schedule(self, profile: Profile) -> Plan:
        """Return DeFT's plan, or WFBP's plan with a warning if DeFT's is predicted to gain nothing.

        DeFT gains nothing if no window has room for a slice, or if late updates save no time. The
        `strategy` of WFBP's plan is "wfbp".
        """
        view = profile.slowest()
        synchronous_s = gradients_when_ready_s(view, WFBP().plan(view))
        try:
            chosen, preserved = self._best_choice(view, synchronous_s)
        except NoWindowError as error:
            return _synchronous_plan(profile, str(error))
        per_update_s = chosen.seconds / chosen.schedule.updates_per_iteration
        if per_update_s >= synchronous_s:
            return _synchronous_plan(
                profile,
                f"late updates save no time: {per_update_s:.4g} s per update (coverage rate "
                f"{chosen.coverage_rate:.3g}, merges {list(chosen.schedule.merges)}), and WFBP "
                f"{synchronous_s:.4g} s",
            )
        return _encode_schedule(self, chosen, _schedule_notes(chosen, preserved))

    def equations(self, plan: Plan) -> Equations:
        late = any(map(effects.is_window_end, plan.applies))
        return merged(closing(plan), self.scale) if late else synchronous()

    def bound_s(self, profile: Profile) -> float:
        """Return a lower bound: the compute of the slowest rank with one update per `most_merged`
        iterations, or the bytes of an update on all links together.
        """
        profile = profile.slowest()
        local_s = profile.other_s + profile.forward_s + profile.backward_s
        per_update_s = [sum(profile.transfer_s(link.name)) for link in profile.links]
        if self.links == "first":
            per_update_s = per_update_s[:1]
        rate = sum(1 / seconds if seconds else math.inf for seconds in per_update_s)
        return max(local_s + profile.update_s / self.most_merged, 1 / rate / self.most_merged)

    def fallback(self) -> Planned | None:
        fallback = WFBP(wire=self.wire, error_feedback=self.error_feedback)
        return fallback if self.preserver else None

    def _best_choice(self, profile: Profile, synchronous_s: float) -> tuple[Choice, dict[str, Any]]:
        search = Search(self, profile, synchronous_s)
        if self.preserver and profile.noise is not None:
            return self._valid_choice(search, profile.noise)
        why = "the profile holds no gradient noise" if self.preserver else "it is switched off"
        return search.best(), _skip_note(why)

    def _valid_choice(self, search: Search, noise: GradientNoise) -> tuple[Choice, dict[str, Any]]:
        """Return the schedule that the Preserver accepts, and a record of all tries.

        Each try enlarges the windows of the previous one, until nothing is merged. Links and
        messages are the same in all tries. If no try is accepted, the one with the ratio nearest to
        1 is used.
        """
        chosen = search.best()
        tries: list[tuple[float, Choice]] = []
        while len(tries) <= RETRIES:
            if tries:
                chosen = search.enlarge_windows(chosen)
            tries.append((self._ratio(noise, chosen.schedule.merges), chosen))
            if self._accepts(tries[-1][0]) or max(chosen.schedule.merges) == 1:
                break
        ratio, chosen = min(tries, key=lambda t: abs(t[0] - 1))
        verdict = "within" if self._accepts(ratio) else f"the nearest to 1 of {len(tries)}, outside"
        records = [
            {
                "capacity": choice.capacity,
                "ratio": value if math.isfinite(value) else None,
                "merges": list(choice.schedule.merges),
                "accepted": self._accepts(value),
            }
            for value, choice in tries
        ]
        return chosen, {
            "tries": records,
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


MEANINGS = {
    "merges": "iterations per update, over one cycle",
    "coverage_rate": "time to send all gradients on the first link / forward and backward",
    "capacity": "times forward and backward",
}


def _schedule_notes(chosen: Choice, preserved: dict[str, Any]) -> dict[str, Any]:
    return {
        "links": chosen.why,
        "merges": list(chosen.schedule.merges),
        "coverage_rate": chosen.coverage_rate,
        "capacity": chosen.capacity,
        "preserver": preserved,
    }


def _skip_note(why: str) -> dict[str, Any]:
    return {"tries": [], "decision": f"skipped: {why}"}


def _synchronous_plan(profile: Profile, why: str) -> Plan:
    """Return WFBP's plan, and warn with the reason to use it instead of DeFT's."""
    reason = f"{why}; WFBP runs instead of DeFT"
    warnings.warn(reason, stacklevel=3)
    facts = (Fact("instead_of", "deft", "the strategy that was asked for"), Fact("why", reason))
    return replace(WFBP().plan(profile), facts=facts)


def _encode_schedule(strategy: DeFT, choice: Choice, notes: dict[str, Any]) -> Plan:
    """Return the plan of a schedule.

    Messages of the closed accumulation window have age 1. Messages of the window that closes at the
    end of the iteration have age 0. Both are due when the next window closes.
    """
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
        facts=tuple(Fact(name, value, MEANINGS.get(name, "")) for name, value in notes.items()),
    )


def _iterations_to_close(iterations: Sequence[deft.Iteration], start: int) -> list[int]:
    """Return, for each iteration and the one after the last, the number of iterations until a
    window closes."""
    result = [next(n for n, iteration in enumerate(iterations[start:]) if iteration.closes)]
    for iteration in reversed(iterations):
        result.append(0 if iteration.closes else result[-1] + 1)
    return result[::-1]


def merged(closes: Callable[[int], bool], merge: Merge = "sum") -> Equations:
    """Return the equations of merged gradients with a late update.

    Gradients are added up until an iteration closes their window. When the next window closes,
    their mean over replicas is applied. No optimizer steps in between.

    Args:
        closes: function of an iteration that returns whether it closes a window.
        merge: "sum" or "mean" over the iterations of a window.
    """

    def advance(world: World, iteration: int) -> None:
        world.gradients(iteration)
        world.add_up()
        if not closes(iteration):
            return
        if world.recall(merge):
            world.average("grad")
            world.step()
            world.end()
        world.close()

    return advance


def closing(plan: Plan) -> Callable[[int], bool]:
    """Return a function of an iteration that returns whether it closes a window of the plan.

    Args:
        plan: plan with accumulation windows.
    """
    phases = {p for apply in plan.applies if effects.is_window_end(apply) for p in apply.phases}
    return lambda iteration: plan.phase(iteration) in phases


# ---- search over links, message sizes and windows ----------------------------------------------


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
            ready_s = [self._profile.ready_s[piece.buckets[-1]] for piece in pieces]
            yield Sized(pieces, ready_s, self._messages.weights_s(pieces))

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


# ---- messages -----------------------------------------------------------------------------------


class NoWindowError(ValueError):
    """Error if the smallest slice of some bucket does not fit into backward."""


class Messages:
    """Divisions of one iteration's gradients into messages of several sizes.

    The messages are in the order of ready times. Each message fits into the window on each link
    while all other links are busy.

    Args:
        profile: profile of model and links.
        links: names of the links.
        most_elements: largest number of elements in a message, except for a slice of 1/256 that
            holds more.
    """

    def __init__(self, profile: Profile, links: Sequence[str], most_elements: int) -> None:
        self._profile = profile
        self._sizes_bytes = [bucket.size_bytes for bucket in profile.buckets]
        self._most_bytes = most_elements * ELEMENT_BYTES
        self._links = list(links)
        self._speeds = [
            profile.speed(link, [other for other in links if other != link]) for link in links
        ]

    def weights_s(self, payloads: Sequence[Payload]) -> list[list[float]]:
        """Return `[link][message]`: the seconds of each message while all other links are busy."""
        return [
            [self._profile.message_s(payload, link) / speed for payload in payloads]
            for link, speed in zip(self._links, self._speeds, strict=True)
        ]

    def variants(self, forward_s: float, backward_s: float) -> Iterator[list[Payload]]:
        """Yield lists of messages that fit into the shorter window, the largest messages first.

        If there are none, yield lists of messages that fit into backward.

        Args:
            forward_s: seconds of forward.
            backward_s: seconds of backward.

        Raises:
            NoWindowError: the smallest slice of some bucket does not fit.
        """
        for limit_s in (min(forward_s, backward_s), backward_s):
            found: list[list[Payload]] = []
            for level in LEVELS:
                payloads = self.cut(limit_s, *level)
                if payloads is not None and payloads not in found:
                    found.append(payloads)
                    yield payloads
            if found:
                return
        raise NoWindowError(self._too_large(backward_s))

    def cut(self, limit_s: float, fused: float, sliced: float) -> list[Payload] | None:
        """Return messages that take at most `limit_s` on each link, or None if a bucket does not.

        Args:
            limit_s: longest time of a message.
            fused: share of the limits of bytes and time up to which consecutive buckets are fused.
            sliced: approximate share of `limit_s` that a slice of a larger bucket takes. The bucket
                is cut into the smallest possible number of equal slices.
        """
        result: list[Payload] = []
        start = 0
        while start < len(self._sizes_bytes):
            stop = self._fusion_end(start, limit_s, fused) if fused else start + 1
            parts = 1 if stop > start + 1 else self._parts(start, limit_s, sliced)
            if parts is None:
                return None
            run = range(start, stop)
            result += [Payload("grad", run, part, parts) for part in range(parts)]
            start = stop
        return result

    def _fusion_end(self, start: int, limit_s: float, fused: float) -> int:
        """Return the end of the longest run of buckets from `start` on within the share `fused`.

        The limits are those of bytes and time. The run has at least one bucket.
        """

        def exceeds_limits(count: int) -> bool:
            run = range(start, start + count)
            too_large = sum(self._sizes_bytes[start : run.stop]) > fused * self._most_bytes
            return too_large or self._slowest_s(run) > fused * limit_s

        return start + max(1, _least(exceeds_limits, 1, len(self._sizes_bytes) - start + 1) - 1)

    def _parts(self, bucket: int, limit_s: float, sliced: float) -> int | None:
        """Return the number of slices with which a bucket fits on every link, or None."""
        run = range(bucket, bucket + 1)
        most_s = limit_s * (1 + ROUNDING)
        parts = max(1, -(-self._sizes_bytes[bucket] // self._most_bytes))
        if 0 < limit_s < math.inf:
            shares = self._slowest_s(run) / (sliced * limit_s)
            parts = max(parts, math.ceil(min(shares, MOST_PARTS) * (1 - ROUNDING)))
        fits = _least(
            lambda n: self._slowest_s(run, n) <= most_s, min(parts, MOST_PARTS), MOST_PARTS + 1
        )
        return fits if fits <= MOST_PARTS else None

    def _slowest_s(self, run: range, parts: int = 1) -> float:
        """Return the seconds of a slice of a run of buckets on the slowest link."""
        return max(
            self._profile.message_s(Payload("grad", run, 0, parts), link) / speed
            for link, speed in zip(self._links, self._speeds, strict=True)
        )

    def _too_large(self, backward_s: float) -> str:
        """Return the error message for the first bucket that does not fit into backward."""
        buckets = range(len(self._sizes_bytes))
        bucket = next(i for i in buckets if self._parts(i, backward_s, 1.0) is None)
        run = range(bucket, bucket + 1)
        whole_s, slice_s, link = max(
            (
                self._profile.message_s(Payload("grad", run), link) / speed,
                self._profile.message_s(Payload("grad", run, 0, MOST_PARTS), link) / speed,
                link,
            )
            for link, speed in zip(self._links, self._speeds, strict=True)
        )
        return (
            f"bucket {self._profile.buckets[bucket].name!r} takes {whole_s:.4g} s on link {link!r} "
            f"and a slice of 1/{MOST_PARTS} still {slice_s:.4g} s, which does not fit into "
            f"backward ({backward_s:.4g} s)"
        )


def _least(holds: Callable[[int], bool], low: int, high: int) -> int:
    """Return the least number in [low, high) for which a monotone condition holds, else `high`."""
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle + 1, high)
    return low
