"""Averages of pieces of the model in backward: their messages, their seconds, and their plan."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from offbeat.core.plan import Apply, Fact, Moment, Payload, Phases, Plan, Transfer, local
from offbeat.core.profile import Profile
from offbeat.core.strategy.interface import StatePolicy
from offbeat.strategies.averaging import Average, kinds_of
from offbeat.strategies.bsp import averages

Sets = tuple[tuple[int, ...], ...]  # pieces that each iteration of a period sends


@dataclass(frozen=True)
class Piece:
    """Unit that a partial synchronization averages: a run of buckets, or a slice of it.

    Attributes:
        buckets: neighbouring buckets, by default one.
        part: index of the slice.
        parts: number of equal slices of the run.
    """

    buckets: range
    part: int = 0
    parts: int = 1

    def payloads(self, state: StatePolicy) -> list[Payload]:
        """Return the payloads of its messages: parameters, and optimizer state if that is
        averaged."""
        return [Payload(kind, self.buckets, self.part, self.parts) for kind in kinds_of(state)]

    def averages(self, profile: Profile, state: StatePolicy, **fields: Any) -> list[Transfer]:
        """Return the transfers of its messages, released by its last gradient. `fields` are those
        of `transfer`."""
        after, part, parts = Moment("grad", self.buckets[-1]), self.part, self.parts
        return averages(
            profile, kinds_of(state), self.buckets, after=after, part=part, parts=parts, **fields
        )

    def seconds(self, profile: Profile, state: StatePolicy) -> float:
        """Return the seconds of its messages on the default link."""
        link = profile.default_link.name
        return sum(profile.message_s(payload, link) for payload in self.payloads(state))


def whole_buckets(buckets: int) -> list[Piece]:
    """Return one piece per bucket."""
    return [Piece(range(bucket, bucket + 1)) for bucket in range(buckets)]


def piece_times(profile: Profile, state: StatePolicy, parts: int = 1) -> list[float]:
    """Return the seconds of each bucket's messages on the default link, each alone, or of one of
    `parts` equal slices."""
    link = profile.default_link.name
    kinds = [profile.bucket_message_s(link, kind, parts) for kind in kinds_of(state)]
    return [sum(seconds) for seconds in zip(*kinds, strict=True)]


def partial_plan(
    name: str,
    profile: Profile,
    pieces: Sequence[Piece],
    sends: Sets,
    average: Average,
    state: StatePolicy,
    *,
    fill: Sets = (),
    late: bool = False,
) -> Plan:
    """Return the plan that averages pieces in backward.

    Args:
        name: name of the strategy.
        profile: measured facts of model and network.
        pieces: parts of the model.
        sends: indices of the pieces that each iteration of the period averages, in sending order.
        average: time of an average relative to the update.
        state: treatment of the optimizer's state at an average.
        fill: those of an iteration's pieces that another iteration averages, too.
        late: whether averages are due at the next forward of their buckets, not at the end.
    """
    size, early = len(profile.buckets), average == "after_update"
    end = Moment("end" if early else "step")
    transfers: list[Transfer] = []
    applies: list[Apply] = []
    for piece, phases in _messages(pieces, sends):
        due = Moment("forward", piece.buckets[-1], 1) if late else end
        transfers += piece.averages(profile, state, before=due, phases=phases)
        if state == "reset":
            applies.append(Apply("reset", piece.buckets, Moment("end") if early else due, phases))
    update = Moment("grad") if early else Moment("forward", lag=1) if late else end
    applies.append(local(size, update, range(len(sends))))
    fill = fill or ((),) * len(sends)
    own = tuple(tuple(sorted({*s} - {*more})) for s, more in zip(sends, fill, strict=True))
    return Plan(
        name,
        size,
        tuple(transfers),
        tuple(applies),
        period=len(sends),
        facts=layer_set_facts(own, fill, pieces),
    )


def _messages(pieces: Sequence[Piece], sends: Sets) -> Iterator[tuple[Piece, Phases]]:
    """Yield pieces with the iterations that send them, in the order of the link.

    In backward order one rule serves all iterations of a piece, otherwise each has its own.
    """
    if all(a < b for order in sends for a, b in pairwise(order)):
        active: dict[int, tuple[int, ...]] = {}
        for h, order in enumerate(sends):
            for i in order:
                active[i] = (*active.get(i, ()), h)
        shared = {phases: Phases(phases) for phases in set(active.values())}
        yield from ((pieces[i], shared[active[i]]) for i in sorted(active))
    else:
        for h, order in enumerate(sends):
            phases = Phases((h,))
            yield from ((pieces[i], phases) for i in order)


def layer_set_facts(sets: Sets, fill: Sets, pieces: Sequence[Piece]) -> tuple[Fact, ...]:
    """Return facts about the sets: buckets by iteration."""
    return (
        Fact("sets", _buckets(sets, pieces), "buckets averaged in each iteration"),
        Fact("fill", _buckets(fill, pieces), "further ones, where they cost no time"),
    )


def _buckets(sets: Sets, pieces: Sequence[Piece]) -> list[list[int]]:
    return [sorted({b for i in members for b in pieces[i].buckets}) for members in sets]
