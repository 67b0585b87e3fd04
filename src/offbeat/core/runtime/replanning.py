"""Replanning: measured times of links and ranks, agreed at boundaries, and the plans for them."""

from __future__ import annotations

import math
import warnings
from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from offbeat.core.derive.exactness import have_same_bits, is_reorderable
from offbeat.core.measuring.drift import Drift, weighted_median
from offbeat.core.plan import INSIDE, Fact, Plan, base_link
from offbeat.core.plan.program import Program
from offbeat.core.profile import GradientNoise, Profile
from offbeat.core.profile.elsewhere import with_slower_links
from offbeat.core.runtime.iteration import Iteration
from offbeat.core.runtime.launch_request import REPLAN_VARIABLE, Replan
from offbeat.core.runtime.meter import exposed_communication_s
from offbeat.core.sim.costs import Costs
from offbeat.core.sim.fluid import coupled_links
from offbeat.core.sim.prediction import BOUNDARY_FACT, predict
from offbeat.core.sim.ranks import Ranks
from offbeat.core.strategy.interface import Strategy
from offbeat.core.transport.cluster import Cluster
from offbeat.core.transport.device import Device
from offbeat.core.transport.link import Message

BOUNDARY_ITERATIONS = 20  # least number of iterations between two boundaries
MOST_SAMPLES = 64  # messages of one link whose times are exchanged at a boundary
LEAST_GAIN = 0.02  # share of the predicted seconds that another plan must save
PERIOD_GAIN = 0.1  # share that another period must save to be reported
PROBED = (1.0, 0.5, 2.0)  # factors of message times whose plans `exact` compares

Key = tuple[int, int]  # number of an iteration in the plan, and index of its message


def message_s(message: Message, device: Device) -> float:
    """Return the measured seconds of a message that has arrived."""
    return device.seconds(message.end) - device.seconds(message.start)


def compute_s(done: Iteration, device: Device) -> float | None:
    """Return the measured seconds of the last forward, of backward and update, as in a profile;
    None without a forward."""
    marks, at = done.marks, device.seconds
    if marks.first_forward is None or marks.end is None:
        return None
    forward_s = at(marks.forward)
    before = ((at(one.begin), at(one.waited)) for one in marks.acted)
    waited_s = sum(end - start for start, end in before if end <= forward_s)
    return at(marks.end) - forward_s - (exposed_communication_s(marks, device) - waited_s)


