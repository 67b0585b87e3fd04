"""Engine: all ranks run their programs until their iterations are done.

Links serve in a fixed order, so no event queue is needed: a group of ranks runs until it waits
for a message that some rank has not released, and then another group runs. Only links that slow
each other down move in the order of time, and only when every group waits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from offbeat.plan import Plan
from offbeat.profile import Profile
from offbeat.sim.fifo import FifoLink
from offbeat.sim.group import Blocked, Group, Times
from offbeat.sim.program import Program, lag_of, queue
from offbeat.sim.ranks import Ranks, alike
from offbeat.sim.shared import Shared, coupled


@dataclass(frozen=True)
class Run:
    """What happened. `ends_s` and `waited_s` are [iteration, row].

    There is one row per rank, or a single one if all ranks are alike.
    """

    groups: tuple[Group, ...]
    links: dict[str, FifoLink]
    ends_s: NDArray[np.float64]
    waited_s: NDArray[np.float64]


def run(
    plans: Sequence[Plan],
    profile: Profile,
    ranks: Ranks,
    *,
    iterations: int,
    seed: int = 0,
    record: range = range(0),
) -> Run:
    """Run one plan on all ranks, or one per rank; ValueError if they can never proceed."""
    if iterations < 1:
        raise ValueError(f"iterations ({iterations}) must be at least 1")
    ranks.fit(profile)
    teams = _teams(plans, profile)
    _agree([team.plan for team in teams])
    links = _links(teams[0].plan, profile, ranks, len(teams))
    shared = Shared([link for link in links.values() if link.coupled], profile)
    horizon = iterations + _overhang(teams, coupled=bool(shared.links))
    groups = _groups(teams, profile, _Factors(profile, ranks, horizon, seed), links, record)
    _finish(groups, shared, iterations, horizon)
    for link in links.values():
        link.issue()  # what nobody has waited for yet
    shared.advance()
    return Run(
        groups,
        links,
        _rows(groups, [group.ends_s[:iterations] for group in groups]),
        _rows(groups, [group.waited_s[:iterations] for group in groups]),
    )


class _Factors:
    """Compute times of ranks relative to the profile's."""

    def __init__(self, profile: Profile, ranks: Ranks, iterations: int, seed: int) -> None:
        self._scale = np.asarray(ranks.compute_scale(profile))
        self._noise: NDArray[np.float64] | None = None
        if ranks.jitter:
            self._noise = ranks.noise(iterations, profile.world_size, seed)

    def alike(self, members: tuple[int, ...]) -> bool:
        """Whether some ranks take the same time for everything; one rank does."""
        same = self._noise is None and alike(self._scale[list(members)].tolist())
        return len(members) == 1 or same

    def of(self, members: tuple[int, ...]) -> Iterator[Any]:
        """One factor per iteration: a float for ranks that are alike, else an array."""
        chosen = list(members)
        first = chosen[0]
        if self._noise is None:
            scale = self._scale[first].item() if self.alike(members) else self._scale[chosen]
            return repeat(scale)
        if len(members) == 1:
            return iter((self._noise[:, first] * self._scale[first]).tolist())
        return iter(self._noise[:, chosen] * self._scale[chosen])


class _Team(NamedTuple):
    """A plan with the ranks that follow it."""

    plan: Plan
    ranks: tuple[int, ...]


def _overhang(teams: Sequence[_Team], *, coupled: bool) -> int:
    """Iterations to run beyond the last one for its messages, each team waiting for the next one:
    until they are released, and on coupled links until what shares their time has run, too."""
    lags = (
        lag_of(moment, team.plan)
        for team in teams
        for t in team.plan.transfers
        for moment in ((t.after, t.before) if coupled else (t.after,))
    )
    return max(lags, default=0) * len(teams)


def _links(plan: Plan, profile: Profile, ranks: Ranks, groups: int) -> dict[str, FifoLink]:
    """The profile's links and the plan's channels."""
    together = coupled(plan.links, profile)
    names = dict.fromkeys([*(link.name for link in profile.links), *plan.links])
    return {
        name: FifoLink(
            name,
            plan,
            profile,
            groups=groups,
            rate=ranks.link_rate(name),
            coupled=name in together,
        )
        for name in names
    }


