"""Vote on the relative change of the gradient norm (SelSync)."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from math import inf, nan

from offbeat.core.plan import Apply, Vote
from offbeat.core.rules.vocabulary import Context, Setting, rule, vote


@rule(reads=("grad",), conserves=True)
def measure(context: Context, apply: Apply) -> None:
    """Store the squared norm of each bucket's gradients for a vote after the optimizer has used
    them."""
    for bucket in apply.buckets:
        norm = context.squared_norm("grad", range(bucket, bucket + 1))
        context.keep(_norm_key(bucket), norm)


@vote(
    threshold=Setting("number", least=0),
    smooth=Setting("word", "norm", words=("norm", "change")),
    window=Setting("count", 1, least=1),
    weight=Setting("number", 1.0, least=0, most=1),
)
def changed(context: Context, vote: Vote, buckets: range) -> bool:
    """Vote yes if the squared norm of the gradients has changed by at least the share `threshold`.

    The setting `smooth` selects what is smoothed: the norms ("norm") or their relative changes
    ("change"). The mean is over the last `window` iterations, with `weight` for the newest one (1:
    no smoothing). The vote is yes without a previous norm. It is also yes if the norm is zero or
    not finite; later norms are not compared with such a norm.

    Source: Tyagi and Swany, SelSync, CLUSTER 2023, Section III.
    """
    norm = _norm(context, buckets)
    course: Course | None = context.recall(vote.name)
    if course is None:
        course = Course(vote.arg("weight", 1.0), deque(maxlen=vote.arg("window", 1)))
        context.keep(vote.name, course)
    change = course.change(norm, vote.arg("smooth", "norm"))
    context.show(vote.name, {"norm": norm, "change": change})
    return not change < vote.arg("threshold")  # also if the change is unknown (nan)


@dataclass
class Course:
    """History of the gradient norms of one worker.

    Attributes:
        weight: weight of the newest value in the mean.
        values: values that are averaged, oldest first.
        last: value that the next change refers to; None at the start.
    """

    weight: float
    values: deque[float]
    last: float | None = None

    def change(self, norm: float, smooth: str) -> float:
        """Add a norm and return the smoothed change; nan without a previous norm.

        A norm that is zero or not finite is not stored, and its change is nan.
        """
        if not 0 < norm < inf:
            return nan
        before = self.last
        if smooth == "norm":
            self.values.append(norm)
            self.last = weighted_mean(self.values, self.weight)
            return nan if before is None else abs(self.last - before) / before
        self.last = norm
        if before is None:
            return nan
        self.values.append(abs(norm - before) / before)
        return weighted_mean(self.values, self.weight)


def weighted_mean(values: Iterable[float], weight: float) -> float:
    """Return the mean of values, oldest first. The weight of each is `1 - weight` times that of
    the next."""
    total = weights = 0.0
    for value in values:
        total, weights = total * (1 - weight) + value, weights * (1 - weight) + 1
    return total / weights


def _norm(context: Context, buckets: range) -> float:
    """Return the squared norm that `measure` has stored, otherwise that of the current
    gradients."""
    measured = [context.recall(_norm_key(bucket)) for bucket in buckets]
    if any(norm is None for norm in measured):
        return float(context.squared_norm("grad", buckets))
    return float(sum(measured))


def _norm_key(bucket: int) -> str:
    return f"squared norm of {bucket}"