class BoundaryMeter:
    """Times of this rank's messages and compute since the last boundary of one plan.

    The least time over the ranks of one message contains no wait for late ranks. So ranks exchange
    the times of the same messages, and use the minimum of each.

    Args:
        plan: plan that runs.
        profile: profile to which measured times are compared.
        every: iterations between two boundaries.
        cluster: control, device and replicas of this rank.
    """

    def __init__(self, plan: Plan, profile: Profile, every: int, cluster: Cluster) -> None:
        self.plan, self.every = plan, every
        self._control, self._device = cluster.control, cluster.device
        self._topology, self._profile = cluster.topology, profile
        self._program = Program(plan, cluster.replica)
        self._costs = Costs(plan, profile, Ranks())
        self._coupled = coupled_links(plan, profile)
        scale = profile.rank_scale[cluster.replica] if profile.rank_scale else 1.0
        self._compute_s = scale * (profile.forward_s + profile.backward_s + profile.update_s)
        self._pending: deque[Iteration] = deque()
        self._sent_s: dict[str, float] = {}  # end of the last message, by link
        self._begin_window(0)

    def _begin_window(self, start: int) -> None:
        """Select the messages of the next window whose times count: evenly spaced ones of each
        link."""
        keys = defaultdict[str, list[Key]](list)
        for planned in range(start, start + self.every):
            for index, t in enumerate(self._program.transfers(planned)):
                # The first rank of a broadcast does not wait until the others have received it.
                if t.verb == "broadcast" or base_link(t.link) == INSIDE:
                    continue
                if self._costs.message_s(t) > 0:
                    keys[base_link(t.link)].append((planned, index))
        self._samples = {link.name: _evenly_spaced(keys[link.name]) for link in self._profile.links}
        self._sampled = {key for samples in self._samples.values() for key in samples}
        self._measured: dict[Key, float] = {}
        self._computed: list[float] = []
        self._intervals: dict[str, list[tuple[float, float]]] = defaultdict(list)
        self._spans: dict[Key, tuple[str, float, float]] = {}

    def is_boundary(self, planned: int) -> bool:
        """Return whether a window ends before an iteration of the plan."""
        since = planned - self.plan.prologue
        return since > 0 and since % self.every == 0

    def add(self, done: Iteration) -> None:
        """Add a finished iteration. The host does not wait for an accelerator."""
        self._pending.append(done)
        while self._pending and self._pending[0].is_reached(self._device):
            self._measure(self._pending.popleft())

    def _measure(self, done: Iteration) -> None:
        if (seconds := compute_s(done, self._device)) is not None:
            self._computed.append(seconds)
        for index, message in enumerate(done.messages):
            if message.end is None or message.passed:
                continue
            key, link = (done.planned, index), message.transfer.link
            additional_s = self._additional_s(message)
            if key in self._sampled:
                self._measured[key] = max(message_s(message, self._device) - additional_s, 0.0)
            if link in self._coupled:
                start, end = (self._device.seconds(m) for m in (message.start, message.end))
                self._intervals[link].append((start, end))
                if key in self._sampled:
                    self._spans[key] = link, start, end

    def _additional_s(self, message: Message) -> float:
        """Return the additional seconds of a message if it follows a pause of its link.

        The times to which messages are compared are those without a pause.
        """
        t = message.transfer
        link = self._profile.link(t.link)
        if not link.after_pause or message.end is None:
            return 0.0
        start_s, end_s = map(self._device.seconds, (message.start, message.end))
        pause_s = start_s - self._sent_s.get(t.link, -math.inf)
        self._sent_s[t.link] = end_s
        return self._costs.additional_s(t) if pause_s >= link.pause_s else 0.0

    def exchange(self, planned: int) -> tuple[dict[str, float | None], list[float | None]]:
        """Return the ratios of all links and replicas, the same on all ranks, and begin the next
        window.

        Args:
            planned: number in the plan of the next iteration.
        """
        for key in self._overlapping_messages():
            del self._measured[key]
        is_known = self._computed and self._compute_s
        own = median(self._computed) / self._compute_s if is_known else math.inf
        ranks = self._control.world_size
        values = [
            self._measured.get(key, math.inf) for keys in self._samples.values() for key in keys
        ]
        computed = [own if rank == self._control.rank else math.inf for rank in range(ranks)]
        least = iter(self._control.minimum([*values, *computed]))
        links = {}
        for name, keys in self._samples.items():
            times = [(next(least), self._message_s(key)) for key in keys]
            links[name] = weighted_median((s / p, p) for s, p in times if math.isfinite(s))
        of_rank = list(least)
        replicas = []
        for node in self._topology.nodes:
            found = [of_rank[rank] for rank in node if math.isfinite(of_rank[rank])]
            replicas.append(max(found, default=None))
        self._begin_window(planned)
        return links, replicas

    def _message_s(self, key: Key) -> float:
        planned, index = key
        return self._costs.message_s(self._program.transfers(planned)[index])

    def _overlapping_messages(self) -> Iterator[Key]:
        """Yield the measured messages that other messages have slowed down. Their prediction is
        that of a message alone."""
        ordered = {link: sorted(spans) for link, spans in self._intervals.items()}
        for key, (link, start, end) in self._spans.items():
            others = (spans for name, spans in ordered.items() if name != link)
            if any(_overlaps(spans, start, end) for spans in others):
                yield key


