"""Logs of events: files, bounds, and reasons why events cannot be repeated."""

from __future__ import annotations

import json

import pytest

from offbeat.core.runtime.event_log import EventLog, RecordedEvents


def test_events_return_from_the_file(tmp_path):
    log = EventLog(tmp_path / "order0.json", {"rank": 0})
    labels = [0.1 + 0.2, 1e-300, 3.0]
    log.add("x", *labels)
    log.count("a")
    log.count("a")
    log.add("r")
    log.count("a")
    log.end_iteration()
    log.save()
    read = RecordedEvents(tmp_path / "order0.json")
    assert list(read) == [("x", tuple(labels)), ("a", (2,)), ("r", ()), ("a", (1,))]
    assert read.facts == {"rank": 0, "problem": ""}
    assert len(read.ends_s) == 1


def test_a_log_is_bounded(tmp_path):
    """After the largest number of events none is added, not even a repetition."""
    log = EventLog(tmp_path / "order0.json", {}, most=2)
    for kind in "rrss":
        log.add(kind)
    log.add("r")
    log.save()
    assert json.loads((tmp_path / "order0.json").read_text())["kinds"] == "rr"
    assert "more than 2 events" in RecordedEvents(tmp_path / "order0.json").facts["problem"]


def test_the_first_reason_counts(tmp_path):
    log = EventLog(tmp_path / "order0.json", {})
    log.refuse("one")
    log.refuse("two")
    log.add("r")
    assert log.problem == "one"


def test_a_file_that_cannot_be_written_warns(tmp_path):
    (tmp_path / "file").write_text("")
    log = EventLog(tmp_path / "file" / "order0.json", {})
    with pytest.warns(UserWarning, match="a rehearsal cannot repeat this job"):
        log.save()
