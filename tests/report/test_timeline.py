"""Which period is shown, how ranks are aligned, and how spans are packed."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.synthetic_runs import NEAR_AND_FAR, late, profile, write_run
from support.tiny_runs import dump, record, write_tiny

from offbeat.core.derive.windows import Windows
from offbeat.core.sim.trace import COMPUTE, Span, Trace
from offbeat.experiments.report import load
from offbeat.experiments.report.timeline import (
    Window,
    lane_name,
    lanes_of,
    measured_window,
    pack,
    predicted_window,
    shrink,
)


def unpack(packed):
    """Rank -> (lane, kind, buckets from, to, bytes, generation, iteration, start, end) per span."""
    found = {}
    for rank, which in zip(packed["ranks"], packed["which"], strict=True):
        flat, start, spans = packed["rows"][which], 0, []
        for i in range(0, len(flat), 4):
            start += flat[i + 2]
            end = start + flat[i + 3]
            times = (start * packed["unit_s"], end * packed["unit_s"])
            *name, back, merged = packed["names"][flat[i]]
            iteration = packed["first"] + flat[i + 1]
            held = (iteration - back, iteration - back + merged) if merged else None
            spans.append((*name, held, iteration, *times))
        found[rank] = spans
    return found


def spans_of(rank, lengths, sends, shift=0.0):
    """Compute for the whole of every iteration, a message in its second half where `sends`."""
    spans, at = [], shift
    for i, length in enumerate(lengths):
        spans.append(Span(rank, COMPUTE, "forward", i, at, at + length))
        if i % 2 == sends:
            half, end = at + length / 2, at + length
            spans.append(Span(rank, "net", "param", i, half, end, (0, 2), 64))
        at += length
    return spans


def ends_of(lengths, shift=0.0):
    return [shift + sum(lengths[: i + 1]) for i in range(len(lengths))]


def one_run(path, lengths, *, ranks=1, shifts=(0.0,), sends=1, predicted=None, skip=0):
    records = [
        record(
            r,
            ends_of(lengths, shifts[r]),
            spans=spans_of(r, lengths, sends, shifts[r]),
            period=2,
            start_s=shifts[r],
        )
        for r in range(ranks)
    ]
    write_tiny(path, {"a": [records]}, skip=skip)
    if predicted is not None:
        dump(path / "a/predicted.json", predicted.to_dict())
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


def test_the_measured_period_is_in_phase_with_the_predicted_and_typical(tmp_path):
    lengths = [9, 9, 1, 1, 1, 3, 1, 2, 5]
    # in phase from 2, 4, 6: 2, 4, 3 s; from 3, 5, 7 if the even iterations send: 2, 4, 7 s
    for sends, first in ((1, 6), (0, 5)):
        path = tmp_path / str(sends)
        run, contestant = one_run(path, lengths, sends=sends, predicted=PREDICTED, skip=2)
        found = measured_window(run, contestant)
        assert found is not None
        assert found[1].iterations == range(first, first + 2)


def test_the_typical_period_is_the_one_nearest_to_the_median(tmp_path):
    lengths = [1, 1, 1, 3, 1, 2]  # periods in phase: 2, 4, 3
    run, contestant = one_run(tmp_path, lengths, predicted=PREDICTED)
    found = measured_window(run, contestant)
    assert found is not None
    assert found[1].iterations == range(4, 6)


def test_without_spans_there_is_no_window(tmp_path):
    write_tiny(tmp_path, {"a": [[record(0, [1.0, 2.0, 3.0])]]})
    run = load(tmp_path)
    assert measured_window(run, run.contestants[0]) is None
    assert predicted_window(run.contestants[0]) is None


def test_clocks_with_other_origins_are_aligned_where_messages_end(tmp_path):
    run, contestant = one_run(tmp_path, [1, 1, 1, 1], ranks=2, shifts=(0.0, 1000.25))
    found = measured_window(run, contestant)
    assert found is not None
    window = found[1]
    assert window.length_s == pytest.approx(2.0)
    assert window.zero_s[1] - window.zero_s[0] == pytest.approx(1000.25)
    packed = pack(window, [COMPUTE, "net"])
    assert len(packed["rows"]) == 1, "equal ranks are stored once"
    assert packed["which"] == [0, 0]


def test_a_rank_that_computes_longer_keeps_its_lag(tmp_path):
    """Messages end together; the second rank begins 0.2 s late and the picture shows it."""
    early = [Span(0, COMPUTE, "forward", 0, 0.0, 0.5), Span(0, "net", "grad", 0, 0.9, 1.0, (0, 1))]
    late = [Span(1, COMPUTE, "forward", 0, 0.2, 0.9), Span(1, "net", "grad", 0, 0.9, 1.0, (0, 1))]
    ranks = [record(0, [1.0], spans=early), record(1, [1.0], spans=late, start_s=0.2)]
    run = load(write_tiny(tmp_path, {"a": [ranks]}))
    found = measured_window(run, run.contestants[0])
    assert found is not None
    assert [found[1].bounds_s(rank) for rank in (0, 1)] == [
        pytest.approx([0.0, 1.0]),
        pytest.approx([0.2, 1.0]),
    ]


def test_what_leaves_a_predicted_period_enters_at_its_beginning(tmp_path):
    _, contestant = one_run(tmp_path, [1, 1], predicted=PREDICTED)
    window = predicted_window(contestant)
    assert window is not None
    assert window.length_s == pytest.approx(4.0)
    messages = [(s.iteration, s.start_s - 8, s.end_s - 8) for s in window.shown[0] if s.bytes]
    assert messages == [(3, -1.0, 0.5), (5, 3.0, 4.5)]
    assert window.stands_for_all


def test_packing_keeps_names_and_times(tmp_path):
    run, contestant = one_run(tmp_path, [0.25, 0.5, 0.125, 0.75], predicted=None)
    found = measured_window(run, contestant)
    assert found is not None
    window = found[1]
    lanes = lanes_of([window, None], ["net", "unused"])
    assert lanes == [COMPUTE, "net"]
    spans = unpack(pack(window, lanes))[0]
    expected = [
        (
            lanes.index(s.lane),
            s.kind,
            *(s.buckets or (-1, -1)),
            s.bytes,
            None,
            s.iteration,
            s.start_s - window.zero_s[0],
            s.end_s - window.zero_s[0],
        )
        for s in window.shown[0]
    ]
    for got, want in zip(spans, expected, strict=True):
        assert got[:7] == want[:7]
        assert got[7:] == pytest.approx(want[7:], abs=window.length_s / 50_000)


def test_shrinking_leaves_out_ranks_first_then_iterations(tmp_path):
    run, contestant = one_run(tmp_path, [1] * 8, ranks=4, shifts=(0.0,) * 4)
    found = measured_window(run, contestant)
    assert found is not None
    window = found[1]
    assert shrink([window], most=window.size) == ([window], [])
    (half,), said = shrink([window], most=window.size // 2)
    assert list(half.shown) == [0, 2]
    assert said == ["Timelines show 2 of 4 ranks, to keep the page small."]
    (least,), said = shrink([window, None], most=2)[0][:1], shrink([window, None], most=2)[1]
    assert list(least.shown) == [0]
    assert len(least.iterations) == 1
    assert len(said) == 2


@pytest.fixture(scope="module")
def late_run(tmp_path_factory):
    facts = profile(12, 2, NEAR_AND_FAR)
    path = tmp_path_factory.mktemp("late")
    return load(write_run(path, facts, late(facts), iterations=20, recorded=15))


@pytest.mark.parametrize("source", ["predicted", "measured"])
def test_messages_keep_the_generation_that_they_carry(late_run, source):
    deft = next(c for c in late_run.contestants if c.label == "deft")
    found = measured_window(late_run, deft)
    assert found is not None
    window = found[1] if source == "measured" else predicted_window(deft)
    assert window is not None
    packed = pack(window, lanes_of([window], ["net", "slow"]))
    messages = [span for span in unpack(packed)[0] if span[0]]
    assert {lane for lane, *_ in messages} == {1, 2}
    for (*_, held, iteration, _, _), span in zip(
        messages, [s for s in window.shown[0] if s.bytes], strict=True
    ):
        age = next(a for a in (0, 1) if held == _ends(Windows(deft.plan).window(iteration, a)))
        assert span.carries == held
        assert age == (0 if span.start_s - window.zero_s[0] > _ready(window, iteration) else 1)
    # two iterations merged, one alone: at least one colour each, and the one closed before
    colours = {(first, stop): colour for first, stop, colour in packed["generations"]}
    lengths = {stop - first: colour for (first, stop), colour in colours.items()}
    assert set(lengths) == {1, 2}
    assert colours[_ends(Windows(deft.plan).window(window.iterations.start))] == 0
    assert {held for *_, held, _, _, _ in messages} <= set(colours)


def _ends(those):
    return those.start, those.stop


def _ready(window, iteration):
    """When the first backward of an iteration starts, in the window's time."""
    starts = [
        s.start_s
        for s in window.trace.spans
        if s.rank == 0 and (s.iteration, s.kind) == (iteration, "backward")
    ]
    return min(starts) - window.zero_s[0]


