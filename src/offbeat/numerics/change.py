"""A vote on how much the gradient has changed (SelSync)."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import inf, nan

from offbeat.numerics.base import Context, Setting, takes
from offbeat.plan import Apply, Vote


@takes()
def measure(context: Context, apply: Apply) -> None:
    """Keep the squared norm of each bucket's gradients, for a vote after they are used up."""
    for bucket in apply.buckets:
        norm = context.squared_norm("grad", range(bucket, bucket + 1))
        context.keep(_measured(bucket), norm)


@takes(
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
    course: _Course | None = context.recall(vote.name)
    if course is None:
        course = _Course(vote.arg("weight", 1.0), deque(maxlen=vote.arg("window", 1)))
        context.keep(vote.name, course)
    change = course.take(norm, vote.arg("smooth", "norm")) if 0 < norm < inf else None
    context.show(vote.name, {"norm": norm, "change": nan if change is None else change})
    return change is None or change >= vote.arg("threshold")


@dataclass
class _Course:
    """What one worker has seen: what is smoothed, and the last value that changes relate to."""

    weight: float
    values: deque[float] = field(default_factory=deque)
    last: float | None = None

    def take(self, norm: float, smooth: str) -> float | None:
        """The smoothed change with this norm; None without one before."""
        before = self.last
        if smooth == "norm":
            self.values.append(norm)
            self.last = smoothed(self.values, self.weight)
            return None if before is None else abs(self.last - before) / before
        self.last = norm
        if before is None:
            return None
        self.values.append(abs(norm - before) / before)
        return smoothed(self.values, self.weight)


def smoothed(values: Iterable[float], weight: float) -> float:
    """Mean of values, oldest first, each with 1 - `weight` times the say of the next."""
    total = says = 0.0
    for value in values:
        total, says = total * (1 - weight) + value, says * (1 - weight) + 1
    return total / says


def _norm(context: Context, buckets: range) -> float:
    """As `measure` has left it, else of the gradients as they are."""
    measured = [context.recall(_measured(bucket)) for bucket in buckets]
    if None in measured:
        return context.squared_norm("grad", buckets)
    return sum(measured)


def _measured(bucket: int) -> str:
    return f"squared norm of {bucket}"
