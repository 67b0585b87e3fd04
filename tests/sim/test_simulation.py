"""The simulator against its slow twin on random plans, and what its traces hold."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st
from reference import random_plans
from reference import simulator as reference

from offbeat.plan import Moment, Plan, transfer
from offbeat.profile import Bucket, Link, Profile
from offbeat.sim import Ranks, simulate
from offbeat.strategies import BSP, LocalSGD
from offbeat.trace import COMPUTE

ITERATIONS = 7


@st.composite
def cases(draw):
    profile = draw(random_plans.profiles(contention=True))
    plans = draw(random_plans.plans_of_ranks(profile))
    ranks = Ranks(
        jitter=draw(st.sampled_from([0.0, 0.0, 0.3])),
        link_rates={
            link.name: tuple(draw(random_plans.SHARES) for _ in range(profile.world_size))
            for link in profile.links
            if draw(st.booleans())
        },
    )
    return profile, plans, ranks


def expected(profile, plans, ranks, seed):
    scale = profile.rank_scale or (1.0,) * profile.world_size
    horizon = reference.horizon(plans, ITERATIONS)
    noise = ranks.noise(horizon, profile.world_size, seed)
    factors = [
        [scale[r] * (noise[i, r] if ranks.jitter else 1.0) for i in range(horizon)]
        for r in range(profile.world_size)
    ]
    rates = {link: min(values) for link, values in ranks.link_rates.items()}
    return reference.simulate(plans, profile, factors, ITERATIONS, rates)


@settings(max_examples=200, deadline=None)
@given(cases())
def test_equals_the_slow_twin(case):
    profile, plans, ranks = case
    try:
        truth = expected(profile, plans, ranks, seed=3)
    except reference.DeadlockError:
        event("deadlock")
        with pytest.raises(ValueError, match="the plan can never proceed"):
            simulate(plans, profile, iterations=ITERATIONS, ranks=ranks, seed=3)
        return
    event(f"transfers {len(plans[0].transfers)}")
    trace = simulate(plans, profile, iterations=ITERATIONS, ranks=ranks, seed=3, record=ITERATIONS)
    agree(trace, truth, plans)


def agree(trace, truth, plans):
    """Ends, waiting and messages of every rank that the trace shows."""
    for rank, row in enumerate(trace.ends_s):
        assert row == near(truth.ends_s[rank])
        compute = sorted(spans(trace, rank, COMPUTE), key=lambda s: s.start_s)
        assert all(a.end_s <= b.start_s for a, b in pairwise(compute))
        for i in range(ITERATIONS):
            waits = [s.end_s - s.start_s for s in compute if (s.iteration, s.kind) == (i, "wait")]
            assert sum(waits) == near(truth.waited_s[rank][i])
        sent = {}
        for link in {t.link for t in plans[rank].transfers}:
            shown = spans(trace, rank, link)
            for i in range(ITERATIONS):
                of = [s for s in shown if s.iteration == i]
                due = reference.on_link(plans[rank], i, link)
                assert [(s.kind, s.buckets, s.carries) for s in of] == [
                    described(t, plans[rank], i) for t in due
                ]
                sent |= {(i, link, k): (s.start_s, s.end_s) for k, s in enumerate(of)}
        assert sent == {
            key: (near(starts[rank]), near(end)) for key, (starts, end) in truth.messages.items()
        }


def described(t, plan, iteration):
    """Kind, buckets and merged iterations that a message's span should have."""
    carries = None
    if plan.closes is not None and t.payload.kind == "grad":
        days = range(plan.prologue + iteration + plan.period)
        closes = [i for i in days if plan.phase(i) in plan.closes]
        edges = [0, *(i + 1 for i in closes)]  # where generations begin
        at = max(k for k, edge in enumerate(edges) if edge <= iteration) - t.payload.age
        carries = (edges[at], edges[at + 1]) if at >= 0 else (0, 0)
    kind = t.payload.kind if t.verb == "mean" else t.verb
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


def test_one_plan_per_rank_may_be_equal_plans():
    profile = replace(PROFILE, world_size=3, rank_scale=(1.0, 2.0, 1.0))
    plan = LocalSGD(period=2).plan(profile)
    copies = [Plan.from_dict(plan.to_dict()) for _ in range(3)]
    assert simulate(copies, profile) == simulate(plan, profile)


def test_messages_of_the_last_iteration_are_followed_to_their_end():
    # Rank 0 releases aux late in the next iteration, for which it needs rank 1 in the one after.
    profile = Profile(PROFILE.buckets, (Link("net", 0.5, 4.0), Link("aux", 0.5, 4.0)), world_size=2)

    def plan(net, aux):
        moves = (("grad", net, "net"), ("state", aux, "aux"))
        transfers = (
            transfer(kind, range(2), after=after, before=before, phases=[0], link=link)
            for kind, (after, before), link in moves
        )
        return Plan("late", 2, tuple(transfers))

    late = Moment("end", lag=2)
    first = plan((Moment("forward"), Moment("step")), (Moment("end", lag=1), late))
    second = plan((Moment("forward", lag=1), Moment("end", lag=1)), (Moment("grad"), late))
    trace = simulate([first, second], profile, iterations=1)
    messages = [(s.rank, s.lane, s.iteration) for s in trace.spans if s.lane != COMPUTE]
    assert sorted(messages) == [(0, "aux", 0), (0, "net", 0), (1, "aux", 0), (1, "net", 0)]
