"""Which iterations are shown, and how ranks are aligned."""

from __future__ import annotations

import json

import pytest
from cases.synthetic_runs import NEAR_AND_FAR, late, profile, write_run
from cases.tiny_runs import dump, record, write_tiny

from offbeat.core.derive.windows import Windows
from offbeat.core.sim.trace import COMPUTE, Span, Trace
from offbeat.experiments.report import load
from offbeat.experiments.report.boxes import describer, iteration_text
from offbeat.experiments.report.timeline import (
    Window,
    lane_name,
    lanes_of,
    measured_window,
    predicted_window,
    recorded_runs,
)


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
    starts = [
        [span.start_s - window.zero_s[rank] for span in window.shown[rank]] for rank in (0, 1)
    ]
    assert starts[0] == pytest.approx(starts[1])


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


def test_a_longer_window_shows_what_was_recorded_after_the_period(tmp_path):
    """The prediction is repeated; the measured window begins where most of it was recorded."""
    lengths = [1, 1, 1, 3, 1, 2, 1, 3]  # periods in phase: 2, 4, 3, 4
    run, contestant = one_run(tmp_path, lengths, predicted=PREDICTED)
    found, expected = measured_window(run, contestant, 9.0), predicted_window(contestant, 9.0)
    assert found is not None
    assert expected is not None
    assert found[1].length_s == expected.length_s == 9.0
    assert found[1].iterations == range(2, 8)
    assert found[1].bounds_s(0) == pytest.approx([0, 1, 4, 5, 7, 8, 11])
    assert expected.bounds_s(0) == pytest.approx([0, 2, 4, 6, 8, 10])
    messages = [(s.start_s - 8, s.end_s - 8) for s in expected.shown[0] if s.bytes]
    assert messages == [(-1.0, 0.5), (3.0, 4.5), (7.0, 8.5)]


def test_measured_iterations_are_whole_recorded_periods_without_estimated_ones(tmp_path):
    run, contestant = one_run(tmp_path / "all", [1] * 9, skip=2)
    assert recorded_runs(run, contestant.complete[0]) == [range(2, 8)]
    path = tmp_path / "rough"
    one_run(path, [1] * 9, skip=2)
    file = path / "a/rep0/rank0.json"
    data = json.loads(file.read_text())
    data["trace"]["notes"] = {"estimated": [5]}
    dump(file, data)
    run = load(path)
    assert recorded_runs(run, run.contestants[0].complete[0]) == [range(2, 4), range(6, 8)]


@pytest.fixture(scope="module")
def late_run(tmp_path_factory):
    facts = profile(12, 2, NEAR_AND_FAR)
    path = tmp_path_factory.mktemp("late")
    return load(write_run(path, facts, late(facts), iterations=20, recorded=15))


@pytest.mark.parametrize("source", ["predicted", "measured"])
def test_messages_name_the_generation_that_they_carry(late_run, source):
    deft = next(c for c in late_run.contestants if c.label == "deft")
    found = measured_window(late_run, deft)
    assert found is not None
    window = found[1] if source == "measured" else predicted_window(deft)
    assert window is not None
    messages = [s for s in window.shown[0] if s.bytes]
    assert {span.lane for span in messages} == {"net", "slow"}
    for span in messages:
        held = window.generations.generation_of(span)
        age = next(a for a in (0, 1) if held == _ends(Windows(deft.plan).window(span.iteration, a)))
        assert span.carries == held
        ready_s = _ready(window, span.iteration)
        assert age == (0 if span.start_s - window.zero_s[0] > ready_s else 1)
        text = describer(window.zero_s[0], window.generations)(span)
        assert f"holds the gradients of {iteration_text(held)}\n" in text
    lengths = {s.carries[1] - s.carries[0] for s in messages}
    assert lengths == {1, 2}  # two iterations merged, one alone


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


def test_generations_of_messages_in_their_own_iteration_are_not_named(late_run):
    for contestant in late_run.contestants:
        window = predicted_window(contestant)
        assert window is not None
        describe = describer(window.zero_s[0], window.generations)
        named = any("the gradients of" in describe(s) for s in window.shown[0])
        assert named == (contestant.label == "deft")


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
