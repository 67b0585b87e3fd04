"""Random profiles and plans, for properties that hold for all of them."""

from dataclasses import replace

from hypothesis import strategies as st

from offbeat.plan import KINDS, Moment, Plan, Transfer, channel, transfer
from offbeat.profile import Bucket, Contention, Link, Profile

SECONDS = st.integers(0, 12).map(lambda n: n / 8)  # many ties, and exact sums
SHARES = st.sampled_from([0.5, 1.0, 1.0, 1.5, 3.0])
SPEEDS = st.sampled_from([0.5, 0.75, 1.0])


@st.composite
def profiles(
    draw,
    most_buckets=5,
    links=("net", "aux"),
    world_sizes=(1, 2, 3),
    rank_scales=True,
    contention=False,
):
    """`contention` adds links that slow each other down, and measured halves."""
    names = links[: draw(st.integers(1, len(links)))]
    buckets = [
        Bucket(
            name=f"b{i}",
            forward_s=draw(SECONDS),
            backward_s=draw(SECONDS),
            size_bytes=draw(st.integers(0, 8)),
            communication_s={n: draw(SECONDS) for n in names if draw(st.booleans())},
            buffer_bytes=draw(st.integers(0, 2)),
            state_bytes=draw(st.integers(0, 8)),
        )
        for i in range(draw(st.integers(1, most_buckets)))
    ]
    world_size = draw(st.sampled_from(world_sizes))
    uneven = rank_scales and draw(st.booleans())
    halves = {"all_gather": (0.25, 6.0)} if contention and draw(st.booleans()) else {}
    return Profile(
        buckets=tuple(buckets),
        links=tuple(Link(n, draw(SECONDS), 4.0, halves=halves) for n in names),
        world_size=world_size,
        update_s=draw(SECONDS),
        other_s=draw(SECONDS),
        rank_scale=tuple(draw(SHARES) for _ in range(world_size)) if uneven else (),
        contention=draw(contentions(names)) if contention else (),
    )


@st.composite
def contentions(draw, names):
    pairs = [(a, b) for i, a in enumerate(names) for b in names[i:]]
    speeds = {pair: (draw(SPEEDS), draw(SPEEDS)) for pair in pairs if draw(st.booleans())}
    return tuple(Contention(pair, speed) for pair, speed in speeds.items())


def order(size, updates, late_updates=True):
    """Moments in the order in which they come within one iteration; those of updates on arrival
    belong to the transfers of the one before, and are left out without `late_updates`."""
    updated = [Moment("updated", b) for b in range(size)]
    moments = [Moment("forward")]
    for b in reversed(range(size)):
        moments.append(Moment("forward", b))
        if updates == "on_arrival" and late_updates:
            moments.append(updated[b])
    if updates == "on_arrival" and late_updates:
        moments.append(Moment("updated"))
    for b in range(size):
        moments.append(Moment("grad", b))
        if updates == "in_backward":
            moments.append(updated[b])
    moments += [Moment("grad"), Moment("step")]
    if updates == "at_step":
        moments += updated
    if updates != "on_arrival":
        moments.append(Moment("updated"))
    return [*moments, Moment("end")]


@st.composite
def plans(draw, profile, most_transfers=5, late_updates=False):
    """Plans that mostly proceed: a deadline nearly always comes after its release."""
    size = len(profile.buckets)
    updates = draw(st.sampled_from(["at_step", "in_backward", "on_arrival"]))
    period, prologue = draw(st.integers(1, 3)), draw(st.integers(0, 2))
    closes = None
    if draw(st.integers(0, 3)) == 0:
        closes = draw(st.sets(st.integers(0, prologue + period - 1)))
        closes = frozenset({*closes, draw(st.integers(prologue, prologue + period - 1))})
    transfers = []
    for _ in range(draw(st.sampled_from(range(most_transfers + 1)))):
        start = draw(st.integers(0, size - 1))
        after, before = draw(moment_pairs(size, updates, late_updates))
        phases = draw(st.sets(st.integers(0, prologue + period - 1), min_size=1))
        parts = draw(st.integers(1, 3))
        single = transfer(
            draw(st.sampled_from(KINDS)),
            range(start, draw(st.integers(start + 1, size))),
            after=after,
            before=before,
            phases=phases,
            link=draw(links_of(profile)),
            part=draw(st.integers(0, parts - 1)),
            parts=parts,
            age=0 if closes is None else draw(st.integers(0, 1)),
        )
        transfers += halves(single) if draw(st.integers(0, 3)) == 0 else [single]
    if draw(st.booleans()):
        moments = order(size, updates)
        transfers.sort(
            key=lambda t: (lag(t.after, updates), moments.index(replace(t.after, lag=0)))
        )
    return Plan("random", size, tuple(transfers), period, prologue, updates, closes)


