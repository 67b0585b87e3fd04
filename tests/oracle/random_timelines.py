"""Random profiles, and random plans that mostly proceed: what they compute does not matter."""

from dataclasses import replace

from hypothesis import strategies as st

from offbeat.plan import Apply, Buffer, Moment, Plan, Vote, Wire, channel, local, transfer
from offbeat.profile import Bucket, CodecSpeed, Contention, Link, Profile

SECONDS = st.integers(0, 12).map(lambda n: n / 8)  # many ties, and exact sums
SHARES = st.sampled_from([0.5, 1.0, 1.0, 1.5, 3.0])
SPEEDS = st.sampled_from([0.5, 0.75, 1.0])
BUFFERS = (Buffer("landing", "grad"), Buffer("snapshot"))

WIRES = st.sampled_from(
    [*(Wire("topk", {"fraction": 0.5, "via": via}) for via in ("gather", "scatter")), *[None] * 6]
)


@st.composite
def profiles(
    draw,
    most_buckets=5,
    links=("net", "aux"),
    world_sizes=(1, 2, 3),
    rank_scales=True,
    contention=False,
):
    """`contention` adds links that slow each other down, measured halves, and processor time of
    messages and of the optimizer's calls."""
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
    more = {"halves": {"all_gather": (0.25, 6.0)}} if contention and draw(st.booleans()) else {}
    if contention and draw(st.booleans()):
        # Pauses of another grid, so that rounding does not decide which messages follow one.
        pause_s = draw(SECONDS) + 0.0371
        more |= {"pause_s": pause_s, "after_pause": ((2, draw(SECONDS)), (9, draw(SECONDS)))}
    if contention and draw(st.booleans()):
        more |= {"cpu_s_per_message": draw(SECONDS), "cpu_s_per_byte": draw(SECONDS)}
    return Profile(
        buckets=tuple(buckets),
        links=tuple(Link(n, draw(SECONDS), 4.0, **more) for n in names),
        world_size=world_size,
        update_s=draw(SECONDS),
        other_s=draw(SECONDS),
        step_s=draw(SECONDS) if contention else 0.0,
        rank_scale=tuple(draw(SHARES) for _ in range(world_size)) if uneven else (),
        contention=draw(contentions(names)) if contention else (),
        codecs=(CodecSpeed("topk", *(draw(SECONDS) for _ in range(5))),) * draw(st.integers(0, 1)),
    )


@st.composite
def contentions(draw, names):
    pairs = [(a, b) for i, a in enumerate(names) for b in names[i:]]
    speeds = {pair: (draw(SPEEDS), draw(SPEEDS)) for pair in pairs if draw(st.booleans())}
    return tuple(Contention(pair, speed) for pair, speed in speeds.items())


@st.composite
def plans(draw, profile, most_transfers=5, sends=False):
    """`sends`: also messages between two ranks, links with groups, rules of single ranks."""
    size, period, prologue = len(profile.buckets), draw(st.integers(1, 3)), draw(st.integers(0, 2))
    phases = st.sets(st.integers(0, prologue + period - 1), min_size=1)
    merging = draw(st.integers(0, 3)) == 0
    names = draw(st.sampled_from(["", "", "a", "ab"]))
    votes = tuple(draw(_votes(name, size, phases)) for name in names)
    base = Plan(
        "random",
        size,
        votes=votes,
        buffers=(*BUFFERS, Buffer("grad", "grad", copies=2)) if merging else BUFFERS,
        groups=draw(_groups(profile)) if sends else {},
        period=period,
        prologue=prologue,
    )
    transfers = []
    for _ in range(draw(st.integers(0, most_transfers))):
        transfers += draw(_transfers(base, profile, phases, merging, sends))
    if draw(st.booleans()):
        moments = order(size)
        transfers.sort(key=lambda t: moments.index(t.after))
    applies = draw(_applies(base, profile, phases, merging, sends))
    return replace(base, transfers=tuple(transfers), applies=tuple(applies))


