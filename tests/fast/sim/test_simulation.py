"""The simulator against its slow twin on random plans, and what its traces hold."""

from itertools import pairwise

import numpy as np
import pytest
from harness.parts import COMPUTE, Outcomes, make_job
from harness.parts import event_engine as events
from harness.parts import fast_engine as engine
from hypothesis import event, given, settings
from hypothesis import strategies as st
from oracle import random_timelines
from oracle import simulator as reference

from offbeat.profile import Bucket, Link, Profile
from offbeat.sim import Ranks, simulate
from offbeat.strategies import BSP, LocalSGD

ITERATIONS = 7
SEED = 3


@st.composite
def cases(draw, sends):
    profile = draw(random_timelines.profiles(contention=True))
    plan = draw(random_timelines.plans(profile, sends=sends))
    ranks = Ranks(
        jitter=draw(st.sampled_from([0.0, 0.0, 0.3])),
        link_rates={
            link.name: tuple(draw(random_timelines.SHARES) for _ in range(profile.world_size))
            for link in profile.links
            if draw(st.booleans())
        },
    )
    votes = {vote.name: draw(st.sampled_from([0.0, 0.5, 1.0])) for vote in plan.votes}
    return profile, plan, ranks, votes


def expected(profile, plan, ranks, votes):
    scale = profile.rank_scale or (1.0,) * profile.world_size
    horizon = reference.horizon(plan, profile, ITERATIONS)
    noise = ranks.noise(horizon, profile, SEED)
    factors = [
        [scale[r] * (1.0 if noise is None else noise[i, r]) for i in range(horizon)]
        for r in range(profile.world_size)
    ]
    outcomes = Outcomes([vote.name for vote in plan.votes], votes, SEED)
    says = {(v.name, i): outcomes.is_yes(v.name, i) for v in plan.votes for i in range(horizon)}
    return reference.simulate(plan, profile, factors, ITERATIONS, ranks.link_rates, says)


@pytest.mark.long
@pytest.mark.parametrize("sends", [False, True])
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_equals_the_slow_twin(data, sends):
    profile, plan, ranks, votes = data.draw(cases(sends))
    told = {"iterations": ITERATIONS, "ranks": ranks, "seed": SEED, "votes": votes}
    try:
        truth = expected(profile, plan, ranks, votes)
    except reference.DeadlockError:
        event("deadlock")
        with pytest.raises(ValueError, match="the plan can never proceed"):
            simulate(plan, profile, **told)
        return
    event(f"transfers {len(plan.transfers)}, {'all alike' if plan.uniform else 'any'}")
    trace = simulate(plan, profile, record=ITERATIONS, **told)
    outcomes = Outcomes([vote.name for vote in plan.votes], votes, SEED)
    agree(trace, truth, plan, lambda t, i: outcomes.is_yes(t.when, i - t.ago))


@pytest.mark.long
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_both_engines_agree(data):
    profile, plan, ranks, votes = data.draw(cases(sends=False))
    jobs = (make_job(plan, profile, ranks, ITERATIONS, SEED, votes, {}) for _ in range(2))
    found = []
    for made, job in zip((engine, events), jobs, strict=True):
        try:
            found.append(made.run(job))
        except ValueError as error:
            found.append(str(error))
    if any(isinstance(one, str) for one in found):
        assert found[0] == found[1]
        return
    fast, slow = found
    for name in ("ends_s", "waited_s"):
        near = np.broadcast_to(getattr(fast, name), getattr(slow, name).shape)
        np.testing.assert_allclose(getattr(slow, name), near, rtol=1e-12, atol=1e-12)
    for link, lines in slow.queues.items():
        for line in lines:
            assert line.ends_s == pytest.approx(fast.queues[link][0].ends_s, rel=1e-12)