def test_synchronous_messages_that_cross_into_the_next_iteration_are_told_apart(late_run):
    told = {}
    for contestant in late_run.contestants:
        window = predicted_window(contestant)
        assert window is not None
        first = window.iterations.start
        told[contestant.label] = [
            (start - first, stop - first, colour)
            for start, stop, colour in pack(window, lanes_of([window], []))["generations"]
        ]
    assert told["ddp"] == [], "one iteration in view keeps its plain look"
    assert told["dear"] == [(-1, 0, 3), (0, 1, 0)]


def test_a_message_in_one_iteration_only_is_told_apart_when_another_reaches_in():
    spans = [Span(0, COMPUTE, "forward", i, float(i), i + 1.0) for i in range(3)]
    plain = [*spans, *(Span(0, "net", "grad", i, i + 0.5, i + 1.0, (0, 1), 8) for i in range(3))]
    late_end = replace(plain[-2], end_s=2.25)
    for messages, iterations, told in (
        (plain, range(1, 2), []),
        ([*plain, late_end], range(1, 2), [(1, 2, 0)]),
        ([*plain, late_end], range(2, 3), [(1, 2, 3), (2, 3, 0)]),
        ([*plain, late_end], range(1), []),
    ):
        trace = Trace("simulated", "x", ((1.0, 2.0, 3.0),), (0.0,), tuple(messages))
        shown = tuple(s for s in messages if s.end_s > iterations.start)
        shown = tuple(s for s in shown if s.start_s < iterations.stop)
        window = Window(trace, iterations, (float(iterations.start),), 1.0, {0: shown})
        assert pack(window, [COMPUTE, "net"])["generations"] == told