def order(size):
    """Moments in the order in which they come within one iteration."""
    forwards = [Moment("forward"), *(Moment("forward", b) for b in reversed(range(size)))]
    gradients = [*(Moment("grad", b) for b in range(size)), Moment("grad")]
    return [*forwards, *gradients, Moment("step"), Moment("end")]


@st.composite
def _spans(draw, size):
    """A moment and a later one, often of the same iteration; now and then they are one."""
    moments = order(size)
    first = draw(st.integers(0, len(moments) - 2))
    lag = draw(st.sampled_from([0, 0, 1, 2]))
    last = draw(st.integers(0 if lag else first + 1, len(moments) - 1))
    return moments[first], replace(moments[last], lag=lag)


@st.composite
def _votes(draw, name, size, phases):
    at, due = draw(_spans(size))
    return Vote(name, "changed", at, due, draw(phases), {"threshold": 1.0})


@st.composite
def _groups(draw, profile):
    ranks, cut = draw(st.permutations(range(profile.world_size))), draw(st.integers(0, 2))
    parts = tuple(tuple(sorted(part)) for part in (ranks[:cut], ranks[cut:]) if part)
    return {"net": parts} if draw(st.booleans()) else {}


def links_of(profile, channels=2):
    return st.sampled_from(
        [channel(link.name, i) for link in profile.links for i in range(channels)]
    )


@st.composite
def _when(draw, base, phases):
    """A vote in whose phases a rule acts, of this iteration or one before, or none."""
    vote = draw(st.sampled_from([None, None, *base.votes]))
    if vote is None:
        return {"when": None, "phases": draw(phases)}
    return {"when": vote.name, "phases": vote.phases, "ago": draw(st.integers(0, 2))}


@st.composite
def _transfers(draw, base, profile, phases, merging, sends):
    start = draw(st.integers(0, base.buckets - 1))
    after, before = draw(_spans(base.buckets))
    when = draw(_when(base, phases))
    buffer = draw(st.sampled_from(["grad", "grad", "param", "state", "landing", "snapshot"]))
    parts = draw(st.integers(1, 3))
    one = transfer(
        buffer,
        range(start, draw(st.integers(start + 1, base.buckets))),
        after=after,
        before=before,
        link=draw(links_of(profile)),
        part=draw(st.integers(0, parts - 1)),
        parts=parts,
        age=draw(st.integers(0, 1)) if merging and buffer == "grad" else 0,
        into={"grad": "landing", "param": "snapshot"}.get(buffer) if draw(st.booleans()) else None,
        wire=draw(WIRES),
        **when,
    )
    if sends and profile.world_size > 1 and draw(st.booleans()):
        ranks = draw(st.permutations(range(profile.world_size)))[:2]
        return [replace(one, verb="send", ranks=tuple(ranks))]
    if one.in_place and before.lag == 0 and draw(st.integers(0, 3)) == 0:
        later = replace(before, lag=1)
        return [
            replace(one, verb="reduce_scatter"),
            replace(one, verb="all_gather", after=before, before=later),
        ]
    return [one]


@st.composite
def _applies(draw, base, profile, phases, merging, sends):
    """Optimizers in one piece or spread, rules that take no time, and closed windows."""
    applies = []
    moments = [m for m in order(base.buckets) if m.point != "forward"]
    moments += [Moment("forward", None, 1), Moment("forward", base.buckets - 1, 1)]
    for _ in range(draw(st.integers(0, 3))):
        when = draw(_when(base, phases))
        start = draw(st.integers(0, base.buckets - 1))
        alone = sends and draw(st.integers(0, 2)) == 0
        one = Apply(
            draw(st.sampled_from(["local", "local", "clear"])),
            range(start, draw(st.integers(start + 1, base.buckets))),
            draw(st.sampled_from(moments)),
            ranks=(draw(st.integers(0, profile.world_size - 1)),) if alone else None,
            **when,
            args={"age": draw(st.integers(0, 1))} if merging else {},
        )
        applies.append(one)
    if merging:
        closed = {*draw(phases), draw(st.sampled_from(base.cycle))}
        applies.append(Apply("close", range(base.buckets), Moment("end"), closed))
    return applies or [local(base.buckets, Moment("step"), draw(phases))]
