"""Traces: what is read off them, JSON, and the form that Perfetto reads."""

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.core.sim.trace import COMPUTE, Span, Trace, shift_span
from offbeat.experiments.report.write import chrome_events

SPANS = (
    Span(1, "net", "grad", 1, 3.0, 5.5, (0, 2), 12),
    Span(0, COMPUTE, "forward", 0, 0.0, 1.0, (1, 2)),
    Span(0, COMPUTE, "wait", 1, 3.0, 4.0),
)
TRACE = Trace(
    source="measured",
    strategy="bsp",
    ends_s=((2.0, 4.0, 8.0, 9.0, 11.0), (2.5, 4.0, 7.0, 9.5, 10.0)),
    starts_s=(0.5, 0.0),
    spans=SPANS,
    first=3,
    period=2,
    notes={"ranks": 2},
)

seconds = st.floats(0, 1e6)
spans = st.builds(
    Span,
    rank=st.integers(0, 3),
    lane=st.sampled_from([COMPUTE, "net"]),
    kind=st.text(),
    iteration=st.integers(0, 9),
    start_s=seconds,
    end_s=seconds,
    buckets=st.none() | st.tuples(st.integers(0, 9), st.integers(0, 9)),
    bytes=st.integers(0, 10**12),
)
rows = st.lists(seconds, max_size=5).map(tuple)
traces = st.builds(
    Trace,
    source=st.sampled_from(["simulated", "measured"]),
    strategy=st.text(),
    ends_s=st.lists(rows, min_size=1, max_size=3).map(tuple),
    starts_s=rows,
    spans=st.lists(spans, max_size=4).map(tuple),
    first=st.integers(0, 9),
    period=st.integers(1, 9),
    notes=st.dictionaries(st.text(), st.integers()),
)


@settings(max_examples=50, deadline=None)
@given(traces)
def test_json_round_trip(trace):
    assert Trace.from_dict(json.loads(json.dumps(trace.to_dict()))) == trace


def test_files(tmp_path):
    TRACE.save(tmp_path / "trace.json")
    assert Trace.load(tmp_path / "trace.json") == TRACE
    with pytest.raises(ValueError, match=r"schema \(9\)"):
        Trace.from_dict(TRACE.to_dict() | {"schema": 9})


def test_iterations_end_with_the_slowest_rank_and_whole_periods_count():
    """Ranks that saw fewer iterations bound the trace."""
    assert TRACE.iteration_seconds() == [2.5, 1.5, 4.0, 1.5, 1.5]
    assert (TRACE.world_size, TRACE.iterations) == (2, 5)
    trace = Trace("measured", "bsp", ((1.0, 2.0, 3.0), (1.0, 2.5)), (0.0, 0.0))
    assert (trace.iterations, trace.iteration_seconds()) == (2, [1.0, 1.5])
    assert TRACE.period_seconds() == [2.0, 2.75]
    assert TRACE.period_seconds(skip=1) == [2.75, 1.5]
    assert TRACE.period_seconds(skip=4) == []
    assert TRACE.iteration_s() == 2.375
    assert TRACE.iteration_s(skip=1) == 2.125
    with pytest.raises(ValueError, match="period"):
        TRACE.iteration_s(skip=4)


def test_names_of_spans():
    assert [span.name for span in SPANS] == ["grad[0:2]", "forward[1:2]", "wait"]


def test_chrome_form():
    data = json.loads(json.dumps(chrome_events(TRACE)))
    events = data["traceEvents"]
    assert {e["ph"] for e in events} == {"M", "X"}
    names = [(e["pid"], e["tid"], e["args"]["name"]) for e in events if e["ph"] == "M"]
    assert names == [
        (0, 0, "rank 0 (bsp, measured)"),
        (0, 0, "compute"),
        (0, 1, "net"),
        (1, 0, "rank 1 (bsp, measured)"),
        (1, 0, "compute"),
        (1, 1, "net"),
    ]
    assert events[-3] == {
        "name": "grad[0:2]",
        "cat": "grad",
        "ph": "X",
        "pid": 1,
        "tid": 1,
        "ts": 3e6,
        "dur": 2.5e6,
        "args": {"iteration": 1, "bytes": 12},
    }


def test_a_span_moves_with_the_iterations_whose_gradients_it_holds():
    span = Span(1, "net", "grad", 4, 2.0, 2.5, (0, 3), 100, carries=(2, 4))
    moved = Span(1, "net", "grad", 10, 5.0, 5.5, (0, 3), 100, carries=(8, 10))
    assert shift_span(span, 6, 3.0) == moved
    assert shift_span(replace(span, carries=None), 1).carries is None
