"""Pure functions of the report: windows of a trace, loads of links, parts of iterations."""

from __future__ import annotations

import random

import numpy as np
import pytest
from cases.report_runs import NODES, spans_of_nodes
from cases.scripts import benchmark
from cases.synthetic_runs import NEAR_AND_FAR, late, profile, write_run
from cases.tiny_runs import dump, record, steady, write_tiny
from hypothesis import given
from hypothesis import strategies as st

from offbeat.core.derive.windows import Windows
from offbeat.core.sim.trace import COMPUTE, Span, Trace
from offbeat.core.transport.topology import Topology
from offbeat.experiments.report import load, summarize
from offbeat.experiments.report.breakdown import group_by_message, parts_of
from offbeat.experiments.report.timeline import (
    Generations,
    Window,
    measured_window,
    predicted_window,
    recorded_runs,
    window_of,
)
from offbeat.plan import Apply, Moment, Phases, Plan

link_loads = benchmark("link_load").link_loads

# ---- windows -----------------------------------------------------------------------------------


def test_a_window_has_an_iteration_of_a_worker_far_behind():
    """Rank 0 begins it after the window's end."""
    trace = Trace("simulated", "ssp", ((10.0, 20.0, 30.0), (1.0, 2.0, 3.0)), (0.0, 0.0))
    window = window_of(trace, range(2, 3), 5.0)
    assert window.iterations == range(2, 3)
    assert [window.bounds_s(rank) for rank in (0, 1)] == [[18.0, 28.0], [0.0, 1.0]]


def run_of(path, lengths, *, shifts=(0.0,), sends=1, skip=0, notes=None):
    """Compute for the whole of every iteration, a message in the second half where `sends`."""
    records = []
    for rank, shift in enumerate(shifts):
        ends, spans = [shift + sum(lengths[: i + 1]) for i in range(len(lengths))], []
        for i, (length, end) in enumerate(zip(lengths, ends, strict=True)):
            spans.append(Span(rank, COMPUTE, "forward", i, end - length, end))
            if i % 2 == sends:
                spans.append(Span(rank, "net", "param", i, end - length / 2, end, (0, 2), 64))
        data = record(rank, ends, spans=spans, period=2)
        data["trace"]["notes"] = notes or {}
        records.append(data)
    write_tiny(path, {"a": [records]}, skip=skip)
    dump(path / "a/predicted.json", PREDICTED.to_dict())
    run = load(path)
    return run, run.contestants[0]


PREDICTED = Trace(
    source="simulated",
    strategy="x",
    ends_s=((10.0, 12.0),),
    starts_s=(8.0,),
    spans=(
        Span(0, COMPUTE, "forward", 4, 8.0, 10.0),
        Span(0, COMPUTE, "forward", 5, 10.0, 12.0),
        Span(0, "net", "param", 5, 11.0, 12.5, (0, 2), 64),
    ),
    first=4,
    period=2,
    notes={"ranks": 2},
)


@pytest.mark.parametrize(
    ("lengths", "sends", "skip", "first"),
    [  # periods in phase from 2, 4, 6: 2, 4, 3 s; from 3, 5, 7 if even iterations send: 2, 4, 7 s
        ([9, 9, 1, 1, 1, 3, 1, 2, 5], 1, 2, 6),
        ([9, 9, 1, 1, 1, 3, 1, 2, 5], 0, 2, 5),
        ([1, 1, 1, 3, 1, 2], 1, 0, 4),
    ],
)
def test_the_measured_period_is_in_phase_with_the_predicted_and_typical(
    tmp_path, lengths, sends, skip, first
):
    found = measured_window(*run_of(tmp_path, lengths, sends=sends, skip=skip))
    assert found[1].iterations == range(first, first + 2)


