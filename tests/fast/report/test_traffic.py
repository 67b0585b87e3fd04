"""Load of links over time, in traces worked out by hand."""

from __future__ import annotations

import pytest

from offbeat.core.sim.trace import COMPUTE, Span, Trace
from offbeat.experiments.report.traffic import link_loads


def trace_of(*spans, ranks=2, iterations=1, period=1, iteration_s=8.0, **fields):
    """Iterations of 8 s, so steps of 2 s between two ranks."""
    ends_s = tuple((i + 1) * iteration_s for i in range(iterations))
    return Trace(
        source="measured",
        strategy="x",
        ends_s=(ends_s,) * ranks,
        starts_s=(0.0,) * ranks,
        spans=spans,
        period=period,
        **fields,
    )


def sent(rank, start_s, end_s, size, *, way=(0, 1), iteration=0, lane="net"):
    return Span(rank, lane, "grad", iteration, start_s, end_s, (0, 1), size, None, way)


def reduced(rank, start_s, end_s, size, *, iteration=0, bucket=0):
    return Span(rank, "net", "grad", iteration, start_s, end_s, (bucket, bucket + 1), size)


def test_only_the_sender_of_a_message_is_loaded_while_both_are_at_it():
    # Rank 0 is ready at 1, rank 1 at 2 only; the last bytes arrive at 6: two steps of half each.
    (load,) = link_loads(trace_of(sent(0, 1.0, 5.0, 120), sent(1, 2.0, 6.0, 120)))
    assert (load.rank, load.link, load.step_s) == (0, "net", 2.0)
    assert load.step_bytes == pytest.approx((0, 60, 60, 0))
    assert load.unevenness == pytest.approx(2.0)
    assert load.peak_bytes_per_s == pytest.approx(30.0)


def test_an_all_reduce_is_a_ring():
    # Three ranks send 2 * 2/3 of it, when the last of them has come to it; steps of 2 s.
    spans = [reduced(rank, float(rank), 6.0, 300) for rank in range(3)]
    loads = link_loads(trace_of(*spans, ranks=3, iteration_s=12.0))
    assert [load.rank for load in loads] == [0, 1, 2]
    for load in loads:
        assert load.step_bytes == pytest.approx((0, 200, 200, 0, 0, 0))


def test_one_row_stands_for_all_ranks():
    (load,) = link_loads(
        trace_of(reduced(0, 0.0, 4.0, 300), ranks=1, iteration_s=12.0, notes={"ranks": 3})
    )
    assert load.step_bytes == pytest.approx((200, 200, 0, 0, 0, 0))


def test_what_reaches_into_the_next_iteration_loads_its_beginning():
    (load,) = link_loads(trace_of(sent(0, 7.0, 10.0, 90), sent(1, 7.0, 10.0, 90)))
    assert load.step_bytes == pytest.approx((60, 0, 0, 30))


def test_a_message_longer_than_an_iteration_loads_all_of_it():
    (load,) = link_loads(trace_of(sent(0, 0.0, 10.0, 100), sent(1, 0.0, 10.0, 100)))
    assert load.step_bytes == pytest.approx((40, 20, 20, 20))


def test_channels_of_a_link_add_up_and_links_do_not():
    spans = [
        sent(rank, 0.0, 2.0, size, lane=lane)
        for lane, size in (("net", 10), ("net#1", 20), ("aux", 5))
        for rank in (0, 1)
    ]
    loads = {load.link: load.step_bytes for load in link_loads(trace_of(*spans))}
    assert loads == {"net": (30.0, 0.0, 0.0, 0.0), "aux": (5.0, 0.0, 0.0, 0.0)}


def test_iterations_are_laid_over_one_another():
    # The second one sends a step later; the mean of both counts.
    spans = [
        sent(r, start_s, start_s + 2, 40, iteration=i)
        for i, start_s in ((0, 0.0), (1, 10.0))
        for r in (0, 1)
    ]
    (load,) = link_loads(trace_of(*spans, iterations=2))
    assert load.step_bytes == pytest.approx((20, 20, 0, 0))


def test_a_period_is_a_whole():
    # Bucket 0 in even iterations, bucket 1 in odd ones: two iterations of four steps.
    spans = [
        reduced(r, 8.0 * i, 8.0 * i + 4, 40, iteration=i, bucket=i) for i in (0, 1) for r in (0, 1)
    ]
    loads = link_loads(trace_of(*spans, iterations=2, period=2))
    assert loads[0].step_bytes == pytest.approx((20, 20, 0, 0) * 2)
    assert link_loads(trace_of(*spans[:2], iterations=2, period=2)) == []


def test_an_iteration_without_messages_belongs_to_its_period():
    spans = [reduced(r, 0.0, 2.0, 40) for r in (0, 1)]
    spans += [Span(r, COMPUTE, "forward", i, 8.0 * i, 8.0 * i + 4) for i in (0, 1) for r in (0, 1)]
    loads = link_loads(trace_of(*spans, iterations=2, period=2))
    assert loads[0].step_bytes == pytest.approx((40, *[0] * 7))


def test_the_first_iterations_and_one_that_is_not_complete_do_not_count():
    spans = [sent(r, 8.0 * i, 8.0 * i + 2, 40, iteration=i) for i in range(4) for r in (0, 1)]
    spans += [sent(r, 2.0, 4.0, 1000, lane="net#1") for r in (0, 1)]
    last = [span for span in spans if span.iteration == 3 and span.rank == 0]
    kept = [span for span in spans if span not in last]
    (load,) = link_loads(trace_of(*kept, iterations=4), skip=1)
    assert load.step_bytes == pytest.approx((40, 0, 0, 0))


def test_compute_is_no_load():
    assert link_loads(trace_of(Span(0, COMPUTE, "forward", 0, 0.0, 1.0))) == []
