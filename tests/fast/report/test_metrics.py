"""Metrics that a script reports: record, table, curves, and the time to a target."""

import json
import re
from types import SimpleNamespace

import pytest

import offbeat
from offbeat.cli import entry as cli
from offbeat.cli import texts
from offbeat.core.measuring.reported import set_receiver
from offbeat.experiments import report
from offbeat.experiments.report import metrics
from offbeat.experiments.report.losses import Curve
from offbeat.experiments.report.metrics import reach
from offbeat.profile import Bucket, Link, Profile

SCRIPT = """
import os
import torch
import offbeat

torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
model, optimizer = offbeat.prepare(model, optimizer)
for step in range(14):
    optimizer.zero_grad()
    torch.nn.functional.mse_loss(model(torch.ones(2, 4)), torch.ones(2, 1)).backward()
    optimizer.step()
    if step % 2:
        offbeat.report_metric("accuracy", torch.tensor(step / 20))
    if os.environ["RANK"] == "0":
        offbeat.report_metric("epoch", step)
model.consolidate()
"""


def curve(*values: float) -> Curve:
    return Curve(tuple(range(len(values))), tuple(map(float, range(len(values)))), values)


@pytest.mark.timeout(300)
@pytest.mark.usefixtures("forked_ranks")
def test_a_metric_is_recorded_shown_and_a_target(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT)
    buckets = (Bucket("all", 0.001, 0.002, 20, tensors=("weight", "bias")),)
    Profile(buckets, (Link("net", 0.001, 1e7),), 2).save("profile.json")
    place = ("--lab", "none", "--hosts", "2", "--strategies", "ddp,bsp", "--repeat", "1")
    argv = ["compare", *place, "--keep-disturbed", "--target", "accuracy=.4", "--out", "out"]
    argv += ["--profile", "profile.json"]
    assert cli.main([*argv, "train.py"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^strategy +to accuracy", out, re.MULTILINE)
    assert re.search(r"^ +0\.4 ", out, re.MULTILINE)
    assert re.search(r"reach(es)? accuracy 0\.4", " ".join(out.split()))
    rows = report.summarize(report.load(tmp_path / "out"))
    assert {row.label: row.target_iterations for row in rows} == {"ddp": 10, "bsp": 10}
    assert all(row.target_s is not None and row.target_loss is None for row in rows)
    assert [dict(row.metrics) for row in rows] == [
        {"accuracy": pytest.approx(0.65), "epoch": 13}
    ] * 2
    (curves,) = json.loads((tmp_path / "out" / "summary.json").read_text())["curves"]["ddp"]
    assert curves["accuracy"]["iterations"] == [2, 4, 6, 8, 10, 12, 14]
    assert curves["accuracy"]["values"][0] == pytest.approx(0.05)
    assert len(curves["epoch"]["seconds"]) == 14
    page = (tmp_path / "out" / "report.html").read_text()
    for name, lines in (("accuracy", 2), ("epoch", 2)):
        assert f">{name} against time</h2>" in page
        drawn = page.partition(f'aria-label="{name} against seconds"')[2].partition("</svg>")[0]
        assert drawn.count('<path class="line') == lines
    assert '<th role="columnheader" scope="col">to accuracy 0.4</th>' in page
    assert "<small>accuracy 0.6500</small>" in page


def test_a_target_is_reached_from_either_side():
    assert reach(curve(0.1, 0.5, 0.9), 0.5, rising=True) == (1, 1.0)
    assert reach(curve(9.0, 5.0, 4.0), 5.0, rising=False) == (1, 1.0)
    assert reach(curve(0.1, 0.2), 0.5, rising=True) is None
    assert reach(curve(), 0.5, rising=True) is None
    assert reach(curve(0.6, 0.9, 0.4), 0.5, rising=True) == (0, 0.0)
    assert reach(curve(4.0, 3.0, 6.0), 5.0, rising=False) == (0, 0.0)


@pytest.mark.parametrize(
    ("runs", "target", "rising"),
    [
        ([(0.1, 0.9), (0.2, 0.8)], 0.5, True),
        ([(0.972, 0.98), (0.96, 0.971)], 0.97, True),
        ([(9.0, 4.0)], 5.0, False),
        ([(4.1, 3.0), (4.2, 3.1)], 4.3, False),
        ([(0.5, 0.5)], 0.97, True),
    ],
)
def test_the_direction_of_a_metric_is_that_of_all_runs(monkeypatch, runs, target, rising):
    monkeypatch.setattr(metrics, "metric_curve", lambda rep, _: curve(*rep))
    assert metrics.rises([SimpleNamespace(complete=runs)], "accuracy", target) is rising


def test_metrics_outside_of_a_run_are_discarded():
    set_receiver(None)
    offbeat.report_metric("accuracy", 1)
    for name in ("loss", "", "two words"):
        with pytest.raises(ValueError, match=r"must be a word other than loss"):
            offbeat.report_metric(name, 1)
    with pytest.raises((TypeError, ValueError)):
        offbeat.report_metric("accuracy", "high")


def test_targets_on_the_command_line(capsys):
    assert texts.parse_target("accuracy=.97", None) == (("accuracy", 0.97), None)
    assert texts.parse_target("loss=4.3", None) == (None, 4.3)
    assert texts.parse_target(None, 4.3) == (None, 4.3)
    assert "--target-loss is replaced by --target loss=4.3" in capsys.readouterr().err
    for text in ("accuracy", "accuracy=high", "=1", "accuracy=nan"):
        with pytest.raises(ValueError, match="must be a metric and a number"):
            texts.parse_target(text, None)
    with pytest.raises(ValueError, match="give one"):
        texts.parse_target("loss=1", 2.0)


def test_targets_may_have_blanks_around_the_sign_and_not_in_the_name():
    assert texts.parse_target("loss = 4.3", None) == (None, 4.3)
    assert texts.parse_target(" accuracy = .97 ", None) == (("accuracy", 0.97), None)
    with pytest.raises(ValueError, match="must be a metric and a number"):
        texts.parse_target("top 1=.9", None)
