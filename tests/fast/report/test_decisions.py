"""What is said of a strategy's decisions, and that nothing odd breaks the page."""

from __future__ import annotations

import json
import re

import pytest
from cases.synthetic_runs import NEAR_AND_FAR, late, profile, write_run
from cases.tiny_runs import record, steady, write_tiny

from offbeat.experiments.report import load, write
from offbeat.experiments.report.decisions import decisions
from offbeat.plan import Fact, Plan


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    facts = profile(6, 2, NEAR_AND_FAR)
    return write(write_run(tmp_path_factory.mktemp("late"), facts, late(facts), iterations=40))


def test_facts_are_shown_of_every_plan_that_has_some(page):
    blocks = re.findall(r'aria-label="Decisions of (\w+)"', page.read_text())
    assert blocks == ["deft"]


def test_records_are_a_table_and_the_rest_is_in_words(page):
    text = page.read_text().partition("<h4>Decisions</h4>")[2].partition("</section>")[0]
    rows = [
        re.sub(r"<[^>]*>", " ", row).split() for row in re.findall(r"<tr>.*?</tr>", text, re.DOTALL)
    ]
    assert rows == [
        ["tries", "capacity", "ratio", "merges", "accepted"],
        ["1", "1.000", "1.021", "2", "no"],
        ["2", "1.100", "1.009", "2,", "1", "yes"],
    ]
    for said in (
        "<dd>net, and slow for what net cannot hide: 9 % less time than net alone</dd>",
        "<dt>coverage rate</dt><dd>1.120</dd>",
        "<dt>merges</dt><dd>2, 1</dd>",
        "<dd>accepted at the second try: the expected loss is within 1 %</dd>",
        "<summary>1 decision during the run</summary>",
        "iteration 40: planned again with more capacity (capacity: 1.1) "
        "<small>deft, repetitions 0-1, ranks 0-1</small>",
    ):
        assert said in text.replace("\u00a0", " ")


def contestant(path, facts, **fields):
    write_tiny(path, {"a": [[record(0, steady(1, 8), **fields)]]})
    plan = Plan("a", 1, facts=tuple(Fact(*fact) for fact in facts))
    (path / "a/plan.json").write_text(json.dumps(plan.to_dict()))
    (found,) = load(path).contestants
    return found


@pytest.mark.parametrize("facts", [[], [("empty", None)], [("sets", [])], [("none", {})]])
def test_without_facts_there_is_no_block(tmp_path, facts):
    assert decisions(contestant(tmp_path, facts)) is None
    assert "Decisions" not in write(tmp_path).read_text()


@pytest.mark.parametrize(
    ("fact", "rows", "tables"),
    [
        (("sets", [[0, 1], [2]], "per iteration"), [("sets", "0, 1, 2", "per iteration")], 0),
        (("coverage_rate", 1.5), [("coverage rate", "1.500", "")], 0),
        (("split", True), [("split", "yes", "")], 0),
        (("nested", {"why": "slow", "tries": [{"a": 1}, {"b": None}]}), [("why", "slow", "")], 1),
    ],
)
def test_any_fact_is_shown(tmp_path, fact, rows, tables):
    found = decisions(contestant(tmp_path, [fact]))
    assert found is not None
    assert len(found["facts"]) == len(rows)
    assert [(name, meaning) for name, _, meaning in found["facts"]] == [
        (name, meaning) for name, _, meaning in rows
    ]
    assert len(found["tables"]) == tables
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
    found = decisions(contestant(tmp_path, [], decisions=[decision]))
    assert found is not None
    assert found["later"] == [(text, "a, repetition 0, rank 0")]


def test_many_decisions_are_folded(tmp_path):
    many = [{"iteration": i, "what": "planned again"} for i in range(7)]
    contestant(tmp_path, [], decisions=many)
    assert "<details><summary>7 decisions during the run" in write(tmp_path).read_text()
