"""Loss curves: mean over ranks, smoothing, final loss, target loss and time to target."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean, linear_regression, variance

from offbeat.experiments.record.run_directory import Contestant, RankRecord, Repetition, Run

SMOOTH = 10  # length of the trailing mean, in iterations
FINAL_SHARE = 0.1
FINAL_LEAST = 5
END_SHARE, SURE, FALLING = 0.2, 3.0, 0.01
KEPT_UP = 0.8  # least decrease of the loss, as a share of the best one, to set the target


@dataclass(frozen=True)
class Curve:
    """Losses with their iterations and their seconds from the trace's origin."""

    iterations: tuple[int, ...]
    seconds: tuple[float, ...]
    losses: tuple[float, ...]

    def __len__(self) -> int:
        return len(self.iterations)

    def smooth(self, width: int = SMOOTH) -> Curve:
        """Return the trailing mean over `width` points, or over all if there are fewer."""
        width = min(width, len(self))
        if width == 0:
            return self
        last = range(width - 1, len(self))
        means = tuple(fmean(self.losses[i - width + 1 : i + 1]) for i in last)
        return Curve(self.iterations[width - 1 :], self.seconds[width - 1 :], means)

    def reach(self, target: float) -> tuple[int, float] | None:
        """Return (iteration, seconds) of the first loss at or below the target, else None."""
        for iteration, seconds, loss in zip(
            self.iterations, self.seconds, self.losses, strict=True
        ):
            if loss <= target:
                return iteration, seconds
        return None


def rank_mean(rep: Repetition) -> Curve:
    """Return the mean over ranks, at the iterations that all ranks recorded."""
    tables = [{i: (s, x) for i, s, x in record.losses} for record in rep.ranks]
    if not tables:
        return Curve((), (), ())
    shared = sorted(set(tables[0]).intersection(*tables[1:]))
    return Curve(
        tuple(shared),
        tuple(fmean(table[i][0] for table in tables) for i in shared),
        tuple(fmean(table[i][1] for table in tables) for i in shared),
    )


def final_loss(contestant: Contestant) -> float | None:
    """Return the mean loss of the last 10 % of the iterations, at least 5, over all ranks.

    The mean includes all counted repetitions. None without losses or if a loss is not finite.
    """
    finals = [_last_mean(r) for rep in contestant.complete for r in rep.ranks if r.losses]
    value = fmean(finals) if finals else math.nan
    return value if math.isfinite(value) else None


def first_loss(contestant: Contestant) -> float | None:
    """Return the mean loss of the first iterations, as many as `final_loss` takes at the end."""
    firsts = [_first_mean(r) for rep in contestant.complete for r in rep.ranks if r.losses]
    return fmean(firsts) if firsts else None


def is_still_falling(contestant: Contestant) -> bool:
    """Whether the loss was still falling at the end of most repetitions.

    The criterion is a linear regression over the last fifth of the iterations. It must fall by more
    than `FALLING` of the whole decrease and by more than `SURE` standard errors.
    """
    return _holds_for_most(contestant, _is_falling)


def has_risen(contestant: Contestant) -> bool:
    """Whether the final loss exceeds the first loss in most repetitions.

    The difference must exceed `SURE` standard errors and `FALLING` of the first loss.
    """
    return _holds_for_most(contestant, _is_rising)


def is_diverged(contestant: Contestant) -> bool:
    """Whether losses were recorded and are not finite at the end."""
    recorded = any(record.losses for rep in contestant.complete for record in rep.ranks)
    return recorded and final_loss(contestant) is None


def spread_of_final_losses(contestant: Contestant) -> tuple[float, float] | None:
    """Return the lowest and highest final loss of the repetitions; None below two repetitions."""
    finals = [
        fmean(_last_mean(record) for record in rep.ranks if record.losses)
        for rep in contestant.complete
        if any(record.losses for record in rep.ranks)
    ]
    if len(finals) < 2 or not all(map(math.isfinite, finals)):
        return None
    return min(finals), max(finals)


def is_same_in_repetitions(contestant: Contestant) -> bool:
    """Whether two repetitions have the same first loss: the script ignores its seed."""
    begins = [rank_mean(rep).losses[:1] for rep in contestant.complete]
    known = [begin for begin in begins if begin and math.isfinite(begin[0])]
    return len(set(known)) < len(known)


def _holds_for_most(contestant: Contestant, criterion: Callable[[Curve], bool]) -> bool:
    curves = [rank_mean(rep) for rep in contestant.complete]
    return 2 * sum(map(criterion, curves)) > len(curves)


def _is_rising(curve: Curve) -> bool:
    count = max(FINAL_LEAST, math.ceil(FINAL_SHARE * len(curve)))
    first, last = curve.losses[:count], curve.losses[-count:]
    if len(curve) < 2 * count or not all(map(math.isfinite, (*first, *last))):
        return False
    rise, before = fmean(last) - fmean(first), fmean(first)
    error = math.sqrt((variance(first) + variance(last)) / count)
    return rise > SURE * error and rise > FALLING * abs(before)


def _is_falling(curve: Curve) -> bool:
    losses = curve.losses
    count = max(2 * FINAL_LEAST, math.ceil(END_SHARE * len(losses)))
    last = losses[-count:]
    if len(losses) < 2 * count or not all(map(math.isfinite, last)):
        return False
    slope, intercept = linear_regression(range(count), last)
    square = sum((y - intercept - slope * i) ** 2 for i, y in enumerate(last)) / (count - 2)
    error = math.sqrt(12 * square / (count**3 - count))
    whole = fmean(losses[: count // 2]) - fmean(last[count // 2 :])
    return -slope > SURE * error and -slope * (count - 1) > FALLING * whole > 0


def target_loss(run: Run) -> float | None:
    """Return the target loss of a run.

    Returns:
        The target that the user set. Without one, the worst final loss of the contestants whose
        loss decreased at least `KEPT_UP` times as much as the best one's. The trailing mean lags
        behind a falling loss, so the target is raised to the lowest smoothed loss of these
        repetitions, and all of them reach it. None if no loss decreased or compute was emulated.
    """
    if run.target_loss is not None:
        return run.target_loss
    if run.emulated or run.target is not None:
        return None
    falls = {c.label: _loss_decrease(c) for c in run.contestants}
    enough = KEPT_UP * max(falls.values(), default=0.0)
    kept_up = [c for c in run.contestants if falls[c.label] >= enough > 0]
    return max(map(_reachable_loss, kept_up), default=None)


def _loss_decrease(contestant: Contestant) -> float:
    """Return the decrease of the loss; 0 if the loss rose or is not finite at the end."""
    first, final = first_loss(contestant), final_loss(contestant)
    return 0.0 if first is None or final is None else max(0.0, first - final)


def _reachable_loss(contestant: Contestant) -> float:
    lows = [min(rank_mean(rep).smooth().losses, default=-math.inf) for rep in contestant.complete]
    final = final_loss(contestant)
    return max([low for low in lows if math.isfinite(low)] + ([] if final is None else [final]))


def _mean_length(record: RankRecord) -> int:
    return max(FINAL_LEAST, math.ceil(FINAL_SHARE * len(record.losses)))


def _last_mean(record: RankRecord) -> float:
    return fmean(loss for _, _, loss in record.losses[-_mean_length(record) :])


def _first_mean(record: RankRecord) -> float:
    return fmean(loss for _, _, loss in record.losses[: _mean_length(record)])
