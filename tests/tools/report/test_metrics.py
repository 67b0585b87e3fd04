"""Metrics that a script reports: recorded by real processes, a target, a curve of the page."""

from __future__ import annotations

import json

import pytest
from cases.pages import comparison_of, read

import offbeat
from offbeat.cli import entry as cli
from offbeat.cli import texts
from offbeat.experiments import report
from offbeat.jobs.reported import set_receiver
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


@pytest.mark.timeout(300)
@pytest.mark.usefixtures("forked_ranks")
def test_a_metric_is_recorded_shown_and_a_target(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT)
    buckets = (Bucket("all", 0.001, 0.002, 20, tensors=("weight", "bias")),)
    Profile(buckets, (Link("net", 0.001, 1e7),), 2).save("profile.json")
    argv = ["compare", "--lab", "none", "--hosts", "2", "--strategies", "ddp,bsp", "--repeat", "1"]
    argv += ["--keep-disturbed", "--target", "accuracy=.4", "--out", "out"]
    assert cli.main([*argv, "--profile", "profile.json", "train.py"]) == 0
    rows = report.summarize(report.load(tmp_path / "out"))
    assert {row.label: row.target_iterations for row in rows} == {"ddp": 10, "bsp": 10}
    assert all(row.target_s is not None and row.target_loss is None for row in rows)
    last = {"accuracy": pytest.approx(0.65), "epoch": 13}
    assert [dict(row.metrics) for row in rows] == [last] * 2
    [curves] = json.loads((tmp_path / "out" / "summary.json").read_text())["curves"]["ddp"]
    assert curves["accuracy"]["iterations"] == [2, 4, 6, 8, 10, 12, 14]
    assert curves["accuracy"]["values"][0] == pytest.approx(0.05)
    assert len(curves["epoch"]["seconds"]) == 14
    root = read(tmp_path / "out" / "report.html")
    for name in ("accuracy", "epoch"):
        [chart, _] = [c for c in root.all("div", "chart") if name in c.attributes["aria-label"]]
        assert len(chart.all("path", "line")) == 2
    assert all("0.6500" in cells["k6"].text for cells in comparison_of(root).values())


def test_metrics_outside_of_a_run_are_discarded_and_names_are_checked():
    set_receiver(None)
    offbeat.report_metric("accuracy", 1)
    for name in ("loss", "", "two words"):
        with pytest.raises(ValueError, match=rf"'{name}'|loss"):
            offbeat.report_metric(name, 1)
    with pytest.raises((TypeError, ValueError)):
        offbeat.report_metric("accuracy", "high")


def test_targets_on_the_command_line():
    for text, expected in (
        ("accuracy=.97", (("accuracy", 0.97), None)),
        (" accuracy = .97 ", (("accuracy", 0.97), None)),
        ("loss=4.3", (None, 4.3)),
        (None, (None, None)),
    ):
        assert texts.parse_target(text) == expected
    for text in ("accuracy", "accuracy=high", "=1", "accuracy=nan", "top 1=.9"):
        with pytest.raises(ValueError, match="target"):
            texts.parse_target(text)
