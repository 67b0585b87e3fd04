"""The printed table: no line is too wide, no name is broken, failed rows are sentences."""

from __future__ import annotations

from dataclasses import replace

import pytest
from cases.tiny_runs import record, steady, write_tiny
from report.test_headline import DDP, FAST, row, split

from offbeat.experiments.record.disturbed import Disturbance
from offbeat.experiments.report import load, words
from offbeat.experiments.report.table import grid, render, render_details

DETAILED = replace(
    FAST,
    label="dreamddp-due=delayed-wire=int4-period=10",
    split=split(0.4, 0.1),
    predicted_s=0.48,
    predicted_error=-0.04,
    sent_bytes=831e3,
    final_loss=2.4,
    falling=True,
)
SLOW = replace(
    DDP,
    split=split(0.6, 1.4, estimated=True),
    predicted_s=2.6,
    predicted_error=0.3,
    sent_bytes=3.47e6,
    final_loss=2.3,
    disturbed=(Disturbance(0, foreign=0.3),),
)
FAILED = row(
    "local-sgd",
    problem="rank 2 ended with MemoryError; log: "
    "runs/20250102-030405-train/local-sgd/rep0/rank2.log",
)
ROWS = [SLOW, DETAILED, FAILED, row("selsync")]


@pytest.fixture
def run(tmp_path):
    return load(write_tiny(tmp_path, {"ddp": [[record(0, steady(1.0, 8))]]}))


@pytest.mark.parametrize("width", [60, 80, 100, 140])
def test_no_line_is_too_wide_and_no_name_is_broken(run, width):
    text = render(run, ROWS, width)
    long = [line for line in text.splitlines() if len(line) > width]
    assert all(" " not in line.strip() for line in long), long  # a path is never broken
    for name in ("dreamddp [1]", "ddp ~", "local-sgd", "selsync"):
        assert any(line.startswith(name) for line in text.splitlines()), name
    assert "[1] dreamddp:due=delayed:wire=int4:period=10" in text
    assert "runs/20250102-030405-train/local-sgd/rep0/rank2.log" in text


@pytest.mark.parametrize("width", [60, 80, 100])
def test_predictions_for_a_device_are_a_sentence_of_every_width(run, width):
    rows = [replace(row, device_s=0.02) for row in ROWS[:2]]
    lines = render(run, rows, width).splitlines()
    assert "your device: ddp 20.0 ms, dreamddp [1] 20.0 ms" in " ".join(lines)
    assert max(map(len, lines)) <= width


def test_columns_by_width(run):
    heads = {width: render(run, ROWS, width).splitlines()[0].split() for width in (60, 80, 100)}
    assert heads[60] == ["strategy", "to", "loss", "iteration", "vs", "prediction"]
    assert heads[80] == [*heads[60][:4], "waits", "for", "vs", "prediction", "a", "host"]
    assert heads[100][-1] == "final"
    assert "predicted" in heads[100]


def test_a_target_with_blanks_in_its_name_has_a_column():
    """As in runs of earlier versions."""
    earlier = replace(DDP, target_loss=None, target_metric="top 1", target_value=0.9)
    assert ("to top 1", "0.9") in grid([earlier]).heads


def test_cells(run):
    first, second = render(run, ROWS, 100).splitlines()[3:5]
    assert first.split("   ", 1)[0] == "dreamddp [1]"
    assert "  20.0 s  " in first
    assert " 20 % " in first
    assert " 4.0" not in first  # a whole factor is 4×
    assert " 4× " in first
    assert "−4.0 %" in first
    assert first.endswith("2.400 ↓")
    assert "≈ 70 %" in second
    assert "~1×" in second
    assert "+30 %" in second


def test_rows_without_a_measurement_are_sentences_below(run):
    lines = render(run, ROWS, 100).splitlines()
    assert lines[5].split(None, 1) == ["local-sgd", FAILED.problem] or "rank 2" in lines[5]
    assert any(line.split() == ["selsync", "was", "not", "run"] for line in lines)
    assert "ddp was disturbed: other programs used 30 % of the processors. It does" in " ".join(
        lines
    )


def test_details_have_what_the_table_leaves_out():
    rows = [replace(DETAILED, bound_s=0.3, exposed_s=0.05, lssr=0.25, unevenness=1.6)]
    text = " ".join(render_details(rows, 70).split())
    for part in (
        "40 iterations to the target",
        "bound 300 ms",
        "predicted 480 ms, 50.0 ms of it waiting",
        "25 % of its averages omitted by votes",
        "busiest moment 1.60× its mean",
    ):
        assert part in text


def test_numbers_of_a_column_have_one_unit():
    column = words.column_of([0.797, 2.24, None])
    assert [column(x) for x in (0.797, 2.24, 12.2, None)] == ["0.797 s", "2.24 s", "12.2 s", "–"]
    assert words.column_of([0.097, 0.592])(0.097) == "97.0 ms"
    assert [words.error(x) for x in (0.003, -0.0512, -0.116, None)] == [
        "+0.3 %",
        "−5.1 %",
        "−12 %",
        "–",
    ]
    assert [words.percent(x) for x in (0.092, 0.004, 0.0)] == ["9 %", "0.4 %", "0 %"]
    assert [words.rate(x) for x in (25e6, 1.5e9, None)] == ["25 Mbit/s", "1.5 Gbit/s", "unlimited"]