def links_of(profile, channels=2):
    return st.sampled_from(
        [channel(link.name, i) for link in profile.links for i in range(channels)]
    )


def halves(whole):
    """An all-reduce as two halves, the second one an iteration later."""
    later = replace(whole.before, lag=whole.before.lag + 1)
    return [
        replace(whole, verb="reduce_scatter"),
        replace(whole, verb="all_gather", after=whole.before, before=later),
    ]


def lag(moment, updates):
    """Iterations until a moment comes: an update on arrival belongs to the iteration before."""
    return moment.lag + (updates == "on_arrival" and moment.point == "updated")


@st.composite
def moment_pairs(draw, size, updates, late_updates):
    moments = order(size, updates, late_updates)
    release = draw(st.integers(0, len(moments) - 2))
    first = max(draw(st.sampled_from([0, 0, 0, 1])), lag(moments[release], updates))
    later = draw(st.sampled_from([0, 0, 1, 2]))
    deadline = draw(st.integers(0 if later else release + 1, len(moments) - 1))
    last = max(first + later, lag(moments[deadline], updates))
    return (
        replace(moments[release], lag=first - lag(moments[release], updates)),
        replace(moments[deadline], lag=last - lag(moments[deadline], updates)),
    )


@st.composite
def plans_of_ranks(draw, profile):
    """One plan per rank: the same transfers in the same order at moments of their own."""
    base = draw(
        st.one_of(
            plans(profile, late_updates=True), slices_on_arrival(profile), generations(profile)
        )
    )
    if draw(st.booleans()):
        return [base] * profile.world_size
    return [draw(_variant(base)) for _ in range(profile.world_size)]


@st.composite
def _variant(draw, base):
    def moved(t: Transfer) -> Transfer:
        if draw(st.integers(0, 3)):
            return t
        after, before = draw(moment_pairs(base.buckets, base.updates, late_updates=True))
        return replace(t, after=after, before=before)

    return replace(base, transfers=tuple(moved(t) for t in base.transfers))


@st.composite
def slices_on_arrival(draw, profile):
    """Slices of every bucket due by its next forward, in any order that does not lock up."""
    size = len(profile.buckets)
    slices = [(b, n, i) for b in range(size) for n in [draw(st.integers(1, 3))] for i in range(n)]
    transfers = [
        transfer(
            "grad",
            range(b, b + 1),
            after=Moment("grad", b),
            before=Moment("forward", b, lag=1),
            phases=[0],
            link=draw(links_of(profile)),
            part=part,
            parts=parts,
        )
        for b, parts, part in draw(st.permutations(slices))
    ]
    return Plan("arrivals", size, tuple(transfers), updates="on_arrival")


@st.composite
def generations(draw, profile):
    """Merged gradients: every slice of a bucket leaves in any iteration between the close of its
    generation and the update that applies it."""
    period, prologue = draw(st.integers(1, 4)), draw(st.integers(0, 3))
    ends = draw(st.sets(st.integers(0, prologue + period - 1)))
    closes = frozenset({*ends, draw(st.integers(prologue, prologue + period - 1))})
    plan = Plan("merged", len(profile.buckets), (), period, prologue, closes=closes)
    transfers = []
    for b in range(plan.buckets):
        parts = draw(st.integers(1, 2))
        for part in range(parts):
            link = draw(links_of(profile))
            transfers += draw(_journeys(plan, b, part, parts, link))
    moments = order(plan.buckets, plan.updates)
    transfers.sort(key=lambda t: moments.index(t.after))
    return replace(plan, transfers=tuple(transfers))


@st.composite
def _journeys(draw, plan, b, part, parts, link):
    """One slice's transfers, one for each close of a generation."""
    stop = plan.prologue + plan.period
    early = max((p for p in plan.closes if p < plan.prologue), default=None)
    moments = order(plan.buckets, plan.updates)
    before_step = moments[: moments.index(Moment("step"))]
    wraps = False
    transfers = []
    for close in sorted(plan.closes, reverse=True):
        last = applied = plan.generation(close + 1).stop - 1
        if close == max(plan.closes) and early is None:
            last = stop - 1  # in the first cycle there would be no generation to carry
        if close == early and wraps:
            continue  # the cycle's last transfer carries this generation too
        if close == early:
            last = plan.prologue - 1  # in the cycle it would be repeated
        sent = draw(st.integers(close, last))
        wraps = wraps or sent >= stop
        transfers.append(
            transfer(
                "grad",
                range(b, b + 1),
                after=Moment("grad", b) if sent == close else draw(st.sampled_from(before_step)),
                before=Moment("step", lag=applied - sent),
                phases=[plan.phase(sent)],
                link=link,
                part=part,
                parts=parts,
                age=int(sent > close),
            )
        )
    return transfers
