"""Pages of run directories, written once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from cases.report_runs import RUNS
from offbeat.experiments.report import write


@pytest.fixture(scope="session")
def page_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return the page of a run in `RUNS`; tests do not change its folder."""
    pages: dict[str, Path] = {}

    def page_of(name: str) -> Path:
        if name not in pages:
            pages[name] = write(RUNS[name](tmp_path_factory.mktemp("runs") / name))
        return pages[name]

    return page_of
