"""Boxes of time: what a trace has is drawn, where it was."""

import re
from itertools import pairwise
from xml.etree import ElementTree

import pytest
from cases.scripts import docs_script

from offbeat.core.sim.trace import COMPUTE, Span
from offbeat.experiments.report.boxes import (
    Numbers,
    Picture,
    axis,
    compute_boxes,
    figure,
    legend,
    message_boxes,
    ticks,
)
from offbeat.experiments.report.gossip import gossip_picture, predicted_gossip, visible_part
from offbeat.profile import Bucket, Link, Profile
from offbeat.sim import Ranks, predict, simulate
from offbeat.strategies import BSP, P3, A2CiD2, Cyclic

lanes = docs_script("_lanes")

PROFILE = Profile(
    tuple(Bucket(f"b{i}", 0.01, 0.02, 50_000) for i in range(3)),
    (Link("net", 0.001, 1e6),),
    world_size=3,
    update_s=0.005,
)


def place(node):
    left, width = re.match(r"left:([-\d.]+)%;width:([-\d.]+)%", node.get("style")).groups()
    return float(left), float(left) + float(width)


def boxes(picture):
    """(class, left, right) of every box, in percent."""
    root = ElementTree.fromstring(f"<p>{picture}</p>")
    return [(node.get("class"), *place(node)) for node in root.iter("i")]


def texts(picture):
    return [node.text for node in ElementTree.fromstring(f"<p>{picture}</p>").iter() if node.text]


def lane_names(picture):
    return re.findall(r'data-n="([^"]*)"', picture)


def shown(strategy, iterations, names=()):
    """A strategy's iterations, drawn."""
    last = iterations.stop + 2
    trace = simulate(strategy.plan(PROFILE), PROFILE, iterations=last, record=last)
    return trace, figure(lanes.iterations_picture(trace, str(strategy), iterations, names))


def test_two_iterations_of_bsp():
    trace, picture = shown(BSP(), range(2, 4), names=["one", "<two>"])
    drawn = [kind for kind, *_ in boxes(picture)]
    counts = {"f": 6, "b": 6, "w": 2, "u": 6, "n": 2}
    assert {kind: drawn.count(kind) for kind in drawn} == counts
    assert re.findall(r'key (\w)"', legend(picture)) == ["f", "b", "u", "w", "n"]
    assert {"one", "<two>", "gradients 0–2"} <= set(texts(picture))
    assert lane_names(picture) == ["computes", "net"]
    assert texts(picture).count("0–2") == 2  # the messages, where "gradients 0–2" does not fit
    # The scale: a message of 150 kB at 1 MB/s and 1 ms, between the ends of two iterations.
    length_s = 2 * trace.iteration_s()
    _, left, right = next(box for box in boxes(picture) if box[0] == "n")
    assert right - left == pytest.approx(100 * 0.151 / length_s, abs=0.02)


def test_what_lies_outside_is_cut():
    trace, picture = shown(P3(slice_elements=5000), range(5, 7))
    reaching = [s for s in trace.spans if s.start_s < trace.ends_s[0][4] < s.end_s]
    assert any(span.lane != COMPUTE for span in reaching)  # messages of iterations before
    assert all(0 <= left < right <= 100.01 for _, left, right in boxes(picture))


def test_ranks_that_differ_have_lanes_of_their_own():
    _, picture = shown(Cyclic(), range(4, 6))
    names = lane_names(picture)
    assert [name for name in names if name.startswith("rank")] == ["rank 0", "rank 1", "rank 2"]
    assert names.count("sends") == 3
    for lane in re.findall(r'<div class="lane"[^>]*>(.*?)</div>', picture):
        own = sorted((left, right) for _, left, right in boxes(lane))
        assert own
        assert all(a[1] <= b[0] + 0.02 for a, b in pairwise(own))


def test_workers_at_their_own_pace():
    spans = [
        Span(0, COMPUTE, "backward", 0, 0.0, 0.2),
        Span(0, COMPUTE, "wait", 1, 0.2, 0.5),
        Span(0, COMPUTE, "backward", 1, 0.5, 0.9),
        Span(1, COMPUTE, "backward", 0, 0.0, 0.5),
    ]
    picture = figure(lanes.workers_picture(spans, "two", until_s=0.8))
    assert [kind for kind, *_ in boxes(picture)] == ["c", "w", "c", "c"]
    assert [right for _, _, right in boxes(picture)][2] == pytest.approx(100)  # goes on
    assert lane_names(picture) == ["worker 0", "worker 1"]


def test_gossip_joins_partners():
    trace = predict(A2CiD2(), PROFILE, ranks=Ranks(scale=(1, 1, 2))).trace
    gossip = predicted_gossip(trace)
    assert gossip is not None
    part = visible_part(gossip)
    picture = figure(gossip_picture(part, "gossip"))
    ties = re.findall(r'class="tie" style="left:([\d.]+)%;top:([\d.]+)px;height:(\d+)px"', picture)
    assert ties
    seen = [kind for kind, *_ in boxes(picture)]
    assert 2 * len(ties) <= seen.count("n") <= 2 * len(part.exchanges)
    assert {int(height) for *_, height in ties} == {36, 72}  # neighbours, and two lanes apart


def span(kind, begin_s, end_s, bucket=None, iteration=0, lane=COMPUTE, size=0):
    buckets = None if bucket is None else (bucket, bucket + 1)
    return Span(0, lane, kind, iteration, begin_s, end_s, buckets, size)


