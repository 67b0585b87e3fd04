"""Exports of a run: CSV holds the numbers of the summary."""

from __future__ import annotations

import csv
import io

import pytest

from offbeat.cli import entry as cli
from offbeat.experiments.report import export, load, summarize


def lines_of(run):
    return list(csv.DictReader(io.StringIO(export(run, "csv"))))


def test_csv_has_a_line_per_repetition_whose_medians_are_those_of_the_summary(page_of):
    run = load(page_of("typical").parent)
    lines = lines_of(run)
    assert [(line["strategy"], line["repetition"]) for line in lines] == [
        (label, str(rep)) for label in ("ddp", "local-sgd-5", "dreamddp-5") for rep in range(2)
    ]
    for row in summarize(run):
        own = [line for line in lines if line["strategy"] == row.label]
        for column, value in (
            ("iteration_s", row.iteration_s),
            ("to_target_s", row.target_s),
            ("sent_bytes_per_iteration", row.sent_bytes),
            ("final_loss", row.final_loss),
            ("predicted_iteration_s", row.predicted_s),
        ):
            assert sum(float(line[column]) for line in own) / 2 == pytest.approx(value), column
        for line in own:
            parts = [line[f"{n}_s"] for n in ("computes", "waits_for_messages", "waits_for_hosts")]
            assert sum(map(float, parts)) == pytest.approx(float(line["iteration_s"]), rel=0.2)


def test_csv_states_what_failed_and_what_was_disturbed(page_of):
    lines = lines_of(load(page_of("troubled").parent))
    shown = ("state", "disturbed", "final_top_1%")
    found = {(line["strategy"], line["repetition"]): tuple(map(line.get, shown)) for line in lines}
    assert found["ddp", "0"] == ("measured", "True", "0.5")
    assert found["ddp", "1"] == ("measured", "False", "0.7")
    assert found["bsp_2", "1"] == ("failed", "False", "")
    assert found["gone", "0"] == ("not run", "False", "")
    assert [line["strategy"] for line in lines if line["problem"]] == ["bsp_2"]


def test_the_command_writes_where_it_is_told(page_of, tmp_path, capsys):
    path = page_of("votes").parent
    place = ["report", str(path), "--export"]
    assert cli.main([*place, "csv"]) == 0
    printed = capsys.readouterr().out
    assert cli.main([*place, "csv", "--output", str(tmp_path / "a.csv")]) == 0
    assert (tmp_path / "a.csv").read_text() == printed == export(load(path), "csv")
    assert cli.main([*place[:2], "--output", "x"]) == cli.main([*place, "pdf"]) == 2
