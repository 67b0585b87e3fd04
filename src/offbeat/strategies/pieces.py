"""Averages of pieces of the model in backward: their messages, their seconds, their plan, and the
equations that it must compute."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from offbeat.core.plan import Apply, Fact, Moment, Payload, Phases, Plan, Transfer, local
from offbeat.core.profile import Profile
from offbeat.strategies.averaging import Average, kinds_of
from offbeat.strategies.bsp import averages
from offbeat.strategies.equations import Array, Equations, StatePolicy, World, average_piece
from offbeat.strategies.outer_optimizer import Outer

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


def partial(
    sets: Sequence[Collection[Payload]],
    average: Average,
    state: StatePolicy = "local",
    clip: Clip | None = None,
    outer: Outer | None = None,
) -> Equations:
    """Return the equations of partial averaging: the pieces in `sets[r mod H]` in iteration r.

    The other pieces stay local. This is Algorithm 1 of DreamDDP (Tang et al., 2025), whose line
    numbers are those in the code; `average="before_update"` moves lines 5-7 before line 4.

    Args:
        sets: pieces to average in each iteration of a period of H iterations.
        average: "after_update" for `w = mean_k(w_k - rate g_k)`, "before_update" for `w =
            mean_k(w_k) - rate g_k`.
        state: treatment of the optimizer's state at an average: "local", "averaged" or "reset".
        clip: clipping of the gradients before the step; None for none.
        outer: optimizer that steps on each average; None for none.
    """

    def synchronize(world: World, iteration: int) -> None:
        for piece in sets[iteration % len(sets)]:  # 5-6
            average_piece(world, piece, state)  # 7
            if outer is not None:
                outer(world, piece)

    def advance(world: World, iteration: int) -> None:  # 1-2: iteration r of all workers
        _compute_gradients(world, iteration, clip, outer)  # 3
        if average == "before_update":
            synchronize(world, iteration)
        world.step()  # 4; 8-9: the other layers keep their local update
        if average == "after_update":
            synchronize(world, iteration)
        world.end()

    return advance


def delayed(
    sets: Sequence[Collection[Payload]],
    delay: int,
    average: Average,
    clip: Clip | None = None,
    outer: Outer | None = None,
    gain: float = 1.0,
) -> Equations:
    """Return the equations of delayed averaging.

    In iteration r, snapshots s of the pieces in `sets[r mod H]` are taken. After the step of
    iteration r + delay, `w += gain (mean_k(s_k) - s_k)`.

    Args:
        sets: pieces to average in each iteration of a period of H iterations. With `outer`, the
            first set belongs to iteration `delay`.
        delay: iterations from a snapshot to its average.
        average: "after_update" for snapshots after the local step, "before_update" for
            snapshots before it.
        clip: clipping of the gradients before the step; None for none.
        outer: optimizer that steps on the average of the snapshots; None for none.
        gain: share of the difference that is corrected; counts without `outer`.
    """
    taken: list[Any] = []

    def correct(w: Array, snapshot: Array) -> Array:
        return w + gain * (snapshot.mean(0) - snapshot)

    def averaged_pieces(iteration: int) -> Collection[Payload]:
        first = 0 if outer is None else delay
        return sets[(iteration - first) % len(sets)] if iteration >= 0 else ()

    def advance(world: World, iteration: int) -> None:
        _compute_gradients(world, iteration, clip, outer)
        if average == "before_update":
            taken.append(world.keep())
        world.step()
        if average == "after_update":
            taken.append(world.keep())
        then = iteration - delay
        for piece in averaged_pieces(then):
            if outer is None and gain < 1:
                world.change(piece, correct, taken[then])
            elif outer is None:
                world.shift(piece, taken[then])
            else:
                outer.land(world, piece, taken[then])
        world.end()

    return advance


@dataclass
class Clip:
    """Clipping: `g_k` times `norm / (n_k + 1e-6)` if that factor is below 1.

    `n_k` is the norm of `g_k`.

    Attributes:
        norm: largest norm.
        buckets: number of buckets for clipping with the norm of the previous iteration. In the
            first iteration bucket b uses the norm of buckets 0..b. None for the norm of this
            iteration.
    """

    norm: float
    buckets: int | None = None

    def __post_init__(self) -> None:
        self._last: list[float] = []

    def __call__(self, world: World) -> None:
        own, before = list(world.norms(None)), self._last
        self._last = own
        if self.buckets is None:
            world.scale(None, self._factors(own))
            return
        runs = [range(b + 1) for b in range(self.buckets)]
        so_far = [list(world.norms(Payload("grad", run))) for run in runs]
        for b, known in enumerate(so_far):
            world.scale(Payload("grad", range(b, b + 1)), self._factors(before or known))

    def _factors(self, squared_norms: Sequence[float]) -> list[float]:
        return [min(1.0, self.norm / (float(n) ** 0.5 + 1e-6)) for n in squared_norms]


def layer_sets(plan: Plan, buffer: str = "param") -> list[list[Payload]]:
    """Return the pieces that a plan averages in each iteration of its period.

    Args:
        plan: plan.
        buffer: buffer of the transfers to select.
    """
    return [
        [t.payload for t in plan.transfers if t.payload.buffer == buffer and phase in t.phases]
        for phase in plan.cycle
    ]


def _compute_gradients(
    world: World, iteration: int, clip: Clip | None, outer: Outer | None
) -> None:
    if outer is not None:
        outer.start(world)
    world.gradients(iteration)
    if clip is not None:
        clip(world)