def test_clocks_with_other_origins_are_aligned_where_messages_end(tmp_path):
    _, window = measured_window(*run_of(tmp_path / "a", [1] * 4, shifts=(0.0, 1000.25), skip=2))
    assert window.length_s == pytest.approx(2.0)
    assert window.zero_s[1] - window.zero_s[0] == pytest.approx(1000.25)
    early = [Span(0, COMPUTE, "forward", 1, 1.0, 1.5), Span(0, "net", "grad", 1, 1.9, 2.0, (0, 1))]
    slow = [Span(1, COMPUTE, "forward", 1, 1.2, 1.9), Span(1, "net", "grad", 1, 1.9, 2.0, (0, 1))]
    ranks = [record(0, [1.0, 2.0], spans=early), record(1, [1.2, 2.0], spans=slow)]
    run = load(write_tiny(tmp_path / "b", {"a": [ranks]}, skip=1))
    _, window = measured_window(run, run.contestants[0])
    bounds = [window.bounds_s(rank) for rank in (0, 1)]  # who computes longer keeps its lag
    assert bounds == [pytest.approx([0.0, 1.0]), pytest.approx([0.2, 1.0])]


def test_a_longer_window_repeats_the_prediction_and_shows_what_was_recorded(tmp_path):
    run, contestant = run_of(tmp_path, [1, 1, 1, 3, 1, 2, 1, 3])
    _, found = measured_window(run, contestant, 9.0)
    assert (found.length_s, found.iterations) == (9.0, range(2, 8))
    assert found.bounds_s(0) == pytest.approx([0, 1, 4, 5, 7, 8, 11])
    for length_s, bounds, count in ((None, [0, 2, 4], 2), (9.0, [0, 2, 4, 6, 8, 10], 3)):
        expected = predicted_window(contestant, length_s)
        assert expected.bounds_s(0) == pytest.approx(bounds)
        messages = [(s.start_s - 8, s.end_s - 8) for s in expected.shown[0] if s.bytes]
        # What leaves a period enters at its beginning.
        assert messages == [(-1.0, 0.5), (3.0, 4.5), (7.0, 8.5)][:count]


def test_measured_iterations_are_whole_recorded_periods_without_estimated_ones(tmp_path):
    run, contestant = run_of(tmp_path / "all", [1] * 9, skip=2)
    assert recorded_runs(run, contestant.complete[0]) == [range(2, 8)]
    run, contestant = run_of(tmp_path / "rough", [1] * 9, skip=2, notes={"estimated": [5]})
    assert recorded_runs(run, contestant.complete[0]) == [range(2, 4), range(6, 8)]


# ---- generations -------------------------------------------------------------------------------


closings = st.integers(1, 6).flatmap(
    lambda period: st.tuples(
        st.just(period), st.sets(st.integers(0, period - 1), min_size=1).map(Phases)
    )
)


@given(closings)
def test_updates_apply_what_the_plan_says(closing):
    """Every generation is sent in the iteration after it closes; updates say nothing themselves."""
    period, closes = closing
    close = Apply("close", range(1), Moment("end"), closes)
    windows = Windows(Plan("x", 1, (), (close,), period=period))
    spans = [Span(0, COMPUTE, "update", i, 0.0, 1.0) for i in range(8 * period)]
    for iteration in range(1, 8 * period):
        if held := windows.window(iteration, age=1):
            carries = held.start, held.stop
            spans.append(Span(0, "net", "grad", iteration, 0.0, 1.0, (0, 1), 8, carries))
    found = Generations.from_spans(spans)
    for update in spans[: 6 * period]:
        applied = windows.applied_window(update.iteration)
        assert found.generation_of(update) == ((applied.start, applied.stop) if applied else None)


def test_messages_of_late_plans_name_the_generation_that_they_carry(tmp_path):
    facts = profile(12, 2, NEAR_AND_FAR)
    run = load(write_run(tmp_path, facts, late(facts), iterations=20, recorded=15))
    for contestant in run.contestants:
        window = predicted_window(contestant)
        assert window.generations.late == (contestant.label == "deft")
        for span in window.shown[0] if window.generations.late else ():
            if span.bytes:
                ages = [Windows(contestant.plan).window(span.iteration, age) for age in (0, 1)]
                held = window.generations.generation_of(span)
                assert held in [(those.start, those.stop) for those in ages]


# ---- loads of links ----------------------------------------------------------------------------


