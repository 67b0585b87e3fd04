"""Predictions of a comparison: files of each contestant, outcomes of votes, the user's device."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from offbeat.core import sim
from offbeat.core.guards.suitable_strategy import strategy_that_runs
from offbeat.core.plan import Plan
from offbeat.core.profile import Profile
from offbeat.core.sim import Votes
from offbeat.core.sim.ranks import Ranks
from offbeat.core.sim.trace import whole_periods
from offbeat.core.strategy.interface import Planned, Strategy, planned
from offbeat.experiments.comparison import Contestant
from offbeat.experiments.device_speed import Compute, DeviceSpeed
from offbeat.experiments.new_run import SKIP, write_json
from offbeat.jobs.record_lines import rank_file, read_rank


def predict(
    strategy: Strategy,
    profile: Profile,
    directory: Path,
    plan: Plan | None = None,
    votes: Votes | None = None,
    servers: int = 0,
    ranks: Ranks | None = None,
    iterations: int | None = None,
) -> float:
    """Write plan.json and predicted.json of a contestant.

    Args:
        strategy: the contestant's strategy.
        profile: profile of the model and its network.
        directory: folder of the contestant.
        plan: the executed plan; None plans anew, with the variant that the script of the profile
            needs. Strategies with servers and gossip have no plan.
        votes: outcomes of the strategy's votes, by name; None predicts a yes in each vote.
        servers: number of servers.
        ranks: rates of the ranks, for strategies without a plan; None: the rates of the profile.
        iterations: number of iterations that have run with servers; None predicts a long job.

    Returns:
        Predicted seconds per iteration.

    Raises:
        ValueError: the strategy has no plan for this profile.
    """
    skip = 0 if iterations is None else SKIP
    if isinstance(strategy, Planned):
        if plan is None:
            with suppress(ValueError):  # other arguments may let the strategy run nevertheless
                strategy = strategy_that_runs(strategy, profile)
            plan = planned(strategy).plan(profile)
        if known := [len(v) for v in (votes or {}).values() if not isinstance(v, (int, float))]:
            skip = whole_periods(SKIP, plan.period, min(known))
    prediction = sim.predict(
        strategy,
        profile,
        iterations=iterations,
        ranks=ranks,
        votes=votes,
        servers=servers,
        skip=skip,
        ran=plan,
    )
    directory.mkdir(parents=True, exist_ok=True)
    if plan is not None:
        write_json(directory / "plan.json", plan.to_dict())
    prediction.trace.save(directory / "predicted.json")
    return prediction.iteration_s


def device_record(
    contestants: Iterable[Contestant], device: DeviceSpeed, profile: Profile, servers: int
) -> dict[str, Any]:
    """Return the record of the user's device with predicted seconds per iteration by label.

    Each contestant is planned anew for the device. The prediction is None if there is no plan
    for the device.
    """
    there, seconds = device.apply(profile), dict[str, float | None]()
    for contestant in contestants:
        try:
            strategy = strategy_that_runs(contestant.strategy, there)
            found = sim.predict(strategy, there, servers=max(servers, 1))
        except ValueError:
            seconds[contestant.label] = None
        else:
            seconds[contestant.label] = found.iteration_s
    return {**Compute.of(profile, device).record(), "seconds": seconds}


def outcomes_of(path: Path) -> dict[str, list[bool]]:
    """Return the outcome of each vote in each iteration, by name of the vote, from the record of a
    rank. Raise OSError or ValueError if it cannot be read."""
    by_vote = read_rank(path).iterations.votes.get("by_vote", {})
    return {name: [bool(yes) for yes in columns["yes"]] for name, columns in by_vote.items()}


def vote_outcomes(repetition: Path) -> dict[str, list[bool]]:
    """Return the vote outcomes of a repetition from the record of rank 0."""
    with suppress(FileNotFoundError):
        return outcomes_of(rank_file(repetition, 0))
    return {}
