"""Boxes of time, and numbers as text."""

from __future__ import annotations

from itertools import pairwise
from xml.etree import ElementTree

import pytest
from cases.pages import lanes_of, numbers_in, read
from cases.scripts import docs_script
from cases.synthetic_runs import profile
from hypothesis import given
from hypothesis import strategies as st

from offbeat import sim
from offbeat.core import words
from offbeat.core.sim.trace import COMPUTE, Span
from offbeat.experiments.report.boxes import compute_boxes, figure, message_boxes, ticks
from offbeat.strategies import BSP


@given(st.floats(1e-7, 1e5))
def test_numbers_keep_three_digits_and_their_unit(value):
    for text in (words.seconds(value), words.size(value * 1e6), words.column_of([value])(value)):
        [found] = numbers_in(text)
        assert found == pytest.approx(value * (1e6 if "B" in text else 1), rel=5.1e-3)
    assert numbers_in(words.error(value / 1e5 - 0.5))[0] == pytest.approx(
        value / 1e5 - 0.5, abs=5.1e-3
    )


@given(st.floats(-1e3, 1e3), st.floats(1e-4, 1e4), st.integers(2, 8))
def test_ticks_are_round_numbers_within_the_range(low, width, count):
    found = ticks(low, low + width, count)
    assert all(low - 1e-6 * width <= tick <= low + width * (1 + 1e-6) for tick in found)
    assert len(found) <= count + 1
    steps = {float(f"{b - a:.3g}") for a, b in pairwise(found)}
    assert len(steps) <= 1
    assert all(f"{step:e}"[0] in "125" for step in steps)


def span(kind, begin_s, end_s, bucket=None, iteration=0, lane=COMPUTE, size=0):
    buckets = None if bucket is None else (bucket, bucket + 1)
    return Span(0, lane, kind, iteration, begin_s, end_s, buckets, size)


def merged(*spans):
    """(class, begin, end) in a window of 10 s; slivers are below 40 ms."""
    found = compute_boxes(spans, 0.0, 10.0, lambda span: span.name)
    return [(box.look, round(box.begin_s, 3), round(box.end_s, 3)) for box in found]


def test_neighbours_of_one_kind_and_slivers_are_one_box():
    spans = [span("forward", i, i + 1, 2 - i) for i in range(3)]
    spans += [span("backward", 3 + i, 4 + i, i) for i in range(3)]
    assert merged(*spans, span("wait", 6, 7)) == [("f", 0, 3), ("b", 3, 6), ("w", 6, 7)]
    next_one = span("forward", 6, 7, 0, iteration=1)
    assert merged(*spans[:3], next_one) == [("f", 0, 3), ("f", 6, 7)]
    between = [span("backward", 0, 1, 0), span("update", 1, 1.01, 0), span("backward", 1.01, 2, 1)]
    assert merged(*between) == [("b", 0, 2)]
    beside = [span("update", 0, 1), span("other", 1, 1.01), span("wait", 1.01, 2)]
    assert merged(*beside) == [("u", 0, 1.01), ("w", 1.01, 2)]


def test_thin_messages_are_merged_and_keep_their_bytes():
    thin = [span("grad", i / 100, (i + 1) / 100, i, lane="net", size=1000) for i in range(6)]
    wide = [span("param", 1, 3, 0, lane="net", size=5), span("param", 2, 4, 1, lane="net", size=5)]
    found = message_boxes([*thin, *wide], 0.0, 10.0, lambda span: span.name)
    assert [(round(b.begin_s, 3), round(b.end_s, 3), b.short) for b in found] == [
        (0, 0.04, ""),
        (0.04, 0.06, ""),
        (1, 3, "0"),
        (3, 4, "1"),  # what begins under another message is drawn after it
    ]
    assert "4.00 kB" in found[0].text


def test_pictures_of_the_documentation_have_the_boxes_of_the_page():
    lanes, facts = docs_script("_lanes"), profile(3, 3)
    trace = sim.simulate(BSP().plan(facts), facts, iterations=6, record=6)
    picture = lanes.iterations_picture(trace, "<two>", range(2, 4), ["<one>"])
    drawn = [box[0] for lane in lanes_of(read(figure(picture))) for box in lane.boxes]
    svg = ElementTree.fromstring(lanes.svg_file(picture))
    looks = [node.get("class", "") for node in svg.iter() if node.tag.endswith("rect")]
    shown = [look.split()[1] for look in looks if look.startswith("box ")]
    assert sorted(shown) == sorted([*drawn, *{*drawn}])  # and the legend
    assert {"f", "b", "w", "n"} <= {*drawn}
