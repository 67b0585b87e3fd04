"""The page: self-contained, escaped, small, and there for every kind of run."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from html.parser import HTMLParser
from math import isfinite

import pytest
from cases.synthetic_runs import Entry, every_gradient, profile, three, write_run
from cases.tiny_runs import dump, record, steady, write_tiny

from offbeat.core.sim.trace import Span
from offbeat.experiments.report import load, rank_rows, summarize, write
from offbeat.experiments.report.chart import SIZE
from offbeat.experiments.report.curves import MOST_POINTS
from offbeat.experiments.report.drawing import NOT_RECORDED, window_length_s
from offbeat.experiments.report.timeline import measured_window
from offbeat.plan import Fact, Plan
from offbeat.profile import Link

NASTY = "</script><script>alert(1)</script><img src=x onerror=alert(2)> & \"'\u2028"


class Elements(HTMLParser):
    """Start tags with their attributes; the text of every script."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.scripts, self._inside = [], [], False
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self._inside = tag == "script"
        if self._inside:
            self.scripts.append("")

    def handle_endtag(self, tag):
        self._inside = self._inside and tag != "script"

    def handle_data(self, data):
        if self._inside:
            self.scripts[-1] += data


@pytest.fixture(scope="module")
def typical(tmp_path_factory):
    facts = profile()
    path = write_run(
        tmp_path_factory.mktemp("runs") / "typical", facts, three(facts), iterations=60
    )
    return write(path)


def text_of(page):
    """Text of the page without tags, script and style."""
    text = re.sub(r"<(style|script)>.*?</\1>", " ", page.read_text(), flags=re.DOTALL)
    return " ".join(html.unescape(re.sub(r"<[^>]*>", " ", text)).split())


def lanes_of(page):
    """Name, and (class, left, right, title) of the boxes, of each lane of the page."""
    found = []
    for name, lane in re.findall(
        r'<div class="lane[^"]*" data-n="([^"]*)">(.*?)</div>', page.read_text(), re.DOTALL
    ):
        boxes = re.findall(
            r'<i class="(\w+)" style="left:([\d.]+)%;width:([\d.]+)%"[^>]*? title="([^"]*)"', lane
        )
        found.append((name, [(k, float(a), float(a) + float(b), t) for k, a, b, t in boxes]))
    return found


def test_everything_is_written(typical):
    folder = typical.parent
    assert typical == folder / "report.html"
    written = sorted(str(p.relative_to(folder)) for p in folder.glob("*/*.chrome.json"))
    labels = ("ddp", "dreamddp-5", "local-sgd-5")
    names = ("predicted.chrome.json", "trace.chrome.json")
    assert written == [f"{label}/{name}" for label in labels for name in names]
    assert not list(folder.rglob("*.part"))


def test_the_page_needs_nothing_from_outside(typical):
    text = typical.read_text()
    for tag, attributes in Elements(text).tags:
        for name in ("src", "srcset", "href", "xlink:href", "data", "action", "poster"):
            value = attributes.get(name)
            if value is None:
                continue
            assert (tag, name) == ("a", "href"), f"<{tag} {name}={value}>"
            assert not re.match(r"\w+:|//", value)
        assert tag not in ("link", "iframe", "object", "embed", "base")
    assert "@import" not in text
    assert not re.search(r"url\((?!#)", text)
    assert "http://" not in text
    assert "https://" not in text


