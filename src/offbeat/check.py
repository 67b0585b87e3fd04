"""Checks of plans: what is wrong with a plan, said before anything runs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise

from offbeat.plan import Moment, Payload, Plan, Transfer, base_link, format_phases
from offbeat.profile import Profile


@dataclass(frozen=True, slots=True)
class Problem:
    """One fault of a plan. `transfers` are those at fault; str() prints the plan with arrows."""

    message: str
    plan: Plan
    transfers: tuple[Transfer, ...] = ()

    def __str__(self) -> str:
        return f"{self.message}\n{self.plan.text(mark=self.transfers)}"


def check(plans: Sequence[Plan], profile: Profile | None = None) -> list[Problem]:
    """Faults of the plans of all ranks (one plan if all ranks share it), in order of gravity."""
    problems: list[Problem] = []
    for plan in dict.fromkeys(map(id, plans)):
        problems += _check_one(next(p for p in plans if id(p) == plan), profile)
    return problems + list(_orders_that_disagree(plans))


def raise_if_wrong(plans: Sequence[Plan], profile: Profile | None = None) -> None:
    """ValueError with the first problem, if there is one."""
    problems = check(plans, profile)
    if problems:
        more = f"\n(and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise ValueError(f"the plan is wrong: {problems[0]}{more}")


def _check_one(plan: Plan, profile: Profile | None) -> list[Problem]:
    shape = list(_shape(plan, profile))
    if shape:
        return shape  # positions below are meaningless while names and numbers are wrong
    return [
        *_deadlines(plan),
        *_stuck(plan),
        *_overwritten(plan),
        *_halves(plan),
        *_moved_twice(plan),
        *_never_moved(plan),
        *_generations(plan),
    ]


def _shape(plan: Plan, profile: Profile | None) -> Iterator[Problem]:
    """Names and numbers: releases that never fire, links and buckets that do not exist."""
    if profile is not None and plan.buckets != len(profile.buckets):
        yield Problem(
            f"the plan has {plan.buckets} buckets, the profile {len(profile.buckets)}; "
            "plan again from this profile",
            plan,
        )
    links = None if profile is None else [link.name for link in profile.links]
    for t in plan.transfers:
        run = t.payload.buckets
        if not 0 <= run.start < run.stop <= plan.buckets or run.step != 1:
            yield Problem(
                f"{t.id} must move a run of buckets within 0..{plan.buckets - 1}", plan, (t,)
            )
        last = t.payload.part + t.payload.width
        if not 0 <= t.payload.part < last <= t.payload.parts:
            yield Problem(f"{t.id} must be one of its {t.payload.parts} parts", plan, (t,))
        for role, moment in (("release", t.after), ("deadline", t.before)):
            if moment.bucket is not None and not 0 <= moment.bucket < plan.buckets:
                yield Problem(
                    f"{role} {moment} of {t.id} never fires: there are {plan.buckets} buckets",
                    plan,
                    (t,),
                )
        lost = sorted(t.phases - set(plan.phases))
        if lost or not t.phases:
            yield Problem(
                f"{t.id} never fires in phases {format_phases(lost)}: the plan has "
                f"the phases 0..{len(plan.phases) - 1}",
                plan,
                (t,),
            )
        if links is not None and base_link(t.link) not in links:
            yield Problem(
                f"link {t.link!r} of {t.id} must be one of {', '.join(links)}", plan, (t,)
            )


def _position(moment: Moment, plan: Plan, *, iterations: int = 0) -> int:
    """Place of a moment, so many iterations later, in one worker's order of events."""
    size = plan.buckets
    # The whole model's first forward is that of its last bucket; so is its last gradient and, but
    # for updates on arrival, its last update.
    whole = 0 if moment.point == "updated" and plan.updates == "on_arrival" else size - 1
    b = whole if moment.bucket is None else moment.bucket
    iteration = 5 * size + 2
    forward = 2 * (size - 1 - b)
    updated = {
        "at_step": 4 * size + 1 + b,
        "in_backward": 2 * size + 2 * b + 1,
        "on_arrival": iteration + forward + 1,
    }[plan.updates]
    place = {
        "forward": forward,
        "grad": 2 * size + 2 * b,
        "updated": updated,
        "step": 4 * size,
        "end": 5 * size + 1,
    }[moment.point]
    return place + (moment.lag + iterations) * iteration


def _deadlines(plan: Plan) -> Iterator[Problem]:
    for t in plan.transfers:
        if _position(t.before, plan) <= _position(t.after, plan):
            yield Problem(
                f"deadline {t.before} of {t.id} comes before its release {t.after}", plan, (t,)
            )


