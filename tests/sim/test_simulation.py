"""The simulator against its slow twin, on random plans."""

from itertools import pairwise

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st
from reference import random_plans
from reference import simulator as reference

from offbeat.sim import Ranks, simulate
from offbeat.trace import COMPUTE

ITERATIONS = 7


@st.composite
def cases(draw):
    profile = draw(random_plans.profiles())
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
    horizon = ITERATIONS + profile.world_size  # random plans have lags of at most 1
    noise = ranks.noise(horizon, profile.world_size, seed)
    factors = [
        [scale[r] * (noise[i, r] if ranks.jitter else 1.0) for i in range(horizon)]
        for r in range(profile.world_size)
    ]
    rates = {link: min(values) for link, values in ranks.link_rates.items()}
    return reference.simulate(plans, profile, factors, ITERATIONS, rates)


@settings(max_examples=400, deadline=None)
@given(cases())
def test_equals_the_slow_twin(case):
    profile, plans, ranks = case
    try:
        truth = expected(profile, plans, ranks, seed=3)
    except reference.Deadlock:
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
                assert [(s.kind, s.buckets) for s in of] == [
                    (t.payload.kind, (t.payload.buckets.start, t.payload.buckets.stop)) for t in due
                ]
                sent |= {(i, link, k): (s.start_s, s.end_s) for k, s in enumerate(of)}
        assert sent == {
            key: (near(starts[rank]), near(end)) for key, (starts, end) in truth.messages.items()
        }


def near(seconds):
    return pytest.approx(seconds, rel=1e-12, abs=1e-12)


def spans(trace, rank, lane):
    return [s for s in trace.spans if (s.rank, s.lane) == (rank, lane)]
