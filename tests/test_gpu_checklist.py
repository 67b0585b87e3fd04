"""The page on GPUs, and the check-list for the first minutes on one, as far as a CPU can run it."""

from __future__ import annotations

import re

import pytest
from support import gpu_jobs
from support.scripts import ROOT, benchmark
from support.worlds import run_world

checklist = benchmark("gpu_checklist")

# ---- the page ---------------------------------------------------------------------------------


def test_every_finding_names_a_test_that_exists() -> None:
    """Of the page on GPUs: what was found, by which test it is kept away, and what is open."""
    page = (ROOT / "docs/accelerators.md").read_text()
    rows = re.findall(r"^\| ([A-D]\d) \|(.*)\|$", page, re.MULTILINE)
    assert [name for name, _ in rows] == [
        *(f"A{i}" for i in range(1, 9)),
        *(f"B{i}" for i in range(1, 9)),
        *(f"C{i}" for i in range(1, 6)),
        *(f"D{i}" for i in range(1, 9)),
    ]
    for name, row in rows:
        _, confidence, test, now = (cell.strip() for cell in row.split(" | "))
        found = re.fullmatch(r"`(?:(tests/[\w/]+\.py)::)?(test_\w+)`", test)
        if found is None:
            assert test.startswith("step "), name
            assert now.startswith("open"), name
            continue
        path = ROOT / (found[1] or "tests/runtime/test_accelerators.py")
        assert f"def {found[2]}(" in path.read_text(), name
        if confidence == "to be tried":
            assert path.name == "test_gpu.py", name


# ---- the check-list ---------------------------------------------------------------------------


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


def test_an_error_of_a_step_is_its_result(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(device: str) -> str:
        """something"""
        raise KeyError(device)

    monkeypatch.setitem(checklist.STEPS, 3, wrong)
    step = checklist.run_step(3, "cpu")
    assert (step.title, step.outcome, step.seen) == ("something", "FAILED", "KeyError: 'cpu'")


def test_two_ranks_of_the_check_list_train_alike() -> None:
    ended = checklist.run_ranks(2, "train", device="cpu", iterations=3)
    assert re.fullmatch(r"losses [\d.]+ to [\d.]+, [\d.]+ ms", checklist.require_alike(ended))
    failed = checklist.run_ranks(1, "train", device="cpu", strategy="none such")
    with pytest.raises(checklist.FailedError, match=r"rank 0 ended with 1: .*none such"):
        checklist.require_alike(failed)


def test_overlap_in_a_trace() -> None:
    spans = [("kernel", 0, 10), ("kernel", 5, 10), ("gpu_memcpy", 12, 8), ("cpu_op", 0, 99)]
    events = [{"ph": "X", "cat": cat, "ts": ts, "dur": dur} for cat, ts, dur in spans]
    expected = {"kernels_ms": 0.015, "copies_ms": 0.008, "overlap_ms": 0.003}
    assert checklist.busy_times(events) == pytest.approx(expected)


# ---- the tests on a GPU -----------------------------------------------------------------------


def test_what_ranks_do_on_a_gpu_runs_on_cpus() -> None:
    one, other = run_world(gpu_jobs.train, 2, ["wfbp", "dear"], ["lo"], "cpu", timeout_s=60.0)
    assert [found["bits"] for found in one] == [found["bits"] for found in other]
    assert all(found["losses"][-1] < 10 for found in one)