def merged(*spans):
    """(class, begin, end, number of inner boxes) in a window of 10 s; slivers are below 40 ms."""
    found = compute_boxes(spans, 0.0, 10.0, lambda span: span.name)
    return [(box.look, round(box.begin_s, 3), round(box.end_s, 3), len(box.inner)) for box in found]


def test_neighbours_of_one_kind_are_one_box_with_its_buckets_inside():
    spans = [span("forward", i, i + 1, 2 - i) for i in range(3)]
    spans += [span("backward", 3 + i, 4 + i, i) for i in range(3)]
    assert merged(*spans, span("wait", 6, 7)) == [("f", 0, 3, 3), ("b", 3, 6, 3), ("w", 6, 7, 0)]
    next_one = span("forward", 6, 7, 0, iteration=1)
    assert merged(*spans[:3], next_one) == [("f", 0, 3, 3), ("f", 6, 7, 0)]


def test_slivers_are_merged_into_their_neighbours():
    between = [span("backward", 0, 1, 0), span("update", 1, 1.01, 0), span("backward", 1.01, 2, 1)]
    assert merged(*between) == [("b", 0, 2, 2)]
    tiny = [
        span(kind, (2 * i + k) / 100, (2 * i + k + 1) / 100 - 0.005 * k, i)
        for i in range(50)
        for k, kind in enumerate(("backward", "update"))
    ]
    ((look, begin, end, inner),) = merged(*tiny)
    assert (look, begin, end, inner) == ("b", 0, 0.995, 50)
    apart = [span("forward", 0, 0.01, 0), span("backward", 5, 6, 1)]
    assert merged(*apart) == [("f", 0, 0.01, 0), ("b", 5, 6, 0)]
    beside = [span("update", 0, 1), span("other", 1, 1.01), span("wait", 1.01, 1.02)]
    assert merged(*beside) == [("u", 0, 1.02, 0)]
    assert merged(*beside[:2], span("wait", 1.01, 2)) == [("u", 0, 1.01, 0), ("w", 1.01, 2, 0)]


def test_thin_messages_are_merged_and_keep_their_bytes():
    thin = [span("grad", i / 100, (i + 1) / 100, i, lane="net", size=1000) for i in range(6)]
    wide = [span("param", 1, 3, 0, lane="net", size=5), span("param", 2, 4, 1, lane="net", size=5)]
    found = message_boxes([*thin, *wide], 0.0, 10.0, lambda span: span.name)
    assert [(round(b.begin_s, 3), round(b.end_s, 3), b.buckets) for b in found] == [
        (0, 0.04, (0, 4)),
        (0.04, 0.06, (4, 6)),
        (1, 3, (0, 1)),
        (3, 4, (1, 2)),  # what begins under another message is drawn after it
    ]
    assert found[0].text == "4 messages, 4.00 kB\ngrad[0:1]"
    assert [box.label for box in found] == [
        "4 messages",
        "2 messages",
        "parameters 0",
        "parameters 1",
    ]


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0.0, 5.3, [0, 1, 2, 3, 4, 5]),
        (3.93, 5.75, [4.0, 4.5, 5.0, 5.5]),
        (-0.4, 1.1, [0.0, 0.5, 1.0]),
        (0.0, 0.0037, [0, 0.001, 0.002, 0.003]),
        (1200, 8000, [2000, 4000, 6000, 8000]),
    ],
)
def test_ticks_are_round_numbers_within_the_range(low, high, expected):
    assert ticks(low, high, 4 if low else 6) == expected


def test_an_axis_names_its_unit_once_and_ends_with_the_window():
    assert re.findall(r">([\d.]+ ?\w*)<", axis(0.25)) == ["0 ms", "50", "100", "150", "200", "250"]
    assert 'style="left:100.00%">250<' in axis(0.25)


def test_a_label_is_escaped():
    picture = figure(Picture("<&>", [], 1.0, Numbers([(0.0, 1.0)], ["<b>"])))
    assert 'aria-label="&lt;&amp;&gt;"' in picture
    assert "&lt;b&gt;" in picture


def test_an_svg_file_has_the_same_boxes_axis_legend_and_both_schemes():
    trace = simulate(BSP().plan(PROFILE), PROFILE, iterations=6, record=6)
    picture = lanes.iterations_picture(trace, "<two>", range(2, 4), ["<one>"])
    root = ElementTree.fromstring(lanes.svg_file(picture))
    svg = "{http://www.w3.org/2000/svg}"
    assert root.get("aria-label") == "<two>"
    rects = [r for r in root.iter(f"{svg}rect") if r.get("class", "").startswith("box ")]
    keys = [r for r in rects if float(r.get("width")) == lanes.SWATCH]
    drawn = [
        (r.get("class").split()[1], float(r.get("x")), float(r.get("width")))
        for r in rects
        if r not in keys
    ]
    assert [key.get("class") for key in keys] == [f"box {look}" for look in "fbuwn"]
    expected = boxes(figure(picture))
    assert [look for look, *_ in drawn] == [look for look, *_ in expected]
    inside = lanes.WIDTH - lanes.LEFT - lanes.RIGHT
    for (_, x, width), (_, left, right) in zip(drawn, expected, strict=True):
        assert x == pytest.approx(lanes.LEFT + left / 100 * inside, abs=0.2)
        assert width == pytest.approx(max(0.6, (right - left) / 100 * inside - 0.8), abs=0.2)
    words = {text.text for text in root.iter(f"{svg}text")}
    assert {"<one>", "computes", "net", "0 ms", "forward", "gradients 0–2"} <= words
    style = root.find(f"{svg}style").text
    assert style.count("--network:") == 2
    assert "prefers-color-scheme: dark" in style
