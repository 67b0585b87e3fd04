"""A vote on how much the gradient has changed (SelSync)."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import inf, nan

from offbeat.core.plan import Apply, Vote
from offbeat.core.rules.vocabulary import Context, Setting, rule, vote


@rule(reads=("grad",), conserves=True)
def measure(context: Context, apply: Apply) -> None:
    """Keep the squared norm of each bucket's gradients, for a vote after they are used up."""
    for bucket in apply.buckets:
        norm = context.squared_norm("grad", range(bucket, bucket + 1))
        context.keep(_measured(bucket), norm)


@vote(
    threshold=Setting("number", least=0),
    smooth=Setting("word", "norm", words=("norm", "change")),
    window=Setting("count", 1, least=1),
    weight=Setting("number", 1.0, least=0, most=1),
)
def changed(context: Context, vote: Vote, buckets: range) -> bool:
    """Whether the squared norm of the gradients has changed by at least the share `threshold`.

    `smooth` says whether the norms or their relative changes are smoothed, over the last `window`
    iterations with `weight` for the newest (1: not at all). Yes without a norm before; yes, too,
    with a norm that is zero or not finite, which nothing later is compared with. Source: Tyagi and
    Swany, SelSync, CLUSTER 2023, Section III.
    """
    norm = _norm(context, buckets)
    course: Course | None = context.recall(vote.name)
    if course is None:
        course = Course.of(vote.arg("window", 1), vote.arg("weight", 1.0))
        context.keep(vote.name, course)
    change = course.change(norm, vote.arg("smooth", "norm"))
    context.show(vote.name, {"norm": norm, "change": change})
    return exceeds_threshold(change, vote.arg("threshold"))


def exceeds_threshold(change: float, threshold: float) -> bool:
    """The say of a worker with this change, nan for an unknown one."""
    return not change < threshold


@dataclass
class Course:
    """What one worker has seen: what is smoothed, and the last value that changes relate to."""

    weight: float
    values: deque[float] = field(default_factory=deque)
    last: float | None = None

    @classmethod
    def of(cls, window: int, weight: float) -> Course:
        """Nothing yet; `window` values will be smoothed."""
        return cls(weight, deque(maxlen=window))

    def change(self, norm: float, smooth: str) -> float:
        """The smoothed change with this norm; nan without one before, and with a norm that is
        zero or not finite, of which nothing is kept."""
        change = self._take(norm, smooth) if 0 < norm < inf else None
        return nan if change is None else change

    def _take(self, norm: float, smooth: str) -> float | None:
        """The smoothed change with this norm; None without one before."""
        before = self.last
        if smooth == "norm":
            self.values.append(norm)
            self.last = weighted_mean(self.values, self.weight)
            return None if before is None else abs(self.last - before) / before
        self.last = norm
        if before is None:
            return None
        self.values.append(abs(norm - before) / before)
        return weighted_mean(self.values, self.weight)


def weighted_mean(values: Iterable[float], weight: float) -> float:
    """Mean of values, oldest first, each with 1 - `weight` times the say of the next."""
    total = weights = 0.0
    for value in values:
        total, weights = total * (1 - weight) + value, weights * (1 - weight) + 1
    return total / weights


def _norm(context: Context, buckets: range) -> float:
    """As `measure` has left it, else of the gradients as they are."""
    measured = [context.recall(_measured(bucket)) for bucket in buckets]
    if None in measured:
        return context.squared_norm("grad", buckets)
    return sum(measured)


def _measured(bucket: int) -> str:
    return f"squared norm of {bucket}"
