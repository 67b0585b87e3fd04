"""What holds for every page: it is whole, safe and small, and shows the numbers of the summary."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from itertools import pairwise
from math import isfinite

import pytest
from cases.pages import comparison_of, first_number, lanes_of, numbers_in, read
from cases.report_runs import RUNS
from cases.synthetic_runs import Entry, every_gradient, profile, three, write_run
from cases.tiny_runs import dump, record, steady, write_tiny

from offbeat.core.sim.trace import COMPUTE, Span
from offbeat.experiments.report import load, rank_rows, summarize, write
from offbeat.plan import Fact, Plan
from offbeat.profile import Link

NASTY = "</script><script>alert(1)</script><img src=x onerror=alert(2)> & \"'\u2028"
LINKS = ("src", "srcset", "href", "xlink:href", "data", "action", "poster")


@pytest.fixture(params=RUNS)
def page(request, page_of):
    return page_of(request.param)


def test_every_contestant_has_its_row_with_the_numbers_of_the_summary(page):
    rows = summarize(load(page.parent))
    cells = comparison_of(read(page))
    names = [row.label for row in rank_rows(rows)]
    assert [name.partition("-")[0] for name in cells] == [name.partition("-")[0] for name in names]
    for row, own in zip(rank_rows(rows), cells.values(), strict=True):
        if row.iteration_s is None:
            assert [*own] == ["why"]
            continue
        shown = {"k1": row.target_s, "k3": row.iteration_s, "k4": row.speedup}
        for look, value in (shown | {"k5": row.sent_bytes, "k6": row.final_loss}).items():
            if look in own:
                expected = None if value is None else pytest.approx(value, rel=0.051)
                assert first_number(own[look]) == expected, (row.label, look)
        assert first_number(own["k3"]) == pytest.approx(row.iteration_s, rel=5e-3)
        small = numbers_in(" ".join(node.text for node in own["k3"].all("small")))
        for value in (row.predicted_s, *(row.spread_s or ())):
            assert value is None or any(x == pytest.approx(value, rel=5e-3) for x in small)


def test_bars_are_in_proportion_and_their_parts_are_the_iteration(page):
    """In percent of one scale: computing and waiting, measured and, below it, predicted."""
    rows = rank_rows(summarize(load(page.parent)))
    bars = [own["k2"] for own in comparison_of(read(page)).values() if "k2" in own]
    scales = []
    for row, cell in zip((r for r in rows if r.iteration_s is not None), bars, strict=True):
        for look, seconds in (("m", row.iteration_s), ("p", row.predicted_s)):
            widths = [
                float(re.findall(r"width:([\d.]+)%", part.attributes["style"])[0])
                for bar in cell.all("div", f"bar {look}")
                for part in bar.all("i")
            ]
            assert bool(widths) == (seconds is not None)
            if seconds is not None:
                scales.append(sum(widths) / seconds)
            if look == "m" and row.split is not None:
                computed = row.split.measured.compute_s / row.split.measured.total_s
                assert widths[0] == pytest.approx(sum(widths) * computed, abs=0.02)
    assert scales == pytest.approx([scales[0]] * len(scales), rel=0.01)
    longest_s = max(s for r in rows for s in (r.iteration_s, r.predicted_s) if s is not None)
    assert longest_s * scales[0] == pytest.approx(100, abs=1)


def test_boxes_of_a_lane_lie_within_it_and_do_not_overlap(page):
    root = read(page)
    for lane in lanes_of(root):
        places = [(left, right) for _, left, right, _ in lane.boxes]
        assert all(-0.01 <= left < right <= 100.01 for left, right in places), lane.name
        assert all(a[1] <= b[0] + 0.02 for a, b in pairwise(places)), lane.name
    for mark in (mark for lane in root.all("div", "lane") for mark in lane.all("s")):
        assert 0 < float(re.findall(r"left:([\d.]+)", mark.attributes["style"])[0]) <= 100


def test_labels_of_charts_lie_within_the_frame_and_apart(page):
    for chart in read(page).all("div", "chart"):
        names, ends = set(), []
        for label in chart.all("span"):
            style = label.attributes["style"]
            left, top = (float(x) for x in re.findall(r"(?:left|top):([-\d.]+)%", style))
            assert -0.01 <= left <= 100.01
            look = label.attributes["class"].split()[0]
            assert -0.01 <= top <= (160 if look == "end" else 100.01)
            if look == "end":
                names.add(label.text)
                ends.append((top, left))
        for (top, left), (other, beside) in pairwise(sorted(ends)):
            assert abs(left - beside) > 20 or other - top > 7, "names overlap"
        assert names == {path.attributes["data-name"] for path in chart.all("path", "line")}


def test_it_is_small_needs_nothing_from_outside_and_runs_only_its_script(page):
    assert page.stat().st_size < 250_000
    assert not list(page.parent.rglob("*.part"))
    text, root = page.read_text(), read(page)
    for node in root.walk():
        assert node.tag not in ("link", "iframe", "object", "embed", "base", "img")
        assert not [name for name in node.attributes if name.startswith("on")]
        for name in LINKS:
            if name in node.attributes:
                assert (node.tag, name) == ("a", "href")
                target = node.attributes[name]
                assert target.startswith("#") or (page.parent / target).is_file()
    assert not re.search(r"@import|url\((?!#)|https?://", text)
    [script] = root.all("script")
    [policy] = (m for m in root.all("meta") if "http-equiv" in m.attributes)
    digest = base64.b64encode(hashlib.sha256("".join(script.children).encode()).digest()).decode()  # type: ignore[arg-type]
    assert f"script-src 'sha256-{digest}'" in policy.attributes["content"]
    assert "default-src 'none'" in policy.attributes["content"]


def test_chrome_traces_hold_the_ranks(page):
    for file in page.parent.glob("*/*.chrome.json"):
        events = json.loads(file.read_text())["traceEvents"]
        named = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
        spans = [event for event in events if event["ph"] == "X"]
        assert {(event["pid"], event["tid"]) for event in spans} <= named
        assert all(event["dur"] >= 0 and "ts" in event for event in spans)
        if file.name == "trace.chrome.json" and spans:
            [contestant] = (c for c in load(page.parent).contestants if c.label == file.parent.name)
            assert len({event["pid"] for event in spans}) == len(contestant.complete[0].ranks)


def test_lanes_show_what_was_recorded_on_one_scale(page_of):
    """The boxes of the first host take as long as its spans: of each kind, under each strategy."""
    page = page_of("typical")
    run, root = load(page.parent), read(page)
    lanes = [lane for lane in lanes_of(root) if lane.name in ("computes", "network")]
    order = [row.label for row in rank_rows(summarize(run))]
    assert [lane.name for lane in lanes] == ["computes", "network"] * 3
    [heading] = [h.text for h in root.all("h2") if h.attributes.get("id") == "timelines"]
    per_s = 100 / numbers_in(heading)[0]
    for label, computes, network in zip(order, lanes[::2], lanes[1::2], strict=True):
        [contestant] = [c for c in run.contestants if c.label == label]
        own = [span for span in contestant.complete[0].trace.spans if span.rank == 0]
        _, left, _, text = computes.boxes[0]
        first = int(re.findall(r"iteration (\d+)", text)[0])
        begin_s = next(s.start_s for s in own if s.iteration == first) - left / per_s
        for looks, boxes, spans in (
            ("n", network.boxes, [s for s in own if s.lane == "net"]),
            ("w", computes.boxes, [s for s in own if s.kind == "wait"]),
            ("bu", computes.boxes, [s for s in own if s.kind in ("backward", "update")]),
        ):
            seconds = sum(
                max(0.0, min(s.end_s - begin_s, 100 / per_s) - max(0.0, s.start_s - begin_s))
                for s in spans
            )
            shown = sum(b - a for kind, a, b, _ in boxes if kind in looks)
            assert shown == pytest.approx(per_s * seconds, rel=0.02, abs=0.5), (label, looks)
    assert len(root.all("td", "say")) == 3, "each prediction has its explanation"


def test_many_hosts_and_two_links_stay_small(tmp_path):
    facts = profile(12, 32, [Link("net", 1.2e-3, 8.2e6), Link("wan", 9e-3, 4.1e6)])
    page = write(write_run(tmp_path, facts, three(facts), iterations=7, recorded=7, repetitions=1))
    assert page.stat().st_size < 250_000
    root, expected = read(page), []
    for row in rank_rows(summarize(load(tmp_path))):
        links = ["net", "wan"][: 1 + (row.label != "local-sgd-5")]
        for host in ("slowest", "median", "fastest", "predicted"):
            expected += [host, *(links if host != "predicted" else [""] * len(links))]
    assert [lane.name for lane in lanes_of(root)] == expected
    assert [len(hosts.all("span")) for hosts in root.all("div", "hosts")] == [32] * 3


def test_nothing_that_a_user_wrote_becomes_markup(tmp_path):
    bad = record(
        0,
        steady(1, 8),
        strategy=NASTY,
        warnings=[NASTY],
        decisions=[(NASTY, NASTY)],
        spans=[Span(0, lane, NASTY, 7, 7.0, 8.0) for lane in (f"{NASTY}#1", "net")],
    )
    label = "<b>&\"'"
    write_tiny(
        tmp_path,
        {label: [[bad]], "gone": []},
        script=[NASTY],
        command=["offbeat", NASTY],
        note=NASTY,
        cluster={NASTY: NASTY, "links": [{NASTY: NASTY}], "overrides": {NASTY: {"x": [NASTY]}}},
        versions={NASTY: NASTY},
        started=NASTY,
        lab=NASTY,
    )
    facts = Fact("links", NASTY), Fact("tries", [dict.fromkeys(("capacity", "ratio"), NASTY)])
    dump(tmp_path / label / "plan.json", Plan(NASTY, 1, (), facts=facts).to_dict())
    (tmp_path / "gone/rep0").mkdir(parents=True)
    (tmp_path / "gone/rep0/rank0.log").write_text(NASTY)
    root = read(write(tmp_path))
    assert not root.all("img")
    assert len(root.all("script")) == 1
    assert not [n for node in root.walk() for n in node.attributes if n.startswith("on")]
    assert root.text.count("alert(1)") > 10
    assert any(NASTY in lane.name for lane in lanes_of(root))
    assert f"{label}, repetition 0" in root.text


def test_lines_have_the_recorded_losses_and_gaps_where_they_are_not_finite(tmp_path):
    losses = [3.0 - i / 50 for i in range(10)] + [float("nan"), float("inf")] + [2.0] * 10
    root = read(write(write_tiny(tmp_path, {"a": [[record(0, steady(1, 22), losses)]]})))
    charts = [chart for chart in root.all("div", "chart") if chart.all("path", "line")]
    for chart, shift in zip(charts, (0, 1), strict=True):
        [line], right = chart.all("path", "line"), float(chart.attributes["data-x"])
        low, high = map(float, chart.attributes["data-y"].split())
        _, _, width, height = map(float, chart.all("svg")[0].attributes["viewbox"].split())
        path = line.attributes["d"]
        assert path.count("M") == 2
        points = [tuple(map(int, point.split())) for point in re.split("[ML]", path)[1:]]
        known = [(i, loss) for i, loss in enumerate(losses) if isfinite(loss)]
        for (x, y), (i, loss) in zip(points, known, strict=True):
            assert right * x / width == pytest.approx(i + shift, abs=1e-2)
            assert high - (high - low) * y / height == pytest.approx(loss, abs=1e-3)


def test_points_where_the_target_was_reached_are_marked(page_of):
    """In seconds and in iterations."""
    rows = [r for r in summarize(load(page_of("typical").parent)) if r.target_s is not None]
    seconds, iterations = [c for c in read(page_of("typical")).all("div", "chart")
                           if c.all("path", "target")]  # fmt: skip
    for chart, reached in (
        (seconds, [row.target_s for row in rows]),
        (iterations, [row.target_iterations for row in rows]),
    ):
        low, high = map(float, chart.attributes["data-y"].split())
        places = [
            tuple(float(x) for x in re.findall(r"([\d.]+)%", hit.attributes["style"]))
            for hit in chart.all("span", "hit")
        ]
        right, top = float(chart.attributes["data-x"]), (high - rows[0].target_loss) / (high - low)
        assert sorted(places) == [
            pytest.approx((100 * x / right, 100 * top), abs=0.02) for x in sorted(reached)
        ]


def test_long_runs_have_no_larger_page(tmp_path):
    sizes = []
    for count in (240, 4000):
        losses = [2.0 - i / count for i in range(count)]
        ranks = [record(rank, steady(0.1, count), losses) for rank in (0, 1)]
        sizes.append(write(write_tiny(tmp_path / str(count), {"a": [ranks]})).stat().st_size)
    assert sizes[1] < 1.2 * sizes[0]


@pytest.mark.parametrize(
    "records",
    [
        {},
        {"a": []},
        {"a": [[record(0, [1.0])]]},
        {"a": [[record(0, steady(1, 8), [float("nan")] * 8)]]},
        {"a": [[record(0, steady(1, 8), [2.0] * 3)]], "ddp": []},
    ],
    ids=["nobody", "nothing", "one iteration", "not finite", "few losses"],
)
def test_poor_runs_still_have_a_page_and_a_strict_summary(tmp_path, records):
    def refuse(text):
        raise AssertionError(text)

    root = read(write(write_tiny(tmp_path, records)))
    assert len(root.all("h1")) == 1
    summary = json.loads((tmp_path / "summary.json").read_text(), parse_constant=refuse)
    assert [row["label"] for row in summary["rows"]] == [*records]


def test_what_changes_how_numbers_are_read_is_on_the_page(page_of, tmp_path):
    """Notes, probed links, changes of the network, problems, logs, warnings and decisions."""
    banners = [p.text for p in read(page_of("emulated")).all("p", "banner")]
    assert len(banners) == 2
    assert banners[1] == "Loopback."
    probed = {"link": "net", "hosts": [0, 1], "asked": "100mbit, 20ms", "measured": "98mbit, 21ms"}
    changed = {"strategy": "a", "repetition": 0, "at_s": 30.004, "change": "rate 20mbit for host 1"}
    path = write_tiny(tmp_path, {"a": [[record(0, [1.0])]]}, probed=[probed], changed=[changed])
    cells = [cell.text for cell in read(write(path)).all("td")]
    assert {"100mbit, 20ms", "98mbit, 21ms", "rate 20mbit for host 1", "30.00"} <= {*cells}
    troubled = read(page_of("troubled")).text
    for problem in json.loads((page_of("troubled").parent / "summary.json").read_text())[
        "problems"
    ]:
        assert problem.partition(": ")[0] in troubled
    assert "Traceback" in troubled
    assert read(page_of("typical")).text.count("gloo chose the interface by itself") == 1
    [table] = [
        [[cell.text for cell in row.all("td")] for row in part.all("tr")]
        for part in read(page_of("late")).all("section", "decisions")
    ]
    assert table[1:] == [["1.000", "1.021", "2", "no"], ["1.100", "1.009", "2, 1", "yes"]]
    assert "planned again with more capacity" in read(page_of("late")).text


def test_a_strategy_that_recorded_no_messages_has_an_empty_lane(tmp_path):
    """torch's DDP hides its messages inside backward; what is not known is not drawn."""
    facts = profile(6, 2)
    entry = Entry("ddp", "ddp", every_gradient(facts))
    path = write_run(tmp_path, facts, [entry], iterations=8, recorded=6, repetitions=1)
    for file in (path / "ddp/rep0").glob("rank*.jsonl"):
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        for line in lines:
            if line["kind"] == "spans":
                rows = line["spans"]["rows"]
                line["spans"]["rows"] = [row for row in rows if row[1] == COMPUTE]
        file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    computes, network, _, predicted = lanes_of(read(write(path)))
    assert (network.name, network.boxes) == ("network", [])
    assert computes.boxes
    assert predicted.boxes


def test_votes_and_exchanges_are_shown(page_of):
    assert re.search(r"rank 0 in \d+ %, rank 1 in \d+ %", read(page_of("votes")).text)
    root = read(page_of("gossip"))
    exchanges = [len([b for b in lane.boxes if b[0] == "n"]) for lane in lanes_of(root)]
    assert exchanges == [0, 1, 0, 2, 0, 1]  # below the gradients of each worker
    assert len(root.all("s", "tie")) == 2
