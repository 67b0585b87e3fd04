"""Outlook of a job: its prediction, departures from the prediction, and their causes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from statistics import median
from typing import Any

from offbeat.core.plan import Plan
from offbeat.core.profile import Link, Profile
from offbeat.core.profile.elsewhere import with_free_links
from offbeat.core.sim.prediction import Prediction, predict
from offbeat.core.strategy.interface import Strategy
from offbeat.core.strategy.plan_memory import Memory
from offbeat.core.strategy.registry import BASELINE, create
from offbeat.core.transport.topology import Topology
from offbeat.core.words import count_text, digits, percent, prediction_error, seconds, size
from offbeat.jobs.interval import Interval, recent
from offbeat.jobs.machine_load import describe_foreign

DEPARTURE = 0.1  # share of the predicted seconds from which a departure is reported
DEVIATIONS = 3.0  # standard deviations of the profile's jitter that are no departure
WINDOW_S = 30.0  # shortest time over which iterations are compared with the prediction
WINDOW_PERIODS = 3
LEAST_INTERVALS = 3
QUIET_S = 600.0  # shortest time between two notices
CHANGED = 0.5  # relative change of a departure that is reported again


@dataclass(frozen=True)
class Cause:
    """Cause of a departure.

    Attributes:
        name: one of `CAUSES` (interval.py).
        excess_s: seconds per iteration above the prediction that the cause explains.
        text: description with a remedy.
        rank: number of the process whose compute or script is slow, which is its rank at the
            start; None for causes that concern all ranks.
    """

    name: str
    excess_s: float
    text: str
    rank: int | None = None


@dataclass(frozen=True)
class Notice:
    """Departure from the prediction, or the return to it.

    Attributes:
        event: "notice" or "recovered".
        iteration: first iteration of the departure, or of the return.
        measured_s: seconds per iteration.
        cause: the largest cause; None for a return.
        text: message.
    """

    event: str
    iteration: int
    measured_s: float
    cause: Cause | None
    text: str


@dataclass
class Outlook:
    """Prediction of a plan, and the state of its comparison with measured iterations.

    Attributes:
        prediction: prediction of the plan; None if it failed or there is no profile.
        baseline: prediction of torch's DDP; None if it failed.
        profile: profile of the job.
        period: period of the plan.
        hosts: host of each rank, for messages.
        numbers: number of each rank's process in the record, for messages.
        ranks: ranks in the order of the profile's replicas; empty for their own order.
    """

    prediction: Prediction | None
    baseline: Prediction | None
    profile: Profile | None
    period: int
    hosts: Sequence[str]
    numbers: Sequence[int]
    ranks: Sequence[int] = ()
    _suspected: bool = False  # whether the last comparison has found a departure
    _reported: Notice | None = None
    _reported_s: float = float("-inf")
    _compared: int = -1  # first iteration of the last interval that was compared
    _intervals: list[Interval] = field(default_factory=list)

    @classmethod
    def of(
        cls,
        strategy: Strategy,
        plan: Plan | None,
        profile: Profile | None,
        hosts: Sequence[str],
        servers: int,
        numbers: Sequence[int] | None = None,
        topology: Topology | None = None,
    ) -> Outlook:
        """Return the outlook of a plan, or of a strategy without a plan.

        Args:
            strategy: strategy that runs.
            plan: plan of the strategy; None if it has none.
            profile: profile of the job; None if it has none.
            hosts: see the class.
            servers: number of ranks that serve.
            numbers: see the class; None where they are the ranks.
            topology: nodes of the job; None if every rank holds a replica of its own.
        """
        prediction = baseline = None
        if profile is not None:
            prediction = _predict(strategy, profile, plan, servers)
            baseline = _predict(create(BASELINE), profile, None, servers)
        period, numbers = plan.period if plan else 1, numbers or range(len(hosts))
        ranks = [] if topology is None else [rank for node in topology.nodes for rank in node]
        return cls(prediction, baseline, profile, period, hosts, numbers, ranks)

    @property
    def iteration_s(self) -> float | None:
        """Predicted seconds per iteration; None without a prediction."""
        return None if self.prediction is None else self.prediction.iteration_s

    @property
    def mark(self) -> str:
        """Mark of predicted numbers: "~" if their profile was disturbed, otherwise empty."""
        return "~" * bool(self.profile and self.profile.foreign_share)

    @property
    def bound_s(self) -> float | None:
        """Lower bound of the seconds per iteration; None if unknown."""
        return None if self.prediction is None else self.prediction.bound_s

    def compare(self, newest: Mapping[int, Interval], rank: int, now_s: float) -> Notice | None:
        """Compare the newest intervals of all ranks with the prediction.

        Args:
            newest: newest interval of each rank.
            rank: rank whose iterations are compared.
            now_s: monotonic time.

        Returns:
            A notice if two successive comparisons have found a departure that was not reported, or
            no departure after a reported one; otherwise None.
        """
        predicted_s, own = self.iteration_s, newest.get(rank)
        if predicted_s is None or own is None or own.first == self._compared:
            return None
        self._compared = own.first
        self._intervals.append(own)
        window_s = self._window_s(predicted_s)
        window = list(recent(self._intervals, window_s))
        if len(window) < LEAST_INTERVALS:  # iterations are long
            window = self._intervals[-LEAST_INTERVALS:]
        if len(window) < LEAST_INTERVALS or sum(i.s_sum for i in window) < window_s:
            return None
        self._intervals = self._intervals[-max(2 * len(window), LEAST_INTERVALS) :]
        measured_s = median(interval.mean_s for interval in window)
        threshold = self._threshold(sum(interval.n for interval in window))
        accepted_s = (1 + threshold) * predicted_s
        was_suspected = self._suspected
        # The newest interval must depart, too, because the cause is derived from it.
        self._suspected = min(measured_s, own.mean_s) > accepted_s
        if measured_s <= accepted_s:
            return self._recover(measured_s, accepted_s)
        if not (was_suspected and self._suspected):
            return None
        cause = self._cause(newest, own.mean_s - predicted_s)
        if not self._is_news(cause, measured_s, now_s):
            return None
        since = self._first_of_last(lambda i: i.mean_s > accepted_s)
        text = (
            f"since iteration {since:,}: {seconds(measured_s)} each, predicted "
            f"{self.mark}{seconds(predicted_s)} ({prediction_error(predicted_s, measured_s)}). "
            f"{cause.text}"
        )
        self._reported = Notice("notice", since, measured_s, cause, text)
        self._reported_s = now_s
        return self._reported

    def _window_s(self, predicted_s: float) -> float:
        return max(WINDOW_S, WINDOW_PERIODS * self.period * predicted_s)

    def _threshold(self, iterations: int) -> float:
        """Return the relative departure that is reported: `DEPARTURE`, or more if the jitter of
        compute explains a larger departure of the mean."""
        assert self.profile is not None
        jitter = max(self.profile.jitters, default=0.0)
        return max(DEPARTURE, DEVIATIONS * jitter / max(1, iterations) ** 0.5)

    def _first_of_last(self, criterion: Callable[[Interval], bool]) -> int:
        """Return the first iteration of the last intervals that meet a criterion."""
        first = self._intervals[-1].first
        for interval in takewhile(criterion, reversed(self._intervals)):
            first = interval.first
        return first

    def _recover(self, measured_s: float, accepted_s: float) -> Notice | None:
        if self._reported is None or self._reported.event == "recovered":
            return None
        since = self._first_of_last(lambda i: i.mean_s <= accepted_s)
        text = f"as predicted again since iteration {since:,} ({seconds(measured_s)} each)"
        self._reported = Notice("recovered", since, measured_s, None, text)
        return self._reported

    def _is_news(self, cause: Cause, measured_s: float, now_s: float) -> bool:
        before = self._reported
        if before is None:
            return True
        if now_s - self._reported_s < QUIET_S:
            return False
        if before.cause is None:
            return True
        changed = abs(measured_s - before.measured_s) > CHANGED * before.measured_s
        return (cause.name, cause.rank) != (before.cause.name, before.cause.rank) or changed

    # ---- causes -----------------------------------------------------------------------------

    def _cause(self, newest: Mapping[int, Interval], excess_s: float) -> Cause:
        """Return the cause with the largest excess over the profile.

        Args:
            newest: newest interval of each rank.
            excess_s: seconds per iteration of the same intervals above the prediction.
        """
        causes = [self._slow_compute(newest), self._slow_script(newest), self._slow_link(newest)]
        largest = max(causes, key=lambda cause: cause.excess_s)
        if largest.excess_s < 0.25 * excess_s:
            text = "Nothing that is measured explains it; see the report of the run."
            return Cause("unknown", excess_s, text)
        return largest

    def _slow_compute(self, newest: Mapping[int, Interval]) -> Cause:
        """Return the rank that computes longest in comparison with its profile."""
        assert self.profile is not None
        profile, ratios = self.profile, dict[int, float]()
        own_s = profile.forward_s + profile.backward_s + profile.update_s
        # The rest of the loop also contains accumulated batches, which intervals count as compute.
        rest_s = [max(0.0, profile.other_s - one.script_s / one.n) for one in newest.values()]
        own_s += min(rest_s)
        scales = profile.scale_of_ranks
        ranks = self.ranks if len(self.ranks) == len(scales) else range(len(scales))
        expected = {r: own_s * scale for r, scale in zip(ranks, scales, strict=True)}
        for rank, interval in newest.items():
            if rank in expected:
                ratios[rank] = interval.own_s / interval.n / expected[rank]
        rank = max(ratios, key=lambda r: (ratios[r] - 1) * expected[r])
        excess_s, usual = (ratios[rank] - 1) * expected[rank], median(ratios.values())
        if len(ratios) > 1 and usual - 1 > 0.5 * (ratios[rank] - 1):
            text = (
                f"All ranks compute {usual:.2g} times as long as when measured. Are their hosts "
                "busy or hot? Another plan would not help."
            )
            return Cause("slow_compute", excess_s, text)
        text = (
            f"Rank {self._name(rank)} computes {ratios[rank]:.2g} times as long as when "
            "measured, and the other ranks wait for it. Is its host busy or hot? Another plan "
            "would not help."
        )
        return Cause("slow_rank", excess_s, text, self.numbers[rank])

    def _slow_script(self, newest: Mapping[int, Interval]) -> Cause:
        """Return the rank whose script takes longest between iterations."""
        assert self.profile is not None
        before_s = self.profile.other_s
        took = {rank: interval.script_s / interval.n for rank, interval in newest.items()}
        rank = max(took, key=lambda r: took[r])
        text = (
            f"The script of rank {self._name(rank)} takes {seconds(took[rank])} between "
            f"iterations, {seconds(before_s)} when measured. Is the data loader slow?"
        )
        return Cause("slow_script", took[rank] - before_s, text, self.numbers[rank])

    def _name(self, rank: int) -> str:
        return f"{self.numbers[rank]} ({self.hosts[rank]})"

    def _slow_link(self, newest: Mapping[int, Interval]) -> Cause:
        """Return the link whose messages take longest in comparison with the prediction.

        The rank whose messages take the least time arrived last and did not wait in them, so its
        times are those of the link.
        """
        assert self.prediction is not None
        assert self.profile is not None
        found = Cause("slow_link", 0.0, "")
        for link in self.profile.links:
            times = [i.links[link.name] for i in newest.values() if link.name in i.links]
            counts = [i.n for i in newest.values() if link.name in i.links]
            busy_s = self.prediction.busy_s.get(link.name, 0.0)
            if not times or not busy_s or not any(sums.messages for sums in times):
                continue
            took_s = min(sums.seconds / n for sums, n in zip(times, counts, strict=True))
            if took_s - busy_s > found.excess_s:
                mbps = wire_mbps(link, self.profile.world_size)
                now_mbps = digits(mbps * busy_s / took_s)
                text = (
                    f"Messages on link {link.name!r} take {took_s / busy_s:.2g} times as long as "
                    f"predicted, as if it carried {now_mbps} Mbit/s and not {digits(mbps)}, for "
                    "all ranks alike. If it stays so, measure a new profile to plan for it."
                )
                found = Cause("slow_link", took_s - busy_s, text)
        return found


def _predict(
    strategy: Strategy, profile: Profile, plan: Plan | None, servers: int
) -> Prediction | None:
    """Return the prediction; None if the strategy cannot be predicted from this profile."""
    if profile.world_size == 1 and profile.inside is None and not servers:  # the only member
        profile = with_free_links(profile)
        plan = plan and replace(plan, bound_s=None)
    try:
        return predict(strategy, profile, servers=max(1, servers), ran=plan)
    except ValueError:
        return None


def wire_mbps(link: Link, ranks: int) -> float:
    """Return the Mbit/s that a rank sends in a large all-reduce by a ring."""
    return 8e-6 * link.bytes_per_s * 2 * (ranks - 1) / ranks


def describe_plan(outlook: Outlook, summary: str) -> str:
    """Return what the plan does, the rates of the links, and the size of the model."""
    profile = outlook.profile
    assert profile is not None
    links = [
        f"{link.name} carries {outlook.mark}{digits(wire_mbps(link, profile.world_size))} Mbit/s"
        + (f", latency {seconds(link.latency_s)}" if link.latency_s else "")
        for link in profile.links
        if profile.world_size > 1
    ]
    total = sum(bucket.size_bytes for bucket in profile.buckets)
    buckets = count_text(len(profile.buckets), "bucket")
    rates = [", ".join(links)] if links else []
    parts = [summary.rstrip("."), *_describe_sets(outlook.prediction), *rates]
    if profile.foreign_share:
        text = describe_foreign(profile.foreign_share)
        parts.append(f"~: {text} while this was measured, so it may be wrong")
    return "; ".join([*parts, f"{size(total)} of parameters in {buckets}"])


def describe_memory(memory: Memory) -> str:
    """Return the predicted memory of a rank, and what the method adds to model and optimizer."""
    added = memory.buffers_bytes + memory.staged_bytes
    text = f"memory of a rank: {size(memory.total_bytes)} without activations (predicted)"
    if not added:
        return text
    copies = digits(added / memory.parameters_bytes)
    return f"{text}, {size(added)} of it for the method ({copies} copies of the parameters)"


def _describe_sets(prediction: Prediction | None) -> list[str]:
    """Return the sets of buckets that the planner has chosen; empty for other plans."""
    plan = None if prediction is None else prediction.plan
    sets = None if plan is None else plan.fact("sets")
    if plan is None or not sets:
        return []
    counts = sorted(len(buckets) for buckets in sets if buckets)
    few = f"{counts[0]}" if counts[0] == counts[-1] else f"{counts[0]} to {counts[-1]}"
    iterations = f"{len(counts)} of {len(sets)} iterations"
    return [f"chosen: averages of {few} of {count_text(plan.buckets, 'bucket')} in {iterations}"]


def describe_prediction(outlook: Outlook) -> tuple[str, dict[str, Any]]:
    """Return the predicted seconds as a line, and its numbers."""
    prediction = outlook.prediction
    assert prediction is not None
    parts = [
        f"predicted {outlook.mark}{seconds(prediction.iteration_s)} per iteration "
        f"({percent(prediction.exposed_s / prediction.iteration_s)} waiting)"
    ]
    numbers: dict[str, Any] = {"predicted_s": prediction.iteration_s}
    if prediction.bound_s is not None:
        parts.append(f"lower bound {outlook.mark}{seconds(prediction.bound_s)}")
        numbers["bound_s"] = prediction.bound_s
    if outlook.baseline is not None and outlook.baseline.strategy != prediction.strategy:
        parts.append(f"{BASELINE} {outlook.mark}{seconds(outlook.baseline.iteration_s)}")
        numbers[f"{BASELINE}_s"] = outlook.baseline.iteration_s
    return ", ".join(parts), numbers
