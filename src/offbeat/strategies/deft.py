"""DeFT: late, merged updates, so that every gradient is sent while something is computed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, Literal

from offbeat.plan import Apply, Buffer, Fact, Merge, Moment, Payload, Phases, Plan, Transfer, local
from offbeat.profile import GradientNoise, Profile
from offbeat.solve import deft, knapsack, preserver
from offbeat.strategies.base import Strategy, require_count

ELEMENT_BYTES = 4
MOST_PARTS = 256  # slices of a bucket; beyond that a message is hardly more than its latency
ROUNDING = 1e-12
RETRIES = 10
GROWTH = 1.1  # of the capacity, per retry
SYNCHRONOUS = "use a synchronous strategy, such as WFBP(), or a faster link"
# Shares of the largest message that fits: up to which neighbours are fused, into which slices are
# cut. Smaller messages fill windows better, larger ones pay less latency.
LEVELS = ((1.0, 1.0), (0.25, 1.0), (0.0, 1.0), (0.0, 0.5), (0.0, 0.25))


@dataclass(frozen=True)
class DeFT(Strategy):
    """Gradients are sent in whichever later forward or backward has room for them (knapsacks).

    What has not been sent when an iteration ends is merged with the next gradients; an update is
    applied when all of it has been averaged, one iteration late or more, as the `scale` (sum or
    mean) over the iterations merged. `solver`: `exact` or the paper's `greedy`. `links`: all of
    the profile's, the first, or (`auto`) as many as give more updates. `partition_elements`: most
    elements (of 4 bytes) per message. `preserver`: from the observed gradient noise, estimate what
    merging costs, and while that is beyond 1 +- `epsilon`, plan again with windows 10 % larger.
    `forward` and `backward`: so many messages per window on the first link, first in, first out,
    instead of the knapsacks.
    """

    scale: Merge = "sum"
    solver: Literal["exact", "greedy"] = "exact"
    links: Literal["auto", "all", "first"] = "auto"
    partition_elements: int = 6_500_000
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
        view = profile.slowest()
        if self.forward is not None and self.backward is not None:
            chosen = self._counted(view, self.forward, self.backward)
            preserved = _skipped("it judges knapsacks, and here messages are counted")
        elif not self.preserver or view.noise is None:
            chosen = self._best(view, 1.0)
            why = "the profile holds no gradient noise" if self.preserver else "it is switched off"
            preserved = _skipped(why)
        else:
            chosen, preserved = self._preserved(view, view.noise)
        notes = {
            "links": chosen.why,
            "merges": list(chosen.schedule.merges),
            "coverage_rate": chosen.coverage_rate,
            "capacity": chosen.capacity,
            "preserver": preserved,
        }
        return _encoded(self, len(profile.buckets), chosen, notes)

    def bound_s(self, profile: Profile) -> float:
        """Compute alone, of the slowest rank: late, merged updates can hide any communication,
        and merging enough of them the update too."""
        profile = profile.slowest()
        return profile.other_s + profile.forward_s + profile.backward_s

    @property
    def guards_convergence(self) -> bool:
        return self.preserver

    def _counted(self, profile: Profile, forward: int, backward: int) -> _Choice:
        links = [profile.default_link.name]
        pieces = _Messages(profile, links, self.partition_elements).cut(math.inf, 0.0, 1.0)
        assert pieces is not None
        schedule = deft.fixed(forward, backward, _ready_s(profile, pieces), profile.backward_s)
        why = f"{profile.default_link.name} alone: messages are counted on the first link"
        return _Choice(profile, links, pieces, schedule, 1.0, why)

    def _preserved(self, profile: Profile, noise: GradientNoise) -> tuple[_Choice, dict[str, Any]]:
        """The schedule that the Preserver lets pass, and all that it tried."""
        tries: list[tuple[float, _Choice]] = []
        while len(tries) <= RETRIES:
            chosen = self._best(profile, GROWTH ** len(tries))
            tries.append((self._ratio(noise, chosen.schedule.merges), chosen))
            if self._accepts(tries[-1][0]):
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
        mu = [noise.gradient_sq] * sum(merges)
        walk = preserver.LossWalk(noise.loss, noise.step_size, sigma, scale=self.scale)
        return walk.ratio(merges, mu)

    def _accepts(self, ratio: float) -> bool:
        return abs(ratio - 1) <= self.epsilon

    def _best(self, profile: Profile, capacity: float) -> _Choice:
        """The best schedule over sets of links, with the reason for these."""
        names = [link.name for link in profile.links]
        if self.links != "auto" or len(names) == 1:
            used = names if self.links == "all" else names[:1]
            why = "the only link" if len(names) == 1 else f"{' and '.join(used)}, as set"
            return replace(self._on(profile, used, capacity), why=why)
        best = self._on(profile, names[:1], capacity)
        words = []
        for count in range(2, len(names) + 1):
            if best.cost[:2] == (-1.0, profile.forward_s + profile.backward_s):
                words.append("an update in every iteration needs no further link")
                break
            used = names[:count]
            try:
                more = self._on(profile, used, capacity)
            except ValueError as error:
                words.append(f"not {' and '.join(used)} ({error})")
                continue
            figures = f"{_rate(more)} instead of {_rate(best)}"
            if more.cost[:2] < best.cost[:2]:
                best, words = more, [f"{' and '.join(used)}: {figures}"]
            else:
                words.append(f"not {' and '.join(used)} ({figures})")
        return replace(best, why="; ".join([*_alone(best, words), *words]))

    def _on(self, profile: Profile, links: Sequence[str], capacity: float) -> _Choice:
        """The best schedule on these links, over the sizes of messages."""
        windows_s = profile.forward_s * capacity, profile.backward_s * capacity
        choices: list[_Choice] = []
        for pieces in _Messages(profile, links, self.partition_elements).variants():
            weights_s = _weights_s(profile, pieces, links)
            most = deft.most_updates(*windows_s, weights_s)
            if choices and most <= max(c.schedule.updates_per_iteration for c in choices):
                break  # smaller messages only add communication
            schedule = deft.simulate(
                *windows_s,
                _ready_s(profile, pieces),
                weights_s,
                solver=_SOLVERS[self.solver],
                names=[str(piece) for piece in pieces],
            )
            choices.append(_Choice(profile, links, pieces, schedule, capacity))
        return min(choices, key=lambda choice: choice.cost)


@dataclass(frozen=True)
class _Choice:
    """Messages on links, and when they are sent."""

    profile: Profile
    links: Sequence[str]
    pieces: Sequence[Payload]
    schedule: deft.Schedule
    capacity: float
    why: str = ""

    @property
    def coverage_rate(self) -> float:
        """Communication of all messages on the first link over compute, per iteration."""
        compute_s = self.profile.forward_s + self.profile.backward_s
        sending_s = sum(_weights_s(self.profile, self.pieces, self.links[:1])[0])
        return sending_s / compute_s if compute_s else 0.0

    @cached_property
    def cost(self) -> tuple[float, float, float, int]:
        """What is to be least: minus updates per iteration, seconds per iteration, communication
        per update, messages."""
        weights_s = _weights_s(self.profile, self.pieces, self.links)
        busy_s = [0.0] * len(self.links)
        for iteration in self.schedule.cycle:
            for piece, link in iteration.forward + iteration.current + iteration.future:
                busy_s[link] += weights_s[link][piece]
        compute_s = self.profile.forward_s + self.profile.backward_s
        iteration_s = max(compute_s, max(busy_s) / len(self.schedule.cycle))
        updates = self.schedule.updates_per_iteration
        return -updates, iteration_s, sum(busy_s) / len(self.schedule.merges), len(self.pieces)


def _rate(choice: _Choice) -> str:
    return f"{-choice.cost[0]:.3f} updates per iteration of {choice.cost[1]:.4g} s"


def _alone(best: _Choice, words: Sequence[str]) -> list[str]:
    return [f"{best.links[0]} alone"] if len(best.links) == 1 and words else []


def _skipped(why: str) -> dict[str, Any]:
    return {"tries": [], "decision": f"skipped: {why}"}


def _ready_s(profile: Profile, pieces: Sequence[Payload]) -> list[float]:
    ready_s = profile.ready_s
    return [ready_s[piece.buckets[-1]] for piece in pieces]


def _weights_s(
    profile: Profile, pieces: Sequence[Payload], links: Sequence[str]
) -> list[list[float]]:
    """Seconds of each message on each link while the others carry messages too."""
    speeds = _speeds(profile, links)
    return [
        [profile.message_s(piece, link) / speed for piece in pieces]
        for link, speed in zip(links, speeds, strict=True)
    ]


def _speeds(profile: Profile, links: Sequence[str]) -> list[float]:
    """Of each link while the others carry messages too."""
    return [profile.speed(link, [other for other in links if other != link]) for link in links]


class _Messages:
    """Messages of one generation, of several sizes, in order of readiness."""

    def __init__(self, profile: Profile, links: Sequence[str], most_elements: int) -> None:
        self._names = [bucket.name for bucket in profile.buckets]
        self._sizes_bytes = [bucket.size_bytes for bucket in profile.buckets]
        self._windows_s = profile.forward_s, profile.backward_s
        self._most_bytes = most_elements * ELEMENT_BYTES
        speeds = _speeds(profile, links)
        self._links = list(links)
        self._whole_s = [
            [seconds / speed for seconds in profile.communication_s(link)]
            for link, speed in zip(links, speeds, strict=True)
        ]
        self._transfer_s = [
            [seconds / speed for seconds in profile.transfer_s(link)]
            for link, speed in zip(links, speeds, strict=True)
        ]

    def variants(self) -> list[list[Payload]]:
        """Messages that fit into the smaller window, else into backward, the largest first."""
        for limit_s in (min(self._windows_s), self._windows_s[1]):
            fitting: list[list[Payload]] = []
            for level in LEVELS:
                pieces = self.cut(limit_s, *level)
                if pieces is not None and pieces not in fitting:
                    fitting.append(pieces)
            if fitting:
                return fitting
        raise ValueError(self._too_large())

    def cut(self, limit_s: float, fused: float, sliced: float) -> list[Payload] | None:
        """Neighbours fused up to a share `fused` of the limits of bytes and time, larger buckets
        in the fewest equal slices of at most a share `sliced` of the time; None if some do not
        fit."""
        result: list[Payload] = []
        start = 0
        while start < len(self._names):
            stop = self._fused(start, limit_s, fused) if fused else start + 1
            parts = 1 if stop > start + 1 else self._parts(start, limit_s, sliced)
            if parts is None:
                return None
            run = range(start, stop)
            result += [Payload("grad", run, part, parts) for part in range(parts)]
            start = stop
        return result

    def _fused(self, start: int, limit_s: float, fused: float) -> int:
        """Where the longest message from a bucket on ends that is within this share of the limits;
        at least one bucket."""
        size_bytes = 0
        sums = [(0.0, 0.0)] * len(self._links)  # latency, the rest
        for stop in range(start, len(self._names)):
            size_bytes += self._sizes_bytes[stop]
            sums = [
                (max(latency_s, whole_s[stop] - transfer_s[stop]), rest_s + transfer_s[stop])
                for (latency_s, rest_s), whole_s, transfer_s in zip(
                    sums, self._whole_s, self._transfer_s, strict=True
                )
            ]
            over = size_bytes > fused * self._most_bytes or max(map(sum, sums)) > fused * limit_s
            if over:
                return max(stop, start + 1)
        return len(self._names)

    def _parts(self, bucket: int, limit_s: float, sliced: float) -> int | None:
        """In how many slices, each with its latency, a bucket fits into the limit on every link."""
        parts = min(max(1, -(-self._sizes_bytes[bucket] // self._most_bytes)), MOST_PARTS)
        for whole, transfer in zip(self._whole_s, self._transfer_s, strict=True):
            whole_s, transfer_s = whole[bucket], transfer[bucket]
            room_s = limit_s - (whole_s - transfer_s)
            if room_s < 0 or transfer_s > MOST_PARTS * room_s:
                return None
            if transfer_s and limit_s < math.inf:
                share = max(transfer_s / room_s, min(whole_s / (sliced * limit_s), MOST_PARTS))
                parts = max(parts, math.ceil(share * (1 - ROUNDING)))
        return parts

    def _too_large(self) -> str:
        """Why no messages fit even into backward."""
        window_s = self._windows_s[1]
        buckets = range(len(self._names))
        bucket = next(i for i in buckets if self._parts(i, window_s, 1.0) is None)
        seconds = [row[bucket] for row in self._whole_s]
        link = seconds.index(max(seconds))
        return (
            f"bucket {self._names[bucket]!r} takes {seconds[link]:g} s on link "
            f"{self._links[link]!r}: even a slice of 1/{MOST_PARTS} is too long for backward "
            f"({window_s:g} s); {SYNCHRONOUS}"
        )


def _encoded(strategy: DeFT, buckets: int, choice: _Choice, notes: dict[str, Any]) -> Plan:
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
                    payload=replace(choice.pieces[piece], age=1),
                    after=Moment("forward"),
                    before=Moment("step", lag=due[phase]),
                    phases=Phases([phase]),
                    link=choice.links[link],
                )
            )
        for piece, link in iteration.future:
            payload = choice.pieces[piece]
            transfers.append(
                Transfer(
                    payload=payload,
                    after=Moment("grad", payload.buckets[-1]),
                    before=Moment("step", lag=1 + due[phase + 1]),
                    phases=Phases([phase]),
                    link=choice.links[link],
                )
            )
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