def _groups(
    teams: Sequence[_Team],
    profile: Profile,
    factors: _Factors,
    links: dict[str, FifoLink],
    record: range,
) -> tuple[Group, ...]:
    return tuple(
        Group(
            ranks=team.ranks,
            program=Program(team.plan, profile),
            factors=factors.of(team.ranks),
            links=links,
            record=record,
            alike=factors.alike(team.ranks),
        )
        for team in teams
    )


def _teams(plans: Sequence[Plan], profile: Profile) -> list[_Team]:
    """Every different plan with the ranks that follow it."""
    if len(plans) == 1:
        return [_Team(plans[0], tuple(range(profile.world_size)))]
    if len(plans) != profile.world_size:
        raise ValueError(
            f"plans ({len(plans)}) must be one for all ranks or one per rank ({profile.world_size})"
        )
    members: dict[str, list[int]] = {}
    for rank, plan in enumerate(plans):
        members.setdefault(plan.digest, []).append(rank)
    return [_Team(plans[chosen[0]], tuple(chosen)) for chosen in members.values()]


def _agree(plans: Sequence[Plan]) -> None:
    """Collectives match by issue order, so every rank must issue the same ones per link."""
    first = plans[0]
    for plan in plans[1:]:
        same = (plan.period, plan.prologue) == (first.period, first.prologue) and all(
            [t.id for t in queue(plan, link, phase)] == [t.id for t in queue(first, link, phase)]
            for phase in first.phases
            for link in {*first.links, *plan.links}
        )
        if not same:
            raise ValueError(
                f"ranks must issue the same transfers in the same order; these differ:\n"
                f"{first}\n{plan}"
            )


def _finish(groups: Sequence[Group], shared: Shared, iterations: int, horizon: int) -> None:
    """Resume the groups in turn until all are done, or nothing moves any more."""
    lives = {group: group.live(horizon) for group in groups}
    blocked: dict[Group, Blocked] = {}
    while lives:
        before, blocked = blocked, {}
        for group, life in list(lives.items()):
            state = next(life, None)
            if state is None:
                del lives[group]
            else:
                blocked[group] = state
        # Nobody releases anything before the first end that somebody waits for: up to there the
        # shared links can run. Before all are blocked, one could still release something earlier.
        if blocked and blocked == before and not shared.advance(_awaited(blocked)):
            group = min(blocked, key=lambda g: blocked[g].iteration)
            if blocked[group].iteration < iterations:
                raise ValueError(_deadlock(group, blocked[group]))
            return  # beyond the iterations that were asked for


def _awaited(blocked: dict[Group, Blocked]) -> set[tuple[str, int]]:
    """Link and number of every message that a group waits for."""
    return {
        (slot.link, group.links[slot.link].number(iteration - slot.lag, slot.position))
        for group, (iteration, slot) in blocked.items()
    }


def _deadlock(group: Group, blocked: Blocked) -> str:
    """What a group waits for, and what that message waits for in turn."""
    plan, slot = group.program.plan, blocked.slot
    awaited_in = blocked.iteration - slot.lag
    awaited = queue(plan, slot.link, awaited_in)[slot.position]
    iteration, head = group.links[slot.link].head()
    if (iteration, head.id) == (awaited_in, awaited.id):
        cause = f"which is released only after {awaited.after}"
    else:
        cause = f"behind {head.id} of iteration {iteration}, released only after {head.after}"
    return (
        f"the plan can never proceed: iteration {blocked.iteration} waits before "
        f"{awaited.before} for {awaited.id}, {cause}; "
        f"change the order of the transfers or the deadline\n{plan.text(mark=[awaited, head])}"
    )


def _rows(groups: Sequence[Group], times: Sequence[list[Times]]) -> NDArray[np.float64]:
    """[iteration, rank], or a single column if all ranks are alike."""
    if len(groups) == 1 and groups[0].alike:
        return np.asarray(times[0], dtype=np.float64)[:, None]
    rows = np.empty((len(times[0]), sum(len(group.ranks) for group in groups)))
    for group, values in zip(groups, times, strict=True):
        for iteration, value in enumerate(values):
            rows[iteration, list(group.ranks)] = value
    return rows