def agree(trace, truth, plan, goes):
    """Ends, waiting and messages of every rank that the trace shows."""
    sent = {}
    for rank, row in enumerate(trace.ends_s):
        assert row == near(truth.ends_s[rank])
        compute = sorted(spans(trace, rank, COMPUTE), key=lambda s: s.start_s)
        assert all(a.end_s <= b.start_s for a, b in pairwise(compute))
        for i in range(ITERATIONS):
            waits = [s.end_s - s.start_s for s in compute if (s.iteration, s.kind) == (i, "wait")]
            assert sum(waits) == near(truth.waited_s[rank][i])
        for link in {t.link for t in plan.transfers}:
            shown = spans(trace, rank, link)
            for i in range(ITERATIONS):
                of = [s for s in shown if s.iteration == i]
                queue = enumerate(reference.on_link(plan, i, link, rank))
                due = [(k, t) for k, t in queue if goes(t, i)]
                assert sorted(map(shown_as, of)) == sorted(described(t, plan, i) for _, t in due)
                of.sort(key=lambda s: (s.start_s, s.end_s))  # in issue order
                sent |= {
                    (rank, i, link, k): (s.start_s, s.end_s)
                    for (k, _), s in zip(due, of, strict=True)
                }
    rows = range(len(trace.ends_s))
    assert sent == {key: near(times) for key, times in truth.messages.items() if key[0] in rows}


def shown_as(span):
    return span.kind, span.buckets, span.carries or ()


def described(t, plan, iteration):
    """Kind, buckets and merged iterations that a message's span should have."""
    carries = ()
    closing = [apply.phases for apply in plan.applies if apply.rule == "close"]
    if closing and t.payload.buffer == "grad":
        days = range(plan.prologue + iteration + plan.period + 1)
        closes = [i for i in days if any(plan.phase(i) in phases for phases in closing)]
        edges = [0, *(i + 1 for i in closes)]  # where windows begin
        at = max(k for k, edge in enumerate(edges) if edge <= iteration) - t.payload.age
        carries = (edges[at], edges[at + 1]) if at >= 0 else (0, 0)
    kind = plan.all_buffers[t.payload.buffer].kind if t.verb == "all_reduce" else t.verb
    return kind, (t.payload.buckets.start, t.payload.buckets.stop), carries


def near(seconds):
    return pytest.approx(seconds, rel=1e-9, abs=1e-9)


def spans(trace, rank, lane):
    return [s for s in trace.spans if (s.rank, s.lane) == (rank, lane)]


PROFILE = Profile(
    (Bucket("a", 1.0, 2.0, 8), Bucket("b", 0.5, 1.0, 4)),
    (Link("net", 0.5, 4.0),),
    world_size=20,
    update_s=0.5,
)


@pytest.mark.parametrize(
    ("iterations", "record", "shown"),
    [
        (11, None, range(8, 11)),  # 2 iterations of prologue, then periods of 3
        (13, None, range(8, 11)),
        (3, None, range(3)),  # no whole period yet
        (11, 0, range(0)),
        (11, 4, range(7, 11)),
        (3, 10, range(3)),
    ],
)
def test_recorded_iterations(iterations, record, shown):
    plan = LocalSGD(period=3, warmup=2).plan(PROFILE)
    trace = simulate(plan, PROFILE, iterations=iterations, record=record)
    assert {span.iteration for span in trace.spans} == set(shown)
    assert trace.iterations == iterations
    assert (trace.first, trace.period, trace.starts_s) == (0, 3, (0.0,))
    assert (trace.source, trace.strategy) == ("simulated", "local-sgd")


def test_recording_changes_nothing():
    plan = LocalSGD(period=3).plan(PROFILE)
    ends_s = [simulate(plan, PROFILE, iterations=9, record=n).ends_s[0] for n in (0, 9)]
    assert ends_s[0] == near(ends_s[1])


@pytest.mark.parametrize(("period", "warmup", "count"), [(1, 0, 32), (3, 2, 35), (50, 1, 201)])
def test_default_number_of_iterations(period, warmup, count):
    plan = LocalSGD(period=period, warmup=warmup).plan(PROFILE)
    assert simulate(plan, PROFILE).iterations == count


def test_spans_are_of_the_first_ranks():
    trace = simulate(BSP().plan(PROFILE), PROFILE, ranks=Ranks(jitter=0.1))
    assert trace.world_size == 20
    assert {span.rank for span in trace.spans} == set(range(16))


def test_spans_carry_bytes():
    plan = LocalSGD(period=1, state="averaged").plan(PROFILE)
    messages = [s for s in simulate(plan, PROFILE).spans if s.lane == "net"]
    assert [(s.kind, s.buckets, s.bytes) for s in messages] == [
        ("param", (0, 2), 12),
        ("state", (0, 2), 0),
    ]