def trace_of(*spans, ranks=2, iterations=1, period=1, iteration_s=8.0, **fields):
    """Iterations of 8 s, so steps of 2 s between two ranks."""
    ends_s = tuple((i + 1) * iteration_s for i in range(iterations))
    rows = (ends_s,) * ranks, (0.0,) * ranks
    return Trace("measured", "x", *rows, spans, period=period, **fields)


def sent(start_s, end_s, size, iteration=0, lane="net"):
    """From rank 0 to rank 1."""
    return [
        Span(rank, lane, "grad", iteration, start_s, end_s, (0, 1), size, None, (0, 1))
        for rank in (0, 1)
    ]


def reduced(rank, start_s, end_s, size, iteration=0):
    return Span(rank, "net", "grad", iteration, start_s, end_s, (iteration, iteration + 1), size)


@pytest.mark.parametrize(
    ("spans", "iterations", "expected"),
    [
        (sent(7.0, 10.0, 90), 1, (60, 0, 0, 30)),  # reaches into the next iteration
        (sent(0.0, 10.0, 100), 1, (40, 20, 20, 20)),
        (sent(0.0, 2.0, 40) + sent(10.0, 12.0, 40, iteration=1), 2, (20, 20, 0, 0)),
        (sent(0.0, 2.0, 10) + sent(0.0, 2.0, 20, lane="net#1"), 1, (30, 0, 0, 0)),
        # Rank 0 is ready at 1, rank 1 at 2 only; the last bytes arrive at 6.
        ([sent(1.0, 5.0, 120)[0], sent(2.0, 6.0, 120)[1]], 1, (0, 60, 60, 0)),
    ],
)
def test_the_sender_is_loaded_while_both_are_at_a_message(spans, iterations, expected):
    [found] = link_loads(trace_of(*spans, iterations=iterations))
    assert (found.rank, found.link, found.step_s) == (0, "net", 2.0)
    assert found.step_bytes == pytest.approx(expected)
    assert found.unevenness == pytest.approx(4 * max(expected) / sum(expected))


def test_an_all_reduce_is_a_ring():
    # Three ranks send 2 * 2/3 of it, when the last of them has come to it; steps of 2 s.
    spans = [reduced(rank, float(rank), 6.0, 300) for rank in range(3)]
    loads = link_loads(trace_of(*spans, ranks=3, iteration_s=12.0))
    assert [one.rank for one in loads] == [0, 1, 2]
    assert all(one.step_bytes == pytest.approx((0, 200, 200, 0, 0, 0)) for one in loads)
    one_row = trace_of(reduced(0, 0.0, 4.0, 300), ranks=1, iteration_s=12.0, notes={"ranks": 3})
    assert link_loads(one_row)[0].step_bytes == pytest.approx((200, 200, 0, 0, 0, 0))


def test_whole_complete_periods_count_after_those_that_are_skipped():
    spans = [reduced(r, 8.0 * i, 8.0 * i + 4, 40, iteration=i) for i in (0, 1) for r in (0, 1)]
    loads = link_loads(trace_of(*spans, iterations=2, period=2))
    assert loads[0].step_bytes == pytest.approx((20, 20, 0, 0) * 2)
    assert link_loads(trace_of(*spans[:2], iterations=2, period=2)) == []
    spans = [s for i in range(4) for s in sent(8.0 * i, 8.0 * i + 2, 40, iteration=i)]
    spans = [*spans[:-1], *sent(2.0, 4.0, 1000, lane="net#1")]  # rank 1 lacks the last iteration
    [found] = link_loads(trace_of(*spans, iterations=4), skip=1)
    assert found.step_bytes == pytest.approx((40, 0, 0, 0))


# ---- parts of an iteration ---------------------------------------------------------------------


