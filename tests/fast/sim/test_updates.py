"""When updates happen: before a forward, once per window; halves of an all-reduce, by hand."""

import pytest
from hypothesis import given, settings
from oracle import random_timelines

from offbeat.core.sim.trace import COMPUTE
from offbeat.plan import Apply, Buffer, Moment, Plan, local, transfer
from offbeat.profile import Bucket, Link, Profile
from offbeat.sim import predict_plan, simulate

ALIKE = random_timelines.profiles(most_buckets=8, links=("net",), rank_scales=False)


def exactly(seconds):
    return pytest.approx(seconds, rel=1e-9, abs=1e-12)


def profile_of(*communication_s, update_s=0.0):
    """Buckets of 1 s of forward and backward and 100 bytes."""
    return Profile(
        tuple(Bucket(f"b{i}", 1.0, 1.0, 100, {"net": s}) for i, s in enumerate(communication_s)),
        (Link("net", 0.0, 1e9),),
        world_size=2,
        update_s=update_s,
    )


def on_arrival(name, transfers):
    """Each bucket is updated right before its next forward."""
    size = 1 + max(t.payload.buckets[-1] for t in transfers)
    return Plan(name, size, tuple(transfers), (local(size, Moment("forward", lag=1), [0]),))


def windows(name, size, transfers, closes, period, prologue=0):
    """Gradients are added up until an iteration closes the window, which the next one applies."""
    applies = (
        local(size, Moment("step"), closes, age=1),
        Apply("close", range(size), Moment("end"), closes),
    )
    buffers = (Buffer("grad", "grad", copies=2),)
    return Plan(name, size, tuple(transfers), applies, (), buffers, {}, period, prologue)


def due_by_the_next_forward(b, part=0, parts=1):
    return transfer(
        "grad",
        range(b, b + 1),
        after=Moment("grad", b),
        before=Moment("forward", b, lag=1),
        phases=[0],
        link="net",
        part=part,
        parts=parts,
    )


def compute(trace, iteration):
    return [
        (s.name, s.start_s, s.end_s)
        for s in trace.spans
        if s.lane == COMPUTE and s.iteration == iteration
    ]


def test_slices_by_priority_and_updates_on_arrival():
    profile = profile_of(4.0, 3.0, update_s=1.0)
    # Gradients exist at 3 and 4; the input side's slices overtake the second of the output side.
    slices = [(0, 0), (1, 0), (1, 1), (0, 1)]
    transfers = tuple(due_by_the_next_forward(b, part, parts=2) for b, part in slices)
    plan = on_arrival("priority", transfers)
    trace = simulate(plan, profile, iterations=2, record=2)
    assert trace.ends_s == ((4.0, 13.5),)
    assert [(s.name, s.start_s, s.end_s) for s in trace.spans if s.lane == "net"][:4] == [
        ("grad[0:1]", 3.0, 5.0),
        ("grad[1:2]", 5.0, 6.5),
        ("grad[1:2]", 6.5, 8.0),
        ("grad[0:1]", 8.0, 10.0),
    ]
    assert compute(trace, 0) == [
        ("forward[1:2]", 0.0, 1.0),
        ("forward[0:1]", 1.0, 2.0),
        ("backward[0:1]", 2.0, 3.0),
        ("backward[1:2]", 3.0, 4.0),
    ]
    assert compute(trace, 1) == [
        ("wait", 4.0, 8.0),
        ("update[1:2]", 8.0, 8.5),
        ("forward[1:2]", 8.5, 9.5),
        ("wait", 9.5, 10.0),
        ("update[0:1]", 10.0, 10.5),
        ("forward[0:1]", 10.5, 11.5),
        ("backward[0:1]", 11.5, 12.5),
        ("backward[1:2]", 12.5, 13.5),
    ]
    prediction = predict_plan(plan, profile)
    assert (prediction.iteration_s, prediction.exposed_s) == (9.5, 4.5)
    assert prediction.bytes_per_iteration == {"net": 200.0}
    in_order = on_arrival("fifo", list(map(due_by_the_next_forward, range(2))))
    assert predict_plan(in_order, profile).iteration_s == 11.0


@pytest.mark.parametrize("merged", [1, 2, 3])
@settings(max_examples=40, deadline=None)
@given(profile=ALIKE)
def test_windows_that_are_one_late_hide_everything_but_the_slower_side(merged, profile):
    transfers = tuple(
        transfer(
            "grad",
            range(b, b + 1),
            after=Moment("grad", b),
            before=Moment("step", lag=merged),
            phases=[merged - 1],
            link="net",
        )
        for b in range(len(profile.buckets))
    )
    plan = windows("late", len(profile.buckets), transfers, {merged - 1}, merged)
    computed_s = profile.other_s + profile.forward_s + profile.backward_s
    communicated_s = sum(profile.communication_s("net")) / merged
    computed_s += profile.update_s / merged
    prediction = predict_plan(plan, profile)
    assert prediction.iteration_s == exactly(max(computed_s, communicated_s))
    assert prediction.exposed_s == exactly(max(communicated_s - computed_s, 0.0))


@pytest.mark.parametrize(
    ("halves", "seconds"),
    [
        ({}, (0.25 + 2.0, 0.25 + 2.0)),  # half of the time
        ({"all_gather": (0.5, 50.0)}, (0.25 + 2.0, 0.5 + 2.0)),
        ({"reduce_scatter": (1.0, 25.0), "all_gather": (0.0, 100.0)}, (1.0 + 4.0, 1.0)),
    ],
)
def test_halves_of_an_all_reduce(halves, seconds):
    forward, step = Moment("forward", 0, lag=1), Moment("step")
    plan = on_arrival(
        "halves",
        [
            transfer("grad", range(1), after=a, before=b, phases=[0], link="net", verb=verb)
            for verb, a, b in (
                ("reduce_scatter", Moment("grad", 0), step),
                ("all_gather", step, forward),
            )
        ],
    )
    link = Link("net", 0.5, 25.0, halves=halves)
    profile = Profile((Bucket("a", 1.0, 1.0, 100),), (link,), world_size=2, update_s=0.5)
    prediction = predict_plan(plan, profile)
    assert prediction.iteration_s == exactly(2.5 + sum(seconds))
    assert prediction.busy_s["net"] == exactly(sum(seconds))
    assert prediction.bytes_per_iteration == {"net": 100.0}
    spans = [s for s in prediction.trace.spans if s.lane == "net"]
    assert [(s.kind, s.bytes) for s in spans] == [("reduce_scatter", 50), ("all_gather", 50)]
    assert [s.end_s - s.start_s for s in spans] == [exactly(s) for s in seconds]
