"""Exports of a run: CSV, LaTeX and SVG hold the numbers of the summary."""

from __future__ import annotations

import csv
import io
import re
from xml.etree import ElementTree

import pytest
from cases.synthetic_runs import profile, three, write_run
from cases.tiny_runs import dump, record, steady, write_tiny

from offbeat.cli import entry as cli
from offbeat.experiments.report import export, load, rank_rows, summarize

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    facts = profile(4, 2)
    path = tmp_path_factory.mktemp("exported") / "run"
    return load(write_run(path, facts, three(facts), iterations=60))


def with_metric(rank: int, seconds: float, accuracy: float):
    """Record of 20 iterations that reports a metric in each tenth."""
    ends = steady(seconds, 20)
    points = [[i, ends[i], accuracy * (i + 1) / 20] for i in (9, 19)]
    return record(rank, ends, [3.0 - i / 10 for i in range(20)], metrics={"top_1%": points})


@pytest.fixture
def troubled(tmp_path):
    """A disturbed strategy, one whose second repetition failed, and one that was not run."""
    reps = [[with_metric(0, 1.0, 0.5)], [with_metric(0, 1.2, 0.7)]]
    write_tiny(tmp_path, {"ddp": reps, "bsp_2": reps[:1], "local-sgd": []})
    dump(tmp_path / "ddp/rep0/load.json", {"disturbed": 1.0, "foreign": 0.6})
    (tmp_path / "bsp_2/rep1").mkdir()
    (tmp_path / "bsp_2/rep1/rank0.log").write_text("Traceback\n")
    return load(tmp_path)


def lines_of(run):
    return list(csv.DictReader(io.StringIO(export(run, "csv"))))


def test_csv_has_a_line_per_repetition_whose_medians_are_those_of_the_table(run):
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


def test_csv_says_what_failed_and_what_was_disturbed(troubled):
    lines = lines_of(troubled)
    found = [(line["strategy"], line["state"], line["disturbed"]) for line in lines]
    assert found == [
        ("ddp", "measured", "True"),
        ("ddp", "measured", "False"),
        ("bsp_2", "measured", "False"),
        ("bsp_2", "failed", "False"),
        ("local-sgd", "not run", "False"),
        ("local-sgd", "not run", "False"),
    ]
    assert [line["final_top_1%"] for line in lines] == ["0.5", "0.7", "0.5", "", "", ""]
    assert [bool(line["problem"]) for line in lines] == [False, False, False, True, False, False]


def test_latex_is_the_table(run, troubled):
    text = export(run, "latex")
    body = text.partition("\\midrule\n")[2].partition("\\bottomrule")[0].splitlines()
    assert [line.split(" & ")[0] for line in body] == [
        row.label for row in rank_rows(summarize(run))
    ]
    columns = len(re.findall("[lr]", re.findall(r"\{tabular\}\{([lr]+)\}", text)[0]))
    assert {line.count(" & ") for line in body} == {columns - 1}
    text = export(troubled, "latex")
    assert "\nddp \\textasciitilde{} & " in text
    assert "\nbsp\\_2 & " in text
    assert "final top\\_1\\%" in text
    assert re.search(r"\nlocal-sgd & not measured & .*\\\\ % was not run\n", text)
    assert re.search(r"^% ~ ddp was disturbed in 1 of 2 repetitions", text, re.MULTILINE)


def test_svg_has_bars_in_proportion_and_a_panel_per_curve(run, troubled):
    root = ElementTree.fromstring(export(run, "svg"))
    panels = {panel.get("id"): panel for panel in root.findall(f"{SVG}g")}
    assert [*panels] == ["iteration", "loss"]
    rects = [r for r in panels["iteration"].findall(f"{SVG}rect") if r.get("height") == "16"]
    texts = [text.text for text in panels["iteration"].findall(f"{SVG}text")]
    widths, left = [], {}
    for rect in rects:
        left.setdefault(rect.get("y"), []).append(float(rect.get("width")))
    widths = [sum(parts) for parts in left.values()]
    rows = rank_rows(summarize(run))
    for row, width in zip(rows, widths, strict=True):
        scale = widths[0] / rows[0].iteration_s
        assert width / scale == pytest.approx(row.iteration_s, rel=0.01)
        assert row.label in texts
    drawn = panels["loss"].find(f"{SVG}svg").findall(f"{SVG}path")
    assert sum(float(path.get("stroke-width", 0)) > 1.5 for path in drawn) == 3
    root = ElementTree.fromstring(export(troubled, "svg"))
    assert [panel.get("id") for panel in root.findall(f"{SVG}g")] == ["iteration", "loss", "top_1%"]
    texts = [text.text for text in root.iter(f"{SVG}text")]
    assert "ddp ~" in texts
    assert "was not run" in texts
    assert any("disturbed" in text for text in texts)


def test_the_command_writes_where_it_is_told(run, tmp_path, capsys):
    place = ["report", str(run.path)]
    assert cli.main([*place, "--export", "csv"]) == 0
    printed = capsys.readouterr().out
    assert cli.main([*place, "--export", "csv", "--output", str(tmp_path / "a.csv")]) == 0
    assert (tmp_path / "a.csv").read_text() == printed == export(run, "csv")
    for wrong in (["--output", "x"], ["--export", "csv", "--json"], ["--export", "pdf"]):
        assert cli.main([*place, *wrong]) == 2
