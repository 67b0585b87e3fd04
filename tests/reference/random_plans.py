"""Random profiles and plans, for properties that hold for all of them."""

from dataclasses import replace

from hypothesis import strategies as st

from offbeat.plan import KINDS, Moment, Plan, Transfer, transfer
from offbeat.profile import Bucket, Link, Profile

SECONDS = st.integers(0, 12).map(lambda n: n / 8)  # many ties, and exact sums
SHARES = st.sampled_from([0.5, 1.0, 1.0, 1.5, 3.0])


@st.composite
def profiles(draw, most_buckets=5, links=("net", "aux"), world_sizes=(1, 2, 3), rank_scales=True):
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
    return Profile(
        buckets=tuple(buckets),
        links=tuple(Link(n, draw(SECONDS), 4.0) for n in names),
        world_size=world_size,
        update_s=draw(SECONDS),
        other_s=draw(SECONDS),
        rank_scale=tuple(draw(SHARES) for _ in range(world_size)) if uneven else (),
    )


def order(size, updates):
    """Moments of one iteration in the order in which they come."""
    moments = [Moment("forward")]
    moments += [Moment("forward", b) for b in reversed(range(size))]
    updated = [Moment("updated", b) for b in range(size)]
    for b in range(size):
        moments.append(Moment("grad", b))
        if updates == "in_backward":
            moments.append(updated[b])
    moments += [Moment("grad"), Moment("step")]
    if updates == "at_step":
        moments += updated
    return [*moments, Moment("updated"), Moment("end")]


@st.composite
def plans(draw, profile, most_transfers=5):
    """Plans that mostly proceed: a deadline nearly always comes after its release."""
    size = len(profile.buckets)
    updates = draw(st.sampled_from(["at_step", "in_backward"]))
    period, prologue = draw(st.integers(1, 3)), draw(st.integers(0, 2))
    transfers = []
    for _ in range(draw(st.sampled_from(range(most_transfers + 1)))):
        start = draw(st.integers(0, size - 1))
        after, before = draw(moment_pairs(size, updates))
        phases = draw(st.sets(st.integers(0, prologue + period - 1), min_size=1))
        transfers.append(
            transfer(
                draw(st.sampled_from(KINDS)),
                range(start, draw(st.integers(start + 1, size))),
                after=after,
                before=before,
                phases=phases,
                link=draw(st.sampled_from([link.name for link in profile.links])),
            )
        )
    if draw(st.booleans()):
        moments = order(size, updates)
        transfers.sort(key=lambda t: (t.after.lag, moments.index(replace(t.after, lag=0))))
    return Plan("random", size, tuple(transfers), period, prologue, updates)


@st.composite
def moment_pairs(draw, size, updates):
    moments = order(size, updates)
    release = draw(st.integers(0, len(moments) - 2))
    lag = draw(st.sampled_from([0, 0, 0, 1]))
    later = draw(st.sampled_from([0, 0, 1, 2]))
    deadline = draw(st.integers(0 if later else release + 1, len(moments) - 1))
    return (
        replace(moments[release], lag=lag),
        replace(moments[deadline], lag=lag + later),
    )


@st.composite
def plans_of_ranks(draw, profile):
    """One plan per rank: the same transfers in the same order at moments of their own."""
    base = draw(plans(profile))
    if draw(st.booleans()):
        return [base] * profile.world_size
    return [draw(_variant(base)) for _ in range(profile.world_size)]


@st.composite
def _variant(draw, base):
    def moved(t: Transfer) -> Transfer:
        if draw(st.integers(0, 3)):
            return t
        after, before = draw(moment_pairs(base.buckets, base.updates))
        return replace(t, after=after, before=before)

    return replace(base, transfers=tuple(moved(t) for t in base.transfers))