def _stuck(plan: Plan) -> Iterator[Problem]:
    """Deadlines that come before the release of a message ahead on the link."""
    most_lag = 1 + max((t.after.lag for t in plan.transfers), default=0)
    last: dict[str, tuple[int, Transfer]] = {}  # per link the latest release so far
    found: set[tuple[Transfer, Transfer]] = set()
    for iteration in range(plan.prologue + plan.period + most_lag):
        for t in plan.at(iteration):
            released = _position(t.after, plan, iterations=iteration)
            latest, first = last.get(t.link, (released, t))
            stuck = first != t and _position(t.before, plan, iterations=iteration) <= latest
            if stuck and (first, t) not in found:
                found.add((first, t))
                yield Problem(
                    f"{t.id} can never meet its deadline {t.before}: {first.id} goes first on "
                    f"{t.link} and is released only after {first.after}",
                    plan,
                    (first, t),
                )
            last[t.link] = (released, t) if released > latest else (latest, first)


def _overwritten(plan: Plan) -> Iterator[Problem]:
    """Buffers that compute writes, or reads half-way, while their transfer is in flight."""
    for t in plan.transfers:
        for bucket in t.payload.buckets:
            writer = _writer(t, bucket, plan)
            if writer is not None:
                yield Problem(
                    f"{t.id} is overwritten in flight: {writer} of bucket {bucket} comes "
                    f"between its release {t.after} and its deadline {t.before}",
                    plan,
                    (t,),
                )
                break


def _writer(t: Transfer, bucket: int, plan: Plan) -> Moment | None:
    """The moment of compute that collides with a transfer's flight, if there is one."""
    start, end = _position(t.after, plan), _position(t.before, plan)
    lags = range(t.before.lag + 2)
    updated = [Moment("updated", bucket, lag) for lag in lags]
    grads = [Moment("grad", bucket, lag) for lag in lags]
    if t.payload.kind == "grad":
        if t.payload.age:
            return None  # closed long ago; _generations looks at its deadline
        # Released too early the gradient is incomplete; the update must find it averaged.
        if start < _position(grads[0], plan):
            return grads[0]
        if plan.closes is not None:
            return None  # what is added later belongs to the next generation
        return next((m for m in updated + grads[1:] if start <= _position(m, plan) < end), None)
    forwards = [Moment("forward", bucket, lag) for lag in lags]
    touching = updated + (forwards + grads if t.payload.kind == "param" else [])
    # A transfer released by the very moment that wrote the buffer follows it.
    return next((m for m in touching if start < _position(m, plan) < end), None)


def _halves(plan: Plan) -> Iterator[Problem]:
    """reduce_scatter and all_gather come in pairs, one after the other."""
    for phase in plan.phases:
        halves: dict[Payload, dict[str, Transfer]] = {}
        for t in plan.at(phase):
            if t.verb != "mean":
                halves.setdefault(t.payload, {})[t.verb] = t
        for both in halves.values():
            if len(both) < 2:
                (alone,) = both.values()
                yield Problem(
                    f"{alone.id} must come with its other half in the same iteration",
                    plan,
                    (alone,),
                )
                continue
            first, second = both["reduce_scatter"], both["all_gather"]
            if _position(second.after, plan) < _position(first.before, plan):
                yield Problem(
                    f"{second.id} is released {second.after}, before its first half is due "
                    f"({first.before})",
                    plan,
                    (first, second),
                )


def _moved_twice(plan: Plan) -> Iterator[Problem]:
    if plan.closes is not None:
        return  # _generations
    for phase in plan.phases:
        for bucket, pieces in _pieces_by_bucket(plan.at(phase), ("grad", "param", "state")):
            for pair in _overlapping(pieces):
                a, b = sorted(pair, key=plan.transfers.index)
                phases = a.phases & b.phases
                if phase == min(phases) and bucket == max(
                    a.payload.buckets.start, b.payload.buckets.start
                ):
                    yield Problem(
                        f"bucket {bucket} is moved twice in phases {format_phases(phases)}: "
                        f"by {a.id} and {b.id}",
                        plan,
                        (a, b),
                    )


def _never_moved(plan: Plan) -> Iterator[Problem]:
    """Buckets of which some element is never averaged; slices count as their share."""
    if plan.closes is not None:
        return  # _generations
    cycle = set(range(plan.prologue, plan.prologue + plan.period))
    moving = [t for t in plan.transfers if t.phases & cycle]
    moved = dict(_pieces_by_bucket(moving, ("grad", "param"), together=True))
    for bucket in range(plan.buckets):
        if not _whole(moved.get(bucket, [])):
            what = "only moved in part" if bucket in moved else "never moved"
            yield Problem(f"bucket {bucket} is {what} in the period", plan)