def test_parts_by_hand(tmp_path):
    """Both issue the message .1 s before their compute is over, rank 0 at .9 s and rank 1 at 1.1 s;
    it ends at 1.5 s. Clocks differ. One simulated rank stands for both."""

    def spans_of(rank, compute_s, begin_s, end_s, shift_s=0.0, iterations=3):
        for i in range(iterations):
            at = shift_s + i * end_s
            yield Span(rank, COMPUTE, "backward", i, at, at + compute_s)
            yield Span(rank, COMPUTE, "wait", i, at + compute_s, at + end_s)
            yield Span(rank, "net", "grad", i, at + begin_s, at + end_s, (0, 1), 8)

    def found(name, **notes):
        records = []
        for rank, (compute_s, shift) in enumerate(((1.0, 0.0), (1.2, 100.0))):
            spans = [*spans_of(rank, compute_s, compute_s - 0.1, 1.5, shift)]
            ends = [shift + 1.5 * (i + 1) for i in range(3)]
            records.append(record(rank, ends, spans=spans))
            records[-1]["trace"].update(notes)
        write_tiny(tmp_path / name, {"a": [records]}, skip=1)
        spans = tuple(spans_of(0, 0.9, 0.8, 1.1, iterations=1))
        trace = Trace("simulated", "a", ((1.1,),), (0.0,), spans, notes={"ranks": 2})
        dump(tmp_path / name / "a" / "predicted.json", trace.to_dict())
        [row] = summarize(load(tmp_path / name))
        return row.split

    split = found("plain")
    for parts, expected in (
        (split.predicted, (0.9, 0.2, 0.0, 0.3)),
        # The message is on the way from 1.1 s on, when rank 1 has come to it.
        (split.measured, (1.1, (0.4 + 0.3) / 2, 0.1 / 2, 0.4)),
    ):
        values = (parts.compute_s, parts.messages_s, parts.waiting_s, parts.links_s)
        assert values == pytest.approx(expected)
    assert split.longer_s == pytest.approx(0.4)
    assert not found("some", notes={"estimated": [1]}).estimated
    assert found("all", notes={"estimated": [0, 1, 2]}).estimated
    assert found("uneven", uneven=True) is None


def test_parts_are_an_iteration_whatever_overlaps():
    """Against a grid of milliseconds; spans at random, also beyond the edges."""
    rng = random.Random(1)
    kinds = [("backward", COMPUTE), ("wait", COMPUTE), ("grad", "net"), ("param", "net#1")]
    for _ in range(20):
        spans, busy, links = [], np.zeros(1000, bool), np.zeros(1000, bool)
        for _ in range(12):
            begin = rng.randrange(-300, 1300)
            end = begin + rng.randrange(400)
            kind, lane = rng.choice(kinds)
            spans.append(Span(0, lane, kind, 0, begin / 1000, end / 1000, (0, 1), 1))
            if kind != "wait":
                (busy if lane == COMPUTE else links)[max(0, begin) : max(0, end)] = True
        trace = Trace("measured", "x", ((1.0,),), (0.0,), tuple(spans))
        parts = parts_of(Window(trace, range(1), (0.0,), 1.0, {0: tuple(spans)}))
        assert parts.total_s == pytest.approx(1.0)
        assert (parts.compute_s, parts.links_s) == pytest.approx((busy.mean(), links.mean()))
        assert parts.messages_s == pytest.approx((busy | links).mean() - busy.mean())


def test_messages_of_nodes():
    """A message inside has the ranks of its node; a sharded one between has its own copies."""
    spans = tuple(span for rank in range(4) for span in spans_of_nodes(rank))
    ends = tuple(steady(1.0, 4))
    trace = Trace("measured", "x", (ends,) * 4, (0.0,) * 4, spans, notes=NODES)
    for sharded, between in ((False, {(0, 1, 2, 3)}), (True, {(0, 2), (1, 3)})):
        groups = group_by_message(spans, Topology.from_record(NODES | {"sharded": sharded}))
        ranks = {(one[0].lane, tuple(span.rank for span in one)) for one in groups}
        assert {found for lane, found in ranks if lane == "net"} == between
        assert {found for lane, found in ranks if lane == "inside"} == {(0, 1), (2, 3)}
    parts = parts_of(window_of(trace, range(1, 3)))
    assert (parts.compute_s, parts.links_s, parts.messages_s) == pytest.approx((0.5, 0.4, 0.4))
    loads = {(load.rank, load.link): load for load in link_loads(trace, 1)}
    assert sum(loads[0, "inside"].step_bytes) == pytest.approx(100)  # 2 (2 - 1) / 2 of it
    assert sum(loads[0, "net"].step_bytes) == pytest.approx(50)
