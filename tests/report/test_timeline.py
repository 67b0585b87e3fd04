"""Which period is shown, how ranks are aligned, and how spans are packed."""

from __future__ import annotations

import pytest
from report.tiny import dump, record, write_tiny

from offbeat.report import load
from offbeat.report.timeline import (
    lanes_of,
    measured_window,
    pack,
    predicted_window,
    shrink,
)
from offbeat.trace import COMPUTE, Span, Trace


def unpack(packed):
    """Rank -> (lane, kind, buckets from, to, bytes, iteration, start, end) per span."""
    found = {}
    for rank, which in zip(packed["ranks"], packed["which"], strict=True):
        flat, start, spans = packed["rows"][which], 0, []
        for i in range(0, len(flat), 4):
            start += flat[i + 2]
            end = start + flat[i + 3]
            times = (start * packed["unit_s"], end * packed["unit_s"])
            spans.append((*packed["names"][flat[i]], packed["first"] + flat[i + 1], *times))
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
            s.iteration,
            s.start_s - window.zero_s[0],
            s.end_s - window.zero_s[0],
        )
        for s in window.shown[0]
    ]
    for got, want in zip(spans, expected, strict=True):
        assert got[:6] == want[:6]
        assert got[6:] == pytest.approx(want[6:], abs=window.length_s / 50_000)


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