def test_the_measured_period_is_in_phase_by_what_messages_carry(tmp_path):
    """The same bucket in both iterations: only the age of its gradients tells the phases."""

    def spans(first, count):
        for i in range(first, first + count):
            yield Span(0, COMPUTE, "forward", i, float(i), i + 1.0)
            carries = (i, i + 1) if i % 2 else (i - 2, i)
            yield Span(0, "net", "grad", i, i + 0.5, i + 0.6, (0, 1), 8, carries)

    ends = [float(i + 1) for i in range(9)]
    write_tiny(tmp_path, {"a": [[record(0, ends, spans=list(spans(0, 9)), period=2)]]}, skip=3)
    predicted = Trace("simulated", "a", ((11.0, 12.0),), (10.0,), tuple(spans(10, 2)), 10, 2)
    dump(tmp_path / "a/predicted.json", predicted.to_dict())
    run = load(tmp_path)
    found = measured_window(run, run.contestants[0])
    assert found is not None
    assert found[1].iterations == range(4, 6)


def test_channels_follow_their_link_and_have_readable_names():
    names = ["net#10", "other", "slow", "net#2", "net", "slow#1"]
    spans = tuple(Span(0, name, "grad", 0, 0.0, 1.0) for name in names)
    trace = Trace("simulated", "x", ((1.0,),), (0.0,), spans)
    window = Window(trace, range(1), (0.0,), 1.0, {0: spans})
    lanes = lanes_of([window, None], ["slow", "net", "unused"])
    assert lanes == [COMPUTE, "slow", "slow#1", "net", "net#2", "net#10", "other"]
    assert [lane_name(lane) for lane in lanes[:4]] == ["compute", "slow", "slow, channel 2", "net"]
    assert lane_name("odd#name") == "odd#name"
