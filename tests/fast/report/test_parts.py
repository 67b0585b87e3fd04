"""Where a prediction was wrong: parts by hand, and that they add up."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from statistics import fmean

import pytest
from cases.synthetic_runs import profile, three, write_run
from cases.tiny_runs import dump, record, write_tiny

from offbeat.core.sim.trace import COMPUTE, Span, Trace
from offbeat.experiments.report import load, summarize, write
from offbeat.experiments.report.breakdown import Parts, Split, explain_error, parts_of
from offbeat.experiments.report.timeline import Window


def spans_of(rank, compute_s, begin_s, end_s, shift_s=0.0, iterations=3):
    """Each iteration computes, then waits for one message from `begin_s` to `end_s`, its end."""
    spans = []
    for i in range(iterations):
        at = shift_s + i * end_s
        spans += [
            Span(rank, COMPUTE, "backward", i, at, at + compute_s),
            Span(rank, COMPUTE, "wait", i, at + compute_s, at + end_s),
            Span(rank, "net", "grad", i, at + begin_s, at + end_s, (0, 1), 8),
        ]
    return spans


def run_of(path, *, ranks, predicted):
    """Two measured ranks and one simulated that stands for both."""
    records = [
        record(
            rank,
            [shift + end * (i + 1) for i in range(3)],
            spans=spans_of(rank, compute, begin, end, shift),
            start_s=shift,
        )
        for rank, (compute, begin, end, shift) in enumerate(ranks)
    ]
    write_tiny(path, {"a": [records]})
    compute, begin, end = predicted
    trace = Trace(
        "simulated",
        "a",
        ((end,),),
        (0.0,),
        tuple(spans_of(0, compute, begin, end, iterations=1)),
        notes={"iteration_s": end, "ranks": 2},
    )
    dump(path / "a" / "predicted.json", trace.to_dict())
    return path


def test_parts_by_hand(tmp_path):
    """Both issue the message .1 s before their compute is over, rank 0 at .9 s and rank 1 at 1.1 s;
    it ends at 1.5 s. Clocks differ."""
    ranks = ((1.0, 0.9, 1.5, 0.0), (1.2, 1.1, 1.5, 100.0))
    (row,) = summarize(load(run_of(tmp_path, ranks=ranks, predicted=(0.9, 0.8, 1.1))))
    split = row.split
    for parts, expected in (
        (split.predicted, (0.9, 0.2, 0.0, 0.3)),
        # The message is on the way from 1.1 s on, when rank 1 has come to it.
        (split.measured, (1.1, (0.4 + 0.3) / 2, 0.1 / 2, 0.4)),
    ):
        found = (parts.compute_s, parts.messages_s, parts.waiting_s, parts.links_s)
        assert found == pytest.approx(expected)
    differences = (split.compute_s, split.messages_s, split.waiting_s)
    assert differences == pytest.approx((0.2, 0.15, 0.05))
    assert split.longer_s == pytest.approx(0.4)
    assert explain_error(split, row.iteration_s) == (
        "Predicted 27 % too short. It computed 200 ms longer, waited 150 ms longer for its "
        "messages and 50.0 ms longer for other hosts."
    )


def test_parts_are_means_over_the_recorded_periods_and_add_up(tmp_path):
    """On runs of every kind of the synthetic strategies, with two repetitions."""
    facts = profile()
    path = write_run(tmp_path / "run", facts, three(facts))
    run = load(path)
    rows = summarize(run)
    assert all(row.split is not None for row in rows)
    for contestant, row in zip(run.contestants, rows, strict=True):
        split = row.split
        recorded = [  # 30 iterations of 120 are recorded, in whole periods
            seconds for rep in contestant.complete for seconds in rep.trace.iteration_seconds()[90:]
        ]
        assert split.measured.total_s == pytest.approx(fmean(recorded), rel=1e-3)
        assert split.measured.total_s == pytest.approx(row.iteration_s, rel=0.02)
        assert split.longer_s == row.iteration_s - row.predicted_s
        assert split.predicted.total_s == pytest.approx(row.predicted_s, rel=1e-6)
        for parts in (split.predicted, split.measured):
            assert min(parts.compute_s, parts.messages_s, parts.waiting_s) >= -1e-12
            assert parts.links_s >= parts.messages_s
    page = write(path).read_text()
    assert page.count('class="say"') == len(rows)
    assert all(row["split"] for row in json.loads((path / "summary.json").read_text())["rows"])


def test_parts_are_an_iteration_whatever_overlaps():
    """Against a sum over a grid of milliseconds; spans at random, also beyond the edges."""
    rng = random.Random(1)
    for _ in range(20):
        spans = []
        for _ in range(12):
            begin = rng.randrange(-300, 1300)
            end = begin + rng.randrange(400)
            kind, lane = rng.choice(
                [("backward", COMPUTE), ("wait", COMPUTE), ("grad", "net"), ("param", "net#1")]
            )
            spans.append(Span(0, lane, kind, 0, begin / 1000, end / 1000, (0, 1), 1, None, None))
        trace = Trace("measured", "x", ((1.0,),), (0.0,), tuple(spans))
        window = Window(trace, range(1), (0.0,), 1.0, {0: tuple(spans)})
        parts = parts_of(window)
        assert parts.total_s == pytest.approx(1.0)

        def covered(ms, lanes, spans=spans):
            at = (ms + 0.5) / 1000
            return any(
                s.start_s <= at < s.end_s and s.kind != "wait" and (s.lane == COMPUTE) in lanes
                for s in spans
            )

        busy = sum(covered(ms, {True}) for ms in range(1000))
        either = sum(covered(ms, {True, False}) for ms in range(1000))
        links = sum(covered(ms, {False}) for ms in range(1000))
        assert parts.compute_s == pytest.approx(busy / 1000)
        assert parts.messages_s == pytest.approx((either - busy) / 1000)
        assert parts.links_s == pytest.approx(links / 1000)


@pytest.mark.parametrize("longer_s", [0.029, -0.029])
def test_small_errors_are_not_explained(longer_s):
    parts = Parts(0.5, 0.3, 0.2, 0.4)
    measured = replace(parts, compute_s=0.5 + longer_s)
    said = explain_error(Split(parts, measured, longer_s), 1 + longer_s)
    assert said == f"As predicted ({'−2.8' if longer_s > 0 else '+3.0'} %)."
    twice = replace(parts, compute_s=0.5 + 2 * longer_s)
    said = explain_error(Split(parts, twice, 2 * longer_s), 1 + 2 * longer_s, ["A cause."])
    assert said == (
        "Predicted 5.5 % too short. It computed 58.0 ms longer. A cause."
        if longer_s > 0
        else "Predicted 6.2 % too long. It computed 58.0 ms less. A cause."
    )


def test_only_parts_above_a_tenth_are_named_the_largest_first():
    before = Parts(0.5, 0.3, 0.2, 0.4)
    after = Parts(0.49, 0.35, 0.3, 0.4)
    said = explain_error(Split(before, after, 0.14), 1.14)
    assert said == (
        "Predicted 12 % too short. It waited 100 ms longer for other hosts and 50.0 ms longer for "
        "its messages."
    )


def test_no_split_where_no_iteration_is_typical(tmp_path):
    path = run_of(tmp_path, ranks=((1.0, 1.0, 1.5, 0.0),) * 2, predicted=(1.0, 1.0, 1.5))
    for rank in (0, 1):
        file = path / f"a/rep0/rank{rank}.json"
        data = json.loads(file.read_text())
        data["trace"]["uneven"] = True
        dump(file, data)
    (row,) = summarize(load(path))
    assert row.iteration_s == pytest.approx(1.5)
    assert row.split is None


def test_estimated_parts_are_no_error_of_compute(tmp_path):
    """The measured window is one whose backward was timed; without one the split says so."""
    path = run_of(tmp_path, ranks=((1.0, 0.9, 1.5, 0.0),) * 2, predicted=(0.9, 0.8, 1.1))

    def note(*iterations):
        for rank in (0, 1):
            file = path / f"a/rep0/rank{rank}.json"
            data = json.loads(file.read_text())
            data["trace"]["notes"] = {"estimated": list(iterations)}
            dump(file, data)

    note(1)
    (row,) = summarize(load(path))
    assert row.split is not None
    assert not row.split.estimated
    note(0, 1, 2)
    (row,) = summarize(load(path))
    assert row.split.estimated
    assert "computed" not in explain_error(row.split, row.iteration_s)
    assert "estimated" in explain_error(row.split, row.iteration_s)
    write(path)
    assert json.loads((path / "summary.json").read_text())["rows"][0]["split"]["estimated"] is True
