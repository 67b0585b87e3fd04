"""Votes in the report: what stayed local, who voted, what the page shows of it."""

from __future__ import annotations

import math
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cases.tiny_runs import record, steady, write_tiny

from offbeat.core.sim.trace import Trace
from offbeat.experiments.predictions import outcomes_of
from offbeat.experiments.record.recorder import VoteLog
from offbeat.experiments.report import load, summarize, write
from offbeat.experiments.report.curves import vote_seconds
from offbeat.experiments.report.table import render_details
from offbeat.experiments.report.votes import votes_of

YES = [[0, 1], [], [1], [], None]
VOTES = {
    "iterations": [0, 1, 2, 3, 4],
    "sent_bytes": [100, 0, 100, 0, 0],
    "spared_bytes": [0, 100, 0, 100, 100],
    "by_vote": {"sync": {"norm": [2.0, 2.1, math.nan, 0.0, 2.0], "change": [0.0] * 5, "yes": YES}},
}


def ranks(count=2):
    """Iterations of 3 s with an average, else of 1 s."""
    ends_s = [3.0, 4.0, 7.0, 8.0, 9.0]
    made = []
    for rank in range(count):
        data = record(rank, ends_s, [2.0, 1.9, 1.8, 1.7, 1.6], votes=VOTES)
        made.append({**data, "trace": {**data["trace"], "uneven": True}})
    return made


def run_of(path):
    plain = [record(0, steady(1.0, 5), [2.0] * 5)]
    return write_tiny(path, {"selsync": [ranks()], "ddp": [plain]})


def test_the_share_that_stayed_local(tmp_path):
    voted, plain = summarize(load(run_of(tmp_path)))
    assert (voted.lssr, voted.spared_bytes) == (pytest.approx(0.6), 300)
    assert voted.sent_bytes == pytest.approx(200 / 5)
    assert (plain.lssr, plain.spared_bytes) == (None, None)


def test_uneven_iterations_count_by_their_mean(tmp_path):
    voted, plain = summarize(load(run_of(tmp_path)))
    assert voted.iteration_s == pytest.approx(9 / 5)  # their median is 1
    assert plain.iteration_s == pytest.approx(1.0)
    trace = Trace("measured", "x", ((3.0, 4.0, 7.0, 8.0, 9.0),), (0.0,))
    assert trace.iteration_s() == pytest.approx(1.0)


def test_who_voted_when(tmp_path):
    contestant, plain = load(run_of(tmp_path)).contestants
    votes = votes_of(contestant.repetitions[0])
    assert votes_of(plain.repetitions[0]) is None
    assert (votes.yes_iterations(0), votes.yes_iterations(1)) == ([0], [0, 2])
    logged = contestant.repetitions[0].ranks[0].votes
    assert outcomes_of({"votes": logged}) == {"sync": [True, False, True, False, False]}
    assert votes.odd == 2 * 2  # two norms on each of two ranks
    assert vote_seconds(contestant.repetitions[0], votes) == {0: [0.0], 1: [0.0, 4.0]}


def test_layers_count_each(tmp_path):
    data = {**VOTES, "by_vote": {f"layer {b}": VOTES["by_vote"]["sync"] for b in range(3)}}
    write_tiny(tmp_path, {"a": [[{**one, "votes": data} for one in ranks()]]})
    [contestant] = load(tmp_path).contestants
    votes = votes_of(contestant.repetitions[0])
    assert [dict(yes) for yes in votes.yes] == [{0: 3, 1: 3}, {}, {1: 3}, {}, {}]


def test_the_page_and_the_table_say_so_only_where_there_are_votes(tmp_path):
    page = write(run_of(tmp_path / "voted")).read_text().replace("\u00a0", " ")
    assert "Averaged in 2 of 5 iterations" in page
    assert "rank 0 in 20 %, rank 1 in 40 %" in page
    marks = re.findall(r'data-n="rank (\d)"><svg[^>]*><path d="([^"]*)"', page)
    assert [(rank, path.count("M")) for rank, path in marks] == [("0", 1), ("1", 2)]
    assert "4 norms were zero or not finite" in page
    rows = summarize(load(tmp_path / "voted"))
    assert "omitted by votes" in render_details(rows, 100)
    plain = write_tiny(tmp_path / "plain", {"ddp": [[record(0, steady(1.0, 5), [2.0] * 5)]]})
    assert "Averaged in" not in write(plain).read_text()
    assert "votes" not in render_details(summarize(load(plain)), 100)


def test_bytes_of_encoded_messages_are_those_of_the_codes() -> None:
    """As those that a vote spares. The tensors hold the decoded mean."""

    def message(wire: object, coded_bytes: int) -> Any:
        transfer = SimpleNamespace(link="net", wire=wire)
        tensors = [torch.zeros(10)]
        return SimpleNamespace(
            transfer=transfer, tensors=tensors, passed=False, coded_bytes=coded_bytes
        )

    log = VoteLog()
    done: Any = SimpleNamespace(number=0, spared_bytes=7, shown={}, voted={})
    done.messages = [message(None, 0), message("int4", 5)]
    log.add_iteration(done, [])
    columns = log.pop_columns()
    assert (columns["sent_bytes"], columns["spared_bytes"]) == ([40 + 5], [7])