def _generations(plan: Plan) -> Iterator[Problem]:
    """Merged gradients: every element of a generation once, complete, and before its update."""
    if plan.closes is None:
        return
    if not plan.closes & set(range(plan.prologue, plan.prologue + plan.period)):
        yield Problem("no generation closes in the period, so nothing is ever applied", plan)
        return
    if plan.updates != "at_step":
        yield Problem(f"merged gradients need updates at_step, not {plan.updates}", plan)
    carried: dict[range, list[Transfer]] = {}
    last = plan.prologue + 3 * plan.period
    for iteration in range(last):
        for t in plan.at(iteration):
            found = _generation_of(t, iteration, plan)
            if isinstance(found, Problem):
                yield found
                return
            carried.setdefault(found, []).append(t)
    for generation, transfers in carried.items():
        applied = plan.generation(generation.stop).stop - 1
        if applied >= last:
            continue  # its last messages lie beyond the iterations looked at
        for bucket, pieces in _pieces_by_bucket(transfers, ("grad",)):
            for a, b in _overlapping(pieces):
                yield Problem(f"bucket {bucket} is moved twice: by {a.id} and {b.id}", plan, (a, b))
                return
        moved = dict(_pieces_by_bucket(transfers, ("grad",)))
        for bucket in range(plan.buckets):
            if not _whole(moved.get(bucket, [])):
                yield Problem(
                    f"bucket {bucket} is not moved whole in the generation of iterations "
                    f"{generation.start}..{generation.stop - 1}",
                    plan,
                )
                return


def _generation_of(t: Transfer, iteration: int, plan: Plan) -> range | Problem:
    """The generation that a message carries, or what is wrong with it."""
    if t.payload.kind != "grad" or t.verb != "mean" or t.payload.age > 1:
        return Problem(f"{t.id} must be a mean of gradients of age 0 or 1", plan, (t,))
    generation = plan.generation(iteration, t.payload.age)
    if not generation:
        return Problem(f"{t.id} has no generation to carry in iteration {iteration}", plan, (t,))
    if t.payload.age == 0 and generation.stop != iteration + 1:
        return Problem(
            f"{t.id} leaves in iteration {iteration}, but its generation is added to until "
            f"{generation.stop - 1}",
            plan,
            (t,),
        )
    applied = plan.generation(generation.stop).stop - 1
    if t.before.point != "step" or iteration + t.before.lag != applied:
        return Problem(
            f"{t.id} of iteration {iteration} is due {t.before}, but its generation is applied at "
            f"the step of iteration {applied}",
            plan,
            (t,),
        )
    return generation


Share = tuple[Fraction, Fraction, Transfer]


def _pieces_by_bucket(
    transfers: Iterable[Transfer], kinds: tuple[str, ...], *, together: bool = False
) -> Iterator[tuple[int, list[Share]]]:
    """Per bucket, and per kind unless `together`, which shares of it are moved, in order."""
    pieces: dict[tuple[str, int], list[Share]] = {}
    for t in transfers:
        payload = t.payload
        if payload.kind in kinds and t.verb != "reduce_scatter":
            share = (
                Fraction(payload.part, payload.parts),
                Fraction(payload.part + payload.width, payload.parts),
                t,
            )
            for bucket in payload.buckets:
                pieces.setdefault(("" if together else payload.kind, bucket), []).append(share)
    for (_, bucket), shares in pieces.items():
        yield bucket, sorted(shares, key=lambda share: share[:2])


def _overlapping(shares: list[Share]) -> Iterator[tuple[Transfer, Transfer]]:
    """Neighbours that hold the same elements; slices of different runs may."""
    for (_, _, a), (_, _, b) in pairwise(shares):
        if a.payload.overlaps(b.payload):
            yield a, b


def _whole(shares: list[Share]) -> bool:
    reached = Fraction(0)
    for start, stop, _ in shares:
        if start > reached:
            return False
        reached = max(reached, stop)
    return reached == 1


def _orders_that_disagree(plans: Sequence[Plan]) -> Iterator[Problem]:
    """Collectives match by issue order, so every rank must issue the same ones per link."""
    first = plans[0]
    for rank, plan in enumerate(plans[1:], start=1):
        if plan is first:
            continue
        if (plan.period, plan.prologue) != (first.period, first.prologue):
            yield Problem(
                f"rank {rank} has the period {plan.period} after {plan.prologue}, rank 0 "
                f"has {first.period} after {first.prologue}",
                plan,
            )
            continue
        for phase in plan.phases:
            mine, theirs = _issued(plan, phase), _issued(first, phase)
            if [t.id for t in mine] != [t.id for t in theirs]:
                at = next(
                    (i for i, (m, o) in enumerate(zip(mine, theirs, strict=False)) if m.id != o.id),
                    min(len(mine), len(theirs)),
                )
                here = mine[at].id if at < len(mine) else "nothing"
                there = theirs[at].id if at < len(theirs) else "nothing"
                yield Problem(
                    f"ranks disagree on the order in phase {phase}: rank 0 issues {there}, "
                    f"rank {rank} issues {here}",
                    plan,
                    mine[at : at + 1],
                )
                break


def _issued(plan: Plan, phase: int) -> tuple[Transfer, ...]:
    return tuple(sorted(plan.at(phase), key=lambda t: t.link))  # stable: issue order per link
