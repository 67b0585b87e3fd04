"""What is said of a strategy's decisions, and that nothing odd breaks the page."""

from __future__ import annotations

import json
import re

import pytest
from report.synthetic import NEAR_AND_FAR, late, profile, write_run
from report.tiny import record, steady, write_tiny

from offbeat.plan import Plan
from offbeat.report import load, write
from offbeat.report.decisions import decisions


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    facts = profile(6, 2, NEAR_AND_FAR)
    return write(write_run(tmp_path_factory.mktemp("late"), facts, late(facts), iterations=40))


def test_only_strategies_that_decided_have_a_block(page):
    blocks = re.findall(r'aria-label="Decisions of (\w+)"', page.read_text())
    assert blocks == ["deft"]


def test_the_tries_are_a_table_and_the_rest_is_in_words(page):
    text = page.read_text().partition("<h4>Decisions</h4>")[2].partition("</section>")[0]
    rows = [
        re.sub(r"<[^>]*>", " ", row).split() for row in re.findall(r"<tr>.*?</tr>", text, re.DOTALL)
    ]
    assert rows[1:] == [
        ["1", "1.00×", "2", "1.021", "rejected"],
        ["2", "1.10×", "2,", "1", "1.009", "accepted"],
    ]
    for said in (
        "<dd>net, and slow for what net cannot hide: 9 % less time than net alone</dd>",
        "<dd>1.12 <small>time to send all gradients on the first link / ",
        "<dd>2, 1 <small>",
        "<dd>accepted at the second try: the expected loss is within 1 %</dd>",
        "<summary>1 decision during the run</summary>",
        "iteration 40: planned again with more capacity (capacity: 1.1) "
        "<small>deft, repetitions 0-1, ranks 0-1</small>",
    ):
        assert said in text


def contestant(path, notes, **fields):
    write_tiny(path, {"a": [[record(0, steady(1, 8), **fields)]]})
    facts = [[name, value, ""] for name, value in notes.items()]
    plan = json.dumps({**Plan("a", 1, ()).to_dict(), "facts": facts})
    (path / "a/plan.json").write_text(plan)
    (found,) = load(path).contestants
    return found


@pytest.mark.parametrize("notes", [{}, {"sets": [[0]], "fill": []}, {"merges": None}])
def test_without_decisions_there_is_no_block(tmp_path, notes):
    assert decisions(contestant(tmp_path, notes)) is None
    assert "Decisions" not in write(tmp_path).read_text()


@pytest.mark.parametrize(
    ("notes", "facts", "tries"),
    [
        ({"merges": [2, 1]}, ["merged per update"], []),
        ({"coverage_rate": "high", "capacity": True, "links": "one"}, ["links"], []),
        (
            {"links": {"net": "fast"}, "preserver": {"decision": "off"}},
            ["links", "convergence"],
            [],
        ),
        ({"preserver": "off", "capacity": 1}, ["capacity"], []),
        (
            {"preserver": {"tries": [{}, 3, None, {"accepted": [], "ratio": float("nan")}]}},
            [],
            [["–", "–", "–", "–"], ["–", "–", "nan", "–"]],
        ),
        ({"preserver": {"tries": 3}, "merges": [1]}, ["merged per update"], []),
    ],
)
def test_missing_and_odd_fields_are_left_out(tmp_path, notes, facts, tries):
    found = decisions(contestant(tmp_path, notes))
    assert found is not None
    assert [name for name, _, _ in found["facts"]] == facts
    assert [list(tried.values()) for tried in found["tries"]] == tries
    assert "<h4>Decisions</h4>" in write(tmp_path).read_text()


@pytest.mark.parametrize(
    ("decision", "text"),
    [
        ({"iteration": 7, "what": "fell back to ddp"}, "iteration 7: fell back to ddp"),
        ({"what": "stopped", "why": "slow", "s": 0.5}, "stopped (why: slow, s: 0.5)"),
        ({"iteration": 7}, "iteration 7: –"),
        ("words alone", "words alone"),
    ],
)
def test_decisions_during_the_run(tmp_path, decision, text):
    found = decisions(contestant(tmp_path, {}, decisions=[decision]))
    assert found is not None
    assert found["later"] == [(text, "a, repetition 0, rank 0")]


def test_many_decisions_are_folded(tmp_path):
    many = [{"iteration": i, "what": "planned again"} for i in range(7)]
    contestant(tmp_path, {}, decisions=many)
    assert "<details><summary>7 decisions during the run" in write(tmp_path).read_text()
