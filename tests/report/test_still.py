"""Still pictures: what a trace has is drawn, where it was."""

from itertools import pairwise
from xml.etree import ElementTree

import pytest
from support.scripts import docs_script

from offbeat.core.sim.trace import COMPUTE, Span
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
SVG = "{http://www.w3.org/2000/svg}"


def boxes(picture):
    """(class, left, right) of every box."""
    found = ElementTree.fromstring(picture).iter(f"{SVG}rect")
    return [
        (r.get("class").split()[1], float(r.get("x")), float(r.get("x")) + float(r.get("width")))
        for r in found
        if r.get("class").startswith("box ")
    ]


def words(picture):
    return [text.text for text in ElementTree.fromstring(picture).iter(f"{SVG}text")]


def shown(strategy, iterations, **options):
    """A strategy's iterations, drawn."""
    last = iterations.stop + 2
    trace = simulate(strategy.plan(PROFILE), PROFILE, iterations=last, record=last)
    return trace, lanes.iterations_svg(trace, str(strategy), iterations, **options)


def test_two_iterations_of_bsp():
    trace, picture = shown(BSP(), range(2, 4), names=["one", "<two>"])
    drawn = [kind for kind, *_ in boxes(picture)]
    counts = {"forward": 6, "backward": 6, "wait": 2, "update": 6, "grad": 2}
    assert {kind: drawn.count(kind) for kind in drawn} == counts
    assert lanes.legend_kinds(picture) == [kind for kind in lanes.LEGEND if kind in counts]
    texts = words(picture)
    assert {"one", "<two>", "compute", "net"} <= set(texts)
    assert texts.count("0-2") == 2  # the messages; updates are too short for theirs
    # The scale: a message of 150 kB at 1 MB/s and 1 ms, between the ends of two iterations.
    length_s = 2 * trace.iteration_s()
    assert texts[-1] == f"{1e3 * length_s:.3g} ms"
    _, left, right = next(box for box in boxes(picture) if box[0] == "grad")
    assert right - left == pytest.approx(
        0.151 / length_s * (lanes.WIDTH - lanes.LEFT - lanes.RIGHT), abs=1
    )


def test_what_lies_outside_is_cut():
    trace, picture = shown(P3(slice_elements=5000), range(5, 7))
    reaching = [s for s in trace.spans if s.start_s < trace.ends_s[0][4] < s.end_s]
    assert any(span.lane != COMPUTE for span in reaching)  # messages of iterations before
    assert all(
        lanes.LEFT <= left < right <= lanes.WIDTH - lanes.RIGHT for _, left, right in boxes(picture)
    )
    assert {"g0"} < {kind for kind in lanes.legend_kinds(picture) if kind.startswith("g")}


def test_ranks_that_differ_have_rows_of_their_own():
    _, picture = shown(Cyclic(), range(4, 6))
    texts = words(picture)
    assert [text for text in texts if text.startswith("rank")] == ["rank 0", "rank 1", "rank 2"]
    assert texts.count("sends") == 3
    assert "send" in lanes.legend_kinds(picture)
    root = ElementTree.fromstring(picture)
    rows: dict[str, list[tuple[float, float]]] = {}
    for rect in root.iter(f"{SVG}rect"):
        if rect.get("class") == "box send":
            left = float(rect.get("x"))
            rows.setdefault(rect.get("y"), []).append((left, left + float(rect.get("width"))))
    for row in map(sorted, rows.values()):
        assert all(a[1] < b[0] for a, b in pairwise(row))


def test_workers_at_their_own_pace():
    spans = [
        Span(0, COMPUTE, "backward", 0, 0.0, 0.2),
        Span(0, COMPUTE, "wait", 1, 0.2, 0.5),
        Span(0, COMPUTE, "backward", 1, 0.5, 0.9),
        Span(1, COMPUTE, "backward", 0, 0.0, 0.5),
    ]
    picture = lanes.workers_svg(spans, "two", until_s=0.8)
    assert [kind for kind, *_ in boxes(picture)] == ["computes", "wait", "computes", "computes"]
    ends = [right for _, _, right in boxes(picture)]
    assert ends[2] == pytest.approx(lanes.WIDTH - lanes.RIGHT, abs=1)  # goes on
    assert {"worker 0", "worker 1", "800 ms"} <= set(words(picture))


def test_gossip_joins_partners():
    trace = predict(A2CiD2(), PROFILE, ranks=Ranks(scale=(1, 1, 2))).trace
    picture = lanes.gossip_svg(trace, "gossip", units=10)
    root = ElementTree.fromstring(picture)
    ties = [line for line in root.iter(f"{SVG}line") if line.get("class") == "tie"]
    assert ties
    assert len(list(root.iter(f"{SVG}circle"))) == 2 * len(ties)
    told = trace.notes["gossip"]
    seen = [kind for kind, *_ in boxes(picture)]
    assert 2 * len(ties) <= seen.count("exchange") <= 2 * len(told["exchanges"])
    assert all(line.get("x1") == line.get("x2") for line in ties)