def test_the_policy_allows_exactly_the_script_of_the_page(typical):
    elements = Elements(typical.read_text())
    (policy,) = (
        a["content"] for t, a in elements.tags if a.get("http-equiv") == "Content-Security-Policy"
    )
    digest = base64.b64encode(hashlib.sha256(elements.scripts[0].encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in policy
    assert "default-src 'none'" in policy


def test_links_lead_to_the_traces(typical):
    hrefs = [a["href"] for t, a in Elements(typical.read_text()).tags if t == "a"]
    for href in (h for h in hrefs if not h.startswith("#")):
        assert (typical.parent / href).is_file()


def test_a_typical_page_is_small(typical):
    assert typical.stat().st_size < 250_000


def test_many_ranks_and_two_links_stay_below_300_kb(tmp_path):
    facts = profile(40, 32, [Link("net", 1.2e-3, 8.2e6), Link("wan", 9e-3, 4.1e6)])
    path = write_run(tmp_path, facts, three(facts), iterations=7, recorded=7, repetitions=1)
    page = write(path)
    assert page.stat().st_size < 300_000
    names = [name for name, _ in lanes_of(page)]
    hosts = ("slowest", "median", "fastest", "predicted")
    expected = []
    for row in rank_rows(summarize(load(path))):
        links = ["net", "wan"][: 1 + (row.label != "local-sgd-5")]
        for host in hosts:
            expected += [host, *(links if host != "predicted" else [""] * len(links))]
    assert names == expected
    assert len(re.findall(r'title="host \d+: computes', page.read_text())) == 3 * 32


def test_lanes_show_what_was_recorded_on_one_scale(typical):
    """Each box of the first host is a span, or adjacent spans, at its place in the window."""
    run = load(typical.parent)
    length_s = window_length_s(run)
    lanes = [lane for lane in lanes_of(typical) if lane[0] in ("computes", "network")]
    order = [row.label for row in rank_rows(summarize(run))]
    assert [name for name, _ in lanes] == ["computes", "network"] * 3
    for label, (_, computes), (_, network) in zip(order, lanes[::2], lanes[1::2], strict=True):
        (contestant,) = [c for c in run.contestants if c.label == label]
        found = measured_window(run, contestant, length_s)
        assert found is not None
        window = found[1]
        zero_s = window.zero_s[0]
        spans = window.shown[0]
        sent = [s for s in spans if s.lane == "net"]
        texts = [title for *_, title in network]
        assert sum(int(t.split()[0]) if " messages," in t else 1 for t in texts) == len(sent)
        for kind, boxes, own in (
            ("n", network, sent),
            ("w", computes, [s for s in spans if s.kind == "wait"]),
            ("f", computes, [s for s in spans if s.kind == "forward"]),
        ):
            drawn = sum(b - a for look, a, b, t in boxes if look == kind and " of bucket" not in t)
            drawn += sum(b - a for look, a, b, t in boxes if look == kind == "n" and " of b" in t)
            seconds = sum(
                min(s.end_s - zero_s, length_s) - max(0.0, s.start_s - zero_s) for s in own
            )
            assert drawn == pytest.approx(100 * seconds / length_s, abs=0.5 + 0.02 * len(own))
        assert all(0 <= a < b <= 100.01 for _, a, b, _ in [*computes, *network])


def test_the_numbers_are_on_the_page_with_their_words(typical):
    text = re.sub(r"<[^>]*>", " ", typical.read_text().split("<script")[0])
    for word in ("predicted", "no schedule of this kind", "to loss", "fit error", "vs DDP"):
        assert word in text
    assert "dreamddp-5 reaches loss" in text
    assert "emulated" not in text


def test_emulated_compute_and_notes_are_said(tmp_path):
    facts = profile(6, 2)
    path = write_run(
        tmp_path,
        facts,
        three(facts),
        iterations=12,
        recorded=11,
        repetitions=1,
        emulated=True,
        lab="none",
        note="Unshaped loopback.",
    )
    text = write(path).read_text()
    assert "Emulated compute:" in text
    assert "layers sleep instead of computing</a>" in text
    assert "these losses say nothing about learning" in text
    assert '<p class="banner" role="note">Unshaped loopback.</p>' in text
    assert "layers sleep instead of computing." in text
    assert "sleep" in json.loads((path / "summary.json").read_text())["sentence"]


def test_an_unshaped_run_is_said_even_without_a_note(tmp_path):
    write_tiny(tmp_path, {"a": [[record(0, steady(1, 8))]]}, lab="none")
    assert "the links were not shaped" in write(tmp_path).read_text()


def test_nothing_that_a_user_wrote_becomes_markup(tmp_path):
    bad = record(
        0,
        steady(1, 8),
        strategy=NASTY,
        warnings=[NASTY],
        decisions=[{"iteration": NASTY, "what": NASTY, NASTY: NASTY}],
        spans=[Span(0, f"{NASTY}#1", NASTY, 7, 7.0, 8.0)],
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
    tried = dict.fromkeys(("capacity", "ratio", "merges", "accepted"), NASTY)
    notes = {"links": NASTY, "merges": NASTY, "preserver": {"tries": [tried], "decision": NASTY}}
    facts = tuple(Fact(name, value) for name, value in notes.items())
    dump(tmp_path / label / "plan.json", Plan(NASTY, 1, (), facts=facts).to_dict())
    (tmp_path / "gone/rep0").mkdir(parents=True)
    (tmp_path / "gone/rep0/rank0.log").write_text(NASTY)
    elements = Elements(write(tmp_path).read_text())
    tags = [tag for tag, _ in elements.tags]
    assert "img" not in tags
    assert len(elements.scripts) == 1
    assert f"{label}, repetition 0" in text_of(tmp_path / "report.html")
    assert not any(name.startswith("on") for _, attrs in elements.tags for name in attrs)


def test_lines_have_the_recorded_losses_and_gaps_where_they_are_not_finite(tmp_path):
    losses = [3.0 - i / 50 for i in range(10)] + [float("nan"), float("inf")] + [2.0] * 10
    write_tiny(tmp_path, {"a": [[record(0, steady(1, 22), losses)]]})
    chart, per_iteration = re.findall(
        r'data-x="([^"]*)" data-y="(\S*) ([^"]*)".*?class="line best d0"[^>]* d="([^"]*)"',
        write(tmp_path).read_text(),
        re.DOTALL,
    )
    for (right, low, high, path), shift in ((chart, 0), (per_iteration, 1)):
        assert path.count("M") == 2
        points = [tuple(map(int, point.split())) for point in re.split("[ML]", path)[1:]]
        assert len(points) == 20
        step = (float(high) - float(low)) / SIZE
        known = [(i, loss) for i, loss in enumerate(losses) if isfinite(loss)]
        for (x, y), (i, loss) in zip(points, known, strict=True):
            assert float(right) * x / SIZE == pytest.approx(i + shift, abs=1e-2)
            assert float(high) - step * y == pytest.approx(loss, abs=step)


def test_what_was_asked_of_links_and_what_changed_is_on_the_page(tmp_path):
    probed = {"link": "net", "hosts": [0, 1], "asked": "100mbit, 20ms", "measured": "98mbit, 21ms"}
    changed = {"strategy": "a", "repetition": 0, "at_s": 30.004, "change": "rate 20mbit for host 1"}
    path = write_tiny(
        tmp_path, {"a": [[record(0, [1.0, 2.0])]]}, probed=[probed], changed=[changed]
    )
    page = write(path).read_text()
    for text in ("Asked and measured", "98mbit, 21ms", "Changes during the run", "rate 20mbit for"):
        assert text in page
    assert ">30.00<" in page


def test_failures_are_on_the_page(tmp_path):
    reps = [[record(0, steady(1, 8)), record(1, steady(1, 8))]] * 2
    write_tiny(tmp_path, {"a": reps, "b": []}, cluster={"hosts": 2})
    (tmp_path / "a/rep1/rank1.json").unlink()
    (tmp_path / "a/rep1/rank1.log").write_text("Traceback: it broke\n")
    text = write(tmp_path).read_text()
    for said in (
        ">3 problems</a>",
        "1 of 2 repetitions failed",
        "rank 1 of 2 left no record",
        "Traceback: it broke",
        "<b>b, repetition 0</b> does not count: was not run",
    ):
        assert said in text


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
def test_poor_runs_still_have_a_page(tmp_path, records):
    text = write(write_tiny(tmp_path, records)).read_text()
    assert text.rstrip().endswith("</html>")


def test_warnings_are_grouped(typical):
    text = typical.read_text()
    assert text.count("gloo chose the interface by itself") == 1
    assert "ddp, repetitions 0-1, rank 1; local-sgd-5, repetitions 0-1, rank 1" in text


@pytest.mark.parametrize("name", ["trace.chrome.json", "predicted.chrome.json"])
def test_chrome_traces_are_valid(typical, name):
    data = json.loads((typical.parent / "dreamddp-5" / name).read_text())
    events = data["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    named = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    assert {event["ph"] for event in events} == {"X", "M"}
    assert {event["pid"] for event in spans} == {0, 1, 2, 3}
    assert {(event["pid"], event["tid"]) for event in spans} <= named
    for event in spans:
        assert event["dur"] >= 0
        assert {"name", "cat", "ts", "args"} <= set(event)


def test_a_second_report_replaces_the_first(tmp_path):
    write_tiny(tmp_path, {"a": [[record(0, steady(1, 8))]]})
    assert write(tmp_path).read_text() == write(tmp_path).read_text()


def test_a_strategy_that_recorded_no_messages_says_so(tmp_path):
    """torch's DDP hides its messages inside backward; an empty lane would be a false claim."""
    facts = profile(6, 2)
    entry = Entry("ddp", "ddp", every_gradient(facts))
    path = write_run(tmp_path, facts, [entry], iterations=8, recorded=6, repetitions=1)
    for file in (path / "ddp/rep0").glob("rank*.json"):
        data = json.loads(file.read_text())
        data["trace"]["spans"]["rows"] = [
            row for row in data["trace"]["spans"]["rows"] if row[1] == "compute"
        ]
        file.write_text(json.dumps(data))
    page = write(path)
    (_, computes), (network, boxes), _, (_, predicted) = lanes_of(page)
    assert network == "network"
    assert computes
    assert boxes == []
    assert predicted
    assert page.read_text().count(NOT_RECORDED) == 1


def test_the_page_of_a_long_run_is_no_larger_and_says_what_it_leaves_out(tmp_path):
    sizes = []
    for count, said in ((MOST_POINTS, ""), (4000, f"Long curves show {MOST_POINTS} points.")):
        losses = [2.0 - i / count for i in range(count)]
        ranks = [record(rank, steady(0.1, count), losses) for rank in (0, 1)]
        text = write(write_tiny(tmp_path / str(count), {"a": [ranks]})).read_text()
        assert ("Long curves" in text) == bool(said)
        assert said in text
        sizes.append(len(text))
    assert sizes[1] < 1.2 * sizes[0]
    means = [record(0, steady(0.1, count), losses, losses_of=8)]
    text = write(write_tiny(tmp_path / "means", {"a": [means]})).read_text()
    assert "each loss the mean of 8 iterations" in text
