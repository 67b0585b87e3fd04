"""Simulated time of a rehearsal: the plans that ran, with the outcomes of their votes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from offbeat.core.profile import Profile
from offbeat.core.sim import Prediction, predict, simulate
from offbeat.core.strategy.interface import Strategy
from offbeat.rehearsal.replica import Course

Ballots = Mapping[str, Sequence[Sequence[int] | None]]
"""Ranks that voted yes, by vote and iteration; None in an iteration without the vote."""


def iteration_ends(
    courses: Sequence[Course],
    ballots: Ballots,
    strategy: Strategy,
    profile: Profile,
    iterations: int,
    *,
    seed: int = 0,
) -> tuple[float, ...]:
    """Return the simulated end of each iteration on the slowest rank, in seconds.

    Args:
        courses: plans in the order of their first iterations.
        ballots: votes of the rehearsal.
        strategy: strategy of the rehearsal.
        profile: profile of the job.
        iterations: number of iterations.
        seed: seed of the jitter.
    """
    if not courses or courses[0].plan is None:
        trace = predict(strategy, profile, iterations=iterations, seed=seed).trace
        return tuple(max(ends) for ends in zip(*trace.ends_s, strict=True))[:iterations]
    ends_s: list[float] = []
    for course, following in pairwise([*courses, None]):
        assert course is not None
        assert course.plan is not None
        stop = iterations if following is None else min(following.first, iterations)
        if stop <= course.first:
            continue
        votes = outcomes(course, ballots, stop)
        trace = simulate(
            course.plan,
            profile,
            iterations=stop - course.first,
            seed=seed,
            record=0,
            votes=votes,
        )
        start_s = ends_s[-1] if ends_s else 0.0
        ends_s += [start_s + max(ends) for ends in zip(*trace.ends_s, strict=True)]
    return tuple(ends_s)


def predict_run(
    courses: Sequence[Course],
    ballots: Ballots,
    strategy: Strategy,
    profile: Profile,
    iterations: int,
    *,
    seed: int = 0,
) -> Prediction:
    """Return the prediction of the last plan of a rehearsal, with its votes."""
    if not courses or courses[-1].plan is None:
        return predict(strategy, profile, seed=seed)
    votes = outcomes(courses[-1], ballots, iterations)
    return predict(strategy, profile, seed=seed, votes=votes or None, ran=courses[-1].plan)


def outcomes(course: Course, ballots: Ballots, stop: int) -> dict[str, list[bool]]:
    """Return the outcome of each vote of a plan in its iterations before `stop`."""
    assert course.plan is not None
    return {
        vote.name: [bool(yes) for yes in ballots[vote.name][course.first : stop]]
        for vote in course.plan.votes
    }