def _evenly_spaced(keys: list[Key]) -> list[Key]:
    """Return at most `MOST_SAMPLES` of the keys."""
    count = min(len(keys), MOST_SAMPLES)
    return [keys[i * len(keys) // count] for i in range(count)]


def _overlaps(spans: Sequence[tuple[float, float]], start: float, end: float) -> bool:
    """Return whether one of the spans, which are in order and do not overlap each other, overlaps
    (start, end)."""
    i = bisect_left(spans, (start, start))
    return (i > 0 and spans[i - 1][1] > start) or (i < len(spans) and spans[i][0] < end)


@dataclass(frozen=True)
class Proposal:
    """Result of planning for measured times, the same on all ranks.

    Attributes:
        profile: profile with the measured times.
        plan: plan to adopt; None to keep the plan that runs.
        text: description for the record.
        numbers: factors of links and replicas, and the predicted seconds, for programs.
    """

    profile: Profile
    plan: Plan | None
    text: str
    numbers: Mapping[str, Any]


class Replanner:
    """Measurement of drift during a job, and plans for the measured times.

    Args:
        policy: changes of the result that are allowed.
        profile: profile of the job, to which measured times are compared.
        cluster: control, device and replicas of this rank.
        make: returns the checked plan of a strategy for a profile.

    Attributes:
        strategy: strategy that runs.
    """

    strategy: Strategy
    _plan: Plan

    def __init__(
        self,
        policy: Replan,
        profile: Profile,
        cluster: Cluster,
        make: Callable[[Strategy, Profile], Plan],
    ) -> None:
        self.policy, self._base, self._cluster, self._make = policy, profile, cluster, make
        self._drift = Drift.of(profile)
        self._meter: BoundaryMeter | None = None

    def with_boundaries(self, plan: Plan, strategy: Strategy) -> Plan:
        """Return the plan that runs from now on with the number of iterations between two
        boundaries as a fact, or without this fact if its times are not measured."""
        self.strategy = strategy
        facts = tuple(fact for fact in plan.facts if fact.name != BOUNDARY_FACT)
        if self._measures(plan):
            every = plan.period * -(-BOUNDARY_ITERATIONS // plan.period)
            meaning = "iterations between two exchanges of measured times"
            facts += (Fact(BOUNDARY_FACT, every, meaning),)
        self._plan = replace(plan, facts=facts)
        return self._plan

    def _measures(self, plan: Plan) -> bool:
        """Return whether measured times can lead to another plan that the policy allows."""
        if self.policy == "never" or self._base.world_size < 2 or not plan.transfers:
            return False
        if not plan.uniform or plan.source is not None:  # ranks send different messages
            return False
        if self.policy == "always":
            return True
        if not is_reorderable(plan):
            return False
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            own, *others = (
                self.strategy.plan(with_slower_links(self._base, times)) for times in PROBED
            )
        changed = [other for other in others if other.digest != own.digest]
        return bool(changed) and all(have_same_bits(own, other) for other in changed)

    def begin(self, plan: Plan) -> None:
        """Measure the iterations of a plan from now on, if it has boundaries."""
        every = plan.fact(BOUNDARY_FACT)
        self._meter = None
        if every is not None:
            self._meter = BoundaryMeter(plan, self._base, every, self._cluster)

    def add(self, done: Iteration) -> None:
        """Add a finished iteration."""
        if self._meter is not None:
            self._meter.add(done)

    def is_due(self, planned: int) -> bool:
        """Return whether a boundary precedes an iteration of the plan, so that `propose` exchanges
        measured times."""
        return self._meter is not None and self._meter.is_boundary(planned)

    def propose(self, planned: int, noise: GradientNoise | None) -> Proposal | None:
        """At a boundary, exchange measured times with all ranks. Return a proposal if a level has
        changed, otherwise None.

        Args:
            planned: number in the plan of the next iteration.
            noise: newest estimate of the gradient noise.
        """
        meter = self._meter
        if meter is None or not meter.is_boundary(planned):
            return None
        links, replicas = self._drift.add(*meter.exchange(planned))
        if not links and not replicas:
            return None
        plan, strategy = self._plan, self.strategy
        profile = replace(self._drift.profile(self._base), noise=noise)
        now_s = _plan_seconds(strategy, plan, profile)
        numbers: dict[str, Any] = {
            "links": {name: round(self._drift.links[name].factor, 3) for name in links},
            "ranks": {
                rank: round(self._drift.replicas[i].factor, 3)
                for i in replicas
                for rank in self._cluster.topology.nodes[i]
            },
            "from_s": now_s,
            "to_s": now_s,
        }
        causes = [_describe_cause(f"link {n!r} takes", f) for n, f in numbers["links"].items()]
        causes += [_describe_cause(f"rank {r} computes", f) for r, f in numbers["ranks"].items()]
        cause = ", ".join(causes)
        try:
            other = self._make(strategy, profile)
        except ValueError as error:
            return Proposal(profile, None, f"{cause}; no other plan: {error}", numbers)
        every = Fact(BOUNDARY_FACT, plan.fact(BOUNDARY_FACT))  # both plans have boundaries
        ran = replace(other, facts=(*other.facts, every))
        then_s = predict(strategy, profile, ran=ran).iteration_s
        if other.digest == plan.digest or then_s > (1 - LEAST_GAIN) * now_s:
            text = f"{cause}; no other plan saves {LEAST_GAIN:.0%}, so the plan stays"
            return Proposal(profile, None, text, numbers)
        change = f"{_milliseconds(now_s)} become {_milliseconds(then_s)} per iteration (predicted)"
        if self.policy == "exact" and not have_same_bits(plan, other):
            text = f"{cause}; with {REPLAN_VARIABLE}=always {change}, with other sums"
            return Proposal(profile, None, text, numbers)
        text = f"planned again, because {cause}: {change}"
        return Proposal(profile, other, text, {**numbers, "to_s": then_s})

    def better_period(self, profile: Profile) -> str | None:
        """Return a sentence about another `period` that would be better; None if none is.

        The period is never changed during training: the weights would be those of another method.

        Args:
            profile: profile with the measured times.
        """
        strategy = self.strategy
        period = getattr(strategy, "period", None)
        if not isinstance(period, int):
            return None
        now_s = _plan_seconds(strategy, self._plan, profile)
        for other, most_s in (
            (2 * period, (1 - PERIOD_GAIN) * now_s),
            (period // 2, (1 + LEAST_GAIN) * now_s),
        ):
            try:
                changed = replace(strategy, period=other)  # type: ignore[call-arg]
                seconds = predict(changed, profile).iteration_s
            except ValueError:
                continue
            if seconds <= most_s:
                return (
                    f"{changed} would take {_milliseconds(seconds)} per iteration, {strategy} "
                    f"takes {_milliseconds(now_s)} (predicted); the period stays, because it "
                    "changes what is learnt"
                )
        return None

    def capture(self) -> dict[str, Any]:
        """Return the levels and the profile to which they refer, for a checkpoint."""
        return {"base": self._base.to_dict(), **self._drift.capture()}

    def resume(self, captured: Mapping[str, Any]) -> None:
        """Restore the result of `capture`."""
        self._base = Profile.from_dict(captured["base"])
        self._drift.resume(captured)


def _plan_seconds(strategy: Strategy, plan: Plan, profile: Profile) -> float:
    """Return the predicted seconds per iteration of a plan that was made for another profile."""
    return predict(strategy, profile, ran=replace(plan, bound_s=None)).iteration_s


def _describe_cause(subject: str, factor: float) -> str:
    if factor == 1:
        return f"{subject} as long as in the profile again"
    return f"{subject} {factor:.3g} times as long as in the profile"


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"
