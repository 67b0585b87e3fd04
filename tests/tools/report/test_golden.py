"""Golden summaries: the numbers of `summary.json` for every kind of run.

`OFFBEAT_REWRITE_GOLDENS=1` writes tests/golden/summaries.json again.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from cases.report_runs import RUNS

GOLDEN = Path(__file__).parents[2] / "golden" / "summaries.json"
TEXTS = ("sentence", "reservations", "problems", "problem", "notes", "compute")


def facts_of(data: Any) -> Any:
    """The numbers, rounded; without sentences, and without what is unknown, false or empty."""
    if isinstance(data, dict):
        found = {name: facts_of(value) for name, value in data.items() if name not in TEXTS}
        return {name: value for name, value in found.items() if value not in (None, False, {}, [])}
    if isinstance(data, list):
        return [facts_of(value) for value in data]
    if not isinstance(data, float):
        return data
    return 0.0 if abs(data) < 1e-12 else float(f"{data:.6g}")


@pytest.mark.parametrize("name", RUNS)
def test_golden(name, page_of):
    data = json.loads((page_of(name).parent / "summary.json").read_text())
    goldens = json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {}
    found = facts_of(data)
    if os.environ.get("OFFBEAT_REWRITE_GOLDENS") == "1":
        goldens = {kind: goldens.get(kind) for kind in RUNS} | {name: found}
        text = json.dumps(goldens, indent=1)
        GOLDEN.write_text(re.sub(r"\[[^][{}]*\]", lambda m: " ".join(m[0].split()), text) + "\n")
    assert found == nearly(goldens[name])
    assert len(data["problems"]) == {"troubled": 7}.get(name, 0)


def nearly(data: Any) -> Any:
    """Equal to data whose floats differ by rounding."""
    if isinstance(data, dict):
        return {name: nearly(value) for name, value in data.items()}
    if isinstance(data, list):
        return [nearly(value) for value in data]
    return pytest.approx(data, rel=2e-5) if isinstance(data, float) else data
