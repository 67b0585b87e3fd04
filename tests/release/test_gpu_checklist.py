"""The check-list for the first minutes on a GPU, as far as a CPU can run it."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cases import gpu_jobs
from cases.scripts import ROOT, benchmark
from harness.commands import ForkedPython
from harness.ranks import run_ranks, watch_ranks

from offbeat.cli import app
from offbeat.cli.entry import mark_script

checklist = benchmark("gpu_checklist")


def test_every_step_of_the_check_list_is_on_the_page() -> None:
    page = (ROOT / "docs/accelerators.md").read_text()
    steps = [
        int(number)
        for cell in re.findall(r"^\| ([\d, ]+) \|", page, re.MULTILINE)
        for number in cell.split(",")
    ]
    assert steps == [*checklist.STEPS]


def test_steps_that_need_gpus_are_skipped_without_one() -> None:
    outcomes = {n: checklist.run_step(n, "cpu").outcome for n in (1, 2, 4, 6, 7)}
    assert outcomes == {1: "ok", 2: "skipped", 4: "skipped", 6: "skipped", 7: "skipped"}


def test_options_of_the_check_list(tmp_path: Path) -> None:
    assert checklist.main(["--device", "cpu", "--only", "1,4", "--json", f"{tmp_path}/seen"]) == 0
    seen = json.loads((tmp_path / "seen").read_text())
    assert [(step["number"], step["outcome"]) for step in seen] == [(1, "ok"), (4, "skipped")]
    with pytest.raises(SystemExit):
        checklist.main(["--device", "cpu", "--only", "17"])


def test_the_check_list_starts_and_disturbs_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """In processes of their own, as on a GPU, but without an import of torch for each."""
    names = {"STDOUT": subprocess.STDOUT, "TimeoutExpired": subprocess.TimeoutExpired}
    monkeypatch.setattr(checklist, "subprocess", SimpleNamespace(Popen=ForkedPython, **names))
    assert "exit 1" in checklist.lost_rank("cpu", ["lo"], signal.SIGKILL)
    lost = [checklist.Ended(0, {"digest": "a"}, ""), checklist.Ended(None, None, "last words")]
    with pytest.raises(checklist.FailedError, match="last words"):
        checklist.require_alike(lost)


# ---- its work, in forked processes ------------------------------------------------------------


def work(name: str, arguments: dict[str, Any], variables: dict[str, str]) -> str:
    """Do the work of a rank, and return its output."""
    os.environ.update(variables)
    script = benchmark("gpu_checklist")
    script.ITERATIONS = 3
    compiled = torch.compile
    torch.compile = lambda module: compiled(module, backend="eager")
    with contextlib.redirect_stdout(io.StringIO()) as output:
        script.WORK[name](**arguments)
    return output.getvalue()


def run_forked(ranks: int, name: str, **settings: Any) -> list[Any]:
    """Run work of the check-list as `run_ranks` does."""
    variables = {key: str(value) for key, value in settings.items() if key.isupper()}
    arguments = {key: value for key, value in settings.items() if not key.isupper()}
    world = watch_ranks(ranks, work, name, arguments, variables)
    return [
        checklist.Ended(int(bool(one.kind)), checklist.result_of(one.result or ""), one.traceback)
        for one in world
    ]


@pytest.mark.parametrize("number", [3, 5, 10, 11, 13, 14, 15])
def test_steps_that_run_on_a_cpu(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checklist, "run_ranks", run_forked)
    monkeypatch.setattr(checklist, "STRATEGIES", ["wfbp:wire=int8"])
    step = checklist.run_step(number, "cpu")
    assert step.outcome == "ok", step.seen


def test_the_comparison_of_the_check_list(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command line knows its options, and the script trains."""
    paces = list[str]()

    def compare(command: Sequence[str], **_: Any) -> Any:
        assert command[1:3] == ["-m", "offbeat"]
        function, *_ = app.parse_args(
            mark_script([*command[3:]]), exit_on_error=False, print_error=False
        )
        assert function.__name__ == "compare"
        paces.append(command[command.index("--pace") + 1])
        script, out = Path(command[-1]), Path(command[command.index("--out") + 1])
        if len(paces) == 1:
            run_ranks(1, run_text, script.read_text())
        out.mkdir()
        row = {"label": "wfbp", "iteration_s": 0.25}
        (out / "summary.json").write_text(json.dumps({"rows": [row]}))
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(checklist.subprocess, "run", compare)
    step = checklist.run_step(12, "cpu")
    assert step.outcome == "ok", step.seen
    assert paces == ["auto", "none"]


def run_text(script: str) -> None:
    exec(compile(script, "train.py", "exec"), {})


def test_overlap_in_a_trace() -> None:
    spans = [("kernel", 0, 10), ("kernel", 5, 10), ("gpu_memcpy", 12, 8), ("cpu_op", 0, 99)]
    events = [{"ph": "X", "cat": cat, "ts": ts, "dur": dur} for cat, ts, dur in spans]
    expected = {"kernels_ms": 0.015, "copies_ms": 0.008, "overlap_ms": 0.003}
    assert checklist.busy_times(events) == pytest.approx(expected)


# ---- the tests on a GPU -----------------------------------------------------------------------


def test_what_ranks_do_on_a_gpu_runs_on_cpus() -> None:
    one, other = run_ranks(2, gpu_jobs.train, ["wfbp", "dear"], ["lo"], "cpu", timeout_s=60.0)
    assert [found["bits"] for found in one] == [found["bits"] for found in other]
    assert all(found["losses"][-1] < 10 for found in one)
